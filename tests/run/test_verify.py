"""``oars verify`` and ``oars doctor`` on real ranks."""

from __future__ import annotations

from running import oars

TRAIN = """
import os, sys, torch
assert not os.path.exists("last.pt"), "a run before this one has left its file"
x = torch.randn(60, 5)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True)
model = torch.nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for epoch in range(3):
    for a, b in loader:
        loss = torch.nn.functional.mse_loss(model(a), b) {more}
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        torch.save(model.state_dict(), "last.pt")
        print(loss.item())
"""


def test_verify_runs_a_script_twice_and_leaves_its_files_alone(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN.format(more=""))
    done = oars(tmp_path, "verify", "-n", "2", "--steps", "10", "train.py")
    assert done.stdout.startswith("oars: same training on 1 and 2 ranks: over 10 steps losses agree to "), done.stderr
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (0, 1, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["oars-runs", "train.py"]


def test_verify_shows_the_error_of_a_script_that_fails(tmp_path):
    (tmp_path / "train.py").write_text("print('begin')\n1 / 0")
    done = oars(tmp_path, "verify", "-n", "2", "train.py")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("oars: the script failed:\nTraceback (most recent call last):\n")
    assert "the script ended with exit code 1 on one rank; its output is in oars-runs/verify-train-" in done.stderr


def test_doctor_finds_two_ranks_that_work(tmp_path):
    done = oars(tmp_path, "doctor")
    assert done.returncode == 0, done.stdout
    for name in ("Python", "mpi4py", "MPI", "faults", "self-test", "frameworks", "cores", "memory", "GPUs"):
        assert f"\n{name}:" in "\n" + done.stdout
    assert "two ranks summed an array over Open MPI" in done.stdout
    assert list(tmp_path.iterdir()) == []
