"""Softmax regression on images of 28 x 28, as in first tutorials."""

import torch
from stopwatch import tick
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images, labels = torch.rand(6000, 1, 28, 28), torch.randint(0, 10, (6000,))
loader = DataLoader(TensorDataset(images, labels), batch_size=100, shuffle=True)
model = nn.Linear(784, 10)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

while True:
    for images, labels in loader:
        tick()
        outputs = model(images.reshape(-1, 28 * 28))
        loss = criterion(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
