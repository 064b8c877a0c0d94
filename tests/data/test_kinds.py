"""Every kind of file: the rows that were written come back, however they are asked for, for any rank's share."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import IMAGES, KINDS, x_of, y_of
from torch.utils.data import DataLoader, Dataset

import oars.data

ROWS = 23  # divides by nothing


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Every kind, opened once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OARS_CACHE", str(tmp_path_factory.mktemp("cache")))
        return {name: open_kind(name, tmp_path_factory.mktemp(name), ROWS) for name in [*KINDS, *IMAGES]}


def open_kind(name, folder, rows):
    path, options = {**KINDS, **IMAGES}[name](folder, rows)
    return oars.data.open(path, **options)


def order(name, rows=ROWS):
    """Where rows have another order in the file: by class."""
    by_class = name in ("hdf5_per_class", "images")
    return np.argsort(y_of(rows), kind="stable") if by_class else np.arange(rows)


def check(name, data, rows, samples):
    """``samples`` are those of the rows numbered ``rows``."""
    assert len(samples) == len(rows)
    for row, sample in zip(rows, samples, strict=True):
        i = order(name)[row]
        x, y = sample if isinstance(sample, tuple) else (sample, None)
        if name in IMAGES:
            assert x.shape == (4 + i % 3, 5, 3) and x[0, 0].tolist() == [i % 256, i // 256, i % 3]
        else:
            np.testing.assert_array_equal(x, x_of(ROWS)[i])
            assert x.dtype == np.float32 and x.flags.writeable
        assert y is None or y == i % 3


@pytest.mark.parametrize("name", [*KINDS, *IMAGES])
def test_what_was_written_is_read(opened, name):
    data = opened[name]
    assert isinstance(data, Dataset) and len(data) == ROWS
    check(name, data, range(ROWS), list(data))
    check(name, data, range(ROWS), [data[i] for i in range(ROWS)])
    check(name, data, [ROWS - 1, 0, 7, 7, 3], data.__getitems__([ROWS - 1, 0, 7, 7, 3]))
    check(name, data, [ROWS - 1], [data[-1]])
    check(name, data, range(3, 11), list(data[3:11]))
    check(name, data, range(20, 2, -4), list(data[20:2:-4]))
    check(name, data, [9, 2], list(data[[9, 2]]))
    with pytest.raises(IndexError, match=f"row {ROWS} of {ROWS}"):
        data[ROWS]
    if name in KINDS:
        whole = data.numpy()
        x, y = whole if isinstance(whole, tuple) else (whole, order(name) % 3)
        np.testing.assert_array_equal(x, x_of(ROWS)[order(name)])
        np.testing.assert_array_equal(y, y_of(ROWS)[order(name)])
        assert data.shape == (ROWS, 3) and data.dtype == np.float32


@pytest.mark.parametrize("name", [*KINDS, *IMAGES])
@settings(max_examples=25, deadline=None)
@given(ranks=st.integers(1, 9), batch=st.integers(1, ROWS + 3), seed=st.integers(0, 99))
def test_any_number_of_ranks_reads_every_row_once(opened, name, ranks, batch, seed):
    """Batches of shuffled rows, each cut into contiguous shares: together the ranks get all rows, in order."""
    data = opened[name]
    shuffled = np.random.default_rng(seed).permutation(ROWS).tolist()
    for start in range(0, ROWS, batch):
        rows = shuffled[start : start + batch]
        cuts = [len(rows) * rank // ranks for rank in range(ranks + 1)]
        shares = [data.__getitems__(rows[a:b]) if b > a else [] for a, b in zip(cuts, cuts[1:], strict=False)]
        check(name, data, rows, [sample for share in shares for sample in share])


@pytest.mark.parametrize("name", [*KINDS, *IMAGES])
def test_a_pickled_copy_reads_the_same(opened, name):
    check(name, None, [5, 1], pickle.loads(pickle.dumps(opened[name])).__getitems__([5, 1]))


@pytest.mark.parametrize("name", ["csv_quoted", "hdf5_chunked", "hdf5_library", "netcdf4", "parquet", "tar_shards"])
def test_loader_workers_read_the_same(opened, name):
    """Forked after the parent has read, so that an open file would be shared."""
    data = opened[name]
    data[0]
    loader = DataLoader(data, batch_size=4, num_workers=2, collate_fn=list)
    check(name, data, range(ROWS), [sample for batch in loader for sample in batch])


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("name", KINDS)
def test_files_without_rows_or_with_one(name, tmp_path, rows):
    if name == "csv_headless_gz" and rows == 0:
        with pytest.raises(oars.data.DataError, match="no rows in it, not even a header"):
            open_kind(name, tmp_path, 0)
        return
    data = open_kind(name, tmp_path, rows)
    assert len(data) == rows and len(data[:0]) == 0
    found = [sample[0] if isinstance(sample, tuple) else sample for sample in data]
    np.testing.assert_array_equal(np.reshape(found, (rows, 3)), x_of(rows))
    assert np.shape(data.numpy()[0] if isinstance(data.numpy(), tuple) else data.numpy()) == (rows, 3)


@pytest.mark.parametrize("name", ["NUMPY", "bytes"])
def test_a_file_of_no_known_kind_is_named(tmp_path, name):
    (tmp_path / "odd").write_bytes(b"\x93NUMP\0\0\0" if name == "NUMPY" else bytes(range(200)))
    with pytest.raises(oars.data.DataError, match="odd: none of the kinds of file"):
        oars.data.open(tmp_path / "odd")


def test_nothing_there_is_said_in_one_line(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    reasons = {"nowhere.csv": "no such file", "empty": "is empty", "folder": "is empty", "*.x": "no file has"}
    for path, text in reasons.items():
        with pytest.raises(oars.data.DataError, match=text) as error:
            oars.data.open(tmp_path / path)
        assert "\n" not in str(error.value) and path in str(error.value)


def test_options_that_mean_nothing_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", x_of(3))
    with pytest.raises(ValueError, match="delimiter= means nothing for .*a.npy, which is npy"):
        oars.data.open(tmp_path / "a.npy", delimiter=";")
    with pytest.raises(ValueError, match="on_bad='drop' is not one of raise, skip, quarantine"):
        oars.data.open(tmp_path / "a.npy", on_bad="drop")
    with pytest.raises(ValueError, match="no column 'z'; it has data"):
        oars.data.open(tmp_path / "a.npy", label="z")
