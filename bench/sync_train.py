"""The training of bench/sync.py and bench/links.py: digits, by a CNN or a small ResNet. Knows nothing of ranks.

    python bench/sync_train.py --net resnet --epochs 4 --seed 1 2

One training for each seed; after each a line with the accuracy held out. The learning rate rises for the first tenth of
the steps and then falls to nothing, as in trainings that are meant to converge. With --target a training ends with the
epoch that reaches that accuracy, and the rate stays as it is.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from nets import CNN, Basic, resnet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import digits  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--net", choices=("cnn", "resnet"), nargs="+", default=["cnn"], help="one after the other")
parser.add_argument("--images", type=int, default=1600)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch", type=int, default=50)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--held-out", type=int, default=4000, help="images to test with")
parser.add_argument("--noise", type=float, default=0.4, help="added to every pixel (0 to 1), for digits as they are "
                    "drawn are too easy to tell ways of training apart")
parser.add_argument("--wait", type=int, default=0, help="milliseconds that a sample takes to get, as from a slow disk")
parser.add_argument("--seed", type=int, nargs="+", default=[1])
parser.add_argument("--target", type=float, help="percent of the held-out digits to be right")
args = parser.parse_args()


class Waiting(TensorDataset):
    """Samples that take their time, a millisecond after the other: a process that is stopped meanwhile waits longer."""

    def __getitem__(self, index):
        for _ in range(args.wait):
            time.sleep(0.001)
        return super().__getitem__(index)


def small_resnet():
    """Three residual blocks of 16, 32 and 64 channels: 78 thousand parameters."""
    return resnet(Basic, (16, 32, 64), (1, 1, 1), 10, [nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16),
                                                       nn.ReLU()])


def accuracy(model, test):
    """In percent."""
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in test:
            right += (model(images).argmax(1) == labels).sum().item()
    model.train()
    return 100 * right / len(test.dataset)


def train(net, seed):
    """One training; the accuracy at its end."""
    torch.manual_seed(seed)
    arrays = (torch.from_numpy(a) for a in digits.load(None, args.images, args.held_out, seed))
    train_x, train_y, test_x, test_y = arrays
    train_x, test_x = (x[:, None] + args.noise * torch.randn(len(x), 1, 28, 28) for x in (train_x, test_x))
    data = Waiting(train_x, train_y) if args.wait else TensorDataset(train_x, train_y)
    loader = DataLoader(data, batch_size=args.batch, shuffle=True)
    test = DataLoader(TensorDataset(test_x, test_y), batch_size=500)
    model = CNN() if net == "cnn" else small_resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    if args.target is None:
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, args.lr, total_steps=args.epochs * len(loader), pct_start=0.1, cycle_momentum=False)
    began, reached = time.perf_counter(), 0.0
    model.train()
    for epoch in range(args.epochs):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if args.target is None:
                schedule.step()
        if args.target is not None:
            reached = accuracy(model, test)
            print(f"epoch {epoch + 1} accuracy {reached:.2f} after {time.perf_counter() - began:.2f} s", flush=True)
            if reached >= args.target:
                break
    print(f"{net} seed {seed} accuracy {reached or accuracy(model, test):.2f}", flush=True)


for name in args.net:
    for number in args.seed:
        train(name, number)
