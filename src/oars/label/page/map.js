// Map: every image is a point, and images that look alike lie together. A line drawn around points makes a group of them.

import { get } from "./api.js";
import { colour, count, make, set, thousands } from "./dom.js";
import { drags } from "./drag.js";
import { Grid } from "./grid.js";
import { MapView } from "./map_view.js";
import { state } from "./state.js";
import { Table } from "./table.js";
import { paint } from "./thumbs.js";

const NONE = [126, 140, 152];

export function map(app) {
  let view, grid, table, head, bar, hint, tools, legend, place, kinds, xy;
  let tabled = false;
  let timer = null;

  const palette = () => [NONE, ...state.classes.map((_, index) => [1, 3, 5].map((at) => parseInt(colour(index).slice(at, at + 2), 16)))];

  async function load() {
    try {
      const answer = await get("/api/map");
      if (answer.status === 202) {
        const { progress } = await answer.json();
        legend.replaceChildren(progress ? `The map is being made: ${thousands(progress.done)} of ${thousands(progress.total)} …` : "The map is being made …");
        setTimeout(() => place && load(), 700);
        return;
      }
      const data = await answer.arrayBuffer();
      const rows = new DataView(data).getUint32(0, true);
      xy = new Float32Array(data, 4, 2 * rows);
      view.place(xy);
      table.show(rows);
      await recolour();
    } catch (error) {
      app.complain(error.message);
    }
  }

  async function recolour() {
    timer = null;
    if (!xy || !place) return;
    const answer = await get("/api/map/colours");
    if (answer.status !== 200) return;
    kinds = new Uint8Array(await answer.arrayBuffer());
    view.colour(kinds, palette());
    table.render(true);
    legend.replaceChildren(...state.classes.map(({ name }, index) => make("span", { "--class": colour(index) }, name)),
      make("span.none", {}, "no label"), "faint: the model's guess");
  }

  function cells(row) {
    const kind = kinds?.[row] ?? 0;
    const known = state.classes[(kind & 127) - 1];
    return [thousands(row), xy[2 * row].toFixed(3), xy[2 * row + 1].toFixed(3), known ? known.name + (kind > 127 ? " (guess)" : "") : "–"];
  }

  function take(rows) {
    if (!rows.length) {
      app.complain("There is no point inside.");
      return;
    }
    grid.show(rows);
    about();
    app.tell(`${count(rows.length, "image")} chosen. Press a class, or n for a new one.`);
  }

  function about() {
    const kept = grid.kept().length;
    head.replaceChildren(make("h1", {}, grid.rows.length ? count(kept, "image") : "Draw a line around points"),
      make("p", {}, grid.rows.length ? `Inside your line${grid.out.size ? `; ${thousands(grid.out.size)} taken out` : ""}. Press a class, or drag them onto one.`
        : "Points that lie together look alike. Two fingers or the wheel zoom."));
  }

  function switchTable() {
    tabled = !tabled;
    view.element.hidden = tabled;
    table.element.hidden = !tabled;
    buttons();
    if (tabled) table.goTo(table.at);
    else view.canvas.focus();
  }

  function buttons() {
    const button = (text, key, title, act, pressed = null) => make("button", { onclick: act, title: `${title} (${key})`, "aria-pressed": pressed }, text);
    tools.replaceChildren(
      button("Lasso", "o", "Drag draws a line around points", () => mode(true), String(view.lasso)),
      button("Move", "o", "Drag moves the map; so does Shift with a drag", () => mode(false), String(!view.lasso)),
      button("+", "+", "Zoom in", () => view.zoomBy(1.5)), button("−", "-", "Zoom out", () => view.zoomBy(1 / 1.5)),
      button("Whole", "0", "The whole map", () => view.whole()), button("Table", "t", "The points as a table", switchTable, String(tabled)));
  }

  function mode(lasso) {
    view.lasso = lasso;
    buttons();
  }

  return {
    name: "map",
    title: "Map",
    keys: [["← → ↑ ↓", "move the map (after Tab to it)"], ["+ - 0", "zoom in, out, whole map"], ["Enter", "take the points in the circle"],
      ["o", "lasso or move"], ["t", "table or map"], ["space", "in the table: choose; Shift+↑ ↓ choose many; Enter takes them"],
      ["1 … 9", "what was taken is this class"], ["n", "it is a new class"], ["Shift+1 … 9 Shift+n", "only those that you took out"]],
    open(where) {
      place = where;
      hint = make("i.hint", { hidden: true });
      legend = make("p.legend");
      tools = make("div.bar", { role: "toolbar", "aria-label": "Map" });
      head = make("div.head");
      grid = new Grid({ label: "Inside the line", changed: about, opened: (row) => app.go("viewer", row) });
      drags(head, () => grid.kept());
      const before = view?.view;
      view = new MapView({ taken: take, hover(row, x, y) {
        hint.hidden = row === null;
        if (row === null) return;
        paint(hint, row);
        hint.style.transform = `translate(${x + 14}px, ${y + 14}px)`;
      } });
      if (before) view.view = before;
      table = new Table({ label: "Points of the map", columns: ["Image", "x", "y", "Label"], cells, taken: take });
      table.element.hidden = true;
      tabled = false;
      place.append(make("section.plot", {}, tools, view.element, table.element, legend), make("section.work.side", {}, head, grid.element), hint);
      buttons();
      about();
      set(place.firstElementChild, { "aria-label": "Map of all images" });
      load();
    },
    close() {
      place = null;
    },
    changed(what) {
      if (place && xy && ["state", "model", "undo"].includes(what)) timer ??= setTimeout(() => recolour().catch(() => {}), 400);
    },
    assign(name) {
      const rows = grid.kept();
      if (!rows.length) {
        app.complain("Draw a line around points first, or press Enter on the map.");
        return;
      }
      grid.remove(rows);
      app.label(rows, name, rows.length > 1 ? "page" : "human");
    },
    taken: (rows) => grid.remove(rows),
    chosen: () => grid.chosen(),
    everything: () => grid.kept(),
    key(event) {
      if (event.key === "t") switchTable();
      else if (event.key === "o") mode(!view.lasso);
      else if (tabled && table.key(event)) return true;
      else if (place && grid.inner.contains(document.activeElement)) return grid.key(event);
      else return !tabled && view.key(event);
      return true;
    },
  };
}
