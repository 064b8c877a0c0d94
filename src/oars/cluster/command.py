"""The verbs that have to do with a scheduler's queue: their arguments, and what they call."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from oars.arguments import Parser, count_of, number

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
VERBS = ("jobs", "log", "wait", "cancel", "pipeline")


def add_verbs(verb: Callable[[str, str, str, str], Parser], add_run_options: Callable[[Parser], Any]) -> None:
    """The verbs, with their arguments."""
    submit = verb("submit", "queue a script, or the stages of a pipeline, with Slurm or PBS",
                  "oars submit [-N NODES] [options] [-- scheduler's flags --] (script.py | -m module | pipeline.toml) "
                  "[script's arguments]", SUBMIT)
    submit.add_argument("-N", dest="nodes", type=count_of("nodes"), default=1, metavar="NODES",
                        help="how many nodes (default: 1)")
    submit.add_argument("--gpus-per-node", dest="gpus", type=count_of("GPUs"), metavar="G",
                        help="GPUs on each node, a rank for each")
    submit.add_argument("--time", help="the job's time limit: 90m, 12h, 1-12:00:00; 30 is minutes, as in sbatch. "
                        "Before it is over a run takes a snapshot and is queued again, until the script ends")
    submit.add_argument("--max-restarts", type=number, default=10, metavar="K",
                        help="how often a run may be queued again (default: 10)")
    submit.add_argument("--partition", "--queue", dest="queue", help="the queue or partition")
    submit.add_argument("--account", help="the account that pays")
    submit.add_argument("--env", metavar="FILE", help="a shell file the job reads first: modules, exported variables")
    submit.add_argument("--name", help="the run folder is oars-runs/NAME (default: the script's name and the time)")
    submit.add_argument("--on", choices=("slurm", "pbs", "torque"),
                        help="the scheduler (default: the one found here)")
    submit.add_argument("--dry-run", action="store_true", help="show the job script, and submit nothing")
    add_run_options(submit)
    verb("jobs", "the submitted runs of this folder and their states", "oars jobs", JOBS)
    log = verb("log", "what a run prints", "oars log RUN [-f] [--rank R]", LOG)
    log.add_argument("-f", dest="follow", action="store_true", help="follow until the run ends")
    log.add_argument("--rank", type=number, metavar="R", help="what this rank printed")
    wait = verb("wait", "wait for a submitted run; its exit code is this command's", "oars wait RUN", WAIT)
    cancel = verb("cancel", "take a submitted run out of the queue, or end it", "oars cancel RUN", CANCEL)
    pipeline = verb("pipeline", "the stages of a pipeline and their states", "oars pipeline status [pipeline.toml]",
                    PIPELINE)
    pipeline.add_argument("what", choices=("status",))
    pipeline.add_argument("file", nargs="?", default="pipeline.toml", metavar="pipeline.toml")
    for one in (log, wait, cancel):
        one.add_argument("run", metavar="RUN", help="the run folder, or its name under oars-runs")


def main(args: argparse.Namespace) -> int:
    """Do what one of these verbs says, but for submit, which has to know how runs are started."""
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
