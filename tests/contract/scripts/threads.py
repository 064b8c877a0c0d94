"""Where ranks are not in step: own samples being read, threads, forked children. There everything is plain PyTorch."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from scenes import fit, keep, mlp, play, scene, table
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

x, y = table()
data = TensorDataset(x, y)


class Encoded(Dataset):
    """Samples that a frozen network has encoded; one at a time, or many at once."""

    def __init__(self, net, rows=1):
        self.net, self.rows = net, rows

    def __len__(self):
        return len(x)

    def __getitem__(self, i):
        with torch.no_grad():
            many = x[i].repeat(self.rows, 1) + torch.arange(self.rows).unsqueeze(1)
            return self.net(many).mean(0), y[i]


@scene
def a_frozen_network_in_a_data_set():
    """Of one row, and of as many as could be cut."""
    for rows in (1, 6):
        for workers in (0, 2):
            net = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
            fit(DataLoader(Encoded(net, rows), batch_size=10, num_workers=workers), steps=3)


class Attacked(Dataset):
    """Samples that were moved along the gradient of a network."""

    def __init__(self, net, how):
        self.net, self.how = net, how

    def __len__(self):
        return len(x)

    def __getitem__(self, i):
        a = x[i : i + 1].repeat(4, 1).requires_grad_()
        loss = F.cross_entropy(self.net(a), y[i].repeat(4))
        if self.how == "grad":
            (grad,) = torch.autograd.grad(loss, a)
        else:
            loss.backward()
            grad = a.grad
        return (x[i] + 0.1 * grad.sign()[0]).detach(), y[i]


@scene
def gradients_in_a_data_set():
    """torch.autograd.grad and backward for a single sample."""
    for how in ("grad", "backward"):
        for workers in (0, 2):
            net = mlp().requires_grad_(how == "grad")
            fit(DataLoader(Attacked(net, how), batch_size=10, num_workers=workers), steps=3)


class Nested(Dataset):
    """Reads others with a loader of its own."""

    def __init__(self, workers=0):
        self.workers = workers

    def __len__(self):
        return 20

    def __getitem__(self, i):
        some = [a.mean(0) for a, _ in
                DataLoader(torch.utils.data.Subset(data, range(i, i + 4)), batch_size=2, num_workers=self.workers,
                           generator=torch.Generator())]
        return torch.stack(some).mean(0), y[i]


@scene
def a_loader_in_a_data_set():
    """With batches of its own; in workers, and with some."""
    fit(DataLoader(Nested(), batch_size=5), steps=3)
    fit(DataLoader(Nested(), batch_size=5, num_workers=2), steps=3)
    fit(DataLoader(Nested(workers=2), batch_size=4), steps=1)


@scene
def a_network_in_a_collate():
    """It encodes what it collates, row by row."""
    net = nn.Linear(6, 6).requires_grad_(False)

    def collate(samples):
        a, b = torch.utils.data.default_collate(samples)
        return net(a), b

    for workers in (0, 2):
        fit(DataLoader(data, batch_size=10, collate_fn=collate, num_workers=workers), steps=3)


@scene
def results_that_a_thread_saves():
    """model(x) goes to a pool, which writes it."""
    model = mlp()
    with ThreadPoolExecutor(2) as pool:
        for i, (a, _) in enumerate(DataLoader(data, batch_size=10)):
            pool.submit(torch.save, model(a).detach(), f"pool-{i}.pt")
    keep(model)


@scene
def a_thread_that_is_given_results():
    """By its arguments, by a queue, and by a timer."""
    model, found, box = mlp(), {}, queue.Queue()

    def sum_up(name, out):
        found[name] = float(out.sum())

    def take():
        while (item := box.get()) is not None:
            sum_up(*item)

    taking = threading.Thread(target=take)
    taking.start()
    for i, (a, _) in enumerate(DataLoader(data, batch_size=10)):
        out = model(a).detach()
        threads = [threading.Thread(target=sum_up, args=(f"thread {i}", out)),
                   threading.Timer(0.01, sum_up, (f"timer {i}",), {"out": out})]
        for thread in threads:
            thread.start()
        box.put((f"queue {i}", out))
        for thread in threads:
            thread.join()
    box.put(None)
    taking.join()
    for name in sorted(found):
        print(name, f"{found[name]:.6g}")


@scene
def an_evaluation_in_a_thread():
    """Of a copy, while the training goes on."""
    model, copy = mlp(), mlp()
    copy.load_state_dict(model.state_dict())
    result = {}

    def evaluate():
        with torch.no_grad():
            result["right"] = sum((copy(a).argmax(1) == b).sum().item() for a, b in DataLoader(data, batch_size=16))

    thread = threading.Thread(target=evaluate)
    thread.start()
    fit(DataLoader(data, batch_size=10), model)
    thread.join()
    print(result)


@scene
def a_metric_in_a_thread():
    """It counts while the training goes on, and is asked when it is through."""
    model, box, seen = mlp(), queue.Queue(), [0, 0]
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def count():
        while (item := box.get()) is not None:
            out, labels = item
            seen[0] += int((out.argmax(1) == labels).sum())
            seen[1] += len(labels)

    thread = threading.Thread(target=count)
    thread.start()
    for a, b in DataLoader(data, batch_size=7):
        out = model(a)
        opt.zero_grad()
        F.cross_entropy(out, b).backward()
        opt.step()
        box.put((out.detach(), b))
    box.put(None)
    thread.join()
    print(seen)
    keep(model)


@scene
def a_second_training_in_a_thread():
    """With weights of its own."""
    model, other, losses = mlp(), mlp(), []
    opt = torch.optim.SGD(other.parameters(), lr=0.1)

    def train():
        for a, b in DataLoader(data, batch_size=8):
            loss = F.cross_entropy(other(a), b)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())

    thread = threading.Thread(target=train)
    thread.start()
    fit(DataLoader(data, batch_size=10), model)
    thread.join()
    print(" ".join(f"{loss:.6g}" for loss in losses))
    torch.save(other.state_dict(), "other.pt")


if __name__ == "__main__":
    play()
