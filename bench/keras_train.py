"""A training for `bench/keras_table.py`: a plain Keras script, or with --ddp the same by hand over torch.distributed.

    KERAS_BACKEND=jax python bench/keras_train.py --net cnn
    KERAS_BACKEND=torch python bench/keras_train.py --net cnn --ddp 2

Prints one line of JSON: the median time of a step of ``fit`` (by hand: of the loop), and the last loss.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--net", choices=("cnn", "mlp"), default="cnn")
parser.add_argument("--batch", type=int, default=64, help="global batch")
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--warmup", type=int, default=6)
parser.add_argument("--ddp", type=int, metavar="N", help="by hand, on N processes (the torch backend)")
args = parser.parse_args()


def launch(n):
    """Start n copies of this script."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **common, "RANK": str(r)})
             for r in range(n)]
    return max(abs(rank.wait()) for rank in ranks)


if args.ddp and "RANK" not in os.environ:
    sys.exit(launch(args.ddp))

import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import layers  # noqa: E402

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
rows = args.batch * 4
if args.net == "cnn":  # the lab's: 3.3 million parameters
    x = rng.random((rows, 28, 28, 1), np.float32)
    model = keras.Sequential([
        layers.Input((28, 28, 1)), layers.Conv2D(32, 5, padding="same", activation="relu"), layers.MaxPooling2D(),
        layers.Conv2D(64, 5, padding="same", activation="relu"), layers.MaxPooling2D(), layers.Flatten(),
        layers.Dense(1024, activation="relu"), layers.Dense(10)])
else:  # 100 layers: 200 small parameters
    x = rng.random((rows, 64), np.float32)
    model = keras.Sequential([layers.Input((64,)), *(layers.Dense(64, activation="relu") for _ in range(99)),
                              layers.Dense(10)])
y = rng.integers(0, 10, rows)
optimizer, loss = keras.optimizers.SGD(0.01, 0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
times, last = [], 0.0


def by_fit():
    class Clock(keras.callbacks.Callback):
        """Times of steps."""

        def on_train_batch_end(self, batch, logs=None):
            global last
            times.append(time.perf_counter())
            last = logs["loss"]

    model.compile(optimizer, loss)
    model.fit(x, y, batch_size=args.batch, epochs=-(-(args.warmup + args.steps) // 4), verbose=0, callbacks=[Clock()])


def by_hand():
    """Each rank its part of every batch, gradients averaged by DistributedDataParallel, as PyTorch's guide has it."""
    global last
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    wrapped = DistributedDataParallel(model)
    stepper = torch.optim.SGD(wrapped.parameters(), 0.01, 0.9)
    order, mine = np.random.default_rng(1), args.batch // n
    for step in range(args.warmup + args.steps):
        if step % 4 == 0:
            rows_ = order.permutation(rows)
        at = rows_[step % 4 * args.batch + rank * mine:][:mine]
        out = wrapped(torch.from_numpy(x[at]))
        value = torch.nn.functional.cross_entropy(out, torch.from_numpy(y[at]))
        stepper.zero_grad()
        value.backward()
        stepper.step()
        last = value.item()
        times.append(time.perf_counter())
    dist.destroy_process_group()


(by_hand if args.ddp else by_fit)()
if os.environ.get("RANK", "0") == "0":
    steps = np.diff(times)[args.warmup:]
    print(json.dumps({"step": float(np.median(steps)), "loss": float(last)}), flush=True)
