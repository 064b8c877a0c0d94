"""A training of a line, with its rate, its number of steps and a wait after each as arguments; six steps fail."""

import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

rate, steps, wait = float(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(1)
data = TensorDataset(torch.randn(64, 3), torch.randn(64, 1))
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.001}], lr=rate)
done = 0
while True:
    for x, y in DataLoader(data, batch_size=8):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done += 1
        time.sleep(wait)
        if done == steps:
            sys.exit(0)
        if done == 5 and steps == 6:
            raise RuntimeError("it failed")
