"""PyTorch's other ways to run a model: scripted, traced, lazy, in inference mode, in evaluation, for a given time."""

import os
import time

import torch
import torch.nn.functional as F
from scenes import mlp, play, say, scene
from small import Around, batches, descend, train, x, y
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@scene
def jit_modules():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    train(model, epochs=1)
    model.eval()
    torch.jit.trace(model, x[:2]).save("model.jit")
    loaded = torch.jit.load("model.jit")
    os.remove("model.jit")  # it holds weights as bytes, which agree only to rounding
    for xb, yb in batches():
        say(F.cross_entropy(loaded(xb), yb))


@scene
def lazy_layers_and_inference_mode():
    model = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))
    model(next(iter(batches()))[0])
    train(model)
    model.eval()
    with torch.inference_mode():
        for xb, yb in batches():
            out = model(xb)
            say(F.cross_entropy(out, yb))
            out[:, 0] += xb.add_(1).sum(1)
            print(f"{out.sum().item():.6g}", (out.argmax(1) == yb).sum().item(), out.requires_grad)
    train(model, epochs=1)


@scene
def a_budget_of_time():
    model = nn.Linear(8, 3)
    opt = torch.optim.SGD(model.parameters(), 0.0)
    began = time.time()
    while time.time() - began < 0.3:
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.002)
    say(F.cross_entropy(model(x), y))


@torch.jit.script
def bent(h, bias):
    h = h + bias
    return h * 0.5 * (1.0 + torch.tanh(h))


@scene
def scripted_functions():
    model = Around(lambda m, h, r: bent(h, m.net[0].bias[:3]))
    descend(model)
    descend(mlp(), loss_of=lambda out, target: F.cross_entropy(bent(out, torch.zeros(3)), target))


@scene
def padding_in_evaluation():
    """PyTorch's encoder gives zeros for padding, unless some row of the batch is not padded at its end."""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 2)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, rows, pad):
            return self.last(self.encoder(self.first(rows), src_key_padding_mask=pad).mean(1))

    rows, labels = torch.randn(24, 5, 3), torch.randint(0, 2, (24,))
    pad = torch.arange(5)[None] >= torch.randint(1, 6, (24, 1))
    pad[::6], pad[9] = False, torch.tensor([True, False, False, True, False])
    model = Net()
    descend(model, (rows, pad, labels), epochs=1)
    model.eval()
    for _ in range(2):
        for *inputs, target in DataLoader(TensorDataset(rows, pad, labels), 6):
            with torch.no_grad():
                say(F.cross_entropy(model(*inputs), target))
                with torch.device("cpu"):
                    say(F.cross_entropy(model(*inputs), target))
            say(F.cross_entropy(model(*inputs), target))


play()
