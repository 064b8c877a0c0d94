"""`oars data make`: the same for the same seed and any workers, in the layout of the real files, and learnable."""

from __future__ import annotations

import gzip
import struct
import tarfile

import h5py
import numpy as np
import pytest
from packing import data, tree


@pytest.mark.parametrize(("kind", "size"), [("imagenet-like", 40), ("digits", 1200), ("higgs-like", 300),
                                            ("water-ice", 60)])
def test_the_same_seed_gives_the_same_files(kind, size, tmp_path):
    for name, seed, workers in (("a", 1, 1), ("b", 1, 3), ("c", 2, 2)):
        data("make", kind, tmp_path / name, "--size", size, "--seed", seed, "--workers", workers, "--side", 60)
    assert tree(tmp_path / "a") == tree(tmp_path / "b") != tree(tmp_path / "c")
    done = data("make", kind, tmp_path / "a", "--size", size, code=2)
    assert "not empty" in done.stderr


def test_imagenet_like_has_the_layout_of_the_archives(tmp_path):
    data("make", "imagenet-like", tmp_path / "a", "--size", 30, "--classes", 3, "--side", 50)
    with tarfile.open(tmp_path / "a" / "ILSVRC2012_img_train.tar") as outer:
        names = outer.getnames()
        assert names == sorted(names) and len(names) == 3 and all(n.startswith("n0") for n in names)
        with tarfile.open(fileobj=outer.extractfile(names[0])) as inner:
            assert all(n.startswith(names[0][:9] + "_") and n.endswith(".JPEG") for n in inner.getnames())
            assert len(inner.getnames()) == 10
    with tarfile.open(tmp_path / "a" / "Annotation.tar.gz") as outer:
        assert outer.getnames() == [f"{n[:9]}.tar.gz" for n in names]
        with tarfile.open(fileobj=outer.extractfile(outer.getnames()[0])) as inner:
            assert all(n.startswith(f"Annotation/{names[0][:9]}/") and n.endswith(".xml") for n in inner.getnames())
    with tarfile.open(tmp_path / "a" / "ILSVRC2012_img_val.tar") as val:
        assert val.getnames() == [f"ILSVRC2012_val_{k + 1:08d}.JPEG" for k in range(6)]
    with tarfile.open(tmp_path / "a" / "ILSVRC2012_bbox_val_v3.tgz") as val:
        assert val.getnames() == [f"val/ILSVRC2012_val_{k + 1:08d}.xml" for k in range(6)]


def test_digits_are_idx_files_that_can_be_told_apart(tmp_path):
    data("make", "digits", tmp_path / "d", "--size", 1500)
    sets = {}
    for part, count in (("train", 1500), ("t10k", 250)):
        images = gzip.decompress((tmp_path / "d" / f"{part}-images-idx3-ubyte.gz").read_bytes())
        labels = gzip.decompress((tmp_path / "d" / f"{part}-labels-idx1-ubyte.gz").read_bytes())
        assert struct.unpack(">4I", images[:16]) == (2051, count, 28, 28)
        assert struct.unpack(">2I", labels[:8]) == (2049, count)
        sets[part] = (np.frombuffer(images, np.uint8, offset=16).reshape(count, -1).astype(float),
                      np.frombuffer(labels, np.uint8, offset=8))
    (x, y), (test_x, test_y) = sets["train"], sets["t10k"]
    near = ((x ** 2).sum(1) - 2 * test_x @ x.T).argmin(1)
    assert (y[near] == test_y).mean() > 0.6 and set(y) == set(range(10))


def test_higgs_like_tells_signal_by_its_masses(tmp_path):
    data("make", "higgs-like", tmp_path / "h", "--size", 12000)
    with gzip.open(tmp_path / "h" / "HIGGS.csv.gz", "rt") as file:
        table = np.loadtxt(file, delimiter=",")
    assert table.shape == (12000, 29) and np.isfinite(table).all() and set(table[:, 0]) == {0, 1}
    signal, x = table[:, 0] == 1, (table[:, 1:] - table[:, 1:].mean(0)) / table[:, 1:].std(0)
    # The light Higgs is a peak in the mass of two b jets, at 125 GeV, in the signal only.
    peak = (table[:, 26] * 110 > 110) & (table[:, 26] * 110 < 140)
    assert peak[signal].mean() > 2 * peak[~signal].mean()

    def accuracy(columns):  # of a linear fit on the first half, on the second
        a = np.column_stack([x[:, columns], x[:, columns] ** 2, np.ones(len(x))])
        w = np.linalg.lstsq(a[:6000], np.where(signal[:6000], 1.0, -1.0), rcond=None)[0]
        return ((a[6000:] @ w > 0) == signal[6000:]).mean()

    assert accuracy(range(21, 28)) > accuracy(range(21)) + 0.03 and accuracy(range(21, 28)) > 0.65


def test_ice_is_spotty_and_water_is_not(tmp_path):
    data("make", "water-ice", tmp_path / "w", "--size", 60)
    with h5py.File(tmp_path / "w" / "water-ice.h5") as file:
        images, labels = file["images"][:], file["labels"][:]
    assert images.shape == (60, 256, 256) and images.dtype == np.uint16 and set(labels) == {0, 1}
    assert (images[:, 62:66] == 0).all() and (images[:, :, 125:131] == 0).all()  # gaps between panels
    spotty = np.percentile(images, 99.9, axis=(1, 2)) / np.percentile(images, 95, axis=(1, 2))
    assert np.median(spotty[labels == 1]) > 1.5 * np.median(spotty[labels == 0])


def test_unknown_damage_is_one_line(tmp_path):
    done = data("make", "imagenet-like", tmp_path / "a", "--damage", "rust", code=2)
    assert "--damage rust is unknown" in done.stderr and not (tmp_path / "a").exists()
