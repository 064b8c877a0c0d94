"""A U-Net that finds cells in microscope pictures. The pictures and their masks are in one HDF5 file.

Without ``--data`` the file is made: blobs on an uneven background, with noise.
"""

import argparse
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", type=Path, default=Path("cells.h5"), help="an HDF5 file with images and masks")
parser.add_argument("--images", type=int, default=240, help="how many are made, if there are none")
parser.add_argument("--side", type=int, default=64)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--width", type=int, default=16, help="channels of the first level; the U-Net of 2015 has 64")
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
torch.manual_seed(args.seed)
device = "cuda" if torch.cuda.is_available() else "cpu"


def make(path):
    """Pictures with one to five cells each."""
    rng = np.random.default_rng(args.seed)
    y, x = np.mgrid[:args.side, :args.side] / args.side
    with h5py.File(path, "w") as file:
        one = (args.side, args.side)
        images = file.create_dataset("images", (args.images, *one), "u1", chunks=(1, *one))
        masks = file.create_dataset("masks", (args.images, *one), "u1", chunks=(1, *one))
        for i in range(args.images):
            picture, mask = 60 + 60 * (x * rng.uniform(-1, 1) + y * rng.uniform(-1, 1)), np.zeros(x.shape, bool)
            for _ in range(rng.integers(1, 6)):
                cx, cy, a, b, turn = *rng.uniform(0.1, 0.9, 2), *rng.uniform(0.05, 0.15, 2), rng.uniform(0, np.pi)
                at = ((x - cx) + 1j * (y - cy)) * np.exp(1j * turn)
                mask |= (at.real / a) ** 2 + (at.imag / b) ** 2 < 1
            images[i] = (picture + 50 * mask + rng.normal(0, 25, x.shape)).clip(0, 255)
            masks[i] = mask


class Cells(Dataset):
    """Pictures with masks; the file is opened where it is read, because an open one cannot be handed to workers."""

    def __init__(self, path):
        self.path = path
        with h5py.File(path) as file:
            self.length = len(file["images"])

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        with h5py.File(self.path) as file:
            image, mask = file["images"][i], file["masks"][i]
        return torch.from_numpy(image).float().div(127.5).sub(1)[None], torch.from_numpy(mask).float()[None]


def level(cin, cout):
    """Two convolutions."""
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(),
                         nn.Conv2d(cout, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU())


class UNet(nn.Module):
    """Down in three levels, up again, and across at each level."""

    def __init__(self, w):
        super().__init__()
        self.down = nn.ModuleList([level(1, w), level(w, 2 * w), level(2 * w, 4 * w)])
        self.bottom = level(4 * w, 8 * w)
        self.up = nn.ModuleList([nn.ConvTranspose2d(2 * c, c, 2, 2) for c in (4 * w, 2 * w, w)])
        self.join = nn.ModuleList([level(2 * c, c) for c in (4 * w, 2 * w, w)])
        self.out = nn.Conv2d(w, 1, 1)

    def forward(self, x):
        across = []
        for down in self.down:
            across.append(down(x))
            x = F.max_pool2d(across[-1], 2)
        x = self.bottom(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), across.pop()], 1))
        return self.out(x)


def dice(scores, mask):
    """Twice the common area over the sum of both areas, picture by picture."""
    found = scores.sigmoid()
    return (2 * (found * mask).sum((1, 2, 3)) + 1) / (found.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)


if not args.data.exists():
    make(args.data)
cells = Cells(args.data)
held_out = len(cells) // 5
train = DataLoader(Subset(cells, range(held_out, len(cells))), args.batch_size, shuffle=True)
test = DataLoader(Subset(cells, range(held_out)), args.batch_size)
model = UNet(args.width).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for epoch in range(args.epochs):
    model.train()
    for image, mask in train:
        scores, mask = model(image.to(device)), mask.to(device)
        loss = F.binary_cross_entropy_with_logits(scores, mask) + 1 - dice(scores, mask).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        found = sum(dice(model(image.to(device)), mask.to(device)).sum().item() for image, mask in test)
    print(f"epoch {epoch} loss {loss.item():.4f} dice {found / held_out:.4f}")
