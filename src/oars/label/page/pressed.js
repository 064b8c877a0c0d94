// Whether a button or finger is down. What is pressed must not be replaced before it is let go: the click would be lost.

const SOON = 40;  // ms: a finger's click comes a little after the finger is gone
const down = new Set();
let waiting = [];
let timer = null;

/** Settles as soon as nothing is pressed. */
export function released() {
  return down.size || timer ? new Promise((settled) => waiting.push(settled)) : Promise.resolve();
}

function free() {
  timer = null;
  if (down.size) return;
  const ready = waiting;
  waiting = [];
  for (const settled of ready) settled();
}

const up = ({ pointerId }) => {
  if (down.delete(pointerId)) timer ??= setTimeout(free, SOON);
};
window.addEventListener("pointerdown", ({ pointerId }) => down.add(pointerId), { capture: true });
window.addEventListener("pointerup", up, { capture: true });
window.addEventListener("pointercancel", up, { capture: true });
// Let go outside of the window.
window.addEventListener("pointermove", (event) => event.buttons || up(event), { capture: true });
