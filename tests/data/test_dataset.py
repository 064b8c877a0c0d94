"""Splits, views, transforms and what is done about bad images."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import image_bytes, images, x_of
from torch.utils.data import DataLoader

import oars.data
from oars.data import split
from oars.data.errors import DataError
from oars.data.transforms import center_crop, flip, normalize, random_crop, random_resized_crop, resize


@pytest.fixture
def table(tmp_path):
    lines = ["x,who,kind"] + [f"{i},p{i % 7},{'abc'[i % 10 // 4]}" for i in range(100)]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    return oars.data.open(tmp_path / "a.csv", columns=["x"], label="kind")


@settings(max_examples=200, deadline=None)
@given(rows=st.integers(0, 60), cuts=st.lists(st.floats(0.01, 1), min_size=1, max_size=5), seed=st.integers(0, 9),
       by=st.sampled_from(split.WAYS), values=st.integers(1, 6))
def test_every_row_is_in_exactly_one_part(rows, cuts, seed, by, values):
    shares = [cut / sum(cuts) for cut in cuts]
    column = np.random.default_rng(seed).integers(0, values, rows)
    parts = split.parts(rows, shares, by, column, seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(rows))
    again = split.parts(rows, shares, by, column, seed)
    assert all(map(np.array_equal, parts, again))
    if by == "group":
        assert all(len({at for at, part in enumerate(parts) if (column[part] == value).any()}) <= 1
                   for value in range(values))
    else:
        assert all(abs(len(part) - share * rows) <= 1 for part, share in zip(parts, shares, strict=True))
    if by == "stratified":
        for value in range(values):
            total = (column == value).sum()
            assert all(abs((column[part] == value).sum() - share * total) <= values + 1
                       for part, share in zip(parts, shares, strict=True))


def test_splits_are_views_with_labels(table):
    train, valid, test = table.split(0.8, 0.1, 0.1, by="stratified", seed=1)
    assert [len(part) for part in (train, valid, test)] == [80, 10, 10]
    assert np.bincount(test.numpy()[1]).tolist() == [4, 4, 2]
    other, _ = table.split(0.5, 0.5, seed=2)
    first, _ = table.split(0.5, 0.5, seed=1)
    assert other.numpy()[0].tolist() != first.numpy()[0].tolist()
    groups = table.split(0.6, 0.4, by="group", column="who")
    who = [{f"p{int(x) % 7}" for x, _ in part} for part in groups]
    assert not who[0] & who[1] and len(groups[0]) + len(groups[1]) == 100
    half = table.split(0.25, by="order")[0]
    assert half.numpy()[0].tolist() == list(range(25)) and half[5:][0][0] == 5 and half[[1, 2]][1][0] == 2
    assert len(table[np.arange(100) < 7]) == 7


def test_what_cannot_be_split_is_said(table):
    for args, how, text in (((0.9, 0.2), {}, "make up at most 1"), ((0.5,), {"by": "size"}, "by='size' is not one of"),
                            ((0.5,), {"by": "group"}, "needs column="), ((1,), {"by": "group", "column": "z"}, "'z'"),
                            ((1,), {"by": "group", "column": [1, 2]}, "2 values for 100 rows")):
        with pytest.raises(ValueError, match=text):
            table.split(*args, **how)


def test_one_column_or_several_or_none(tmp_path):
    (tmp_path / "a.csv").write_text("a,b,t\n1,2.5,x\n3,4.5,y\n")
    assert oars.data.open(tmp_path / "a.csv", columns=["a"])[1] == 3
    assert oars.data.open(tmp_path / "a.csv", columns=["b", "a"])[1].tolist() == [4.5, 3.0]
    mixed = oars.data.open(tmp_path / "a.csv")
    assert mixed[1] == {"a": 3, "b": 4.5, "t": "y"} and mixed.values("b").tolist() == [2.5, 4.5]
    batch = next(iter(DataLoader(mixed, batch_size=2)))
    assert batch["t"] == ["x", "y"] and batch["b"].tolist() == [2.5, 4.5]
    with pytest.raises(ValueError, match="nothing is left besides the label a"):
        oars.data.open(tmp_path / "a.csv", columns=["a"], label="a")
    with pytest.raises(ValueError, match=r"columns='a': give a list, \['a'\]"):
        oars.data.open(tmp_path / "a.csv", columns="a")


# ---- images ----------------------------------------------------------------------------------------------------------


def test_transforms_bring_images_to_one_size(tmp_path):
    data = oars.data.open(images(tmp_path, 7)[0])
    assert data.classes == ["class0", "class1", "class2"] and data.shape is None
    with pytest.raises(DataError, match="samples differ in shape"):
        data.numpy()
    x, y = data.transform(resize(8), center_crop(6), normalize()).numpy()
    assert x.shape == (7, 3, 6, 6) and x.dtype == np.float32 and y.tolist() == [0, 0, 0, 1, 1, 2, 2]
    red = (0 / 255 - 0.485) / 0.229
    assert x[0, 0, 0, 0] == pytest.approx(red, abs=1e-5)
    wide = data.transform(resize((4, 9)))[3][0]
    assert wide.shape == (4, 9, 3)
    for steps in ((random_resized_crop(5), flip()), (resize(8), random_crop((4, 7))), (lambda pixels: pixels[:2, :2],)):
        sizes = {sample[0].shape for sample in data.transform(*steps)}
        assert len(sizes) == 1
    with pytest.raises(DataError, match="00000.JPEG: an image of 4 x 5 is smaller than the crop of 6 x 6"):
        data.transform(center_crop(6))[0]
    mirrored = data.transform(flip(1.0))[0][0]
    np.testing.assert_array_equal(mirrored, data[0][0][:, ::-1])


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", ">f4", "bool"])
def test_a_flip_is_the_mirror_image_whatever_the_pixels_are(dtype):
    whole = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, (9, 40, 3)).astype(dtype)
    kept = whole.copy()
    frozen = whole.copy()
    frozen.flags.writeable = False
    for pixels in (whole, frozen, whole[2:7, 3:30], whole[::-1], whole[:, ::-2], whole[..., :1], whole[:, :0]):
        mirrored = flip(1.0)(pixels, np.random.default_rng(0))
        assert mirrored.dtype == pixels.dtype and mirrored.flags.c_contiguous and mirrored.flags.writeable
        np.testing.assert_array_equal(mirrored, pixels[:, ::-1])
        assert not np.shares_memory(mirrored, pixels)
    np.testing.assert_array_equal(whole, kept)


@pytest.fixture
def spoilt(tmp_path):
    path = tmp_path / "pictures"
    images(tmp_path, 9)
    (path / "class0" / "00003.JPEG").write_bytes(b"")
    (path / "class2" / "00005.JPEG").write_bytes(image_bytes(5)[:45])
    (path / "class1" / "00004.JPEG").write_text("<html>404</html>")
    return path


def test_a_bad_image_is_named(spoilt):
    data = oars.data.open(spoilt)
    assert data[0][1] == 0
    with pytest.raises(DataError, match="00003.JPEG: an empty file"):
        data[1]
    with pytest.raises(DataError, match="00004.JPEG: .*cannot be decoded"):
        data[4]


def test_bad_images_are_left_out_found_once_and_counted(spoilt, monkeypatch):
    data = oars.data.open(spoilt, on_bad="quarantine")
    assert [label for _, label in data] == [0, 0, 1, 1, 2, 2]
    assert "9" not in data.summary() and "3 bad rows left out" in data.summary()
    listed = [json.loads(line) for line in (spoilt.parent / "pictures.bad.jsonl").read_text().splitlines()]
    assert [line["file"][-10:] for line in listed] == ["00003.JPEG", "00004.JPEG", "00005.JPEG"]
    monkeypatch.setattr("oars.data.opening._check", lambda *_: pytest.fail("looked again"))
    assert len(oars.data.open(spoilt, on_bad="skip")) == 6


def test_rows_in_damaged_chunks_are_left_out(tmp_path):
    import h5py

    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("x", data=x_of(40), chunks=(5, 3), compression="gzip", fletcher32=True)
        where = made.id.get_chunk_info(3).byte_offset
    raw = bytearray((tmp_path / "a.h5").read_bytes())
    raw[where + 8] ^= 255
    (tmp_path / "a.h5").write_bytes(raw)
    with pytest.raises(DataError, match=rf"a.h5: x, row 15, byte {where}: a damaged chunk"):
        oars.data.open(tmp_path / "a.h5").numpy()
    data = oars.data.open(tmp_path / "a.h5", on_bad="skip")
    assert data.numpy()[:, 0].tolist() == [*range(15), *range(20, 40)] and len(data.bad) == 5


def test_a_list_that_cannot_be_written_is_said(spoilt):
    (spoilt.parent / "pictures.bad.jsonl").mkdir()
    with pytest.raises(DataError, match="pictures.bad.jsonl: the list of bad rows cannot be written here"):
        oars.data.open(spoilt, on_bad="quarantine")
