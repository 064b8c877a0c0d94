"""The colours of the page of ``oars label`` have the contrast that WCAG 2.2 AA asks for: computed from its CSS.

Text has 4.5:1 on everything it can stand on; borders of controls, the focus, and colours that carry a meaning have 3:1.
"""

from __future__ import annotations

import re

import pytest

from oars.label.server import PAGE

TEXT, PART = 4.5, 3.0
# On what the text of a rule stands that names no background of its own: rules that do.
LIGHT = (":root", "button, select, input, a.button", ".chart-of", ".class:hover, .guess:hover, .card:hover",
         ".card[aria-current]", ".class.over, .fresh.over, .card.over", ".fresh", '.line[aria-selected="true"]')
HEADER = ("header", "header button", "nav a:hover")
STANDS = {
    ":root": LIGHT, "p, small": LIGHT, "dt": LIGHT, ".warn": LIGHT[:1], "svg text": (".chart-of",),
    ".facts caption, table caption": LIGHT[:1], ".bar label, .head.one label": LIGHT[:1],
    "svg .marked": (".chart-of",), "#said": ("footer",), "#said.bad": ("footer",), "header p": HEADER[:1],
    "nav a": HEADER, "nav sup": HEADER, "nav a[aria-current] sup": ("nav a[aria-current]",),
    '[data-screen="people"] .side a': LIGHT[:1], "button, select, input, a.button": LIGHT[1:2],
    "dialog": LIGHT[1:2], "#done span": ("#done", "#done i"), ".tile.out::after": (".grid",),
}
IGNORED = ("inherit", "currentcolor", "transparent")


def _rules() -> dict[str, dict[str, str]]:
    """Selector → declarations, of both sheets; what a rule says again later is said later."""
    found: dict[str, dict[str, str]] = {}
    for name in ("style.css", "screens.css"):
        text = re.sub(r"/\*.*?\*/", "", (PAGE / name).read_text(), flags=re.S)
        text = re.sub(r"@media[^{]*\{((?:[^{}]*\{[^{}]*\})*)\s*\}", r"\1", text)
        for selector, body in re.findall(r"([^{}]+)\{([^{}]*)\}", text):
            pairs = (one.partition(":") for one in body.split(";") if ":" in one)
            found.setdefault(" ".join(selector.split()), {}).update(
                {key.strip(): value.strip() for key, _, value in pairs})
    return found


RULES = _rules()


def colour(text: str) -> str | None:
    """The first colour in a value, as #rrggbb."""
    text = re.sub(r"var\((--[\w-]+)\)", lambda name: RULES[":root"][name[1]], text)
    found = re.search(r"#([0-9a-f]{6}|[0-9a-f]{3})\b", text)
    return None if found is None else "#" + (found[1] if len(found[1]) == 6 else "".join(2 * c for c in found[1]))


def background(selector: str) -> str:
    found = colour(RULES[selector].get("background", "") or RULES[selector].get("background-color", ""))
    assert found, f"{selector} has no background"
    return found


def light(hexed: str) -> float:
    """The relative luminance."""
    parts = [int(hexed[at:at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((light(one), light(other)))
    return (lighter + 0.05) / (darker + 0.05)


def mixed(over: str, under: str, share: float) -> str:
    return "#" + "".join(f"{round(int(over[at:at + 2], 16) * share + int(under[at:at + 2], 16) * (1 - share)):02x}"
                         for at in (1, 3, 5))


def _texts() -> list[tuple[str, str, str]]:
    """Of every rule that colours text: the rule, the colour, and each colour it can stand on."""
    found = []
    for selector, says in RULES.items():
        text = says.get("color") or (says.get("fill") if selector.startswith("svg") and "text" in selector
                                     or selector == "svg .marked" else None)
        if text is None or text in IGNORED:
            continue
        # Without a background of its own it must be in the table: a new rule is a line more there.
        own = colour(says.get("background", "")) if selector not in STANDS else None
        for on in [own] if own else [background(under) for under in STANDS[selector]]:
            found.append((selector, str(colour(text)), on))
    return found


@pytest.mark.parametrize(("selector", "text", "on"), _texts())
def test_text_is_read_on_everything_it_stands_on(selector, text, on):
    assert contrast(text, on) >= TEXT, f"{selector}: {text} on {on}: {contrast(text, on):.2f}"


def test_keys_are_read_although_they_are_paler():
    paler = float(RULES["kbd"]["opacity"])
    root = RULES[":root"]
    for text, on in [(str(colour(root["color"])), background(rule)) for rule in LIGHT] + [
            (str(colour(RULES["button.main"]["color"])), background("button.main"))]:
        assert contrast(mixed(text, on, paler), on) >= TEXT, (text, on)


@pytest.mark.parametrize(("selector", "where"), [
    ("button, select, input, a.button", [":root", "button, select, input, a.button"]), ("header button", ["header"]),
    (".fresh", [".fresh", ":root"])])
def test_controls_have_a_border_that_is_seen(selector, where):
    border = RULES[selector].get("border") or RULES[selector]["border-color"]
    for on in map(background, where):
        assert contrast(str(colour(border)), on) >= PART, (selector, on)


def test_the_focus_is_seen_on_light_and_on_dark_ground():
    assert "var(--focus)" in RULES[":focus-visible"]["outline"]
    for on in {background(rule) for rule in LIGHT}:
        assert contrast(RULES[":root"]["--focus"], on) >= PART, on
    dark = next(selector for selector in RULES if "--focus" in RULES[selector] and selector != ":root")
    assert set(dark.split(", ")) == {"header", ".grid", ".picture"}
    for rule in dark.split(", "):
        assert contrast(RULES[dark]["--focus"], background(rule)) >= PART, rule
    assert RULES[".picture canvas:focus-visible"]["outline-offset"] == "-3px"  # outside, it is cut off


def test_colours_of_classes_are_seen_on_paper_and_on_the_map():
    known = re.search(r"COLOURS = \[([^\]]+)\]", (PAGE / "dom.js").read_text())
    assert known
    found = re.findall(r"#[0-9a-f]{6}", known[1])
    assert len(found) == 9
    for one in [*found, RULES[":root"]["--class"], str(colour(RULES[".legend .none::before"]["background"]))]:
        for on in (background(":root"), background(".chart-of"), background(".chart")):
            assert contrast(one, on) >= PART, (one, on, round(contrast(one, on), 2))


def test_contrast_is_that_of_the_standard():
    assert contrast("#000000", "#ffffff") == pytest.approx(21) and contrast("#777777", "#ffffff") < TEXT
    assert contrast("#767676", "#ffffff") > TEXT
