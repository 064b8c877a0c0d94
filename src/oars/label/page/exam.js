// Exam: images drawn at random, nothing shown that could suggest an answer. What is answered here is never trained on, so
// the share that the model has right is an honest one.

import { json } from "./api.js";
import { make, percent } from "./dom.js";
import { Picture } from "./picture.js";
import { image } from "./pixels.js";
import { state } from "./state.js";

export function exam(app) {
  let now = { row: null, done: 0, total: 0 };
  let busy = false;
  let head, big, place;

  async function next() {
    try {
      await app.idle();
      now = await json("/api/exam");
    } catch (error) {
      app.complain(error.message);
    }
    if (place) show();
  }

  function show() {
    const { row, done, total } = now;
    const { accuracy, low, high, balanced } = state.exam;
    head.replaceChildren(...(row !== null ? [make("h1", {}, "Which class is this?"),
      make("p", {}, `Question ${done + 1} of ${total}. No guess is shown, and the model never learns from these. `,
        make("progress", { value: done, max: total, "aria-label": "Exam" }))]
      : total ? [make("h1", {}, "The exam is done"),
        make("p", {}, `The model has ${percent(accuracy, 1)} right, and with 95 % certainty between ${percent(low, 1)} and ${percent(high, 1)}; `
          + `each class counted alike ${percent(balanced, 1)}.`)]
        : [make("h1", {}, "No exam yet"), make("p", {}, "There are no images set aside.")]));
    big.show(row).catch((error) => app.complain(error.message));
    if (row !== null) image(row).catch(() => {});
  }

  async function assign(name) {
    const { row } = now;
    if (row === null || busy) return;
    busy = true;
    await app.label([row], name, "exam");
    await next();
    busy = false;
  }

  return {
    name: "exam",
    title: "Exam",
    keys: [["1 … 9", "the image is this class"], ["+ - 0", "zoom in, out, whole image"], ["← → ↑ ↓", "move in the zoomed image"]],
    open(where) {
      place = where;
      head = make("div.head");
      big = new Picture({ label: "Exam image" });
      place.append(make("section.work", {}, head, big.element));
      show();
      next();
    },
    close() {
      place = null;
    },
    changed(what) {
      if (what === "undo") next();
      else if (what === "state" && place && now.row === null) show();
    },
    taken(rows) {
      if (rows.includes(now.row)) now = { ...now, row: null };
      app.idle().then(() => next());
    },
    chosen: () => (now.row === null ? [] : [now.row]),
    assign,
    key: (event) => big.key(event),
  };
}
