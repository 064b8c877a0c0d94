"""A loader that shuffles, batch norm, dropout, a schedule, evaluation, and the best weights kept in a file."""

import os
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(360, 1, 8, 8)
y = (x.mean((1, 2, 3)) > 0).long() + 2 * (x[:, 0, 0, 0] > 0).long()
train = DataLoader(TensorDataset(x[:300], y[:300]), batch_size=32, shuffle=True)
test = DataLoader(TensorDataset(x[300:], y[300:]), batch_size=25)
width = 8
model = nn.Sequential(nn.Conv2d(1, width, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(),
                      nn.Dropout(0.3), nn.Linear(width * 36, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
best, history, summed = 0.0, [], torch.zeros(())
for epoch in range(5):
    model.train()
    for i, (xs, ys) in enumerate(train):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(xs), ys)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append(loss.item())
        summed += loss.detach()
        time.sleep(float(os.environ.get("SLOW", "0")))
        if i % 3 == 0:
            print(epoch, i, f"{loss:.9f}")
    schedule.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for xs, ys in test:
            right += (model(xs).argmax(1) == ys).sum().item()
    if right / 60 > best:
        best = right / 60
        torch.save(model.state_dict(), "best.pt")
    print("epoch", epoch, sum(history), right, best, schedule.get_last_lr(), summed.item())
torch.save({"last": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
model.load_state_dict(torch.load("best.pt"))
print("done", f"{F.cross_entropy(model(x), y):.9f}", len(history))
