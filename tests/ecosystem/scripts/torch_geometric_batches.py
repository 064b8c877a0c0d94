"""torch_geometric: small graphs in mini-batches, and one graph that is a batch by itself."""

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

torch.manual_seed(0)


def make_graph(nodes):
    edges = torch.randint(0, nodes, (2, 3 * nodes))
    x = torch.randn(nodes, 6)
    return Data(x=x, edge_index=edges, y=(x.mean() > 0).long().view(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = GCNConv(6, 16), GCNConv(16, 16), nn.Linear(16, 2)

    def forward(self, x, edge_index, batch):
        x = F.relu(self.first(x, edge_index))
        x = F.relu(self.second(x, edge_index))
        return self.last(global_mean_pool(x, batch))


loader = DataLoader([make_graph(5 + i % 4) for i in range(40)], batch_size=8, shuffle=True)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    for data in loader:
        loss = F.cross_entropy(model(data.x, data.edge_index, data.batch), data.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.6f}")
torch.save(model.state_dict(), "model.pt")
