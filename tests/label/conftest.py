"""Every test has a cache of its own."""

from __future__ import annotations

import pytest
from labelling import RUNNING


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OARS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
    for process in RUNNING:
        if process.poll() is None:
            process.kill()
            process.communicate()
    RUNNING.clear()
