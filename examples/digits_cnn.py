"""A small convolutional network on images of digits: two 5 × 5 layers of 32 and 64 channels, a dense one of 1024."""

import argparse
import time

import digits
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--batch-size", type=int, default=100)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--images", type=int, default=3_000, help="how many to train on")
parser.add_argument("--data", help="folder with MNIST's IDX files; without it digits are drawn")
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
torch.manual_seed(args.seed)
device = "cuda" if torch.cuda.is_available() else "cpu"

train_x, train_y, test_x, test_y = (torch.from_numpy(a) for a in digits.load(args.data, args.images, 1000, args.seed))
train = DataLoader(TensorDataset(train_x, train_y), batch_size=args.batch_size, shuffle=True)
test = DataLoader(TensorDataset(test_x, test_y), batch_size=500)


class Net(nn.Module):
    """Twice: look for 5 × 5 patterns, keep the strongest of each 2 × 2. Then decide."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.dense = nn.Linear(7 * 7 * 64, 1024)
        self.drop = nn.Dropout(0.4)
        self.out = nn.Linear(1024, 10)

    def forward(self, x):
        x = x.unsqueeze(1)  # one channel
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.dense(x.flatten(1)))
        return self.out(self.drop(x))


model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

step, began, times = 0, time.perf_counter(), []
for _ in range(args.epochs):
    model.train()
    for images, labels in train:
        images, labels = images.to(device), labels.to(device)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        times.append(time.perf_counter() - began)
        began = time.perf_counter()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.6f}")

model.eval()
right = 0
with torch.no_grad():
    for images, labels in test:
        right += (model(images.to(device)).argmax(1) == labels.to(device)).sum().item()
print(f"accuracy {100 * right / len(test_y):.2f} %")
if times:
    middle = sorted(times)[len(times) // 2]
    print(f"time per step {1000 * middle:.1f} ms")
