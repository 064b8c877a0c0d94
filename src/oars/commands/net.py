"""``oars doctor --net``: measure this machine, or the nodes of this job, and write it down for ``oars predict``."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from oars import runfolder
from oars.cluster.host_list import Host
from oars.cluster.place import Place, Where, find, only_here
from oars.commands.planning import add_mpi, make_plan
from oars.plan import available_cores, visible_gpus
from oars.runfolder import UsageError
from oars.supervisor.supervise import Supervisor
from oars.watch.terminal import table

FILE = "machine.toml"
SCRIPT = "from oars.commands.net_rank import main\nmain()\n"
LEAST_ERROR = 0.05  # what figures are off by at least, from one day to the next


def main(out: Path) -> int:
    """Measure, print, write."""
    if out.exists():
        raise UsageError(f"{out} is already there: remove it, or name another file: oars doctor --net FILE")
    threads = os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not threads.isdecimal() or not int(threads):
        raise UsageError(f"OMP_NUM_THREADS is {threads}: set the number of threads that a rank will have")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", threads)
    place = find(Where())
    each = max(1, len(available_cores()) // int(threads), *(host.slots for host in (place.hosts if place else ())))
    hosts = [] if place is None or only_here(place.hosts) else [host.name for host in place.hosts]
    sizes = sorted({*(2**k for k in range(1, each.bit_length())), each} - {1})
    nodes = [look("node", n) for n in sizes]
    pair = look("pair", len(hosts), place)["pair"] if hosts else None
    text = written(nodes, pair, max(1, len(hosts)), each, int(threads))
    out.write_text(text)
    print(shown(nodes, pair))
    if visible_gpus():
        print("oars: how ranks on GPUs slow each other down is not measured: set ranks_per_node, [node] and [[reduce]] "
              "for them yourself")
    print(out)
    return 0


def look(what: str, ranks: int, place: Place | None = None) -> dict[str, Any]:
    """Start ranks, here or one on each host of ``place``, and take what rank 0 has found."""
    with tempfile.TemporaryDirectory(prefix=".oars-doctor-", dir=Path()) as top:
        script, folder = Path(top, "net.py"), Path(top, "run")
        script.write_text(SCRIPT)
        folder.mkdir()
        if place is not None:
            place = place._replace(hosts=[Host(host.name, 1) for host in place.hosts])
        plan = make_plan(str(script), [what], False, ranks, place, 1 if place else None, share_gpus=True, snapshot=None,
                         batch="split", stall=60.0, on_stall=None)
        add_mpi(plan)
        plan.write(folder)
        code = Supervisor(folder, plan, show=False).run()
        try:
            found: dict[str, Any] = json.loads((folder / runfolder.log(0)).read_text().splitlines()[-1])
        except (OSError, ValueError, IndexError):
            raise UsageError(f"{ranks} ranks could not be measured (exit code {code}): does oars doctor find all well?"
                             ) from None
    return found


def written(nodes: list[dict[str, Any]], pair: dict[str, Any] | None, hosts: int, each: int, threads: int) -> str:
    """The machine's file."""
    def row(values: list[float]) -> str:
        return "[" + ", ".join(f"{value:.4g}" for value in values) + "]"

    def measured(found: dict[str, Any]) -> str:
        return f"bytes = {row(found['bytes'])}\nseconds = {row(found['seconds'])}\n"

    off = max([LEAST_ERROR, *(found["speed_off"] for found in nodes)])
    parts = [f"# Measured by oars doctor --net on {time.strftime('%Y-%m-%d')}; a rank has {threads} "
             f"thread{'s' * (threads > 1)}.\nname = \"{socket.gethostname()}\"\nnodes = {hosts}\n"
             f"ranks_per_node = {each}\nerror = {off:.2g}\n"]
    if pair is not None:
        parts.append(f"[network]  # a message between two nodes\n{measured(pair)}")
    busy = [1, *(found["ranks"] for found in nodes)]
    curves = {"speed": 1.0, "memory": 1.0, "spread": 0.0, "meeting": 0.0}
    parts.append(f"[node]  # what ranks on it do to each other, by how many there are\nranks = {busy}\n" + "".join(
        f"{name} = {row([alone, *(found[name] for found in nodes)])}\n" for name, alone in curves.items()))
    for found in nodes:
        if "pair" in found:
            parts.append(f"[pair]  # a message between two ranks of a node\n{measured(found['pair'])}")
    parts += [f"[[reduce]]  # an average of a buffer that each rank has\nranks = {found['ranks']}\n{measured(found)}"
              for found in nodes]
    return "\n".join(parts)


def shown(nodes: list[dict[str, Any]], pair: dict[str, Any] | None) -> str:
    """The same for people."""
    def size(nbytes: float) -> str:
        return f"{nbytes / 2**20:g} MiB" if nbytes >= 2**20 else f"{nbytes / 1024:g} KiB" if nbytes >= 1024 else \
            f"{nbytes:g} B"

    parts = []
    if nodes:
        head = ["ranks", "speed", "memory", "spread", "meeting", *(f"average {size(b)}" for b in nodes[0]["bytes"])]
        parts.append("a node with so many ranks at work, each rank's speed against one alone\n" + table(head, [
            [str(f["ranks"]), f"{f['speed']:.2f}", f"{f['memory']:.2f}", f"{100 * f['spread']:.1f} %",
             f"{1e6 * f['meeting']:.1f} µs", *(f"{1e3 * s:.3g} ms" for s in f["seconds"])] for f in nodes]))
    between = [("two nodes", pair)] if pair else []
    between += [("two ranks of a node", f["pair"]) for f in nodes if "pair" in f]
    for who, found in between:
        parts.append(f"messages between {who}\n" + table(["size", "time", "bandwidth"], [
            [size(b), f"{1e6 * s:.4g} µs", f"{b / s / 1e9:.3g} GB/s"]
            for b, s in zip(found["bytes"], found["seconds"], strict=True)]))
    return "\n\n".join(parts)
