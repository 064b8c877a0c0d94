"""Errors that some samples of a batch cause, caught by scripts: as on one process, whichever rank holds them."""

import torch
import torch.nn.functional as F
from scenes import fit, keep, mlp, play, scene, table
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

x, y = table()


def said(error):
    """An error's type, and the last line of what it says."""
    print(type(error).__name__, str(error).strip().splitlines()[-1])


def spoilt(row, value=10):
    """Labels of which one is out of range."""
    bad = y.clone()
    bad[row] = value
    return bad


def careful(batches, loss, model=None, steps=9):
    """A loop that leaves a batch out when it fails."""
    model = model or mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    done = failed = 0
    for batch in batches:
        try:
            value = loss(model, *batch)
            opt.zero_grad()
            value.backward()
            opt.step()
            done += 1
            print(f"loss {value.item():.9g}")
        except (IndexError, RuntimeError, ValueError) as error:
            failed += 1
            said(error)
    print(done, failed)
    keep(model)


@scene
def a_label_out_of_range():
    """cross_entropy fails on the rank that holds it; in the first batches, and in later ones."""
    for row in (0, 9, 17, 25, 39):
        careful(DataLoader(TensorDataset(x, spoilt(row)), batch_size=10), lambda m, a, b: F.cross_entropy(m(a), b))


@scene
def a_label_out_of_range_in_a_model():
    """The loss is the model's own."""
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, a, b):
            return F.cross_entropy(self.net(a), b)

    careful(DataLoader(TensorDataset(x, spoilt(27)), batch_size=5), lambda m, a, b: m(a, b), WithLoss())


class Words(nn.Module):
    """Looks words up."""

    def __init__(self, drop=0.0):
        super().__init__()
        self.table, self.drop, self.out = nn.Embedding(12, 8), nn.Dropout(drop), nn.Linear(8, 3)

    def forward(self, words):
        return self.out(self.drop(self.table(words)).mean(1))


@scene
def a_word_out_of_range():
    """An embedding in a split model; dropout goes on where one process's would."""
    words = torch.arange(160).view(40, 4) % 12
    for row in (3, 27, 36):
        bad = words.clone()
        bad[row, 2] = 12
        careful(DataLoader(TensorDataset(bad, y), batch_size=8), lambda m, a, b: F.cross_entropy(m(a), b), Words(0.3))


@scene
def operations_that_look_at_values():
    """one_hot, gather and an index, outside of models: raised by the operation itself, not by a later one."""
    targets = spoilt(7, 5)
    for a, b in DataLoader(TensorDataset(x, targets), batch_size=10):
        reached = []
        for name, work in (("one_hot", lambda a=a, b=b: F.one_hot(b, 3)),
                           ("gather", lambda a=a, b=b: a[:, :3].gather(1, b.unsqueeze(1))),
                           ("table", lambda a=a, b=b: torch.eye(3)[b]),
                           ("select", lambda a=a, b=b: F.embedding(b, torch.eye(3)))):
            try:
                out = work()
                reached.append(name)
                print(name, tuple(out.shape), f"{out.float().sum().item():.6g}")
            except (RuntimeError, IndexError) as error:
                said(error)
        print(reached)


@scene
def errors_tell_of_the_whole_batch():
    """Shapes in messages are those of the batch."""
    for a, b in DataLoader(TensorDataset(x, y), batch_size=10):
        for work in (lambda a=a: a @ torch.ones(5, 2), lambda a=a: a + torch.ones(7),
                     lambda a=a: nn.Linear(8, 2)(a), lambda a=a, b=b: F.mse_loss(a, torch.ones(9, 6)),
                     lambda a=a, b=b: F.cross_entropy(a, b[:7])):
            try:
                work()
                print("went well")
            except (RuntimeError, ValueError) as error:
                said(error)
        break
    model = mlp()
    for a in (x[:10], x[:10, :4], x[10:20]):
        for _ in range(2):
            try:
                print(tuple(model(a).shape))
            except RuntimeError as error:
                said(error)


@scene
def a_hook_that_fails_in_backward():
    """A custom function's backward, and a hook on a result, meet a value that they do not take."""
    class Checked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a * 2

        @staticmethod
        def backward(ctx, grad):
            (a,) = ctx.saved_tensors
            if (a > 90).any():
                raise ValueError("too large for backward")
            return grad * 2

    big = x.clone()
    big[26, 3] = 100
    net = mlp()
    careful(DataLoader(TensorDataset(big, y), batch_size=10),
            lambda m, a, b: F.cross_entropy(m(Checked.apply(a.requires_grad_())), b), net)


class Flaky(Dataset):
    """A sample that cannot be read."""

    def __init__(self, bad, error=ValueError):
        self.bad, self.error = bad, error

    def __len__(self):
        return 40

    def __getitem__(self, i):
        if i in self.bad:
            raise self.error(f"sample {i} is broken")
        return x[i], y[i]


@scene
def a_sample_that_cannot_be_read():
    """The script leaves its batch out and goes on."""
    for workers in (0, 2):
        for bad in ((3,), (18, 33), (39,)):
            it = iter(DataLoader(Flaky(bad), batch_size=10, num_workers=workers))
            while True:
                try:
                    a, b = next(it)
                    print(tuple(a.shape), f"{a.sum().item():.6g}", b.sum().item())
                except ValueError as error:
                    said(error)
                except StopIteration:
                    break


@scene
def a_sample_that_ends_the_epoch():
    """StopIteration out of a data set ends the loop early and silently."""
    for workers in (0, 2):
        fit(DataLoader(Flaky((26,), StopIteration), batch_size=10, num_workers=workers))


def without_none(samples):
    """A collate_fn that drops what could not be read."""
    return torch.utils.data.default_collate([s for s in samples if s is not None])


class Holes(Dataset):
    """Some samples are not there, none of them in the first batch."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return None if i in (22, 23, 36) else (x[i], y[i])


@scene
def a_collate_that_drops_what_is_missing():
    """The first batch is whole."""
    for workers in (0, 2):
        fit(DataLoader(Holes(), batch_size=8, collate_fn=without_none, num_workers=workers))


@scene
def a_collate_that_drops_all_that_a_rank_has():
    """Or all of a batch, for which it gives nothing."""
    class Gone(Dataset):
        def __init__(self, gone):
            self.gone = gone

        def __len__(self):
            return 40

        def __getitem__(self, i):
            return None if i in self.gone else (x[i], y[i])

    def or_nothing(samples):
        return without_none(samples) if any(s is not None for s in samples) else None

    for workers in (0, 2):
        fit(DataLoader(Gone((20, 21, 22, 23)), batch_size=8, collate_fn=without_none, num_workers=workers))
        fit(DataLoader(Gone((16, 17)), batch_size=8, collate_fn=without_none, num_workers=workers))
        for batch in DataLoader(Gone(range(16, 24)), batch_size=8, collate_fn=or_nothing, num_workers=workers):
            print("nothing" if batch is None else f"{batch[0].sum().item():.6g}")


@scene
def collates_that_mix_where_the_data_ask_for_it():
    """They sort by a length, of one kind in the first batches; they scale by the largest, if it is large."""
    def by_length(samples):
        samples = sorted(samples, key=lambda s: -s[2])
        return torch.utils.data.default_collate([(a, b) for a, b, _ in samples])

    def scaled(samples):
        a, b, _ = torch.utils.data.default_collate(samples)
        return (a / a.abs().max() if a.abs().max() > 2.5 else a), b

    for collate in (by_length, scaled):
        for workers in (0, 2):
            rows = [(x[i], y[i], 5 if i < 16 else 5 + i % 3) for i in range(40)]
            for a, b in DataLoader(rows, batch_size=8, collate_fn=collate, num_workers=workers):
                print(b.tolist(), f"{a[0].sum().item():.6g} {a[-1].sum().item():.6g}")


@scene
def a_sample_that_lacks_its_label():
    """The default collate does not fail in workers as it does in the script's process."""
    rows = [(x[i], None if i == 21 else y[i]) for i in range(40)]
    for workers in (0, 2):
        it = iter(DataLoader(rows, batch_size=8, num_workers=workers))
        for _ in range(5):
            try:
                print(f"{next(it)[0].sum().item():.6g}")
            except (TypeError, AttributeError) as error:
                said(error)


class Mixed(Dataset):
    """Whole numbers in some samples, fractions in others."""

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return x[i], (i if i % 12 < 6 else i + 0.5)


@scene
def samples_of_two_kinds():
    """The default collate decides by the first sample of a batch."""
    for workers in (0, 2):
        for a, b in DataLoader(Mixed(), batch_size=12, num_workers=workers):
            print(b.dtype, tuple(a.shape), b.tolist(), f"{b.double().sum().item():.6g}")


class Ragged(Dataset):
    """Samples of two lengths."""

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return torch.ones(3 if i < 12 else 2 + i % 4 // 2)


@scene
def samples_of_two_lengths():
    """The default collate refuses them; each rank's own would fit."""
    for workers in (0, 2):
        it = iter(DataLoader(Ragged(), batch_size=4, num_workers=workers))
        for _ in range(4):
            try:
                print(tuple(next(it).shape))
            except RuntimeError as error:
                said(error)


@scene
def a_failure_that_is_the_same_everywhere():
    """No rank waits for another; ten in a row."""
    for a, _ in DataLoader(TensorDataset(x, y), batch_size=10):
        for _ in range(10):
            try:
                a.view(7, 3)
            except RuntimeError as error:
                last = error
        said(last)
    model = mlp()
    loss = model(x).sum()
    loss.backward()
    try:
        loss.backward()
    except RuntimeError as error:
        print(str(error)[:40])
    fit(DataLoader(TensorDataset(x, y), batch_size=10), model)


@scene
def evaluation_in_finally():
    """Training fails on one rank's row; the evaluation behind it is of the whole, and the weights are saved."""
    model = mlp()
    try:
        try:
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            for a, b in DataLoader(TensorDataset(x, spoilt(26)), batch_size=10):
                loss = F.cross_entropy(model(a), b)
                opt.zero_grad()
                loss.backward()
                opt.step()
        finally:
            keep(model)
            right = sum((model(a).argmax(1) == b).sum().item()
                        for a, b in DataLoader(TensorDataset(x, y), batch_size=16))
            print("right", right)
    except IndexError as error:
        said(error)


if __name__ == "__main__":
    play()
