"""Operations over the rows of a batch: values, and gradients through them."""

import torch
import torch.nn.functional as F
from scenes import play, scene
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

g = torch.Generator().manual_seed(9)
x = torch.randn(10, 4, generator=g)
y = torch.randint(3, (10,), generator=g)


def batch():
    """All ten rows, from a loader."""
    return next(iter(DataLoader(TensorDataset(x, y), 10)))


def show(name, value):
    """A result as shapes and digits, whatever it is made of."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        weighed = (value.double().flatten() * torch.arange(1, value.numel() + 1)).sum() if value.numel() else 0.0
        print(name, tuple(value.shape), value.dtype, f"{float(weighed):.9g}")
    elif isinstance(value, (tuple, list)):
        for i, v in enumerate(value):
            show(f"{name}[{i}]", v)
    else:
        print(name, value)


@scene
def over_rows_and_columns():
    a, b = batch()
    p = a.abs() + 0.5
    for dim in (None, 0, 1, -1):
        args = () if dim is None else (dim,)
        for name in (
            "sum",
            "mean",
            "std",
            "var",
            "amax",
            "amin",
            "prod",
            "nansum",
            "logsumexp",
            "norm",
            "argmax",
            "argmin",
        ):
            if dim is None and name == "logsumexp":
                continue
            show(f"{name} {dim}", getattr(p, name)(**({} if dim is None else {"dim": dim})))
        for name in ("max", "min", "median", "any", "all", "aminmax"):
            show(
                f"{name} {dim}",
                tuple(p.aminmax(dim=dim)) if name == "aminmax" and dim is not None else getattr(p, name)(*args),
            )
        if dim is not None:
            for name in (
                "mode",
                "cumsum",
                "cumprod",
                "cummax",
                "softmax",
                "log_softmax",
                "sort",
                "argsort",
                "logcumsumexp",
            ):
                result = getattr(p, name)(dim)
                show(f"{name} {dim}", tuple(result) if isinstance(result, tuple) else result)
            show(f"keepdim {dim}", p.mean(dim, keepdim=True))
            show(f"topk {dim}", tuple(p.topk(2, dim=dim)))
            show(f"kthvalue {dim}", tuple(p.kthvalue(2, dim=dim)))
            show(f"quantile {dim}", p.quantile(0.3, dim=dim))
            show(f"renorm {dim}", F.normalize(p, dim=dim))
            show(f"diff {dim}", p.diff(dim=dim))
            show(f"std {dim}", torch.std_mean(p, dim=dim, unbiased=False))
    show("both", p.sum((0, 1)))
    show(
        "labels",
        [b.sum(), b.float().mean(), b.max(), b.bincount(), b.unique(), b.float().std(), b.median(), b.mode()[0]],
    )
    show("counts", list(b.unique(return_counts=True)))
    show("count_nonzero", [b.count_nonzero(), (a > 0).count_nonzero(0), (a > 0).sum(1), (a > 0).float().mean()])
    show("histc", a.histc(5, -2, 2))


@scene
def between_rows():
    a, b = batch()
    w = torch.linspace(-1, 1, 12).view(4, 3)
    square = torch.linspace(-1, 1, 100).view(10, 10)
    for name, value in {
        "a @ w": a @ w,
        "a.T @ a": a.T @ a,
        "a @ a.T": a @ a.T,
        "square @ a": square @ a,
        "mm": torch.mm(a, w),
        "matmul": torch.matmul(a.unsqueeze(1), w),
        "bmm": torch.bmm(a.unsqueeze(2), a.unsqueeze(1)),
        "addmm": torch.addmm(torch.ones(3), a, w),
        "outer": torch.outer(a[:, 0], a[:, 1]),
        "dot": torch.dot(a[:, 0], a[:, 1]),
        "mv": a @ w[:, 0],
        "vm": a[:, 0] @ a,
        "einsum": torch.einsum("bi,ij->bj", a, w),
        "einsum rows": torch.einsum("bi,ci->bc", a, a),
        "kron": torch.kron(a[:2], w),
        "cdist": torch.cdist(a, a),
        "pdist": F.pdist(a),
        "cov": torch.cov(a.T),
        "corrcoef": torch.corrcoef(a.T),
        "cosine": F.cosine_similarity(a.unsqueeze(1), a.unsqueeze(0), dim=-1),
        "svd": torch.linalg.svdvals(a),
        "det": torch.det(a.T @ a),
        "trace": torch.trace(a),
        "diag": torch.diag(a @ a.T),
        "tril": torch.tril(a),
        "triu": torch.triu(a @ a.T),
        "lstsq": torch.linalg.lstsq(a, b.float().unsqueeze(1)).solution,
    }.items():
        show(name, value)


@scene
def choosing():
    a, b = batch()
    place = torch.tensor([3, 3, 0, 9])
    for name, value in {
        "index_select": a.index_select(0, place),
        "columns": a.index_select(1, place[:2]),
        "gather": a.gather(1, b.unsqueeze(1)),
        "gather rows": a.gather(0, b.unsqueeze(1).expand(-1, 4)),
        "take": a.take(place),
        "take_along": torch.take_along_dim(a, b.unsqueeze(1), 1),
        "masked": a.masked_select(a > 0),
        "nonzero": (a > 1).nonzero(),
        "where": torch.where(a > 0, a, 0.0),
        "scatter": torch.zeros(10, 3).scatter(1, b.unsqueeze(1), 1.0),
        "scatter_add": torch.zeros(3).scatter_add(0, b, a[:, 0]),
        "index_add": torch.zeros(3, 4).index_add(0, b, a),
        "bincount": torch.bincount(b, weights=a[:, 0]),
        "lookup": torch.arange(30.0).view(3, 10)[b],
        "isin": torch.isin(b, torch.tensor([0, 2])),
        "bucketize": torch.bucketize(a, torch.tensor([-1.0, 0, 1])),
        "embedding": F.embedding(b, torch.arange(12.0).view(3, 4)),
        "sorted": a[a[:, 0].argsort()],
        "first of": a[b == b[0]].mean(0),
        "loop": torch.stack([a[b == k].sum(0) for k in range(3)]),
        "confusion": torch.zeros(3, 3).index_put((b, a[:, :3].argmax(1)), torch.ones(10), accumulate=True),
        "unique rows": b.unsqueeze(1).unique(dim=0),
        "searchsorted": torch.searchsorted(torch.tensor([0.0, 1]), a[:, 0].contiguous()),
    }.items():
        show(name, value)


@scene
def elementwise():
    a, b = batch()
    row, column, scalar = torch.arange(4.0), torch.arange(10.0).unsqueeze(1), torch.tensor(2.0)
    for name, value in {
        "row": a + row,
        "column": a * column,
        "scalar": a / scalar,
        "number": 3 - a,
        "pow": 2**a,
        "int": b // 2,
        "mod": b % 2,
        "neg": -a,
        "round": (a * 10).round(),
        "whole": a + x,
        "itself": a + a * a,
        "labels": a * b.unsqueeze(1),
        "rsub": 1 - b,
        "and": (b > 0) & (b < 2),
        "not": ~(b > 0),
        "xor": (b > 0) ^ (a[:, 0] > 0),
        "float": b / 2,
        "clamp": a.clamp(min=0),
        "lerp": torch.lerp(a, x, 0.3),
        "maximum": torch.maximum(a, row),
        "minimum": torch.minimum(a, column),
        "sigmoid": a.sigmoid(),
        "gelu": F.gelu(a),
        "softplus": F.softplus(a),
        "erf": a.erf(),
        "atan2": torch.atan2(a, x),
        "nan_to_num": (a / 0).nan_to_num(0, 1, -1),
        "addcmul": torch.addcmul(a, a, a, value=0.5),
        "glu": F.glu(a, dim=1),
        "layer_norm": F.layer_norm(a, (4,)),
        "linear": F.linear(a, torch.ones(3, 4)),
        "hardtanh": F.hardtanh(a),
        "sign": a.sign(),
        "logit": a.sigmoid().logit(),
        "matrix": a.unsqueeze(2) * a.unsqueeze(1),
        "pairs": a.unsqueeze(0) - a.unsqueeze(1),
        "against rows": a - a.mean(0, keepdim=True),
        "scaled": (a - a.min()) / (a.max() - a.min()),
        "standard": (a - a.mean()) / a.std(),
        "one row": a - a[0],
        "shuffled": a * a.flip(0),
        "polar": torch.complex(a, x).abs(),
        "bits": b.bitwise_and(1),
        "shift": b << 1,
        "broadcast": a.view(10, 1, 4) + torch.zeros(1, 5, 4),
    }.items():
        show(name, value)


@scene
def images():
    pics = torch.randn(7, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    a = next(iter(DataLoader(pics, 7)))
    for name, value in {
        "conv": F.conv2d(a, torch.ones(2, 3, 3, 3)),
        "pool": F.max_pool2d(a, 2),
        "avg": F.adaptive_avg_pool2d(a, 1),
        "up": F.interpolate(a, scale_factor=2),
        "bilinear": F.interpolate(a, size=(5, 5), mode="bilinear"),
        "unfold": F.unfold(a, 2),
        "shuffle": F.pixel_unshuffle(a, 2),
        "pad": F.pad(a, (1, 1, 1, 1), mode="reflect"),
        "channel": a.mean(dim=(0, 2, 3)),
        "per image": a.mean(dim=[1, 2, 3]),
        "flip": a.flip(-1),
        "crop": a[:, :, 2:6, 2:6],
        "grey": a.mean(1, keepdim=True),
        "flat": torch.flatten(a, 1),
        "to last": a.permute(0, 2, 3, 1),
        "last": a.to(memory_format=torch.channels_last),
        "norm": (a - a.mean((0, 2, 3), keepdim=True)) / a.std((0, 2, 3), keepdim=True),
        "first": a[0],
        "grid": torch.cat(list(a), dim=2),
        "fft": torch.fft.rfft2(a).abs(),
        "repeat": a[:, :1].repeat(1, 3, 1, 1),
        "sample": F.grid_sample(a, torch.zeros(7, 2, 2, 2), align_corners=False),
    }.items():
        show(name, value)


@scene
def gradients_through():
    """Each function of the output mixes rows somehow; its gradient reaches the weights as on one process."""
    functions = {
        "sum": lambda o: o.sum(),
        "mean 0": lambda o: o.mean(0).pow(2).sum(),
        "std": lambda o: o.std(),
        "var 0": lambda o: o.var(0).sum(),
        "max 0": lambda o: o.max(0)[0].sum(),
        "min": lambda o: o.min(),
        "median": lambda o: o.median(),
        "prod 0": lambda o: (o * 0.3 + 1).prod(0).sum(),
        "cumsum": lambda o: o.cumsum(0).pow(2).mean(),
        "softmax 0": lambda o: o.softmax(0)[:, 0].pow(2).sum(),
        "sort": lambda o: o.sort(0)[0][:4].sum(),
        "gram": lambda o: (o @ o.T).tanh().sum(),
        "cov": lambda o: torch.cov(o.T).sum(),
        "index": lambda o: o[3].sum() * o[7].prod(),
        "slice": lambda o: o[2:8].mean(),
        "flip": lambda o: (o * o.flip(0)).sum(),
        "mask": lambda o: o[o > 0].sum(),
        "topk": lambda o: o.flatten().topk(5)[0].sum(),
        "norm": lambda o: o.norm(),
        "norm 0": lambda o: o.norm(dim=0).sum(),
        "lse": lambda o: o.logsumexp(0).sum(),
        "normalize 0": lambda o: F.normalize(o, dim=0)[0].sum(),
        "perm": lambda o: (o * o[torch.arange(9, -1, -1)]).sum(),
        "view": lambda o: o.view(5, 2, 3).mean(1).pow(2).sum(),
        "transpose": lambda o: (o.T * torch.arange(10.0)).sum(),
        "roll": lambda o: (o - o.roll(1, 0)).abs().sum(),
        "stack": lambda o: torch.stack([o.mean(), o.std()]).prod(),
        "split": lambda o: sum((i + 1) * s.sum() for i, s in enumerate(o.split(3))),
        "cat": lambda o: torch.cat([o[5:], o[:5]]).mul(torch.arange(30.0).view(10, 3)).sum(),
        "rows": lambda o: sum(i * r.sum() for i, r in enumerate(o)),
        "detach": lambda o: ((o - o.mean(0).detach()) ** 2).mean(),
        "scatter": lambda o: torch.zeros(3, 3).index_add(0, y, o).pow(2).sum(),
        "svd": lambda o: torch.linalg.svdvals(o).sum(),
        "clone": lambda o: o.clone().mul_(2).sum(),
        "in place": lambda o: o.mul(1).add_(1).pow_(2).mean(),
        "scalar": lambda o: o.sum() * o.mean() + o.max(),
        "long way": lambda o: (o / o.sum(0, keepdim=True).abs().clamp(min=1)).pow(2).sum(),
        "pairs": lambda o: (o[:, None] - o[None]).abs().sum(-1).exp().neg().exp().sum(),
    }
    for name, f in functions.items():
        torch.manual_seed(4)
        model = nn.Linear(4, 3)
        a, _ = batch()
        value = f(model(a))
        value.backward()
        print(
            name,
            f"{value.item():.9g} {model.weight.grad.abs().sum().item():.9g} {model.bias.grad.abs().sum().item():.9g}",
        )


play()
