"""The two nodes are started once for each file of tests."""

from __future__ import annotations

import pytest
from nodes import Cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    two = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        two.tool("start")
        yield two
    finally:
        two.tool("stop")
