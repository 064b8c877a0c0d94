"""Found by Python at the start of every rank when this folder is on PYTHONPATH: arms the deaths a test wants.

``OARS_TEST_DEATHS`` is a JSON list of [rank, point, count]: that rank gets SIGKILL when it comes to the point for the
count-th time. Points are named after what is going on; nothing of this is known to oars itself. ``OARS_TEST_SLOW`` is
[rank, point, seconds]: there it sleeps, every time. ``OARS_TEST_FLIPS`` is a list of [rank, point, count, kind, seed]:
there one bit changes in that rank's memory, in one of its weights, momenta or buffers, drawn by the seed; or ("numpy")
that rank alone draws a number.
"""

import gc
import importlib.abc
import importlib.util
import json
import os
import random
import signal
import sys
from time import sleep

COUNTS = {}


def here(point):
    """This rank has come to a point."""
    COUNTS[point] = COUNTS.get(point, 0) + 1
    if SLOW[:2] == [int(RANK), point]:
        sleep(SLOW[2])
    if [point, COUNTS[point]] in MINE:
        try:  # once: ranks that die at the start are started again
            os.close(os.open(os.path.join(os.environ["OARS_RUN_FOLDER"], f".died-{RANK}"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
    for at, count, kind, seed in FLIPS:
        if (at, count) == (point, COUNTS[point]):
            flip(kind, seed)


def flip(kind, seed):
    """Change one bit, as a particle would: nothing but the memory knows of it."""
    import torch

    if kind == "numpy":
        import numpy as np

        np.random.random()
        return
    kinds = {"weights": [], "momenta": [], "buffers": []}
    for thing in gc.get_objects():
        if torch.optim.Optimizer in type(thing).__mro__:
            for group in thing.param_groups:
                kinds["weights"] += group["params"]
            kinds["momenta"] += [t for held in thing.state.values() for t in held.values()
                                 if isinstance(t, torch.Tensor) and t.is_floating_point()]
        elif torch.nn.Module in type(thing).__mro__:
            kinds["buffers"] += [b for b in thing._buffers.values() if b is not None and b.is_floating_point()]
    draw = random.Random(seed)
    tensor = draw.choice(sorted(kinds[kind], key=lambda t: (tuple(t.shape), t.data_ptr())))
    data = torch._C.TensorBase.numpy(tensor.detach()).reshape(-1).view("uint8")
    at, bit = draw.randrange(len(data)), draw.randrange(8)
    data[at] ^= 1 << bit
    with open(os.path.join(os.environ["OARS_RUN_FOLDER"], f"flipped-{RANK}"), "a") as file:
        steps = sys.modules["oars.adapt.torch.context"].ctx.record.steps
        file.write(f"{kind} {tuple(tensor.shape)} byte {at} bit {bit}, steps {steps}\n")


def around(owner, name, before=None, after=None):
    """Points before and behind a function."""
    inner = getattr(owner, name)

    def wrapper(*args, **kwargs):
        if before:
            here(before)
        out = inner(*args, **kwargs)
        if after:
            here(after)
        return out

    setattr(owner, name, wrapper)


def arm_world(module):
    world = module.World
    meet, recover, count = world._meet, world._recover, world._count
    ask = world.places

    def _meet(self, kind, talk, *args, **kwargs):
        def armed():
            here("in a collective")
            here(f"in {kind}")
            out = talk()
            here(f"behind {kind}")
            return out

        return meet(self, kind, armed, *args, **kwargs)

    def _recover(self, *args):
        here("recovery")
        return recover(self, *args)

    def places(self, comm):
        here("places")
        return ask(self, comm)

    def _count(self):
        here("recovered" if hasattr(self, "rank") else "start")
        return count(self)

    world._meet, world._recover, world._count = _meet, _recover, _count
    world.places = places
    if ["late", 1] in MINE:  # a second after the others have heard where it is
        wait = world._wait

        def _wait(self, *args):
            if not hasattr(self, "rank"):
                sleep(1)
                here("late")
            wait(self, *args)

        world._wait = _wait


def arm_joining(module):
    inner = module._meet

    def meet(world, connect, high):
        side = "new" if high else "old"

        def armed():
            here(f"{side} connecting")
            out = connect()
            here(f"{side} connected")
            return out

        return inner(world, armed, high)

    module._meet = meet


def arm_parting(module):
    around(module, "without", "parting", "parted")


def arm_loaders(module):
    around(module, "iter_next", "batch")


def arm_calls(module):
    around(module, "_called", "forward")


def arm_gradients(module):
    around(module.Gradients, "run", "backward", "end of backward")
    track = module.Gradients.track

    def tracking(self, leaf):
        track(self, leaf)
        if leaf.requires_grad:
            module.register_behind(leaf, lambda p: here("in backward"))

    module.Gradients.track = tracking


def arm_early(module):
    around(module.Early, "lay", "bucket", "behind bucket")


def arm_sgd(module):
    inner = module.sgd

    def sgd(params, *args, **kwargs):
        here("optimizer")
        half = len(params) // 2
        if ["in optimizer", COUNTS.get("in optimizer", 0) + 1] in MINE:
            params[0].add_(1.0)  # half done
            assert half
        here("in optimizer")
        return inner(params, *args, **kwargs)

    module.sgd = sgd


def arm_survive(module):
    around(module.Survivor, "leave", "end")


def arm_record(module):
    around(module.Record, "become_voice", "taking over")


def arm_pruning(module):
    around(module.Pruner, "_meet", "deciding", "decided")
    around(module.Pruner, "apply", "cut", "behind cut")


def arm_serving(module):
    around(module.Server, "_push", "push", "behind push")
    around(module.Part, "turn", "turn", "behind turn")


def arm_holder(module):
    around(module, "dumped", "handing over")


ARMS = {
    "oars.engine.world": arm_world,
    "oars.engine.joining": arm_joining,
    "oars.engine.parting": arm_parting,
    "oars.adapt.torch.batches.loaders": arm_loaders,
    "oars.adapt.torch.model.call": arm_calls,
    "oars.adapt.torch.pruning": arm_pruning,
    "oars.adapt.torch.backward.gradients": arm_gradients,
    "oars.exchange.early": arm_early,
    "torch.optim.sgd": arm_sgd,
    "oars.rank.survive": arm_survive,
    "oars.rank.record": arm_record,
    "oars.exchange.serving": arm_serving,
    "oars.adapt.torch.async_modes.ps_shard": arm_holder,
}


class Finder(importlib.abc.MetaPathFinder):
    """Arms modules as they are imported."""

    def __init__(self):
        self.busy = set()

    def find_spec(self, name, path, target=None):
        if name not in ARMS or name in self.busy:
            return None
        self.busy.add(name)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            ARMS[name](module)

        spec.loader.exec_module = exec_module
        return spec


def unseen(code):
    """The same code, of no file."""
    return code.replace(co_filename="<armed>", co_consts=tuple(
        unseen(each) if isinstance(each, type(code)) else each for each in code.co_consts))


def hide():
    """Only an armed rank has these frames: they must not count as lines of the script, by which ranks compare."""
    for function in list(globals().values()):
        if callable(function) and hasattr(function, "__code__"):
            function.__code__ = unseen(function.__code__)


RANK = os.environ.get("OMPI_COMM_WORLD_RANK")
if RANK is not None and sys.orig_argv[-1].isdigit():  # who joins others is told the number of the first of these
    RANK = str(int(RANK) + int(sys.orig_argv[-1]))
if RANK is not None and (os.environ.get("OARS_TEST_DEATHS") or os.environ.get("OARS_TEST_SLOW")
                         or os.environ.get("OARS_TEST_FLIPS")):
    MINE = [death[1:] for death in json.loads(os.environ.get("OARS_TEST_DEATHS", "[]")) if death[0] == int(RANK)]
    SLOW = json.loads(os.environ.get("OARS_TEST_SLOW", "[]"))
    FLIPS = [flip[1:] for flip in json.loads(os.environ.get("OARS_TEST_FLIPS", "[]")) if flip[0] == int(RANK)]
    if MINE or FLIPS or SLOW[:1] == [int(RANK)]:
        hide()
        if MINE and all(point.startswith(("old ", "new ")) for point, *_ in MINE):
            ARMS = {"oars.engine.joining": arm_joining}  # who plays the script does so without frames of ours
        sys.meta_path.insert(0, Finder())
