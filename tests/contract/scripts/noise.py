"""Models that draw noise themselves: of many kinds, shapes and layouts, always or now and then."""

import torch
import torch.nn.functional as F
from scenes import keep, mlp, play, say, scene
from small import Around, Two, batches, descend, train
from torch import distributions, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

DRAWN = {
    "randn_like": lambda h: h + torch.randn_like(h),
    "rand_like": lambda h: h * torch.rand_like(h[:, :1]),
    "randint_like": lambda h: h * torch.randint_like(h, 3),
    "normal_": lambda h: h + torch.empty_like(h).normal_(0.1, 0.5),
    "uniform_": lambda h: h + h.new_empty(h.shape).uniform_(-1, 1),
    "exponential_": lambda h: h + torch.zeros_like(h).exponential_(2.0),
    "bernoulli": lambda h: h * torch.bernoulli(h.detach().sigmoid()),
    "bernoulli with p": lambda h: h * torch.bernoulli(h.detach(), 0.7),
    "normal": lambda h: h + torch.normal(h.detach(), 0.3) + torch.normal(0.0, h.detach().abs()),
    "normal of both": lambda h: h + torch.normal(h.detach(), h.detach().abs()),
    "randn": lambda h: h + torch.randn(h.shape[0], 16),
    "rand": lambda h: h * (torch.rand((h.size(0), 1), dtype=torch.double) > 0.2).float(),
    "randint": lambda h: h + torch.randint(0, 3, (h.size(0), 1)) + torch.randint(4, size=h.shape),
    "normal of a size": lambda h: h + torch.normal(0.0, 0.5, h.shape),
    "stochastic depth": lambda h: h * torch.empty([h.shape[0]] + [1] * (h.ndim - 1)).bernoulli_(0.8).div_(0.8),
    "of pairs": lambda h: h + torch.randn(h.shape[0] * 2, 8).view(h.shape),
    "of weights": lambda h: h @ (torch.eye(16) + 0.1 * torch.randn(16, 16)) * torch.rand(1) + torch.rand(()),
    "beside dropout": lambda h: F.dropout(h, 0.3) + torch.randn_like(F.dropout(h, 0.2)),
}


@scene
def of_each_kind():
    for name, draw in DRAWN.items():
        print(name)
        train(Two(lambda m, h, draw=draw: draw(h)))


@scene
def without_gradients():
    for draw in DRAWN.values():
        model = Two(lambda m, h, draw=draw: draw(h)).eval()
        with torch.no_grad():
            for xb, _ in batches(14):
                print(f"{model(xb).sum().item():.6g}")


@scene
def distributions_inside():
    """A reparameterised sample, one of a relaxed and one of a plain choice."""
    for of in (
        lambda h: distributions.Normal(h, F.softplus(h) + 0.1).rsample(),
        lambda h: distributions.Independent(distributions.LogNormal(h * 0.1, 0.3), 1).rsample(),
        lambda h: distributions.Uniform(h - 1, h + 1).rsample(),
        lambda h: h * distributions.Bernoulli(logits=h.detach()).sample(),
        lambda h: h + distributions.Laplace(h, 1.0).rsample(),
        lambda h: h + distributions.Exponential(F.softplus(h) + 0.1).rsample(),
        lambda h: h + distributions.Normal(0.0, 1.0).sample(h.shape),
        lambda h: h * distributions.Gamma(F.softplus(h) + 1, 1.0).rsample(),
        lambda h: h + distributions.RelaxedBernoulli(torch.tensor(0.5), logits=h).rsample(),
    ):
        train(Two(lambda m, h, of=of: of(h)))


class Images(nn.Module):
    """Convolutions with noise in layouts that are not row by row."""

    def __init__(self, noise):
        super().__init__()
        self.conv, self.last, self.noise = nn.Conv2d(2, 4, 3), nn.Linear(36, 3), noise

    def forward(self, x):
        return self.last(self.noise(self.conv(x)).flatten(1))


@scene
def layouts():
    images, labels = torch.randn(26, 2, 5, 5).to(memory_format=torch.channels_last), torch.randint(0, 3, (26,))
    for noise in (
        lambda h: h + torch.randn_like(h),
        lambda h: h + torch.randn_like(h.transpose(0, 1)).transpose(0, 1),
        lambda h: h + torch.randn_like(h.permute(2, 3, 1, 0)).permute(3, 2, 0, 1),
        lambda h: h + torch.randn_like(h.flatten(0, 1)).view(h.shape),
        lambda h: h * torch.empty(h.shape[0], h.shape[1], 1, 1).bernoulli_(0.8),
        lambda h: h + torch.randn(4, h.shape[0], 3, 3).transpose(0, 1),
        lambda h: h * torch.bernoulli(h.detach().sigmoid()),
        lambda h: F.dropout(h, 0.3) + F.dropout(h.flatten(0, 1), 0.2).view(h.shape),
        lambda h: h + torch.empty_like(h).normal_() + torch.empty_like(h.mT).uniform_().mT,
    ):
        model = Images(noise).to(memory_format=torch.channels_last)
        opt = torch.optim.SGD(model.parameters(), 0.1)
        for xb, yb in [batch for _ in range(2) for batch in DataLoader(TensorDataset(images, labels), 10)]:
            loss = F.cross_entropy(model(xb.contiguous(memory_format=torch.channels_last)), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            say(loss)
        keep(model)


@scene
def sequences_first():
    """Made by hand, the batch second."""

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.last = nn.GRU(3, 8), nn.Linear(8, 2)

        def forward(self, x):
            out, _ = self.rnn(x + 0.1 * torch.randn_like(x))
            return self.last(out * torch.rand(1, x.size(1), 8) + torch.randn(out.shape))

    model = Noisy()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(9):
        loss = model(torch.randn(5, 12 if step < 7 else 10, 3)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)
    keep(model)


@scene
def fewer_rows_than_ranks():
    model = Two(lambda m, h: torch.randn_like(h) + h * torch.rand(h.shape[0], 1) + torch.randn(h.shape[0] * 2, 8).view(
        h.shape))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    x, y = torch.randn(31, 8), torch.randint(0, 3, (31,))
    for xb, yb in [batch for _ in range(4) for batch in DataLoader(TensorDataset(x, y), 10)]:
        loss = F.cross_entropy(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)
    keep(model)


@scene
def drawn_again_in_backward():
    """A checkpointed part draws the same numbers twice."""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.last = mlp(), nn.Linear(3, 3)

        def forward(self, x):
            h = self.net(x + torch.randn_like(x) * 0.1)
            h = checkpoint(lambda h: F.dropout(self.last(h), 0.2) * torch.randn_like(h) + torch.rand(h.shape[0], 1), h,
                           use_reentrant=False)
            return h + torch.randn_like(h)

    descend(Net(), epochs=3)


@scene
def now_and_then():
    """Noise that comes and goes by a switch that nobody sees, and noise that a model keeps."""
    hidden, calls = iter([False] * 5 + [True] * 2 + [False] * 4 + [True] * 7), []

    def sometimes(m, h, r):
        calls.append(len(h))
        return h + torch.randn_like(h) if on[0] else h * 1

    on = [False]
    descend(Around(sometimes), update=lambda rows: on.__setitem__(0, next(hidden)), epochs=5)

    def once(m, h, r):
        if m.extra is None or m.extra.shape[0] != h.shape[0]:
            m.extra = torch.randn(h.shape[0], 3)
        return h * m.extra

    descend(Around(once), epochs=3)

    def more_of_it(m, h, r):
        for _ in range(1 + on[0]):
            h = h + torch.rand_like(h)
        return h

    turns = iter([False, False, False, False, True, False, False, True, True] * 2)
    descend(Around(more_of_it), update=lambda rows: on.__setitem__(0, next(turns)), epochs=5)


@scene
def decided_by_what_is_drawn():
    """Rows meet where a number says so."""
    for coin in (lambda: torch.rand(1).item() < 0.3, lambda: torch.rand(1) < 0.3, lambda: bool(torch.randint(0, 3, ())),
                 lambda: torch.bernoulli(torch.tensor(0.3)) > 0, lambda: int(torch.randint(0, 3, (1,))) == 1):
        descend(Around(lambda m, h, r, coin=coin: h - h.mean(0) if coin() else h), epochs=3)
    descend(Around(lambda m, h, r: h[torch.rand(h.shape[0]).argsort()]), epochs=3)
    descend(Around(lambda m, h, r: h + r[torch.randint(0, r.shape[0], (r.shape[0],)), :3]), epochs=3)
    descend(Around(lambda m, h, r: h + torch.rand(h.shape[0], 1).sort(0).values), epochs=3)
    descend(Around(lambda m, h, r: h + torch.randn_like(h) / torch.rand(h.shape[0]).sum()), epochs=3)
    descend(Around(lambda m, h, r: h + torch.randn(h.shape[0], h.shape[0]) @ r[:, :3]), epochs=3)


class Jitter(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x + torch.randn_like(x)

    @staticmethod
    def backward(context, grad):
        return grad


@scene
def drawn_where_nobody_looks():
    """In a custom function, by an initialiser, in functions that are made of others, by a generator of the model's."""
    g = torch.Generator().manual_seed(3)
    for draw in (
        lambda h: Jitter.apply(h),
        lambda h: h + nn.init.normal_(torch.empty_like(h)),
        lambda h: h + nn.init.uniform_(torch.empty(h.shape[0], 3)),
        lambda h: F.gumbel_softmax(h),
        lambda h: F.rrelu(h, training=True),
        lambda h: F.alpha_dropout(h, 0.3, training=True),
        lambda h: h + torch.randn(h.shape, generator=g),
        lambda h: h + torch.zeros(h.shape[0], 3).normal_(),
        lambda h: h + torch.randn_like(torch.zeros(h.shape[0], 3)),
        lambda h: h * torch.poisson(torch.ones(h.shape[0], 3)),
        lambda h: h * torch.bernoulli(h.sigmoid()),
        lambda h: h + torch.ones_like(h).bernoulli_(h.detach().sigmoid()),
        lambda h: h + torch.randperm(3),
    ):
        descend(Around(lambda m, h, r, draw=draw: draw(h)), epochs=2)


@scene
def compiled():
    model = torch.compile(Two(lambda m, h: h + torch.randn_like(h)), backend="eager")
    train(model)


@scene
def old_names_of_reductions():
    model = nn.Sequential(mlp(), nn.Sigmoid())
    for how in ({"size_average": False}, {"size_average": True}, {"reduction": "sum"}, {"reduction": "mean"}):
        descend(model, loss_of=lambda out, y, how=how: F.binary_cross_entropy(out, F.one_hot(y, 3).float(), **how),
                epochs=1)
    descend(model, loss_of=lambda out, y: F.mse_loss(out, F.one_hot(y, 3).float(), reduce=False).sum(), epochs=1)


play()
