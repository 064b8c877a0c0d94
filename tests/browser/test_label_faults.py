"""The page of oars label: a drag into a new group, a server that is killed, two people who disagree."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from driving import Chromium, Tab
from labelling import Labelling, go, images, labelled, labels

from oars.label.folder import open_folder

ROWS = 600
STATE = "fetch('/api/state').then((answer) => answer.json())"
EMPTY = "sessionStorage.getItem('oars-label-actions') === '[]'"  # every action has its answer


@pytest.fixture
def server(tmp_path: Path):
    images(tmp_path / "run.h5", ROWS)
    with Labelling(tmp_path, "--classes", "rings,spots") as server:
        yield server


@pytest.fixture
def browser(tmp_path: Path):
    with Chromium(tmp_path / "browser") as browser:
        yield browser


def grouped(server: Labelling, browser: Chromium, **how: object) -> Tab:
    tab = server.page(browser, **how)
    tab.until("!!document.querySelector('.tile')", 120)
    return tab


def until_labelled(tab: Tab, number: int) -> None:
    tab.until(f"{STATE}.then(({{ labelled }}) => labelled === {number})")


def rows_shown(tab: Tab) -> list[int]:
    return tab.js("[...document.querySelectorAll('.tile')].sort((a, b) => a.dataset.index - b.dataset.index)"
                  ".map((tile) => Number(tile.dataset.row))")


def name_it(tab: Tab, name: str) -> None:
    tab.until("!!document.querySelector('dialog[open] input')")
    tab.type(name)
    tab.press("Enter")
    tab.until(f"document.querySelector('#said').textContent.includes('→ {name}')")


@pytest.mark.parametrize("hand", ["mouse", "touch", "resting finger", "keys"])
def test_images_are_dragged_into_a_new_group(server: Labelling, browser: Chromium, hand: str) -> None:
    tab = grouped(server, browser, touch="t" in hand and hand != "keys")
    rows = rows_shown(tab)
    taken = [rows[1], rows[2]]
    # Two are taken out, then one of them is dragged: both go.
    for row in taken:
        if hand == "keys":
            tab.press("ArrowRight" if row == rows[2] else "ArrowDown")
            if row == rows[1]:
                tab.press("Home", "ArrowRight")
            tab.press(" ")
        elif hand == "mouse":
            tab.click(f".tile[data-row='{row}']")
        else:
            tab.tap(f".tile[data-row='{row}']")
    tab.until("document.querySelectorAll('.tile.out').length === 2")
    start, end = tab.where(f".tile[data-row='{rows[1]}']"), tab.where(".fresh")
    if hand == "keys":
        tab.press("N")
    elif hand == "mouse":
        tab.drag(start, end)
    elif hand == "touch":  # across the scrolling direction at once
        tab.swipe(start, (start[0] + 60, start[1]), end)
    else:  # first downwards: only a finger that has rested drags there
        tab.swipe(start, (start[0], start[1] + 60), end, rest=0.6)
    name_it(tab, "odd")
    assert labels(tab) == {row: ("odd", "human") for row in taken}
    assert not set(taken) & set(rows_shown(tab))
    tab.press("z")
    tab.until("document.querySelector('#said').textContent.startsWith('Taken back')")
    assert labels(tab) == {}


def test_a_finger_that_moves_along_scrolls_and_drags_nothing(server: Labelling, browser: Chromium) -> None:
    tab = grouped(server, browser, touch=True, size=(768, 700))
    x, y = tab.where(".tile", 8)
    tab.swipe((x, y), (x, y - 150))
    tab.until("document.querySelector('.grid').scrollTop > 50")
    assert labels(tab) == {} and not tab.js("!!document.querySelector('.ghost, .tile.out')")


def test_escape_ends_a_drag(server: Labelling, browser: Chromium) -> None:
    tab = grouped(server, browser)
    start, end = tab.where(".tile", 1), tab.where(".class")
    tab.mouse("mouseMoved", *start)
    tab.mouse("mousePressed", *start, button="left", clickCount=1)
    for part in (0.3, 0.6, 1):
        place = [a + part * (b - a) for a, b in zip(start, end, strict=True)]
        tab.mouse("mouseMoved", *place, button="left", buttons=1)
    tab.until("!!document.querySelector('.ghost') && !!document.querySelector('.class.over')")
    tab.press("Escape")
    tab.mouse("mouseReleased", *end, button="left", clickCount=1)
    assert not tab.js("!!document.querySelector('.ghost, .over')") and labels(tab) == {}


def test_undo_reaches_across_a_restart(server: Labelling, browser: Chromium) -> None:
    tab = grouped(server, browser)
    tab.press("1")
    tab.until("document.querySelector('#said').textContent.includes('→ rings')")
    first = labels(tab)
    tab.press("2")
    tab.until("document.querySelector('#said').textContent.includes('→ spots')")
    both = labels(tab)
    assert len(both) > len(first) > 10
    server.kill()
    server.start()
    for want in (first, {}):
        tab.press("z")
        until_labelled(tab, len(want))
        assert labels(tab) == want
    for want in (first, both):
        tab.press("Z")
        until_labelled(tab, len(want))
        assert labels(tab) == want


def test_a_server_killed_amid_actions_loses_and_doubles_nothing(server: Labelling, browser: Chromium) -> None:
    tab = grouped(server, browser)
    go(tab, "boundary")
    want: dict[int, str] = {}
    tab.until("!!document.querySelector('.picture canvas').dataset.row")
    # The server dies at once, or a little later: before the action came, while it is written, before it is answered.
    for wait in (0, 0.003, 0.01, 0.03):
        for key, name in (("1", "rings"), ("2", "spots")):
            row = int(tab.js("document.querySelector('.picture canvas').dataset.row"))
            assert row not in want
            tab.press(key)
            want[row] = name
            tab.until(f"document.querySelector('.picture canvas').dataset.row !== '{row}'")
        time.sleep(wait)
        server.kill()
        row = int(tab.js("document.querySelector('.picture canvas').dataset.row"))
        tab.press("1")  # and one that nobody hears
        want[row] = "rings"
        tab.until("!document.querySelector('#trouble').hidden")
        assert "kept" in tab.text("#trouble") and not tab.js(EMPTY)
        server.start()
        tab.until(f"document.querySelector('#trouble').hidden && {EMPTY}")
        tab.until(f"!{list(want)}.map(String).includes(document.querySelector('.picture canvas').dataset.row)")
        assert {row: name for row, (name, _) in labels(tab).items()} == want
    # Each was done once: as many undos as actions take all back.
    for left in range(len(want) - 1, -1, -1):
        tab.press("z")
        until_labelled(tab, left)
    assert labels(tab) == {}


def test_the_file_that_a_browser_is_started_with_leads_to_the_page(server: Labelling, browser: Chromium,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(server.folder)
    tab = browser.open(open_folder("run.h5", None, 0).opener(server.address).absolute().as_uri())
    tab.until("document.body?.dataset.ready === 'yes' && location.protocol === 'http:'", 60)
    assert labels(tab) == {} and server.address.partition("#")[2] not in tab.js("location.href")


def test_an_answer_that_was_lost_is_not_reported_as_its_opposite(server: Labelling, browser: Chromium) -> None:
    tab = grouped(server, browser)
    tab.press("1")
    tab.until("document.querySelector('#said').textContent.includes('→ rings')")
    tab.js("""(() => {
      const real = window.fetch;
      window.fetch = async (path, ...more) => {
        const answer = await real(path, ...more);
        if (path !== '/api/undo') return answer;
        window.fetch = real;
        throw new TypeError('the connection broke behind the request');
      };
    })()""")
    tab.press("z")
    tab.until("document.querySelector('#said').textContent === 'Taken back.'")
    assert labels(tab) == {}


def test_what_was_done_in_one_project_is_not_sent_to_the_next(server: Labelling, browser: Chromium) -> None:
    tab = grouped(server, browser)
    rows = rows_shown(tab)
    server.kill()
    tab.press("1")
    tab.until("!document.querySelector('#trouble').hidden")
    first, home = server.address, server.folder / "run.oars-label"
    home.rename(server.folder / "first")
    server.start()  # another project, at the same port, with the same classes
    tab.go("about:blank")  # an address of which only the end differs would load nothing
    tab.go(server.address)
    tab.until("document.body.dataset.ready === 'yes'")
    tab.until("!!document.querySelector('.tile')", 120)
    assert labels(tab) == {} and not tab.js(EMPTY)
    server.kill()
    home.rename(server.folder / "second")
    (server.folder / "first").rename(home)
    server.start()
    assert server.address == first
    tab.go("about:blank")
    tab.go(server.address)
    tab.until(f"document.body.dataset.ready === 'yes' && {EMPTY}")
    assert set(rows) <= set(labels(tab))


def test_what_was_not_answered_survives_a_reload(server: Labelling, browser: Chromium) -> None:
    tab = grouped(server, browser)
    rows = rows_shown(tab)
    server.kill()
    tab.press("1")
    tab.until("!document.querySelector('#trouble').hidden")
    server.start()
    tab.go(server.address)  # a fresh page, with whatever the old one could not send
    tab.until(f"document.body.dataset.ready === 'yes' && {EMPTY}")
    found = labels(tab)
    assert set(rows) <= set(found) and {name for name, _ in found.values()} == {"rings"}


def test_two_people_who_disagree(server: Labelling, browser: Chromium, tmp_path: Path) -> None:
    first = grouped(server, browser)
    with Chromium(tmp_path / "second") as other:
        second = grouped(server, other)
        rows = rows_shown(first)
        assert rows == rows_shown(second)
        first.press("1")
        first.until("document.querySelector('#said').textContent.includes('→ rings')")
        # The second has seen the group before the first labelled it: its answer is no correction but a disagreement.
        second.until("document.querySelector('#done span').textContent[0] !== '0'")
        assert rows_shown(second) == rows
        second.press("2")
        second.until("document.querySelector('#said').textContent.includes('another label from person 1')")
        disputed = first.until(f"{STATE}.then(({{ disputed }}) => disputed)")
        assert disputed == len(first.js("fetch('/api/disputes').then((answer) => answer.json())")["rows"]) >= len(rows)
        assert {how for _, how in labels(first).values()} <= {"disputed"}
        # Either can settle one.
        go(first, "people")
        first.until("document.querySelector('h1').textContent.startsWith('Which is right')")
        row = int(first.until("document.querySelector('.picture canvas').dataset.row"))
        first.press("1")
        first.until(f"{STATE}.then(({{ disputed }}) => disputed === {disputed - 1})")
        assert labels(first)[row] == ("rings", "human")


def test_the_page_says_what_the_server_refuses(server: Labelling, browser: Chromium) -> None:
    tab = grouped(server, browser)
    tab.press("9")
    tab.until("document.querySelector('#said.bad')?.textContent.includes('no class 9')")
    tab.press("z")
    tab.until("document.querySelector('#said.bad')?.textContent.includes('nothing to undo')")
    tab.press("?")
    tab.until("document.querySelectorAll('dialog[open] kbd').length > 15")
    tab.press("Escape")
    tab.until("!document.querySelector('dialog')")
    assert labelled(tab) == 0


def test_names_are_shown_as_text(server: Labelling, browser: Chromium) -> None:
    tab = grouped(server, browser)
    name = "<img src=x onerror=alert(1)>"
    tab.press("n")
    name_it(tab, name)
    assert name in tab.js("[...document.querySelectorAll('.class .name')].map((found) => found.textContent)")
    assert tab.js("document.querySelectorAll('img').length") == 0


READY = {screen: "!!document.querySelector('#screen h1')" for screen in ("boundary", "exam", "audit", "people")}
READY["groups"] = "!!document.querySelector('.tile')"
READY["viewer"] = "!!document.querySelector('#screen .facts dl')"
READY["map"] = "!!document.querySelector('#screen canvas')"


def test_every_control_has_a_name_and_can_be_reached(server: Labelling, browser: Chromium) -> None:
    tab = grouped(server, browser)
    for screen in ("groups", "boundary", "map", "viewer", "exam", "audit", "people"):
        go(tab, screen)
        tab.until(READY[screen])
        nameless = tab.js("""[...document.querySelectorAll('button, a, input, select, [tabindex], [role]')]
          .filter((one) => !['screen', 'said', 'trouble'].includes(one.id) && one.getAttribute('role') !== 'rowgroup')
          .filter((one) => !(one.getAttribute('aria-label') || one.textContent.trim() || one.title))
          .filter((one) => !one.closest('label, [hidden]')).map((one) => one.outerHTML)""")
        assert nameless == [], screen
        wide = tab.js("(({ scrollWidth, scrollHeight }) => [scrollWidth, innerWidth, scrollHeight, innerHeight])"
                      "(document.documentElement)")
        assert wide[0] <= wide[1] and wide[2] <= wide[3], screen
        reached = set()
        for _ in range(60):
            tab.press("Tab")
            reached.add(tab.js("""(() => { const one = document.activeElement; const style = getComputedStyle(one);
              return one === document.body || style.outlineStyle !== 'none' || one.matches('.chart canvas'); })()"""))
        assert reached == {True}, f"{screen}: a focus that nobody sees"
        tab.js("document.activeElement.blur()")  # a letter that is pressed in a list chooses an entry of it
