// Boundary: the images of which the model is least sure, one at a time, one key each.

import { json } from "./api.js";
import { colour, make, percent } from "./dom.js";
import { Picture } from "./picture.js";
import { image } from "./pixels.js";
import { classNumber, state } from "./state.js";

export function boundary(app) {
  let queue = [];
  let at = 0;
  let asking = false;
  let done = new Set();
  let here, big, head, place;

  async function more() {
    if (asking) return;
    asking = true;
    try {
      await app.idle();
      const { event } = state;
      const { rows } = await json("/api/boundary?n=24");
      const known = new Set(queue.slice(0, at + 1).map(({ row }) => row));
      queue = [...queue.slice(0, at + 1), ...rows.filter(({ row }) => !known.has(row) && !done.has(row)).map((one) => ({ ...one, seen: event }))];
    } catch (error) {
      app.complain(error.message);
    }
    asking = false;
    if (!here && place) show();
  }

  async function show() {
    here = queue[at] || null;
    head.replaceChildren(...(here ? question(here) : [make("h1", {}, "No image is left to ask about"),
      make("p", {}, state.classes.length < 2 ? "First name at least two groups on Groups." : "The model has no more questions.")]));
    for (const { row } of queue.slice(at + 1, at + 4)) image(row).catch(() => {});
    try {
      await big.show(here ? here.row : null);
    } catch (error) {
      app.complain(error.message);
    }
  }

  function question({ guess, second, p, row }) {
    if (!guess) return [make("h1", {}, "Which class is this?"), make("p", {}, `Image ${row}.`)];
    const of = (name) => make("button.guess", { "--class": colour(classNumber(name)), onclick: () => assign(name) }, name,
      make("kbd", {}, String(classNumber(name) + 1)));
    return [make("h1", {}, of(guess), second ? " or " : "", second ? of(second) : "", "?"),
      make("p", {}, `Image ${row}. The model says ${guess} with ${percent(p)}; it learns most from your answer here.`)];
  }

  function step(by) {
    at = Math.max(0, Math.min(queue.length - 1, at + by));
    if (queue.length - at < 6) more();
    show();
  }

  function assign(name) {
    if (!here) return;
    const { row, seen } = here;
    done.add(row);
    queue.splice(at, 1);
    at = Math.max(0, Math.min(at, queue.length - 1));
    here = null;
    if (queue.length - at < 6) more();
    show();
    app.label([row], name, "human", { seen });
  }

  return {
    name: "boundary",
    title: "Boundary",
    keys: [["1 … 9", "the image is this class; the next one comes"], ["→ ←", "leave it for later, go back"], ["space", "leave it for later"],
      ["+ - 0", "zoom in, out, whole image"], ["v", "look at it in the viewer"]],
    open(where) {
      place = where;
      head = make("div.head");
      big = new Picture({ label: "Image" });
      place.append(make("section.work", {}, head, big.element,
        make("div.bar", {}, make("button", { onclick: () => step(-1) }, "Back", make("kbd", {}, "←")),
          make("button", { onclick: () => step(1) }, "Later", make("kbd", {}, "→")))));
      here = null;
      show();
      more();
    },
    close() {
      place = null;
    },
    changed(what) {
      if (what === "undo") {
        done = new Set();
        [queue, at, here] = [[], 0, null];
        more();
      } else if (what === "model" && place) more();
    },
    taken(rows) {
      if (here && rows.includes(here.row)) {
        done.add(here.row);
        queue.splice(at, 1);
        here = null;
        show();
        if (queue.length - at < 6) more();
      }
    },
    chosen: () => (here ? [here.row] : []),
    assign,
    key(event) {
      if (event.key === "v" && here) app.go("viewer", here.row);
      else if (big.key(event)) return true;
      else if (event.key === "ArrowRight" || event.key === " ") step(1);
      else if (event.key === "ArrowLeft") step(-1);
      else return false;
      return true;
    },
  };
}
