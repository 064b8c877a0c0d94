"""The options of ``oars run``, which hold for ``oars submit`` too, and what they mean in a run's plan."""

from __future__ import annotations

import argparse
from typing import Any

from oars.arguments import Parser, count_of, number
from oars.folders import UsageError


def add_options(verb: Parser) -> list[argparse.Action]:
    """How a script is run, wherever it is."""
    add = verb.add_argument
    return [
        add("--batch", choices=("split", "keep"), default="split",
            help="split: the script's batch is cut over the ranks, same training (default); "
            "keep: every rank gets a whole one, N times the batch"),
        add("--scale-lr", choices=("linear", "sqrt"),
            help="with --batch keep: learning rates grow with N, or its square root"),
        add("--local-batchnorm", action="store_true",
            help="BatchNorm takes each rank's own statistics (the default with --batch keep)"),
        add("--sync", choices=("allreduce", "server", "gossip", "local"), default="allreduce",
            help="allreduce: gradients are averaged at every step, same training (default); local: ranks train on "
            "their own, and average their weights every K steps; gossip: with one partner a step, not waiting; "
            "server: some ranks hold the weights, the others push gradients to them"),
        add("--servers", type=count_of("ranks"), metavar="K", help="with --sync server: so many (default: 1)"),
        add("--staleness", type=number, metavar="S", help="with --sync server: ranks are at most S steps apart "
            "(default: 0, all wait for each step)"),
        add("--backup", type=number, metavar="B", help="with --staleness 0: the slowest B gradients of a step are left "
            "out"),
        add("--placement", choices=("round-robin", "balanced"),
            help="with --sync server: how tensors are dealt to servers (default: balanced, by size)"),
        add("--rotate", action="store_true", help="with --sync gossip: partners in an order that is drawn anew again "
            "and again"),
        add("--every", type=steps_or_auto, metavar="K", help="with --sync local: so many steps (default: 8); auto: as "
            "many as keep averaging below a twentieth of the time"),
        add("--outer", choices=("sgd", "nesterov"),
            help="with --sync local: go on from the mean (sgd, the default), or make a step of the mean change"),
        add("--warmup", type=count_of("steps"), metavar="STEPS",
            help="with --sync local: average gradients, as allreduce does, for the first steps"),
        add("--wire", default="fp32", metavar="KIND",
            help="how numbers travel between ranks: fp32 (default), bf16, fp16, int8, topk:0.01, powersgd:4"),
        add("--share-gpus", action="store_true", help="allow more ranks than GPUs"),
        add("--tf1", action="store_true", help="the script was written for TensorFlow 1"),
        add("--bind", action="store_true", help="say at the start which host, cores and GPU each rank has"),
        add("--stage-env", action="store_true", help="bring the Python environment and the script's folder to each "
            "host's own disk, and start the ranks from there"),
        add("--launcher", choices=("mpirun", "srun", "aprun"), default="mpirun",
            help="what starts the ranks (default: mpirun; under the others a dead rank ends the run)"),
        add("--stall", type=seconds, default=60.0, metavar="SECONDS",
            help="say which rank the others wait for when they have waited this long (default: 60; 0: never)"),
        add("--on-stall", choices=("report", "drop", "abort"),
            help="then only report it, drop that rank, or stop the run (default: report, and drop after five "
            "more such periods if the rank shows no sign of life)"),
        add("--per-node", type=count_of("ranks"), metavar="K", help="K ranks on every host"),
        add_snapshot(verb),
    ]


def add_snapshot(verb: Parser) -> argparse.Action:
    """How often a run takes snapshots."""
    return verb.add_argument(
        "--snapshot", metavar="PERIOD", help="take snapshots every 30s, 10m, 2h or 100steps; off: never "
        "(default: on SIGUSR1, before SIGTERM ends the run, before a scheduler's time limit)")


def options(args: argparse.Namespace) -> dict[str, Any]:
    """How the script is to be spread, as the adapters find it in the plan."""
    from oars.run.plan import snapshot_plan
    from oars.run.sync import sync_plan

    if args.scale_lr and args.batch != "keep":
        raise UsageError("--scale-lr is for the larger batch of --batch keep; with --batch split the batch, and so "
                         "the learning rate, stay the script's own")
    if args.tf1 and (args.sync, args.wire) != ("allreduce", "fp32"):
        raise UsageError("--sync and --wire are not for --tf1: leave them out")
    together = sync_plan(args.sync, args.every, args.outer, args.warmup, args.rotate, args.wire, args.snapshot,
                         args.servers, args.staleness, args.backup, args.placement)
    return {
        **together,
        "batch": args.batch,
        "scale_lr": args.scale_lr,
        "local_batchnorm": args.local_batchnorm or args.batch == "keep" or args.sync != "allreduce",
        "share_gpus": args.share_gpus,
        "bind": args.bind,
        "launcher": args.launcher,
        "stage_env": args.stage_env,
        "tf1": args.tf1,
        "snapshot": snapshot_plan("off" if args.sync != "allreduce" else args.snapshot),
        "stall": args.stall,
        "on_stall": args.on_stall,
    }


def words(args: argparse.Namespace) -> list[str]:
    """The options of ``oars run`` that were given to ``oars submit``."""
    said: list[str] = []
    for action in add_options(Parser()):
        value = getattr(args, action.dest)
        if value != action.default:
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
