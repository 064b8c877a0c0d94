"""``--sync`` and ``--wire``: what they may be, and what they make of the promise of the same training."""

from __future__ import annotations

import re
from typing import Any

from oars.plan import Plan
from oars.runfolder import UsageError

EVERY = 8  # steps of a round
WIRES = "fp32, bf16, fp16, int8, topk:0.01 (a fraction), powersgd:4 (a rank)"


def sync_plan(sync: str, every: int | str | None, outer: str | None, warmup: int | None, rotate: bool, wire: str,
              snapshot: str | None, servers: int | None, staleness: int | None, backup: int | None,
              placement: str | None) -> dict[str, Any]:
    """How ranks keep together, as the adapters find it in the plan; UsageError for what does not go together."""
    for option, value in (("--servers", servers), ("--staleness", staleness), ("--backup", backup),
                          ("--placement", placement)):
        if value is not None and sync != "server":
            raise UsageError(f"{option} {value} is for --sync server; --sync {sync} has no servers")
    for option, value in (("--every", every), ("--outer", outer), ("--warmup", warmup)):
        if value is not None and sync != "local":
            raise UsageError(f"{option} {value} is for --sync local; --sync {sync} has no rounds")
    if rotate and sync != "gossip":
        raise UsageError(f"--rotate is for --sync gossip; with --sync {sync} ranks have no partners")
    if sync != "allreduce" and snapshot not in (None, "off"):
        raise UsageError(f"--snapshot {snapshot} needs ranks with equal weights: leave it out, or use --sync allreduce")
    check_wire(wire)
    plan: dict[str, Any] = {"sync": sync, "wire": wire}
    if sync == "local":
        plan.update(every=every or EVERY, outer=outer or "sgd", warmup=warmup or 0)
    if sync == "gossip":
        if wire.partition(":")[0] in ("topk", "powersgd"):
            raise UsageError(f"--wire {wire} sends parts of changes, and gossip sends weights: use fp32, bf16, fp16 or "
                             "int8")
        plan.update(rotate=rotate)
    if sync == "server":
        if wire.startswith("powersgd"):
            raise UsageError(f"--wire {wire} needs all ranks' gradients at once, but servers get them one by one: use "
                             "fp32, bf16, fp16, int8 or topk")
        bound = staleness or 0
        if backup and bound:
            raise UsageError(f"--backup {backup} leaves out the slowest gradients of a step, so all workers must "
                             "wait for it: use --staleness 0")
        plan.update(servers=servers or 1, staleness=bound, backup=backup or 0,
                    placement=placement or "balanced")
    return plan


def check_servers(plan: Plan) -> None:
    """UsageError unless enough ranks are left to train."""
    workers = plan.ranks - plan.servers
    if plan.sync == "server" and workers < 1:
        raise UsageError(f"--servers {plan.servers} leaves none of {plan.ranks} ranks to train: use -n "
                         f"{plan.servers + 1} or more")
    if plan.backup >= max(1, workers):
        raise UsageError(f"--backup {plan.backup} leaves out the gradients of all {workers} that train: use less")


def check_wire(wire: str) -> None:
    """UsageError unless ``wire`` is one of WIRES."""
    given = re.fullmatch(r"fp32|bf16|fp16|int8|topk:(\d*\.?\d+(?:e-?\d+)?)|powersgd:(\d+)", wire)
    if given is None:
        raise UsageError(f"--wire {wire} is not one of {WIRES}")
    if given[1] is not None and not 0 < float(given[1]) <= 1:
        raise UsageError(f"--wire {wire}: the fraction of values to send is above 0 and at most 1, as in topk:0.01")
    if given[2] is not None and not int(given[2]):
        raise UsageError(f"--wire {wire}: the rank is 1 or more, as in powersgd:4")


def first_line(plan: Plan) -> str:
    """What the same training still means in this run; "" where it means all it did."""
    if plan.ranks == 1:
        return ""
    wire = "" if plan.wire == "fp32" else f"are sent as {plan.wire}, and rounding errors are added later"
    if plan.sync == "allreduce":
        return wire and (f"gradients {wire}: samples, files and evaluation are unchanged, all ranks' weights are "
                         "equal, losses near one process's (docs/sync.md)")
    unchanged = "samples, their order, files and evaluation are unchanged, a loss read in training is the rank's own"
    if plan.sync == "gossip":
        return ("each rank trains on its own rows, and after every step averages with one other without waiting"
                + (f" (weights {wire.partition(',')[0]})" if wire else "") + f"; {unchanged} (docs/sync.md)")
    if plan.sync == "server":
        k, n = plan.servers, plan.ranks - plan.servers
        late = "at every step" if not plan.staleness else f"at most {plan.staleness} steps apart"
        late += f", less the slowest {plan.backup}" if plan.backup else ""
        return (f"{n} rank{'s' * (n > 1)} train{'s' * (n == 1)} on own rows, {late}, and {k} hold{'s' * (k == 1)} the "
                f"weights" + (f" (gradients {wire})" if wire else "") + f"; {unchanged} (docs/sync.md)")
    how = "average their weights" if plan.outer == "sgd" else "make an outer step of their mean change"
    often = "from time to time" if plan.every == "auto" else f"every {plan.every} steps"
    return (f"each rank trains on its own rows, and {often} all {how}"
            + (f" (changes {wire})" if wire else "") + f"; {unchanged} (docs/sync.md)")
