"""The arguments of the verbs that look at runs."""

from __future__ import annotations

import argparse

from oars.arguments import Parser
from oars.runfolder import RUNS as TOP
from oars.watch import VERBS

_USAGE = {
    "runs": "[FOLDER]",
    "show": "RUN [-o FILE] [--samples]",
    "compare": "RUN RUN … [-o FILE]",
    "report": "RUN … [-o FILE]",
    "explain": "RUN",
    "scale": "(script.py | -m module) -n N,N,… [options] [-- script's arguments]",
    "sweep": "(script.py | -m module) --set NAME=VALUES … [options] [-- script's arguments]",
    "evolve": "blueprint.toml script.py [options] [-- script's arguments]",
    "predict": "(RUN … | workload.toml) --machine NAME|FILE -n N [options]",
    "board": "[RUN …] [--port P]",
}
_EXAMPLES = {
    "board": "oars board\n  oars board small big --port 7007",
    "scale": "oars scale train.py -n 1,2,4 -- --epochs 3\n  oars scale train.py -n 1,2 --weak --repeats 3",
    "sweep": "oars sweep train.py --set lr=0.5,0.1,0.01 --set seed=1,2\n"
             "  oars sweep train.py --set lr=0.001..1 --random 20 --metric 'accuracy ([\\d.]+)' -- --epochs 3",
    "evolve": "oars evolve blueprint.toml train.py -- --epochs 10",
    "predict": "oars predict one two --machine machine.toml -n 64\n"
               "  oars predict one two --machine blue-waters -n 1,64,4096 --weak --sync allreduce,gossip,server:4",
    "runs": "oars runs\n  oars runs elsewhere/oars-runs",
    "show": "oars show train-20260102-120000\n  oars show oars-runs/big -o curves.png",
    "compare": "oars compare small big -o both.svg",
    "report": "oars report train-20260102-120000     # writes report.html into the run folder",
    "explain": "oars explain train-20260102-120000",
}


def parser(verb: str) -> Parser:
    """How one of the verbs reads its arguments."""
    text = VERBS[verb]
    made = Parser(prog=f"oars {verb}", usage=f"oars {verb} {_USAGE[verb]}", allow_abbrev=False,
                  description=text[0].upper() + text[1:] + ".", epilog="example:\n  " + _EXAMPLES[verb],
                  formatter_class=argparse.RawDescriptionHelpFormatter)
    _ARGUMENTS[verb](made)
    return made


def _runs(parser: Parser) -> None:
    parser.add_argument("folder", nargs="?", default=TOP, metavar="FOLDER", help=f"where they are (default: {TOP})")


def _show(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help=f"a run folder, or its name under {TOP}")
    _output(parser)
    parser.add_argument("--samples", action="store_true", help="of a run with --samples thin: the hardest samples, and "
                        "how often each was left out")


def _compare(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help=f"run folders, or their names under {TOP}")
    _output(parser)


def _report(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help=f"run folders, or their names under {TOP}")
    parser.add_argument("-o", metavar="FILE",
                        help="where to (default: report.html in the run folder; for several runs, here)")


def _explain(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help=f"a run folder, or its name under {TOP}")


def _scale(parser: Parser) -> None:
    parser.add_argument("-n", required=True, metavar="N,N,…", type=_counts, help="the numbers of ranks, first the base")
    parser.add_argument("--weak", action="store_true", help="every rank has a batch of the script's size (--batch "
                        "keep); default: the ranks share it")
    parser.add_argument("--repeats", type=_count, default=1, metavar="K", help="run each K times, interleaved; medians "
                        "are shown (default: 1)")
    _script(parser)


def _sweep(parser: Parser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUES", help="an argument to vary: "
                        "a,b,c, or low..high with --random or --search")
    parser.add_argument("--random", type=_count, metavar="K", help="K random settings instead of all")
    parser.add_argument("--search", type=_count, metavar="K", help="K settings chosen by Optuna, each from the "
                        "results so far")
    parser.add_argument("--ranks", type=_count, default=1, metavar="N", help="ranks of each run (default: 1)")
    parser.add_argument("--parallel", type=_count, metavar="P", help="runs at a time (default: as many as have cores)")
    parser.add_argument("--best", choices=("min", "max"), help="which metric is best (default: max, of losses min)")
    _script(parser)


def _evolve(parser: Parser) -> None:
    parser.add_argument("blueprint", metavar="blueprint.toml", help="layers with their widths, the budget, the metric "
                        "(docs/evolve.md)")
    parser.add_argument("script", metavar="script.py", help="what is run")
    parser.add_argument("--ranks", type=_count, default=1, metavar="N", help="ranks of each run (default: 1)")
    parser.add_argument("--name", help=f"the search is {TOP}/NAME (default: the same for the same command, so that it "
                        "goes on where it was interrupted)")


def _predict(parser: Parser) -> None:
    parser.add_argument("what", nargs="+", metavar="RUN", help=f"short runs, as folders or names under {TOP}: one, and "
                        "others with another batch or on two ranks; or a workload file")
    parser.add_argument("--machine", required=True, metavar="NAME|FILE", help="a machine that is shipped (blue-waters, "
                        "laptop, minotauro), or a file, as oars doctor --net writes one")
    parser.add_argument("-n", required=True, metavar="N", type=_sizes, help="how many ranks: 1,8,64 for these, 64 for "
                        "1, 2, 4 and so on up to it")
    parser.add_argument("--weak", action="store_true", help="every rank keeps its batch; default: the ranks share the "
                        "first run's")
    parser.add_argument("--sync", default="allreduce", metavar="HOW,…", help="how ranks exchange: allreduce (default), "
                        "ring, tree, server:K, gossip, local:H")
    parser.add_argument("--faster", type=_factor, default=1.0, metavar="X", help="a rank there computes X times as "
                        "fast as in the runs (default: 1)")
    parser.add_argument("-o", metavar="FILE", help="also write it to FILE: .html, or the curves as .svg, .png or .pdf")


def _board(parser: Parser) -> None:
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"run folders, or their names (default: all of {TOP})")
    parser.add_argument("--port", type=_count, help="where to listen (default: the first free one from 6006 on)")


def _script(parser: Parser) -> None:
    parser.add_argument("script", nargs="?", metavar="script.py", help="the script to run; -m MODULE for a module")
    parser.add_argument("-m", metavar="MODULE", help=argparse.SUPPRESS)
    parser.add_argument("--name", help=f"the series is {TOP}/NAME (default: the same for the same command, so that it "
                        "continues where it was interrupted)")
    parser.add_argument("--tf1", action="store_true", help="the script was written for TensorFlow 1")
    parser.add_argument("--metric", metavar="REGEX", help="the result to show: its last match in the script's output")
    _output(parser)


def _output(parser: Parser) -> None:
    parser.add_argument("-o", metavar="FILE", help="also write the curves to FILE: .svg, .png or .pdf")


_ARGUMENTS = {"runs": _runs, "show": _show, "compare": _compare, "report": _report, "explain": _explain,
              "scale": _scale, "sweep": _sweep, "evolve": _evolve, "predict": _predict, "board": _board}


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number: 1 or more")
    return int(text)


def _counts(text: str) -> list[int]:
    counts = [_count(part) for part in text.split(",")]
    if len(set(counts)) != len(counts):
        raise argparse.ArgumentTypeError(f"{text} names a number twice")
    return counts


def _sizes(text: str) -> list[int]:
    counts = _counts(text)
    if max(counts) > 100_000:
        raise argparse.ArgumentTypeError(f"{max(counts)} ranks are more than the 100000 that are predicted")
    if len(counts) > 1 or counts == [1]:
        return sorted(counts)
    return [*(2**k for k in range((counts[0] - 1).bit_length())), counts[0]]


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no factor: a number above 0")
    return value
