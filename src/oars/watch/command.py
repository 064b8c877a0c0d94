"""The verbs that look at runs: their arguments, and what they print."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from oars import runfolder
from oars.arguments import Parser
from oars.watch import VERBS
from oars.watch import runs as runs_
from oars.watch.runs import TOP, Run, WatchError

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
}


def main(argv: list[str]) -> int:
    """Do what the command line says and return the exit code."""
    verb = argv[0]
    try:
        return {"runs": _runs, "show": _show, "compare": _compare, "report": _report, "scale": _scale,
                "sweep": _sweep, "evolve": _evolve, "board": _board, "predict": _predict}[verb](argv[1:])
    except WatchError as error:
        print(f"oars: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("oars: interrupted; the same command continues with what is left", file=sys.stderr)
        return 130
    except BrokenPipeError:  # oars runs | head
        sys.stderr.close()
        return 0


def _parser(verb: str, usage: str) -> Parser:
    text = VERBS[verb]
    return Parser(prog=f"oars {verb}", usage=f"oars {verb} {usage}", description=text[0].upper() + text[1:] + ".",
                  epilog="example:\n  " + _EXAMPLES[verb], allow_abbrev=False,
                  formatter_class=argparse.RawDescriptionHelpFormatter)


def _runs(argv: list[str]) -> int:
    parser = _parser("runs", "[FOLDER]")
    parser.add_argument("folder", nargs="?", default=TOP, metavar="FOLDER", help=f"where they are (default: {TOP})")
    folder = Path(parser.parse_args(argv).folder)
    from oars.watch import terminal
    from oars.watch.facts import number, verdict, when

    found, going = runs_.all_runs(folder), runs_.locked()
    if not found:
        raise WatchError(f"no runs in {folder}")
    rows = [[run.name, verdict(run, going), str(run.ranks), f"{run.last.get('step', 0):,}",
             number(run.last.get("loss")), number(run.summary.get("samples_per_s")), when(run.started), run.what]
            for run in found]
    print(terminal.table(["run", "state", "ranks", "steps", "loss", "samples/s", "started", "what"], rows))
    return 0


def _show(argv: list[str]) -> int:
    parser = _parser("show", "RUN [-o FILE] [--samples]")
    parser.add_argument("run", metavar="RUN", help=f"a run folder, or its name under {TOP}")
    _output(parser)
    parser.add_argument("--samples", action="store_true", help="of a run with --samples thin: the hardest samples, and "
                        "how often each was left out")
    args = parser.parse_args(argv)
    run = runs_.find(args.run)
    if args.samples:
        from oars.watch import samples

        samples.show(run.folder)
        return 0
    from oars.watch import terminal
    from oars.watch.curves import charts, described, slow_ranks
    from oars.watch.facts import facts

    print(run.command)
    print(", ".join(f"{name} {value}" for name, value in facts(run, runs_.locked()).items() if value))
    drawn = charts([run])
    for chart in drawn:
        print(f"\n{terminal.draw(chart)}")
    if not drawn:
        print("this run made no step")
    if run.times:
        print(f"\n{terminal.bars(run.times, slow_ranks(run.times))}")
    for event in run.events:
        print(f"event: {described(event)}")
    _save(drawn, args.o)
    return 0


def _compare(argv: list[str]) -> int:
    parser = _parser("compare", "RUN RUN … [-o FILE]")
    parser.add_argument("runs", nargs="+", metavar="RUN", help=f"run folders, or their names under {TOP}")
    _output(parser)
    args = parser.parse_args(argv)
    found = [runs_.find(name) for name in args.runs]
    from oars.watch import terminal
    from oars.watch.curves import charts
    from oars.watch.facts import facts

    drawn = charts(found)
    for chart in drawn:
        print(f"{terminal.draw(chart)}\n")
    going = runs_.locked()
    every = [facts(run, going) for run in found]
    print(terminal.table(["run", *every[0]], [[run.name, *f.values()] for run, f in zip(found, every, strict=True)]))
    _save(drawn, args.o)
    return 0


def _report(argv: list[str]) -> int:
    parser = _parser("report", "RUN … [-o FILE]")
    parser.add_argument("runs", nargs="+", metavar="RUN", help=f"run folders, or their names under {TOP}")
    parser.add_argument("-o", metavar="FILE",
                        help="where to (default: report.html in the run folder; for several runs, here)")
    args = parser.parse_args(argv)
    found: list[Run] = [runs_.find(name) for name in args.runs]
    from oars.watch.report import report

    out = Path(args.o) if args.o else Path(runfolder.REPORT) if len(found) > 1 else found[0].folder / runfolder.REPORT
    report(found, out)
    print(out)
    return 0


def _scale(argv: list[str]) -> int:
    parser = _parser("scale", "(script.py | -m module) -n N,N,… [options] [-- script's arguments]")
    parser.add_argument("-n", required=True, metavar="N,N,…", type=_counts, help="the numbers of ranks, first the base")
    parser.add_argument("--weak", action="store_true", help="every rank has a batch of the script's size (--batch "
                        "keep); default: the ranks share it")
    parser.add_argument("--repeats", type=_count, default=1, metavar="K", help="run each K times, interleaved; medians "
                        "are shown (default: 1)")
    script, args = _with_script(parser, argv)
    from oars.watch.scale import scale
    from oars.watch.start import compiled

    return scale(script, ["--tf1"] * args.tf1, args.n, args.weak, args.repeats, args.name, compiled(args.metric),
                 _path(args.o))


def _sweep(argv: list[str]) -> int:
    parser = _parser("sweep", "(script.py | -m module) --set NAME=VALUES … [options] [-- script's arguments]")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUES", help="an argument to vary: "
                        "a,b,c, or low..high with --random or --search")
    parser.add_argument("--random", type=_count, metavar="K", help="K random settings instead of all")
    parser.add_argument("--search", type=_count, metavar="K", help="K settings chosen by Optuna, each from the "
                        "results so far")
    parser.add_argument("--ranks", type=_count, default=1, metavar="N", help="ranks of each run (default: 1)")
    parser.add_argument("--parallel", type=_count, metavar="P", help="runs at a time (default: as many as have cores)")
    parser.add_argument("--best", choices=("min", "max"), help="which metric is best (default: max, of losses min)")
    script, args = _with_script(parser, argv)
    if args.random and args.search:
        raise WatchError("--random and --search: choose one")
    from oars.watch.start import compiled
    from oars.watch.sweep import Sweep, parse, sweep

    largest = args.best == "max" or (args.best is None and args.metric is not None)
    settings = parse(args.set, grid=not (args.random or args.search))
    return sweep(Sweep(script, settings, args.ranks, args.parallel, args.random, args.search, compiled(args.metric),
                       largest, ["--tf1"] * args.tf1), args.name, _path(args.o))


def _evolve(argv: list[str]) -> int:
    parser = _parser("evolve", "blueprint.toml script.py [options] [-- script's arguments]")
    parser.add_argument("blueprint", metavar="blueprint.toml", help="layers with their widths, the budget, the metric "
                        "(docs/evolve.md)")
    parser.add_argument("script", metavar="script.py", help="what is run")
    parser.add_argument("--ranks", type=_count, default=1, metavar="N", help="ranks of each run (default: 1)")
    parser.add_argument("--name", help=f"the search is {TOP}/NAME (default: the same for the same command, so that it "
                        "goes on where it was interrupted)")
    at = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:at])
    from oars.watch.blueprint import evolve

    return evolve(Path(args.blueprint), [args.script, *argv[at + 1:]], args.ranks, args.name)


def _predict(argv: list[str]) -> int:
    parser = _parser("predict", "(RUN … | workload.toml) --machine NAME|FILE -n N [options]")
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
    args = parser.parse_args(argv)
    from oars.watch.predict import predict
    from oars.watch.simulate import parse_sync

    syncs = [parse_sync(word) for word in args.sync.split(",")]
    return predict(args.what, args.machine, args.n, args.weak, list(dict.fromkeys(syncs)), args.faster, _path(args.o))


def _board(argv: list[str]) -> int:
    parser = _parser("board", "[RUN …] [--port P]")
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"run folders, or their names (default: all of {TOP})")
    parser.add_argument("--port", type=_count, help="where to listen (default: the first free one from 6006 on)")
    args = parser.parse_args(argv)
    from oars.watch.tensorboard import board

    return board([runs_.find(name) for name in args.runs], Path(TOP), args.port)


def _with_script(parser: Parser, argv: list[str]) -> tuple[list[str], argparse.Namespace]:
    """The words that start the script (its own arguments follow ``--``), and our options, wherever they stand."""
    parser.add_argument("script", nargs="?", metavar="script.py", help="the script to run; -m MODULE for a module")
    parser.add_argument("-m", metavar="MODULE", help=argparse.SUPPRESS)
    parser.add_argument("--name", help=f"the series is {TOP}/NAME (default: the same for the same command, so that it "
                        "continues where it was interrupted)")
    parser.add_argument("--tf1", action="store_true", help="the script was written for TensorFlow 1")
    parser.add_argument("--metric", metavar="REGEX", help="the result to show: its last match in the script's output")
    _output(parser)
    at = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:at])
    if (args.script is None) == (args.m is None):
        raise WatchError(f"{parser.prog.split()[1]} needs a script, or -m and a module; see {parser.prog} --help")
    return [*(["-m", args.m] if args.m else [args.script]), *argv[at + 1:]], args


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


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def _output(parser: Parser) -> None:
    parser.add_argument("-o", metavar="FILE", help="also write the curves to FILE: .svg, .png or .pdf")


def _save(charts: list, path: str | None) -> None:
    if path is None:
        return
    if not charts:
        raise WatchError(f"nothing to draw in {path}: no steps")
    from oars.watch.picture import save

    save(charts, Path(path))
    print(path)
