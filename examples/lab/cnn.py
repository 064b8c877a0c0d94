"""Exercises 3 and 4: a convolutional network on digits; what its batches are made of, and how it gets faster."""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import digits  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--order", choices=("file", "shuffled"), default="file", help="of the images in every epoch")
parser.add_argument("--images", type=int, default=60_000, help="how many to train on")
parser.add_argument("--batch-size", type=int, default=100)
parser.add_argument("--data", help="folder with MNIST's IDX files; without it digits are drawn")
args = parser.parse_args()
torch.manual_seed(1)

train_x, train_y, test_x, test_y = (torch.from_numpy(a) for a in digits.load(args.data, args.images, 1_000))
train = DataLoader(TensorDataset(train_x, train_y), args.batch_size, shuffle=args.order == "shuffled")
test = DataLoader(TensorDataset(test_x, test_y), 250)


class Net(nn.Module):
    """32 and 64 features of 5 × 5, a dense layer of 1024, half of it dropped while training."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.dense = nn.Linear(7 * 7 * 64, 1024)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(1024, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x.unsqueeze(1))), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.out(self.drop(F.relu(self.dense(x.flatten(1)))))


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
step = 0
for _ in range(args.epochs):
    model.train()
    for images, labels in train:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in test:
            right += (model(images).argmax(1) == labels).sum().item()
    print(f"step {step} accuracy {100 * right / len(test_y):.2f} %")
