"""Models and random draws as public scripts have them: recurrent, transformer, checkpointed, scripted, sampled from."""

import torch
import torch.nn.functional as F
from scenes import keep, play, say, scene, table
from torch import distributions, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

x, y = table()


def descend(model, loss_of=None, lr=0.1, size=14):
    """One shuffled pass; the loss is cross entropy unless told otherwise."""
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    for xb, yb in DataLoader(TensorDataset(x, y), size, shuffle=True):
        loss = loss_of(xb, yb) if loss_of else F.cross_entropy(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)
    keep(model)


@scene
def checkpointed():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh()), nn.Linear(8, 3)

        def forward(self, v):
            return self.b(checkpoint(self.a, v, use_reentrant=False))

    descend(Net())


@scene
def recurrent_with_first_state():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.LSTM(2, 5, 2, batch_first=True, dropout=0.2), nn.Linear(5, 3)

        def forward(self, v):
            h = torch.zeros(2, v.size(0), 5)
            out, _ = self.rnn(v.view(len(v), 3, 2), (h, h.clone()))
            return self.out(out[:, -1])

    descend(Net())


@scene
def transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layers = nn.Unflatten(1, (3, 2)), nn.Linear(2, 8), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(24, 3)
    descend(nn.Sequential(*layers))


@scene
def transformer_with_the_batch_second():
    model = nn.TransformerEncoderLayer(6, 2, 16, dropout=0.1)
    descend(model, lambda xb, yb: model(torch.stack([xb, xb * 2])).pow(2)[0, :, 0].mean())


@scene
def wrapped_and_scripted():
    descend(nn.DataParallel(nn.Linear(6, 3)))
    descend(torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))))
    descend(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)))


@scene
def class_by_class():
    model = nn.Linear(6, 3)

    def loss_of(xb, yb):
        parts = [F.mse_loss(model(xb[yb == k]), torch.zeros(int((yb == k).sum()), 3)) for k in yb.unique()]
        return sum(parts) / len(parts)

    descend(model, loss_of)


@scene
def a_size_written_into_the_script():
    model = nn.Linear(6, 3)
    descend(model, lambda xb, yb: F.cross_entropy(model(xb.reshape(10, -1)), yb), size=10)


@scene
def noise_of_many_kinds():
    model = nn.Linear(6, 3)
    for make in (
        lambda a: a + torch.empty_like(a).normal_(),
        lambda a: a * torch.bernoulli(torch.full_like(a, 0.5)),
        lambda a: a + torch.normal(0.0, 0.1, a.shape),
        lambda a: a * (torch.rand(len(a), 1) > 0.3),
    ):
        descend(model, lambda xb, yb, make=make: F.cross_entropy(model(make(xb)), yb))


@scene
def samples_of_the_output():
    model = nn.Linear(6, 3)
    descend(model, lambda xb, yb: F.cross_entropy(model(xb), torch.multinomial(model(xb).softmax(1), 1).squeeze(1)))
    descend(model, lambda xb, yb: F.gumbel_softmax(model(xb), hard=True).mul(torch.arange(3.0)).mean())


@scene
def distributions_of_the_output():
    model = nn.Linear(6, 6)

    def normal(xb):
        out = model(xb)
        return distributions.Normal(out[:, :3], F.softplus(out[:, 3:]) + 0.1)

    descend(model, lambda xb, yb: (normal(xb).rsample() - xb[:, :3]).pow(2).mean())
    descend(model, lambda xb, yb: -normal(xb).log_prob(xb[:, 3:]).sum(1).mean())
    descend(model, lambda xb, yb: distributions.kl_divergence(normal(xb), distributions.Normal(0.0, 1.0)).mean())
    head = nn.Linear(6, 3)
    descend(head, lambda xb, yb: -distributions.Categorical(logits=head(xb)).log_prob(yb).mean())


play()
