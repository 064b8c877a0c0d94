"""What watchers make of run folders: real runs that ended well, diverged, failed or were killed, and damaged ones."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from running import environment, said

from oars.watch.chart import Chart, Series, smoothed, thinned, ticks
from oars.watch.runs import PHASES, Run

TRAIN = Path(__file__).parent / "train.py"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with four real runs: ``good`` on two ranks, ``diverged``, ``failed`` and ``killed``."""
    folder = tmp_path_factory.mktemp("watch")
    shutil.copy(TRAIN, folder)
    said(folder, "run", "--quiet", "-n", "2", "--name", "good", "train.py", "0.05", "40", "0.03")
    one = "run", "--quiet", "-n", "1", "--name"
    with ThreadPoolExecutor() as pool:  # each has a core
        diverged = pool.submit(said, folder, *one, "diverged", "train.py", "1e20", "30", "0")
        said(folder, *one, "failed", "train.py", "0.05", "6", "0", code=1)
        diverged.result()
    killed = subprocess.Popen([sys.executable, "-m", "oars", "run", "-n", "1", "--name", "killed", "train.py", "0.05",
                               "1000000", "0.01"], cwd=folder, env=environment(), stdout=subprocess.DEVNULL)
    metrics, until = folder / "oars-runs/killed/metrics.jsonl", time.time() + 60
    while not metrics.exists() and time.time() < until:
        time.sleep(0.05)
    assert "running" in re.search(r"^killed .*", said(folder, "runs"), re.M)[0]
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    return folder


def test_a_run_is_recorded_without_the_scripts_help(place):
    run = Run(place / "oars-runs/good")
    assert run.steps.step == list(range(1, 41)) and all(map(math.isfinite, run.steps.loss))
    assert run.steps.lr == [0.05] * 40  # the first group's; the line holds both
    first = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[0])
    assert first["lr"] == [0.05, 0.001] and first["grad_norm"] > 0
    assert [t.rank for t in run.times] == [0, 1]
    for times in run.times:
        assert set(times.seconds) == set(PHASES) and times.steps == 40 and times.memory > 10e6
        assert 39 * 0.03 <= times.seconds["other"] <= sum(times.seconds.values())  # where the script slept
        assert all(times.seconds[phase] > 0 for phase in ("data", "forward", "backward", "exchange", "update"))
        assert sum(times.seconds.values()) == pytest.approx(run.seconds, rel=0.5)


def test_the_gradients_norm_is_that_of_the_global_batch(place):
    import torch

    torch.manual_seed(1)
    x, y = torch.randn(64, 3), torch.randn(64, 1)
    model = torch.nn.Linear(3, 1)
    torch.nn.functional.mse_loss(model(x[:8]), y[:8]).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    assert Run(place / "oars-runs/good").steps.grad_norm[0] == pytest.approx(norm, rel=1e-4)


def test_runs_are_listed_with_how_they_ended(place):
    listed = {line.split()[0]: line for line in said(place, "runs").splitlines()}
    for name, state in (("good", "done "), ("diverged", "done, diverged "), ("failed", "failed (1) "),
                        ("killed", "killed ")):
        assert f"  {state}" in listed[name], listed[name]
    assert "NaN" in listed["diverged"] or "inf" in listed["diverged"]
    assert listed["good"].endswith("train.py 0.05 40 0.03")


def test_show_draws_curves_and_says_where_a_line_diverged(place):
    shown = said(place, "show", "good")
    assert shown.startswith("oars run -n 2 train.py 0.05 40 0.03\nstate done, ranks 2, steps 40, ")
    for title in ("Loss", "Throughput: samples/s", "Learning rate", "Norm of the gradients", "where the time went"):
        assert f"\n{title}" in shown
    assert len(re.findall("[\u2801-\u28ff]", shown)) > 200  # Braille
    assert max(map(len, shown.splitlines()[2:])) <= 112
    assert "diverged is not finite after step" in said(place, "show", "diverged")


def test_compare_draws_runs_over_each_other(place):
    shown = said(place, "compare", "good", "failed", "-o", "both.svg")
    assert "━━ good  ━━ failed" in shown and re.search(r"^failed +failed \(1\) +1 +5 ", shown, re.M)
    tree = ElementTree.parse(place / "both.svg")
    texts = [e.text for e in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Loss", "step", "samples/s", "good", "failed"} <= set(texts)
    said(place, "compare", "good", "diverged", "-o", "both.png")
    assert (place / "both.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("names", [["good"], ["diverged"], ["failed"], ["killed"], ["good", "diverged", "killed"]])
def test_a_report_holds_all_it_needs(place, names):
    out = said(place, "report", *names).strip()
    page = (place / out).read_text()
    assert out == ("report.html" if len(names) > 1 else f"oars-runs/{names[0]}/report.html")
    assert not re.search(r"(?:src|href|url)\s*[=(]\s*[\"']?(?!data:|#)[a-z/]", page)  # nothing from elsewhere
    assert "oars run -n" in page and "train.py" in page and page.count("<svg") >= 3
    for name in names:
        assert name in page
    ElementTree.fromstring("<x>" + "".join(re.findall(r"<svg.*?</svg>", page)) + "</x>")  # well-formed


def test_a_half_written_line_and_files_from_elsewhere_cost_only_themselves(place, tmp_path):
    folder = tmp_path / "oars-runs/torn"
    shutil.copytree(place / "oars-runs/good", folder)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('[1]\nnot json\n{"step": "x"}\n{"step": 41, "loss": 0.')
    with open(folder / "times-1.jsonl", "a") as file:
        file.write('{"step": 41, "da')
    (folder / "events.jsonl").write_text('{"event": "lost", "time": 1, "ranks": [1], "step": 3, "left": 1}\n{"time"')
    run = Run(folder)
    assert run.steps.step[-1] == 40 and len(run.times) == 2 and len(run.events) == 1
    assert "event: step 3: rank 1 died, 1 go on" in said(tmp_path, "show", "torn")
    old = tmp_path / "oars-runs/old"  # as the first version left it, and one that came to nothing
    old.mkdir()
    (old / "run.json").write_text('{"script": "a.py", "args": [], "module": false, "ranks": 3}')
    (old / "metrics.jsonl").write_text('{"step": 1, "loss": null, "samples_per_s": null, "time": 5}\n')
    (tmp_path / "oars-runs/empty").mkdir()
    (tmp_path / "oars-runs/empty/run.json").write_text("{}")
    (tmp_path / "oars-runs/bad").mkdir()
    (tmp_path / "oars-runs/bad/run.json").write_text("{")
    assert [line.split()[0] for line in said(tmp_path, "runs").splitlines()] == ["run", "old", "torn"]
    for verb in ("show", "report"):
        said(tmp_path, verb, "old")


def test_the_parts_of_a_resumed_runs_times_are_added_up(place, tmp_path):
    folder = tmp_path / "again"
    shutil.copytree(place / "oars-runs/good", folder)
    before = Run(folder).times[0]
    lines = (folder / "times-0.jsonl").read_text()
    (folder / "times-0.jsonl").write_text(lines + lines)
    assert Run(folder).times[0].seconds["data"] == pytest.approx(2 * before.seconds["data"])


def test_a_thousand_runs_are_listed_within_a_second(place, tmp_path):
    for number in range(1000):
        folder = tmp_path / f"oars-runs/run{number}"
        folder.mkdir(parents=True)
        for name in ("run.json", "metrics.jsonl", "summary.json", "end.json"):
            os.link(place / "oars-runs/good" / name, folder / name)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert said(tmp_path, "runs").count("\n") == 1001
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time: what it takes where nothing else runs.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_every_verb_has_an_example_in_its_help(tmp_path):
    from oars.watch import VERBS

    shown = said(tmp_path, "--help")
    for verb, text in VERBS.items():
        assert re.search(rf"^ +{verb} +{text[:30]}", shown, re.M)
        assert f"\n  oars {verb}" in said(tmp_path, verb, "--help").partition("example:")[2]


@pytest.mark.parametrize(("args", "says"), [
    (["show", "nosuch"], "no such run: neither nosuch nor oars-runs/nosuch is a run folder; oars runs lists them"),
    (["show", "good", "-o", "a.gif"], "-o a.gif: write .svg, .png or .pdf"),
    (["report", "good", "-o", "no/such/place.html"], "cannot write no/such/place.html: No such file or directory"),
    (["compare"], "the following arguments are required: RUN; see oars compare --help"),
    (["runs", "nowhere"], "cannot list nowhere: No such file or directory; runs are where oars run was started"),
])
def test_bad_input_is_one_line(place, args, says):
    assert said(place, *args, code=2) == f"oars: {says}\n"


def test_ticks_are_round_and_few():
    assert ticks(0, 10, False) == [0, 2, 4, 6, 8, 10]
    assert ticks(1e-4, 1e3, True) == pytest.approx([1e-4, 1e-2, 1, 100])
    assert ticks(2.1, 7.9, True) == [5]
    for low, high in ((0.1, 0.1001), (-5, 1e9), (1e-12, 2e-12)):
        assert 2 <= len(ticks(low, high, False)) <= 8


def test_thinning_loses_no_spike_and_smoothing_no_level():
    ys = [1.0] * 10_000
    ys[4321] = 50.0
    xs, few = thinned([float(i) for i in range(10_000)], ys)
    assert len(few) <= 602 and max(few) == 50 and xs[few.index(50)] == 4321
    assert smoothed([3.0] * 500, False) == pytest.approx([3.0] * 500)
    falling = [0.97**i for i in range(500)]
    assert smoothed(falling, True) == pytest.approx(falling)  # no lag on a logarithmic axis
    assert smoothed([0.0, 1.0] * 200, True) == pytest.approx([0.0, 1.0] * 200)


def test_a_line_that_is_never_finite_is_no_line():
    chart = Chart("t", "x", "y", [Series("a", [1, 2], [math.nan, math.inf])])
    assert not chart.drawable() and chart.series[0].diverged_at() is None


def test_tensorboard_reads_a_runs_events_and_a_resumed_run_begins_them_anew(place, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from oars.watch.tb import update

    def scalars(folder: Path, tag: str = "train/loss") -> list[tuple[int, float]]:
        events = EventAccumulator(str(folder / "tb"), {"scalars": 0})
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars(tag)]

    run = Run(place / "oars-runs/good")
    assert scalars(run.folder) == [(step, pytest.approx(loss)) for step, loss in
                                   zip(run.steps.step, run.steps.loss, strict=True)]
    assert scalars(run.folder, "train/learning_rate")[-1] == (40, pytest.approx(0.05))
    folder = tmp_path / "grows"
    folder.mkdir()
    lines = [json.dumps({"step": n, "loss": float(n), "time": 5.0 + n}) + "\n" for n in range(1, 5000)]
    for upto, expected in ((2, [1, 2]), (3, [1, 2, 3]), (2, [1, 2])):  # the last: resumed from step 2
        (folder / "metrics.jsonl").write_text("".join(lines[:upto]) + '{"step": 9, "lo')
        update(folder)
        assert [step for step, _ in scalars(folder)] == expected
    (folder / "metrics.jsonl").write_text("".join(lines))
    update(folder)
    steps = [step for step, _ in scalars(folder)]
    assert len(steps) <= 1002 and steps[:2] == [1, 2] and steps[-1] == 4999
