"""The page with a million images: how many frames per second its map, its grid and its table show.

The page's own parts get a million rows in the browser, and real events move them. Frames are counted in the page.
"""

from __future__ import annotations

import pytest
from driving import Chromium, Tab
from labelling import Labelling, images

MANY = 1_000_000

MAP = f"""(async () => {{
  const {{ MapView }} = await import('/page/map_view.js');
  const some = () => (Math.random() + Math.random() + Math.random()) / 1.5 - 1;
  const xy = Float32Array.from({{ length: {2 * MANY} }}, some);
  const kinds = Uint8Array.from({{ length: {MANY} }}, (_, row) => row % 3 + 128 * (row % 2));
  window.view = new MapView({{ taken(rows) {{ window.taken = rows; }}, hover() {{}} }});
  document.getElementById('screen').replaceChildren(view.element);
  view.place(xy);
  view.colour(kinds, [[120, 130, 140], [30, 150, 220], [240, 150, 30]]);
}})()"""
GRID = f"""(async () => {{
  const {{ Grid }} = await import('/page/grid.js');
  window.view = new Grid({{ label: 'Many' }});
  document.getElementById('screen').replaceChildren(view.element);
  view.show(Array.from({{ length: {MANY} }}, (_, row) => row % 300));
}})()"""
TABLE = f"""(async () => {{
  const {{ Table }} = await import('/page/table.js');
  window.view = new Table({{ label: 'Many', columns: ['Image', 'x', 'y', 'Label'], taken() {{}},
    cells: (row) => [String(row), '0', '0', '–'] }});
  document.getElementById('screen').replaceChildren(view.element);
  view.show({MANY});
}})()"""
# Frames that are shown, until the promise is asked for.
COUNT = """(() => { const times = [];
  const tick = (time) => { times.push(time); window.pace.on && requestAnimationFrame(tick); };
  window.pace = { on: true, times }; requestAnimationFrame(tick); })()"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Tab:
    folder = tmp_path_factory.mktemp("many")
    images(folder / "run.h5", 300)
    with Labelling(folder) as server, Chromium(folder / "browser") as browser:
        yield server.page(browser)


def pace(tab: Tab, moves: int = 60) -> float:
    """Frames per second while the wheel turns over the middle of the screen."""
    tab.js("view.element.id = 'many'")
    x, y = tab.where("#many")
    tab.mouse("mouseMoved", x, y)
    tab.js(COUNT)
    for move in range(moves):
        tab.wheel(x, y, -60 if move < moves * 2 // 3 else 60)
    times = tab.js("(() => { pace.on = false; return pace.times; })()")
    return 1000 * (len(times) - 1) / (times[-1] - times[0])


def test_the_map_moves_with_a_million_points(tab: Tab, capsys) -> None:
    tab.js(MAP)
    tab.until(f"view.canvas.dataset.drawn === '{MANY}'", 60)
    pace(tab)  # how many points there is time for is learnt as it moves
    found, drawn = pace(tab), tab.js("Math.round(view.share * view.points.count)")
    tab.until(f"view.canvas.dataset.drawn === '{MANY}'", 60)  # at rest, all of them
    way = tab.js("view.points.way.constructor.name")  # Shader where there is a GPU
    with capsys.disabled():
        print(f"\nmap, {MANY:,} points ({way}): {found:.0f} frames/s while it moves, with {drawn:,} points drawn")
    assert found >= 15 and drawn >= MANY // 100


def test_a_line_takes_its_points_out_of_a_million(tab: Tab) -> None:
    tab.js(MAP)
    tab.until(f"view.canvas.dataset.drawn === '{MANY}'", 60)
    box = tab.js("(() => { const b = view.canvas.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()")
    x, y = box[0] + box[2] / 2, box[1] + box[3] / 2
    tab.drag((x - 80, y - 80), (x + 80, y - 80), (x + 80, y + 80), (x - 80, y + 80), steps=8)
    wrong = tab.until("""window.taken && (() => {
      const edge = 80 / (Math.min(view.element.clientWidth, view.element.clientHeight) / 2 * 0.95);
      const from = (row) => Math.max(Math.abs(view.xy[2 * row]), Math.abs(view.xy[2 * row + 1]));
      const inside = (row, slack) => from(row) < edge + slack;
      const taken = new Set(window.taken); let [wrong, all] = [0, 0];
      for (let row = 0; row < view.points.count; row += 1) { all += inside(row, 0);
        wrong += (inside(row, -0.01) && !taken.has(row)) || (taken.has(row) && !inside(row, 0.01)); }
      return [wrong, taken.size, all]; })()""")
    assert wrong[0] == 0 and wrong[1] > 1000 and abs(wrong[1] - wrong[2]) < 0.05 * wrong[2]


@pytest.mark.parametrize("part", [GRID, TABLE], ids=["grid", "table"])
def test_a_million_rows_scroll(tab: Tab, part: str, capsys) -> None:
    tab.js(part)
    found = pace(tab, 40)
    elements = tab.js("view.element.querySelectorAll('.tile, .lines .line').length")
    with capsys.disabled():
        print(f"\n{'grid' if part is GRID else 'table'}, {MANY:,} rows: {found:.0f} frames/s, {elements} elements")
    assert found >= 15 and elements < 400
    tab.js("(view.inner || view.body).querySelector('[tabindex=\"0\"]').focus()")
    tab.js("view.key({ key: 'End' })")
    place = "aria-rowindex" if part is TABLE else "aria-posinset"
    assert tab.js(f"document.activeElement.getAttribute('{place}')") == str(MANY + (part is TABLE))


def test_both_ways_to_draw_points_draw_the_same(tab: Tab, capsys) -> None:
    same, coloured, took = tab.js(f"""(async () => {{
      const {{ Shader, Plain }} = await import('/page/points.js');
      const some = (_, at) => (Math.random() + Math.random()) / 3 - (at % 2 ? 0.1 : 0.6);
      const xy = Float32Array.from({{ length: {2 * MANY} }}, some);
      const kinds = Uint8Array.from({{ length: {MANY} }}, () => 1);
      const how = {{ some: {MANY}, across: 1, along: 1, x: 0, y: 0, size: 1 }};
      const pictures = [Shader, Plain].map((Way) => {{
        const canvas = Object.assign(document.createElement('canvas'), {{ width: 500, height: 500 }});
        const way = new Way(canvas);
        way.place(xy);
        way.colour(kinds, [[0, 0, 0], [255, 200, 100]]);
        way.draw(how);
        const flat = new OffscreenCanvas(500, 500).getContext('2d');
        flat.drawImage(canvas, 0, 0);
        const started = performance.now();
        way.draw(how);
        if (way.gl) way.gl.readPixels(0, 0, 1, 1, way.gl.RGBA, way.gl.UNSIGNED_BYTE, new Uint8Array(4));
        return {{ took: performance.now() - started, data: flat.getImageData(0, 0, 500, 500).data }};
      }});
      const lit = ({{ data }}, at) => data[4 * at] > 120;
      let [same, coloured] = [0, 0];
      for (let at = 0; at < 250000; at += 1) {{
        same += lit(pictures[0], at) === lit(pictures[1], at);
        coloured += lit(pictures[0], at);
      }}
      return [same, coloured, pictures.map((one) => one.took)];
    }})()""")
    with capsys.disabled():
        print(f"\n{MANY:,} points, one drawing: WebGL2 {took[0]:.0f} ms, pixel by pixel {took[1]:.0f} ms")
    # A point between two pixels may go to either.
    assert coloured > 20_000 and same > 0.95 * 250_000
