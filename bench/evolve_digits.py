"""Table B of ``bench/evolve.py``: a small convolutional network on noisy digits, written for one process."""

import argparse
import gzip
import math
import struct
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="digits")
parser.add_argument("--part", type=float, default=1.0, help="of the widths 32, 64, 128")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(args.seed)


def idx(name):
    """An IDX file as an array."""
    data = gzip.open(f"{args.data}/{name}.gz").read()
    shape = struct.unpack(f">{data[3]}I", data[4 : 4 + 4 * data[3]])
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape).copy())


noise = torch.Generator().manual_seed(5)


def noisy(images):
    """Without noise all networks are right."""
    images = images.float()[:, None] / 255
    return images + 0.8 * torch.randn(images.shape, generator=noise)


x, y = noisy(idx("train-images-idx3-ubyte")[:4000]), idx("train-labels-idx1-ubyte")[:4000].long()
tx, ty = noisy(idx("t10k-images-idx3-ubyte")[:2000]), idx("t10k-labels-idx1-ubyte")[:2000].long()
a, b, c = (round(width * args.part) for width in (32, 64, 128))
model = nn.Sequential(
    nn.Conv2d(1, a, 3, padding=1, bias=False), nn.BatchNorm2d(a), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    nn.Linear(b * 49, c), nn.ReLU(), nn.Linear(c, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True)
steps = args.epochs * len(loader)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * min(1, step / steps))))
began = time.process_time()
for _ in range(args.epochs):
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        schedule.step()
seconds = time.process_time() - began
model.eval()
with torch.no_grad():
    right = torch.cat([model(part).argmax(1) for part in tx.split(500)]) == ty
print(f"accuracy {right.float().mean().item():.5f}")
print(f"{sum(p.numel() for p in model.parameters())} parameters, {seconds:.1f} s of CPU time")
