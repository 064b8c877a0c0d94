"""No file makes us run code, write outside its place, or use memory without bound."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import tarfile
import zipfile

import numpy as np
import pytest
from made import idx_bytes, image_bytes, text

import oars.data
from oars.data.errors import DataError


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_runs_no_code(tmp_path, protocol):
    arrays = (np.zeros((2, 3)), np.zeros(2))
    for at, held in enumerate(((arrays, Evil(str(tmp_path / "made"))), [Evil(str(tmp_path / "made")), arrays])):
        raw = pickle.dumps(held, protocol)
        (tmp_path / f"{at}.pkl.gz").write_bytes(gzip.compress(raw))
        with pytest.raises(DataError, match="only arrays are read|none of the kinds|wrong number|no rows|pkl"):
            oars.data.open(tmp_path / f"{at}.pkl.gz")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_pickle_of_arrays_is_read(tmp_path, protocol):
    held = {"x": np.arange(6.0).reshape(3, 2), "y": np.asfortranarray(np.arange(6, dtype=">i2").reshape(3, 2))}
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(held, protocol))
    data = oars.data.open(tmp_path / "a.pkl")
    assert data[2]["x"].tolist() == [4, 5] and data[2]["y"].tolist() == [4, 5]
    (tmp_path / "o.pkl").write_bytes(pickle.dumps((np.array([[], None], object), np.zeros(2)), protocol))
    with pytest.raises(DataError, match="an array of object"):
        oars.data.open(tmp_path / "o.pkl")


def test_arrays_of_objects_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.array([Evil(str(tmp_path / "made"))], object), allow_pickle=True)
    np.savez(tmp_path / "a.npz", x=np.array([Evil(str(tmp_path / "made"))], object))
    for name in ("a.npy", "a.npz"):
        with pytest.raises(DataError, match="an array of Python objects"):
            oars.data.open(tmp_path / name)
    assert not (tmp_path / "made").exists()


def npy_header(shape: str) -> bytes:
    head = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head


@pytest.mark.parametrize("shape", ["(1000000000000, 3)", "(2, 99999999999999999999)", "(-4, 3)", "(3, -1)"])
def test_a_shape_that_the_file_cannot_hold_is_refused(tmp_path, shape):
    for order in ("False", "True"):
        raw = npy_header(shape).replace(b"'fortran_order': False", b"'fortran_order': " + order.encode())
        (tmp_path / "a.npy").write_bytes(raw + bytes(64))
        with pytest.raises(DataError, match="a.npy"):
            oars.data.open(tmp_path / "a.npy").numpy()
    (tmp_path / "b").write_bytes(idx_bytes(np.zeros((2, 2), "u1"))[:4] + b"\xff" * 8 + bytes(4))
    with pytest.raises(DataError, match="should end at byte"):
        oars.data.open(tmp_path / "b")


def test_a_zip_bomb_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("x.npy", "w") as out:
            out.write(npy_header(f"({12 << 20},)"))
            for _ in range(12):
                out.write(bytes(8 << 20))
    with pytest.raises(DataError, match="as a decompression bomb would"):
        oars.data.open(tmp_path / "a.npz")


def test_an_image_that_claims_to_be_huge_is_refused(tmp_path):
    (tmp_path / "p").mkdir()
    raw = bytearray(image_bytes(1, "JPEG"))
    at = raw.index(b"\xff\xc0")
    raw[at + 5 : at + 9] = b"\xff\xff\xff\xff"  # 65,535 x 65,535 pixels
    (tmp_path / "p" / "a.jpg").write_bytes(raw)
    with pytest.raises(DataError, match="a.jpg: .*(too large|cannot be decoded)"):
        oars.data.open(tmp_path / "p")[0]


def test_names_in_archives_write_nothing(tmp_path):
    (tmp_path / "in").mkdir()
    with tarfile.open(tmp_path / "in" / "a.tar", "w") as tar:
        for name in ("/abs/x.png", "../../up.png", "good.png"):
            info = tarfile.TarInfo(name)
            info.size = len(image_bytes(1))
            tar.addfile(info, io.BytesIO(image_bytes(1)))
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert len(oars.data.open(tmp_path / "in")) == 1
    np.savez(tmp_path / "z.npz", **{"../../up": np.zeros(3)})
    assert len(oars.data.open(tmp_path / "z.npz")) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "z.npz"]


def test_a_csv_that_is_named_otherwise_and_one_that_is_not(tmp_path):
    (tmp_path / "a.h5").write_text(text(5))
    assert len(oars.data.open(tmp_path / "a.h5", label="class")) == 5
    (tmp_path / "a.csv").write_bytes(np.random.default_rng(0).bytes(5000))
    with pytest.raises(DataError, match="a.csv"):
        oars.data.open(tmp_path / "a.csv")
