// Keys that hold on every screen; what a screen does not know of goes through here first.

import { newClass } from "./classes.js";
import { showKeys } from "./dialogs.js";
import { state } from "./state.js";

const EVERYWHERE = [["1 … 9", "this class"], ["n", "a new class, of the same"], ["z", "undo"], ["Shift+z", "redo"],
  ["g b m v e a p l", "Groups, Boundary, Map, Viewer, Exam, Audit, People, Live"], ["?", "this list"]];
const SCREENS = { g: "groups", b: "boundary", m: "map", v: "viewer", e: "exam", a: "audit", p: "people", l: "live" };

export function listenToKeys(app) {
  window.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || typing(event)) return;
    if (pressed(event, app)) event.preventDefault();
  });
}

function typing({ target, key }) {
  if (document.querySelector("dialog[open]")) return true;
  if (target.closest?.("input:not([type=range], [type=checkbox]), select, textarea")) return true;
  if (target.closest?.("input") && (key.startsWith("Arrow") || key === " ")) return true;
  return Boolean(target.closest?.("button, a, summary")) && (key === "Enter" || key === " ");
}

function pressed(event, app) {
  const digit = /^Digit([1-9])$/.exec(event.code)?.[1] || /^[1-9]$/.exec(event.key)?.[0];
  if (digit) {
    const known = state.classes[digit - 1];
    if (!known) app.complain(`There is no class ${digit} yet: press n to make one.`);
    else if (event.shiftKey) app.assignChosen(known.name);
    else app.assign(known.name);
  } else if (event.key === "?") help(app);
  else if (event.key === "z") app.undo();
  else if (event.key === "Z") app.redo();
  else if (app.screen?.key?.(event)) return true;
  else if (event.key === "n") newClass(app);
  else if (event.key === "N") app.classOfChosen();
  else if (event.key in SCREENS) app.go(SCREENS[event.key]);
  else return false;
  return true;
}

export function help(app) {
  showKeys(`Keys: ${app.screen.title}`, [["Here", app.screen.keys], ["Everywhere", EVERYWHERE]]);
}
