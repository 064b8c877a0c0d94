"""What a reader of docs/evolve.md has as train.py: layers that can be cut, and a metric."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
X = torch.randn(256, 12)
Y = (X[:, :4].sum(1) > 0).float()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.head = nn.Linear(48, 1)

    def forward(self, x):
        return self.head(self.body(x)).squeeze(1)


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for _ in range(4):
    for x, y in DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True):
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.4f}")
with torch.no_grad():
    scores = model(X)
right = (scores[Y == 1, None] > scores[Y == 0]).float().mean().item()
print(f"auc {right:.4f}")
