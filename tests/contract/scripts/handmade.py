"""Batches made by hand, with no loader: cut where that is safe, the same training always."""

import numpy as np
import torch
import torch.nn.functional as F
from scenes import keep, mlp, play, say, scene, table
from torch import nn

x, y = table()


def descend(model, loss_of, steps=5, lr=0.2):
    """Plain SGD on whatever loss_of gives."""
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(steps):
        loss = loss_of(step)
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)
    keep(model)


@scene
def index_tensors():
    model = mlp()
    for _ in range(2):
        order = torch.randperm(len(x))
        opt = torch.optim.Adam(model.parameters(), lr=0.01)
        for i in range(0, len(x), 14):
            rows = order[i : i + 14]
            loss = F.cross_entropy(model(x[rows]), y[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
            say(loss)
    keep(model)


@scene
def numpy_slices():
    xs, ys = x.numpy(), y.numpy()
    model = mlp()

    def loss_of(step):
        rows = np.random.choice(len(xs), 11, replace=False)
        return F.cross_entropy(model(torch.from_numpy(xs[rows])), torch.from_numpy(ys[rows]))

    descend(model, loss_of)


@scene
def whole_dataset_every_step():
    model = nn.Linear(6, 1)
    target = x.sum(1, keepdim=True)
    descend(model, lambda step: ((model(x) - target) ** 2).mean())
    print(model.weight.detach().numpy().round(3).tolist())


class Letters(nn.Module):
    """A small causal language model that gives its loss when it is given targets, as nanoGPT does."""

    def __init__(self, vocab=11, width=8, block=6):
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, width), nn.Embedding(block, width)
        self.mix = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.token.weight

    def forward(self, idx, targets=None):
        h = self.token(idx) + self.place(torch.arange(idx.shape[1]))
        mask = torch.triu(torch.ones(idx.shape[1], idx.shape[1], dtype=torch.bool), 1)
        h = h + self.mix(h, h, h, attn_mask=mask, need_weights=False)[0]
        logits = self.head(self.norm(h))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


@scene
def get_batch():
    text = torch.randint(11, (300,))
    model = Letters()

    def batch(size=9, block=6):
        at = torch.randint(len(text) - block, (size,))
        rows = torch.stack([text[i : i + block] for i in at])
        target = torch.stack([text[i + 1 : i + 1 + block] for i in at])
        target[0, :4] = -1  # so that rows do not weigh the same
        return rows, target

    def loss_of(step):
        logits, loss = model(*batch())
        print(tuple(logits.shape))
        return loss

    descend(model, loss_of)
    idx = torch.zeros(1, 1, dtype=torch.long)
    for _ in range(5):
        logits, _ = model(idx[:, -6:])
        probs = F.softmax(logits[:, -1], dim=-1)
        idx = torch.cat([idx, torch.multinomial(probs, 1)], dim=1)
    print(idx.tolist())


@scene
def noise_for_a_generator():
    net = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 6))
    critic = mlp(classes=1)

    def loss_of(step):
        fake = net(torch.randn(10, 4))
        return F.binary_cross_entropy_with_logits(critic(fake), torch.ones(10, 1))

    descend(net, loss_of)


@scene
def sequence_first_rnn():
    """(time, batch, features): dimension 0 is not the batch."""
    rnn = nn.LSTM(2, 6)
    out = nn.Linear(6, 2)
    seq = torch.randn(7, 5, 2)
    both = nn.ModuleList([rnn, out])
    descend(both, lambda step: F.mse_loss(out(rnn(seq)[0])[:-1], seq[1:]))


@scene
def batch_in_dimension_one():
    class Mixer(nn.Module):
        """Mixes along dimension 0, where the time is; the batch is dimension 1."""

        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(4, 4)

        def forward(self, v):
            return self.mix(v.transpose(0, -1)).transpose(0, -1).cumsum(0)

    model = Mixer()
    v = torch.randn(4, 9, 3)
    descend(model, lambda step: F.mse_loss(model(v), v.flip(0)))


@scene
def full_batch_graph_net():
    """Every node's output needs its neighbours: one batch, one graph."""

    class Graph(nn.Module):
        def __init__(self, adjacency):
            super().__init__()
            self.register_buffer("adjacency", adjacency)
            self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, nodes):
            h = torch.relu(self.adjacency @ self.one(nodes))
            return self.adjacency @ self.two(h)

    links = (torch.rand(40, 40) < 0.1).float() + torch.eye(40)
    model = Graph(links / links.sum(1, keepdim=True))
    train = torch.arange(40) < 25
    descend(model, lambda step: F.cross_entropy(model(x)[train], y[train]))
    with torch.no_grad():
        guess = model(x).argmax(1)
    print("right", (guess[~train] == y[~train]).sum().item())


@scene
def graph_as_an_argument():
    """The same, with edges given at every call."""

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)

        def spread(self, h, edges):
            return h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])

        def forward(self, nodes, edges):
            return self.two(self.spread(torch.tanh(self.one(nodes)), edges))

    edges = torch.randint(40, (2, 80))
    model = Graph()
    descend(model, lambda step: F.cross_entropy(model(x, edges), y))


@scene
def carried_state():
    """An LSTM's state goes from one batch to the next."""

    class Teller(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, seq, state=None):
            h, state = self.rnn(seq, state)
            return self.out(h), state

    model = Teller()
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    stream = torch.randn(6, 30, 3)
    state = None
    for t in range(0, 30, 6):
        part = stream[:, t : t + 6]
        if state is not None:
            state = tuple(s.detach() for s in state)
        out, state = model(part[:, :-1], state)
        loss = F.mse_loss(out, part[:, 1:])
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(tuple(state[0].shape))
        say(loss)
    keep(model)


@scene
def state_inside_the_module():
    """A module that remembers its last batch."""

    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(6, 6)
            self.register_buffer("memory", torch.zeros(6))

        def forward(self, v):
            out = torch.tanh(self.lin(v + self.memory))
            self.memory = 0.9 * self.memory + 0.1 * out.detach().mean(0)
            return out

    model = Memory()
    descend(model, lambda step: (model(x[step * 8 : step * 8 + 8]) ** 2).mean())


@scene
def row_count_differs_from_output():
    """What goes in has as many rows as there are features: nothing may be guessed from sizes alone."""
    model = nn.Linear(6, 6)
    square = torch.randn(6, 6)
    descend(model, lambda step: F.mse_loss(model(square), square.T))
    descend(model, lambda step: (model(square).sum(0) * torch.arange(6.0)).mean())


@scene
def one_row_and_no_batch():
    model = mlp()
    descend(model, lambda step: F.cross_entropy(model(x[step : step + 1]), y[step : step + 1]))
    descend(model, lambda step: F.cross_entropy(model(x[step]), y[step]))


@scene
def table_of_pairs():
    """Matrix factorisation: integers in, scores out."""

    class Factors(nn.Module):
        def __init__(self):
            super().__init__()
            self.user, self.item = nn.Embedding(9, 4), nn.Embedding(7, 4)

        def forward(self, u, i):
            return (self.user(u) * self.item(i)).sum(1)

    model = Factors()
    scores = torch.rand(9, 7)

    def loss_of(step):
        u, i = torch.randint(9, (13,)), torch.randint(7, (13,))
        return F.mse_loss(model(u, i), scores[u, i])

    descend(model, loss_of)


@scene
def reinforce():
    """A policy gradient: actions drawn from the model's output, rewards from a loop in Python."""
    policy = mlp(4, 2)
    opt = torch.optim.SGD(policy.parameters(), lr=0.05)
    state = torch.randn(4)
    for _ in range(3):
        logs, rewards = [], []
        for _ in range(6):
            choice = torch.distributions.Categorical(logits=policy(state))
            action = choice.sample()
            logs.append(choice.log_prob(action))
            rewards.append(float(state.sum()) * (1 if action.item() else -1))
            state = torch.roll(state, 1) * 0.9 + 0.1 * action.item()
        loss = -(torch.stack(logs) * torch.tensor(rewards)).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)
    keep(policy)


play()
