"""Reports and TensorBoard in a real browser: what is drawn is there, and the browser complains of nothing."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from running import OARS, ROOT, TESTS, environment, said


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    shutil.copy(TESTS / "watch/train.py", folder)
    said(folder, "run", "--quiet", "-n", "2", "--name", "good", "train.py", "0.05", "40", "0.01")
    said(folder, "run", "--quiet", "-n", "1", "--name", "diverged", "train.py", "1e20", "30", "0")
    return folder


def browse(address: str, folder: Path, *options: str) -> tuple[str, list[str]]:
    """The page as the browser made it, and what it said on its console."""
    chromium = shutil.which("chromium")
    assert chromium, "these tests need Chromium: apt-get install chromium"
    done = subprocess.run([chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
                           f"--user-data-dir={folder}/profile", "--window-size=1040,900", *options, "--dump-dom",
                           address], capture_output=True, text=True, timeout=120, env=environment())
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line or "ERR_" in line]


def test_a_report_opens_offline_without_a_word_on_the_console(place):
    for names in (["good"], ["good", "diverged"]):
        page = place / said(place, "report", *names).strip()
        dom, console = browse(page.as_uri(), place, "--host-resolver-rules=MAP * ~NOTFOUND")
        assert console == [] and dom.count("<svg") >= 4 and "Where the time went" in dom
        assert ("diverged ×" in dom) == (len(names) > 1)


def test_a_prediction_opens_offline_too(place):
    load = ROOT / "examples/predict/inception-k80.toml"
    said(place, "predict", str(load), "--machine", "minotauro", "--weak", "-n", "128", "--sync", "allreduce,server:2",
         "-o", "there.html")
    dom, console = browse((place / "there.html").as_uri(), place, "--host-resolver-rules=MAP * ~NOTFOUND")
    assert console == [] and dom.count("<svg") == 2 and dom.count("<table") == 2 and "samples/s" in dom


def test_a_script_error_would_be_seen(place):
    (place / "bad.html").write_text("<script>nosuch()</script>")
    assert len(browse((place / "bad.html").as_uri(), place)[1]) == 1


def test_board_shows_the_scalars_of_a_run_and_ends_with_ctrl_c(place):
    # Ctrl-C shall reach it also where the tests run in a shell's background, whose children ignore it.
    board = subprocess.Popen([*OARS, "board", "good"], cwd=place, env=environment(), text=True,
                             stdout=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    try:
        address = re.search(r"http://localhost:\d+/", board.stdout.readline())[0]
        assert "ssh -L" in board.stdout.readline()
        until = time.time() + 90
        while True:
            try:
                with urllib.request.urlopen(address + "data/plugin/scalars/tags", timeout=5) as answer:
                    if b"train/loss" in answer.read():
                        break
            except OSError:
                pass
            assert time.time() < until, "TensorBoard does not show the run"
            time.sleep(0.5)
        tags, dom = ("train/loss", "train/learning_rate", "speed/samples_per_s"), ""
        while not all(tag in dom for tag in tags):  # the page fills itself bit by bit
            assert time.time() < until, "TensorBoard's page does not show the scalars"
            dom, _ = browse(address + "#timeseries", place, "--virtual-time-budget=30000", "--window-size=1400,2400")
    finally:
        board.send_signal(signal.SIGINT)
        assert board.wait(30) == 0
    with pytest.raises(OSError):
        urllib.request.urlopen(address, timeout=5)
    assert os.listdir(place / "oars-runs/good/tb")
