"""Growing: new ranks join a run that is going, at a boundary, with the state and the place in the script of the others.

A new rank gets to that place as a resumed one does: its script is played (``tape``, ``player``). In order, by what lies
in the run folder:

1. ``grow-now`` is a request. The first rank takes it (``growing`` from then on), all ranks write their tape to the end,
   and the first starts the new processes. Training goes on.
2. The new ranks start, import, build, and play to where the tape ends. There they say so (``ready-<r>``) and wait.
3. At the next boundary all old ranks take a snapshot and wait. The new ones play the few steps that have been made
   meanwhile, put the state in, and say so (``there-<r>``).
4. All meet (``oars.engine.joining``). From here on batches are cut for the new number of ranks; for the old ranks it is
   as after a loss, only that there are more of them. ``grown`` tells ``oars grow`` how it came out.

Until 4 the old ranks do not depend on the new ones: if one of those dies or cannot follow, training goes on as before.
"""

from __future__ import annotations

import json
import os
import posix
import signal
import socket
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch

from oars import runfolder
from oars.adapt.files.copying import copy_contents
from oars.adapt.python import random as random_
from oars.adapt.replay import rewind, snapshot_file
from oars.adapt.replay.streams import streams
from oars.adapt.replay.tape import Diverged, read_tape, tape
from oars.adapt.torch.batches import loaders
from oars.adapt.torch.context import ctx
from oars.adapt.torch.model import call, custom_functions
from oars.adapt.torch.recovery import lineage
from oars.adapt.torch.replay import placeholder, state
from oars.adapt.torch.replay.progress import progress
from oars.adapt.torch.rows import tensor as rows
from oars.engine import joining
from oars.engine.world import RankLost

if TYPE_CHECKING:
    from oars.adapt.torch.backward.gradients import Gradients

BEGIN, MEET = "begin", "meet"
STARTS_WITHIN = 300.0  # seconds: to import, to build, and to play
ARRIVES_WITHIN = 60.0  # seconds that the old ranks wait at the boundary
LOOK_EVERY = 0.002


# ---- the old ranks --------------------------------------------------------------------------------------------------


class Growth:
    """What is under way; the first rank's knows, the others' follow it."""

    def __init__(self) -> None:
        self.launch: joining.Launch | None = None
        self.new = range(0)  # their numbers
        self.since = 0.0
        self._count = 0
        self._answer: dict[str, Any] = {}

    def next(self) -> str:
        """For the first rank: what all are to do now: nothing, BEGIN or MEET."""
        if self.launch is None:
            return BEGIN if ctx.plan.survives and self._requested() else ""
        if why := self._trouble(STARTS_WITHIN):
            over(failed=why)
            self.launch = None
            return ""
        return MEET if all(_there(runfolder.ready(r)) for r in self.new) else ""

    def _requested(self) -> bool:
        folder = ctx.record.folder
        try:
            os.rename(folder / runfolder.GROW, folder / runfolder.GROWING)
            asked = json.loads((folder / runfolder.GROWING).read_text())
        except (OSError, ValueError):
            return False
        self._count = asked["more"] if "more" in asked else asked["total"] - ctx.size
        if self._count < 1:
            over(failed=f"it has {ctx.size} ranks already")
        return self._count > 0

    def begin(self, kind: str, steps: int) -> None:
        """All ranks: what was recorded up to this boundary is written, for new ranks that the first rank starts."""
        tape.busy += 1
        try:
            streams.enter()
            mark = tape.mark()
            streams.enter()
        finally:
            tape.busy -= 1
        if not ctx.record.voice:
            return
        if mark is None:
            over(failed=f"the tape cannot be written ({tape.trouble})")
            return
        try:
            first = ctx.world.board.grow(self._count)
        except ValueError as error:
            over(failed=str(error))
            return
        self.new, self.since = range(first, first + self._count), time.time()
        _put(runfolder.GROWING, {"first": first, "count": self._count, "voice": ctx.world.origin, "at": kind,
                                 "steps": steps, "tape": mark[0], "files": rewind.standing()})
        self.launch = joining.Launch([*ctx.world.command, str(first)], self._count, ctx.plan.cwd)

    def _trouble(self, within: float) -> str:
        """Why the new ranks will not come, or ``""``."""
        assert self.launch is not None
        for rank in self.new:
            if _there(runfolder.stayed(rank)):
                return json.loads((ctx.record.folder / runfolder.stayed(rank)).read_text())
            pid = _pid(rank)
            if pid is not None and not _lives(pid):
                return f"rank {rank} died while it was starting"
        if time.time() - self.since > within:
            return f"the new ranks were not there after {within:.0f} s"
        return self.launch.trouble

    def meet(self, snapshot: str) -> None:
        """All ranks, having taken ``snapshot`` at this boundary (empty: they could not): let the new ones in."""
        world, began = ctx.world, time.time()
        self._answer = {"failed": "no snapshot could be taken" if not snapshot else "the rank that started them died"}
        carried = [tensor for tensor in state.living().variables.values() if isinstance(tensor, rows.Rows)]
        for tensor in carried:  # the new ranks have it whole, and nothing that it was made of
            lineage.begin_anew(tensor, rows.whole(tensor, "growing").detach())
        world.patient, patient = True, world.patient
        while True:
            try:
                world.together("grow", lambda: self._wait(snapshot))
                break
            except RankLost:
                lineage.renew()
        answer = world.broadcast(lambda: self._answer)
        world.patient = patient
        if "port" in answer:
            before = world.size
            if joining.admit(world, answer["port"]):
                _all_here()
                streams.begin()
                ctx.record.grown(world.size - before, world.size, time.time() - began)
                if ctx.record.voice:
                    over(ranks=world.size, step=ctx.record.steps)
                self.launch = None
                return
            answer = {"failed": "a rank died while they joined"}
        if ctx.record.voice:
            over(**answer)
        self.launch = None

    def _wait(self, snapshot: str) -> None:
        """The first rank: until all are there, or one never will be."""
        if self.launch is None or not snapshot or "port" in self._answer:
            return
        request = json.loads((ctx.record.folder / runfolder.GROWING).read_text())
        _put(runfolder.GROWING, {**request, "snapshot": snapshot})
        self.since = time.time()
        while not all(_there(runfolder.there(r)) for r in self.new):
            if why := self._trouble(ARRIVES_WITHIN):
                self._answer = {"failed": why}
                return
            time.sleep(LOOK_EVERY)
        self._answer = {"port": joining.open_port()}
        _put(runfolder.GROWING, {**request, "snapshot": snapshot, **self._answer})


def over(**answer: Any) -> None:
    """The first rank: growing has come to its end, good or not; of what was started for nothing, nothing stays."""
    folder = ctx.record.folder
    try:
        request = json.loads((folder / runfolder.GROWING).read_text())
        os.unlink(folder / runfolder.GROWING)
    except (OSError, ValueError):
        return
    _put(runfolder.GROWN, answer)
    if "failed" not in answer:
        return
    for rank in range(request.get("first", 0), request.get("first", 0) + request.get("count", 0)):
        ctx.world.board.gone(rank)
        pid = _pid(rank)
        if pid is not None and _lives(pid):
            os.kill(pid, signal.SIGKILL)
    ctx.record.event("not grown", reason=answer["failed"])
    ctx.record.notice(f"the run could not grow at step {ctx.record.steps}: {answer['failed']}; training goes on")


def _pid(rank: int) -> int | None:
    """A new rank's process, where it is on this host and has begun."""
    try:
        host, pid = json.loads((ctx.record.folder / runfolder.born(rank)).read_text())
    except (OSError, ValueError):
        return None
    return pid if host == socket.gethostname() else None


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def for_newcomers(gradients: Gradients) -> dict[str, Any]:
    """What a snapshot tells ranks that join, besides the state: where the adapter's own counts stand."""
    return {"iterations": ctx.iterations, "drawn": random_.drawn(), "next serial": gradients.next_serial,
            "serials": [[gradients.serials[id(p)][0] for p in params] for params in _parameters()],
            "record": ctx.record.counts()}


def _parameters() -> list[list[Any]]:
    return [[p for group in optimizer.param_groups for p in group["params"]]
            for optimizer, _ in state._numbered(progress.made["optimizers"])]


def _all_here() -> None:
    """Old and new ranks: what was found of models and loaders in other company is found anew, by all."""
    lineage.renew()
    ctx.grown = ctx.era
    cores, ranks = ctx.plan.cores, ctx.plan.ranks
    ctx.world.patient = ctx.size > cores
    if os.environ.get("OMP_NUM_THREADS") == str(max(1, cores // ranks)):  # the launcher's choice, not the user's
        torch.set_num_threads(min(torch.get_num_threads(), max(1, cores // ctx.size)))
    for part in (call, custom_functions, lineage, loaders, ctx.gradients.ahead):
        part.forget()


# ---- the new ranks --------------------------------------------------------------------------------------------------


def further() -> tuple[dict[str, Any], list]:
    """This rank has played all that there was when it was started: wait until the others wait, and play on."""
    _put(runfolder.ready(ctx.world.origin), {})
    folder = ctx.record.folder
    header, blobs = snapshot_file.read(folder / runfolder.SNAPSHOTS / _asked_for("snapshot"))
    tape.play_on(read_tape(folder, header["tape"]))
    return header, blobs


def join(header: dict[str, Any], gradients: Gradients) -> None:
    """This rank stands where the others wait, and has their state: meet them."""
    joins, world = header["joins"], ctx.world
    ctx.iterations, gradients.next_serial = joins["iterations"], joins["next serial"]
    random_.draw_on(joins["drawn"])
    for params, serials in zip(_parameters(), joins["serials"], strict=True):
        for p, serial in zip(params, serials, strict=True):
            gradients.serials[id(p)] = serial, weakref.ref(p)
    gradients.plans.clear()
    _write_as_the_voice_did(_asked_for("voice"))
    rewind.join(header["files"])
    ctx.record.go_on_from(joins["record"])
    _put(runfolder.there(world.origin), {})
    if not joining.join(world, _asked_for("port")):
        posix._exit(0)  # the system's own: the script's is watched
    _put(runfolder.joined(world.origin), {})
    _all_here()
    variables = state.Walk().variables
    for name, dim in header["state"]["rows"].items():
        tensor = variables.get(name)
        if isinstance(tensor, placeholder.StandIn) and tensor.value is not None:
            tensor.value = lineage.from_whole(tensor.value.detach(), dim)
    ctx.record.grown(ctx.plan.joining["count"], world.size, 0.0)


def _asked_for(key: str) -> Any:
    """What the first rank says, once it does; when it has given up this rank ends."""
    path = ctx.record.folder / runfolder.GROWING
    while True:
        try:
            request = json.loads(path.read_text())
        except OSError:
            raise Diverged("no rank waits for it any more") from None
        if request.get("first") != ctx.plan.joining["first"]:
            raise Diverged("no rank waits for it any more")
        if key in request:
            return request[key]
        time.sleep(LOOK_EVERY)


def _write_as_the_voice_did(voice: int) -> None:
    """All ranks' output files hold the same lines, should this one have to speak; ours were not written."""
    folder = ctx.record.folder
    for name in (runfolder.log(voice), runfolder.err(voice)):
        try:
            source = os.open(folder / name, os.O_RDONLY)
        except OSError:
            continue
        target = os.open(folder / name.replace(str(voice), str(ctx.world.origin), 1), os.O_WRONLY | os.O_TRUNC)
        try:
            copy_contents(source, target)
        finally:
            os.close(source)
            os.close(target)


def _there(name: str) -> bool:
    return (ctx.record.folder / name).exists()


def _put(name: str, value: object) -> None:
    runfolder.put(ctx.record.folder / name, json.dumps(value))
