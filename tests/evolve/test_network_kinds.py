"""What leaves a network leaves it the same: every kind of network is cut exactly, or left alone."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from oars.evolve import cut, fit
from oars.evolve.graph import Net, operations
from oars.evolve.grow import join, widened
from oars.evolve.trial import Example, draw_weights

CUT, ALONE = True, False


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.inner, self.second = nn.Conv2d(16, 24, 3, padding=1), nn.BatchNorm2d(24)
        self.back, self.third = nn.Conv2d(24, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.first(self.stem(x)))
        x = F.relu(x + self.third(self.back(F.relu(self.second(self.inner(x))))))
        return self.head(x.mean((2, 3)))


class Views(nn.Module):
    """A convolution whose result is laid out by hand: its width stands in the code."""

    def __init__(self, fixed):
        super().__init__()
        self.fixed, self.conv = fixed, nn.Conv2d(3, 16, 3)
        self.hidden, self.out = nn.Linear(16 * 36, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = F.adaptive_avg_pool2d(F.relu(self.conv(x)), 6)
        x = x.view(-1, 16 * 36) if self.fixed else x.flatten(1)
        return self.out(F.dropout(F.relu(self.hidden(x)), 0.5, self.training))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.up, self.join = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.Conv2d(32, 16, 3, padding=1)
        self.out = nn.Conv2d(16, 2, 1)

    def forward(self, x):
        a = F.relu(self.down(x))
        b = self.up(F.relu(self.deep(F.max_pool2d(a, 2))))
        return self.out(F.relu(self.join(torch.cat([a, b], 1))))


class Depthwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.expand, self.norm = nn.Conv2d(3, 24, 1), nn.BatchNorm2d(24)
        self.deep, self.project = nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.Conv2d(24, 12, 1)
        self.head = nn.Linear(12, 10)

    def forward(self, x):
        return self.head(self.project(F.relu6(self.deep(F.relu6(self.norm(self.expand(x)))))).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.back = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.second, self.wide, self.narrow = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = (t.view(rows, length, 4, 8).transpose(1, 2) for t in self.qkv(self.norm(x)).split(width, 2))
        x = x + self.back(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.block, self.norm = nn.Embedding(50, 32), Attention(), nn.LayerNorm(32)
        self.out = nn.Linear(32, 50, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x):
        return self.out(self.norm(self.block(self.words(x))))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.hidden, self.out = nn.LSTM(3, 16, batch_first=True), nn.Linear(16, 24), nn.Linear(24, 5)

    def forward(self, x):
        return self.out(F.relu(self.hidden(self.lstm(x)[0][:, -1])))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.out = nn.Linear(3, 48), nn.Linear(24, 2)

    def forward(self, x):
        value, gate = self.both(x).chunk(2, -1)
        return self.out(value * torch.sigmoid(gate))


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.mean, self.spread = nn.Linear(3, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.decode, self.out = nn.Linear(4, 32), nn.Linear(32, 3)

    def forward(self, x):
        h = F.relu(self.encode(x))
        mean, spread = self.mean(h), self.spread(h)
        return self.out(F.relu(self.decode(mean + torch.exp(spread / 2) * torch.randn_like(mean)))), mean, spread


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.next = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.Conv2d(16, 12, 3)
        self.head = nn.Linear(12, 2)

    def forward(self, x):
        return self.head(self.next(F.relu(self.norm(self.conv(x)))).mean((2, 3)))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.again, self.out = nn.Linear(3, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = F.relu(self.again(x))
        return self.out(x)


class Auxiliary(nn.Module):
    """A second head that is there in training alone."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(3, 24), nn.Linear(24, 16), nn.Linear(16, 2)
        self.head = nn.Parameter(torch.randn(24, 2))

    def forward(self, x):
        h = F.relu(self.first(x))
        out = self.out(F.relu(self.second(h)))
        return (out, h @ self.head) if self.training else out


class Gate(nn.Module):
    """A norm over units behind a gate that is closed at the beginning."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(3, 16), nn.LayerNorm(16), nn.Linear(16, 2)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.gate * self.out(self.norm(self.first(x)))


def images():
    return torch.randn(4, 3, 12, 12)


def vectors():
    return torch.randn(6, 3)


def sequences():
    return torch.randn(4, 7, 3)


KINDS = {
    "dense layers": (lambda: nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 2)),
                     vectors, {"0": CUT, "2": CUT, "4": ALONE}),
    "residual": (Residual, images, {"stem": CUT, "inner": CUT, "back": CUT, "head": ALONE}),
    "flattened": (lambda: Views(False), images, {"conv": CUT, "hidden": CUT, "out": ALONE}),
    "a fixed view": (lambda: Views(True), images, {"conv": ALONE, "hidden": CUT, "out": ALONE}),
    "U-Net": (UNet, images, {"down": CUT, "deep": CUT, "up": CUT, "join": CUT, "out": ALONE}),
    "depthwise": (Depthwise, images, {"expand": CUT, "deep": CUT, "project": CUT, "head": ALONE}),
    "tied embedding": (Tied, lambda: torch.randint(0, 50, (4, 6)),
                       {"block.qkv": ALONE, "block.back": ALONE, "block.wide": CUT, "block.narrow": ALONE,
                        "out": ALONE}),
    "behind an LSTM": (Recurrent, sequences, {"hidden": CUT, "out": ALONE}),
    "gated": (Gated, vectors, {"both": CUT, "out": ALONE}),
    "variational": (Variational, vectors, {"encode": CUT, "mean": ALONE, "spread": ALONE, "decode": CUT, "out": ALONE}),
    "GroupNorm": (Grouped, images, {"conv": ALONE, "next": CUT, "head": ALONE}),
    "a layer used three times": (Shared, vectors, {"first": CUT, "again": CUT, "out": ALONE}),
    "a head for training alone": (Auxiliary, vectors, {"first": ALONE, "second": CUT, "out": ALONE}),
    "a norm behind a closed gate": (Gate, vectors, {"first": ALONE, "out": ALONE}),
}


def filled_again(small: nn.Module, full: nn.Module) -> nn.Module:
    """The cut network in the first one's shapes."""
    kept = cut.kept_in(small)
    full.load_state_dict({name: cut.filled(value, kept[name], cut.fill_value(name)) if name in kept else value
                          for name, value in small.state_dict().items()})
    return full


def outputs(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with torch.no_grad():
        out = model.eval()(x)
    return list(out) if isinstance(out, tuple) else [out]


def halved(model: nn.Module, x: torch.Tensor) -> tuple[nn.Module, Net]:
    """The model cut in place to half of its widths, and what was said of its layers."""
    net = Net(model.train(), [Example("", (x,), {})], lambda weight: True)
    net.examine()
    weights = dict(model.named_parameters())
    change = net.choose(lambda width: width // 2, lambda name: weights[name].detach().square())
    if change is not None:
        cut.cut_module(model, change)
    return model, net


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_is_cut_exactly_or_left_alone(kind):
    torch.manual_seed(0)
    build, example, expected = KINDS[kind]
    model, x = build(), example()
    draw_weights(model)
    first = copy.deepcopy(model)
    before, operations_before = sum(p.numel() for p in model.parameters()), operations(model, Example("", (x,), {}))
    small, net = halved(model, x)
    assert {name: not why for name, why in net.reasons.items()} == expected
    if CUT in expected.values():
        assert sum(p.numel() for p in small.parameters()) < before
        assert 0 < operations(small, Example("", (x,), {})) < operations_before
    for ours, theirs in zip(outputs(small, x), outputs(filled_again(small, copy.deepcopy(first)), x), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    refitted = fit(build(), small.state_dict())
    for ours, theirs in zip(outputs(small, x), outputs(refitted, x), strict=True):
        assert torch.equal(ours, theirs)
    loss = sum(out.square().mean() for out in (lambda o: o if isinstance(o, tuple) else (o,))(small.train()(x)))
    loss.backward()
    assert all(p.grad is None or p.grad.shape == p.shape for p in small.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_grows_to_the_same_or_is_left_alone(kind):
    torch.manual_seed(0)
    build, example, expected = KINDS[kind]
    model, x = build(), example()
    draw_weights(model)
    before, width = outputs(model, x), sum(p.numel() for p in model.parameters())
    changes, reasons = widened(model, [Example("", (x,), {})], {"*": 40})
    assert not set(reasons) & {name for change in changes for name in change.attributes if name in expected
                               and "out_features" in change.attributes[name]}
    optimizer = torch.optim.Adam(model.parameters())
    for change in changes:
        join(model, change, [optimizer])
    assert (sum(p.numel() for p in model.parameters()) > width) == bool(changes)
    for ours, theirs in zip(outputs(model, x), before, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    if kind in ("dense layers", "flattened", "residual", "variational"):
        assert changes
    for _ in range(2):
        out = model.train()(x)
        sum(o.square().mean() for o in (out if isinstance(out, tuple) else (out,))).backward()
        optimizer.step()


@st.composite
def networks(draw):
    """Layers behind each other with branches that are added or joined, and norms, activations and views between."""
    wide = st.sampled_from([9, 12, 16, 20])
    image = draw(st.booleans())
    parts, width = [], draw(wide)
    first = width
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["layer", "add", "join", "norm", "mixing norm", "act", "gate"]))
        to = draw(wide)
        parts.append((kind, width, to))
        width = {"layer": to, "join": width + to, "gate": to}.get(kind, width)
    return image, first, parts, width


class Random(nn.Module):
    def __init__(self, image, first, parts, width):
        super().__init__()
        self.image, self.kinds = image, [kind for kind, _, _ in parts]
        self.stem, self.parts = self.layer(3, first), nn.ModuleList()
        for kind, here, to in parts:
            self.parts.append({
                "layer": lambda h=here, t=to: self.layer(h, t), "add": lambda h=here: self.layer(h, h),
                "join": lambda h=here, t=to: self.layer(h, t), "act": nn.GELU,
                "norm": lambda h=here: nn.BatchNorm2d(h) if image else nn.BatchNorm1d(h),
                "mixing norm": lambda h=here: nn.GroupNorm(1, h),
                "gate": lambda h=here, t=to: self.layer(h, 2 * t)}[kind]())
        self.head = nn.Linear(width, 3)

    def layer(self, here, to):
        return nn.Conv2d(here, to, 3, padding=1) if self.image else nn.Linear(here, to)

    def forward(self, x):
        x = self.stem(x)
        for kind, part in zip(self.kinds, self.parts, strict=True):
            y = part(x)
            if kind == "add":
                y = x + F.relu(y)
            elif kind == "join":
                y = torch.cat([x, F.relu(y)], 1)
            elif kind == "gate":
                value, gate = y.chunk(2, 1)
                y = value * torch.sigmoid(gate)
            x = y
        return self.head(x.flatten(2).mean(2) if self.image else x)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(networks())
def test_random_networks_stay_what_they_are(network):
    torch.manual_seed(0)
    model = Random(*network)
    draw_weights(model)
    x, first = images() if network[0] else vectors(), copy.deepcopy(model)
    small, _ = halved(model, x)
    (ours,), (theirs,) = outputs(small, x), outputs(filled_again(small, first), x)
    assert torch.allclose(ours, theirs, atol=1e-4)
