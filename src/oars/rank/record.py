"""What a run leaves behind: ``metrics.jsonl``, ``events.jsonl`` and ``summary.json`` in the run folder.

Every rank has a Record; only that of the voice (the first live rank) writes, but for each rank's own
``times-<rank>.jsonl`` (see times.py). Adapters call it, watchers read the files. ``step`` is on the training loop's
path, so it only appends to a list; the lines are formatted and written a few times a second.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from time import time as clock  # as it is now: scripts are given another one later
from typing import TYPE_CHECKING, Any

from oars import debug, runfolder
from oars.adapt import files
from oars.rank import crash
from oars.rank.times import Times

if TYPE_CHECKING:
    from oars.engine.world import World

FLUSH_EVERY = 0.25  # seconds: what a status line can show, and what a killed run may lose


class Record:
    """Collects steps, notices and gathers, and writes them for the voice."""

    def __init__(self, folder: Path, voice: bool, world: World | None = None) -> None:
        self.folder = folder
        self.voice = voice
        self.steps = 0
        self.samples = 0
        self.split = False  # own rows alone were computed on, since the last step; set by adapters
        self.split_steps = 0
        self.losses = 0  # ranks that died
        self.joined = 0  # ranks that came later
        self.gathers: dict[str, list[float]] = {}  # "file:line operation" -> [times, seconds, bytes]
        self.replicated: dict[str, list[float]] = {}  # "file:line model" -> [times, seconds, those with gradients]
        self.interrupted = False  # Ctrl-C was pressed; for an adapter that polls, see ``polls``
        self.taken = False  # KeyboardInterrupt was raised for it
        self.polls = False  # set by an adapter that looks at ``interrupted`` and will raise on all ranks together
        self.at_end: Callable[[], None] = lambda: None  # set by an adapter that has to meet the other ranks then
        self.played = False  # what the script does now it has done before: nothing is written
        self.weights: Callable[[], int] = int  # bytes that optimizers change: what several ranks would exchange
        self.times = Times(folder, world)
        self._world = world
        self._said: set[str] = set()
        self._pid = os.getpid()
        self._pending: list[tuple[int, Any, int, float, float, Any, Any, int]] = []
        self._recent: deque = deque(maxlen=256)  # the last steps, should this rank have to go on as the voice
        self._losses: list[tuple[list[int], str]] = []  # events of losses that the voice should have written
        self._loss_at: float | None = None  # when a rank was lost, until the next step is done
        self._flush_at = 0.0
        self._full = False  # the disk
        self._last_of: dict[int, float] = {}  # time of the last step written of each optimizer
        self._last: tuple[float, float] | None = None  # time and exchange seconds of the last step written
        self._resumed_at = self._resumed_steps = 0  # samples, and steps
        self._first_step: tuple[float, float, int] | None = None  # its end, exchange seconds, samples
        self._last_step = (0.0, 0.0)
        self._first_talk = (0, 0)  # collectives and bytes, up to the end of the first step

    def step(self, loss: Any, samples: int, lr: Any = None, norm: Any = None, which: int = 0,
             own: int | None = None) -> None:
        """One optimizer step was done: its global loss (a number, a tensor or None), how many samples went in that no
        step has had before; where they are known, its learning rate (or a list of them) and the norm of its gradients;
        where there are several optimizers, ``which`` it was and how many samples there were since its last step."""
        if self.played:
            return
        self.steps += 1
        self.samples += samples
        self.split_steps += self.split
        self.split = False
        if loss is not None and not isinstance(loss, float):
            loss = _frozen(loss)
        now = clock()
        exchange = self._world.seconds if self._world is not None else 0.0
        if self._first_step is None:
            self._first_step = (now, exchange, samples)
            self._first_talk = self._talk()
        self._last_step = (now, exchange)
        self.times.stepped(self.steps)
        if self._loss_at is not None:
            self.event("recovered", step=self.steps, seconds=round(now - self._loss_at, 6))
            self._loss_at = None
        row = (self.steps, loss, samples if own is None else own, now, exchange, lr, norm, which)
        if not self.voice:
            self._recent.append(row)
            return
        self._pending.append(row)
        if now >= self._flush_at:
            self.flush()

    def lost(self, ranks: list[int], hosts: list[str], phase: str, left: int) -> None:
        """Ranks died and the others go on: the step under way is done again."""
        self.losses += len(ranks)
        if self._loss_at is None:
            self._loss_at = clock()
        crashes = {rank: found.name for rank in ranks if (found := crash.signal_of(self.folder, rank))}
        self.event("lost", ranks=ranks, hosts=hosts, phase=phase, left=left, step=self.steps + 1,
                   **({"signals": crashes} if crashes else {}))
        for rank, name in crashes.items():
            self.notice(f"rank {rank} was killed by {name}; the others continue")

    def grown(self, new: int, ranks: int, seconds: float) -> None:
        """``new`` ranks have joined, so that there are ``ranks``; training stood still for ``seconds``."""
        self.joined += new
        self.event("grown", step=self.steps, ranks_before=ranks - new, ranks=ranks, seconds=round(seconds, 6))

    def counts(self) -> dict[str, Any]:
        """What a rank that joins has not seen."""
        return {"losses": self.losses, "joined": self.joined, "said": sorted(self._said)}

    def go_on_from(self, counts: dict[str, Any]) -> None:
        """This rank joins others that have counted so far."""
        self.losses, self.joined = counts["losses"], counts["joined"]
        self._said.update(counts["said"])

    def lost_step(self, samples: int, reason: str) -> None:
        """A step could not be done again after a loss."""
        self.event("passed over", step=self.steps + 1, samples=samples, reason=reason)
        self.notice(f"step {self.steps + 1} ({samples} samples) was lost with a rank and is skipped: {reason}")

    def become_voice(self) -> None:
        """The voice died: go on writing where it stopped, steps it had not written yet included."""
        self.voice = True
        path = self.folder / runfolder.METRICS
        last = 0
        if path.exists():
            data = path.read_bytes()
            whole = data.rfind(b"\n") + 1
            if whole != len(data):
                os.truncate(path, whole)
            lines = data[:whole].splitlines()
            last = json.loads(lines[-1])["step"] if lines else 0
        self._pending = [step for step in self._recent if step[0] > last]
        self._recent.clear()
        self.flush()
        events = self.folder / runfolder.EVENTS
        texts = events.read_text().splitlines() if events.exists() else []
        lost = [event for event in map(json.loads, (s for s in texts if s.endswith("}"))) if event["event"] == "lost"]
        known = {rank for event in lost for rank in event["ranks"]}
        self._write_events([line for ranks, line in self._losses if not known.issuperset(ranks)])

    def notice(self, text: str, change: str = "", lost: str = "") -> None:
        """Tell the user one line, once per distinct text. Where it costs time, ``oars explain`` needs to know what the
        user can ``change``, and of which time most is ``lost``: ``data``, ``model`` or ``exchange``."""
        if text not in self._said:
            self._said.add(text)
            if debug.on:
                debug.say(f"notice: {text}")
            if self.played:
                return
            at = self._world.site() if change and self._world is not None else ""
            why = {"change": change, "lost": lost, "at": at}
            self.event("notice", text=text, **{name: value for name, value in why.items() if value})
            print(f"oars: {text}", file=sys.__stderr__, flush=True)  # every rank has its own; the voice's is shown

    def gather(self, site: str, seconds: float, nbytes: int) -> None:
        """Rows were gathered at ``site`` (``file:line operation``)."""
        entry = self.gathers.setdefault(site, [0, 0.0, 0])
        entry[0] += 1
        entry[1] += seconds
        entry[2] += nbytes

    def alike(self, site: str, seconds: float, tracked: bool) -> None:
        """Every rank did the same at ``site`` (``file:line model``); if it is ``tracked``, a backward follows."""
        entry = self.replicated.setdefault(site, [0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += seconds
        entry[2] += seconds * tracked

    def event(self, kind: str, **fields: Any) -> None:
        """Append one line to ``events.jsonl``."""
        line = runfolder.event_line(kind, **fields)
        if self.voice:
            self._write_events([line])
        elif kind == "lost":
            self._losses.append((fields["ranks"], line))

    def _write_events(self, lines: list[str]) -> None:
        self._append(runfolder.EVENTS, "".join(lines))

    def _append(self, name: str, text: str) -> None:
        """Add to a file of the run folder. A full disk costs these lines, not the training."""
        try:
            runfolder.append(self.folder / name, text)
        except OSError as error:
            if not self._full:
                self._full = True
                self.notice(f"cannot write {self.folder / name}: {error.strerror}; the training goes on without it")

    def raise_interrupt(self) -> None:
        """KeyboardInterrupt, here and now; the supervisor then gives the script time to end."""
        self.interrupted, self.taken = False, True
        mark = self.folder / runfolder.interrupted(self._world.origin if self._world is not None else 0)
        mark.touch()
        raise KeyboardInterrupt

    def resume(self, steps: int, samples: int) -> None:
        """Go on after this many steps; what ``metrics.jsonl`` tells of later ones is cut."""
        self.played, self.steps, self.samples = False, steps, samples
        self._resumed_at, self._resumed_steps = samples, steps
        path = self.folder / runfolder.METRICS
        if self.voice and path.exists():
            with open(path) as old:
                kept = [line for line in old if line.endswith("}\n") and json.loads(line)["step"] <= steps]
            runfolder.put(path, "".join(kept))

    def write_ledger(self, rank: int, batches: Iterable[tuple[int, int, int, int, Iterable[Any]]]) -> None:
        """``OARS_LEDGER=1``: which samples this rank contributed, one line a batch."""
        lines = [json.dumps({"iteration": iteration, "batch": batch, "of": rows, "era": era,
                             "samples": [int(sample) for sample in samples]}) + "\n"
                 for iteration, batch, rows, era, samples in batches]
        runfolder.append(self.folder / runfolder.ledger(rank), "".join(lines))

    def flush(self) -> None:
        """Write the steps collected so far."""
        pending, self._pending = self._pending, []
        self._flush_at = clock() + FLUSH_EVERY
        if not pending or os.getpid() != self._pid:
            return
        lines = []
        known, rates = None, ""  # the learning rate seldom changes
        for step, loss, samples, now, exchange, lr, norm, which in pending:
            rate: float | None = None
            share: float | None = None
            if which in self._last_of and now > self._last_of[which]:
                rate = samples / (now - self._last_of[which])
            if self._last is not None and now > self._last[0]:
                share = (exchange - self._last[1]) / (now - self._last[0])
            self._last, self._last_of[which] = (now, exchange), now
            if lr != known:
                known, rates = lr, json.dumps(lr)
            lines.append(
                f'{{"step": {step}, "loss": {_number(loss)}, "samples_per_s": {_number(rate, ".6g")}, '
                f'"exchange_share": {_number(share, ".4f")}, "time": {now:.6f}'
                + ("" if lr is None else f', "lr": {rates}')
                + ("" if norm is None else f', "grad_norm": {_number(norm)}')
                + (f', "optimizer": {which}' if which else "")
                + "}\n"
            )
        self._append(runfolder.METRICS, "".join(lines))

    def _talk(self) -> tuple[int, int]:
        world = self._world
        return (world.meetings, world.exchanged) if world is not None else (0, 0)

    def close(self) -> None:
        """Write what the closing line needs."""
        self.times.write()
        if not self.voice or os.getpid() != self._pid:
            return
        if names := ", ".join(files.strangers()):
            self.notice(f"files of {names} are written by every rank: statically linked programs, and those written in "
                        "Go, bypass the file library")
        self.flush()
        seconds = exchange = rate = None
        if self._first_step is not None and self._last_step[0] > self._first_step[0]:
            seconds = self._last_step[0] - self._first_step[0]
            exchange = self._last_step[1] - self._first_step[1]
            counted = self.samples - self._resumed_at - self._first_step[2]  # the first step's time is not known
            rate = counted / seconds
        talk = [b - a for a, b in zip(self._first_talk, self._talk(), strict=True)]
        more = max(1, self.steps - self._resumed_steps - 1)
        summary = {
            "ranks": self._world.size if self._world is not None else 1,
            "losses": self.losses,
            "joined": self.joined,
            "steps": self.steps,
            "split_steps": self.split_steps,
            "split": self.split or self.split_steps > 0,
            "samples": self.samples,
            "seconds": seconds,
            "samples_per_s": rate,
            "exchange_seconds": exchange,
            "exchange_bytes": round(talk[1] / more) or self.weights() or None,  # a step
            "meetings": round(talk[0] / more, 2),
            "ahead_bytes": self._world.ahead if self._world is not None else 0,  # left while backward went on
            "sent_bytes": self._world.sent if self._world is not None else 0,
            "gathers": [
                {"site": site, "times": int(times), "seconds": spent, "bytes": int(nbytes)}
                for site, (times, spent, nbytes) in self.gathers.items()
            ],
            "replicated": [
                {"site": site, "times": int(times), "seconds": spent, "tracked_seconds": tracked}
                for site, (times, spent, tracked) in self.replicated.items()
            ],
        }
        (self.folder / runfolder.SUMMARY).unlink(missing_ok=True)
        self._append(runfolder.SUMMARY, json.dumps(summary, indent=1) + "\n")


def _frozen(loss: Any) -> Any:
    """A loss that later in-place changes cannot reach; a device's tensor stays there, so that nothing waits for it."""
    device = getattr(loss, "device", None)
    if device is not None and getattr(device, "type", "cpu") != "cpu":
        return loss.detach().clone()
    return loss.item() if hasattr(loss, "item") else loss


def _number(value: Any, spec: str = "") -> str:
    """JSON, with every digit of a loss (NaN and Infinity as Python's json reads them)."""
    if value is None:
        return "null"
    value = float(value)
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    return format(value, spec) if spec else repr(value)
