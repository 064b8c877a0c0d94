"""Trains and evaluates; tells every read of a sample to a port: ``reads.py PORT WORKERS...``, once for each number."""

import os
import socket
import sys

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

port = int(sys.argv[1])
told = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


class Watched(Dataset):
    """Rows that say when, and by whom, they are read."""

    def __init__(self, workers, what, n):
        self.what, self.n = f"{workers} {what}", n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        rank = os.getppid() if get_worker_info() else os.getpid()
        told.sendto(f"{rank} {self.what} {i}".encode(), ("127.0.0.1", port))
        return torch.full((4,), float(i)) / 40, torch.tensor(i % 2)


if __name__ == "__main__":
    for workers in map(int, sys.argv[2:]):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(2):
            data = Watched(workers, f"train-{epoch}", 40)
            for x, y in DataLoader(data, 12, shuffle=True, num_workers=workers):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
        with torch.no_grad():
            for x, _ in DataLoader(Watched(workers, "test", 23), 5, num_workers=workers):
                print(model(x).argmax(1).sum().item())
    print("compiler:", "torch._dynamo" in sys.modules)
