"""The command ``oars``: verbs and their arguments. No work is done here, and nothing heavy is imported."""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

from oars import __version__
from oars.arguments import Parser, count_of
from oars.cluster import command as cluster
from oars.commands import options as run_options
from oars.watch import VERBS as WATCHING

RUN = """\
examples:
  oars run -n 4 train.py --epochs 3        # arguments after the script belong to the script
  oars run -n 4 -m package.module --lr 0.1
  oars run -n 4 analysis.ipynb             # a notebook; the executed copy is in the run folder
  oars run --hosts a:4,b:4 train.py        # four ranks on each of two hosts
  oars run train.py                        # in a Slurm, PBS, LSF or Flux job: on all its nodes
"""
RESUME = """\
examples:
  oars resume train-20260102-120000        # a run under oars-runs, from its newest snapshot
  oars resume oars-runs/big -n 8           # on another number of ranks
"""
GROW = """\
examples:
  oars grow train-20260102-120000 -n +2    # two more ranks for a running run
  oars grow oars-runs/big -n 8             # so many more that there are 8
"""
VERIFY = """\
example:
  oars verify -n 4 train.py --epochs 3     # before you spend an allocation
"""
DATA = """\
example:
  oars data --help
"""
DOCTOR = """\
examples:
  oars doctor
  oars doctor --job                        # in a job: can its nodes work together?
  oars doctor --net machine.toml           # measure messages and compute speed, for oars predict
"""
COMPLETION = """\
examples:
  oars completion bash > ~/.local/share/bash-completion/completions/oars
  oars completion zsh > ~/.zsh/_oars       # a folder of $fpath
  oars completion fish > ~/.config/fish/completions/oars.fish
"""
MAN = """\
example:
  oars man > ~/.local/share/man/man1/oars.1
"""


def main(argv: list[str] | None = None) -> int:
    """Do what the command line says and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["data"]:
        from oars.data.command import main as data

        return data(argv[1:])
    if argv[:1] == ["label"]:
        from oars.label.command import main as label

        return label(argv[1:])
    if argv[:1] and argv[0] in WATCHING:
        from oars.watch.command import main as watch

        return watch(argv)
    if argv[:1] == ["job"]:  # what job scripts run, not people
        return _job(argv[1:])
    own, flags = split_flags(argv)
    own, script = split_script(own)
    args = parser().parse_args(own)
    from oars.cluster.host_list import HostsError
    from oars.runfolder import CutOff, UsageError

    try:
        if args.verb == "doctor":
            from oars.commands.doctor import doctor
            from oars.commands.doctor_job import main as doctor_job

            if args.net:
                from pathlib import Path

                from oars.commands.net import main as doctor_net

                return doctor_net(Path(args.net))
            return doctor_job() if args.job else doctor()
        if args.verb == "resume":
            from oars.commands.resume import resume

            return resume(args.run, args.ranks, where(args), args.quiet, args.snapshot)
        if args.verb == "grow":
            from oars.commands.grow import grow

            return grow(args.run, args.ranks)
        if args.verb in ("completion", "man"):
            from oars.commands import shells

            print(shells.man(parsers()) if args.verb == "man" else shells.completion(args.shell, parsers()), end="")
            return 0
        if args.verb in cluster.VERBS:
            return cluster.main(args)
        if script is None:
            raise UsageError(f"{args.verb} needs a script, or -m and a module; see oars {args.verb} --help")
        if args.verb == "verify":
            from oars.commands.verify import verify

            return verify(args.ranks, args.steps, *script, prune=run_options.prune_in(args, args.steps))
        if args.verb == "submit":
            return _submit(args, tuple(flags), *script)
        from oars.commands.run import run

        return run(args.ranks, where(args), args.name, args.quiet, run_options.options(args), *script)
    except (UsageError, HostsError) as error:
        print(f"oars: {error}", file=sys.stderr)
        return 2
    except CutOff as error:
        print(f"oars: {error}", file=sys.stderr)
        return 75


def _job(argv: list[str]) -> int:
    from pathlib import Path

    from oars.commands.job import Part
    from oars.runfolder import UsageError

    try:
        return Part(Path(argv[0]), argv[2:]).run()
    except UsageError as error:
        print(f"oars: {error}", file=sys.stderr)
        return 2


def _submit(args: argparse.Namespace, flags: tuple[str, ...], script: str, script_args: list[str], module: bool) -> int:
    from oars.cluster.queues import Ask, parse_time
    from oars.cluster.submit import submit, which_queue
    from oars.commands.planning import check_module, check_script, versions
    from oars.runfolder import stem_of

    ask = Ask(which_queue(args.on), args.nodes, args.per_node, parse_time(args.time) if args.time else None, args.queue,
              args.account, args.gpus, args.env, flags, args.max_restarts)
    if script.endswith(".toml") and not module:
        from pathlib import Path

        from oars.cluster import pipeline

        return pipeline.submit(Path(script), args.name, ask, versions(), args.dry_run)
    check_module(script) if module else check_script(script)
    run_options.options(args)  # what oars run would refuse in the job
    command = ["oars", "run", *run_options.words(args), *(["-m"] if module else []), script, *script_args]
    return submit(ask, args.name, stem_of(script, module), command, versions(), args.dry_run)


def where(args: argparse.Namespace) -> Any:
    """What was said about hosts."""
    from oars.cluster.place import Where

    return Where(args.hosts, args.hostfile, args.per_node)


def parsers() -> dict[str, Parser]:
    """Every verb and how it reads its arguments; the empty name: what all have in common."""
    from oars.data.command import parser as data
    from oars.label.command import parser as label
    from oars.watch.verbs import parser as watching

    found = {"": parser(), **_verbs(parser()), "label": label()}
    found.update({name: watching(name) for name in WATCHING})
    at = list(found).index("data") + 1
    inner = {f"data {name}": each for name, each in _verbs(data()).items()}
    return dict([*list(found.items())[:at], *inner.items(), *list(found.items())[at:]])


def _verbs(top: Parser) -> dict[str, Parser]:
    return top._subparsers._group_actions[0].choices  # type: ignore[union-attr, return-value]


@functools.cache
def _with_values() -> set[str]:
    """The options that a value follows."""
    every = [action for verb in _verbs(parser()).values() for action in verb._actions]
    return {option for action in every if action.nargs != 0 for option in action.option_strings}


def split_flags(argv: list[str]) -> tuple[list[str], list[str]]:
    """Take what is between two ``--`` before the script of ``oars submit``: the scheduler's own flags."""
    at = 1
    while argv[:1] == ["submit"] and at < len(argv) and argv[at].startswith("-") and argv[at] != "-m":
        if argv[at] == "--":
            if "--" not in argv[at + 1:]:
                parser().error("the scheduler's flags stand between two --, before the script, as in: "
                               "oars submit -N 2 -- --constraint=a100 -- train.py")
            end = argv.index("--", at + 1)
            return argv[:at] + argv[end + 1:], argv[at + 1:end]
        at += 2 if argv[at] in _with_values() else 1
    return argv, []


def split_script(argv: list[str]) -> tuple[list[str], tuple[str, list[str], bool] | None]:
    """Our own arguments, and (script, its arguments, whether it is a module): all after the script is the script's."""
    if argv[:1] and argv[0] in ("resume", "grow", "log", "wait", "cancel", "pipeline", "completion"):  # they need none
        return argv, None
    at = 1
    while at < len(argv):
        word = argv[at]
        if word == "-m" and at + 1 < len(argv):
            return argv[:at], (argv[at + 1], argv[at + 2:], True)
        if not word.startswith("-"):
            return argv[:at], (word, argv[at + 1:], False)
        at += 2 if word in _with_values() else 1
    return argv, None


def more_ranks(text: str) -> str:
    """The type of ``+2`` or ``6``."""
    if not text.removeprefix("+").isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of ranks: +2 for two more, 6 for six in all")
    return text


def parser() -> Parser:
    """All verbs."""
    top = Parser(prog="oars", description="A training script written for one process runs, unchanged, on any number "
                 "of ranks.", epilog="oars VERB --help explains each verb.", allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"oars {__version__}", help="show the version")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)

    def verb(name: str, text: str, usage: str, example: str) -> Parser:
        return verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", usage=usage,
                                epilog=example, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)

    run = verb("run", "run a script on N ranks",
               "oars run [-n N] [options] (script.py | -m module) [script's arguments]", RUN)
    _ranks(run)
    _hosts(run)
    run.add_argument("--name", help="the run folder is oars-runs/NAME (default: the script's name and the time)")
    run.add_argument("--quiet", action="store_true", help="no live status line")
    run_options.add_options(run)

    again = verb("resume", "continue a run from its newest snapshot", "oars resume RUN [-n N] [options]", RESUME)
    again.add_argument("run", metavar="RUN", help="the run folder, or its name under oars-runs")
    _ranks(again)
    _hosts(again)
    again.add_argument("--per-node", type=count_of("ranks"), metavar="K", help="K ranks on every host")
    again.add_argument("--quiet", action="store_true", help="no live status line")
    run_options.add_snapshot(again)

    grow = verb("grow", "add ranks to a running run", "oars grow RUN -n (+K | N)", GROW)
    grow.add_argument("run", metavar="RUN", help="the run folder, or its name under oars-runs")
    grow.add_argument("-n", dest="ranks", type=more_ranks, metavar="+K", required=True,
                      help="how many ranks to add; without the plus, the total number of ranks")

    cluster.add_verbs(verb, run_options.add_options)

    check = verb("verify", "train the first steps on one rank and on N, and report whether the losses agree",
                 "oars verify [-n N] [--steps K] (script.py | -m module) [script's arguments]", VERIFY)
    _ranks(check)
    check.add_argument("--steps", type=count_of("steps"), default=20, metavar="K", help="how many steps (default: 20)")

    run_options.add_prune(check)

    verb("data", "make, pack, check, show and export data sets", "oars data VERB ...", DATA)
    verb("label", "label images in groups, in a browser, with a model that learns as you do", "oars label SOURCE ...",
         "")
    for name, text in WATCHING.items():
        verb(name, text, f"oars {name} ...", "")
    doctor = verb("doctor", "check this machine: what is installed, what works, and how to fix what does not",
                  "oars doctor [--job | --net [FILE]]", DOCTOR)
    doctor.add_argument("--job", action="store_true", help="check the nodes of the current job")
    doctor.add_argument("--net", nargs="?", const="machine.toml", metavar="FILE", help="measure how ranks slow each "
                        "other down on a node, and messages between the nodes of a job; write the result to FILE for "
                        "oars predict (default: machine.toml)")
    shells = verb("completion", "print the completion script of a shell", "oars completion (bash | zsh | fish)",
                  COMPLETION)
    shells.add_argument("shell", choices=("bash", "zsh", "fish"))
    verb("man", "print the manual page", "oars man", MAN)
    return top


def _ranks(verb: Parser) -> None:
    verb.add_argument("-n", dest="ranks", type=count_of("ranks"), metavar="N",
                      help="number of ranks (default: as many as the current job has room for; without a job, one per "
                      "GPU; without GPUs, one per core that this process may use)")


def _hosts(verb: Parser) -> None:
    verb.add_argument("--hosts", metavar="A:4,B:4", help="hosts, with the number of ranks on each (default: the "
                      "hosts of the current job; without a job, this host)")
    verb.add_argument("--hostfile", metavar="FILE", help="the same from a file, one host per line, as in: a slots=4")
