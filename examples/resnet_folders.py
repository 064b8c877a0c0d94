"""A ResNet on folders of images, one folder for each class, as most image sets come: ``shapes/square/0001.png``.

Without ``--data`` such folders are drawn: squares, discs, crosses and rings of random size and colour on noise.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", type=Path, default=Path("shapes"), help="a folder with a folder for each class")
parser.add_argument("--images", type=int, default=800, help="how many are drawn, if there are none")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--width", type=int, default=16, help="channels of the first stage; ResNet-18 has 64")
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
torch.manual_seed(args.seed)
device = "cuda" if torch.cuda.is_available() else "cpu"
SIDE = 32


def draw(folder):
    """Folders of pictures."""
    rng = np.random.default_rng(args.seed)
    y, x = np.mgrid[:SIDE, :SIDE]
    for number in range(args.images):
        kind = ("square", "disc", "cross", "ring")[number % 4]
        cx, cy, size = rng.uniform(10, 22), rng.uniform(10, 22), rng.uniform(5, 9)
        dx, dy = abs(x - cx), abs(y - cy)
        far = np.hypot(dx, dy)
        inside = {"square": np.maximum(dx, dy) < size, "disc": far < size, "ring": abs(far - size) < 2,
                  "cross": (np.minimum(dx, dy) < 2) & (np.maximum(dx, dy) < size)}[kind]
        picture = rng.uniform(0, 90, (SIDE, SIDE, 3))
        picture[inside] = rng.uniform(110, 255, 3)
        path = folder / kind / f"{number // 4:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture.astype(np.uint8)).save(path)


class Folders(Dataset):
    """Every picture below a folder; its class is the name of its folder."""

    def __init__(self, folder):
        self.paths = sorted(folder.glob("*/*.png"))
        self.classes = sorted({path.parent.name for path in self.paths})

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        with Image.open(self.paths[i]) as file:
            pixels = np.asarray(file.convert("RGB").resize((SIDE, SIDE)), np.float32)
        return torch.from_numpy(pixels / 127.5 - 1).permute(2, 0, 1), self.classes.index(self.paths[i].parent.name)


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(cout), nn.BatchNorm2d(cout)
        self.around = nn.Identity() if cin == cout else nn.Sequential(
            nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.around(x))


if not args.data.is_dir():
    draw(args.data)
samples = Folders(args.data)
held_out = len(samples) // 5
train, test = random_split(samples, [len(samples) - held_out, held_out])
train_loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True)
test_loader = DataLoader(test, args.batch_size)

w = args.width
model = nn.Sequential(
    nn.Conv2d(3, w, 3, 1, 1, bias=False), nn.BatchNorm2d(w), nn.ReLU(),
    Block(w, w, 1), Block(w, w, 1), Block(w, 2 * w, 2), Block(2 * w, 2 * w, 1), Block(2 * w, 4 * w, 2),
    Block(4 * w, 4 * w, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * w, len(samples.classes))).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=args.epochs * len(train_loader))

for epoch in range(args.epochs):
    model.train()
    for images, labels in train_loader:
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in test_loader:
            right += (model(images.to(device)).argmax(1) == labels.to(device)).sum().item()
    print(f"epoch {epoch} loss {loss.item():.4f} accuracy {right / held_out:.3f}")
