"""One linear layer and a softmax on images of digits: how far a straight cut gets."""

import argparse

import digits
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=100)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--images", type=int, default=10_000, help="how many to train on")
parser.add_argument("--data", help="folder with MNIST's IDX files; without it digits are drawn")
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
torch.manual_seed(args.seed)

train_x, train_y, test_x, test_y = (torch.from_numpy(a) for a in digits.load(args.data, args.images, 2000, args.seed))
train = DataLoader(TensorDataset(train_x, train_y), batch_size=args.batch_size, shuffle=True)
test = DataLoader(TensorDataset(test_x, test_y), batch_size=500)

model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

step = 0
for _ in range(args.epochs):
    for images, labels in train:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.6f}")

right = 0
with torch.no_grad():
    for images, labels in test:
        right += (model(images).argmax(1) == labels).sum().item()
print(f"accuracy {100 * right / len(test_y):.2f} %")
