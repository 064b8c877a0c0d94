"""Signal or background? The network of the HIGGS data set, written for one process.

    oars data make higgs-like higgs --size 200000
    python examples/higgs/higgs.py                          # or on the real file: --data /data/HIGGS.csv.gz
    oars run -n 2 --prune 1/3 examples/higgs/higgs.py

The 21 measured columns are standardised by the training rows. The seven columns that physicists have made of them are
left out: with these, all networks are equally good on generated data. The real file has 11 million rows; the first
million are read.
"""

import argparse
import gzip
import math
import os
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="higgs/HIGGS.csv.gz")
parser.add_argument("--rows", type=int, default=100_000, help="to train on")
parser.add_argument("--width", type=int, default=384)
parser.add_argument("--rate", type=float, default=4e-3)
parser.add_argument("--batch", type=int, default=256)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--share", type=float, default=1.0, help="of the rows that an epoch takes, drawn anew for each")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--wrong", type=float, default=0.0, help="this share of the training labels is wrong")
args = parser.parse_args()
torch.manual_seed(args.seed)


def rows_of(path):
    """The file as an array; read once, then kept beside it."""
    kept = f"{path}.npy"
    if not os.path.exists(kept):
        with gzip.open(path, "rt") as file:
            np.save(f"{kept}.part.npy", np.loadtxt(file, delimiter=",", dtype=np.float32, max_rows=1_000_000))
        os.replace(f"{kept}.part.npy", kept)
    return np.load(kept)


rows = rows_of(args.data)
held_out = int(0.7 * len(rows))
x, y = torch.from_numpy(rows[:, 1:22].copy()), torch.from_numpy(rows[:, 0].copy())
x = (x - x[:args.rows].mean(0)) / x[:args.rows].std(0)
train, labels = x[:args.rows], y[:args.rows]
if args.wrong:
    flip = torch.rand(len(labels), generator=torch.Generator().manual_seed(7)) < args.wrong
    labels = torch.where(flip, 1 - labels, labels)
model = nn.Sequential(nn.Linear(21, args.width), nn.ReLU(), nn.Linear(args.width, args.width), nn.ReLU(),
                      nn.Linear(args.width, args.width), nn.ReLU(), nn.Linear(args.width, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=args.rate)
data = TensorDataset(train, labels)
loader = DataLoader(data, args.batch, sampler=RandomSampler(data, num_samples=round(args.share * len(data))),
                    drop_last=True)
steps = args.epochs * len(loader)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * min(1, step / steps))))


def auc():
    """The area under the curve of the held-out rows."""
    model.eval()
    with torch.no_grad():
        score = torch.cat([model(part).squeeze(1) for part in x[held_out:].split(4096)])
    model.train()
    right = y[held_out:] == 1
    rank = torch.empty(len(score), dtype=torch.float64)
    rank[score.argsort()] = torch.arange(1, len(score) + 1, dtype=torch.float64)
    positive = right.sum().item()
    negative = len(right) - positive
    return (rank[right].sum().item() - positive * (positive + 1) / 2) / (positive * negative)


began = time.process_time()
for epoch in range(1, args.epochs + 1):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(inputs).squeeze(1), targets)
        loss.backward()
        optimizer.step()
        schedule.step()
    if epoch == args.epochs or epoch % 2 == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}, auc {auc():.5f}", flush=True)
print(f"{sum(p.numel() for p in model.parameters())} parameters, {time.process_time() - began:.1f} s of CPU time")
torch.save(model.state_dict(), "higgs.pt")
