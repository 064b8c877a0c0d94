"""``OARS_LOG=debug``: each rank writes what it decided and why; without it there is no file, and no line is made."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from running import SOURCE, Run

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in DataLoader(TensorDataset(torch.randn(40, 4), torch.randn(40, 1)), 8):
    loss = (model(x) - y).pow(2).mean() + 0 * torch.cdist(x, x).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

KERAS = """
import keras
import numpy as np

class Twice(keras.layers.Layer):
    def call(self, x):
        return x * 2

model = keras.Sequential([Twice(), keras.layers.Dense(1)], name="small")
model.compile("sgd", "mse")
model.fit(np.ones((16, 4), "float32"), np.ones((16, 1), "float32"), batch_size=8, verbose=0)
"""


def run(folder: Path, **env: str) -> Run:
    (folder / "train.py").write_text(SCRIPT)
    return Run(folder, "-n", 3, "train.py", deaths=[[2, "backward", 3]], **env)


def test_every_rank_writes_what_it_decided_and_why(tmp_path):
    ran = run(tmp_path, OARS_LOG="debug")
    assert ran.code == 0, str(ran)
    for rank in (0, 1):
        text = (ran.folder / f"rank-{rank}.debug").read_text()
        for said in ("Sequential is traced: this is call 2", "from now on split, no operation mixes its rows",
                     "gathered for cdist at ", "exchanged gradients of 4 tensors",
                     "era 1: batches are cut for ranks [0, 1]", "a rank was lost: 1 backwards are done again"):
            assert said in text, f"{said!r} is not in\n{text}"
        assert all(line.partition(" ")[0].replace(".", "").isdigit() for line in text.splitlines())
    assert (ran.folder / "rank-2.debug").exists()


@pytest.mark.more
@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_keras_models_are_in_it_too(tmp_path, backend):
    (tmp_path / "train.py").write_text(KERAS)
    ran = Run(tmp_path, "-n", 2, "train.py", OARS_LOG="debug", KERAS_BACKEND=backend)
    assert ran.code == 0, str(ran)
    for rank in (0, 1):
        text = (ran.folder / f"rank-{rank}.debug").read_text()
        for said in ("the model small is tried on invented rows: it is called in a new way",
                     "the model small is split: its rows do not depend on each other", "exchanged 20 bytes"):
            assert said in text, f"{said!r} is not in\n{text}"


def test_without_it_nothing_is_written(tmp_path):
    ran = run(tmp_path)
    assert ran.code == 0 and not list(ran.folder.glob("*.debug")), str(ran)


def test_no_line_is_put_into_words_while_it_is_off():
    """Every ``debug.say`` stands below ``if debug.on``, so that a run without the log pays for one attribute."""
    calls = guarded = 0
    for path in Path(SOURCE).rglob("*.py"):
        tree = ast.parse(path.read_text())
        calls += sum(map(_says, ast.walk(tree)))
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test).startswith("debug.on"):
                guarded += sum(_says(inner) for part in node.body for inner in ast.walk(part))
    assert calls == guarded > 5


def _says(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "debug.say"
