"""A loss that is linear in the weights, for bench/sync.py: its gradients do not depend on them, so however ranks keep
together, the weights should end where one process's do. Knows nothing of ranks.

    python bench/linear.py

Prints how far they moved, without momentum and with one of 0.9.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def moved(momentum):
    """After two epochs."""
    torch.manual_seed(3)
    rows = torch.randn(610, 6) + torch.arange(-3, 3)
    model = nn.Linear(6, 1, bias=False)
    start = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    for _ in range(2):
        for (batch,) in DataLoader(TensorDataset(rows), batch_size=20, shuffle=True):
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
    return model.state_dict()["weight"] - start


for momentum in (0.0, 0.9):
    print(*(f"{x:.6f}" for x in moved(momentum)[0].tolist()), flush=True)
