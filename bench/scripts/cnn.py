"""A CNN on images of 28 x 28, with dropout and an evaluation after each epoch."""

import torch
import torch.nn.functional as F
from stopwatch import tick
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


torch.manual_seed(1)
images, labels = torch.rand(3200, 1, 28, 28), torch.randint(0, 10, (3200,))
train = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True)
test = DataLoader(TensorDataset(images[:500], labels[:500]), batch_size=250)
model = Net()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)

while True:
    model.train()
    for batch_idx, (data, target) in enumerate(train):
        tick()
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % 10 == 0:
            print(f"loss {loss.item():.6f}")
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in test:
            correct += (model(data).argmax(1) == target).sum().item()
    print(f"accuracy {correct / 500:.3f}")
