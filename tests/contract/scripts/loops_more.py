"""Training loops with unusual optimizers, precisions, parameters and schedules."""

import os
import resource
import signal

import numpy as np
import torch
import torch.nn.functional as F
from scenes import keep, mlp, play, say, scene, table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

x, y = table()
links = torch.eye(40).to_sparse()  # there from the first step on, when a snapshot looks at the script's variables


def batches(size=14):
    """A shuffled pass over the rows."""
    return DataLoader(TensorDataset(x, y), size, shuffle=True)


def step(opt, loss):
    """zero_grad, backward, step, say."""
    opt.zero_grad()
    loss.backward()
    opt.step()
    say(loss)


@scene
def every_optimizer():
    for name in ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "ASGD", "RMSprop"]:
        print(name)
        torch.manual_seed(1)
        model = mlp()
        opt = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        for xb, yb in batches():
            step(opt, F.cross_entropy(model(xb), yb))
    keep(model)


@scene
def parameter_groups_and_saved_optimizer():
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.3}, {"params": model[2].parameters(), "weight_decay": 0.1}]
    opt = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    for xb, yb in batches():
        step(opt, F.cross_entropy(model(xb), yb))
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, "checkpoint.pt")
    model = mlp()
    opt = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=1.0, momentum=0.9)
    state = torch.load("checkpoint.pt")
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    for xb, yb in batches():
        step(opt, F.cross_entropy(model(xb), yb))
    keep(model)


@scene
def schedulers():
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=9)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0)
    for _ in range(3):
        total = 0.0
        for xb, yb in batches():
            loss = F.cross_entropy(model(xb), yb)
            step(opt, loss)
            cosine.step()
            total += loss.item() * xb.size(0)
        plateau.step(total / len(x))
        print(f"lr {opt.param_groups[0]['lr']:.9g} mean {total / len(x):.9g}")
    one = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.5, epochs=1, steps_per_epoch=len(batches()))
    for xb, yb in batches():
        step(opt, F.cross_entropy(model(xb), yb))
        one.step()
        print(f"lr {one.get_last_lr()[0]:.9g}")
    keep(model)


@scene
def grad_scaler():
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for i, (xb, yb) in enumerate(batches()):
        opt.zero_grad()
        loss = F.cross_entropy(model(xb), yb)
        if i == 1:
            loss = loss * float("inf")  # a step that every rank must skip
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        print(f"norm {nn.utils.clip_grad_norm_(model.parameters(), 0.5).item():.9g}")
        scaler.step(opt)
        scaler.update()
        print("scale", scaler.get_scale(), f"loss {loss.item():.9g}")
    keep(model)


@scene
def autocast_bf16():
    """bf16 rounds too coarsely to compare digits: types and shapes are compared."""
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for xb, yb in batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(xb)
            print(out.dtype, tuple(out.shape))
            loss = F.cross_entropy(out, yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(loss.dtype, model[0].weight.grad.dtype, 0.5 < loss.item() < 2)


@scene
def float64_parameters():
    model = mlp().double()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    for xb, yb in batches():
        step(opt, F.cross_entropy(model(xb.double()), yb))
    print(next(model.parameters()).dtype)
    keep(model)


@scene
def bf16_parameters():
    """bf16 rounds too coarsely to compare digits: the types, shapes and the fall of the loss are compared."""
    model = mlp().to(torch.bfloat16)
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(8):
        for xb, yb in batches():
            loss = F.cross_entropy(model(xb.to(torch.bfloat16)).float(), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    print(model[0].weight.dtype, model[0].weight.grad.dtype, losses[-1] < 0.8 * losses[0])


@scene
def updates_by_hand():
    model = mlp()
    for xb, yb in batches():
        loss = F.cross_entropy(model(xb), yb)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.2 * p.grad
        say(loss)
    w, b = torch.zeros(6, 3, requires_grad=True), torch.zeros(3, requires_grad=True)  # and no module either
    for xb, yb in batches():
        loss = F.cross_entropy(xb @ w + b, yb)
        loss.backward()
        with torch.no_grad():
            w -= 0.5 * w.grad
            b -= 0.5 * b.grad
            w.grad.zero_()
            b.grad = None
        say(loss)
    for xb, yb in batches():
        loss = F.cross_entropy(xb @ w + b, yb)
        loss.backward()
        w.data.add_(w.grad.data, alpha=-0.5)
        b.data = b.data - 0.5 * b.grad
        w.grad, b.grad = None, None
        say(loss)
    keep(model)
    torch.save([w, b], "by_hand.pt")


@scene
def frozen_then_not():
    model = mlp()
    model[0].requires_grad_(False)
    opt = torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=0.2)
    for xb, yb in batches():
        step(opt, F.cross_entropy(model(xb), yb))
    model[0].requires_grad_(True)
    opt.add_param_group({"params": model[0].parameters(), "lr": 0.05})
    for xb, yb in batches():
        step(opt, F.cross_entropy(model(xb), yb))
    model[2].weight.requires_grad = False
    for xb, yb in batches():
        step(opt, F.cross_entropy(model(xb), yb))
    keep(model)


@scene
def unused_parameters():
    model = mlp()
    spare = nn.Linear(6, 3)
    opt = torch.optim.Adam([*model.parameters(), *spare.parameters()], lr=0.02)
    for i, (xb, yb) in enumerate(batches(7)):
        out = model(xb) + spare(xb) if i % 2 else model(xb)
        step(opt, F.cross_entropy(out, yb))
        print(spare.weight.grad is None)
    keep(model, spare)


class Experts(nn.Module):
    """Rows go to one of three experts: on some ranks an expert sees no row at all."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, v):
        out = torch.zeros(len(v), 3)
        which = (v[:, 0] > 0).long() + (v[:, 0] > 1.2).long()
        for k, expert in enumerate(self.experts):
            rows = (which == k).nonzero(as_tuple=True)[0]
            if len(rows):
                out = out.index_add(0, rows, expert(v[rows]))
        return out


@scene
def parameters_for_some_rows():
    model = Experts()
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for xb, yb in batches(9):
        step(opt, F.cross_entropy(model(xb), yb))
        print([e.weight.grad is None for e in model.experts])
    keep(model)


@scene
def branch_on_the_data():
    """The loop itself looks at the batch and takes one way or another."""
    a, b = mlp(), nn.Linear(6, 3)
    opt = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.3)
    for xb, yb in batches(9):
        if xb[:, 0].mean() > 0 or (yb == 1).sum() > 5:
            print("a")
            out = a(xb)
        else:
            print("b")
            out = b(xb)
        step(opt, F.cross_entropy(out, yb))
    keep(a, b)


@scene
def shared_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Linear(6, 6), nn.Linear(6, 6)
            self.up.weight = self.down.weight

        def forward(self, v):
            return self.up(torch.tanh(self.down(torch.tanh(self.down(v)))))

    model = Tied()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    print(len(list(model.parameters())))
    for xb, _ in batches():
        step(opt, F.mse_loss(model(xb), xb))
    keep(model)


@scene
def module_made_mid_run():
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.2)
    for i, (xb, yb) in enumerate(batches(7)):
        if i == 2:
            model.append(nn.Tanh())
            model.append(nn.Linear(3, 3))
            opt.add_param_group({"params": model[-1].parameters()})
        step(opt, F.cross_entropy(model(xb), yb))
    keep(model)


class Bag(nn.Module):
    """A table of vectors whose gradient is sparse."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(12, 5, sparse=True), nn.Linear(5, 3)

    def forward(self, words):
        return self.out(self.table(words).mean(1))


@scene
def sparse_gradients():
    words = torch.randint(12, (40, 4))
    for make in (
        lambda m: [torch.optim.SGD(m.parameters(), lr=0.3)],
        lambda m: [torch.optim.SparseAdam(m.table.parameters(), 0.02), torch.optim.Adam(m.out.parameters(), 0.02)],
        lambda m: [torch.optim.Adagrad(m.parameters(), lr=0.1)],
    ):
        model = Bag()
        opts = make(model)
        for wb, yb in DataLoader(TensorDataset(words, y), 14, shuffle=True):
            loss = F.cross_entropy(model(wb), yb)
            for o in opts:
                o.zero_grad()
            loss.backward()
            print(model.table.weight.grad.is_sparse, f"{model.table.weight.grad.to_dense().abs().sum():.6f}")
            for o in opts:
                o.step()
            say(loss)
    print(f"{torch.sparse.mm(links, model(words)).sum():.5f}")
    keep(model)


@scene
def numpy_that_raises():
    """The script has NumPy raise where numbers get too small; its gradients, which are PyTorch's, may be that small."""
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=1e36)
    before = np.seterr(all="raise")
    try:
        for xb, yb in batches():
            step(opt, 1e-38 * F.cross_entropy(model(xb), yb))
            print((model[0].weight.grad != 0).any().item(), (model[0].weight.grad.abs().max() < 1e-37).item())
        try:
            np.float32(1e-30) * np.float32(1e-30)
        except FloatingPointError as error:
            print(error)
    finally:
        np.seterr(**before)
    keep(model)


@scene
def files_that_may_not_grow():
    """A limit for the sizes of files, smaller than the gradients; the script's own files are held to it."""
    model = nn.Linear(6, 60_000)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        for xb, yb in batches():
            step(opt, F.cross_entropy(model(xb), yb))
        try:
            with open("large.bin", "wb") as file:
                file.write(bytes(1 << 21))
        except OSError as error:
            print(error.strerror, os.path.getsize("large.bin"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    print(f"{sum(p.double().abs().sum() for p in model.parameters()):.6f}")


@scene
def weights_averaged():
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    mean = torch.optim.swa_utils.AveragedModel(model)
    for xb, yb in batches():
        step(opt, F.cross_entropy(model(xb), yb))
        mean.update_parameters(model)
    with torch.no_grad():
        say(F.cross_entropy(mean(x), y))
    keep(model, mean)


@scene
def functional_and_vmapped():
    """torch.func: gradients as values, per-sample ones too."""
    model = mlp()
    params = {k: v.detach() for k, v in model.named_parameters()}

    def loss_of(p, xb, yb):
        return F.cross_entropy(torch.func.functional_call(model, p, (xb,)), yb)

    for xb, yb in batches():
        grads, loss = torch.func.grad_and_value(loss_of)(params, xb, yb)
        params = {k: p - 0.2 * grads[k] for k, p in params.items()}
        say(loss)
    each = torch.func.vmap(lambda a, b: torch.func.grad(loss_of)(params, a.unsqueeze(0), b.unsqueeze(0))["0.bias"])(
        x[:5], y[:5]
    )
    print(tuple(each.shape), f"{each.abs().sum().item():.9g}")
    torch.save(params, "functional.pt")


play()
