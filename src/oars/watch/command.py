"""The verbs that look at runs: their arguments, and what they print."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from oars.cli import WATCH
from oars.watch import runs as runs_
from oars.watch.runs import TOP, Run, WatchError

_EXAMPLES = {
    "runs": "oars runs\n  oars runs elsewhere/oars-runs",
    "show": "oars show train-20260102-120000\n  oars show oars-runs/big -o curves.png",
    "compare": "oars compare small big -o both.svg",
    "report": "oars report train-20260102-120000     # writes report.html into the run folder",
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"oars: {message}; see {self.prog} --help\n")


def main(argv: list[str]) -> int:
    """Do what the command line says and return the exit code."""
    verb = argv[0]
    try:
        return {"runs": _runs, "show": _show, "compare": _compare, "report": _report}[verb](argv[1:])
    except WatchError as error:
        print(f"oars: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # oars runs | head
        sys.stderr.close()
        return 0


def _parser(verb: str, usage: str) -> Parser:
    text = WATCH[verb]
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
    parser = _parser("show", "RUN [-o FILE]")
    parser.add_argument("run", metavar="RUN", help=f"a run folder, or its name under {TOP}")
    _output(parser)
    args = parser.parse_args(argv)
    run = runs_.find(args.run)
    from oars.watch import terminal
    from oars.watch.curves import charts, slow_ranks, told
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
        print(f"event: {told(event)}")
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

    out = Path(args.o) if args.o else Path("report.html") if len(found) > 1 else found[0].folder / "report.html"
    report(found, out)
    print(out)
    return 0


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
