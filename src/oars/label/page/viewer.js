// Viewer: one image as it was recorded, its radial profile, what is known of it, and the images nearest to it.

import { json } from "./api.js";
import { chart } from "./charts.js";
import { make, percent } from "./dom.js";
import { Grid } from "./grid.js";
import { MAP_NAMES, SCALE_NAMES, levels } from "./pixels.js";
import { Picture } from "./picture.js";
import { state } from "./state.js";

const options = { scale: "root", low: 1, high: 99.7, map: "gray", faults: false };

export function viewer(app) {
  let row = 0;
  let big, near, facts, place, number, value, limits, bar;

  async function go(to) {
    row = Math.max(0, Math.min(state.rows - 1, Math.round(to)));
    number.value = row;
    try {
      await Promise.all([big.show(row).then(showLimits).then(about), json(`/api/near?row=${row}&n=24`).then(({ rows }) => near.show(rows))]);
    } catch (error) {
      app.complain(error.message);
    }
  }

  async function about() {
    const known = await json(`/api/about?row=${row}`);
    if (known.row !== row || !place) return;
    const said = known.class ? `${known.class} (${known.how}${known.by ? `, ${known.by}` : ""})` : "no label";
    const wide = big.raw ? Math.min(big.raw.height, big.raw.width) / 2 : known.profile.length;
    const entries = [["Image", String(known.key ?? row)], ["Label", said]];
    if (known.guess) entries.push(["The model says", `${known.guess}, ${percent(known.p)}`]);
    facts.replaceChildren(make("dl", {}, entries.map(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]).flat()),
      chart({ title: "Radial profile", x: known.profile.map((_, ring) => ring * wide / known.profile.length), xName: "radius in pixels",
        lines: [{ name: "mean intensity", y: known.profile, colour: "#1f9bde" }] }),
      known.history?.length ? make("details", {}, make("summary", {}, `History (${known.history.length})`),
        make("ol", {}, known.history.map((event) => make("li", {}, `${event.class ?? "no label"} by ${event.by} (${event.how})`)))) : "");
  }

  function showLimits() {
    if (!big.raw) return;
    const [dark, bright] = levels(big.raw, options.low, options.high);
    const round = (level) => Number(level.toPrecision(4));
    limits.textContent = `${big.raw.width} × ${big.raw.height} ${big.raw.dtype}, shown from ${round(dark)} to ${round(bright)}`;
  }

  function change(name, to) {
    options[name] = to;
    big.paint(options);
    showLimits();
    controls();
  }

  function choice(label, name, names) {
    return make("label", {}, label, make("select", { onchange: (event) => change(name, event.target.value) },
      names.map((one) => make("option", { value: one, selected: options[name] === one }, one))));
  }

  function slider(label, name, low, high, step) {
    const input = make("input", { type: "range", min: low, max: high, step, "aria-label": `${label}, percentile`,
      oninput: (event) => {
        options[name] = Number(event.target.value);
        event.target.nextSibling.textContent = `${options[name]} %`;
        big.paint(options);
        showLimits();
      } });
    input.value = options[name];
    return make("label", {}, label, input, make("output", {}, `${options[name]} %`));
  }

  function controls() {
    const again = bar.contains(document.activeElement) ? [...bar.querySelectorAll("select, input, button")].indexOf(document.activeElement) : -1;
    const faults = make("input", { type: "checkbox", onchange: (event) => change("faults", event.target.checked) });
    faults.checked = options.faults;
    bar.replaceChildren(choice("Scale", "scale", SCALE_NAMES), choice("Colours", "map", MAP_NAMES), slider("Black", "low", 0, 50, 0.5),
      slider("White", "high", 50, 100, 0.1), make("label", {}, faults, "Mark bad pixels"),
      make("button", { onclick: () => big.zoomBy(1.5), "aria-label": "Zoom in, key +" }, "+"),
      make("button", { onclick: () => big.zoomBy(1 / 1.5), "aria-label": "Zoom out, key -" }, "−"),
      make("button", { onclick: () => big.fit() }, "Whole"));
    if (again >= 0) bar.querySelectorAll("select, input, button")[again]?.focus();
  }

  const cycle = (names, name) => change(name, names[(names.indexOf(options[name]) + 1) % names.length]);

  return {
    name: "viewer",
    title: "Viewer",
    keys: [["1 … 9", "the image is this class"], ["← →", "the image before, after"], ["+ - 0", "zoom in, out, whole image"],
      ["← → ↑ ↓", "move in the zoomed image"], ["i", "linear, root, log"], ["c", "colours"], ["x", "mark bad pixels"],
      ["Tab", "to the nearest images; there arrows move, space opens"]],
    open(where, detail) {
      place = where;
      value = make("span", { "aria-live": "off" });
      limits = make("span");
      big = new Picture({ label: "Image", options, hover(pixel) {
        value.textContent = pixel ? `x ${pixel.x}, y ${pixel.y}: ${Number(pixel.value.toPrecision(6))}` : "";
      } });
      number = make("input", { type: "number", min: 0, max: state.rows - 1, "aria-label": "Number of the image", onchange: () => go(Number(number.value)) });
      near = new Grid({ label: "Nearest images", marks: false, opened: (other) => go(other) });
      facts = make("div.facts");
      bar = make("div.bar", { role: "toolbar", "aria-label": "How the image is shown" });
      place.append(make("section.work", {}, make("div.head.one", {}, make("button", { onclick: () => go(row - 1), "aria-label": "Image before, key left" }, "‹"),
        number, make("button", { onclick: () => go(row + 1), "aria-label": "Image after, key right" }, "›"), limits, value), big.element, bar),
      make("section.side", {}, facts, make("h2", {}, "Nearest"), near.element));
      controls();
      go(detail ?? row);
    },
    close() {
      place = null;
    },
    changed(what) {
      if (place && (what === "state" || what === "undo")) about().catch(() => {});
    },
    chosen: () => [row],
    assign(name) {
      app.label([row], name, "human");
    },
    key(event) {
      if (near.inner.contains(document.activeElement) && near.key(event)) return true;
      if (big.key(event)) return true;
      if (event.key === "ArrowRight") go(row + 1);
      else if (event.key === "ArrowLeft") go(row - 1);
      else if (event.key === "i") cycle(SCALE_NAMES, "scale");
      else if (event.key === "c") cycle(MAP_NAMES, "map");
      else if (event.key === "x") change("faults", !options.faults);
      else return false;
      return true;
    },
  };
}
