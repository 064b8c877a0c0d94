"""Charts and tables as text: curves in Braille dots, two by four in each character."""

from __future__ import annotations

import os
import re
import shutil
import sys

from oars.watch.chart import Chart, label, place, thinned, ticks
from oars.watch.runs import PHASES, RankTimes

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_ANSI = (34, 33, 32, 35, 91, 36, 37)  # near the colours of pictures
_BARS = dict(zip(PHASES, "▒█▓·▚░", strict=True))
_MARGIN = 11


def width() -> int:
    """Columns there are to draw in."""
    return max(40, min(shutil.get_terminal_size((100, 24)).columns, 160))


def colourful() -> bool:
    """Whether stdout takes colours."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def draw(chart: Chart, height: int = 12) -> str:
    """A chart with its title, axes and legend."""
    columns = width() - _MARGIN - 1
    x0, x1, y0, y1 = chart.span()
    dots = [[0] * columns for _ in range(height)]
    colours = [[-1] * columns for _ in range(height)]

    def dot(px: int, py: int, colour: int) -> None:
        if 0 <= px < 2 * columns and 0 <= py < 4 * height:
            row, column = height - 1 - py // 4, px // 2
            dots[row][column] |= _DOTS[3 - py % 4][px % 2]
            colours[row][column] = colour

    for number, series in enumerate(chart.series):
        before = None
        for x, y in zip(*thinned(*series.finite(), 4 * columns), strict=True):
            if (chart.log_x and x <= 0) or (chart.log_y and y <= 0):
                continue
            here = (round(place(x, x0, x1, chart.log_x) * (2 * columns - 1)),
                    round(place(y, y0, y1, chart.log_y) * (4 * height - 1)))
            _line(before or here, here, number % len(_ANSI), dot)
            before = here
    paint = colourful()
    rows = ["".join(_paint(chr(0x2800 + d) if d else " ", c, paint) for d, c in zip(line, shades, strict=True))
            for line, shades in zip(dots, colours, strict=True)]
    names = {height - 1 - round(place(t, y0, y1, chart.log_y) * (height - 1)): label(t)
             for t in ticks(y0, y1, chart.log_y, max(2, height // 3))}
    lines = [chart.title + f": {chart.y}" * (chart.y != chart.title.lower()) + " (logarithmic)" * chart.log_y]
    lines += [f"{names.get(n, ''):>{_MARGIN - 2}} {'┤' if n in names else '│'}{row}" for n, row in enumerate(rows)]
    lines += _x_axis(chart, x0, x1, columns)
    if len(chart.series) > 1:
        lines += _legend(chart, columns, paint)
    for series in chart.series:
        if (at := series.diverged_at()) is not None:
            lines.append(f"{'':{_MARGIN}}{series.name} is not finite after {chart.x} {label(at[0])}: it diverged")
    return "\n".join(lines)


def _legend(chart: Chart, columns: int, paint: bool) -> list[str]:
    lines, used = [""], 0
    for number, series in enumerate(chart.series):
        if used and used + len(series.name) + 5 > columns:
            lines, used = [*lines, ""], 0
        lines[-1] += _paint("━━ ", number % len(_ANSI), paint) + series.name + "  "
        used += len(series.name) + 5
    return [" " * _MARGIN + line for line in lines]


def _x_axis(chart: Chart, x0: float, x1: float, columns: int) -> list[str]:
    axis, names = ["─"] * columns, [" "] * columns
    free = 0
    for t in chart.x_ticks(6):
        at, text = round(place(t, x0, x1, chart.log_x) * (columns - 1)), label(t)
        begin = min(max(0, at - len(text) // 2), columns - len(text))
        axis[at] = "┬"
        if begin >= free:
            names[begin:begin + len(text)] = text
            free = begin + len(text) + 1
    for x, _ in chart.events:
        if x0 <= x <= x1:
            axis[round(place(x, x0, x1, chart.log_x) * (columns - 1))] = "▲"
    return [" " * (_MARGIN - 1) + "└" + "".join(axis), " " * _MARGIN + "".join(names),
            f"{chart.x:>{_MARGIN + columns}}"]


def _line(a: tuple[int, int], b: tuple[int, int], colour: int, dot: object) -> None:
    assert callable(dot)
    n = max(abs(b[0] - a[0]), abs(b[1] - a[1]), 1)
    for i in range(n + 1):
        dot(round(a[0] + (b[0] - a[0]) * i / n), round(a[1] + (b[1] - a[1]) * i / n), colour)


def _paint(text: str, colour: int, paint: bool) -> str:
    return f"\x1b[{_ANSI[colour]}m{text}\x1b[0m" if paint and colour >= 0 else text


def bars(times: list[RankTimes], slow: set[int]) -> str:
    """Where the time went, one bar a rank."""
    longest = max(sum(t.seconds.values()) for t in times) or 1.0
    columns = width() - 26
    lines = ["where the time went: " + "  ".join(f"{_BARS[p]} {p}" for p in PHASES)]
    for t in times[:32]:
        bar = "".join(_BARS[p] * round(columns * t.seconds[p] / longest) for p in PHASES)
        lines.append(f"  rank {t.rank:<4} {bar:<{columns}} {sum(t.seconds.values()):8.3g} s"
                     + ("  slow" if t.rank in slow else ""))
    if len(times) > 32:
        lines.append(f"  … and {len(times) - 32} more ranks")
    return "\n".join(lines)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Columns side by side; those of numbers are set to the right. The last is cut to the terminal."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    right = [all(re.match(r"[-+]?[\d.,e+-]+( ?[%a-zA-Z/]+)?$|—?$", row[i]) for row in rows) for i in range(len(head))]
    room = shutil.get_terminal_size((200, 24)).columns
    lines = []
    for row in [head, *rows]:
        cells = [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)]
        lines.append("  ".join(cells).rstrip()[:room])
    return "\n".join(lines)
