"""``oars sweep``: an unmodified script with many settings of its command-line arguments, and which did best.

``--set lr=0.1,0.01`` names values, ``--set lr=0.001..1`` a range (for ``--random`` and ``--search``). All values of all
settings make a grid; ``--random K`` draws K settings; ``--search K`` lets Optuna choose each by what the others gave.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from re import Pattern
from typing import Any

from oars import runfolder
from oars.watch import svg, terminal
from oars.watch.chart import Chart, Series
from oars.watch.curves import loss_chart
from oars.watch.facts import number, verdict
from oars.watch.report import html_table, page, write
from oars.watch.runs import WatchError
from oars.watch.start import Trial, metric_name, metric_of, metrics_of, run_all, series_name


@dataclass
class Setting:
    """One argument that is varied: its values, or a range."""

    name: str
    values: list[str]
    low: float = 0.0
    high: float = 0.0

    @property
    def log(self) -> bool:
        """A range over two decades or more is drawn from by the logarithm."""
        return self.low > 0 and self.high / self.low >= 100

    @property
    def whole(self) -> bool:
        return self.low == int(self.low) and self.high == int(self.high)

    def draw(self, rng: random.Random) -> str:
        """A value at random."""
        if self.values:
            return rng.choice(self.values)
        if self.log:
            value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = rng.uniform(self.low, self.high)
        return str(round(value)) if self.whole and not self.log else f"{value:.4g}"


def parse(texts: list[str], grid: bool) -> list[Setting]:
    """``name=a,b,c`` and ``name=low..high``."""
    settings = []
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not name or not values:
            raise WatchError(f"--set {text}: write name=value,value,… or name=low..high")
        low, dots, high = values.partition("..")
        if not dots:
            settings.append(Setting(name, values.split(",")))
            continue
        try:
            setting = Setting(name, [], float(low), float(high))
        except ValueError:
            raise WatchError(f"--set {text}: a range is low..high, of numbers") from None
        if setting.low >= setting.high:
            raise WatchError(f"--set {text}: {low} is not below {high}")
        if grid:
            raise WatchError(f"--set {text}: a range is for --random or --search; a grid needs values")
        settings.append(setting)
    if not settings:
        raise WatchError("nothing to vary: --set name=value,value,…")
    if len({s.name for s in settings}) != len(settings):
        raise WatchError("--set names an argument twice: give all its values in one")
    return settings


@dataclass
class Sweep:
    """What is to be tried."""

    script: list[str]
    settings: list[Setting]
    ranks: int
    parallel: int | None
    random: int | None
    search: int | None
    pattern: Pattern | None
    largest: bool  # the best metric is the largest
    options: list[str]  # of oars run

    def trial(self, folder: Path, number: int, chosen: dict[str, str]) -> Trial:
        words = [word for name, value in chosen.items() for word in (name if name[0] == "-" else f"--{name}", value)]
        return Trial(f"{folder.name}-t{number:03}", self.ranks, [*self.script, *words], chosen, self.options)


def sweep(what: Sweep, name: str | None, out: Path | None) -> int:
    """Run all trials, print the picture and the ranked table, write the report; 1 if none came to a result."""
    spec = {"script": what.script, "settings": [vars(s) for s in what.settings], "ranks": what.ranks,
            "random": what.random, "search": what.search, "metric": what.pattern.pattern if what.pattern else None,
            "options": what.options}
    on_result: Callable[[Trial], None] = _nobody
    if what.search is not None:
        study = _study(what)  # complains before anything is written
    folder = series_name("sweep", name, what.script, spec)
    if what.search is not None:
        trials, on_result = study(folder)
    else:
        trials = (what.trial(folder, n, chosen) for n, chosen in enumerate(_choices(what), 1))
    total = what.search or what.random or math.prod(len(s.values) for s in what.settings)
    ended = 0

    def say(trial: Trial) -> None:
        nonlocal ended
        ended += 1
        on_result(trial)
        assert trial.run is not None
        value, why = metric_of(trial.run, what.pattern)
        state = verdict(trial.run, set())
        print(f"oars: {ended} of {total}: {_words(trial)}: {why or number(value)}, {state}", flush=True)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    slots = max(1, cores // what.ranks)
    parallel = min(what.parallel or slots, total)
    if parallel > slots:
        print(f"oars: {parallel} runs of {what.ranks} at a time share {cores} cores: each is slower for it")
    done = run_all(trials, parallel, lambda trial: max(what.ranks, cores // parallel), say)
    return _tell(what, done, folder, out)


def _nobody(trial: Trial) -> None:
    pass


def _choices(what: Sweep) -> Iterator[dict[str, str]]:
    names = [s.name for s in what.settings]
    if what.random is None:
        for values in itertools.product(*(s.values for s in what.settings)):
            yield dict(zip(names, values, strict=True))
        return
    rng = random.Random(0)  # the same draws when the sweep is resumed
    for _ in range(what.random):
        yield {s.name: s.draw(rng) for s in what.settings}


def _study(what: Sweep) -> Callable[[Path], tuple[Iterator[Trial], Callable[[Trial], None]]]:
    """Optuna's, kept in a journal in the sweep's folder."""
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        raise WatchError("--search needs Optuna: pip install 'manyoars[search]'; --random does without") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def begin(folder: Path) -> tuple[Iterator[Trial], Callable[[Trial], None]]:
        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(folder / runfolder.SEARCH))), study_name="sweep",
            sampler=optuna.samplers.TPESampler(seed=0), load_if_exists=True,
            direction="maximize" if what.largest else "minimize")
        asked: dict[str, Any] = {}

        def trials() -> Iterator[Trial]:
            known = study.get_trials(deepcopy=False)
            for old in known:  # those of an earlier start: their folders know how they ended
                trial = what.trial(folder, old.number + 1, old.user_attrs["chosen"])
                if not old.state.is_finished():
                    asked[trial.name] = optuna.trial.Trial(study, old._trial_id)
                yield trial
            for _ in range(len(known), what.search or 0):
                new = study.ask()
                chosen = {s.name: _suggested(new, s) for s in what.settings}
                new.set_user_attr("chosen", chosen)
                trial = what.trial(folder, new.number + 1, chosen)
                asked[trial.name] = new
                yield trial

        def on_result(trial: Trial) -> None:
            if trial.name in asked and trial.run is not None:
                value, _ = metric_of(trial.run, what.pattern)
                good = value is not None and math.isfinite(value) and trial.run.end.get("code") == 0
                study.tell(asked.pop(trial.name), value if good else None,
                           state=None if good else optuna.trial.TrialState.FAIL)

        return trials(), on_result

    return begin


def _suggested(trial: Any, setting: Setting) -> str:
    if setting.values:
        return str(trial.suggest_categorical(setting.name, setting.values))
    if setting.whole and not setting.log:
        return str(trial.suggest_int(setting.name, int(setting.low), int(setting.high)))
    return f"{trial.suggest_float(setting.name, setting.low, setting.high, log=setting.log):.4g}"


def _words(trial: Trial) -> str:
    return " ".join(f"{name}={value}" for name, value in trial.settings.items())


def _charts(what: Sweep, trials: list[Trial]) -> list[Chart]:
    """The losses of all trials, and their metrics, where the script tells them more than once."""
    runs = [t.run for t in trials if t.run is not None]
    if not runs:
        return []
    names = [_words(t) for t in trials]
    drawn = [loss_chart(runs, names)]
    if what.pattern is not None:
        lines = [Series(name, *metrics_of(run, what.pattern), points=True)
                 for run, name in zip(runs, names, strict=True)]
        if any(len(line.x) > 1 for line in lines):
            where = "step" if what.pattern.groups > 1 else "time it was told"
            name = metric_name(what.pattern)
            drawn.append(Chart(name.capitalize(), where, name, lines))
    return [chart for chart in drawn if chart.drawable()]


def _tell(what: Sweep, done: list[Trial], folder: Path, out: Path | None) -> int:
    found = []
    for trial in done:
        assert trial.run is not None
        value, why = metric_of(trial.run, what.pattern)
        good = value is not None and math.isfinite(value) and trial.run.state(set()).startswith(("done", "ended"))
        found.append((not good, (-value if what.largest else value) if good and value is not None else 0.0, trial,
                      why or number(value)))
    found.sort(key=lambda each: each[:2])
    name = metric_name(what.pattern)
    head = ["", *(s.name for s in what.settings), name, "state", "steps", "samples/s", "run"]
    rows = [["" if bad else str(place), *trial.settings.values(), shown, verdict(run, set()),
             f"{run.last.get('step', 0):,}", number(run.rate), run.name]
            for place, (bad, _, trial, shown) in enumerate(found, 1) if (run := trial.run) is not None]
    ranked = [trial for _, _, trial, _ in found if trial.run is not None and trial.run.steps.step]
    drawn = _charts(what, ranked)
    for chart in drawn:
        print("\n" + terminal.draw(chart))
    print("\n" + terminal.table(head, rows))
    write(folder / runfolder.REPORT, page(folder.name, [
        f"<p>{len(done)} runs; {'the largest' if what.largest else 'the smallest'} {name} is the best.</p>",
        *(svg.draw(chart) for chart in drawn), html_table(head, rows)]))
    if out is not None and drawn:
        from oars.watch.picture import save

        save(drawn, out)
        print(out)
    print(folder / runfolder.REPORT)
    return 1 if all(bad for bad, *_ in found) else 0
