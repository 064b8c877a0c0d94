"""Labelling in a real browser: by mouse, by keys, by touch; from the first page to a hundred labels on each screen."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from driving import Chromium, Tab, wait_for
from labelling import Labelling, images, labelled, labels

ROWS = 1500
NAMES = ("rings", "spots")


class Hand:
    """One way to use the page: what is pressed, and how something is dragged."""

    def __init__(self, name: str, tab: Tab, kinds: np.ndarray) -> None:
        self.name, self.tab, self.kinds = name, tab, kinds

    def press(self, selector: str, key: str) -> None:
        """A button, or its key."""
        if self.name == "keys":
            self.tab.press(key)
        elif self.name == "mouse":
            self.tab.click(selector)
        else:
            self.tab.tap(selector)

    def screen(self, name: str) -> None:
        self.press(f"nav a[data-name={name}]", name[0])
        self.tab.until(f"document.body.dataset.screen === '{name}'")

    def class_of(self, kind: int) -> None:
        self.press(f".class[data-name={NAMES[kind]}]", str(kind + 1))

    def line(self) -> None:
        """Points of the map, taken by a line around its middle."""
        if self.name == "keys":
            while self.tab.js("document.activeElement.closest('.chart') === null"):
                self.tab.press("Tab")
            self.tab.press("-", "-", "Enter")
            return
        x, y = self.tab.where(".chart")
        turns = [turn / 8 * math.pi for turn in range(16)]
        circle = [(x + 170 * math.cos(turn), y + 170 * math.sin(turn)) for turn in turns]
        if self.name == "mouse":
            self.tab.drag(*circle, steps=2)
        else:
            self.tab.swipe(*circle, steps=2)


@pytest.fixture(scope="module", params=["mouse", "keys", "touch"])
def hand(request, tmp_path_factory) -> Iterator[Hand]:
    folder = tmp_path_factory.mktemp(request.param)
    kinds = images(folder / "run.h5", ROWS)
    size = (1024, 768) if request.param == "touch" else (1280, 720)
    with Labelling(folder, "--classes", ",".join(NAMES)) as server, Chromium(folder / "browser", size=size) as browser:
        tab = server.page(browser, touch=request.param == "touch")
        tab.until("!!document.querySelector('.tile')", 120)
        yield Hand(request.param, tab, kinds)
        assert [line for line in tab.console if not re.search("503|400|GL", line)] == []


def until_labelled(tab: Tab, number: int) -> None:
    wait_for(lambda: labelled(tab) >= number, f"fewer than {number} labels", 90, lambda: tab.text("#said"))


def test_groups(hand: Hand) -> None:
    tab = hand.tab
    while labelled(tab) < 100:
        before = labelled(tab)
        shown = tab.js("[...document.querySelectorAll('.tile')].map((tile) => Number(tile.dataset.row))")
        kind = int(np.round(np.mean(hand.kinds[shown])))
        # What does not belong is taken out, or, in a pure group, one that does.
        row = next((row for row in shown[:12] if hand.kinds[row] != kind), shown[1])
        if hand.name == "keys":
            tab.press("ArrowDown", "Home", *["ArrowRight"] * shown.index(row), " ")
        else:
            hand.press(f".tile[data-row='{row}']", "")
        tab.until(f"document.querySelector(\".tile[data-row='{row}']\").getAttribute('aria-selected') === 'false'")
        hand.class_of(kind)
        until_labelled(tab, before + len(shown[:12]) - 1)
        found = labels(tab)
        assert row not in found and found[shown[0] if shown[0] != row else shown[2]][0] == NAMES[kind]
        tab.until("document.querySelector('h1').textContent.startsWith('And these')")
        hand.press(".bar button:nth-child(4)", "j")  # later
    assert 0 < sum(how == "page" for _, how in labels(tab).values())


def one_by_one(hand: Hand, number: int, row: Callable[[], int | None], how: str) -> None:
    """Gives the right class to one image after another."""
    done: list[int] = []
    for _ in range(number):
        now = wait_for(lambda: [at for at in (row(),) if at is not None and at not in done], "no new image", 90,
                       lambda: hand.tab.text("#said"))[0]
        done.append(now)
        hand.class_of(int(hand.kinds[now]))
    wait_for(lambda: sum(labels(hand.tab).get(row, ("", ""))[1] == how for row in done) == number, "labels are missing")
    found = labels(hand.tab)
    assert all(found[row][0] == NAMES[hand.kinds[row]] for row in done)


def shown_image(tab: Tab) -> int | None:
    row = tab.js("document.querySelector('.picture canvas')?.dataset.row")
    return None if row in (None, "") else int(row)


def test_boundary(hand: Hand) -> None:
    hand.screen("boundary")
    one_by_one(hand, 100, lambda: shown_image(hand.tab), "human")


def test_map(hand: Hand) -> None:
    hand.screen("map")
    tab = hand.tab
    tab.until("Number(document.querySelector('.chart canvas').dataset.drawn) > 0", 90)
    before = labelled(tab)
    hand.line()
    inside = tab.until("document.querySelectorAll('.side .tile').length")
    assert inside
    number = int(tab.text(".side h1").split()[0].replace(",", ""))
    assert number >= 100
    hand.class_of(0)
    tab.until("document.querySelector('#said').textContent.includes('→')")
    assert labelled(tab) > before
    assert sum(name == NAMES[0] and how == "page" for name, how in labels(tab).values()) >= 100


def test_viewer(hand: Hand) -> None:
    hand.screen("viewer")
    tab = hand.tab
    exam = {row for row, (_, how) in labels(tab).items() if how == "exam"}
    done = 0
    while done < 100:
        now = wait_for(lambda: shown_image(tab), "no image") if done else shown_image(tab) or 0
        if now not in exam:
            hand.class_of(int(hand.kinds[now]))
            tab.until("/→|exam/.test(document.querySelector('#said').textContent)")
            done += 1
        hand.press(".head.one button:nth-of-type(2)", "ArrowRight")
        tab.until(f"document.querySelector('.picture canvas').dataset.row === '{now + 1}'")
    assert sum(how == "human" for row, (_, how) in labels(tab).items() if row <= now) >= 50


def test_exam(hand: Hand) -> None:
    hand.screen("exam")
    assert "guess" not in hand.tab.text("main h1")
    assert hand.tab.js("document.querySelector('.class small').textContent") == ""
    one_by_one(hand, 100, lambda: shown_image(hand.tab), "exam")


def test_an_audit_is_judged(hand: Hand) -> None:
    hand.screen("audit")
    tab = hand.tab
    hand.press(".strip .card", "1")
    tab.until("!!document.querySelector('.tile')")
    sample = tab.js("fetch('/api/state').then((answer) => answer.json()).then(({ left }) => left)")
    assert sample > 0
    hand.press(".bar .main", "Enter")
    tab.until("/error/.test(document.querySelector('.head p').textContent)")
