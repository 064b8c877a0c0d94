"""Fine-tune a small network on the labels of a project: plain PyTorch, one process or many.

    oars run -n 4 fine_tune.py run.h5 labels.csv --column images --weights ssl.pt

``oars label`` runs it at each doubling of labels (``tune.py``). What the network sees of every image goes to
features.npy. It learns nothing from the exam, which is not among the labels that it opens.
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import oars.data
from oars.label.simclr import Net, square

parser = argparse.ArgumentParser()
parser.add_argument("source")
parser.add_argument("labels")
parser.add_argument("--column", required=True)
parser.add_argument("--group")
parser.add_argument("--weights", required=True, help="where the network begins, and how images are scaled")
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--batch", type=int, default=32)
args = parser.parse_args()

torch.manual_seed(0)
known = torch.load(args.weights, weights_only=True)
train = oars.data.open(args.source, group=args.group, labels=args.labels, how=["human", "page", "audit"])
every = oars.data.open(args.source, group=args.group, columns=[args.column])
train, every = (data.transform(lambda image: square(image, known["side"])) for data in (train, every))


def scaled(x):
    return (x.float()[:, None] - known["mean"]) / known["spread"]


net = Net()
net.load_state_dict(known["net"])
out = nn.Linear(net.width, len(train.classes or ()))
weights = [*net.parameters(), *out.parameters()]
optimizer = torch.optim.AdamW(weights, lr=2e-3, weight_decay=5e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=args.steps)
step = 0
while step < args.steps:
    net.train()
    for x, y in DataLoader(train, batch_size=args.batch, shuffle=True):
        x = scaled(x)
        for bit, turned in enumerate((lambda x: x.flip(2), lambda x: x.flip(3), lambda x: x.transpose(2, 3))):
            x = turned(x) if step >> bit & 1 else x  # eight views of an image, one after the other
        loss = F.cross_entropy(out(net(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        step += 1
        if step == args.steps:
            break
net.eval()
with torch.no_grad():
    rows = [net(scaled(x)).numpy() for x in DataLoader(every, batch_size=256)]
np.save("features.npy", np.concatenate(rows))
