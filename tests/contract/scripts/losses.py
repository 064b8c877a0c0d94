"""Every loss of torch.nn, with every reduction: the value, and the gradient it leaves in the weights."""

import torch
import torch.nn.functional as F
from scenes import play, scene
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

N = 13  # uneven for 2, 3 and 4 ranks
g = torch.Generator().manual_seed(5)
x = torch.randn(N, 6, generator=g)
classes = torch.randint(5, (N,), generator=g)
values = torch.randn(N, 5, generator=g)
signs = torch.randint(2, (N, 5), generator=g).float() * 2 - 1
bits = (signs + 1) / 2
labels = torch.randint(5, (N, 7), generator=g)
weights = torch.tensor([0.2, 1.0, 3.0, 0.5, 1.5])


def check(name, make, *targets, reductions=("mean", "sum", "none"), out=None):
    """Print the loss and the gradient it gives, for each reduction; a list of losses goes by backward(gradient)."""
    for reduction in reductions:
        torch.manual_seed(3)
        model = nn.Linear(6, 5)
        for xb, *tb in DataLoader(TensorDataset(x, *targets), 9):
            o = model(xb)
            loss = make(reduction)(out(o, xb) if out else o, *tb)
            if loss.dim():
                loss.backward(torch.linspace(0.5, 1.5, loss.numel()).view(loss.shape))
                loss = loss.sum()
            else:
                loss.backward()
            print(f"{name} {reduction} {loss.item():.9g} gradient {model.weight.grad.abs().sum().item():.9g}")


@scene
def cross_entropies():
    check("CE", lambda r: nn.CrossEntropyLoss(reduction=r), classes)
    check("CE weight", lambda r: nn.CrossEntropyLoss(weight=weights, reduction=r), classes)
    check("CE smoothing", lambda r: nn.CrossEntropyLoss(label_smoothing=0.1, reduction=r), classes)
    check("CE both", lambda r: nn.CrossEntropyLoss(weight=weights, label_smoothing=0.1, reduction=r), classes)
    holes = torch.where(torch.arange(N) % 3 == 0, -100, classes)
    check("CE ignore", lambda r: nn.CrossEntropyLoss(reduction=r), holes)
    check("CE ignore 2", lambda r: nn.CrossEntropyLoss(weight=weights, ignore_index=2, reduction=r), classes)
    check(
        "CE all three",
        lambda r: nn.CrossEntropyLoss(weights, ignore_index=2, reduction=r, label_smoothing=0.2),
        classes,
    )
    check("CE soft", lambda r: nn.CrossEntropyLoss(reduction=r), values.softmax(1))
    check("CE soft weight", lambda r: nn.CrossEntropyLoss(weight=weights, reduction=r), values.softmax(1))

    def nll(r):
        return lambda o, t: F.nll_loss(F.log_softmax(o, 1), t, weight=weights, ignore_index=1, reduction=r)

    check("NLL", nll, classes)

    def per_token(o, xb):  # (rows, classes, tokens), as a language model gives it
        return o.unsqueeze(2) * torch.linspace(0.5, 2, 7)

    check("CE tokens", lambda r: nn.CrossEntropyLoss(ignore_index=0, reduction=r), labels, out=per_token)

    def flat(r):
        return lambda o, t: F.cross_entropy(o.transpose(1, 2).reshape(-1, 5), t.view(-1), ignore_index=0, reduction=r)

    check("CE flat tokens", flat, labels, out=per_token, reductions=("mean", "sum"))


@scene
def ignored_everything():
    """Rows of one rank, or of all but one, do not count."""
    only_first = torch.where(torch.arange(N) < 1, classes, -100)
    check("first", lambda r: nn.CrossEntropyLoss(reduction=r), only_first, reductions=("sum",))
    model = nn.Linear(6, 5)
    loss = nn.CrossEntropyLoss()(model(next(iter(DataLoader(x, N)))), only_first)
    loss.backward()
    print(f"{loss.item():.9g} {model.weight.grad.abs().sum().item():.9g}")


@scene
def regressions():
    for name in ("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "SoftMarginLoss"):
        make = getattr(nn, name)
        check(name, lambda r, make=make: make(reduction=r), signs if "Soft" in name else values)
    check("Poisson", lambda r: nn.PoissonNLLLoss(full=True, reduction=r), values.abs())
    check("Gaussian", lambda r: nn.GaussianNLLLoss(reduction=r), values, values.abs() + 0.1)
    check("weighted mse", lambda r: lambda o, t: F.mse_loss(o, t, reduction=r), values)


@scene
def probabilities():
    check("BCE", lambda r: nn.BCELoss(reduction=r), bits, out=lambda o, xb: o.sigmoid())
    check("BCE weight", lambda r: nn.BCELoss(weight=weights, reduction=r), bits, out=lambda o, xb: o.sigmoid())
    check("BCE logits", lambda r: nn.BCEWithLogitsLoss(reduction=r), bits)
    check("BCE pos", lambda r: nn.BCEWithLogitsLoss(pos_weight=weights, reduction=r), bits)
    kinds = ("mean", "sum", "none", "batchmean")
    check(
        "KL",
        lambda r: nn.KLDivLoss(reduction=r),
        values.softmax(1),
        out=lambda o, xb: o.log_softmax(1),
        reductions=kinds,
    )
    check(
        "KL log",
        lambda r: nn.KLDivLoss(reduction=r, log_target=True),
        values.log_softmax(1),
        out=lambda o, xb: o.log_softmax(1),
        reductions=kinds,
    )


@scene
def margins():
    y = signs[:, 0].contiguous()
    check("hinge", lambda r: nn.HingeEmbeddingLoss(reduction=r), signs)
    check("cosine", lambda r: nn.CosineEmbeddingLoss(margin=0.2, reduction=r), values, y)
    check("ranking", lambda r: nn.MarginRankingLoss(margin=0.3, reduction=r), values, signs)
    check("multi", lambda r: nn.MultiMarginLoss(reduction=r, weight=weights), classes)
    first = torch.full((N, 5), -1)
    first[:, 0] = classes
    check("multilabel", lambda r: nn.MultiLabelMarginLoss(reduction=r), first)
    check("multilabel soft", lambda r: nn.MultiLabelSoftMarginLoss(reduction=r, weight=weights), bits)
    check("triplet", lambda r: nn.TripletMarginLoss(reduction=r, swap=True), values, values.flip(1))

    def apart(r):
        return nn.TripletMarginWithDistanceLoss(
            reduction=r, distance_function=lambda a, b: 1 - F.cosine_similarity(a, b)
        )

    check("triplet distance", apart, values, values.flip(1))


@scene
def ctc():
    lengths = torch.randint(1, 4, (N,), generator=g)
    targets = torch.randint(1, 5, (N, 3), generator=g)

    def make(r):
        def loss(o, t, n):
            o = (o.unsqueeze(0) * torch.linspace(0.5, 2, 8)[:, None, None]).log_softmax(2)  # (time, batch, classes)
            return F.ctc_loss(o, t, torch.full((len(n),), 8), n, reduction=r)

        return loss

    check("CTC", make, targets, lengths)


@scene
def adaptive_softmax():
    model = nn.Linear(6, 5)
    head = nn.AdaptiveLogSoftmaxWithLoss(5, 12, cutoffs=[4, 8], div_value=1.2)
    for xb, yb in DataLoader(TensorDataset(x, (classes * 7) % 12), 9):
        out, loss = head(model(xb), yb)
        loss.backward()
        print(tuple(out.shape), f"{loss.item():.9g} {model.weight.grad.abs().sum().item():.9g}")


@scene
def by_hand():
    """Losses spelled out in tensor operations."""
    spelled = {
        "mean of squares": lambda o, t: ((o - t) ** 2).mean(),
        "sum of squares": lambda o, t: (o - t).pow(2).sum(),
        "sum then mean": lambda o, t: (o - t).abs().sum(dim=1).mean(),
        "mean then sum": lambda o, t: (o - t).abs().mean(dim=0).sum(),
        "mean over both": lambda o, t: (o - t).abs().mean(dim=(0, 1)),
        "root": lambda o, t: torch.sqrt(torch.mean((o - t) ** 2)),
        "over the batch": lambda o, t: (o - t).square().sum() / o.shape[0],
        "over len": lambda o, t: (o - t).square().sum() / len(t),
        "over numel": lambda o, t: (o - t).square().sum() / o.numel(),
        "norm": lambda o, t: torch.norm(o - t) + torch.linalg.norm(o - t, dim=1).mean(),
        "logsumexp": lambda o, t: (torch.logsumexp(o, 1) - (o * t.softmax(1)).sum(1)).mean(),
        "logsumexp over rows": lambda o, t: torch.logsumexp(o - t, 0).mean(),
        "softmax of some dimension": lambda o, t: -(F.log_softmax(o) * nn.Softmax()(t) + nn.Softmin()(o)).mean(),
        "gather": lambda o, t: -o.log_softmax(1).gather(1, t.argmax(1, keepdim=True)).mean(),
        "one hot": lambda o, t: -(o.log_softmax(1) * F.one_hot(t.argmax(1), 5)).sum() / len(o),
        "picked": lambda o, t: -o.log_softmax(1)[torch.arange(len(o)), t.argmax(1)].mean(),
        "masked": lambda o, t: ((o - t) ** 2)[t > 0].mean(),
        "masked mean": lambda o, t: ((o - t) ** 2 * (t > 0)).sum() / (t > 0).sum(),
        "masked_select": lambda o, t: torch.masked_select(o, t > 0).mean(),
        "where": lambda o, t: torch.where(t > 0, o * 2, -o).mean(),
        "max": lambda o, t: (o - t).abs().max(),
        "top": lambda o, t: (o - t).abs().amax(1).topk(3)[0].mean(),
        "hard examples": lambda o, t: torch.sort((o - t).abs().sum(1), descending=True)[0][:4].mean(),
        "variance": lambda o, t: o.var() + o.std(dim=0).sum() + o.var(dim=1, unbiased=False).mean(),
        "product": lambda o, t: (1 + 0.1 * o).prod(dim=1).mean(),
        "einsum": lambda o, t: torch.einsum("bi,bi->b", o, t).tanh().mean(),
        "einsum over rows": lambda o, t: torch.einsum("bi,bj->ij", o, t).pow(2).mean(),
        "covariance": lambda o, t: ((o - o.mean(0)).T @ (o - o.mean(0)) / (len(o) - 1)).pow(2).sum(),
        "neighbours": lambda o, t: (o[1:] - o[:-1]).abs().mean(),
        "halves": lambda o, t: (o[: len(o) // 2].mean() - o[len(o) // 2 :].mean()) ** 2,
        "dice": lambda o, t: 1 - 2 * (o.sigmoid() * (t > 0)).sum() / (o.sigmoid().sum() + (t > 0).sum() + 1e-6),
        "cosine": lambda o, t: (1 - F.cosine_similarity(o, t)).mean(),
        "focal": lambda o, t: ((1 - o.sigmoid()) ** 2 * F.softplus(-o)).mean(),
        "loop": lambda o, t: sum(((a - b) ** 2).sum() for a, b in zip(o, t, strict=True)) / len(o),
        "stack": lambda o, t: torch.stack([(o - t).abs().mean(), o.pow(2).mean()]).sum(),
        "list": lambda o, t: torch.cat([o, t]).pow(2).mean(),
        "beside": lambda o, t: torch.cat([o, t], dim=1).softmax(1)[:, 0].mean(),
        "chunks": lambda o, t: sum(c.mean() for c in o.chunk(2, dim=1)) + o.split(2, dim=1)[0].mean(),
        "cdist": lambda o, t: torch.cdist(o, t).min(dim=1)[0].mean(),
    }
    for name, loss in spelled.items():
        check(name, lambda r, loss=loss: loss, values, reductions=("",))


play()
