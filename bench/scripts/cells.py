"""Sine waves by two LSTM cells in a loop over time, with LBFGS. A step is one call of its closure."""

import torch
from stopwatch import tick
from torch import nn


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 51), nn.LSTMCell(51, 51), nn.Linear(51, 1)

    def forward(self, input):
        outputs = []
        h_t, c_t, h_t2, c_t2 = (torch.zeros(input.size(0), 51, dtype=torch.double) for _ in range(4))
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            outputs += [self.linear(h_t2)]
        return torch.cat(outputs, dim=1)


torch.manual_seed(0)
phase = torch.randint(-80, 80, (97, 1))
data = torch.sin((torch.arange(500) + phase) / 20.0).double()
input, target = data[:, :-1], data[:, 1:]
seq = Sequence().double()
criterion = nn.MSELoss()
optimizer = torch.optim.LBFGS(seq.parameters(), lr=0.8)


def closure():
    tick()
    optimizer.zero_grad()
    loss = criterion(seq(input), target)
    print("loss:", loss.item())
    loss.backward()
    return loss


while True:
    optimizer.step(closure)
