"""torch.compile: of the model, of the step, with and without a compiler of its own."""

import torch
import torch.nn.functional as F
from scenes import fit, keep, mlp, play, say, scene, table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

x, y = table()


def batches():
    """Batches of one size, as people who compile like them."""
    return DataLoader(TensorDataset(x, y), 12, shuffle=True, drop_last=True)


@scene
def compiled_loss():  # the first scene: here an optimizer is made before there is a compiler
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.2)

    @torch.compile(backend="aot_eager")
    def loss_of(xb, yb):
        return F.cross_entropy(model(xb), yb, label_smoothing=0.1)

    for xb, yb in batches():
        loss = loss_of(xb, yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)
    keep(model)


@scene
def eager_backend():
    model = mlp()
    fit(batches(), torch.compile(model, backend="eager"))
    keep(model)


@scene
def aot_eager_backend():
    model = torch.compile(mlp(), backend="aot_eager")
    fit(batches(), model)
    fit(DataLoader(TensorDataset(x, y), 15), model)  # another size, and a smaller last batch


@scene
def compiled_in_place():
    model = mlp()
    model.compile(backend="aot_eager")
    fit(batches(), model)


@scene
def batchnorm_compiled():
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    fit(batches(), torch.compile(model, backend="aot_eager"))
    print(model[1].running_mean.tolist())


@scene
def inductor():
    torch.set_num_threads(1)
    fit(batches(), torch.compile(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))))


play()
