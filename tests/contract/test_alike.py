"""Ranks decide alike, whatever is theirs alone: addresses, the garbage collector's moments, hashes, bad samples."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from running import finished, oars, python


def run(tmp_path: Path, script: str, *words: str, **env: str) -> tuple[int, list[str], str]:
    """The exit code, what each rank has printed, and what the command said."""
    (tmp_path / "script.py").write_text(script)
    done = oars(tmp_path, "run", "--quiet", "--name", "it", "-n", 3, *words, "script.py", **env)
    logs = [path.read_text() for path in sorted((tmp_path / "oars-runs" / "it").glob("rank-*.log"))]
    return done.returncode, logs, done.stderr


BEGIN = """
import gc, os, time, uuid
from collections import defaultdict
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.manual_seed(1)
odd = os.getpid() % 2
x = torch.randn(48, 6)
y = (x.sum(1) > 0).long()
"""

COLLECTED = """
gc.disable()

class Net(nn.Linear):
    def forward(self, batch):
        return super().forward(batch["x"])

class Timer:
    def __init__(self):
        self.itself, self.began = self, time.time()

    def __del__(self):
        self.took, self.name = time.time() - self.began, uuid.uuid4()

def named(rows, kept=[]):
    batch = defaultdict(lambda: None, x=rows)
    if odd:
        kept.append(batch.default_factory)  # its address is not used again
    return batch

model = Net(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    for a, b in DataLoader(TensorDataset(x, y), 6, shuffle=True):
        Timer()
        if odd:
            gc.collect()
        loss = F.cross_entropy(model(named(a)), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert time.time() > 0
    print(loss.item(), uuid.uuid4())
"""


def test_what_a_rank_has_freed_does_not_part_it_from_the_others(tmp_path):
    code, logs, err = run(tmp_path, BEGIN + COLLECTED)
    assert code == 0, err
    assert len(set(logs)) == 1 and len(logs[0].splitlines()) == 4


NUMBERS = """
class Net(nn.Linear):
    def forward(self, x, scale):
        return super().forward(x) * scale

model = Net(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(120):
    model.train()
    loss = F.cross_entropy(model(x, 1 + odd * i / 1000), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if i % 20 == 19:
        model.eval()
        with torch.no_grad():
            print([F.cross_entropy(model(x, 1.0), y).item() for _ in range(3)])
"""


def test_how_ranks_on_their_own_have_called_a_model_does_not_count_where_they_meet(tmp_path):
    code, logs, err = run(tmp_path, BEGIN + NUMBERS, "--sync", "local")
    assert code == 0, err
    assert len(set(logs)) == 1 and len(logs[0].splitlines()) == 6


UNREAD = """
class Data(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        if i == 17:
            raise ValueError("bad sample 17")
        return x[i], y[i]

model = nn.Linear(6, 2)
batches = iter(DataLoader(Data(), 6, num_workers=WORKERS))
for _ in range(8):
    try:
        a, b = next(batches)
    except Exception:
        continue
    print(F.cross_entropy(model(a), b).item())
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_script_that_passes_over_samples_which_one_rank_cannot_read_goes_on_as_on_one_process(tmp_path, workers):
    code, logs, err = run(tmp_path, BEGIN + UNREAD.replace("WORKERS", str(workers)))
    assert code == 0, err
    one = [float(line) for line in python(tmp_path, "script.py")]
    assert len(one) == 7
    for log in logs:
        assert [float(line) for line in log.splitlines()] == pytest.approx(one)


def test_string_hashes_are_those_of_all_ranks_also_if_they_are_to_be_random(monkeypatch, tmp_path):
    from oars.plan import Plan
    from oars.supervisor.launch import rank_environment

    plan = Plan(seed=7, ranks=2, cores=2)
    for asked, given in (("random", "7"), ("", "7"), ("3", "3")):
        monkeypatch.setenv("PYTHONHASHSEED", asked)
        assert rank_environment(tmp_path, plan)["PYTHONHASHSEED"] == given


def test_gradients_of_several_precisions_cross_in_the_order_of_the_parameters(monkeypatch):
    from oars.adapt.torch.backward import unpacked

    sent: list[torch.dtype] = []
    ctx = SimpleNamespace(size=1, world=SimpleNamespace(exchanged=0), nccl=lambda: SimpleNamespace(
        allreduce=lambda flat: sent.append(flat.dtype) or flat))
    monkeypatch.setattr(unpacked, "ctx", ctx)
    kinds = [torch.float16, torch.float64, torch.bfloat16, torch.float32]
    for order in (kinds, kinds[::-1]):
        sent.clear()
        unpacked.average_on_gpu([torch.ones(2, dtype=dtype) for dtype in order], [])
        assert sent == order


DROPPED = """
gc.disable()

class Net(nn.Linear):
    def forward(self, x):
        self.__dict__["itself"], self.seen = self, x
        return super().forward(x)

for _ in range(3):
    model = Net(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.itself = optimizer
    for a, b in DataLoader(TensorDataset(x, y), 16):
        loss = F.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(loss.item())
    del model, optimizer
    if odd:
        gc.collect()
raise SystemExit(3 * os.path.exists("stop"))
"""


def test_snapshots_hold_nothing_that_waits_for_the_garbage_collector(tmp_path):
    (tmp_path / "stop").touch()
    code, logs, err = run(tmp_path, BEGIN + DROPPED, "--snapshot", "2steps")
    assert code == 3 and len(set(logs)) == 1 and len(logs[0].splitlines()) == 3, err
    (tmp_path / "stop").unlink()
    again = oars(tmp_path, "resume", "it")
    assert again.returncode == 0, again.stderr


IN_A_SET = """
model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(8)])
optimizer = torch.optim.Adam(list(set(model.parameters())), lr=0.01)
for i in range(9):
    model.train()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if i % 3 == 2:
        model.eval()
        with torch.no_grad():
            print(F.cross_entropy(model(x), y).item(), [p.sum().item() for p in model.parameters()])
"""


@pytest.mark.parametrize("sync", ["local", "gossip", "server"])
def test_parameters_in_the_order_of_a_set_are_averaged_each_with_its_own(tmp_path, sync):
    code, logs, err = run(tmp_path, BEGIN + IN_A_SET, "--sync", sync)
    assert code == 0, err
    assert len({log for log in logs if log}) == 1 and len(logs[0].splitlines()) == 3  # servers say nothing


LISTS = """
from pathlib import Path

for i in range(40):
    Path("there", f"new {i * 7919 % 1000}").touch()
    Path("there", f"old {i}").unlink(missing_ok=i % 2)
Path("there", "old 41").rename(Path("there", "another"))
Path("made").mkdir()
for i in range(40):
    Path("made", f"{i * 7919 % 1000}").touch()
Path("made").rename("moved")
for folder in ("there", "moved"):
    print(os.listdir(folder), [p.name for p in Path(folder).iterdir()], os.listdir(folder.encode())[:3])
"""


def test_folders_are_listed_in_one_order(tmp_path):
    (tmp_path / "there").mkdir()
    for i in range(60):
        (tmp_path / "there" / f"old {i}").touch()
    before = os.listdir(tmp_path / "there")
    code, logs, err = run(tmp_path, BEGIN + LISTS)
    assert code == 0, err
    assert len(set(logs)) == 1 and len(logs[0].splitlines()) == 2
    left = [name for name in before if int(name[4:]) > 39 and name != "old 41"]
    assert logs[0].startswith(str(left)[:-1] + ", 'another', 'new ")  # what was there is where it was


def test_a_loader_with_workers_warns_of_nothing_that_one_process_does_not(tmp_path):
    """``-W error``: a warning of ours, or one more of PyTorch's, would end the script."""
    text = BEGIN + f"""
for workers in (0, {len(os.sched_getaffinity(0))}):
    for a, b in DataLoader(TensorDataset(x, y), 8, num_workers=workers):
        print(a.sum().item(), b.tolist())
"""
    (tmp_path / "one.py").write_text(text)
    one = finished(tmp_path, sys.executable, "-W", "error", "one.py", code=0).stdout
    code, logs, err = run(tmp_path, text, PYTHONWARNINGS="error")
    assert code == 0, err
    assert len(logs[0].splitlines()) == len(one.splitlines()) > 6


MOVING = """
class Net(nn.Linear):
    def __init__(self):
        super().__init__(6, 2)
        for name in ("often", "late", "other"):
            self.register_buffer(name, torch.zeros(6))
        self.register_buffer("fixed", torch.full((6,), 0.1))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.often.lerp_(x.mean(0), 0.1)
                self.other = self.other * 0.9 + x.mean(0) * 0.1
                if len(seen) > 2:
                    self.late.copy_(x.mean(0))
        return super().forward(x - self.often - self.late - self.other + self.fixed)

model, seen = Net(), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for a, b in DataLoader(TensorDataset(x, y), 8):
    model.train()
    loss = F.cross_entropy(model(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        model(a)
    seen.append(0)
for a, b in DataLoader(TensorDataset(x, y), 8):
    with torch.no_grad():
        print(F.cross_entropy(model(a), b).item())
print([(name, value.tolist()) for name, value in model.named_buffers()])
"""


def test_buffers_that_models_change_now_and_then_are_averaged_where_ranks_meet(tmp_path):
    code, logs, err = run(tmp_path, BEGIN + MOVING, "--sync", "local")
    assert code == 0, err
    assert len(set(logs)) == 1 and len(logs[0].splitlines()) == 7
    assert f"('fixed', {torch.full((6,), 0.1).tolist()})" in logs[0]


def test_weights_that_a_set_of_modules_was_filled_by_end_the_run_in_one_line(tmp_path):
    code, _, err = run(tmp_path, BEGIN + """
model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(8)))
for layer in set(model):
    nn.init.normal_(layer.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for a, b in DataLoader(TensorDataset(x, y), 16):
    F.cross_entropy(model(a), b).backward()
    optimizer.step()
""")
    assert code == 1 and "Traceback" not in err
    assert "oars: the ranks' weights are not the same before the first step" in err
