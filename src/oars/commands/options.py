"""The options of ``oars run`` and ``oars submit``, and what they mean in a run's plan."""

from __future__ import annotations

import argparse
import os
from typing import Any

from oars.arguments import Parser, count_of, number
from oars.evolve import schedule
from oars.runfolder import UsageError


def add_options(verb: Parser) -> list[argparse.Action]:
    """How a script is run, here or in a scheduler's job."""
    add = verb.add_argument
    return [
        add("--batch", choices=("split", "keep"), default="split",
            help="split: cut the script's batch over the ranks, same training (default); "
            "keep: every rank gets a whole batch, so the global batch is N times as large"),
        add("--split", choices=("auto", "always"), default=split_default(),
            help="always: every step is shared (default); auto: where steps are too short to gain from it, every rank "
            "does all of the work (PyTorch)"),
        add("--scale-lr", choices=("linear", "sqrt"),
            help="with --batch keep: multiply learning rates by N, or by its square root"),
        add("--local-batchnorm", action="store_true",
            help="BatchNorm uses the statistics of each rank's own rows (the default with --batch keep)"),
        add("--sync", choices=("allreduce", "server", "gossip", "local"), default="allreduce",
            help="allreduce: average gradients at every step, same training (default); local: ranks train separately "
            "and average their weights every K steps; gossip: each rank averages with one partner after every step, "
            "without waiting; server: some ranks hold the weights, the others push gradients to them"),
        add("--servers", type=count_of("ranks"), metavar="K", help="with --sync server: the number of server ranks "
            "(default: 1)"),
        add("--staleness", type=number, metavar="S", help="with --sync server: the fastest worker is at most S steps "
            "ahead of the slowest (default: 0, all wait for each step)"),
        add("--backup", type=number, metavar="B", help="with --staleness 0: do not wait for the slowest B gradients of "
            "a step, and leave them out"),
        add("--placement", choices=("round-robin", "balanced"),
            help="with --sync server: how tensors are distributed over servers (default: balanced, by size)"),
        add("--rotate", action="store_true", help="with --sync gossip: reshuffle the order of partners periodically"),
        add("--every", type=steps_or_auto, metavar="K", help="with --sync local: average every K steps (default: 8); "
            "auto: choose K so that averaging takes less than a twentieth of the time"),
        add("--outer", choices=("sgd", "nesterov"),
            help="with --sync local: continue from the mean (sgd, the default), or take a Nesterov step along the mean "
            "change"),
        add("--warmup", type=count_of("steps"), metavar="STEPS",
            help="with --sync local: average gradients, as allreduce does, for the first steps"),
        add("--wire", default="fp32", metavar="KIND",
            help="how numbers are encoded between ranks: fp32 (default), bf16, fp16, int8, topk:0.01, powersgd:4"),
        add("--guard", choices=("off", "report", "heal"), default="heal",
            help="compare the ranks' weights while they train: report where they differ, or heal: a rank that is alone "
            "with its own takes the others' (default), and of two ranks that differ both stop"),
        add("--guard-every", type=count_of("steps"), metavar="K", help="compare all weights every K steps (default: as "
            "much in each step as 0.3 %% of the time allows)"),
        *add_prune(verb),
        add("--widen", metavar="LAYERS=W", action="append", default=[], help="the layers of this name or pattern have "
            "W units from the first steps on, and the network computes the same then: 'body.*=384'"),
        add("--widen-when", metavar="WHEN", help="with --widen: after so many steps (default: 10steps), or when the "
            "loss has stopped falling (plateau)"),
        add("--samples", choices=("all", "thin"), default="all", help="thin: leave out, unread, half of the "
            "samples whose last loss is below the mean; those of them that stay count twice (docs/evolve.md)"),
        add("--of-run", type=count_of("steps"), metavar="STEPS", help="with --samples thin: the steps of the "
            "whole run; its last eighth is whole"),
        add("--cell-timeout", type=seconds, default=0.0, metavar="SECONDS", help="of a notebook: stop the run if a "
            "cell takes longer (default: 0, no limit)"),
        add("--share-gpus", action="store_true", help="allow more ranks than GPUs"),
        add("--tf1", action="store_true", help="the script was written for TensorFlow 1"),
        add("--report-bindings", action="store_true", help="print at the start the host, cores and GPU of each rank"),
        add("--stage-env", action="store_true", help="copy the Python environment and the script's folder to each "
            "host's local disk, and start the ranks from there"),
        add("--launcher", choices=("mpirun", "srun", "aprun"), default="mpirun",
            help="the command that starts the ranks (default: mpirun; with the others a dead rank ends the run)"),
        add("--stall", type=seconds, default=60.0, metavar="SECONDS",
            help="after this time of waiting, report which rank the others wait for (default: 60; 0: never)"),
        add("--on-stall", choices=("report", "drop", "abort"),
            help="then only report it, drop that rank, or stop the run (default: report, and drop the rank after five "
            "more such periods if it shows no sign of life)"),
        add("--per-node", type=count_of("ranks"), metavar="K", help="K ranks on every host"),
        add_snapshot(verb),
    ]


def split_default() -> str:
    """``--split`` where it is not given: ``OARS_SPLIT``, or always."""
    return "auto" if os.environ.get("OARS_SPLIT") == "auto" else "always"


def add_prune(verb: Parser) -> list[argparse.Action]:
    """Networks that shrink."""
    add = verb.add_argument
    return [
        add("--prune", metavar="F", help="networks shrink while they train: keep this part of each layer's units, "
            "as in 1/3 (docs/evolve.md; needs pip install 'manyoars[evolve]')"),
        add("--prune-when", metavar="A..B", help=f"with --prune: from when to when units leave, in "
            f"{schedule.CUTS} cuts (default: {schedule.WHEN}; or 200..2000steps)"),
        add("--prune-score", choices=schedule.SCORES, help="with --prune: which units leave first: those of the "
            "smallest weights squared (w), times the optimizer's second moment (wv, the default), or any (random)"),
    ]


def prune_in(args: argparse.Namespace, steps: int) -> Any:
    """``--prune`` in a run of so many steps: unless the user says when, all cuts are in the middle of them."""
    from oars.commands.planning import prune_plan

    when = args.prune_when or (f"{steps // 4}..{3 * steps // 4}steps" if args.prune else None)
    return prune_plan(args.prune, when, args.prune_score)


def add_snapshot(verb: Parser) -> argparse.Action:
    """How often a run takes snapshots."""
    return verb.add_argument(
        "--snapshot", metavar="PERIOD", help="take a snapshot every 30s, 10m, 2h or 100steps; off: never "
        "(default: on SIGUSR1, before SIGTERM ends the run, before a scheduler's time limit)")


def options(args: argparse.Namespace) -> dict[str, Any]:
    """The options as entries of the plan, for the adapters."""
    from oars.commands.planning import prune_plan, samples_plan, snapshot_plan, widen_plan
    from oars.commands.sync import sync_plan

    if args.scale_lr and args.batch != "keep":
        raise UsageError("--scale-lr is for the larger batch of --batch keep; with --batch split the batch, and so "
                         "the learning rate, stay the script's own")
    if args.tf1 and (args.sync, args.wire) != ("allreduce", "fp32"):
        raise UsageError("--sync and --wire are not for --tf1: leave them out")
    samples = samples_plan(args.samples, args.of_run, args.snapshot, args.sync, args.batch)
    together = sync_plan(args.sync, args.every, args.outer, args.warmup, args.rotate, args.wire, args.snapshot,
                         args.servers, args.staleness, args.backup, args.placement)
    return {
        **together,
        "prune": prune_plan(args.prune, args.prune_when, args.prune_score, args.sync, args.wire, args.tf1),
        **widen_plan(args.widen, args.widen_when, args.sync, args.wire, args.tf1),
        "guard": args.guard,
        "guard_every": args.guard_every or 0,
        "batch": args.batch,
        "split": args.split,
        "scale_lr": args.scale_lr,
        "local_batchnorm": args.local_batchnorm or args.batch == "keep" or args.sync != "allreduce",
        "cell_timeout": args.cell_timeout,
        "share_gpus": args.share_gpus,
        "report_bindings": args.report_bindings,
        "launcher": args.launcher,
        "stage_env": args.stage_env,
        "tf1": args.tf1,
        **samples,
        "snapshot": snapshot_plan("off" if args.sync != "allreduce" or args.samples == "thin" else args.snapshot),
        "stall": args.stall,
        "on_stall": args.on_stall,
    }


def words(args: argparse.Namespace) -> list[str]:
    """The options of ``oars run`` that were given to ``oars submit``."""
    said: list[str] = []
    for action in add_options(Parser()):
        value = getattr(args, action.dest)
        if isinstance(value, list):
            said += [word for each in value for word in (action.option_strings[0], each)]
        elif value != action.default:
            said += [action.option_strings[0], *([] if value is True else [str(value)])]
    return said


def steps_or_auto(text: str) -> int | str:
    """The type of a number of steps that may be left to the run."""
    return text if text == "auto" else count_of("steps")(text)


def seconds(text: str) -> float:
    """The type of an argument that is a time."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds: 0 or more")
    return value
