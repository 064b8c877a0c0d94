"""Snapshots of a run of PyTorch: when one is due, all ranks take it at the same boundary and the voice writes it.

A boundary is where the script, after an optimizer step, asks for its next batch; or, if its batches are made by hand,
the end of the step itself. A variable that is yet to be differentiated (a generator's output between the steps of a
GAN) puts it off to the next one. The voice looks a few times a second whether a snapshot is wanted (a period is over,
the job's end is near, or the supervisor has put ``snapshot-now`` into the run folder) and tells the others. The state
is copied and training goes on; a thread writes the copy.

A resumed run is played (``tape``, ``player``) to the boundary its snapshot was taken at. There ``_arrive`` puts the
state in, and from the very next line on everything is real again.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from oars import runfolder
from oars.adapt.replay import rewind, snapshot_file
from oars.adapt.replay.snapshot_file import Refused
from oars.adapt.replay.streams import streams
from oars.adapt.replay.tape import Diverged, tape
from oars.adapt.torch.context import ctx
from oars.adapt.torch.replay import join, placeholder, player
from oars.adapt.torch.replay import state as capture

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer

    from oars.adapt.torch.backward.gradients import Gradients

LOOK_EVERY = 0.2  # seconds
BY_HAND_AFTER = 3  # steps without a loader: then the end of a step is a boundary
PUT_OFF = 8  # boundaries at most, for variables that are yet to be differentiated
BEFORE_THE_END = (300, 60)  # seconds before a job's time is over


class Snapshots:
    """When and how; one per rank."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients, self.pid, self.began = gradients, os.getpid(), time.time()
        atexit.register(self.finish)
        if ctx.world is not None:
            ctx.world.on_loss.append(self.lost)
        plan = ctx.plan.snapshot or {}
        self.seconds, self.steps_between = plan.get("seconds"), plan.get("steps")
        end = plan.get("end")
        now = time.time()
        self.ends = [end - before for before in BEFORE_THE_END if end and end - before > now] if end else []
        self.steps = 0  # optimizer steps so far
        self.stepped = False  # since the last boundary
        self.without_loader = 0
        self.asked, self.put_off = (False, False, False), 0  # wanted, to be stopped, to grow; but not yet done
        self.growth = join.Growth()
        self.first = True
        self.next_look = 1
        self.looked = (now, 0)
        self.last = (now, 0)
        self.writer: threading.Thread | None = None
        self.outcome: dict[str, Any] | None = None
        self.resuming: tuple[dict, list] | None = None
        self.mode: placeholder.Playing | None = None

    # -- boundaries

    def made_step(self, optimizer: Optimizer | torch.amp.GradScaler) -> None:
        """An optimizer has stepped."""
        self.steps += 1
        self.stepped = True
        self.without_loader += 1

    def lost(self, gone: list[int], phase: str) -> None:
        """Ranks died: if this one speaks for the run now, the tape and the snapshots are its from here on."""
        if ctx.record.voice and not tape.voice:
            tape.become_voice()
            self.last = self.looked = time.time(), self.steps
            join.over(failed="the rank that started them died")
            if not tape.playing:
                rewind.watch(ctx.record.folder)

    def boundary(self, kind: str) -> None:
        """The script asks for a batch ("b"), or has made an optimizer step ("t")."""
        if kind == "b":
            self.without_loader = 0
        if tape.playing:
            streams.play()
            if self.first and self.steps:
                self._begin()
            if tape.played_out() and self.resuming is not None and kind == self.resuming[0]["at"]:
                self._arrive()
            return
        if not self.stepped or (kind == "t" and self.without_loader < BY_HAND_AFTER):
            return
        self.stepped = False
        if self.first:
            self._begin()
        if self.steps >= self.next_look:
            self._look(kind)

    def _begin(self) -> None:
        """The first boundary: from here on a snapshot is possible, and the supervisor may ask for one."""
        self.first = False
        capture.remember()
        if ctx.record.voice:
            try:
                (ctx.record.folder / runfolder.SNAPSHOTS).mkdir(exist_ok=True)
            except OSError:
                pass

    def _look(self, kind: str) -> None:
        want, stop, grow = False, False, ""
        if ctx.record.voice:
            want, stop = self._wanted()
            if ctx.world is not None:
                grow = self.growth.next()
            now = time.time()
            rate = (self.steps - self.looked[1]) / max(now - self.looked[0], 1e-6)
            self.looked = now, self.steps
            self.next_look = self.steps + max(1, min(1000, int(rate * LOOK_EVERY)))
            if self.steps_between:
                due = (self.steps if want else self.last[1]) + self.steps_between
                self.next_look = min(self.next_look, max(due, self.steps + 1))
        if ctx.world is not None:
            look = want, stop, grow, self.next_look
            want, stop, grow, self.next_look = ctx.world.broadcast(lambda: look)
        if grow == join.BEGIN:
            self.growth.begin(kind, self.steps)
        if self.mode is not None and not placeholder.stale:
            placeholder.leave_mode(self.mode)
            self.mode = None
        want, stop, meet = want or self.asked[0], stop or self.asked[1], grow == join.MEET or self.asked[2]
        if not want and not stop and not meet:
            return
        self.put_off += 1
        if self.put_off <= PUT_OFF and capture.to_be_differentiated():
            self.asked, self.next_look = (want, stop, meet), self.steps + 1
            return
        self.asked, self.put_off = (False, False, False), 0
        self._take(kind, stop)
        if meet:
            self.growth.meet(self._written())
            self.next_look = self.steps + 1  # as for ranks that have just come

    def _wanted(self) -> tuple[bool, bool]:
        """For the voice: whether to take one, and whether to stop then."""
        self._report()
        asked = _asked(ctx.record.folder)
        if asked:
            return True, asked == "stop"
        if self.writer is not None and self.writer.is_alive():
            return False, False
        now = time.time()
        if self.ends and now >= self.ends[0]:
            self.ends = [end for end in self.ends if end > now]
            return True, False
        at, step = self.last
        return bool((self.seconds and now - at >= self.seconds)
                    or (self.steps_between and self.steps - step >= self.steps_between)), False

    # -- taking

    def _take(self, kind: str, stop: bool) -> None:
        if ctx.guard is not None and not ctx.separate:
            ctx.guard.check("a snapshot")
        began = time.time()
        self.last = began, self.steps
        if self.writer is not None:
            self.writer.join()
            self._report()
        tape.busy += 1
        try:
            streams.enter()
            header, blobs = self._state(kind)
            mark = tape.mark()
            streams.enter()
            if ctx.record.voice:
                if mark is None:
                    raise OSError(None, tape.trouble)
                ctx.record.flush()  # a snapshot's steps are written, whatever happens next
                header["tape"], sync = mark
                self._write(header, blobs, sync, began)
        except Refused as why:
            ctx.record.notice(f"no snapshot at step {ctx.record.steps}: {why}")
        except OSError as error:
            self._failed(error)
        except Exception as error:  # of the script's own objects, or ours: no reason to end a training
            ctx.record.notice(f"no snapshot at step {ctx.record.steps}: {type(error).__name__}: {error}")
        finally:
            tape.busy -= 1
        if stop:
            self._stop()

    def _state(self, kind: str) -> tuple[dict[str, Any], list]:
        """What a snapshot holds: a header, and its tensors as blobs. ``_take`` adds the place on the tape. ``kind`` is
        that of the boundary (see ``boundary``)."""
        state, blobs = capture.take(kind, ctx.record.voice)
        header = {
            "format": 1, "time": time.time(), "ranks": ctx.size, "seed": ctx.plan.seed, "at": kind,
            "steps": self.steps, "recorded": [ctx.record.steps, ctx.record.samples], "state": state,
            "streams": {name: s.hex() for name, s in streams.states().items()},
            "private": _private_states(), "clocks": tape.clocks(),
            "pattern": list(getattr(self.gradients, "pattern", [])),
        }
        if ctx.world is not None:
            header["sharing"] = ctx.sharing.state()
        if ctx.pruner is not None:
            header["pruned"] = ctx.pruner.state()
        if self.gradients is not None:
            header["joins"] = join.for_newcomers(self.gradients)
        if ctx.record.voice:
            header["files"] = rewind.standing()
        return header, blobs

    def _write(self, header: dict[str, Any], blobs: list, sync: int | None, began: float) -> None:
        folder, step = ctx.record.folder, ctx.record.steps

        def work() -> None:
            try:
                path = snapshot_file.write(folder, step, header, blobs, sync)
                self.outcome = {"step": step, "seconds": time.time() - began, "bytes": path.stat().st_size}
            except OSError as error:
                self.outcome = {"step": step, "error": error}

        self.writer = threading.Thread(target=work, name="oars-snapshot")
        self.writer.start()

    def _written(self) -> str:
        """The name of the snapshot that was just taken, once it is on disk; all agree, or ``""``."""
        name = ""
        if self.writer is not None:
            self.writer.join()
            if self.outcome is not None and "error" not in self.outcome and self.outcome["step"] == ctx.record.steps:
                name = snapshot_file.name_of(ctx.record.steps)
            self._report()
        return ctx.world.broadcast(lambda: name)

    def _report(self) -> None:
        """Tell how the last one went, once."""
        outcome, self.outcome = self.outcome, None
        if outcome is None:
            return
        if "error" in outcome:
            self._failed(outcome["error"])
        else:
            ctx.record.event("snapshot", step=outcome["step"], seconds=round(outcome["seconds"], 3),
                             bytes=outcome["bytes"])

    def finish(self) -> None:
        """The script is over: wait for the last one, and tell."""
        if self.writer is not None and os.getpid() == self.pid:
            self.writer.join()
            self._report()

    def _failed(self, error: OSError) -> None:
        kept = snapshot_file.found(ctx.record.folder / runfolder.SNAPSHOTS)
        left = f"the one of step {int(kept[0][:-5])} is kept" if kept else "there is none yet"
        ctx.record.notice(f"a snapshot could not be written ({error.strerror or error}): training goes on, {left}")

    def _stop(self) -> None:
        """The run is to end: when the snapshot is on disk, tell the supervisor, and wait for it."""
        if self.writer is not None:
            self.writer.join()
        if ctx.record.voice:
            outcome = self.outcome or {}
            self._report()
            ctx.record.flush()
            step = "" if "error" in outcome or not outcome else str(outcome["step"])
            runfolder.put(ctx.record.folder / runfolder.DONE, step)
        if ctx.world is not None:
            ctx.world.broadcast(lambda: None)
        time.sleep(600)

    # -- arriving

    def play(self, header: dict[str, Any], blobs: list) -> None:
        """Let the script be played to where this snapshot was taken; called before it runs."""
        self.resuming = header, blobs
        torch.serialization.add_safe_globals([placeholder._again])
        placeholder.may_remain()
        self.mode = placeholder.Playing()
        self.mode.__enter__()

    def _arrive(self) -> None:
        assert self.resuming is not None
        header, blobs = self.resuming
        if "state" not in header:  # this rank joins others, who have gone on
            self.resuming = join.further()
            streams.play()
            return
        self.resuming = None
        trouble = rewind.trouble()
        if ctx.world is not None:
            trouble = next(filter(None, _gathered(trouble)), "")
        if trouble:
            raise Diverged(trouble)
        if self.steps != header["steps"]:
            raise Diverged(f"it made {self.steps} optimizer steps where, the first time, it made {header['steps']}")
        record, voice = ctx.record, ctx.record.voice
        tape.busy += 1
        try:
            player.leave_grad()
            if ctx.pruner is not None:
                ctx.pruner.arrive(header.get("pruned"))
            capture.put_back(header["state"], blobs)
            streams.restore({k: bytes.fromhex(s) for k, s in header["streams"].items()})
            if self.gradients is not None:
                self.gradients.pattern = header["pattern"]
            tape.set_clocks(header["clocks"])
            if ctx.world is not None and ctx.world.waits_to_join:
                ctx.sharing.arrive(header.get("sharing"), True)
                join.join(header, self.gradients)
            else:
                _restore_private(header["private"])
                rewind.end(voice, record.folder, header["files"])
                if ctx.world is not None:  # nobody looks at files before the voice has put them back
                    ctx.world.broadcast(lambda: None)
                    ctx.sharing.arrive(header.get("sharing"), header["ranks"] == ctx.size)
            tape.played_to()
            streams.begin()
        finally:
            tape.busy -= 1
        ctx.samples = 0
        record.resume(*header["recorded"])
        record.event("resumed", step=record.steps, ranks=ctx.size, ranks_before=header["ranks"],
                     seconds=round(time.time() - self.began, 3))
        for where, what in placeholder.unsure.items():
            record.notice(f"before the snapshot, {where}: {what}; if a variable was computed from it, keep it with "
                          "oars.keep (docs/snapshots.md)")
        now = time.time()
        self.last = self.looked = now, self.steps
        self.stepped, self.next_look = False, self.steps + 1
        if voice:
            runfolder.put(record.folder / runfolder.RESUMED, str(record.steps))


def _asked(folder: Path) -> str:
    """What the supervisor asks for: "", "go" or "stop"."""
    try:
        with open(folder / runfolder.REQUEST) as file:
            asked = file.read()
        os.unlink(folder / runfolder.REQUEST)
        return asked
    except OSError:
        return ""


def _private_states() -> list[Any]:
    """Each rank's own streams: what reading samples draws from."""
    if ctx.world is None:
        return []
    own = ctx.private.standing()
    return _gathered({**own, "own": {k: _plain(v) for k, v in own["own"].items()},
                      "started": {k: _plain(v) for k, v in own["started"].items()}})


def _gathered(value: Any) -> list[Any]:
    """Every living rank's ``value``."""
    from oars.adapt.torch.recovery import lineage
    from oars.engine.retry import until_none_is_lost

    return until_none_is_lost(lambda: ctx.world.allgather(value), lineage.renew)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"tensor": value.numpy().tobytes().hex()}
    if hasattr(value, "tolist"):
        return {"array": [value.dtype.str, value.tolist()]}
    return {"tuple": [_plain(v) for v in value]} if isinstance(value, tuple) else value


def _unplain(value: Any) -> Any:
    import numpy as np

    if not isinstance(value, dict):
        return value
    (kind, inner), = value.items()
    if kind == "tensor":
        return torch.frombuffer(bytearray.fromhex(inner), dtype=torch.uint8)
    return np.array(inner[1], inner[0]) if kind == "array" else tuple(_unplain(v) for v in inner)


def _restore_private(states: list[Any]) -> None:
    if ctx.world is None or len(states) != ctx.size:
        return
    mine = states[ctx.rank]
    ctx.private.go_on_from({**mine, "own": {k: _unplain(v) for k, v in mine["own"].items()},
                            "started": {k: _unplain(v) for k, v in mine["started"].items()}})
