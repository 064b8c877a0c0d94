"""The script's own objects carry nothing of ours: they pickle, copy and compare as on one process; batches change shape
in place."""

import copy
import io
import pickle
import weakref

import numpy as np
import torch
import torch.nn.functional as F
from scenes import keep, mlp, play, say, scene, table
from torch.utils.data import DataLoader, TensorDataset

x, y = table()


def loader(**how):
    return DataLoader(TensorDataset(x, y), 14, shuffle=True, **how)


def train(look, loss_of=F.cross_entropy, epochs=1, batches=None):
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(epochs):
        for rows, target in batches or loader():
            out = model(rows)
            loss = loss_of(out, target)
            opt.zero_grad()
            loss.backward()
            opt.step()
            look(model, opt, loss, epoch, out)
    keep(model)


def plain(text):
    """Without the name of the graph's node."""
    return text.split(", grad_fn")[0]


@scene
def the_tutorials_own_checkpoint():
    """The loss is saved as a tensor, with its graph."""
    def look(model, opt, loss, epoch, out):
        torch.save({"epoch": epoch, "model": model.state_dict(), "opt": opt.state_dict(), "loss": loss}, "part.pt")
        told = torch.load("part.pt", weights_only=True)
        say(told["loss"])
        print(type(told["loss"]), told["loss"].requires_grad, told["loss"].is_leaf, sorted(told))

    train(look)


@scene
def losses_are_plain_tensors():
    def look(model, opt, loss, epoch, out):
        print(type(loss) is torch.Tensor, vars(loss), loss._backward_hooks, "__dict__" in dir(loss))
        say(pickle.loads(pickle.dumps(loss)))
        say(copy.copy(loss))
        say(copy.deepcopy(loss.detach()))
        seen = weakref.ref(loss)
        print(seen() is loss, [name for name in dir(loss) if "oars" in name.lower()])
        file = io.BytesIO()
        torch.save([loss, out.detach(), {"mean": out.mean()}], file)
        file.seek(0)
        again = torch.load(file)
        print([type(a).__name__ for a in again], f"{again[1].sum().item():.5f} {again[2]['mean'].item():.6f}")

    train(look)


@scene
def losses_of_several_parts():
    def loss_of(out, target):
        parts = torch.stack([F.cross_entropy(out, target), out.square().mean(), (out - target[:, None]).abs().mean()])
        return (parts * torch.tensor([1.0, 0.1, 0.2])).sum()

    train(lambda model, opt, loss, *more: (say(loss), print(vars(loss))), loss_of)


@scene
def loaders_hold_nothing_of_ours():
    batches = loader()
    before = sorted(vars(batches))
    train(lambda *seen: None, batches=batches)
    print(sorted(vars(batches)) == before, sorted(set(vars(batches)) - set(before)))
    other = copy.copy(batches)
    print([len(rows) for rows, _ in other], [len(rows) for rows, _ in pickle.loads(pickle.dumps(batches))])
    each = iter(batches)
    print([name for name in vars(each) if "oars" in name], len(next(each)[0]))


@scene
def shapes_that_change_in_place():
    """Of a batch, and of what was made of it; the network gets it back as it was."""
    def loss_of(out, target):
        changed = out.clone()
        changed.unsqueeze_(1)
        print(tuple(changed.shape))
        changed.squeeze_(1)
        changed.t_()
        print(tuple(changed.shape), f"{changed.sum().item():.5f}")
        changed.transpose_(0, 1)
        changed.swapaxes_(0, 1).swapdims_(0, 1)
        print(tuple(changed.shape), f"{changed[-1].sum().item():.5f}")
        return F.cross_entropy(changed, target)

    train(lambda model, opt, loss, *more: say(loss), loss_of)
    model = mlp()
    for rows, target in loader():
        same = rows
        rows.unsqueeze_(-1)
        print(tuple(rows.shape), tuple(same.shape), rows.dim())
        rows.squeeze_()
        rows.unsqueeze_(0)
        print(tuple(rows.shape), len(rows), f"{rows.sum().item():.5f}")
        rows.squeeze_(0)
        rows.transpose_(0, 1)
        print(tuple(rows.shape), f"{rows[0].sum().item():.5f}")
        rows.t_()
        target.unsqueeze_(1)
        print(tuple(target.shape), target.max().item())
        target.squeeze_(1)
        say(F.cross_entropy(model(rows), target))
        rows.resize_(6, 2, 6)
        print(tuple(rows.shape), f"{rows[1].sum().item():.5f}")
        target.set_(torch.arange(len(target)))
        print(target.tolist(), target.shape)
        other = torch.zeros(3, 2)
        other.set_(rows)
        print(type(other).__name__, tuple(other.shape), f"{other.sum().item():.5f}")
        rows.squeeze_().as_strided_((2, 3), (3, 1))
        print(tuple(rows.shape), f"{rows.sum().item():.5f}")


@scene
def arrays_that_were_taken_before_a_change():
    """They change with it, and so do views."""
    model = mlp()
    for rows, target in loader():
        array, first, shared = rows.numpy(), rows[0], torch.from_dlpack(rows)
        rows.mul_(2)
        print(f"{array.sum():.4f} {first.sum().item():.5f} {shared.sum().item():.4f} {rows.sum().item():.4f}")
        rows.view(-1)[3:7] = 9
        array[1] = 7
        rows.add_(1)
        print(f"{array.sum():.4f} {array[1, 0]} {first[3].item()} {rows.sum().item():.4f}")
        shared.mul_(0.5)
        rows.clamp_(-1, 1)
        print(f"{array.sum():.4f} {np.asarray(rows).sum():.4f} {shared.max().item()}")
        out = model(rows).detach()
        array = out.numpy()
        torch.mul(out, 3, out=out)
        print(f"{array.sum():.4f}")
        out += 1
        print(f"{array.sum():.4f}")
        say(F.cross_entropy(model(rows), target))


@scene
def batches_have_no_attributes_but_the_scripts():
    usual = set(dir(torch.empty(0)))
    for rows, _ in loader():
        out = mlp()(rows)
        rows.tag = 3
        print(vars(rows), vars(out), out.__dict__, sorted(set(dir(rows)) - usual), set(dir(out)) == usual)
        rows.data = torch.ones(3, 6)
        print(tuple(rows.shape), rows.sum().item())


@scene
def arrays_of_other_libraries():
    """DLPack, and NumPy's own interface."""
    for rows, target in loader():
        array = np.from_dlpack(rows)
        print(array.shape, array.dtype, f"{array.sum():.4f}")
        other = torch.from_dlpack(target)
        print(type(other).__name__, tuple(other.shape), other.sum().item())
        capsule = torch.utils.dlpack.to_dlpack(rows)
        again = torch.utils.dlpack.from_dlpack(capsule)
        print(tuple(again.shape), f"{again.sum().item():.4f}")
        print(rows.__dlpack_device__()[0] == 1, np.asarray(rows).shape, np.array(rows, dtype=np.float64).dtype)
        print(hasattr(rows, "__array_interface__"), memoryview(rows.numpy()).shape, rows.data_ptr() != 0)
        print(f"{np.add(rows, 1).sum():.4f} {np.abs(rows).max():.5f}", rows.untyped_storage().nbytes())


play()
