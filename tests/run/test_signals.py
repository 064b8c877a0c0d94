"""Signals, alarms, timers and budgets of time: what one process decides by chance, all ranks decide alike.

A rank that acted on a signal by itself would leave the loop while the others go on: these scripts would hang.
"""

import signal
import time

import pytest
from running import Run

TRAIN = """
import os, signal, sys, threading, time
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(3)
data = TensorDataset(torch.randn(24, 5), torch.randint(0, 3, (24,)))
model = torch.nn.Linear(5, 3)
opt = torch.optim.SGD(model.parameters(), 0.01)
steps = 0
def epoch(until=lambda: False, most=10_000):
    global steps
    for x, y in DataLoader(data, 8, shuffle=True):
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        steps += 1
        time.sleep(0.002)
        if until():
            return True
    assert steps < most, "never told"
    return False
def train(until):
    while not epoch(until):
        pass
"""

FLAG = TRAIN + """
stop = False
def note(number, frame):
    global stop
    stop = True
    print("told", signal.Signals(number).name, flush=True)
print(signal.signal(signal.SIGTERM, note) == signal.SIG_DFL, signal.getsignal(signal.SIGTERM) is note)
epoch()
print("trains", flush=True)
train(lambda: stop)
torch.save(model.state_dict(), "last.pt")
print("saved")
sys.exit(3)
"""

ASKED = TRAIN + """
asked = []
def save(number, frame):
    asked.append(number)
    torch.save(model.state_dict(), f"asked-{len(asked)}.pt")
    print("saved", flush=True)
signal.signal(signal.SIGUSR1, save)
epoch()
print("trains", flush=True)
train(lambda: len(asked) == 2)
print("over")
"""

ENDS = TRAIN + """
def leave(number, frame):
    try:
        print("cleans up", flush=True)
    finally:
        sys.exit(7)
signal.signal(signal.SIGINT, leave)
epoch()
print("trains", flush=True)
train(lambda: False)
"""

# What takes its own time: alarms, timers, clocks. Each loop ends by one of them.
BUDGETS = TRAIN + """
import datetime, resource
from datetime import datetime as clock
class TimeIsUp(Exception):
    pass
rung = []
def ring(number, frame):
    rung.append(number)
def up(number, frame):
    raise TimeIsUp
epoch()
signal.signal(signal.SIGALRM, ring)
signal.alarm(1)
train(lambda: rung)
print("alarm")
signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
train(lambda: len(rung) > 2)
left = signal.setitimer(signal.ITIMER_REAL, 0)
print("timer", left[1])
signal.signal(signal.SIGALRM, up)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    train(lambda: False)
except TimeIsUp:
    print("up")
flags = threading.Event()
threading.Timer(0.2, flags.set).start()
never = threading.Timer(0.1, print, ["never"])
never.start()
never.cancel()
train(flags.is_set)
print("flag")
start = clock.now()
train(lambda: clock.now() - start > datetime.timedelta(seconds=0.2))
start = datetime.datetime.utcnow().timestamp()
train(lambda: datetime.datetime.utcnow().timestamp() - start > 0.2)
used = resource.getrusage(resource.RUSAGE_SELF).ru_utime
train(lambda: resource.getrusage(resource.RUSAGE_SELF).ru_utime - used > 0.1)
before = os.times().user
train(lambda: os.times().user - before > 0.1)
print("budgets", isinstance(start, float), type(clock.now()) is clock)
os.kill(os.getpid(), signal.SIGALRM) if not rung else None
try:
    signal.raise_signal(signal.SIGALRM)
except TimeIsUp:
    print("raised")
signal.alarm(1)
try:
    while True:
        time.sleep(0.05)
except TimeIsUp:
    print("slept")
"""


def begun(folder, script, n):
    (folder / "script.py").write_text(script)
    run = Run(folder, "--quiet", "-n", n, "script.py", limit=60, OARS_DIGEST="1")
    until = time.time() + 40
    while "trains" not in _so_far(run):
        assert time.time() < until and run.process.poll() is None, run.err
        time.sleep(0.02)
    return run


def _so_far(run):
    path = run.folder / "rank-0.log"
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("n", [1, 2])
def test_a_handler_of_sigterm_decides_how_the_run_ends(tmp_path, n):
    run = begun(tmp_path, FLAG, n)
    run.process.send_signal(signal.SIGTERM)
    assert run.code == 3, run
    assert run.lines == ["True True", "trains", "told SIGTERM", "saved"] and (tmp_path / "last.pt").exists()


def test_sigusr1_reaches_the_script_on_every_rank(tmp_path):
    run = begun(tmp_path, ASKED, 2)
    for number in (1, 2):
        run.process.send_signal(signal.SIGUSR1)
        until = time.time() + 20
        while not (tmp_path / f"asked-{number}.pt").exists() and time.time() < until:
            time.sleep(0.02)
    assert run.code == 0 and run.lines == ["trains", "saved", "saved", "over"], run
    assert len(set(run.digests().values())) == 1


def test_a_handler_of_ctrl_c_may_end_the_run(tmp_path):
    run = begun(tmp_path, ENDS, 2)
    run.process.send_signal(signal.SIGINT)
    assert run.code == 7 and run.lines == ["trains", "cleans up"], run


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.more)])
def test_alarms_timers_and_budgets_end_at_the_same_step_everywhere(tmp_path, n):
    (tmp_path / "script.py").write_text(BUDGETS)
    run = Run(tmp_path, "--quiet", "-n", n, "script.py", limit=60, OARS_DIGEST="1")
    assert run.code == 0, run
    assert run.lines == ["alarm", "timer 0.2", "up", "flag", "budgets True True", "raised", "slept"]
    assert len(set(run.digests().values())) == 1
