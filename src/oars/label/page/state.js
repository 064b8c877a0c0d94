// What the server last said of the project, and those who want to hear of changes. The page keeps no labels of its own:
// it shows the server's, and asks again when the server says that something happened.

import { json, serves } from "./api.js";
import { released } from "./pressed.js";

export const state = {
  source: "", rows: 0, event: 0, person: "", classes: [], labelled: 0, left: 0, disputed: 0, live: false,
  exam: { done: 0, total: 0 }, model: {}, features: [], undo: { can: false, redo: false, what: "" }, people: [],
  image: { height: 1, width: 1, dtype: "uint8" }, progress: null, note: null,
};
const heard = new Set();
let asked = null;
let again = false;

/** The listener gets what happened: "state" each time, or the server's word ("label", "model", "live", …) before it. */
export function listen(listener) {
  heard.add(listener);
  return () => heard.delete(listener);
}

/** Asks once more; questions that come while one is under way become one. */
export function refresh() {
  if (asked) {
    again = true;
    return asked;
  }
  asked = json("/api/state").then((fresh) => {
    Object.assign(state, fresh);
    serves(fresh.project);
    tell("state");
  }).finally(() => {
    asked = null;
    if (again) {
      again = false;
      refresh().catch(() => {});
    }
  });
  return asked;
}

/** Follows the server's events; the browser connects again by itself. */
export function follow() {
  let soon = null;
  const source = new EventSource(`/api/events?since=${state.event}`);
  source.onmessage = (message) => {
    const { what } = JSON.parse(message.data);
    tell(what);
    soon ??= setTimeout(() => {
      soon = null;
      refresh().catch(() => {});
    }, 120);
  };
  // A server that was started again has its state asked for: events may have passed unheard.
  source.onopen = () => refresh().catch(() => {});
  source.onerror = () => {
    if (source.readyState === EventSource.CLOSED) setTimeout(follow, 1500);
  };
}

export function classNumber(name) {
  return state.classes.findIndex((known) => known.name === name);
}

async function tell(what) {
  await released();
  for (const listener of heard) listener(what);
}
