"""A training with a little of everything, for ranks to die in. Knows nothing of ranks."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--penalty", type=float, default=0.0)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--handmade", action="store_true")
args = parser.parse_args()

torch.manual_seed(7)
x = torch.randn(250, 1, 10, 10)
y = (x[:, 0, :5].mean((1, 2)) > x[:, 0, 5:].mean((1, 2))).long()
layers = [nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(384, 2)]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.8)
train = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True, num_workers=args.workers)
test = DataLoader(TensorDataset(x, y), batch_size=64, num_workers=args.workers)


def batches():
    """Of the loader, or made by hand."""
    if not args.handmade:
        yield from train
        return
    for part in torch.randperm(len(x)).split(20):
        yield x[part], y[part]


steps = 0
for epoch in range(args.epochs):
    model.train()
    total = seen = hits = sure = 0
    for number, (images, labels) in enumerate(batches(), 1):
        out = model(images)
        loss = F.cross_entropy(out, labels) / args.accumulate
        if args.penalty:
            loss = loss + args.penalty * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        if number % args.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            steps += 1
        total += loss.item() * len(images)
        seen += len(images)
        hits += (out.argmax(1) == labels).sum().item()  # of weights that have moved on
        sure += out.detach().diff().abs().sum().item()
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in test:
            right += (model(images).argmax(1) == labels).sum().item()
    torch.save({"epoch": epoch, "model": model.state_dict()}, "best.pt")
    with open("log.txt", "a") as log:
        log.write(f"{epoch} {total / seen:.4f} {hits} {sure / seen:.4f}\n")
    rate = schedule.get_last_lr()[0]
    print(f"epoch {epoch}: {number} batches, {seen} samples, {steps} steps, lr {rate:.5f}, loss {total / seen:.6f}, "
          f"{hits} {right} right, {sure / seen:.5f} sure", flush=True)
