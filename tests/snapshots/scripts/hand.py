"""Batches made by hand from three random streams, an average of the weights, files that grow, something kept."""

import copy
import csv
import os
import random
import time

import end
import numpy as np
import torch
from torch import nn

import oars

torch.manual_seed(1)
np.random.seed(2)
random.seed(3)
x = torch.randn(256, 20)
y = x[:, :3].sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
average = [p.detach().clone() for p in model.parameters()]
calls = oars.keep([])  # filled where nothing is called when the script is played
model[0].register_forward_hook(lambda *_: calls.append(len(calls)))
history, best, best_state, step = [], 1e9, None, 0
table = open("table.csv", "w", newline="")
rows = csv.writer(table)
began = time.perf_counter()
for epoch in range(6):
    order, noise, flip = torch.randperm(256), np.random.rand(), random.random()
    for i in range(0, 256, 32):
        xs, ys = x[order[i:i + 32]] + 0.01 * torch.randn(32, 20), y[order[i:i + 32]]
        penalty = sum((p**2).sum() for p in model.parameters())
        loss = nn.functional.mse_loss(model(xs), ys) + 1e-4 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        for a, p in zip(average, model.parameters(), strict=True):
            a.data.mul_(0.9).add_(p.detach(), alpha=0.1)
        history.append(loss.detach())
        time.sleep(float(os.environ.get("SLOW", "0")))
        end.at(step)
    mean = torch.stack(history[-8:]).mean()
    if mean < best:
        best, best_state = mean, copy.deepcopy(model.state_dict())
    rows.writerow([epoch, mean.item(), noise, flip])
    with open("appended.txt", "a") as file:
        file.write(f"{epoch} {mean:.9f}\n")
    print(epoch, f"{mean:.9f}", best.item(), noise, flip, sum(a.double().sum() for a in average).item(), len(calls))
table.close()
model.load_state_dict(best_state)
print("done", sum(p.double().sum() for p in model.parameters()).item(), torch.rand(1).item(), np.random.rand(),
      random.random(), torch.stack(history).double().sum().item(), 0 < time.perf_counter() - began < 600)
