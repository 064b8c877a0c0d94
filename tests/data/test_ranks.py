"""Under ``oars run``: a rank reads its rows and no others, and sees the samples, augmented ones too, of one process."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import h5py
import netCDF4
import numpy as np
from made import images
from PIL import Image
from running import finished
from torch.utils.data import DataLoader

import oars.data
from oars.data.transforms import random_crop, resize

ROWS, WIDTH = 8000, 256  # 8 MB of float32


def run(folder: Path, *args: str) -> str:
    return finished(folder, sys.executable, *args, code=0).stdout


READ = """
    import sys, torch, oars.data
    from torch.utils.data import DataLoader

    def read_so_far():
        return int(open("/proc/self/io").readline().split()[1])

    def read_all(loader, batches):
        total, check = 0.0, 0
        for _, (x, y) in zip(range(batches), loader):
            total += x.double().sum().item()
            check += (y * torch.arange(len(y))).sum().item()
        return total, check

    for file in sys.argv[1:]:
        data = oars.data.open(file, label="y")
        loader = DataLoader(data, batch_size=320, shuffle="chunked" not in file)  # a chunk is read whole
        read_all(loader, 1)  # imports what it takes
        torch.manual_seed(1)
        before = read_so_far()
        seen = read_all(loader, len(loader))
        print("bytes", file, read_so_far() - before)
        print("rows", file, len(data), seen)
"""


def write(folder: Path) -> list[str]:
    x = np.random.default_rng(0).integers(0, 1000, (ROWS, WIDTH)).astype(np.float32)
    y = np.arange(ROWS)
    lines = [",".join(f"c{at}" for at in range(WIDTH)) + ",y"]
    lines += [",".join(map(str, row)) + f",{at}" for at, row in enumerate(x.astype(int))]
    (folder / "a.csv").write_text("\n".join(lines))
    for name, chunks in (("flat.h5", None), ("chunked.h5", (16, WIDTH))):
        with h5py.File(folder / name, "w") as file:
            file.create_dataset("x", data=x, chunks=chunks)
            file["y"] = y
    with netCDF4.Dataset(folder / "a.nc", "w", format="NETCDF3_64BIT_OFFSET") as file:
        file.createDimension("row", None)
        file.createDimension("k", WIDTH)
        file.createVariable("x", "f4", ("row", "k"))[:] = x
        file.createVariable("y", "i4", ("row",))[:] = y
    return ["a.csv", "flat.h5", "chunked.h5", "a.nc"]


def test_a_rank_of_two_reads_half_of_the_bytes(tmp_path):
    files = write(tmp_path)
    (tmp_path / "read.py").write_text(textwrap.dedent(READ))
    alone = run(tmp_path, "read.py", *files)
    ranked = run(tmp_path, "-m", "oars", "run", "-n", "2", "--name", "two", "read.py", *files)
    rows = [[line for line in said.splitlines() if line.startswith("rows")] for said in (alone, ranked)]
    assert rows[0] == rows[1] and len(rows[0]) == len(files)  # the same rows in the same order
    for rank in range(2):
        log = (tmp_path / "oars-runs" / "two" / f"rank-{rank}.log").read_text()
        told = [line.split()[1:] for line in log.splitlines() if line.startswith("bytes")]
        assert [name for name, _ in told] == files
        for name, read in told:
            size = (tmp_path / name).stat().st_size
            assert 0.4 * size < int(read) <= (1 / 2 + 0.05) * size, f"rank {rank} read {read} of {name}'s {size} bytes"


AUGMENT = """
    import torch, oars.data
    from oars.data.transforms import flip, normalize, random_resized_crop
    from torch.utils.data import DataLoader, Subset

    if __name__ == "__main__":
        for workers in (0, 1):
            data = oars.data.open("pictures").transform(random_resized_crop(6), flip(), normalize(), seed=3)
            loader = DataLoader(Subset(data, range(2, 20)), batch_size=5, shuffle=True, num_workers=workers,
                                persistent_workers=workers > 0)
            torch.manual_seed(1)
            for epoch in range(3):
                for x, y in loader:
                    place = torch.arange(x[0].numel()).reshape(x[0].shape)
                    weight = place * torch.arange(1, len(x) + 1).reshape(-1, 1, 1, 1)
                    print(epoch, (x * weight).sum().item(), *y.tolist())
"""


def noise(folder: Path, rows: int) -> str:
    """Images with something to see in them."""
    path, _ = images(folder, rows)
    for at, file in enumerate(sorted(Path(path).rglob("*.JPEG"))):
        Image.fromarray(np.random.default_rng(at).integers(0, 256, (16, 16, 3), np.uint8)).save(file, "PNG")
    return path


def test_augmentation_does_not_depend_on_the_number_of_ranks(tmp_path):
    noise(tmp_path, 23)
    (tmp_path / "augment.py").write_text(textwrap.dedent(AUGMENT))
    alone = [list(map(float, line.split())) for line in run(tmp_path, "augment.py").splitlines()]
    assert len(alone) == 2 * 3 * 4 and alone[:4] == alone[12:16]  # nor on workers
    assert alone[0][1] != alone[4][1]
    said = run(tmp_path, "-m", "oars", "run", "-n", "3", "augment.py").splitlines()
    for ours, theirs in zip(said, alone, strict=True):
        np.testing.assert_allclose(list(map(float, ours.split())), theirs, rtol=1e-3)


def test_every_pass_of_a_loader_is_the_next_epoch(tmp_path):
    plain = oars.data.open(noise(tmp_path, 9))
    data = plain.transform(resize((20, 20)), random_crop(4), seed=1)
    loader = DataLoader(data, batch_size=None)
    first, second = ([x.numpy().copy() for x, _ in loader] for _ in range(2))
    assert not all(map(np.array_equal, first, second))
    data.set_epoch(0)
    assert all(np.array_equal(a, x) for a, (x, _) in zip(first, data, strict=True))
    data.set_epoch(1)
    assert all(np.array_equal(b, data[i][0]) for i, b in enumerate(second))  # in any order, alone or in a batch
    other = plain.transform(resize((20, 20)), random_crop(4), seed=2)
    assert not all(np.array_equal(a, x) for a, (x, _) in zip(first, other, strict=True))
