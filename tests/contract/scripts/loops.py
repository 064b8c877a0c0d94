"""Training loops with more than one backward, optimizer, model or gradient in a step."""

import gc
import os
import weakref

import torch
import torch.nn.functional as F
from scenes import keep, mlp, play, say, scene, table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

x, y = table()


def batches(size=14):
    """A shuffled pass over the rows."""
    return DataLoader(TensorDataset(x, y), size, shuffle=True)


@scene
def gan():
    g, d = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)), mlp(classes=1)
    og, od = (torch.optim.Adam(m.parameters(), lr=1e-2, betas=(0.5, 0.999)) for m in (g, d))
    for real, _ in batches():
        n = real.size(0)
        fake = g(torch.randn(n, 3))
        od.zero_grad()
        loss_real = F.binary_cross_entropy_with_logits(d(real), torch.ones(n, 1))
        loss_real.backward()
        loss_fake = F.binary_cross_entropy_with_logits(d(fake.detach()), torch.zeros(n, 1))
        loss_fake.backward()
        od.step()
        og.zero_grad()
        loss_g = F.binary_cross_entropy_with_logits(d(fake), torch.full((n, 1), 1.0))
        loss_g.backward()
        og.step()
        say(loss_real + loss_fake, "d")
        say(loss_g, "g")
    keep(g, d)


@scene
def wasserstein_gan_with_gradient_penalty():
    g, d = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)), mlp(classes=1)
    og, od = torch.optim.SGD(g.parameters(), lr=0.05), torch.optim.SGD(d.parameters(), lr=0.05)
    for real, _ in batches():
        n = len(real)
        fake = g(torch.randn(n, 3)).detach()
        mix = torch.rand(n, 1)
        between = (mix * real + (1 - mix) * fake).requires_grad_(True)
        slope = torch.autograd.grad(
            outputs=d(between), inputs=between, grad_outputs=torch.ones(n, 1), create_graph=True, retain_graph=True
        )[0]
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        loss = d(fake).mean() - d(real).mean() + 10 * penalty
        od.zero_grad()
        loss.backward()
        od.step()
        og.zero_grad()
        gain = -d(g(torch.randn(n, 3))).mean()
        gain.backward()
        og.step()
        say(loss, "d")
        say(penalty, "penalty")
        say(gain, "g")
    keep(g, d)


@scene
def gradients_that_are_exactly_zero():
    """A critic's last bias: the fake half's gradient is the real half's, negated. Adam makes a step of full size of
    anything else than zero. By one backward, by one for each half, and with gradients that are kept for two steps."""
    critics = []
    for halves, keeps in ((1, False), (2, False), (1, True), (2, True)):
        torch.manual_seed(3)
        g, d = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)), mlp(classes=1)
        od = torch.optim.Adam(d.parameters(), lr=1e-2, betas=(0.5, 0.9))
        for step, (real, _) in enumerate(batches()):
            n = len(real)
            fake = g(torch.randn(n, 3)).detach()
            mix = torch.rand(n, 1)
            between = (mix * real + (1 - mix) * fake).requires_grad_(True)
            (slope,) = torch.autograd.grad(d(between).sum(), between, create_graph=True)
            penalty = 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()
            if not keeps or step % 2 == 0:
                od.zero_grad()
            if halves == 2:
                (-d(real).mean()).backward()
                d(fake).mean().backward()
                penalty.backward()
            else:
                (d(fake).mean() - d(real).mean() + penalty).backward()
            print("zero", (d[2].bias.grad == 0).item())
            od.step()
            say(penalty, "penalty")
        critics.append(d)
    keep(*critics)


@scene
def autograd_grad_over_weights():
    """torch.autograd.grad with respect to weights, used as a penalty and as an update."""
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for xb, yb in batches():
        loss = F.cross_entropy(model(xb), yb)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        total = loss + 0.1 * sum((g**2).sum() for g in grads)
        opt.zero_grad()
        total.backward()
        opt.step()
        say(total)
    fast = [p.detach().clone().requires_grad_() for p in model.parameters()]
    for xb, yb in batches():  # the inner loop of meta-learning
        out = F.linear(torch.tanh(F.linear(xb, fast[0], fast[1])), fast[2], fast[3])
        loss = F.cross_entropy(out, yb)
        grads = torch.autograd.grad(loss, fast)
        fast = [(p - 0.2 * g).detach().requires_grad_() for p, g in zip(fast, grads, strict=True)]
        say(loss)
    keep(model)
    torch.save(fast, "fast.pt")


@scene
def gradient_accumulation():
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    every = 3
    for epoch in range(3):
        opt.zero_grad()
        for i, (xb, yb) in enumerate(batches(7)):
            loss = F.cross_entropy(model(xb), yb) / every
            loss.backward()
            say(loss)
            if (i + 1) % every == 0:
                # Gradients may be looked at between backward and step, and must be whole there.
                print(f"norm {sum(p.grad.norm() for p in model.parameters()).item():.9g}")
                opt.step()
                opt.zero_grad()
        print("epoch", epoch)
    keep(model)


@scene
def accumulation_that_changes_its_mind():
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.2)
    steps = iter(batches(4))
    for count in [2, 2, 2, 1, 3]:
        for _ in range(count):
            xb, yb = next(steps)
            F.cross_entropy(model(xb), yb, reduction="sum").backward()
            print(f"grad {model[0].weight.grad.abs().sum().item():.9g}")
        opt.step()
        opt.zero_grad(set_to_none=count % 2 == 0)
    keep(model)


@scene
def several_backward_on_one_graph():
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for xb, yb in batches():
        out = model(xb)
        one = F.cross_entropy(out, yb)
        two = out.pow(2).mean()
        opt.zero_grad()
        one.backward(retain_graph=True)
        before = model[2].bias.grad.clone()
        two.backward(retain_graph=True)
        (0.1 * out.abs().sum()).backward()
        print(f"first {before.abs().sum().item():.9g}")
        opt.step()
        say(one + two)
    keep(model)


@scene
def two_heads_two_optimizers():
    trunk, a, b = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 1)
    oa = torch.optim.SGD([*trunk.parameters(), *a.parameters()], lr=0.1)
    ob = torch.optim.AdamW(b.parameters(), lr=0.02)
    for xb, yb in batches():
        h = torch.tanh(trunk(xb))
        loss = F.cross_entropy(a(h), yb) + 0.3 * F.mse_loss(b(h).squeeze(1), xb.sum(1))
        oa.zero_grad()
        ob.zero_grad()
        loss.backward()
        oa.step()
        ob.step()
        say(loss)
    keep(trunk, a, b)


@scene
def lbfgs_closure():
    model = nn.Linear(6, 3)
    opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    xb, yb = next(iter(batches(30)))
    for _ in range(3):

        def closure():
            opt.zero_grad()
            loss = F.cross_entropy(model(xb), yb) + 0.01 * model.weight.pow(2).sum()
            loss.backward()
            return loss

        say(opt.step(closure))
    keep(model)


@scene
def optimizers_come_and_go():
    """One optimizer lies in memory where another was: on some ranks, and not on others."""
    model, other = nn.Linear(6, 3), mlp()
    gone = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=2)

    def closure():
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    say(gone.step(closure))
    there = id(gone)
    del gone
    gc.collect()
    made = [object.__new__(torch.optim.SGD) for _ in range(5000)]
    opt = next((o for o in made if (id(o) == there) == os.getpid() % 2), made[0])
    opt.__init__(other.parameters(), lr=0.1)
    for xb, yb in batches():
        loss = F.cross_entropy(other(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)
    keep(model, other)


@scene
def what_is_dropped_is_gone():
    """A search that makes a model for every trial must not hold them all."""
    def trial():
        model = mlp()
        opt = torch.optim.Adam(model.parameters(), lr=0.05)
        for xb, yb in batches():
            out = model(xb)
            loss = F.cross_entropy(out, yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            say((out.argmax(1) == yb).sum(), "right")
        keep(model)
        return weakref.ref(model), weakref.ref(opt)

    made = [trial() for _ in range(3)]
    gc.collect()
    print([sum(ref() is not None for ref in refs) for refs in zip(*made, strict=True)])


@scene
def clipping():
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    for xb, yb in batches():
        loss = F.cross_entropy(model(xb), yb, reduction="sum")
        opt.zero_grad()
        loss.backward()
        print(f"norm {nn.utils.clip_grad_norm_(model.parameters(), 1.0).item():.9g}")
        nn.utils.clip_grad_value_(model.parameters(), 0.3)
        opt.step()
        say(loss)
    keep(model)


@scene
def hooks_on_gradients():
    """Hooks of the script see the whole batch's gradient; a tensor's own gradient can be kept."""
    model = mlp()
    model[2].weight.register_hook(lambda grad: grad * 0.5)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for xb, yb in batches():
        hidden = model[0](xb)
        hidden.retain_grad()
        loss = F.cross_entropy(model[2](torch.tanh(hidden)), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(tuple(hidden.grad.shape), f"{hidden.grad.abs().sum().item():.9g}")
        say(loss)
    keep(model)


class Hooked(nn.Module):
    """Clips the gradient between its layers, as recurrent networks do, by hooks that a forward sets."""

    def __init__(self, hook):
        super().__init__()
        self.layers, self.hook, self.kept = mlp(), hook, None

    def forward(self, rows):
        hidden = self.layers[0](rows)
        if hidden.requires_grad:
            hidden.register_hook(self.hook)
        hidden = torch.tanh(hidden)
        hidden.retain_grad()
        self.kept = hidden
        return self.layers[2](hidden)


class HookedWeights(Hooked):
    """The same of what no rows are in."""

    def forward(self, rows):
        weight = self.layers[2].weight * 1
        if weight.requires_grad:
            weight.register_hook(self.hook)
            weight.retain_grad()
        self.kept = weight
        return F.linear(torch.tanh(self.layers[0](rows)), weight)


@scene
def hooks_that_a_forward_sets():
    short = lambda grad: grad / (1 + 10 * grad.norm())  # noqa: E731
    clip = lambda grad: grad.clamp(-0.002, 0.002)  # noqa: E731
    for model in (Hooked(clip), Hooked(short), HookedWeights(clip), HookedWeights(short)):
        opt = torch.optim.SGD(model.parameters(), lr=0.5)
        for xb, yb in batches():
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            print(tuple(model.kept.grad.shape), f"{model.kept.grad.abs().sum().item():.9g}")
            say(loss)
        keep(model)


@scene
def hooks_behind_gradients():
    """Gradients are clipped, and weights stepped, in backward, as each gradient is there; then no more."""
    for each in (0, 1):
        model = mlp()
        opts = {p: torch.optim.Adam([p], lr=0.05) for p in model.parameters()}
        names = {p: name for name, p in model.named_parameters()}

        def clip(p, names=names):
            print(f"{names[p]} {p.grad.abs().sum().item():.6g}")
            p.grad.clamp_(-0.05, 0.05)

        def step(p, opts=opts):
            opts[p].step()
            opts[p].zero_grad()

        handles = [p.register_post_accumulate_grad_hook(hook) for p in opts for hook in (clip, step)[: 1 + each]]
        for xb, yb in batches():
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            if not each:
                for opt in opts.values():
                    opt.step()
                    opt.zero_grad()
            say(loss)
        for handle in handles:
            handle.remove()
        F.cross_entropy(model(x), y).backward()
        print(f"{model[0].weight.grad.abs().sum().item():.6g}")
        keep(model)


@scene
def gradient_of_the_input():
    """Adversarial training: a step along the input's gradient."""
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for xb, yb in batches():
        xb.requires_grad_(True)
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        print(f"input {xb.grad.abs().sum().item():.9g}")
        worse = (xb + 0.1 * xb.grad).detach()
        opt.zero_grad()
        loss = F.cross_entropy(model(worse), yb)
        loss.backward()
        opt.step()
        say(loss)
    keep(model)


@scene
def teacher_and_student():
    """A moving average of the weights teaches; no gradient goes there."""
    import copy

    student = mlp()
    teacher = copy.deepcopy(student).eval().requires_grad_(False)
    opt = torch.optim.SGD(student.parameters(), lr=0.2)
    for xb, yb in batches():
        with torch.no_grad():
            soft = F.softmax(teacher(xb) / 2, dim=1)
        out = student(xb)
        loss = F.cross_entropy(out, yb) + F.kl_div(F.log_softmax(out / 2, dim=1), soft, reduction="batchmean")
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                t.mul_(0.9).add_(s, alpha=0.1)
        say(loss)
    keep(student, teacher)


play()
