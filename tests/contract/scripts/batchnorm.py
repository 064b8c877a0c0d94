"""Layers that look at the whole batch: their statistics are those of the global batch."""

import torch
import torch.nn.functional as F
from scenes import keep, play, say, scene
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

g = torch.Generator().manual_seed(2)
x = torch.randn(35, 1, 8, 8, generator=g) * 2 + 0.5
y = (x.mean((1, 2, 3)) > 0.5).long()


def train(model, flat=False, loader=None, shape=None):
    """Two passes (the last batch is smaller), then evaluation; prints the buffers too."""
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = loader or DataLoader(TensorDataset(x, y), 16, shuffle=True)
    for _ in range(2):
        model.train()
        for xb, yb in loader:
            if flat:
                xb = xb.view(xb.size(0), *(shape or (-1,)))
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            print(f"rows {len(xb)} loss {loss.item():.9g}")
    for name, buffer in model.named_buffers():
        print(name, f"{buffer.double().sum().item():.9g}")
    model.eval()
    with torch.no_grad():
        for xb, yb in loader:
            if flat:
                xb = xb.view(xb.size(0), *(shape or (-1,)))
            say(F.cross_entropy(model(xb), yb), "test")
    keep(model)


def conv(norm):
    """Conv, norm, relu, twice as small, linear. No bias before a norm: its true gradient is nought, noise only."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), norm, nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 2)
    )


@scene
def two_dimensions():
    train(conv(nn.BatchNorm2d(4)))


@scene
def one_dimension():
    train(nn.Sequential(nn.Linear(64, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)), flat=True)


@scene
def one_dimension_with_length():
    layers = nn.Conv1d(1, 4, 5, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(240, 2)
    train(nn.Sequential(*layers), flat=True, shape=(1, 64))


@scene
def three_dimensions():
    layers = nn.Conv3d(1, 3, 2, bias=False), nn.BatchNorm3d(3), nn.ReLU(), nn.Flatten(), nn.Linear(81, 2)
    train(nn.Sequential(*layers), flat=True, shape=(1, 4, 4, 4))


@scene
def momentum_none():
    train(conv(nn.BatchNorm2d(4, momentum=None)))


@scene
def not_affine():
    train(conv(nn.BatchNorm2d(4, affine=False)))


@scene
def no_running_buffers():
    train(conv(nn.BatchNorm2d(4, track_running_stats=False)))


@scene
def statistics_of_far_rows_without_gradients():
    """Half of the rows are far from zero: their statistics are computed in another way."""
    far = x[:8] * 0.3 + 5
    net = conv(nn.BatchNorm2d(4, track_running_stats=False))
    with torch.no_grad():
        for rows in [*x[:32].split(8), *[torch.cat([x[:4], far[:4]])] * 3]:
            say(net(rows).square().mean())


@scene
def several_layers():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6, eps=1e-3), nn.ReLU(),
        nn.Flatten(), nn.Linear(96, 2, bias=False), nn.BatchNorm1d(2),
    )  # fmt: skip
    train(model)


@scene
def frozen_statistics():
    """Fine-tuning habit: the norm stays in eval while the rest trains."""
    model = conv(nn.BatchNorm2d(4))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for xb, yb in DataLoader(TensorDataset(x, y), 16):
        model.train()
        model[1].eval()
        loss = F.cross_entropy(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)
    print(model[1].num_batches_tracked.item(), model[1].running_mean.tolist())
    keep(model)


@scene
def small_last_batch():
    """35 rows in batches of 11: the last has two, fewer than the ranks."""
    train(conv(nn.BatchNorm2d(4)), loader=DataLoader(TensorDataset(x, y), 11))


@scene
def functional():
    w = nn.Parameter(torch.randn(4, 1, 3, 3) * 0.3)
    mean, var = torch.zeros(4), torch.ones(4)

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.out = w, nn.Linear(144, 2)

        def forward(self, v):
            h = F.batch_norm(F.conv2d(v, self.w), mean, var, training=self.training, momentum=0.2)
            return self.out(torch.relu(h).flatten(1))

    train(Own())
    print(mean.tolist(), var.tolist())


@scene
def by_hand_made_batch():
    model = conv(nn.BatchNorm2d(4))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(4):
        rows = torch.randint(35, (13,))
        loss = F.cross_entropy(model(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)
    print(model[1].running_var.tolist())
    keep(model)


@scene
def other_norms():
    """These look at one row at a time."""
    for norm in (
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4, affine=True),
        nn.LayerNorm([4, 6, 6]),
        nn.LocalResponseNorm(2),
    ):
        print(type(norm).__name__)
        train(conv(norm))


@scene
def instance_norm_with_buffers():
    train(conv(nn.InstanceNorm2d(4, track_running_stats=True)))


@scene
def written_out():
    """A norm over the batch written by hand, inside the model."""

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, 4, 1, 1))

        def forward(self, v):
            mean = v.mean(dim=(0, 2, 3), keepdim=True)
            var = v.var(dim=(0, 2, 3), keepdim=True, unbiased=False)
            return self.scale * (v - mean) / (var + 1e-5).sqrt()

    train(conv(Norm()))


@scene
def spectral_norm():
    train(
        nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(64, 8)), nn.Tanh(), nn.Linear(8, 2)), flat=True
    )


@scene
def gan_with_batchnorm():
    """Generator and critic with norms: each sees several batches a step."""
    gen = nn.Sequential(
        nn.Linear(4, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 64), nn.Unflatten(1, (1, 8, 8))
    )
    dis = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(144, 1)
    )
    og, od = torch.optim.SGD(gen.parameters(), 0.05), torch.optim.SGD(dis.parameters(), 0.05)
    for xb, _ in DataLoader(TensorDataset(x, y), 16, shuffle=True):
        fake = gen(torch.randn(len(xb), 4))
        loss = F.softplus(-dis(xb)).mean() + F.softplus(dis(fake.detach())).mean()
        od.zero_grad()
        loss.backward()
        od.step()
        say(loss, "d")
        loss = F.softplus(-dis(fake)).mean()
        og.zero_grad()
        loss.backward()
        og.step()
        say(loss, "g")
    keep(gen, dis)


class Alike(nn.Module):
    """Compares every row with every other: what is no loader's it gets whole."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 6, bias=False), nn.BatchNorm1d(6))

    def forward(self, rows):
        found = self.inner(rows)
        return found @ found.T


@scene
def whole_and_cut_before_one_backward():
    model = Alike()
    opt = torch.optim.SGD(model.parameters(), lr=0.02)
    for xb, _ in DataLoader(TensorDataset(x, y), 16, shuffle=True, drop_last=True):
        loss = model(torch.randn(8, 64)).square().mean() + model(xb.flatten(1)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)
    keep(model)


play()
