"""What a step of a graph network costs for a whole mini-batch and for half of its graphs, on one core.

    .venv-ecosystem/bin/python bench/graph_batches.py

Two ranks that split a batch by its graphs need at least the time of the half, and an exchange of gradients.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import MLP, GATConv, GCNConv, GINConv, global_add_pool

# Graphs in a batch, nodes and edges of each, the network, its layers and width: about those of PyG's own examples.
SIZES = {"MUTAG, GIN": (128, 18, 40, "gin", 5, 32), "PROTEINS, GCN": (64, 39, 146, "gcn", 3, 64),
         "ENZYMES, GAT": (128, 33, 124, "gat", 3, 64), "QM9, GIN": (128, 18, 37, "gin", 5, 64),
         "ogbg-molhiv, GIN": (32, 26, 55, "gin", 5, 300), "DD, GCN": (32, 284, 1431, "gcn", 3, 128)}
MAKE = {"gin": lambda a, b: GINConv(MLP([a, b, b])), "gcn": GCNConv, "gat": lambda a, b: GATConv(a, b // 4, heads=4)}


class Net(nn.Module):
    def __init__(self, kind: str, layers: int, width: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList([MAKE[kind](16 if i == 0 else width, width) for i in range(layers)])
        self.last = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            x = conv(x, edges).relu()
        return self.last(global_add_pool(x, batch))


def seconds(model: nn.Module, graphs: list[Data], repeats: int = 60) -> float:
    """Of a step; the quickest of many, in the time of the processor."""
    data, optimizer, best = Batch.from_data_list(graphs), torch.optim.Adam(model.parameters()), float("inf")
    for _ in range(repeats):
        begun = time.process_time()
        optimizer.zero_grad()
        F.cross_entropy(model(data.x, data.edge_index, data.batch), data.y).backward()
        optimizer.step()
        best = min(best, time.process_time() - begun)
    return best


def main() -> None:
    torch.set_num_threads(1)
    print("| graphs | in a batch | whole | half | half of the graphs takes |\n|---|---|---|---|---|")
    for name, (count, nodes, edges, kind, layers, width) in SIZES.items():
        graphs = [Data(x=torch.randn(nodes, 16), edge_index=torch.randint(0, nodes, (2, edges)),
                       y=torch.zeros(1, dtype=torch.long)) for _ in range(count)]
        model = Net(kind, layers, width)
        whole, half = seconds(model, graphs), seconds(model, graphs[:count // 2])
        print(f"| {name} | {count} | {1e3 * whole:.1f} ms | {1e3 * half:.1f} ms | {half / whole:.2f} |", flush=True)


main()
