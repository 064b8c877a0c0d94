"""The command ``oars``: verbs and their arguments. No work is done here, and nothing heavy is imported."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

RUN = """\
examples:
  oars run -n 4 train.py --epochs 3        # what follows the script goes to the script
  oars run -n 4 -m package.module --lr 0.1
"""
RESUME = """\
examples:
  oars resume train-20260102-120000        # a run of oars-runs, from its newest snapshot
  oars resume oars-runs/big -n 8           # on another number of ranks
"""
VERIFY = """\
example:
  oars verify -n 4 train.py --epochs 3     # before you burn an allocation
"""
DOCTOR = """\
example:
  oars doctor
"""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"oars: {message}; see {self.prog} --help\n")


def main(argv: list[str] | None = None) -> int:
    """Do what the command line says and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    own, script = split_script(argv)
    args = parser().parse_args(own)
    from oars.run.plan import UsageError

    try:
        if args.verb == "doctor":
            from oars.run.doctor import doctor

            return doctor()
        if args.verb == "resume":
            from oars.run.resume import resume

            return resume(args.run, args.ranks, args.quiet, args.snapshot)
        if script is None:
            raise UsageError(f"{args.verb} what? name a script or -m a module; see oars {args.verb} --help")
        if args.verb == "verify":
            from oars.run.verify import verify

            return verify(args.ranks, args.steps, *script)
        from oars.run.run import run

        return run(args.ranks, args.name, args.quiet, options(args), *script)
    except UsageError as error:
        print(f"oars: {error}", file=sys.stderr)
        return 2


def options(args: argparse.Namespace) -> dict[str, Any]:
    """How the script is to be spread, as the adapters find it in the plan."""
    from oars.run.plan import UsageError, snapshot_plan

    if args.scale_lr and args.batch != "keep":
        raise UsageError("--scale-lr is for the larger batch of --batch keep; with --batch split the batch, and so "
                         "the learning rate, stay the script's own")
    return {
        "batch": args.batch,
        "scale_lr": args.scale_lr,
        "local_batchnorm": args.local_batchnorm or args.batch == "keep",
        "share_gpus": args.share_gpus,
        "tf1": args.tf1,
        "snapshot": snapshot_plan(args.snapshot),
        "stall": args.stall,
        "on_stall": args.on_stall,
    }


def split_script(argv: list[str]) -> tuple[list[str], tuple[str, list[str], bool] | None]:
    """Our own arguments, and (script, its arguments, whether it is a module): all after the script is the script's."""
    takes_value = {"-n", "--name", "--batch", "--scale-lr", "--stall", "--on-stall", "--steps", "--snapshot"}
    if argv[:1] == ["resume"]:  # it knows its script
        return argv, None
    at = 1
    while at < len(argv):
        word = argv[at]
        if word == "-m" and at + 1 < len(argv):
            return argv[:at], (argv[at + 1], argv[at + 2:], True)
        if not word.startswith("-"):
            return argv[:at], (word, argv[at + 1:], False)
        at += 2 if word in takes_value else 1
    return argv, None


def count_of(things: str) -> Callable[[str], int]:
    """The type of an argument that counts: 1 or more."""
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text} is no number of {things}: 1 or more")
        return int(text)
    return count


def seconds(text: str) -> float:
    """The type of an argument that is a time."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds: 0 or more")
    return value


def parser() -> Parser:
    """All verbs."""
    top = Parser(prog="oars", description="A training script written for one process runs, unchanged, on any number "
                 "of ranks.", epilog="oars VERB --help tells more about each.", allow_abbrev=False)
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)

    def verb(name: str, text: str, usage: str, example: str) -> Parser:
        return verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", usage=usage,
                                epilog=example, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)

    run = verb("run", "run a script on N ranks",
               "oars run [-n N] [options] (script.py | -m module) [script's arguments]", RUN)
    _ranks(run)
    run.add_argument("--name", help="the run folder is oars-runs/NAME (default: the script's name and the time)")
    run.add_argument("--quiet", action="store_true", help="no live status line")
    run.add_argument("--batch", choices=("split", "keep"), default="split",
                     help="split: the script's batch is cut over the ranks, same training (default); "
                     "keep: every rank gets a whole one, N times the batch")
    run.add_argument("--scale-lr", choices=("linear", "sqrt"),
                     help="with --batch keep: learning rates grow with N, or its square root")
    run.add_argument("--local-batchnorm", action="store_true",
                     help="BatchNorm takes each rank's own statistics (the default with --batch keep)")
    run.add_argument("--share-gpus", action="store_true", help="allow more ranks than GPUs")
    run.add_argument("--tf1", action="store_true", help="the script was written for TensorFlow 1")
    run.add_argument("--stall", type=seconds, default=60.0, metavar="SECONDS",
                     help="say which rank the others wait for when they have waited this long (default: 60; 0: never)")
    run.add_argument("--on-stall", choices=("report", "drop", "abort"),
                     help="then only report it, drop that rank, or stop the run (default: report, and drop after five "
                     "more such periods if the rank shows no sign of life)")
    _snapshot(run)

    again = verb("resume", "go on with a run from its newest snapshot", "oars resume RUN [-n N] [options]", RESUME)
    again.add_argument("run", metavar="RUN", help="the run folder, or its name under oars-runs")
    _ranks(again)
    again.add_argument("--quiet", action="store_true", help="no live status line")
    _snapshot(again)

    check = verb("verify", "train the first steps on one rank and on N, and say whether they are the same",
                 "oars verify [-n N] [--steps K] (script.py | -m module) [script's arguments]", VERIFY)
    _ranks(check)
    check.add_argument("--steps", type=count_of("steps"), default=20, metavar="K", help="how many steps (default: 20)")

    verb("doctor", "what is here, what works, and what to do about what does not", "oars doctor", DOCTOR)
    return top


def _snapshot(verb: Parser) -> None:
    verb.add_argument("--snapshot", metavar="PERIOD", help="take snapshots every 30s, 10m, 2h or 100steps; off: never "
                      "(default: on SIGUSR1, before SIGTERM ends the run, before a scheduler's time limit)")


def _ranks(verb: Parser) -> None:
    verb.add_argument("-n", dest="ranks", type=count_of("ranks"), metavar="N",
                      help="how many ranks (default: one per GPU; without GPUs, one per core this process may use)")
