"""Scripts that read or keep weights in other ways than ``state_dict``, on ranks that are on their own for a while."""

from __future__ import annotations

import pytest
from running import Run, python
from training import trained

MADE = """
import copy, pickle
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(64, 6)
y = (x.sum(1) > 0).long()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 2) * 0.1)

    def predict(self, x):
        return x @ self.w

    def forward(self, x):
        return self.predict(x)

def learn(a, b):
    optimizer.zero_grad()
    F.cross_entropy(model(a), b).backward()
    optimizer.step()

def evaluate(module):
    with torch.no_grad():
        return round(F.cross_entropy(module(x), y).item(), 5)

def size(module):
    return round(sum(p.abs().sum().item() for p in module.parameters()), 5)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
"""

BEHIND_ITS_LOOP = MADE + """
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
shadow = model.w.data.clone()
for epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), 16, shuffle=True):
        learn(a, b)
        average.update_parameters(model)
        shadow = 0.9 * shadow + 0.1 * model.w.data
    print("norm", round(model.w.norm().item(), 5), evaluate(model.predict))
    kept, model.w.data = model.w.data, shadow
    print("shadow", evaluate(model), size(model))
    model.w.data = kept
    print("average", evaluate(average), size(average), "itself", evaluate(model), size(model))
torch.save(model.state_dict(), "model.pt")
"""

WITHOUT_LOADER = MADE + """
READS = {
    "deepcopy": lambda: size(copy.deepcopy(model)),
    "pickle": lambda: size(pickle.loads(pickle.dumps(model))),
    "numpy": lambda: np.abs(model.w.detach().numpy()).sum(),
    "item": lambda: model.w[0, 0].item(),
    "print": lambda: model.w,
    "trace": lambda: size(torch.jit.trace(model, x)),
}
for name, read in READS.items():
    for i in range(0, 64, 16):
        learn(x[i : i + 16], y[i : i + 16])
    print(name, read())
"""

TOGETHER_AGAIN = MADE + """
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for mode in (model.train, model.eval):
    mode()
    for a, b in DataLoader(TensorDataset(x, y), 16, shuffle=True):
        learn(a, b)
    print(size(model))
"""

ENDS_EARLY = MADE + """
import gc
rank = next(found for found in gc.get_objects() if type(found).__name__ == 'World').rank
for epoch in range(3):
    for i, (a, b) in enumerate(DataLoader(TensorDataset(x, y), 8)):
        if i == 5 and epoch < 2 and F.cross_entropy(model(a), b).item() < 9 * rank:  # on some ranks only
            break
        learn(a, b)
print(evaluate(model))
"""


def said(run: Run) -> set[str]:
    return {text for path in run.folder.glob("rank-*.log") if (text := path.read_text())}  # servers say nothing


@pytest.mark.parametrize("words", [("2", "local", "--every", "3", "--wire", "int8"), ("2", "gossip"),
                                   ("3", "server")], ids=str)
def test_what_a_script_does_behind_its_loop_is_with_the_averaged_weights(tmp_path, words):
    (tmp_path / "behind.py").write_text(BEHIND_ITS_LOOP)
    run = trained(tmp_path, "-n", words[0], "--sync", *words[1:], "behind.py")
    assert run.code == 0, run.err
    assert len(run.lines) == 6 and said(run) == {"\n".join(run.lines) + "\n"} and len(set(run.digests().values())) == 1
    assert "weights are read" not in run.err  # at every step, that is
    if words[1] == "server":  # it is the training of one process
        alone = python(tmp_path, "behind.py")
        for line, other in zip(run.lines, alone, strict=True):
            for word, same in zip(line.split(), other.split(), strict=True):
                assert word == same or abs(float(word) - float(same)) < 5e-5, (line, other)


def test_weights_that_are_read_are_the_averaged_ones(tmp_path):
    (tmp_path / "reads.py").write_text(WITHOUT_LOADER)
    run = trained(tmp_path, "-n", "2", "--sync", "local", "reads.py")
    assert run.code == 0, run.err
    assert len(run.lines) > 6 and said(run) == {"\n".join(run.lines) + "\n"}


@pytest.mark.parametrize("sync", ["local", "gossip"])
def test_ranks_that_train_together_again_make_the_same_steps(tmp_path, sync):
    (tmp_path / "again.py").write_text(TOGETHER_AGAIN)
    run = trained(tmp_path, "-n", "2", "--sync", sync, "again.py")
    assert run.code == 0, run.err
    assert "no nn.Module in train() is called" in run.err
    assert len(run.lines) == 2 and said(run) == {"\n".join(run.lines) + "\n"} and len(set(run.digests().values())) == 1


@pytest.mark.parametrize("sync", ["local", "gossip"])
def test_a_rank_whose_loop_ends_early_waits_for_who_comes_to_the_end_of_the_pass(tmp_path, sync):
    (tmp_path / "early.py").write_text(ENDS_EARLY)
    run = trained(tmp_path, "-n", "2", "--sync", sync, "early.py")
    assert run.code == 0, run.err
    assert len(run.lines) == 1 and said(run) == {run.lines[0] + "\n"} and len(set(run.digests().values())) == 1
