// Dragging by mouse, pen and touch, with Pointer Events. What can be dragged says so with `drags(element, what)`; where it
// can be dropped has an attribute data-drop. A finger that moves along the scrolling direction scrolls; one that moves
// across it, or that first rests a moment, drags.

import { count, make } from "./dom.js";
import { paint } from "./thumbs.js";

const targets = new Map();  // the name in data-drop -> what to do with the rows
const FAR = 6;
const REST = 280;
let now = null;

/** Rows that are dropped on elements with data-drop=NAME go to `take(rows, element)`. */
export function dropsOn(name, take) {
  targets.set(name, take);
}

/** `what(event)` gives the rows that a drag from here takes along, or null. */
export function drags(element, what) {
  element.addEventListener("pointerdown", (event) => {
    if (event.button || now || event.isPrimary === false) return;
    const rows = what(event);
    if (!rows || !rows.length) return;
    now = { element, rows, x: event.clientX, y: event.clientY, id: event.pointerId, touch: event.pointerType === "touch" };
    if (now.touch) now.rest = setTimeout(() => start(now.x, now.y), REST);
  });
  // Once a drag has begun the finger must not scroll any more.
  element.addEventListener("touchmove", (event) => now?.ghost && event.preventDefault(), { passive: false });
  element.addEventListener("contextmenu", (event) => now && event.preventDefault());
}

function start(x, y) {
  const pictures = now.rows.slice(0, 3).map((row) => {
    const picture = make("i");
    paint(picture, row);
    return picture;
  });
  now.ghost = make("div.ghost", { "aria-hidden": "true" }, pictures, make("b", {}, count(now.rows.length, "image")));
  document.body.append(now.ghost);
  document.documentElement.classList.add("dragging");
  move(x, y);
}

function move(x, y) {
  now.ghost.style.transform = `translate(${Math.min(x + 8, innerWidth - now.ghost.offsetWidth)}px, ${Math.min(y + 8, innerHeight - 70)}px)`;
  const over = document.elementFromPoint(x, y)?.closest("[data-drop]") || null;
  if (over === now.over) return;
  now.over?.classList.remove("over");
  now.over = over;
  over?.classList.add("over");
}

function end(drop) {
  const { rows, over, ghost, rest } = now;
  clearTimeout(rest);
  now = null;
  ghost?.remove();
  over?.classList.remove("over");
  document.documentElement.classList.remove("dragging");
  if (!ghost) return;
  // The click that follows a drag is none.
  const swallow = (event) => event.stopPropagation();
  window.addEventListener("click", swallow, { capture: true, once: true });
  setTimeout(() => window.removeEventListener("click", swallow, { capture: true }), 50);
  if (drop && over) targets.get(over.dataset.drop)?.(rows, over);
}

window.addEventListener("pointermove", (event) => {
  if (!now || event.pointerId !== now.id) return;
  const [across, along] = [Math.abs(event.clientX - now.x), Math.abs(event.clientY - now.y)];
  if (!now.ghost && Math.max(across, along) > FAR) {
    if (now.touch && along >= across) {
      clearTimeout(now.rest);  // it scrolls
      return;
    }
    start(event.clientX, event.clientY);
  }
  if (now.ghost) {
    event.preventDefault();
    move(event.clientX, event.clientY);
  }
});
window.addEventListener("pointerup", (event) => now && event.pointerId === now.id && end(true));
window.addEventListener("pointercancel", (event) => now && event.pointerId === now.id && end(false));
window.addEventListener("keydown", (event) => {
  if (now?.ghost && event.key === "Escape") {
    end(false);
    event.stopPropagation();
  }
}, { capture: true });
