"""Between hosts, gradients leave while backward goes on: that changes no bit of any training, whoever dies meanwhile.

Sums are made in the order of hosts. So with one rank on each, the numbers are those of as many ranks on one host. Where
hosts have more ranks, trainings in which gradients leave early are compared with one in which none may.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from nodes import HERE, Hosts
from running import ARMED, Run

OVERLAP = HERE / "overlap.py"
EARLY = ["plain", "zeros", "accumulate", "penalty", "clip", "norm", "shared"]
LATE = ["graph", "hook", "behind", "late"]  # a script that sees gradients in backward
OTHER = ["branch", "tiny", "twice", "meddle"]  # not all backwards are as they were before


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    four = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        four.tool("start", "a", "b", "c", "d")
        yield four
    finally:
        four.tool("stop")


def told(hosts: Hosts, folder: Path, where: str, *kinds: str, deaths: list | None = None) -> tuple[list, dict]:
    """What a run on hosts printed, and how many bytes left early, by kind of training."""
    folder.mkdir()
    env = {} if deaths is None else {"OARS_TEST_DEATHS": json.dumps(deaths),
                                     "PYTHONPATH": f"{ARMED}:{hosts.env['PYTHONPATH']}"}
    run = hosts.run("a", folder, "--hosts", where, OVERLAP, *kinds, **env)
    out, err = run.communicate(timeout=600)
    assert run.returncode == 0, err
    run_folder = folder / "oars-runs/it"
    dead = {death[0] for death in deaths or []}
    digests = {path.stem.rpartition("-")[2]: path.read_text() for path in run_folder.glob("weights-digest-*.txt")}
    assert len(digests) == sum(int(host.rpartition(":")[2]) for host in where.split(",")) - len(dead)
    assert len(set(digests.values())) == 1
    if dead:
        assert f"{len(dead)} death" in err
    return lines(out.splitlines())


def lines(printed: list[str]) -> tuple[list, dict]:
    words = [line.split() for line in printed]
    return [w for w in words if w[0] != "early"], {w[1]: int(w[2]) for w in words if w[0] == "early"}


@pytest.mark.parametrize("where", ["a:1,b:1", "a:1,b:1,c:1,d:1"])
def test_one_rank_on_each_host_is_as_on_one(where, hosts, tmp_path):
    kinds = [*EARLY, *LATE, *OTHER]
    got, early = told(hosts, tmp_path / "hosts", where, *kinds)
    want, none = lines(Run(tmp_path / "one", "-n", where.count(":"), OVERLAP, *kinds).lines)
    assert got == want
    assert set(none.values()) == {0}
    assert all(early[kind] for kind in (*EARLY, "branch", "tiny", "twice"))
    assert not any(early[kind] for kind in LATE)


@pytest.mark.parametrize("where", ["a:1,b:2", "a:2,b:2", "a:2,b:3,c:2"])
def test_hosts_with_several_ranks(where, hosts, tmp_path):
    got, early = told(hosts, tmp_path / "it", where, "plain", "late", "branch", "tiny")
    assert early["plain"] and early["branch"] and not early["late"]
    steps = [[w[1:] for w in got if w[0] == kind] for kind in ("plain", "late")]
    assert steps[0] == steps[1] and len(steps[0]) == 8
    again, _ = told(hosts, tmp_path / "again", where, "plain", "late", "branch", "tiny")
    assert again == got


@pytest.mark.parametrize("where", ["a:1,b:1,c:1", "a:1,b:2"])
@pytest.mark.parametrize("rank, point, count, step", [
    (1, "bucket", 5, 3), (2, "behind bucket", 4, 3), (0, "behind bucket", 6, 3), (1, "in exchange", 4, 4),
    (2, "behind exchange", 4, 4)])
def test_a_death_on_the_way(where, rank, point, count, step, hosts, tmp_path):
    """All is as if the rank had died before this step's backward began."""
    got, early = told(hosts, tmp_path / "it", where, "plain", "norm", deaths=[[rank, point, count]])
    want, _ = told(hosts, tmp_path / "before", where, "plain", "norm", deaths=[[rank, "backward", step]])
    assert got == want
    assert early["plain"]
    alone = where == "a:1,b:2" and rank == 0  # then there is one host left, and nothing to gain
    assert bool(early["norm"]) != alone
