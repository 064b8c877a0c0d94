"""Random little programs of tensor operations: what they give on a loader's batch, they give on a plain tensor.

A plain PyTorch script (run it with python, and it compares a tensor with itself). Under ``oars run`` the loader's batch
is rows on every rank while ``x[:B]`` is plain, so each program is run both ways in the same process, forward and
backward. Hypothesis runs derandomised: all ranks try the same programs.
"""

# ruff: noqa: E501 (a table of operations, several to a line)
import sys

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

D = 6
torch.manual_seed(0)
W = torch.randn(D, D) / 3
V = torch.randn(D)
CONV = torch.randn(3, 2, 2) / 2

# Each takes and gives a (B, D) float tensor, so that any sequence of them is a program.
UNARY = {
    "tanh": torch.tanh, "relu": F.relu, "sigmoid": torch.sigmoid, "gelu": F.gelu, "softplus": F.softplus,
    "abs": lambda x: x.abs(), "neg": lambda x: -x, "square": lambda x: x * x, "half": lambda x: x / 2,
    "rsub": lambda x: 1 - x, "rdiv": lambda x: 1 / (x.abs() + 1), "pow": lambda x: (x.abs() + 0.1) ** 1.5,
    "exp": lambda x: x.clamp(-2, 2).exp(), "log": lambda x: (x.abs() + 1).log(), "sqrt": lambda x: (x * x + 1).sqrt(),
    "softmax": lambda x: x.softmax(1), "log_softmax": lambda x: F.log_softmax(x, -1), "norm_rows": lambda x: F.normalize(x),
    "layer_norm": lambda x: F.layer_norm(x, (D,)), "linear": lambda x: F.linear(x, W, V), "matmul": lambda x: x @ W,
    "addv": lambda x: x + V, "centre": lambda x: x - x.mean(0), "centre_rows": lambda x: x - x.mean(1, keepdim=True),
    "scale": lambda x: x / (x.abs().sum() + 1), "standard": lambda x: (x - x.mean(0)) / (x.std(0, unbiased=False) + 1),
    "cumsum": lambda x: x.cumsum(1) / D, "cumsum_batch": lambda x: x.cumsum(0) / len(x), "flip": lambda x: x.flip(1),
    "flip_batch": lambda x: x.flip(0), "roll": lambda x: x.roll(1, 0), "roll_rows": lambda x: x.roll(2, 1),
    "sort": lambda x: x.sort(1).values, "sort_batch": lambda x: x.sort(0).values, "gram": lambda x: x @ (x.t() @ x) / 50,
    "similar": lambda x: torch.softmax(x @ x.t() / 4, 1) @ x, "reshape": lambda x: (x.reshape(-1, 2, 3) * 1.5).reshape(len(x), D),
    "flat": lambda x: x.view(-1).mul(0.9).view(-1, D), "permute": lambda x: (x.t() * 2).t(),
    "stack": lambda x: torch.stack([x, -x], 1).sum(1) + x, "stack0": lambda x: torch.stack([x, 2 * x]).mean(0),
    "cat": lambda x: torch.cat([x[:, :3], x[:, 3:] * 2], 1), "cat_batch": lambda x: torch.cat([x, x * 2])[: len(x)],
    "first": lambda x: x + x[0], "last": lambda x: x - 0.5 * x[-1], "evens": lambda x: x[:, ::2].repeat(1, 2),
    "pick": lambda x: x[torch.arange(len(x)), x.argmax(1)].unsqueeze(1) + x, "chunk": lambda x: sum(x.chunk(2, 1)).repeat(1, 2),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x), "mask": lambda x: x.masked_fill(x < -1, 0.5),
    "max_rows": lambda x: x - x.max(1, keepdim=True).values, "max_all": lambda x: x / (x.abs().max() + 1),
    "amax_batch": lambda x: x - x.amax(0), "logsumexp": lambda x: x - x.logsumexp(1, keepdim=True),
    "logsumexp_batch": lambda x: x - x.logsumexp(0), "prod": lambda x: x + x.tanh().prod(1, keepdim=True),
    "einsum": lambda x: torch.einsum("bi,ij->bj", x, W), "einsum_batch": lambda x: x @ torch.einsum("bi,bj->ij", x, x) / 50,
    "outer": lambda x: torch.einsum("bi,ci->bc", x, x).mean(1, keepdim=True) + x, "topk": lambda x: x.topk(3, 1).values.repeat(1, 2),
    "gather": lambda x: x.gather(1, x.argsort(1)), "expand": lambda x: x.unsqueeze(2).expand(-1, -1, 4).mean(2),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1), "bmm": lambda x: torch.bmm(x.unsqueeze(2), x.unsqueeze(1)).sum(2) / 5,
    "conv": lambda x: F.conv1d(x.view(-1, 2, 3), CONV, padding=1)[:, :2, :3].reshape(-1, D), "dot": lambda x: x * (x @ V).unsqueeze(1),
    "pool": lambda x: F.avg_pool1d(x.unsqueeze(1), 2).squeeze(1).repeat(1, 2), "pad": lambda x: F.pad(x, (1, 0))[:, :D],
    "cdist": lambda x: x + torch.cdist(x.detach(), x).mean(1, keepdim=True), "var": lambda x: x + x.var(1, keepdim=True),
    "norm": lambda x: x / (x.norm() + 1), "transpose3": lambda x: x.view(-1, 3, 2).transpose(1, 2).reshape(-1, D),
    "batch_last": lambda x: (x.t().reshape(2, 3, -1) * 1.1).reshape(D, -1).t(), "clamp": lambda x: x.clamp(min=-0.5),
    "detach": lambda x: x + x.detach() * 0.5, "double": lambda x: x.double().mul(1.5).float(), "clone": lambda x: x.clone().mul_(1.2),
    "inplace": lambda x: x.mul(1.0).add_(x.mean()).clamp_(-3, 3), "setcol": lambda x: _set(x, (slice(None), 1), 0.25),
    "setrow": lambda x: _set(x, 0, 0.5), "setmask": lambda x: _setmask(x), "masked": lambda x: x + x[x > 0].sum() / 50,
    "unbind": lambda x: sum(x.unbind(1)).unsqueeze(1) + x, "rows": lambda x: torch.stack([r * (i + 1) for i, r in enumerate(x)]) / len(x),
    "attend": lambda x: F.scaled_dot_product_attention(*[x.view(-1, 3, 2)] * 3).reshape(-1, D), "tile": lambda x: x.tile(1, 2)[:, :D],
    "batch_size": lambda x: x * x.shape[0] / 10, "numel": lambda x: x / x.numel() * 50, "glu": lambda x: F.glu(x, 1).repeat(1, 2),
    "interleave": lambda x: x.repeat_interleave(2, 0)[::2], "unfold": lambda x: x.unfold(1, 2, 2).sum(2).repeat(1, 2),
    "split_batch": lambda x: torch.cat([p * (i + 1) for i, p in enumerate(x.split(3))]), "median": lambda x: x - x.median(),
    "quantile": lambda x: x - x.quantile(0.5, dim=1, keepdim=True), "index": lambda x: x[:, [2, 0, 1, 5, 4, 3]],
    "index_batch": lambda x: x[torch.arange(len(x) - 1, -1, -1)], "narrow": lambda x: x.narrow(1, 0, 3).repeat(1, 2),
    "addmm": lambda x: torch.addmm(V, x, W), "baddbmm": lambda x: x.unsqueeze(1).matmul(W).squeeze(1), "lerp": lambda x: x.lerp(-x, 0.3),
}
BINARY = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b / 2, "maximum": torch.maximum,
    "row_dot": lambda a, b: a * (a * b).sum(1, keepdim=True) / 5, "across": lambda a, b: a + (a @ b.t()) @ b / 50,
    "minus_mean": lambda a, b: a - b.mean(0), "cosine": lambda a, b: a * F.cosine_similarity(a, b, dim=1).unsqueeze(1),
    "where2": lambda a, b: torch.where(a > b, a, b), "hypot": lambda a, b: torch.hypot(a, b + 2), "stack2": lambda a, b: torch.stack([a, b]).amax(0),
    "cat2": lambda a, b: torch.cat([a, b], 1)[:, 3:9], "pairs": lambda a, b: a + F.pairwise_distance(a, b).unsqueeze(1),
}
ENDS = {
    "sum": lambda x: x.sum() / 50, "mean": lambda x: x.mean(), "norm": lambda x: x.norm(), "square": lambda x: x.pow(2).mean(1).sum() / 10,
    "ce": lambda x: F.cross_entropy(x, x.detach().argmax(1)), "smooth": lambda x: F.cross_entropy(x, x.detach().argmin(1), label_smoothing=0.1),
    "mse": lambda x: F.mse_loss(x, x.detach().roll(1, 0)), "huber": lambda x: F.huber_loss(x, torch.ones_like(x), reduction="sum") / 50,
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, (x.detach() > 0).float()), "kl": lambda x: F.kl_div(F.log_softmax(x, 1), F.softmax(x.detach() + V, 1), reduction="batchmean"),
    "first": lambda x: x[0].sum(), "corner": lambda x: x[-1, 2], "logsumexp": lambda x: x.view(-1).logsumexp(0), "std": lambda x: x.std(),
}


def _set(x, where, value):
    y = x.clone()
    y[where] = value
    return y


def _setmask(x):
    y = x * 1.0
    y[y > 1] = 0.1
    return y


step = st.one_of(st.sampled_from(sorted(UNARY)), st.sampled_from(sorted(BINARY)))
program = st.tuples(st.lists(step, min_size=1, max_size=6), st.sampled_from(sorted(ENDS)))


def run(x, weight, steps, end):
    """Values stay tame by a tanh after each step; two-argument steps take what came before."""
    seen = [x, torch.tanh(x @ weight)]
    for name in steps:
        value = UNARY[name](seen[-1]) if name in UNARY else BINARY[name](seen[-1], seen[-2])
        assert tuple(value.shape) == tuple(x.shape), (name, value.shape)
        seen.append(torch.tanh(value / 2) * 2)
    loss = ENDS[end](seen[-1]) + 0.01 * weight.pow(2).sum()
    gradient, of_x = torch.autograd.grad(loss, [weight, x], retain_graph=True)
    weight.grad = None
    loss.backward()
    return seen[-1].detach(), loss.detach(), gradient, of_x, weight.grad.clone()


def close(a, b):
    return torch.allclose(a + 0, b + 0, rtol=2e-4, atol=2e-5, equal_nan=True)


@settings(max_examples=int(sys.argv[1]) if len(sys.argv) > 1 else 60, derandomize=True, deadline=None, database=None,
          suppress_health_check=list(HealthCheck))
@given(st.integers(1, 13), program)
def test_programs_give_the_same_on_rows(batch, steps_and_end):
    x = torch.randn(batch, D, generator=torch.Generator().manual_seed(batch))
    rows = next(iter(DataLoader(TensorDataset(x), batch)))[0].requires_grad_()
    results = []
    for values in (rows, x.clone().requires_grad_()):
        results.append(run(values, W.clone().requires_grad_(), *steps_and_end))
    for what, a, b in zip(("values", "loss", "grad", "grad of x", "backward"), *results, strict=True):
        assert close(a, b), f"{what} differ in {steps_and_end} with {batch} rows:\n{a}\n{b}"


if __name__ == "__main__":
    for name in sorted(UNARY):  # every operation at least once, uneven and small batches included
        for batch in (1, 2, 5, 8):
            x = torch.randn(batch, D, generator=torch.Generator().manual_seed(batch))
            rows = next(iter(DataLoader(TensorDataset(x), batch)))[0].requires_grad_()
            try:
                expected = run(x.clone().requires_grad_(), W.clone().requires_grad_(), [name], "square")
            except (RuntimeError, IndexError, AssertionError):
                continue
            found = run(rows, W.clone().requires_grad_(), [name], "square")
            assert all(close(a, b) for a, b in zip(found, expected, strict=True)), (name, batch, found, expected)
    test_programs_give_the_same_on_rows()
    print("all programs agree")
