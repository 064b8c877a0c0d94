"""``oars verify``: the first steps of a script on one rank and on N, compared loss by loss and weight by weight.

Both runs get the same seed and end after the same optimizer step (the adapter sees to that, and leaves ``weights.npz``
and each rank's ``weights-digest-<r>.txt``). Neither touches the user's files, so the second does not find what the
first has written.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from oars import runfolder
from oars.commands.options import split_default
from oars.commands.planning import add_mpi, make_plan
from oars.commands.run import start
from oars.plan import Pruning
from oars.runfolder import UsageError, make_folder, stem_of
from oars.supervisor.screen import complain
from oars.supervisor.supervise import Supervisor
from oars.watch import cuts

LOSS_TOLERANCE = 1e-4  # relative to the loss, or to 1 for smaller ones
WEIGHT_TOLERANCE = 1e-3  # relative to the array's largest weight
SPLIT: dict[str, Any] = {"batch": "split", "scale_lr": None, "local_batchnorm": False, "share_gpus": False,
                         "stall": 60.0, "on_stall": None}


def verify(ranks: int | None, steps: int, script: str, args: list[str], module: bool,
           prune: Pruning | None = None) -> int:
    """Run twice, say in one line whether the training is the same; 0 if it is, 1 if not."""
    many = make_plan(script, args, module, ranks, **SPLIT, split=split_default(), stop_after=steps, prune=prune)
    if many.ranks < 2:
        raise UsageError("verify compares one rank with several: use -n 2 or more")
    add_mpi(many)
    one = replace(many, ranks=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the first run would leave no input to the second
    top = make_folder(None, stem_of(f"verify-{Path(script).name}", module))
    for name, plan in (("one", one), ("many", many)):
        folder = top / name
        folder.mkdir()
        code = start(folder, plan, Supervisor(folder, plan, show=False))
        if code:
            where = "one rank" if plan is one else f"{plan.ranks} ranks"
            complain(f"the script ended with exit code {code} on {where}; its output is in {folder}")
            return code
    if prune is not None:
        for line in cuts.layer_lines(top / "one"):
            print(f"oars: {line}")
    same, line = compare(top / "one", top / "many", many.ranks)
    print(f"oars: {line}, {top}", file=sys.stdout if same else sys.stderr)
    return 0 if same else 1


def compare(one: Path, many: Path, ranks: int) -> tuple[bool, str]:
    """Whether two run folders tell of the same training, and what to say about it."""
    losses, theirs = _losses(one), _losses(many)
    if not losses:
        return False, "nothing to compare: the script made no optimizer step on one rank"
    worst = 0.0
    for step, (a, b) in enumerate(zip(losses, theirs, strict=False), 1):
        difference = _difference(a, b)
        if difference > LOSS_TOLERANCE:
            return False, (f"not the same: at step {step} the loss is {_text(a)} on one rank and {_text(b)} on {ranks}"
                           f"; {_blame(step)}")
        worst = max(worst, difference)
    if len(losses) != len(theirs):
        return False, (f"not the same: {len(losses)} steps on one rank, {len(theirs)} on {ranks}, equal as far as they "
                       "go; see Split (steps per epoch) in the contract")
    unequal = _unequal_ranks(many, ranks)
    if unequal:
        return False, f"not the same: rank {unequal} ends with other weights than rank 0; see Gradients in the contract"
    wrong, off = _weights(one / runfolder.WEIGHTS, many / runfolder.WEIGHTS, ranks)
    if wrong:
        return False, f"not the same: {wrong}; see Gradients in the contract"
    agreement = f"losses agree to {worst:.1g}, weights to {off:.1g}"
    return True, f"same training on 1 and {ranks} ranks: over {len(losses)} steps {agreement}"


def _losses(folder: Path) -> list[float | None]:
    try:
        lines = (folder / runfolder.METRICS).read_text().splitlines()
    except OSError:
        return []
    return [json.loads(line)["loss"] for line in lines]


def _difference(a: float | None, b: float | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    if math.isnan(a) or math.isnan(b) or math.isinf(a) or math.isinf(b):
        return 0.0 if repr(a) == repr(b) else math.inf
    return abs(a - b) / max(1.0, abs(a))


def _text(loss: float | None) -> str:
    return "unknown" if loss is None else f"{loss:.7g}"


def _blame(step: int) -> str:
    if step == 1:
        return ("they differ before any update, so see Values and Randomness in the contract "
                "(an unseeded draw, or a value taken from own rows)")
    return f"the {step - 1} before agree, so see Gradients and Order in the contract"


def _unequal_ranks(folder: Path, ranks: int) -> int:
    """The first rank whose weights are not rank 0's to the bit, or 0."""
    digests = []
    for rank in range(ranks):
        try:
            digests.append((folder / runfolder.weights_digest(rank)).read_text())
        except OSError:
            digests.append("")
    return next((rank for rank in range(ranks) if digests[rank] != digests[0]), 0)


def _weights(one: Path, many: Path, ranks: int) -> tuple[str, float]:
    """What is wrong with the final weights, if anything, and how far apart they are at most."""
    import numpy as np

    if not one.exists() or not many.exists():
        return f"no final weights from {'one rank' if not one.exists() else f'{ranks} ranks'}", math.inf
    worst = 0.0
    with np.load(one) as a, np.load(many) as b:
        if a.files != b.files or any(a[name].shape != b[name].shape for name in a.files):
            return "the models have other parameters", math.inf
        for name in a.files:
            ours, theirs = (np.asarray(side[name], dtype=np.float64) for side in (a, b))
            if not ours.size or np.array_equal(ours, theirs, equal_nan=True):
                continue
            off = _distance(np, ours, theirs)
            if not off <= WEIGHT_TOLERANCE:
                return f"the losses agree but weight {name} ends {off:.2g} (relative) apart", off
            worst = max(worst, off)
    return "", worst


def _distance(np: Any, ours: Any, theirs: Any) -> float:
    scale = float(np.abs(ours).max()) or 1.0
    return float(np.abs(ours - theirs).max()) / scale
