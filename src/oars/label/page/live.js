// Live: a file or folder that grows while an experiment runs: what comes in, whether it changes, and what looks unusual.
// It says "look at these", never what they mean.

import { json } from "./api.js";
import { chart } from "./charts.js";
import { colour, count, make, percent, thousands } from "./dom.js";
import { Grid } from "./grid.js";
import { state } from "./state.js";

const EVERY = 1000;

export function live(app) {
  let now = null;
  let timer = null;
  let why = new Map();
  let head, charts, grid, place;

  async function load() {
    timer = null;
    try {
      now = await json("/api/live");
    } catch (error) {
      app.complain(error.message);
    }
    if (!place) return;
    if (now) show();
    timer = setTimeout(load, EVERY);
  }

  function show() {
    const { times, shares, changes, margins, densities, newest, rate, behind, processed } = now;
    head.replaceChildren(make("h1", {}, `${count(processed, "new image")}, ${Number(rate.toPrecision(3))} per second`),
      make("p", { class: behind ? "warn" : "" }, behind ? `${count(behind, "image")} behind: they come faster than this machine looks at them.` : "It keeps up."),
      make("p", {}, times.length ? null : margins.counts.length ? "Shares are shown from 25 new images on."
        : "There is no model yet: label images of two classes, and their shares are shown here."));
    const drawn = [
      times.length ? chart({ title: "Share of each class", x: times, xName: "time", top: 1, yText: (value) => percent(value), xText: clock,
        lines: state.classes.filter(({ name }) => shares[name]).map(({ name }) => ({ name, y: shares[name],
          colour: colour(state.classes.findIndex((known) => known.name === name)) })),
        marks: changes.map(({ time, class: name, from, to }) => ({ x: time, text: `${name} ${percent(from)} → ${percent(to)}` })) }) : null,
      margins.counts.length ? chart({ title: "How sure the model is (margin)", x: margins.edges, lines: [{ name: "images", y: margins.counts, colour: "#1f9bde" }],
        bars: true, xName: "margin" }) : null,
      ...Object.entries(densities).map(([name, { x, y }]) => chart({ title: `Density of ${name}`, x, lines: [{ name, y, colour: "#1f9bde" }], fill: true })),
    ].filter(Boolean);
    charts.replaceChildren(...drawn);
    why = new Map(newest.map(({ row, why: text }) => [row, text]));
    const rows = newest.map(({ row }) => row);
    if (rows.join() !== grid.rows.join()) grid.show(rows, true);
  }

  return {
    name: "live",
    title: "Live",
    keys: [["← → ↑ ↓", "move among the images to look at"], ["space v", "look at the image"], ["1 … 9", "the image with the focus is this class"]],
    open(where) {
      place = where;
      head = make("div.head");
      charts = make("div.charts");
      grid = new Grid({ label: "Look at these", marks: false, describe: (row) => (why.has(row) ? `, ${why.get(row)}` : ""),
        opened: (row) => app.go("viewer", row) });
      place.append(make("section.work", {}, head, charts), make("section.side", {}, make("h2", {}, "Look at these"), grid.element));
      load();
    },
    close() {
      place = null;
      clearTimeout(timer);
    },
    assign(name) {
      const rows = grid.chosen();
      if (!rows.length) app.complain("Move to an image with the arrows first.");
      else app.label(rows, name, "human");
    },
    taken() {},
    chosen: () => grid.chosen(),
    everything: () => grid.chosen(),
    key: (event) => grid.key(event),
  };
}

/** Seconds since 1970 as a time of day; smaller numbers as they are. */
function clock(value) {
  return value > 1e8 ? new Date(1000 * value).toLocaleTimeString("en-GB") : `${Math.round(value)} s`;
}
