"""Files that are made and appended to only behind a snapshot: a script that goes on from there must find none of it."""

import os

import end
import torch
from torch import nn

torch.manual_seed(1)
model = nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), 0.1)
first = torch.load("last.pt")["epoch"] + 1 if os.path.exists("last.pt") else 0
print("from", first)
for epoch in range(first, 5):
    for step in range(4):
        x = torch.randn(8, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end.at(4 * epoch + step + 1)
    if epoch >= 1:  # behind the snapshot of step 6
        print(epoch, sorted(os.listdir("made")) if os.path.exists("made") else "nothing made yet")
        os.makedirs("made", exist_ok=True)
        torch.save({"epoch": epoch}, "last.pt")
        for name in ("made/best.txt", "log.txt"):
            with open(name, "a") as file:
                file.write(f"{epoch} {loss.item():.3f}\n")
print(open("log.txt").read())
