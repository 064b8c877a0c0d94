"""Charts as SVG, for web pages that open anywhere: no script, no font and no picture comes from elsewhere."""

from __future__ import annotations

from html import escape

from oars.watch.chart import COLOURS, DASHES, NOISY, Chart, Series, label, place, smoothed, thinned, ticks
from oars.watch.runs import PHASES, RankTimes

WIDTH, HEIGHT = 1000, 360
LEFT, RIGHT, TOP, BOTTOM = 84, 20, 40, 52
PHASE_COLOURS = dict(zip(PHASES, ("#E69F00", "#56B4E9", "#0072B2", "#D55E00", "#009E73", "#999999"), strict=True))
FONT = 'font-family="system-ui, sans-serif"'


def colour(number: int) -> tuple[str, str]:
    """The colour and the dashes of a chart's n-th line."""
    return COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]


def draw(chart: Chart) -> str:
    """One chart as an ``<svg>`` element."""
    legend = _legend(chart)
    top = TOP + 22 * legend.count("<g ")
    box = (LEFT, top, WIDTH - RIGHT, top + HEIGHT - TOP - BOTTOM)
    x0, x1, y0, y1 = chart.span()

    def at(x: float, y: float) -> tuple[float, float]:
        return (box[0] + place(x, x0, x1, chart.log_x) * (box[2] - box[0]),
                box[3] - place(y, y0, y1, chart.log_y) * (box[3] - box[1]))

    parts = [f'<text x="{LEFT}" y="24" font-size="17" font-weight="600">{escape(chart.title)}</text>', legend]
    for t in ticks(y0, y1, chart.log_y):
        y = at(x0, t)[1]
        parts.append(f'<path d="M{box[0]} {y:.1f}H{box[2]}" stroke="#ddd"/><text x="{box[0] - 8}" y="{y + 4:.1f}" '
                     f'text-anchor="end">{label(t)}</text>')
    for t in chart.x_ticks(10):
        x = at(t, y0)[0]
        parts.append(f'<path d="M{x:.1f} {box[3]}v5" stroke="#444"/><text x="{x:.1f}" y="{box[3] + 20}" '
                     f'text-anchor="middle">{label(t)}</text>')
    parts.append(f'<path d="M{box[0]} {box[1]}V{box[3]}H{box[2]}" fill="none" stroke="#444"/>')
    parts.append(f'<text x="{(box[0] + box[2]) / 2}" y="{box[3] + 42}" text-anchor="middle">{escape(chart.x)}</text>')
    middle = (box[1] + box[3]) / 2
    parts.append(f'<text x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">'
                 f'{escape(chart.y)}</text>')
    for x, text in chart.events:
        if x0 <= x <= x1:
            px = at(x, y0)[0]
            parts.append(f'<g><title>{escape(text)}</title><path d="M{px:.1f} {box[1]}V{box[3]}" stroke="#a00" '
                         f'stroke-dasharray="3 3"/><path d="M{px - 5:.1f} {box[1] - 7}h10l-5 7z" fill="#a00"/></g>')
    for number, series in enumerate(chart.series):
        parts += _line(chart, series, number, at)
    height = box[3] + BOTTOM
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {FONT} font-size="13" '
            f'role="img" aria-label="{escape(chart.title)}"><rect width="{WIDTH}" height="{height}" fill="#fff"/>'
            + "".join(parts) + "</svg>")


def _line(chart: Chart, series: Series, number: int, at: object) -> list[str]:
    assert callable(at)
    shade, dashes = ("#888", "5 4") if series.reference else colour(number)
    xs, ys = series.finite()
    parts = []

    def path(xs: list[float], ys: list[float], how: str) -> str:
        seen = [at(x, y) for x, y in zip(*thinned(xs, ys), strict=True)
                if (x > 0 or not chart.log_x) and (y > 0 or not chart.log_y)]
        d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in seen) if seen else ""
        return f'<path d="{d}" fill="none" stroke="{shade}" {how}/>' if seen else ""

    if series.low:
        around = [at(x, y) for x, y in [*zip(series.x, series.low, strict=True),
                                        *reversed(list(zip(series.x, series.high, strict=True)))]]
        parts.append(f'<path d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in around)}Z" fill="{shade}" opacity="0.15"/>')
    if len(xs) > NOISY:
        parts.append(path(xs, ys, 'stroke-width="1" opacity="0.3"'))
        ys = smoothed(ys, chart.log_y)
    parts.append(path(xs, ys, f'stroke-width="{1.2 if series.reference else 2}" stroke-linejoin="round"'
                              + (f' stroke-dasharray="{dashes}"' if dashes else "")))
    if series.points or len(xs) == 1:
        parts += [f'<circle cx="{at(x, y)[0]:.1f}" cy="{at(x, y)[1]:.1f}" r="4" fill="{shade}"/>'
                  for x, y in zip(xs, ys, strict=True)]
    if (end := series.diverged_at()) is not None and (end[1] > 0 or not chart.log_y):
        x, y = at(*end)
        parts.append(f'<g stroke="{shade}" stroke-width="3"><title>{escape(series.name)} diverged</title>'
                     f'<path d="M{x - 6:.1f} {y - 6:.1f}l12 12m0-12l-12 12"/></g>')
    return parts


def _legend(chart: Chart) -> str:
    """Names beside their lines, in as many rows as they need (each row is one ``<g``)."""
    if len(chart.series) < 2 or len(chart.series) > 40:
        return ""
    rows: list[list[str]] = [[]]
    x = float(LEFT)
    for number, series in enumerate(chart.series):
        diverged = " (diverged ×)" if series.diverged_at() is not None else ""
        name = series.name if len(series.name) <= 60 else series.name[:59] + "…"
        wide = 42 + 7.9 * (len(name) + len(diverged))
        if rows[-1] and x + wide > WIDTH - RIGHT:
            rows.append([])
            x = LEFT
        shade, dashes = ("#888", "5 4") if series.reference else colour(number)
        y = 40 + 22 * (len(rows) - 1)
        rows[-1].append(f'<path d="M{x:.0f} {y}h24" stroke="{shade}" stroke-width="3" stroke-dasharray="{dashes}"/>'
                        f'<text x="{x + 30:.0f}" y="{y + 4}">{escape(name + diverged)}</text>')
        x += wide
    return "".join(f'<g class="legend">{"".join(row)}</g>' for row in rows)


def bars(times: list[RankTimes], slow: set[int]) -> str:
    """Where each rank's time went: one stacked bar a rank, milliseconds a step."""
    shown = sorted(times, key=lambda t: -t.busy)[:32] if len(times) > 32 else times
    steps = max(1, max(t.steps for t in times) - 1)  # the clock starts with the end of the first
    each = {t.rank: {p: 1000 * t.seconds[p] / steps for p in PHASES} for t in shown}
    longest = max(sum(e.values()) for e in each.values()) or 1.0
    left, right, line = 84, 130, 26
    height = 76 + line * len(shown) + 44
    scale = (WIDTH - left - right) / longest
    title = "Where the time went" + (f" (the 32 busiest of {len(times)} ranks)" if len(times) > 32 else "")
    parts = [f'<text x="{left}" y="24" font-size="17" font-weight="600">{title}</text>']
    x = float(left)
    for phase in PHASES:
        parts.append(f'<rect x="{x:.0f}" y="38" width="14" height="14" fill="{PHASE_COLOURS[phase]}"/>'
                     f'<text x="{x + 20:.0f}" y="50">{phase}</text>')
        x += 44 + 7.4 * len(phase)
    for row, t in enumerate(shown):
        y, x = 68 + row * line, float(left)
        parts.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">rank {t.rank}</text>')
        for phase, ms in each[t.rank].items():
            if ms > 0:
                parts.append(f'<rect x="{x:.1f}" y="{y}" width="{ms * scale:.1f}" height="{line - 6}" '
                             f'fill="{PHASE_COLOURS[phase]}"><title>{phase}: {ms:.3g} ms a step</title></rect>')
            x += max(0.0, ms) * scale
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{sum(each[t.rank].values()):.3g} ms'
                     f'{" ◀ slow" if t.rank in slow else ""}</text>')
    base = 68 + line * len(shown) + 4
    parts.append(f'<path d="M{left} {base}H{WIDTH - right}" stroke="#444"/>')
    for tick in ticks(0, longest, False, 8):
        x = left + tick * scale
        parts.append(f'<path d="M{x:.1f} {base}v5" stroke="#444"/><text x="{x:.1f}" y="{base + 20}" '
                     f'text-anchor="middle">{label(tick)}</text>')
    parts.append(f'<text x="{(WIDTH - right + left) / 2}" y="{base + 38}" text-anchor="middle">milliseconds a step'
                 '</text>')
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {FONT} font-size="13" '
            f'role="img" aria-label="{title}"><rect width="{WIDTH}" height="{height}" fill="#fff"/>'
            + "".join(parts) + "</svg>")
