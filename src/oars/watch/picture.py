"""Charts as files: SVG by ourselves, PNG and PDF by matplotlib, where it is installed."""

from __future__ import annotations

from pathlib import Path

from oars.watch import svg
from oars.watch.chart import NOISY, Chart, smoothed, thinned
from oars.watch.runs import WatchError


def save(charts: list[Chart], path: Path) -> None:
    """Write charts, one below the other, in the format that the file's name ends with."""
    kind = path.suffix.lower()
    if kind not in (".svg", ".png", ".pdf"):
        raise WatchError(f"-o {path}: write .svg, .png or .pdf")
    try:
        if kind == ".svg":
            path.write_text(_below(charts))
        else:
            _by_matplotlib(charts, path)
    except OSError as error:
        raise WatchError(f"cannot write {path}: {error.strerror}") from None


def _below(charts: list[Chart]) -> str:
    """Several charts in one SVG."""
    drawn, y = [], 0
    for chart in charts:
        one = svg.draw(chart)
        height = int(one.partition('viewBox="0 0 ')[2].split('"')[0].split()[1])
        drawn.append(one.replace("<svg ", f'<svg y="{y}" width="{svg.WIDTH}" height="{height}" ', 1))
        y += height
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {svg.WIDTH} {y}" width="{svg.WIDTH}" height="{y}">'
            + "".join(drawn) + "</svg>\n")


def _by_matplotlib(charts: list[Chart], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise WatchError(f"-o {path} needs matplotlib: pip install 'manyoars[watch]'; .svg needs nothing") from None
    figure = Figure(figsize=(10, 4 * len(charts)), dpi=100, layout="constrained")
    for number, chart in enumerate(charts, 1):
        axes = figure.add_subplot(len(charts), 1, number)
        for place, series in enumerate(chart.series):
            shade, dashes = ("#888888", "5 4") if series.reference else svg.colour(place)
            xs, ys = series.finite()
            if series.low:
                axes.fill_between(series.x, series.low, series.high, color=shade, alpha=0.15, linewidth=0)
            if len(xs) > NOISY:
                axes.plot(*thinned(xs, ys), color=shade, linewidth=0.8, alpha=0.3)
                ys = smoothed(ys, chart.log_y)
            style = (0, tuple(map(float, dashes.split()))) if dashes else "-"
            end = series.diverged_at()
            axes.plot(*thinned(xs, ys), color=shade, linewidth=1.8, linestyle=style,
                      marker="o" if series.points else None, label=series.name + (" (diverged ×)" if end else ""))
            if end is not None:
                axes.plot(*end, "x", color=shade, markersize=10, markeredgewidth=2.5)
        for x, _ in chart.events:
            axes.axvline(x, color="#aa0000", linestyle=":", linewidth=1)
        axes.set(title=chart.title, xlabel=chart.x, ylabel=chart.y)
        if chart.x in ("step", "ranks"):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if chart.log_x:
            axes.set_xscale("log")
        if chart.log_y:
            axes.set_yscale("log")
        elif chart.zero:
            axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="#dddddd")
        if 1 < len(chart.series) <= 40:
            axes.legend(fontsize="small")
    figure.savefig(path)
