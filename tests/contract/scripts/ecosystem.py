"""What popular libraries do that plain loops do not, each pattern by itself in plain PyTorch.

The libraries themselves are played by ``make test-ecosystem``.
"""

import collections

import torch
import torch.distributed.optim  # compiles classes with torch.jit.script; ignite imports it
import torch.nn.functional as F
from scenes import keep, mlp, play, say, scene, table
from torch import nn
from torch.distributions import Bernoulli, Beta, Categorical, Geometric, Independent, Normal, Poisson, kl_divergence
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

x, y = table()


class Lazy(collections.OrderedDict):
    """As transformers' tables of models, which import all of them when they are asked for their items."""

    def _asked(self, *_):
        raise RuntimeError("everything would be imported now")

    items = keys = values = get = copy = update = clear = __len__ = __iter__ = __copy__ = __reduce_ex__ = _asked


class Touchy:
    """Nobody may ask it for anything."""

    def __getattr__(self, name):
        raise RuntimeError(f"asked for {name}")

    @property
    def __class__(self):
        raise RuntimeError("asked for its class")

    def __eq__(self, other):
        raise RuntimeError("asked whether it is equal")

    __hash__ = None


class Pinned(list):
    """It cannot be looked through or written by its own methods."""

    def _asked(self, *_):
        raise RuntimeError("asked for its entries")

    __len__ = __iter__ = __setitem__ = __copy__ = __reduce_ex__ = _asked


PINNED, LAZY, TOUCHY, KEYED = Pinned([1, 2]), Lazy(model="imported when it is needed"), Touchy(), {(1, "a"): [Touchy()]}


def batches(epochs=1, size=14):
    for _ in range(epochs):
        yield from DataLoader(TensorDataset(x, y), size, shuffle=True)


def train(model, loss_of, epochs=1):
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for bx, by in batches(epochs):
        loss = loss_of(model, bx, by)
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)
    keep(model)


@scene
def classes_that_are_scripted():
    """torch.jit.script resolves the names in a class by the frame it is called from."""
    def doubled(value: float) -> float:
        return 2 * value

    @torch.jit.script
    class Scale:
        def __init__(self, factor: float):
            self.factor = doubled(factor)

        def by(self, value: float) -> float:
            return self.factor * value

    scale = Scale(0.5)
    train(mlp(), lambda model, bx, by: scale.by(1.0) * F.cross_entropy(model(bx), by))


@scene
def objects_that_must_not_be_asked():
    """They lie in the script's variables, where what belongs to the training is looked for."""
    here, held = Lazy(a=1), [Touchy(), LAZY]
    train(mlp(), lambda model, bx, by: F.cross_entropy(model(bx), by))
    print(type(here).__name__, len(held))
    model, data = Registered(), Described()
    for bx, by in DataLoader(data, 10):
        loss = F.cross_entropy(model(bx), by)
        loss.backward()
        say(loss)
    print(list.__len__(model.seen), list.__len__(data.pinned))
    keep(model)


class Registered(nn.Module):
    """Its code names tables with methods of their own, as transformers' models do; and it writes into one."""

    def __init__(self):
        super().__init__()
        self.net, self.seen, self.tables = mlp(), Pinned(), [LAZY, TOUCHY]

    def forward(self, rows):
        if not dict.__len__(LAZY) or list.__len__(PINNED) != 2:
            raise RuntimeError("the tables are not as they were")
        list.append(self.seen, 1)
        return self.net(rows)


class Described(TensorDataset):
    """As those of Hugging Face's datasets, whose table of columns copies itself in depth."""

    def __init__(self):
        super().__init__(x, y)
        self.columns, self.touchy, self.pinned, self.held = LAZY, TOUCHY, PINNED, [LAZY, TOUCHY]


class Settings:
    """As of a configuration by its own library: what it has not is an error of its own."""

    def __init__(self):
        self.scale = 2.0

    def __getattr__(self, name):
        raise KeyError(name)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, rows, settings):
        return self.net(rows) * settings.scale


@scene
def settings_as_an_argument():
    settings = Settings()
    train(Scaled(), lambda model, bx, by: F.cross_entropy(model(bx, settings), by), epochs=2)


@scene
def generators_that_seed_themselves():
    """Their numbers are other ones in each run, the same ones on every rank (the weights tell), and nobody prints."""
    generator = torch.Generator()
    print(generator.seed() == generator.initial_seed())
    torch.default_generator.seed()
    weights = [nn.Parameter(torch.randn(3, generator=generator)), nn.Parameter(torch.rand(3))]
    torch.optim.SGD(weights, 0.1).step()
    torch.manual_seed(7)


@scene
def functional_gradients():
    """torch.func, with the batch given to the transformed function or found around it; losses of torch.nn."""
    model, criterion = mlp(), nn.CrossEntropyLoss()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of(p, bx, by):
        return criterion(functional_call(model, p, (bx,)), by)

    for bx, by in batches(2):
        slopes, loss = grad_and_value(loss_of)(params, bx, by)
        say(loss)
        around = grad(lambda p, bx=bx, by=by: loss_of(p, bx, by))(params)
        assert all(torch.allclose(slopes[name], around[name], atol=1e-6) for name in slopes)
        each = vmap(grad(lambda p, a, b: loss_of(p, a[None], b[None])), in_dims=(None, 0, 0))(params, bx, by)
        print(*(f"{value.flatten(1).norm(dim=1).mean().item():.6g}" for value in each.values()))
        params = {name: p - 0.1 * slopes[name] for name, p in params.items()}
    model.load_state_dict(params)
    keep(model)


@scene
def transforms_in_a_loss():
    """Of what a model gave, with gradients through them; rows are found around them, too."""
    def loss_of(model, bx, by):
        out = model(bx)
        pulled = vmap(lambda row: (row * out.sum(0)).sum())(out).mean()
        return F.cross_entropy(out, by) + 0.01 * vmap(lambda row: row.square().sum())(out).mean() + 0.001 * pulled

    train(mlp(), loss_of)


@scene
def numbers_drawn_in_the_order_of_memory():
    """Of images with the channels last, and of sequences first: autoencoders of diffusers add noise to the former."""
    torch.manual_seed(4)
    encoder, images = nn.Conv2d(2, 4, 3), torch.randn(18, 2, 5, 5).to(memory_format=torch.channels_last)
    opt = torch.optim.SGD(encoder.parameters(), 0.1)
    for at in (0, 7, 14):
        code = encoder(images[at:at + 7])
        first, second = code.chunk(2, 1)
        turned = torch.stack([first.mean(1).flatten(1)] * 3, 1).transpose(0, 1)
        told = [torch.randn_like(code), torch.rand_like(first), code.detach().clone().normal_(), second + first * 0.5,
                torch.randn_like(code.flip(0)), torch.randn_like(turned), F.dropout(code, 0.4), F.dropout(turned, 0.4),
                torch.randn_like(first.expand(2, *first.shape)), torch.bernoulli(code.sigmoid())]
        print(*(f"{(t * torch.arange(1, t.numel() + 1).view(t.shape)).sum().item():.5g}" for t in told))
        loss = (code - torch.randn_like(code)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)
    keep(encoder)


@scene
def modes_that_see_every_operation():
    """Lightning's summary counts a model's operations with one of them."""
    class Seen(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.numbers += sum(a.numel() for a in args if isinstance(a, torch.Tensor))
            return func(*args, **(kwargs or {}))

    def loss_of(model, bx, by):
        with Seen() as seen:
            loss = F.cross_entropy(model(bx), by) + bx.square().mean()
            model(torch.ones(5, 6))
        print(seen.numbers)
        return loss

    model = mlp()
    train(model, lambda model, bx, by: F.cross_entropy(model(bx), by))
    train(model, loss_of)
    with FlopCounterMode(display=False) as counts:
        model(x[:9])
    print(counts.get_total_flops())


class Policy(nn.Module):
    """Actor and critic, as stable-baselines3 and cleanrl have them; validated as distributions are by default."""

    def __init__(self, inside):
        super().__init__()
        self.actor, self.critic, self.inside = mlp(), mlp(classes=1), inside

    def forward(self, seen, actions):
        of = Categorical(logits=self.actor(seen))
        return of.log_prob(actions), of.entropy(), self.critic(seen)

    def evaluate(self, seen, actions):
        return self(seen, actions) if self.inside else self.forward(seen, actions)


@scene
def distributions_that_validate():
    """PPO's loss, with distributions made in a module's forward and in a method; and others with other constraints."""
    for inside in (True, False):
        def loss_of(model, bx, by):
            chances, entropy, value = model.evaluate(bx, by)
            gain = bx.sum(1)
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            ratio = (chances - chances.detach()).exp()
            clipped = torch.min(gain * ratio, gain * ratio.clamp(0.8, 1.2)).mean()
            return F.mse_loss(value.flatten(), gain) - clipped - 0.01 * entropy.mean()

        train(Policy(inside), loss_of)
    of_actions = nn.Linear(6, 8)
    spread = nn.Parameter(torch.zeros(2))

    def others(model, bx, by):
        out = model(bx)
        normal = Independent(Normal(out[:, :2], spread.exp()), 1)
        beta = Beta(F.softplus(out[:, 2]) + 1, F.softplus(out[:, 3]) + 1)
        near = kl_divergence(normal, Independent(Normal(torch.zeros(2), torch.ones(2)), 1))
        counts = Geometric(logits=out[:, 4]).log_prob(by.float()) + Poisson(out[:, 5].exp()).log_prob(by)
        return (near - normal.log_prob(bx[:, :2]) - beta.log_prob(torch.sigmoid(bx[:, 0])) - counts
                - Bernoulli(logits=out[:, 6]).log_prob((by == 1).float()) + normal.entropy()).mean()

    train(of_actions, others)


class WordModel(nn.Module):
    """As in pytorch/examples, the batch second."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.drop, self.encoder = kind, nn.Dropout(0.2), nn.Embedding(20, 8)
        if kind == "Transformer":
            self.inner = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.1), 2, enable_nested_tensor=False)
        else:
            self.inner = getattr(nn, kind)(8, 8, 2, dropout=0.2)
        self.decoder = nn.Linear(8, 20)

    def forward(self, words, hidden=None):
        out = self.drop(self.encoder(words))
        if self.kind == "Transformer":
            mask = torch.log(torch.tril(torch.ones(len(words), len(words))))
            return F.log_softmax(self.decoder(self.inner(out, mask=mask)), dim=-1)
        out, hidden = self.inner(out, hidden)
        out = self.decoder(self.drop(out))
        return F.log_softmax(out.view(-1, 20) if self.kind == "GRU" else out, dim=-1), hidden


@scene
def sequences_first():
    """Columns of text, 5 words at a time, with the hidden state carried on; and nn.Transformer as it is by default."""
    text = torch.randint(0, 20, (21, 6), generator=torch.Generator().manual_seed(3))
    for kind in ("LSTM", "GRU", "Transformer"):
        torch.manual_seed(1)
        model = WordModel(kind)
        opt = torch.optim.SGD(model.parameters(), 0.5)
        hidden = {"LSTM": (torch.zeros(2, 6, 8), torch.zeros(2, 6, 8)), "GRU": torch.zeros(2, 6, 8)}.get(kind)
        for at in range(0, 20, 5):
            words, targets = text[at:at + 5], text[at + 1:at + 6]
            if kind == "Transformer":
                out = model(words)
            else:
                hidden = tuple(h.detach() for h in hidden) if kind == "LSTM" else hidden.detach()
                out, hidden = model(words, hidden)
            loss = F.nll_loss(out.view(-1, 20), targets.reshape(-1))
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            opt.step()
            say(loss)
    torch.manual_seed(1)
    both = nn.Transformer(8, 2, 1, 1, 16, 0.1)
    source, target = torch.randn(7, 6, 8), torch.randn(5, 6, 8)
    padding = torch.arange(7)[None] > torch.tensor([6, 5, 6, 4, 6, 3])[:, None]
    opt = torch.optim.SGD(both.parameters(), 0.1)
    for _ in range(3):
        out = both(source, target, tgt_mask=nn.Transformer.generate_square_subsequent_mask(5),
                   src_key_padding_mask=padding, memory_key_padding_mask=padding)
        loss = F.mse_loss(out, target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)
    keep(model, both)


def padded(samples):
    """Pads to the longest of the batch, as transformers' collators do, into their kind of a dict."""
    longest = max(len(words) for words, _ in samples)
    words = torch.zeros(len(samples), longest, dtype=torch.long)
    for row, (own, _) in zip(words, samples, strict=True):
        row[: len(own)] = own
    return collections.UserDict(words=words, mask=words != 0, labels=torch.tensor([label for _, label in samples]))


class Attentive(nn.Module):
    """What transformers' models do: masks looked up by place, a cache that begins empty, tokens shifted by one, the
    last word of each row looked up, values of the mask read."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(20, 8), nn.Linear(8, 24), nn.Linear(8, 3)
        self.next = nn.Linear(8, 20)

    def forward(self, words, mask, labels):
        batch, length = words.shape
        rows, places = torch.arange(batch)[:, None, None], torch.arange(length)
        allowed = (places[None, :, None] >= places[None, None, :]) & mask[rows, places[None, None, :]]
        allowed = None if mask.all() else allowed.expand(batch, -1, -1)[:, None]
        shifted = words.new_zeros(words.shape)
        shifted[..., 1:] = words[..., :-1].clone()
        shifted[..., 0] = 1
        q, k, v = self.qkv(self.embed(words) + self.embed(shifted)).unsqueeze(1).chunk(3, -1)
        k = torch.cat([torch.tensor([]), k], dim=-2)
        if allowed is None:
            allowed = torch.tril(torch.ones(length, length, dtype=torch.bool))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)[:, 0]
        ends = (mask.long() * places).argmax(-1)
        last = seen[torch.arange(batch), ends]
        of_words = F.cross_entropy(self.next(seen).transpose(1, 2), words.masked_fill(~mask, -100), ignore_index=-100)
        return F.cross_entropy(self.out(last), labels) + of_words, last


@scene
def padded_batches():
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(2, 9, (40,), generator=generator).tolist()
    texts = [torch.randint(1, 20, (length,), generator=generator) for length in lengths]
    model = Attentive()
    opt = torch.optim.SGD(model.parameters(), 0.1)  # the bias of keys has no gradient: Adam makes noise of it
    for _ in range(2):
        for batch in DataLoader([(text, len(text) % 3) for text in texts], 8, shuffle=True, collate_fn=padded):
            loss, last = model(**batch)
            opt.zero_grad()
            loss.backward()
            opt.step()
            print(f"{tuple(batch['words'].shape)} {last.sum().item():.6g}")
            say(loss)
    keep(model)


@scene
def sequences_joined_with_the_batch():
    """(steps, batch, features) as (steps * batch, features), with what is done to that, and back."""
    layer, words = nn.Linear(6, 6), torch.arange(30) % 6
    opt = torch.optim.SGD(layer.parameters(), 0.1)
    drop, norm = nn.Dropout(0.3), nn.BatchNorm1d(6)
    for bx, _ in batches(size=10):
        opt.zero_grad()
        out = layer(torch.stack([bx, bx * 2, bx.flip(1)]))
        flat = out.view(-1, 6)
        n = len(bx)
        print(tuple(flat.shape), tuple(flat.view(3, n, 6).shape), tuple(flat.view(-1, 2, 3).shape))
        told = [flat, flat.softmax(1), flat + torch.arange(len(flat))[:, None], flat.view(3, n, 6)[1], drop(flat),
                norm(flat), flat[flat.sum(1) > 0], flat[7], flat[torch.arange(len(flat)), words[:len(flat)]],
                flat.view(-1), flat.T @ flat, flat.reshape(3, n, 2, 3)[:, :, 1], flat.std(0), torch.rand_like(flat),
                flat.numpy(force=True), flat.repeat_interleave(2, 0), flat.argmax(1).view(3, n), out.view(3 * n, 6),
                out.flatten(0, 1).cumsum(0)]
        for t in map(torch.as_tensor, told):
            weights = torch.arange(1, t.numel() + 1).view(t.shape)
            print(f"{tuple(t.shape)} {(t * weights).sum().item():.4g}", end="; ")
        copy = flat.detach().clone()
        copy[:, 0] = torch.arange(len(flat)).float()
        copy[copy > 5] = 5
        loss = F.cross_entropy(flat, words[:len(flat)]) + (flat * copy).mean() + 0.01 * flat[3].sum()
        loss.backward()
        opt.step()
        say(loss, "\nloss")
    keep(layer)


class Encoder(nn.Module):
    """Rows meet behind most of the weights: all rows are compared with all."""

    def __init__(self):
        super().__init__()
        self.net = mlp(classes=8, hidden=16)

    def forward(self, rows):
        code = F.normalize(self.net(rows), dim=1)
        return code @ code.flip(0).T


@scene
def rows_that_meet_behind_the_weights():
    """A hand-made batch: the encoder is split, the comparison is of all with all."""
    model = Encoder()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for at in range(0, 40, 10):
        loss = F.cross_entropy(10 * model(x[at:at + 10]), torch.arange(10))
        opt.zero_grad()
        loss.backward()
        opt.step()
        say(loss)
    keep(model)


@scene
def places_in_all_ways():
    """Indexing by tensors that count the rows, and some that only seem to."""
    linear = nn.Linear(6, 6)
    for bx, _ in batches(size=8):
        n, out = len(bx), linear(bx)
        order = out.argsort(1)
        every, two = torch.arange(n), torch.arange(2)
        told = [out[every, order[:, 0]], out[every[:, None], order], out[every[:, None], two[None]], out[every],
                out[every.flip(0), 0], out[every[:2]], out[every, two[1]], out[list(range(n)), 3],
                out.view(n, 2, 3)[every[:, None], two[None, :], 1], out.view(n, 2, 3)[:, two, two],
                out.view(n, 2, 3)[every, :, two[0]], out.view(n, 3, 2)[every, order[:, 1] % 3],
                torch.stack([out, out])[:, every, order[:, 2]], torch.stack([out, out])[1, every]]
        print(*(f"{tuple(t.shape)} {(t * torch.arange(1, t.numel() + 1).view(t.shape)).sum().item():.6g}"
                for t in told), sep="; ")


play()
