"""Train a small network on images that people have labelled: plain PyTorch, one process or many.

    oars data make water-ice shots --size 1000
    oars label shots/water-ice.h5 --classes water,ice
    oars label shots/water-ice.h5 --export                                   # water-ice.labels.csv
    python train.py shots/water-ice.h5 water-ice.labels.csv
    oars run -n 4 train.py shots/water-ice.h5 water-ice.labels.csv           # the same on four ranks
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import oars.data

parser = argparse.ArgumentParser()
parser.add_argument("source")
parser.add_argument("labels")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch", type=int, default=32)
args = parser.parse_args()

torch.manual_seed(0)
data = oars.data.open(args.source, labels=args.labels)
train, valid = data.split(0.85, 0.15, by="stratified")
print(f"{len(train)} images to train, {len(valid)} to validate; classes: {', '.join(data.classes)}")


class Net(nn.Module):
    """Mean and maximum of each map: rings are seen by the one, spots by the other."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers, before = [], 1
        for width in (8, 16, 32):
            layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                       nn.MaxPool2d(2)]
            before = width
        self.maps = nn.Sequential(*layers)
        self.out = nn.Linear(2 * before, classes)

    def forward(self, x):
        maps = self.maps(x)
        return self.out(torch.cat([maps.mean((2, 3)), maps.amax((2, 3))], 1))


def pixels(x):
    """Roots of counts, largest of each 2 x 2: photon noise is alike everywhere, and no spot is lost."""
    return F.max_pool2d(x.float().clamp(min=0).sqrt()[:, None], 2) / 5 - 1


net = Net(len(data.classes))
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
for epoch in range(1, args.epochs + 1):
    net.train()
    for x, y in DataLoader(train, batch_size=args.batch, shuffle=True):
        loss = F.cross_entropy(net(pixels(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()
    right = 0
    with torch.no_grad():
        for x, y in DataLoader(valid, batch_size=args.batch):
            right += (net(pixels(x)).argmax(1) == y).sum().item()
    print(f"epoch {epoch}: loss {loss.item():.3f}, {100 * right / len(valid):.1f} % of the validation images right")
torch.save(net.state_dict(), "water-ice.pt")
