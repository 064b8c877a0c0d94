"""An LSTM over the 28 lines of an image."""

import torch
from stopwatch import tick
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class RNN(nn.Module):
    def __init__(self, input_size=28, hidden_size=128, num_layers=2):
        super().__init__()
        self.hidden_size, self.num_layers = hidden_size, num_layers
        self.lstm = nn.LSTM(input_size, hidden_size, num_layers, batch_first=True)
        self.fc = nn.Linear(hidden_size, 10)

    def forward(self, x):
        h0 = torch.zeros(self.num_layers, x.size(0), self.hidden_size)
        c0 = torch.zeros(self.num_layers, x.size(0), self.hidden_size)
        out, _ = self.lstm(x, (h0, c0))
        return self.fc(out[:, -1, :])


torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.rand(6000, 1, 28, 28), torch.randint(0, 10, (6000,))), 100, shuffle=True)
model = RNN()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

while True:
    for images, labels in loader:
        tick()
        loss = criterion(model(images.reshape(-1, 28, 28)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
