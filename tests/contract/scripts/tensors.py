"""The batch itself: whatever a script does to it, it acts as one process's tensor."""

import copy
import io
import pickle

import numpy as np
import torch
import torch.nn.functional as F
from scenes import mlp, play, scene, table
from torch.utils.data import DataLoader, TensorDataset

x, y = table(11)
x = (x * 100).round() / 100


def batch():
    """The first batch of a loader: 11 rows of x and y."""
    return next(iter(DataLoader(TensorDataset(x, y), 11)))


@scene
def shape_and_kind():
    a, b = batch()
    print(a.shape, a.size(), a.size(0), a.size(-1), len(a), a.dim(), a.ndim, a.numel(), a.nelement(), len(b))
    print(a.dtype, a.device, a.is_cuda, a.layout, a.requires_grad, a.is_leaf, a.grad, a.is_contiguous(), a.stride())
    print(
        isinstance(a, torch.Tensor), torch.is_tensor(a), type(b.tolist()), a.is_floating_point(), b.is_floating_point()
    )
    print(a.type(), a.element_size(), a.nbytes, a.itemsize, a.storage_offset(), a.T.shape, a.mT.shape)
    rows, columns = a.shape
    print(rows, columns, a.shape[0] * 2, [*a.shape], torch.Size([11, 6]) == a.shape)


@scene
def printing():
    a, b = batch()
    print(a)
    print(b)
    print(repr(a[:2]), str(b[0]), f"{b}", f"{b[0]}", f"{a[0, 0]:.2f}", f"{b.float().mean():.3f}", f"{int(b[0]):d}")
    out = mlp()(a)
    print(out.shape, out.grad_fn is not None, out.requires_grad)


@scene
def indexing():
    a, b = batch()
    print(a[0].tolist(), a[-1, 2].item(), a[3:5].tolist(), a[::4, 1].tolist(), a[:, 0].tolist(), a[..., -1].tolist())
    print(a[[0, 5, 10]].tolist(), a[torch.tensor([1, 1, 7])].tolist(), a[b == 1].tolist(), a[a > 1].tolist())
    print(a[None].shape, a[:, None].shape, a[0:0].shape, a[b.argmax()].tolist(), a[torch.arange(11), b].tolist())
    print(a[2:9][1:3][0].tolist(), a[int(b[0]), int(b[1])].item(), a[np.array([2, 3])].tolist())
    for i in (11, -12):
        try:
            a[i]
        except IndexError as error:
            print(error)


@scene
def iterating():
    a, b = batch()
    for i, (row, label) in enumerate(zip(a, b, strict=True)):
        print(i, f"{row.sum().item():.6f}", label.item())
    print([v.item() for v in b], list(enumerate(b.tolist()))[-1], max(b), min(b), sorted(b)[0], sum(b), set(b.tolist()))
    first, *rest = b
    print(first, len(rest), list(map(int, b)), [len(part) for part in a.split(4)], [len(c) for c in a.chunk(3)])
    print(list(reversed(b))[0], b[0] in b, 99 in b, [v.shape for v in a.unbind(1)][0], len(a.unbind()))


@scene
def out_to_numpy_and_back():
    a, b = batch()
    print(a.numpy().sum(), np.asarray(b), np.array(a).shape, a.numpy().dtype, np.mean(a.numpy()), np.argmax(a.numpy()))
    print(torch.from_numpy(a.numpy() * 2).sum().item(), torch.as_tensor(b).tolist(), torch.tensor(b.tolist()).tolist())
    print(
        np.concatenate([a.numpy(), a.detach().cpu().numpy()]).shape,
        np.bincount(b.numpy()),
        b.cpu().data.numpy().tolist(),
    )
    print(
        float(a[0, 0]),
        int(b[0]),
        bool(b[0] >= 0),
        a.mean().item(),
        b.sum().item(),
        complex(a[0, 1]),
        round(a[0, 0].item(), 1),
    )
    print(b.numpy().tolist() == b.tolist(), a.flatten()[3].item(), a.data.shape, memoryview(b.numpy()).nbytes)


@scene
def kept_and_loaded():
    a, b = batch()
    out = mlp()(a)
    torch.save(a, "a.pt")
    torch.save({"b": b, "out": out.detach(), "list": [a[:3], b]}, "nested.pt")
    torch.save(out, "out.pt")
    np.save("a.npy", a.numpy())
    np.savez("both.npz", a=a, b=b)
    back, nested = torch.load("a.pt"), torch.load("nested.pt")
    print(torch.equal(back, a), nested["b"].tolist(), nested["list"][0].shape, type(back) is torch.Tensor)
    again = pickle.loads(pickle.dumps((a, b)))
    print(torch.equal(again[0], a), again[1].tolist())
    file = io.BytesIO()
    torch.save(b, file)
    file.seek(0)
    print(torch.load(file).tolist(), len(pickle.dumps(b.tolist())))


@scene
def copies():
    a, b = batch()
    c, d, e = copy.deepcopy(a), copy.copy(b), a.clone()
    e += 1
    c.mul_(2)
    print(torch.allclose(c, a * 2), torch.equal(d, b), (e - a).unique().tolist(), a.detach().clone().shape)
    pair = copy.deepcopy({"a": a, "n": [b]})
    print(pair["a"].shape, pair["n"][0].tolist(), a.new_zeros(2, 3).tolist(), a.new_tensor([1, 2]).tolist())
    print(
        torch.zeros_like(a).shape,
        torch.empty_like(b).shape,
        torch.ones_like(b).sum().item(),
        a.new_full((2,), 5).tolist(),
    )


@scene
def moved_and_cast():
    a, b = batch()
    device = torch.device("cpu")
    print(
        a.to(device).shape,
        a.cpu().shape,
        a.to("cpu", non_blocking=True).dtype,
        a.to(torch.float64).dtype,
        a.double().sum().item(),
    )
    print(
        a.half().dtype,
        a.long().sum().item(),
        b.float().mean().item(),
        b.to(a).dtype,
        a.int().dtype,
        a.bool().sum().item(),
    )
    print(
        b.type(torch.FloatTensor).dtype,
        a.type(torch.LongTensor).shape,
        a.type_as(b).dtype,
        b.byte().dtype,
        a.bfloat16().dtype,
    )
    print(a.contiguous().shape, a.pin_memory().shape if torch.cuda.is_available() else a.shape, torch.Tensor(a).shape)


@scene
def in_place():
    a, b = batch()
    a.mul_(2).add_(1)
    a[0] = 0
    a[:, 1] = torch.arange(11.0)
    a[a > 3] = 3
    a[5, 2] += 7
    a[2:4] *= -1
    a -= a.mean(0)
    a /= 2
    b[3] = 1
    b += 1
    print(f"{a.abs().sum().item():.6f}", a[5].tolist(), b.tolist())
    a.clamp_(-1, 1).sub_(0.5)
    a.masked_fill_(a < -1, 0.0)
    a[[1, 2]] = a[[2, 1]]
    a.fill_diagonal_(9)
    a.index_fill_(0, torch.tensor([10]), 4)
    print(a[:3].tolist(), a[10].tolist(), f"{a.std().item():.6f}")
    c = torch.zeros(11, 6)
    c[:] = a
    c += a
    c.copy_(a)
    whole = torch.zeros(22, 6)
    whole[:11] = a
    whole[11:22].copy_(a)
    c.data.zero_()
    print(c.sum().item(), f"{whole.sum().item():.6f}")
    a.zero_()
    print(a.abs().sum().item(), torch.add(a, 1, out=torch.empty(11, 6)).sum().item())


@scene
def reshaped():
    a, b = batch()
    for v in (
        a.view(-1),
        a.view(11, 2, 3),
        a.view(11, -1),
        a.reshape(-1, 3),
        a.reshape(33, 2),
        a.flatten(),
        a.t(),
        a.T,
    ):
        print(tuple(v.shape), f"{(v * torch.arange(v.numel()).view(v.shape)).sum().item():.4f}")
    for v in (
        a.unsqueeze(0),
        a.unsqueeze(1),
        a.unsqueeze(-1),
        a.permute(1, 0),
        a.transpose(0, 1),
        a.flip(0),
        a.flip(1),
    ):
        print(tuple(v.shape), f"{(v * torch.arange(v.numel()).view(v.shape)).sum().item():.4f}")
    for v in (a.roll(2, 0), a.roll(1, 1), a.repeat(2, 1), a.repeat_interleave(2, 0), a.expand(2, 11, 6), a.tile(1, 2)):
        print(tuple(v.shape), f"{(v * torch.arange(v.numel()).view(v.shape)).sum().item():.4f}")
    for v in (a.narrow(0, 2, 5), a.narrow(1, 2, 3), a.unfold(1, 3, 1), a.movedim(0, 1), a.swapaxes(0, 1), a.view_as(a)):
        print(tuple(v.shape), f"{(v * torch.arange(v.numel()).view(v.shape)).sum().item():.4f}")
    print(b.view(-1, 1).shape, b.view(1, -1).expand(3, -1).shape, b.unsqueeze(1).expand(-1, 4).shape, a.squeeze().shape)
    print(F.one_hot(b).shape, F.one_hot(b, 3).sum(0).tolist(), F.pad(a, (1, 1)).shape, F.pad(a, (0, 0, 1, 1)).shape)


@scene
def by_other_names():
    """Arguments by NumPy's names, or all by name."""
    a, b = batch()
    made = [a.mean(axis=0, keepdims=True), torch.diff(a, axis=0), a[:, None, :1].squeeze(axis=1), a.unsqueeze(axis=1),
            torch.tile(a, dims=(1, 2)), a.repeat(repeats=(2, 1)), torch.permute(input=a, dims=(1, 0)),
            torch.broadcast_to(input=a, size=(2, 11, 6)), torch.transpose(a, 0, dim1=1),
            torch.swapaxes(a, axis0=0, axis1=1), a.unfold(dimension=1, size=2, step=2), torch.ravel(input=a),
            torch.quantile(a, q=0.5, dim=1), torch.unbind(input=a, dim=1)[0], torch.matmul(input=a, other=a.T),
            torch.reshape(input=a, shape=(-1, 2)), torch.addmm(input=a[:, :1], mat1=a, mat2=a[:6].T),
            torch.outer(input=a[:, 0], vec2=b), torch.where(condition=a > 0, input=a, other=b[:, None]),
            F.pairwise_distance(x1=a, x2=-a), torch.mv(input=a, vec=a[0]), torch.msort(a)]
    for out in made:
        print(list(out.shape), *out.sum(0).flatten().tolist()[:4], out.reshape(-1)[-1].item())


@scene
def joined():
    loader = DataLoader(TensorDataset(x, y), 4)
    outs, labels = [], []
    model = mlp()
    with torch.no_grad():
        for a, b in loader:
            outs.append(model(a))
            labels.append(b)
    out, label = torch.cat(outs), torch.cat(labels)
    print(
        out.shape, label.tolist(), (out.argmax(1) == label).float().mean().item(), f"{F.cross_entropy(out, label):.6f}"
    )
    a, b = batch()
    print(
        torch.cat([a, torch.zeros(2, 6)]).shape,
        torch.cat((a, a), 1).shape,
        torch.stack([b, b]).shape,
        torch.stack([b, b], 1).shape,
    )
    print(
        torch.hstack([b, b]).tolist(),
        torch.vstack([a, a]).shape,
        torch.cat([a[:3], a[8:]]).sum().item(),
        torch.cat(list(a)).shape,
    )
    print(torch.cat([v.cpu() for v in labels]).numpy().tolist(), torch.stack([v[0] for v in outs]).shape)
    print(torch.cat([a, b.unsqueeze(1)], dim=-1).shape, torch.stack(list(a)).shape, torch.column_stack([b, b]).shape)


@scene
def compared():
    a, b = batch()
    print(
        (a == a).all().item(),
        (a > 0).any().item(),
        (b == y).sum().item(),
        torch.equal(a, x),
        torch.allclose(a, x),
        (b != 1).tolist(),
    )
    print(
        a.eq(x).all().item(),
        torch.isclose(a, x).all().item(),
        bool((a < 100).all()),
        torch.isnan(a).any().item(),
        a is a,
    )
    print(
        (b == torch.zeros(11)).tolist(),
        (a > a.mean(0)).sum(0).tolist(),
        (b > b.float().mean()).tolist(),
        torch.isfinite(a).sum().item(),
    )
    if (b == 2).any():
        print("some twos")
    assert a.shape == x.shape and len(a) == len(b), "as long as each other"
    print(
        bool(a[0, 0] > 0),
        not a.isnan().any(),
        (a > 0).nonzero()[:3].tolist(),
        torch.where(b == 0)[0].tolist(),
        b.eq(b[0]).tolist(),
    )


@scene
def a_loss_is_a_number():
    a, b = batch()
    loss = F.cross_entropy(mlp()(a), b)
    print(
        loss.shape,
        loss.dim(),
        loss.requires_grad,
        loss.item() == float(loss),
        loss.detach().numpy().shape,
        f"{loss:.4f}",
    )
    print(
        round(loss.item(), 5),
        loss.data.item() > 0,
        (loss + 1).item() > 1,
        bool(loss > 0),
        [loss.item()],
        max(loss, torch.tensor(0.0)).item() > 0,
    )
    history = [loss.detach(), loss.detach() * 2]
    print(
        torch.stack(history).mean().item(),
        np.mean([v.item() for v in history]),
        sum(history).item(),
        torch.tensor(history).shape,
    )
    print(math_of(loss), torch.isnan(loss).item(), type(loss.tolist()), loss.cpu().detach().numpy().item() > 0)


def math_of(loss):
    """The perplexity, by way of math and of torch."""
    import math

    return f"{math.exp(loss):.5f} {torch.exp(loss).item():.5f} {math.isfinite(loss)}"


play()
