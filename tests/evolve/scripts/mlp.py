"""A small network on generated data; its checkpoints, an averaged copy of its weights, and its evaluation."""
import copy
import os
import time

import torch
from torch import nn

torch.manual_seed(3)
draw = torch.Generator().manual_seed(0)
X = torch.randn(480, 21, generator=draw)
Y = ((X[:, :5].sum(1) * X[:, 6]) > 0).float()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(21, 48, bias=False), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 32),
                                  nn.ReLU())
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.body(x)).squeeze(1)


model = Net()
average = copy.deepcopy(model).eval()
optimizer = torch.optim.Adam(model.parameters(), lr=float(os.environ.get("RATE", "2e-3")))
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=32, shuffle=True)
if os.path.exists("old.pt"):
    held = torch.load("old.pt")
    model.load_state_dict(held["model"])
    optimizer.load_state_dict(held["optimizer"])
for epoch in range(int(os.environ.get("EPOCHS", "4"))):
    for x, y in loader:
        time.sleep(float(os.environ.get("SLOW", "0")))
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for mine, other in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(other, 0.1)
            for mine, other in zip(average.buffers(), model.buffers(), strict=True):
                mine.copy_(other)
    model.eval()
    with torch.no_grad():
        print(f"epoch {epoch}: {loss.item():.4f}, {((model(X) > 0) == Y.bool()).float().mean().item():.3f}, "
              f"{((average(X) > 0) == Y.bool()).float().mean().item():.3f}", flush=True)
    model.train()
    torch.save({"model": model.state_dict(), "average": average.state_dict(), "optimizer": optimizer.state_dict()},
               "last.pt")
print(sum(p.numel() for p in model.parameters()), sum(p.numel() for p in average.parameters()))
