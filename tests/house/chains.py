"""Prints which layers stand around each replaced function, in each mode: ``python tests/house/chains.py torch``.

A table (``seams.py``) is put in place as a run does it, in a process of its own for each mode. Then the functions that
stand in the library are followed inwards, from the one that a script calls. No ranks are started.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import oars
from oars.adapt.python.patching import Seam
from oars.plan import Plan

SOURCES = str(Path(oars.__file__).parent) + os.sep
Install = Callable[[], Iterable[Seam]]  # puts a mode in place, and gives all rows of the tables, of other modes too


def chain(function: Any) -> str:
    """The functions that a call goes through, outermost first; ``own`` is the library's."""
    names = []
    while function is not None and (title := _title(function := _bare(function))):
        names.append(title)
        function = _inner(function)
    return " > ".join(names if function is None else [*names, "own"])


def _bare(function: Any) -> Any:
    """A function without what makes a method or a property of it, or gives it arguments."""
    if isinstance(function, property):
        return _bare(function.fget)
    while (held := getattr(function, "__func__", None) or getattr(function, "func", None)) is not None:
        function = held
    return function


def _title(function: Any) -> str:
    """``room/file.name`` of a function or class of ours, and of what surrounds a step by its hooks."""
    if isinstance(function, type) and function.__module__.startswith("oars."):
        return f"{function.__module__.removeprefix('oars.').replace('.', '/')}.{function.__qualname__}"
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    if code.co_filename.startswith(SOURCES):
        module = code.co_filename.removeprefix(SOURCES).removeprefix("adapt/").removesuffix(".py")
        return f"{module}.{code.co_qualname.partition('.<locals>')[0]}"
    return "(hooks)" if code.co_qualname == "Optimizer.profile_hook_step.<locals>.wrapper" else ""


def _inner(function: Any) -> Any:
    """What this layer calls: the function in its closure; None where it calls nothing further in."""
    if not isinstance(function, FunctionType):
        return None
    held = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()),
                    strict=True))
    functions = {name: value for name, value in held.items()
                 if callable(_bare(value)) and value is not function and not isinstance(value, type)}
    return functions.get("inner", next(iter(functions.values()), None))


def found(install: Install) -> dict[str, str]:
    """The chain of every replaced function, in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            chains = {}
            for seam in install():
                for name in seam.names.split():
                    owner = seam.owner.__name__ if not isinstance(seam.owner, type) else \
                        f"{seam.owner.__module__}.{seam.owner.__qualname__}"
                    holder = vars(seam.owner)
                    chains[f"{owner}.{name}"] = chain(holder[name] if name in holder else getattr(seam.owner, name))
            os.write(writing, json.dumps(chains).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    assert os.waitpid(child, 0)[1] == 0, "a table could not be put in place"
    return json.loads(text)


def lines(modes: dict[str, dict[str, str]]) -> Iterator[str]:
    """A paragraph for each function, or several with the same chains: each chain, and in which modes."""
    of_name = {name: tuple(chains.get(name, "own") for chains in modes.values())
               for name in dict.fromkeys(name for chains in modes.values() for name in chains)}
    for chains, names in itertools.groupby(of_name, key=of_name.__getitem__):
        yield "\n".join(names)
        for each in dict.fromkeys(chains):
            where = [mode for mode, its in zip(modes, chains, strict=True) if its == each]
            yield f"    {each}    [{', '.join(_short(where, modes)) if len(where) < len(modes) else 'all modes'}]"


def _short(where: list[str], modes: Iterable[str]) -> list[str]:
    """``one *`` for all modes of one rank."""
    kinds: dict[str, list[str]] = {}
    for mode in modes:
        kinds.setdefault(mode.partition(" ")[0], []).append(mode)
    whole = {kind for kind, its in kinds.items() if len(its) > 1 and set(its) <= set(where)}
    return list(dict.fromkeys(f"{kind} *" if kind in whole else mode
                              for mode in where for kind in [mode.partition(" ")[0]]))


# ---- the tables -----------------------------------------------------------------------------------------------------


def torch() -> dict[str, Install]:
    """PyTorch: one rank, several, sharing (--split auto), async (local, gossip), server; of each recorded, pruned and
    thinned."""
    from torch.optim.optimizer import Optimizer

    from oars.adapt.torch import seams
    from oars.adapt.torch.backward.gradients import Gradients
    from oars.adapt.torch.context import ctx

    def step() -> None:
        """An optimizer's own, before it is made one with its hooks."""

    def install(ranks: str, modes: set) -> Iterator[Seam]:
        ctx.record, ctx.plan = SimpleNamespace(times=None), Plan()
        ctx.begin()
        several: tuple[Seam, ...] = ()
        if ranks != "one":
            ctx.world, ctx.gradients = SimpleNamespace(origin=0), Gradients
            several, *_ = seams._several_ranks()
        rows = (*several, *seams.ONE_RANK, *seams.RECORDING, *seams._pruned(), *seams._thinned())
        seams.install(modes | {"sharing": {seams.SHARING}, "async": {seams.ASYNC},
                               "server": {seams.ASYNC, seams.SERVER}}.get(ranks, set()))
        stepping = SimpleNamespace(__name__="optimizer", step=Optimizer.profile_hook_step(step))
        return Seam(stepping, "step", ()), *rows

    extra = {"recorded": seams.RECORDED, "pruned": seams.PRUNED, "thinned": seams.THINNED}
    some = [(), ("recorded",)]  # --prune and --samples thin are refused with --sync
    every = [*some, ("pruned",), ("thinned",), tuple(extra)]
    return {" ".join((ranks, *names)): functools.partial(install, ranks, {extra[name] for name in names})
            for ranks, which in (("one", every), ("several", every),
                                 *((ranks, some) for ranks in ("sharing", "async", "server")))
            for names in which}


def jax() -> dict[str, Install]:
    """JAX, on several ranks."""
    from oars.adapt.jax import seams

    def install() -> Iterable[Seam]:
        seams.install()
        return seams.SEAMS

    return {"several": install}


def tensorflow() -> dict[str, Install]:
    """TensorFlow, on several ranks."""
    from oars.adapt.tensorflow import seams

    def install() -> Iterable[Seam]:
        seams.install()
        return seams.SEAMS + seams.NO_OTHER_PROCESSES

    return {"several": install}


def tf1() -> dict[str, Install]:
    """``--tf1``: names and sessions of TensorFlow 1."""
    from oars.adapt.tf1 import seams

    def install(many: bool) -> Iterable[Seam]:
        record: Any = SimpleNamespace()
        seams.install(many, record)
        return seams.older() + seams.table(record)

    return {"one": functools.partial(install, False), "several": functools.partial(install, True)}


def _keras(backend: str) -> dict[str, Install]:
    os.environ["KERAS_BACKEND"] = backend
    from oars.adapt.keras import seams
    from oars.adapt.meet import meet

    def install(many: bool, **options: Any) -> Iterable[Seam]:
        meet.record, meet.plan = SimpleNamespace(at_end=None), Plan(**options)
        meet.world = SimpleNamespace(members=())
        seams.install(backend, many, meet.plan)
        if backend == "torch":
            return seams.EVERYWHERE + seams.torch()
        from oars.adapt.keras.async_modes import UNITED

        united = Seam(seams.keras.Model, " ".join(UNITED), ())
        own = seams.tensorflow() if backend == "tensorflow" else ()
        return (*seams.EVERYWHERE, *seams.split_models(SimpleNamespace(), None), *own, united)

    return {"one": functools.partial(install, False), "several": functools.partial(install, True),
            "separate": functools.partial(install, True, sync="local")} | (
        {"local-batchnorm": functools.partial(install, True, local_batchnorm=True)} if backend == "torch" else {})


TABLES: dict[str, Callable[[], dict[str, Install]]] = {
    "torch": torch, "jax": jax, "tensorflow": tensorflow, "tf1": tf1,
    **{f"keras-{backend}": functools.partial(_keras, backend) for backend in ("torch", "jax", "tensorflow")}}

if __name__ == "__main__":
    print("\n".join(lines({mode: found(install) for mode, install in TABLES[sys.argv[1]]().items()})))
