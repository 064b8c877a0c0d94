"""What was found by attacking: models and scripts whose ways change, hide or look where one would not expect it."""

import os
import random
import time

import torch
import torch.nn.functional as F
from scenes import play, say, scene, table
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

x, y = table(60, 8)


def batches(size=10):
    return DataLoader(TensorDataset(x, y), size, shuffle=True)


def train(model, epochs=2, **more):
    """The plain loop; `more` goes to the model's call."""
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(epochs):
        for xb, yb in batches():
            loss = F.cross_entropy(model(xb, **more), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            say(loss)


class Two(nn.Module):
    """Two layers with something between, which the scenes fill in."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(8, 16), nn.Linear(16, 3), between

    def forward(self, x, *args):
        return self.last(F.relu(self.between(self, self.first(x), *args)))


@scene
def drop_path():
    """Whole rows dropped, as timm does; by chance none in the first batches."""
    train(Two(lambda m, h: h * h.new_empty(h.shape[0], 1).bernoulli_(0.95) / 0.95), epochs=5)


@scene
def sometimes_mixed():
    """Rows mix only when a coin says so."""
    train(Two(lambda m, h: h - h.mean(0) if random.random() < 0.2 else h), epochs=5)


@scene
def layer_drop():
    train(Two(lambda m, h: h if random.random() < 0.3 else F.dropout(h, 0.2)), epochs=4)


@scene
def dropout_of_weights():
    train(Two(lambda m, h: F.dropout(h @ F.dropout(torch.eye(16), 0.1), 0.1)), epochs=3)


@scene
def some_labels_dropped():
    train(Two(lambda m, h: torch.where((torch.rand(h.shape[0]) < 0.05)[:, None], torch.zeros_like(h), h)), epochs=4)


@scene
def stages():
    """Switched by an attribute, by an int, by a float."""

    def between(m, h, stage, alpha):
        h = h - h.mean(0, keepdim=True) if getattr(m, "centre", False) else h
        h = h / h.norm(dim=0, keepdim=True) if stage == 1 else h
        return (1 - alpha) * h + alpha * h.flip(0) if alpha > 0 else h

    model = Two(between)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    step = 0
    for _ in range(5):
        for xb, yb in batches():
            step += 1
            model.centre = 9 < step < 13
            loss = F.cross_entropy(model(xb, int(17 < step < 21), 0.3 if 23 < step < 26 else 0.0), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            say(loss)


@scene
def lengths_in_a_list():
    """All alike in the first batches, as bucketing gives them."""
    net = nn.ModuleDict({"table": nn.Embedding(20, 8), "last": nn.Linear(8, 2)})

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, ids, lengths):
            keep = (torch.arange(ids.size(1))[None] < torch.tensor(lengths)[:, None]).float()
            return self.net["last"]((self.net["table"](ids) * keep[..., None]).sum(1) / keep.sum(1, keepdim=True))

    model = Net()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(10):
        ids, labels = torch.randint(0, 20, (6, 5)), torch.randint(0, 2, (6,))
        loss = F.cross_entropy(model(ids, [5] * 6 if step < 5 else [5, 4, 4, 3, 2, 1]), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)


@scene
def fresh_leaves():
    """Weights that are no parameters: made anew each step, handed in or kept as an attribute."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    for _ in range(6):
        fast = {k: v.detach().clone().requires_grad_(True) for k, v in net.named_parameters()}
        loss = F.cross_entropy(functional_call(net, fast, (x,)), y)
        loss.backward()
        with torch.no_grad():
            for k, v in net.named_parameters():
                v -= 0.1 * fast[k].grad
        say(loss)
    model = Two(lambda m, h: h * m.gain)
    model.gain = torch.ones(16, requires_grad=True)
    for _ in range(6):
        loss = F.cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        model.gain = (model.gain - 0.1 * model.gain.grad).detach().requires_grad_(True)
        say(loss)
        print(f"{model.gain.norm().item():.9g}")


@scene
def late_hooks():
    """Features and Grad-CAM, after the training."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    train(model)
    features, seen = [], {}
    handle = model[1].register_forward_hook(lambda m, i, o: features.append(o.detach()))
    for xb, _ in batches():
        model(xb)
    handle.remove()
    print(torch.cat(features).shape, f"{torch.cat(features).sum().item():.6g}")
    model[1].register_forward_hook(lambda m, i, o: seen.__setitem__("a", o))
    model[1].register_full_backward_hook(lambda m, gi, go: seen.__setitem__("g", go[0]))
    xb, yb = next(iter(batches()))
    model(xb)[range(len(yb)), yb].sum().backward()
    cam = F.relu((seen["a"] * seen["g"].mean(1, keepdim=True)).sum(1))
    print(cam.shape, f"{cam.sum().item():.6g} {seen['g'].abs().sum().item():.6g}")
    out = model(xb) * 2
    out.retain_grad()
    F.cross_entropy(out, yb).backward()
    print(f"{seen['g'].norm().item():.6g} {out.grad.norm().item():.6g}", out.grad[0].tolist())


class Backwards(torch.autograd.Function):
    """Calls a model, without a graph, forward and in backward: what solvers with an adjoint do."""

    @staticmethod
    def forward(ctx, model, start, *weights):
        with torch.no_grad():
            out = start + 0.5 * model(start)
        ctx.model, ctx.start, ctx.weights = model, start, weights
        return out

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            start = ctx.start.detach().requires_grad_(True)
            out = start + 0.5 * ctx.model(start)
            return None, *torch.autograd.grad(out, (start, *ctx.weights), grad)


class Scaled(torch.autograd.Function):
    """Work row by row, but for the gradient of the gain."""

    @staticmethod
    def forward(ctx, rows, gain):
        ctx.save_for_backward(rows, gain)
        return rows * gain

    @staticmethod
    def backward(ctx, grad):
        rows, gain = ctx.saved_tensors
        return grad * gain, (grad * rows).sum(0)


class Clipped(torch.autograd.Function):
    """Not linear in its gradient, row by row."""

    @staticmethod
    def forward(ctx, rows):
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.004, 0.004)


class Shortened(Clipped):
    """Nor is this, and all rows meet in it."""

    @staticmethod
    def backward(ctx, grad):
        return grad / (1 + 10 * grad.norm())


class Clipping(nn.Module):
    def forward(self, rows):
        return Clipped.apply(rows)


@scene
def functions_with_a_backward_of_their_own():
    model, gain = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.ones(8, requires_grad=True)
    last = nn.Sequential(nn.Linear(8, 8), Clipping(), nn.Linear(8, 3))
    opt = torch.optim.SGD([*model.parameters(), *last.parameters()], 0.1)
    for xb, yb in [*batches(), (x[:25], y[:25]), (x[25:], y[25:])]:
        out = Scaled.apply(Backwards.apply(model, xb, *model.parameters()), gain)
        loss = F.cross_entropy(last(Shortened.apply(Clipped.apply(out))), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            gain -= 0.1 * gain.grad
            gain.grad = None
        say(loss)
    print(f"{gain.norm().item():.6g}")


@scene
def what_forward_tells():
    """A forward that prints its batch, and one that keeps its size."""

    def telling(m, h):
        print("in the model:", h.size(), f"{h.shape}", f"{h.size(0):d}")
        return h

    def keeping(m, h):
        m.rows, m.kept_shape = h.size(0), h.shape
        return h

    for between in (telling, keeping):
        model = Two(between)
        for xb, _ in batches():
            out = model(xb)
            print(f"{out.sum().item() / getattr(model, 'rows', 1):.6g}", getattr(model, "kept_shape", ""))


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
def views_of_a_batch():
    """Changed through a part of it."""
    changes = {
        "chunk": lambda b: b.chunk(2)[0].zero_(),
        "rows": lambda b: [row.clamp_(-0.5, 0.5) for row in b],
        "flat": lambda b: b.view(-1)[3:5].fill_(9),
        "transposed": lambda b: b.t()[0].zero_(),
        "first": lambda b: b[0].fill_(7),
        "data": lambda b: b.data[2].fill_(8),
        "corner": lambda b: b.detach()[3:, 1].add_(5),
        "column": lambda b: b[:, 1][2:4].mul_(30),
    }
    for name, change in changes.items():
        xb = next(iter(batches()))[0]
        change(xb)
        print(name, f"{xb.sum().item():.6g} {xb.mul(xb).sum().item():.6g}", xb[0, 0].item())


@scene
def indices_that_are_rows():
    for size in (2, 3, 4, 10):
        xb, yb = next(iter(batches(size)))
        print(xb.index_select(1, yb).shape, f"{xb.index_select(1, yb).sum().item():.6g}", xb[:, yb].shape)
        print(xb[:, 1].tolist(), f"{torch.outer(xb[:, 0], xb[:, 1]).sum().item():.6g}")


@scene
def gradients_of_a_batch():
    """Read, changed in place, added to; and latents that an optimizer finds for each batch."""
    model = Two(lambda m, h: h)
    xb, yb = next(iter(batches()))
    xb.requires_grad_(True)
    changes = [lambda g: g, lambda g: g.mul_(0.5), lambda g: g.data.zero_(), lambda g: g]
    for change in changes:
        F.cross_entropy(model(xb), yb).backward()
        print(f"{xb.grad.norm().item():.6g}")
        change(xb.grad)
    xb.grad = torch.ones(xb.shape)
    F.cross_entropy(model(xb), yb).backward()
    print(f"{xb.grad.norm().item():.6g}")
    for xb, yb in batches(25):
        latent = torch.zeros_like(xb).requires_grad_(True)
        opt = torch.optim.Adam([latent], 0.1)
        for _ in range(2):
            loss = F.cross_entropy(model(xb + latent), yb) + latent.pow(2).sum()
            opt.zero_grad()
            loss.backward()
            opt.step()
        say(loss)
        print(f"{latent.detach().norm().item():.6g}")


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


play()
