"""Losses with several terms, penalties, pairs of rows, noise, and losses taken inside the model."""

import math

import torch
import torch.nn.functional as F
from scenes import fit, keep, mlp, play, say, scene, table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

x, y = table()


def descend(model, loss_of, lr=0.1):
    """One shuffled pass with batches of 14, 14 and 12 rows."""
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    for xb, yb in DataLoader(TensorDataset(x, y), 14, shuffle=True):
        loss = loss_of(xb, yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)
    keep(model)


@scene
def penalties_on_weights():
    model = mlp()

    def loss_of(xb, yb):
        l1 = sum(p.abs().sum() for p in model.parameters())
        l2 = sum(p.pow(2.0).sum() for p in model.parameters())
        return F.cross_entropy(model(xb), yb) + 0.01 * l1 + 0.1 * l2

    descend(model, loss_of)
    descend(model, lambda xb, yb: sum(p.pow(2).sum() for p in model.parameters()))  # the weights alone
    descend(model, lambda xb, yb: F.cross_entropy(model(xb), yb, reduction="sum") + len(xb) * model[0].weight.norm())


@scene
def activity_penalty():
    model = mlp()
    seen = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out))

    def loss_of(xb, yb):
        seen.clear()
        loss = F.cross_entropy(model(xb), yb)
        print(tuple(seen[0].shape))
        return loss + 0.1 * seen[0].abs().mean()

    descend(model, loss_of)


@scene
def contrastive():
    """SimCLR's loss: every row against every other."""
    model = mlp(classes=4)

    def loss_of(xb, yb):
        a, b = F.normalize(model(xb), dim=1), F.normalize(model(xb + 0.1), dim=1)
        z = torch.cat([a, b])
        sim = z @ z.t() / 0.5
        sim = sim.masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        n = len(a)
        return F.cross_entropy(sim, torch.cat([torch.arange(n) + n, torch.arange(n)]))

    descend(model, loss_of)


@scene
def clip_style():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)
            self.scale = nn.Parameter(torch.tensor(math.log(5.0)))

        def forward(self, u, v):
            return F.normalize(self.a(u), dim=-1), F.normalize(self.b(v), dim=-1), self.scale.exp()

    model = Two()

    def loss_of(xb, yb):
        a, b, scale = model(xb, xb.flip(1))
        logits = scale * a @ b.T
        target = torch.arange(len(logits))
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2

    descend(model, loss_of)


@scene
def triplets_mined_in_the_batch():
    model = mlp(classes=4)

    def loss_of(xb, yb):
        z = model(xb)
        d = torch.cdist(z, z)
        same = yb.unsqueeze(0) == yb.unsqueeze(1)
        farthest = (d * same).max(1)[0]
        nearest = d.masked_fill(same, 1e6).min(1)[0].clamp(max=10)
        return F.relu(farthest - nearest + 0.5).mean()

    descend(model, loss_of)


@scene
def loss_inside_the_model():
    class Inside(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.net, self.how = mlp(), how

        def forward(self, v, target):
            out = self.net(v)
            return self.how(out, target, self.net)

    ways = {
        "mean": lambda o, t, net: F.cross_entropy(o, t),
        "sum": lambda o, t, net: F.cross_entropy(o, t, reduction="sum"),
        "ignored": lambda o, t, net: F.cross_entropy(o, t, ignore_index=1),
        "tuple": lambda o, t, net: (o, F.cross_entropy(o, t, weight=torch.tensor([1.0, 2.0, 0.1]))),
        "dict": lambda o, t, net: {"loss": F.cross_entropy(o, t) + 0.1 * net[0].weight.pow(2).sum(), "logits": o},
        "mixed": lambda o, t, net: F.cross_entropy(o, t) + o.std(),
    }
    for name, how in ways.items():
        print(name)
        torch.manual_seed(2)
        model = Inside(how)

        def loss_of(xb, yb, model=model):
            out = model(xb, yb)
            if isinstance(out, tuple):
                print(tuple(out[0].shape), (out[0].argmax(1) == yb).float().mean().item())
                return out[1]
            if isinstance(out, dict):
                print(sorted(out), tuple(out["logits"].shape))
                return out["loss"]
            return out

        descend(model, loss_of)


class Coder(nn.Module):
    """A small variational auto-encoder."""

    def __init__(self):
        super().__init__()
        self.enc, self.mu, self.logvar = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 2)
        self.dec = nn.Linear(2, 6)

    def forward(self, v):
        h = torch.tanh(self.enc(v))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.dec(z)), mu, logvar


@scene
def vae():
    model = Coder()

    def loss_of(xb, yb):
        out, mu, logvar = model(xb)
        fit = F.binary_cross_entropy(out, xb.sigmoid(), reduction="sum")
        return fit - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())

    descend(model, loss_of, lr=0.005)
    with torch.no_grad():
        print(tuple(model.dec(torch.randn(5, 2)).shape))


@scene
def dropout():
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
    loader = DataLoader(TensorDataset(x, y), 14, shuffle=True)
    for _ in range(2):
        fit(loader, model)
    model.eval()
    with torch.no_grad():
        for xb, yb in loader:
            say(F.cross_entropy(model(xb), yb))


@scene
def dropout_outside_the_model():
    model = mlp()
    drop = nn.AlphaDropout(0.2)

    def loss_of(xb, yb):
        noisy = F.dropout(xb, 0.3) + 0.1 * torch.randn_like(xb) + 0.05 * torch.rand(xb.shape)
        return F.cross_entropy(model(drop(noisy)), yb)

    descend(model, loss_of)


@scene
def dropout_by_channel():
    model = nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 6, 2, bias=False), nn.Dropout2d(0.4), nn.Flatten(), nn.Linear(12, 3)
    )
    descend(model, lambda xb, yb: F.cross_entropy(model(xb), yb))


@scene
def mixup():
    """Rows mixed with a permutation of the same batch."""
    model = mlp()

    def loss_of(xb, yb):
        lam = float(torch.distributions.Beta(1.0, 1.0).sample())
        perm = torch.randperm(xb.size(0))
        out = model(lam * xb + (1 - lam) * xb[perm])
        return lam * F.cross_entropy(out, yb) + (1 - lam) * F.cross_entropy(out, yb[perm])

    descend(model, loss_of)


@scene
def diffusion():
    """A noise and a time step for each row, drawn in the loop."""
    model = mlp(7, 6)
    alpha = torch.linspace(0.99, 0.1, 10)

    def loss_of(xb, yb):
        t = torch.randint(0, 10, (xb.shape[0],))
        noise = torch.randn_like(xb)
        a = alpha[t].unsqueeze(1)
        noisy = a.sqrt() * xb + (1 - a).sqrt() * noise
        return F.mse_loss(model(torch.cat([noisy, t.float().unsqueeze(1) / 10], dim=1)), noise)

    descend(model, loss_of)


@scene
def attention_over_rows():
    """A model that mixes rows inside: each row attends to the whole batch."""

    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 3)

        def forward(self, rows):
            scores = self.q(rows) @ self.k(rows).T / 2
            return scores.softmax(dim=-1) @ self.v(rows)

    model = Mixer()
    descend(model, lambda xb, yb: F.cross_entropy(model(xb), yb))


play()
