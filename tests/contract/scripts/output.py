"""The outside world: what is printed, logged and drawn appears once."""

import logging
import os
import subprocess
import sys
import threading
import time
import warnings

import torch
import torch.nn.functional as F
from scenes import fit, mlp, play, scene, table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

x, y = table(20)


@scene
def printed():
    print("a", 1, sep="-", end="!\n", flush=True)
    sys.stdout.write("written\n")
    print("no newline", end="")
    print()
    print("colour \x1b[31mred\x1b[0m, unicode åäö ✓")
    for i in range(3):
        print(f"\rprogress {i}", end="")
    print()
    print("to stderr", file=sys.stderr)
    sys.stdout.flush()
    os.write(1, b"straight to the descriptor\n")
    print(sys.stdout.isatty(), __name__, os.path.basename(sys.argv[0]))


@scene
def logged():
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    log = logging.getLogger("train")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(handler)
    log.addHandler(logging.FileHandler("train.log"))
    log.info("begin with %d rows", len(x))
    for xb, yb in DataLoader(TensorDataset(x, y), 8):
        log.info("rows %d classes %s", len(xb), yb.tolist())
    log.debug("not shown")
    logging.shutdown()


@scene
def progress_bar():
    from tqdm import tqdm

    model = mlp()
    loader = DataLoader(TensorDataset(x, y), 8)
    bar = tqdm(loader, desc="epoch", ncols=60, mininterval=0, bar_format="{desc} {n_fmt}/{total_fmt} {postfix}")
    for xb, yb in bar:
        loss = F.cross_entropy(model(xb), yb)
        bar.set_postfix(rows=len(xb), right=int((model(xb).argmax(1) == yb).sum()))
    print(f"last {loss.item():.9g}", len(bar))


@scene
def warned():
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *rest: print("warning:", message, file=sys.stderr)
        warnings.warn("mind the gap", stacklevel=1)


class Warns(nn.Module):
    """Warns of its own call, of who called it, and of the caller's caller."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, a):
        warnings.warn("here", stacklevel=1)
        warnings.warn("the call of the module", RuntimeWarning, stacklevel=4)
        return self.net(a)


def told(a):
    """Warns of the line that calls."""
    warnings.warn("the caller", stacklevel=2)
    return a * 2


@scene
def warnings_name_the_scripts_lines():
    """What PyTorch warns of in an operation on a batch, in Python and in C++, and what a model warns of."""
    model = Warns()
    for xb, _ in DataLoader(TensorDataset(x, y), 8):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(2):
                F.mse_loss(xb[:, :1], torch.ones(8))
            F.mse_loss(xb[:, :1], torch.ones(8))
            F.l1_loss(model(xb)[:, 0], torch.ones(8, 1))
            told(xb).sum()
            xb[:1].std(0)  # C++
            F.softmax(xb[:, 0] + 1)
            model(xb).sum().backward()
            xb.sum().item()
        for each in caught:
            print(each.category.__name__, os.path.basename(each.filename), each.lineno, str(each.message)[:40])


@scene
def tensorboard():
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter("tb")
    model = mlp()
    for i, (xb, yb) in enumerate(DataLoader(TensorDataset(x, y), 8)):
        writer.add_scalar("loss", F.cross_entropy(model(xb), yb), i)
        writer.add_scalar("mean", xb.mean().item(), i)
    writer.add_histogram("batch", xb, 0)
    writer.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator("tb")
    events.Reload()
    for tag in ("loss", "mean"):
        print(tag, [f"{e.value:.6g}" for e in events.Scalars(tag)])
    print(len([n for n in os.listdir("tb") if "tfevents" in n]))


@scene
def drawn():
    os.environ["MPLBACKEND"] = "Agg"
    import matplotlib.pyplot as plt

    xb, yb = next(iter(DataLoader(TensorDataset(x, y), 8)))
    figure, axes = plt.subplots(1, 2, figsize=(3, 2))
    axes[0].scatter(xb[:, 0], xb[:, 1], c=yb)
    axes[1].imshow(xb.view(8, 2, 3)[0])
    axes[1].plot(range(8), yb)
    figure.savefig("figure.png", metadata={"Software": None})
    print(os.path.getsize("figure.png") > 1000)


@scene
def processes_and_threads():
    print(subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True).stdout.strip())
    said = []
    thread = threading.Thread(target=lambda: said.append(float(x.sum()) != 0))
    thread.start()
    thread.join()
    print(said, os.environ.get("RANK"), os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_RANK"))
    print(torch.distributed.is_initialized())


@scene
def clock_decides():
    """Ranks must agree even where the clock does: how many passes fit into no time at all, and into plenty."""
    began, passes = time.time(), 0
    while time.time() - began < 0.4:
        passes += 1
    model = mlp()
    fit(DataLoader(TensorDataset(x, y), 8), model, steps=2 if time.time() - began < 60 else 1)
    print(passes > 0, time.strftime("%Y") >= "2024")


if __name__ == "__main__":
    play()
