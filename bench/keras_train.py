"""A training for `bench/keras_table.py`: a plain Keras script, or the same by hand over torch.distributed or
jax.distributed.

    KERAS_BACKEND=jax python bench/keras_train.py --net cnn
    KERAS_BACKEND=torch python bench/keras_train.py --net cnn --by-hand 2
    KERAS_BACKEND=torch oars run -n 2 bench/keras_train.py --net cnn --loop

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
parser.add_argument("--by-hand", type=int, metavar="N", help="on N processes (the torch and jax backends)")
parser.add_argument("--loop", action="store_true", help="the loop of --by-hand, for one process (the torch backend)")
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


if args.by_hand and "RANK" not in os.environ:
    sys.exit(launch(args.by_hand))
if args.by_hand and os.environ["KERAS_BACKEND"] == "jax":  # before anything of JAX is used
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{os.environ['MASTER_PORT']}", args.by_hand, int(os.environ["RANK"]))

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


def tell():
    """The first rank prints the result."""
    if os.environ.get("RANK", "0") == "0":
        steps = np.diff(times)[args.warmup:]
        print(json.dumps({"step": float(np.median(steps)), "loss": float(last)}), flush=True)


def by_fit():
    class Clock(keras.callbacks.Callback):
        """Times of steps."""

        def on_train_batch_end(self, batch, logs=None):
            global last
            times.append(time.perf_counter())
            last = logs["loss"]

    model.compile(optimizer, loss)
    model.fit(x, y, batch_size=args.batch, epochs=-(-(args.warmup + args.steps) // 4), verbose=0, callbacks=[Clock()])


def slices(rank, n):
    """This rank's part of every batch."""
    order, mine = np.random.default_rng(1), args.batch // n
    for step in range(args.warmup + args.steps):
        if step % 4 == 0:
            rows_ = order.permutation(rows)
        at = rows_[step % 4 * args.batch + rank * mine:][:mine]
        yield x[at], y[at]


def loop_torch(n):
    """A loop of one's own, as Keras's guides have it: by hand on n processes, or (n = 1) as it is for one."""
    global last
    import torch

    rank, trained = 0, model
    if n > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank, trained = dist.get_rank(), torch.nn.parallel.DistributedDataParallel(model)
    stepper = torch.optim.SGD(trained.parameters(), 0.01, 0.9)
    for inputs, targets in slices(rank, n):
        value = torch.nn.functional.cross_entropy(trained(torch.from_numpy(inputs)), torch.from_numpy(targets))
        stepper.zero_grad()
        value.backward()
        stepper.step()
        last = value.item()
        times.append(time.perf_counter())
    tell()
    if n > 1:
        dist.barrier()
        os._exit(0)  # gloo has been seen to wait for ever where its objects go


def by_hand_jax():
    """Batches sharded over a mesh of all processes' devices, as Keras's guide for JAX has it; XLA adds the sums."""
    global last
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("batch",))
    whole, cut = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("batch"))
    optimizer.build(model.trainable_variables)
    state = jax.tree.map(lambda v: jax.make_array_from_process_local_data(whole, np.asarray(v)), [
        [v.value for v in vs]
        for vs in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)])

    def value_of(weights, others, inputs, targets):
        out, others = model.stateless_call(weights, others, inputs, training=True)
        return loss(targets, out), others

    def stepped(state, inputs, targets):
        weights, others, moments = state
        (value, others), gradients = jax.value_and_grad(value_of, has_aux=True)(weights, others, inputs, targets)
        weights, moments = optimizer.stateless_apply(moments, gradients, weights)
        return value, [weights, others, moments]

    compiled = jax.jit(stepped, donate_argnums=0)
    for inputs, targets in slices(jax.process_index(), jax.process_count()):
        batch = [jax.make_array_from_process_local_data(cut, part) for part in (inputs, targets)]
        value, state = compiled(state, *batch)
        last = float(value)
        times.append(time.perf_counter())
    jax.distributed.shutdown()
    tell()


if not (args.by_hand or args.loop):
    by_fit()
    tell()
elif keras.backend.backend() == "torch":
    loop_torch(args.by_hand or 1)
else:
    by_hand_jax()
