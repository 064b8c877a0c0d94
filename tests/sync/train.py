"""A training on made data, for ranks that are on their own for a while. Knows nothing of ranks."""

import argparse
import queue
import threading

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--momentum", type=float, default=0.0)
parser.add_argument("--adam", action="store_true", help="Adam, and a learning rate that falls after every step")
parser.add_argument("--norm", action="store_true", help="with BatchNorm")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--stop-below", type=float, default=0.0, help="end an epoch at a loss below this")
parser.add_argument("--teacher", action="store_true", help="a model without gradients, called in every step")
parser.add_argument("--whim", action="store_true", help="go by the last digits of the loss in training")
parser.add_argument("--thread", action="store_true", help="read ahead in a thread")
args = parser.parse_args()


def ahead(loader):
    """The batches of a loader, read by a thread."""
    batches = queue.Queue(2)

    def read():
        for batch in loader:
            batches.put(batch)
        batches.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (batch := batches.get()) is not None:
        yield batch


torch.manual_seed(7)
x = torch.randn(240, 1, 10, 10)
y = (x[:, 0, :5].mean((1, 2)) > x[:, 0, 5:].mean((1, 2))).long()
norm = [nn.BatchNorm2d(6)] if args.norm else []
layers = [nn.Conv2d(1, 6, 3), *norm, nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(384, 32), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(32, 2))
teacher = nn.Sequential(nn.Flatten(), nn.Linear(100, 2)).eval()
if args.adam:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003, weight_decay=0.01)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=args.momentum)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95 if args.adam else 1.0)
train = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True, num_workers=args.workers)
test = DataLoader(TensorDataset(x, y), batch_size=64)

steps = 0
for epoch in range(args.epochs):
    model.train()
    for images, labels in ahead(train) if args.thread else train:
        out = model(images)
        loss = F.cross_entropy(out, labels)
        if args.teacher:
            with torch.no_grad():
                told = teacher(images).softmax(1)
            loss = loss + 0.01 * F.kl_div(out.log_softmax(1), told, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        steps += 1
        if args.whim and int(loss.item() * 1e6) % 2:
            model.state_dict()
        if loss.item() < args.stop_below:
            break
    model.eval()
    right, total = 0, 0.0
    with torch.no_grad():
        for images, labels in test:
            out = model(images)
            right += (out.argmax(1) == labels).sum().item()
            total += F.cross_entropy(out, labels, reduction="sum").item()
    torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, "best.pt")
    print(f"epoch {epoch}: {steps} steps, {right} of {len(y)} right, loss {total / len(y):.6f}", flush=True)
