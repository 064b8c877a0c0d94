"""Hooks, leaves that are no parameters, functions with a backward of their own: where a script meets gradients."""

import torch
import torch.nn.functional as F
from scenes import keep, mlp, play, say, scene
from small import Around, Two, batches, descend, few_x, few_y, train, x, y
from torch import nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.data import DataLoader, TensorDataset


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
def leaves_made_anew():
    """Weights in a dict, which every step replaces."""
    more = {"gain": torch.ones(3, requires_grad=True)}
    model = Around(lambda m, h, r: h * more["gain"])

    def replace(rows):
        if more["gain"].grad is not None:
            more["gain"] = (more["gain"] - 0.1 * more["gain"].grad).detach().requires_grad_()

    descend(model, update=replace, epochs=3)
    say(more["gain"].norm())


@scene
def hooks_of_all_modules():
    model = mlp()
    descend(model)
    handle = register_module_forward_hook(lambda m, i, o: o + 0.1 * o.mean(0) if isinstance(m, nn.Tanh) else None)
    descend(model)
    handle.remove()
    descend(model)


@scene
def hooks_on_leaves_whose_gradients_are_handed_out():
    model = mlp()
    model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    model[2].bias.register_hook(lambda grad: grad * torch.tensor([1.0, 0.0, 1.0]))
    for xb, yb in DataLoader(TensorDataset(few_x, few_y), 14):
        grads = torch.autograd.grad(F.cross_entropy(model(xb), yb), list(model.parameters()))
        with torch.no_grad():
            for p, grad in zip(model.parameters(), grads, strict=True):
                p -= 0.1 * grad
        say(sum(grad.abs().sum() for grad in grads))
    keep(model)


@scene
def hooks_on_rows():
    """One that goes back once more by itself, as deep equilibrium models do, and one that mixes rows."""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.again, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, rows):
            def step(state):
                return torch.tanh(0.3 * self.again(state) + self.first(rows))

            with torch.no_grad():
                state = step(step(rows.new_zeros(rows.shape[0], 8)))
            state = step(state)
            at = state.detach().requires_grad_()
            there = step(at)

            def through(grad):
                out = grad
                for _ in range(4):
                    out = torch.autograd.grad(there, at, out, retain_graph=True)[0] + grad
                return out

            state.register_hook(through)
            out = self.last(state)
            out.register_hook(lambda grad: 0.5 * grad + 0.5 * grad.flip(0))
            return out

    descend(Net())
    model = mlp()

    def loss_of(out, target):
        out.register_hook(lambda grad: grad.flip(0))
        return F.cross_entropy(out, target)

    descend(model, loss_of=loss_of)


play()
