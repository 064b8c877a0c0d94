"""The command ``oars``: verbs and their arguments. No work is done here, and nothing heavy is imported."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from oars.arguments import Parser, count_of

RUN = """\
examples:
  oars run -n 4 train.py --epochs 3        # what follows the script goes to the script
  oars run -n 4 -m package.module --lr 0.1
  oars run --hosts a:4,b:4 train.py        # four ranks on each of two hosts
  oars run train.py                        # in a job of Slurm, PBS, LSF or Flux: on all of it
"""
RESUME = """\
examples:
  oars resume train-20260102-120000        # a run of oars-runs, from its newest snapshot
  oars resume oars-runs/big -n 8           # on another number of ranks
"""
GROW = """\
examples:
  oars grow train-20260102-120000 -n +2    # two more ranks for a run that is going
  oars grow oars-runs/big -n 8             # as many more as make 8
"""
SUBMIT = """\
examples:
  oars submit -N 4 --time 2h train.py --epochs 90      # what follows the script goes to the script
  oars submit -N 4 --gpus-per-node 4 --partition gpu --account abc --time 2h train.py
  oars submit -N 4 --time 2h -- --constraint=a100 --mem=0 -- train.py   # between two --: the scheduler's flags
  oars submit pipeline.toml                            # stages that wait for each other
  oars submit -N 4 --dry-run train.py                  # only show the job script

All options of oars run may be given too, and hold in the job.
"""
JOBS = """\
example:
  oars jobs                                # the runs submitted from this folder, and what became of them
"""
LOG = """\
examples:
  oars log train-20260102-120000 -f        # what the run prints, until it ends
  oars log train-20260102-120000 --rank 3
"""
WAIT = """\
example:
  oars wait train-20260102-120000 && oars submit evaluate.py
"""
PIPELINE = """\
example:
  oars pipeline status pipeline.toml
"""
CANCEL = """\
example:
  oars cancel train-20260102-120000
"""
VERIFY = """\
example:
  oars verify -n 4 train.py --epochs 3     # before you burn an allocation
"""
DATA = """\
example:
  oars data --help
"""
DOCTOR = """\
examples:
  oars doctor
  oars doctor --job                        # in a job: can its nodes work together?
  oars doctor --net machine.toml           # how fast do ranks talk and work here? for oars predict
"""
# These have arguments of their own: see oars.watch.command.
WATCH = {
    "runs": "list the runs of this folder",
    "show": "draw a run's curves in the terminal",
    "compare": "draw several runs over each other",
    "report": "write an HTML page about runs",
    "board": "start TensorBoard on runs",
    "scale": "run a script on several numbers of ranks, and say how much faster it gets",
    "predict": "say how fast a training would be on a machine, and on how many ranks, you do not have",
    "sweep": "run a script with many settings of its arguments, and say which did best",
}



def main(argv: list[str] | None = None) -> int:
    """Do what the command line says and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["data"]:
        from oars.data.command import main as data

        return data(argv[1:])
    if argv[:1] and argv[0] in WATCH:
        from oars.watch.command import main as watch

        return watch(argv)
    if argv[:1] == ["job"]:  # what job scripts run, not people
        return _job(argv[1:])
    own, flags = split_flags(argv)
    own, script = split_script(own)
    args = parser().parse_args(own)
    from oars.cluster.hosts import HostsError
    from oars.folders import CutOff
    from oars.run.plan import UsageError

    try:
        if args.verb == "doctor":
            from oars.run.doctor import doctor
            from oars.run.doctor_job import main as doctor_job

            if args.net:
                from pathlib import Path

                from oars.run.net import main as doctor_net

                return doctor_net(Path(args.net))
            return doctor_job() if args.job else doctor()
        if args.verb == "resume":
            from oars.run.resume import resume

            return resume(args.run, args.ranks, where(args), args.quiet, args.snapshot)
        if args.verb == "grow":
            from oars.run.grow import grow

            return grow(args.run, args.ranks)
        if args.verb in ("jobs", "log", "wait", "cancel", "pipeline"):
            return _jobs(args)
        if script is None:
            raise UsageError(f"{args.verb} what? name a script or -m a module; see oars {args.verb} --help")
        if args.verb == "verify":
            from oars.run.verify import verify

            return verify(args.ranks, args.steps, *script)
        if args.verb == "submit":
            return _submit(args, tuple(flags), *script)
        from oars.run.run import run

        return run(args.ranks, where(args), args.name, args.quiet, options(args), *script)
    except (UsageError, HostsError) as error:
        print(f"oars: {error}", file=sys.stderr)
        return 2
    except CutOff as error:
        print(f"oars: {error}", file=sys.stderr)
        return 75


def _job(argv: list[str]) -> int:
    from pathlib import Path

    from oars.folders import UsageError
    from oars.run.job import Part

    try:
        return Part(Path(argv[0]), argv[2:]).run()
    except UsageError as error:
        print(f"oars: {error}", file=sys.stderr)
        return 2


def _jobs(args: argparse.Namespace) -> int:
    from oars.cluster import jobs

    if args.verb == "pipeline":
        from pathlib import Path

        from oars.cluster.pipeline import show

        return show(Path(args.file))
    if args.verb == "jobs":
        return jobs.jobs()
    if args.verb == "log":
        return jobs.log(args.run, args.follow, args.rank)
    return jobs.wait(args.run) if args.verb == "wait" else jobs.cancel(args.run)


def _submit(args: argparse.Namespace, flags: tuple[str, ...], script: str, script_args: list[str], module: bool) -> int:
    from oars.cluster.queues import Ask, parse_time
    from oars.cluster.submit import submit, which_queue
    from oars.folders import stem_of
    from oars.run.plan import check_module, check_script, versions

    ask = Ask(which_queue(args.on), args.nodes, args.per_node, parse_time(args.time) if args.time else None, args.queue,
              args.account, args.gpus, args.env, flags, args.max_restarts)
    if script.endswith(".toml") and not module:
        from pathlib import Path

        from oars.cluster import pipeline

        return pipeline.submit(Path(script), args.name, ask, versions(), args.dry_run)
    check_module(script) if module else check_script(script)
    options(args)  # what oars run would refuse in the job
    command = ["oars", "run", *run_words(args), *(["-m"] if module else []), script, *script_args]
    return submit(ask, args.name, stem_of(script, module), command, versions(), args.dry_run)


def run_words(args: argparse.Namespace) -> list[str]:
    """The options of ``oars run`` that were given to ``oars submit``."""
    said: list[str] = []
    for action in _run_options(Parser()):
        value = getattr(args, action.dest)
        if value != action.default:
            said += [action.option_strings[0], *([] if value is True else [str(value)])]
    return said


def where(args: argparse.Namespace) -> Any:
    """What was said about hosts."""
    from oars.cluster.place import Where

    return Where(args.hosts, args.hostfile, args.per_node)


def options(args: argparse.Namespace) -> dict[str, Any]:
    """How the script is to be spread, as the adapters find it in the plan."""
    from oars.run.plan import UsageError, snapshot_plan
    from oars.run.sync import sync_plan

    if args.scale_lr and args.batch != "keep":
        raise UsageError("--scale-lr is for the larger batch of --batch keep; with --batch split the batch, and so "
                         "the learning rate, stay the script's own")
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
        "snapshot": snapshot_plan("off" if args.sync != "allreduce" else args.snapshot),
        "stall": args.stall,
        "on_stall": args.on_stall,
    }


TAKES_VALUE = {"-n", "--hosts", "--hostfile", "--per-node", "--name", "--batch", "--scale-lr", "--stall", "--on-stall",
               "--sync", "--servers", "--staleness", "--backup", "--placement", "--every", "--outer", "--warmup",
               "--wire", "--steps", "--snapshot", "-N", "--time",
               "--partition", "--queue", "--account", "--gpus-per-node", "--env", "--on", "--max-restarts", "--net",
               "--launcher"}


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
        at += 2 if argv[at] in TAKES_VALUE else 1
    return argv, []


def split_script(argv: list[str]) -> tuple[list[str], tuple[str, list[str], bool] | None]:
    """Our own arguments, and (script, its arguments, whether it is a module): all after the script is the script's."""
    if argv[:1] and argv[0] in ("resume", "grow", "log", "wait", "cancel", "pipeline"):  # they know their script
        return argv, None
    at = 1
    while at < len(argv):
        word = argv[at]
        if word == "-m" and at + 1 < len(argv):
            return argv[:at], (argv[at + 1], argv[at + 2:], True)
        if not word.startswith("-"):
            return argv[:at], (word, argv[at + 1:], False)
        at += 2 if word in TAKES_VALUE else 1
    return argv, None


def more_ranks(text: str) -> str:
    """The type of ``+2`` or ``6``."""
    if not text.removeprefix("+").isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of ranks: +2 for two more, 6 for six in all")
    return text


def steps_or_auto(text: str) -> int | str:
    """The type of a number of steps that may be left to the run."""
    return text if text == "auto" else count_of("steps")(text)


def number(text: str) -> int:
    """The type of an argument that is 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no number: 0 or more")
    return int(text)


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
    _hosts(run)
    run.add_argument("--name", help="the run folder is oars-runs/NAME (default: the script's name and the time)")
    run.add_argument("--quiet", action="store_true", help="no live status line")
    _run_options(run)

    again = verb("resume", "go on with a run from its newest snapshot", "oars resume RUN [-n N] [options]", RESUME)
    again.add_argument("run", metavar="RUN", help="the run folder, or its name under oars-runs")
    _ranks(again)
    _hosts(again)
    again.add_argument("--per-node", type=count_of("ranks"), metavar="K", help="K ranks on every host")
    again.add_argument("--quiet", action="store_true", help="no live status line")
    _snapshot(again)

    grow = verb("grow", "let more ranks join a run that is going", "oars grow RUN -n (+K | N)", GROW)
    grow.add_argument("run", metavar="RUN", help="the run folder, or its name under oars-runs")
    grow.add_argument("-n", dest="ranks", type=more_ranks, metavar="+K", required=True,
                      help="how many more ranks; without the plus, how many there are to be in all")

    _queue_verbs(verb)

    check = verb("verify", "train the first steps on one rank and on N, and say whether they are the same",
                 "oars verify [-n N] [--steps K] (script.py | -m module) [script's arguments]", VERIFY)
    _ranks(check)
    check.add_argument("--steps", type=count_of("steps"), default=20, metavar="K", help="how many steps (default: 20)")

    verb("data", "make, pack, check, show and export data sets", "oars data VERB ...", DATA)
    for name, text in WATCH.items():
        verb(name, text, f"oars {name} ...", "")
    doctor = verb("doctor", "what is here, what works, and what to do about what does not",
                  "oars doctor [--job | --net [FILE]]", DOCTOR)
    doctor.add_argument("--job", action="store_true", help="look at the nodes of the scheduler's job we are in")
    doctor.add_argument("--net", nargs="?", const="machine.toml", metavar="FILE", help="measure what ranks do to each "
                        "other on a node, and messages between the nodes of a job; write it down for oars predict "
                        "(default: machine.toml)")
    return top


def _run_options(verb: Parser) -> list[argparse.Action]:
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
        _snapshot(verb),
    ]


def _queue_verbs(verb: Callable[[str, str, str, str], Parser]) -> None:
    """What is done with a scheduler's queue."""
    submit = verb("submit", "queue a script, or the stages of a pipeline, with Slurm or PBS",
                  "oars submit [-N NODES] [options] [-- scheduler's flags --] (script.py | -m module | pipeline.toml) "
                  "[script's arguments]", SUBMIT)
    submit.add_argument("-N", dest="nodes", type=count_of("nodes"), default=1, metavar="NODES",
                        help="how many nodes (default: 1)")
    submit.add_argument("--gpus-per-node", dest="gpus", type=count_of("GPUs"), metavar="G",
                        help="GPUs on each node, a rank for each")
    submit.add_argument("--time", help="the job's time limit: 90m, 12h, 1-12:00:00. Before it is over a run takes a "
                        "snapshot and is queued again, until the script ends")
    submit.add_argument("--max-restarts", type=number, default=10, metavar="K",
                        help="how often a run may be queued again (default: 10)")
    submit.add_argument("--partition", "--queue", dest="queue", help="where to queue")
    submit.add_argument("--account", help="who pays")
    submit.add_argument("--env", metavar="FILE", help="a shell file the job reads first: modules, exported variables")
    submit.add_argument("--name", help="the run folder is oars-runs/NAME (default: the script's name and the time)")
    submit.add_argument("--on", choices=("slurm", "pbs", "torque"),
                        help="the scheduler (default: the one that is here)")
    submit.add_argument("--dry-run", action="store_true", help="show the job script, and submit nothing")
    _run_options(submit)
    verb("jobs", "the submitted runs of this folder and their states", "oars jobs", JOBS)
    log = verb("log", "what a run prints", "oars log RUN [-f] [--rank R]", LOG)
    log.add_argument("-f", dest="follow", action="store_true", help="go on until the run ends")
    log.add_argument("--rank", type=number, metavar="R", help="what this rank printed")
    wait = verb("wait", "wait for a submitted run; its exit code is this command's", "oars wait RUN", WAIT)
    cancel = verb("cancel", "take a submitted run out of the queue, or end it", "oars cancel RUN", CANCEL)
    pipeline = verb("pipeline", "the stages of a pipeline and their states", "oars pipeline status [pipeline.toml]",
                    PIPELINE)
    pipeline.add_argument("what", choices=("status",))
    pipeline.add_argument("file", nargs="?", default="pipeline.toml", metavar="pipeline.toml")
    for one in (log, wait, cancel):
        one.add_argument("run", metavar="RUN", help="the run folder, or its name under oars-runs")


def _snapshot(verb: Parser) -> argparse.Action:
    return verb.add_argument(
        "--snapshot", metavar="PERIOD", help="take snapshots every 30s, 10m, 2h or 100steps; off: never "
        "(default: on SIGUSR1, before SIGTERM ends the run, before a scheduler's time limit)")


def _ranks(verb: Parser) -> None:
    verb.add_argument("-n", dest="ranks", type=count_of("ranks"), metavar="N",
                      help="how many ranks (default: all of a scheduler's job; else one per GPU; without GPUs, one per "
                      "core this process may use)")


def _hosts(verb: Parser) -> None:
    verb.add_argument("--hosts", metavar="A:4,B:4", help="hosts and how many ranks each takes (default: those of the "
                      "scheduler's job we are in, else this one)")
    verb.add_argument("--hostfile", metavar="FILE", help="the same from a file: a line for each, as in: a slots=4")
