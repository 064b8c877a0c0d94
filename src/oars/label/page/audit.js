// Audit: before what the model says of a class is accepted, somebody looks at a sample of it. Some images in the sample are
// known to be wrong: how many of them are found says how far the rest of the answer can be trusted.

import { act, json } from "./api.js";
import { colour, count, make, percent, thousands } from "./dom.js";
import { Grid } from "./grid.js";
import { classNumber, state } from "./state.js";

export function audit(app) {
  let now = null;
  let name = null;
  let passed = [];
  let result = null;
  let list, head, bar, grid, place;

  async function choose(chosen) {
    name = chosen;
    result = null;
    try {
      now = await json(`/api/audit?class=${encodeURIComponent(name)}`);
      passed = now.passed || [];
    } catch (error) {
      now = null;
      app.complain(error.message);
    }
    if (!place) return;
    grid.label = `Sample of ${name}`;
    grid.show(now?.rows || []);
    show();
  }

  function show() {
    list.replaceChildren(...state.classes.map((known, index) => make("button.card", { "--class": colour(index),
      "aria-current": known.name === name ? "true" : null, onclick: () => choose(known.name),
      "aria-label": `Audit ${known.name}: ${known.model} accepted${passed.includes(known.name) ? ", passed" : ""}` },
    make("b", {}, known.name), make("small", {}, `${thousands(known.model)} accepted${passed.includes(known.name) ? " ✓" : ""}`))));
    if (!name || !now) {
      head.replaceChildren(make("h1", {}, "Which class do you want to check?"), make("p", {}, state.classes.length
        ? "The model's guesses are accepted class by class, after you have looked at a sample." : "First name groups on Groups."));
      bar.replaceChildren();
      return;
    }
    const { rows, refused } = now;
    const ready = passed.includes(name);
    head.replaceChildren(make("h1", {}, ready ? `${name} has passed` : rows.length ? `Click every image that is not ${name}` : `No sample of ${name}`),
      make("p", {}, verdict(refused, rows.length)));
    bar.replaceChildren(rows.length && !ready ? make("button.main", { onclick: finish, "--class": colour(classNumber(name)) },
      `${grid.out.size ? count(grid.out.size, "image is", "images are") : "None is"} wrong; all others are ${name}`, make("kbd", {}, "Enter")) : "",
    ready ? make("button.main", { onclick: accept, "--class": colour(classNumber(name)) }, `Accept all that the model calls ${name}`, make("kbd", {}, "Enter")) : "");
  }

  function verdict(refused, rows) {
    if (result) {
      const found = result.planted ? `You found ${result.found} of ${result.planted} images that were known to be wrong. ` : "";
      return `${found}${count(result.errors, "error")} in the sample: at most ${percent(result.upper, 1)} of the class are wrong. `
        + (result.passed ? "That is good enough." : "That is too many: label more on Boundary, then check again.");
    }
    if (refused) return refused;
    return rows ? `${count(rows, "image")}, drawn at random. A few of them are known to be wrong, to see whether such are found.`
      : "The model has no guesses of this class yet.";
  }

  async function finish() {
    if (!now?.rows.length || passed.includes(name)) return passed.includes(name) ? accept() : null;
    try {
      const answer = await act("/api/audit", { class: name, rows: now.rows, wrong: [...grid.out] });
      if (answer.repeated) {  // the first answer was lost, and the outcome with it: the next sample says whether it passed
        await choose(name);
        app.tell(`The audit of ${name} is saved: ${passed.includes(name) ? "it passed" : "it did not pass"}.`);
        app.refresh();
        return null;
      }
      result = answer;
      if (result.passed) passed = [...passed, name];
      now = { ...now, rows: [], refused: null };
      grid.show([]);
      app.tell(result.passed ? `${name} passed its audit.` : `${name} did not pass its audit.`);
    } catch (error) {
      app.complain(error.message);
    }
    app.refresh();
    show();
    return null;
  }

  async function accept() {
    try {
      const { accepted, repeated } = await act("/api/accept", { class: name });
      app.tell(repeated ? `Accepted as ${name}. z takes it back.` : `${count(accepted, "image")} accepted as ${name}. z takes it back.`);
    } catch (error) {
      app.complain(error.message);
    }
    app.refresh();
  }

  return {
    name: "audit",
    title: "Audit",
    keys: [["1 … 9", "check this class"], ["← → ↑ ↓", "move"], ["space", "this one is wrong"], ["Enter", "the sample is done; accept"],
      ["v", "look at the image"], ["+ -", "larger, smaller"]],
    open(where) {
      place = where;
      list = make("div.strip", { role: "group", "aria-label": "Classes to check" });
      head = make("div.head");
      bar = make("div.bar");
      grid = new Grid({ label: "Sample", changed: show, opened: (row) => app.go("viewer", row) });
      place.append(list, make("section.work", {}, head, grid.element, bar));
      if (now) grid.show(now.rows);
      show();
    },
    close() {
      place = null;
    },
    changed(what) {
      if (place && what === "undo" && name) choose(name);
      else if (place && what === "state") show();
    },
    assign: choose,
    taken: (rows) => grid.remove(rows),
    chosen: () => grid.chosen(),
    everything: () => [],
    key(event) {
      if (event.key === "Enter") finish();
      else if (event.key === "+" || event.key === "=") grid.resize(1.25);
      else if (event.key === "-") grid.resize(0.8);
      else return grid.key(event);
      return true;
    },
  };
}
