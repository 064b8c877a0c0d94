"""A feed-forward network with one hidden layer of 500."""

import torch
from stopwatch import tick
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class NeuralNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.relu, self.fc2 = nn.Linear(784, 500), nn.ReLU(), nn.Linear(500, 10)

    def forward(self, x):
        return self.fc2(self.relu(self.fc1(x)))


torch.manual_seed(0)
images, labels = torch.rand(6000, 1, 28, 28), torch.randint(0, 10, (6000,))
loader = DataLoader(TensorDataset(images, labels), batch_size=100, shuffle=True)
model = NeuralNet()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

while True:
    for i, (images, labels) in enumerate(loader):
        tick()
        images = images.reshape(-1, 28 * 28)
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (i + 1) % 20 == 0:
            print(f"step {i + 1}, loss {loss.item():.4f}")
