"""``--sync local`` and ``--wire`` with Keras on real ranks. A backend takes seconds to start, so a run has many parts:
``fit`` while ranks are apart, a loop by hand whose gradients are coded, and a model that tells of every row."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from running import python
from training import HERE, trained

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "XLA_FLAGS": "--xla_backend_optimization_level=0"}


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Iterator[Future[list[str]]]:
    """What one process prints, on every backend the same; it runs beside the first ranks."""
    def alone() -> list[str]:
        return python(tmp_path_factory.mktemp("alone"), HERE / "fits.py", KERAS_BACKEND="torch")

    with ThreadPoolExecutor() as pool:
        yield pool.submit(alone)


LOCAL = ("--sync", "local", "--every", "5")


@pytest.mark.parametrize("backend, ranks, words, off, deaths", [
    ("tensorflow", 3, (*LOCAL, "--wire", "int8"), 0.003, ([1, "in a collective", 14], [0, "in a collective", 118])),
    ("jax", 2, (*LOCAL, "--wire", "powersgd:2"), 1e-5, ()),
    ("torch", 3, ("--sync", "gossip"), 1e-5, ([1, "forward", 20],)),
], ids=str)
def test_keras_on_its_own_learns_as_one_process_does(tmp_path, begun, backend, ranks, words, off, deaths):
    run = trained(tmp_path, "-n", str(ranks), *words, HERE / "fits.py", deaths=deaths, KERAS_BACKEND=backend, **QUIET)
    assert run.code == 0, run.err
    alone = begun.result()
    assert len(run.lines) == len(alone), run.lines
    assert [line.split(",")[0] for line in run.lines[:2]] == ["epoch 0: 12 steps", "epoch 1: 24 steps"]
    for line, other in zip(run.lines[:2] + run.lines[-1:], alone[:2] + alone[-1:], strict=True):
        assert abs(float(line.split()[-1]) - float(other.split()[-1])) < 0.02, (line, other)
    assert run.lines[2] == "saved what it had: True"
    assert float(run.lines[3].split()[1]) < off  # one row of a round too few, or too many, is more
    assert run.summary["losses"] == len(deaths) and len(set(run.digests().values())) == 1
    if backend == "torch":
        assert run.learnt() == dict.fromkeys(range(240), 4)  # in the two trainings by fit
    else:
        assert "as with --sync allreduce" in run.err  # the loop by hand
