"""What of Python, NumPy and matplotlib is replaced, by which layers; of PyTorch, only what draws a seed."""

from __future__ import annotations

import datetime
import os
import random as of_python
import signal
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from oars.adapt.python import clock, figures, patching, random, signals, trackers, warning_lines
from oars.adapt.python.imports import when_imported
from oars.adapt.python.patching import Seam, instead
from oars.plan import Plan

if TYPE_CHECKING:
    from oars.engine.world import World

_EVERY: frozenset[Any] = frozenset()  # no layer here is for one mode alone

RANDOM = (
    Seam(of_python.Random, "seed", (random.seed_instance,)),
    Seam(of_python, "seed", (random.seed_module,)),
    Seam(of_python, "SystemRandom", (instead(random.Agreed),)),
    Seam(tempfile, "_Random", (instead(random.TrueRandom),)),
    Seam(os, "urandom", (random.urandom,)),
    Seam(uuid, "uuid1", (random.uuid1,)),
    Seam(uuid, "uuid4", (random.uuid4,)),
)


def install_random(origin: int, plan: Plan) -> None:
    """Random numbers: what ranks share, they draw alike."""
    random.begin(origin, plan)
    patching.install(RANDOM, _EVERY)
    when_imported("multiprocessing.shared_memory",
                  lambda module: patching.put(module, "secrets", random.true_secrets()))
    when_imported("secrets", _secrets)
    when_imported("numpy.random", _numpy)
    when_imported("torch", _torch)


def _secrets(secrets: ModuleType) -> None:
    agreed = random.Agreed()  # what randbelow and the tokens draw from
    patching.install((
        Seam(secrets, "_sysrand", (instead(agreed),)),
        Seam(secrets, "SystemRandom", (instead(random.Agreed),)),
        Seam(secrets, "randbits", (instead(agreed.getrandbits),)),
        Seam(secrets, "choice", (instead(agreed.choice),)),
    ), _EVERY)


def _numpy(numpy_random: ModuleType) -> None:
    patching.put(numpy_random.bit_generator, "randbits", random.Agreed().getrandbits)
    random.seed_numpy(numpy_random)
    patching.install((Seam(numpy_random, "seed", (random.numpy_seed,)),), _EVERY)


def _torch(torch: ModuleType) -> None:
    random.seed_torch(torch)
    seed = random.torch_seed(torch)

    def one_gpu() -> None:
        torch.cuda.manual_seed(int.from_bytes(random.fresh(7), "little"))

    def all_gpus() -> None:
        torch.cuda.manual_seed_all(int.from_bytes(random.fresh(7), "little"))

    patching.install((
        Seam(torch, "seed", (instead(lambda: seed()),)),
        Seam(torch.random, "seed", (instead(lambda: seed()),)),
        Seam(torch.cuda, "seed", (instead(one_gpu),)),
        Seam(torch.cuda.random, "seed", (instead(one_gpu),)),
        Seam(torch.cuda, "seed_all", (instead(all_gpus),)),
        Seam(torch.cuda.random, "seed_all", (instead(all_gpus),)),
    ), _EVERY)
    patching.put_in_type(torch.Generator, "seed", seed)


def install_clock(world: World | None, played: bool) -> None:
    """One clock for all ranks of ``world`` (None: each has its own); a script that is ``played`` does not sleep."""
    random.watch_collector()
    now = clock.now(world)
    patching.install((
        *(Seam(time, name, (clock.agreed(name, world),)) for name in clock.NAMES),
        *(Seam(time, name, (clock.at_present(name, now),)) for name in clock.PRESENT),
    ), _EVERY)
    for name, method in clock.datetimes(now).items():
        patching.put_in_type(datetime.datetime, name, method)
    if played or world is not None:
        patching.install((Seam(time, "sleep", (clock.sleep(world, played),)),), _EVERY)
    if world is None:
        return
    used = clock.of_the_first(world)
    patching.install((
        Seam(os, "times", (used,)),
        Seam(time, "thread_time thread_time_ns process_time_ns", (used,)),
    ), _EVERY)
    when_imported("resource", lambda resource: patching.install((Seam(resource, "getrusage", (used,)),), _EVERY))


HANDLERS = (
    Seam(signal, "signal", (signals.handlers,)),
    Seam(signal, "getsignal", (signals.known_handlers,)),
)
SIGNALS = (
    Seam(signal, "raise_signal", (signals.raised,)),
    Seam(os, "kill", (signals.killed,)),
    Seam(signal, "alarm", (signals.alarms,)),
    Seam(signal, "setitimer", (signals.interval_timers,)),
    Seam(threading.Timer, "start", (signals.timer_started,)),
    Seam(threading.Timer, "run", (signals.timer_run,)),
)


def install_signals(world: World | None, folder: Path, voice: Callable[[], bool], alone: bool) -> None:
    """What sets handlers and timers; on one rank (``alone``) only so that the command knows of handlers."""
    signals.signals.attach(world, folder, voice, alone)
    patching.install(HANDLERS + SIGNALS if world is not None else HANDLERS, _EVERY)


def install_warnings() -> None:
    """Warnings name the script's lines, not ours."""
    patching.install((Seam(warnings, "_showwarnmsg", (warning_lines.shown,)),), _EVERY)


def install_figures(world: World) -> None:
    """Figures are shown once; to be called before the script imports matplotlib."""
    if world.rank:
        os.environ["MPLBACKEND"] = "Agg"  # interactive mode opens windows without show()

    def patch(pyplot: ModuleType) -> None:
        patching.install((Seam(pyplot, "show", (figures.once(world),)),
                          Seam(pyplot.Figure, "waitforbuttonpress ginput", (figures.once(world),))), _EVERY)

    when_imported("matplotlib.pyplot", patch)


def install_trackers(world: World) -> None:
    """Trackers log one run; to be called before the script imports one."""
    if world.rank:
        trackers.keep_local()
        when_imported("mlflow", lambda mlflow: patching.install(
            (Seam(mlflow, "set_tracking_uri", (trackers.local_uri,)),), _EVERY))
        when_imported("comet_ml", lambda comet: patching.install(
            (Seam(comet.Experiment, "__init__", (trackers.off,)),), _EVERY))
