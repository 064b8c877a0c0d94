"""The verbs that look at runs: what they print."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from oars import runfolder
from oars.watch import runs as runs_
from oars.watch import verbs
from oars.watch.runs import TOP, Run, WatchError


def main(argv: list[str]) -> int:
    """Do what the command line says and return the exit code."""
    verb = argv[0]
    try:
        return {"runs": _runs, "show": _show, "compare": _compare, "report": _report, "explain": _explain,
                "scale": _scale, "sweep": _sweep, "evolve": _evolve, "board": _board,
                "predict": _predict}[verb](argv[1:])
    except WatchError as error:
        print(f"oars: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("oars: interrupted; the same command continues with what is left", file=sys.stderr)
        return 130
    except BrokenPipeError:  # oars runs | head
        sys.stderr.close()
        return 0


def _runs(argv: list[str]) -> int:
    folder = Path(verbs.parser("runs").parse_args(argv).folder)
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
    args = verbs.parser("show").parse_args(argv)
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
    args = verbs.parser("compare").parse_args(argv)
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
    args = verbs.parser("report").parse_args(argv)
    found: list[Run] = [runs_.find(name) for name in args.runs]
    from oars.watch.report import report

    out = Path(args.o) if args.o else Path(runfolder.REPORT) if len(found) > 1 else found[0].folder / runfolder.REPORT
    report(found, out)
    print(out)
    return 0


def _explain(argv: list[str]) -> int:
    args = verbs.parser("explain").parse_args(argv)
    run = runs_.find(args.run)
    from oars.watch import explain

    explain.show(run)
    return 0


def _scale(argv: list[str]) -> int:
    script, args = _with_script("scale", argv)
    from oars.watch.scale import scale
    from oars.watch.start import compiled

    return scale(script, ["--tf1"] * args.tf1, args.n, args.weak, args.repeats, args.name, compiled(args.metric),
                 _path(args.o))


def _sweep(argv: list[str]) -> int:
    script, args = _with_script("sweep", argv)
    if args.random and args.search:
        raise WatchError("--random and --search: choose one")
    from oars.watch.start import compiled
    from oars.watch.sweep import Sweep, parse, sweep

    largest = args.best == "max" or (args.best is None and args.metric is not None)
    settings = parse(args.set, grid=not (args.random or args.search))
    return sweep(Sweep(script, settings, args.ranks, args.parallel, args.random, args.search, compiled(args.metric),
                       largest, ["--tf1"] * args.tf1), args.name, _path(args.o))


def _evolve(argv: list[str]) -> int:
    at = argv.index("--") if "--" in argv else len(argv)
    args = verbs.parser("evolve").parse_args(argv[:at])
    from oars.watch.blueprint import evolve

    return evolve(Path(args.blueprint), [args.script, *argv[at + 1:]], args.ranks, args.name)


def _predict(argv: list[str]) -> int:
    args = verbs.parser("predict").parse_args(argv)
    from oars.watch.predict import predict
    from oars.watch.simulate import parse_sync

    syncs = [parse_sync(word) for word in args.sync.split(",")]
    return predict(args.what, args.machine, args.n, args.weak, list(dict.fromkeys(syncs)), args.faster, _path(args.o))


def _board(argv: list[str]) -> int:
    args = verbs.parser("board").parse_args(argv)
    from oars.watch.tensorboard import board

    return board([runs_.find(name) for name in args.runs], Path(TOP), args.port)


def _with_script(verb: str, argv: list[str]) -> tuple[list[str], argparse.Namespace]:
    """The words that start the script (its own arguments follow ``--``), and our options, wherever they stand."""
    parser, at = verbs.parser(verb), argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:at])
    if (args.script is None) == (args.m is None):
        raise WatchError(f"{verb} needs a script, or -m and a module; see {parser.prog} --help")
    return [*(["-m", args.m] if args.m else [args.script]), *argv[at + 1:]], args


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def _save(charts: list, path: str | None) -> None:
    if path is None:
        return
    if not charts:
        raise WatchError(f"nothing to draw in {path}: no steps")
    from oars.watch.picture import save

    save(charts, Path(path))
    print(path)
