"""The Live screen in a real browser, on a file that grows while it is looked at."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from driving import Chromium, Tab
from labelling import Labelling, go, images, labelled, labels

FIRST, SIDE = 200, 32


class Growing:
    """The images of another file, a piece at a time, in SWMR mode."""

    def __init__(self, folder: Path) -> None:
        self.kinds = images(folder / "all.h5", 1000)
        with h5py.File(folder / "all.h5") as file:
            self.made = file["images"][:]
        self.file = h5py.File(folder / "run.h5", "w", libver="latest")
        self.images = self.file.create_dataset("images", (0, SIDE, SIDE), np.uint16, chunks=(1, SIDE, SIDE),
                                               maxshape=(None, SIDE, SIDE))
        self.file.swmr_mode = True
        self.add(self.made[:FIRST])

    def add(self, more: np.ndarray) -> None:
        done = len(self.images)
        self.images.resize(done + len(more), 0)
        self.images[done:] = more
        self.images.flush()


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> Iterator[tuple[Tab, Growing]]:
    folder = tmp_path_factory.mktemp("live")
    growing = Growing(folder)
    server = Labelling(folder, "--live", "--classes", "rings,spots")
    with server, Chromium(folder / "browser") as browser:
        tab = server.page(browser)
        tab.until("!!document.querySelector('.tile')", 120)
        yield tab, growing
        assert [line for line in tab.console if "503" not in line] == []  # 503: images are being read
    growing.file.close()


def titles(tab: Tab) -> list[str]:
    return tab.js("[...document.querySelectorAll('.chart-of figcaption')].map((one) => one.firstChild.textContent)")


def test_without_labels_there_are_densities_and_unusual_images(seen: tuple[Tab, Growing]) -> None:
    tab, growing = seen
    go(tab, "live")
    growing.made[FIRST + 20] = 3000
    growing.add(growing.made[FIRST:FIRST + 60])
    tab.until("document.querySelector('h1')?.textContent.startsWith('60 new images')")
    assert titles(tab) == ["Density of radial intensity", "Density of spot counts"]
    assert "no model yet" in tab.text(".head")
    row = FIRST + 20
    tab.until(f"document.querySelector(\".tile[data-row='{row}']\")?.ariaLabel.includes('brighter than all')")


def test_shares_and_their_change_are_drawn_and_a_new_image_gets_a_label(seen: tuple[Tab, Growing]) -> None:
    tab, growing = seen
    rings, spots = ([int(row) for row in np.flatnonzero(growing.kinds[:FIRST] == kind)[:40]] for kind in (0, 1))
    for name, rows in (("rings", rings), ("spots", spots)):
        tab.js(f"""fetch('/api/label', {{ method: 'POST', headers: {{ 'Content-Type': 'application/json' }},
          body: JSON.stringify({{ rows: {rows}, class: '{name}', how: 'human', seen: 1e9 }}) }})
          .then((answer) => answer.status)""")
    growing.add(growing.made[260:500])
    growing.add(growing.made[500:][growing.kinds[500:] == 1])
    tab.until("!!document.querySelector('.chart-of .mark')")
    assert titles(tab)[:2] == ["Share of each class", "How sure the model is (margin)"]
    assert "Density of the share of spots" in titles(tab)
    assert tab.js("[...document.querySelectorAll('.chart-of')].every((one) => one.querySelector('.curve, .bar'))")
    drawn = tab.js("[...document.querySelectorAll('.curve, .area')].map((path) => path.getAttribute('d'))")
    assert all("NaN" not in path and "undefined" not in path for path in drawn)
    assert " → " in tab.js("document.querySelector('.chart-of .marked').textContent")
    before = labelled(tab)
    row = tab.until("document.querySelector('.tile')?.dataset.row")
    tab.js("document.querySelector('.tile').focus()")
    tab.press("2")
    tab.until(f"fetch('/api/state').then((answer) => answer.json()).then((found) => found.labelled === {before + 1})")
    assert labels(tab)[int(row)] == ("spots", "human")
    time.sleep(1.5)  # once more drawn, without it
    assert tab.js(f"document.querySelector(\".tile[data-row='{row}']\")") is None
