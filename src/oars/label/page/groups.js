// Groups: images that look alike, most of them of one class. Click out what does not belong, then accept the rest with one
// key. What was clicked out stays as a group of its own.

import { ask, json } from "./api.js";
import { newClass } from "./classes.js";
import { colour, count, make, percent, set, thousands } from "./dom.js";
import { drags, dropsOn } from "./drag.js";
import { Grid } from "./grid.js";
import { released } from "./pressed.js";
import { classNumber, state } from "./state.js";
import { paint } from "./thumbs.js";

const SIZE = 60;
const AHEAD = 8;
const PAUSE = 1500;  // ms between looks at what the model has learnt
let made = 0;

export function groups(app) {
  let list = [];
  let at = 0;
  let asking = false;
  let wanted = null;  // what was asked for while a question was under way
  const recent = new Set();  // rows that got a label since the question was asked
  let later = null;
  let grid, strip, head, bar, place;

  const current = () => list[at];

  /** Asks for more proposals, to add or to replace; groups that a person has worked on stay as they are. */
  async function more(afresh = false, stays = () => false) {
    if (asking) {
      wanted = [afresh || wanted?.[0], stays];
      return;
    }
    asking = true;
    recent.clear();
    let kept = null;
    try {
      await app.idle();
      const answer = await json(`/api/groups?size=${SIZE}&n=${AHEAD}`);
      await released();
      kept = current();
      const stay = afresh ? list.filter((group) => group.mine || stays(group)) : list;
      const known = new Set([...recent, ...stay.flatMap((group) => group.rows)]);
      const fresh = answer.groups.map((group) => ({ ...group, seen: answer.event,
        rows: group.rows.filter((row) => !known.has(row)) })).filter((group) => group.rows.length);
      list = [...stay, ...fresh];
      at = Math.max(0, list.indexOf(kept));
    } catch (error) {
      app.complain(error.message);
    }
    asking = false;
    show(kept === current());
    if (wanted) {
      const next = wanted;
      wanted = null;
      more(...next);
    }
  }

  /** The model has learnt: what waits is asked for again, but nothing changes under somebody's hands. */
  function learned() {
    later ??= setTimeout(() => {
      later = null;
      if (place) more(true, (group) => group === current());
    }, PAUSE);
  }

  function show(keep = false) {
    if (!place?.isConnected) return;
    const group = current();
    grid.label = group ? "This group" : "No group";
    grid.show(group ? group.rows : [], keep);
    headline();
    strip.replaceChildren(...list.map(card));
    strip.children[at]?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  function headline() {
    const group = current();
    if (!group) {
      head.replaceChildren(make("h1", {}, asking ? "Looking for images that are alike …" : "No group is left"));
      bar.replaceChildren(asking ? "" : make("p", {}, state.left ? "The rest waits on Boundary." : "Every image has its label."));
      return;
    }
    const kept = group.rows.length - grid.out.size;
    head.replaceChildren(make("h1", {}, group.title || (group.guess ? `Are these all ${group.guess}?` : "What are these?")),
      make("p", {}, `${count(group.rows.length, "image")} that look alike`,
        group.guess ? `, ${percent(group.p)} sure` : "", grid.out.size ? `; ${thousands(grid.out.size)} taken out` : "",
        ". Click those that do not belong."));
    const accept = group.guess
      ? make("button.main", { onclick: () => acceptGroup(), "--class": colour(classNumber(group.guess)) },
        `${kept === group.rows.length ? "All" : "The other"} ${thousands(kept)} are ${group.guess}`, make("kbd", {}, "Enter"))
      : make("button.main", { onclick: () => newClass(app) }, `Name ${kept === 1 ? "it" : `these ${thousands(kept)}`}`, make("kbd", {}, "n"));
    bar.replaceChildren(accept,
      make("button", { onclick: split, disabled: group.rows.length < 2, title: "Cut this group in parts (s)" }, "Split", make("kbd", {}, "s")),
      make("button", { onclick: unite, disabled: at + 1 >= list.length, title: "Put the next group into this one (u)" }, "Unite with next", make("kbd", {}, "u")),
      make("button", { onclick: () => step(1), title: "Leave it for later (j)" }, "Later", make("kbd", {}, "j")));
  }

  function card(group, index) {
    const thumbs = group.rows.slice(0, 4).map((row) => {
      const picture = make("i");
      paint(picture, row);
      return picture;
    });
    const name = group.title || (group.guess ? `${group.guess} ${percent(group.p)}` : "unnamed");
    const entry = make("button.card", { data: { drop: "group", index, name: group.guess || "" }, "aria-current": index === at ? "true" : null,
      "aria-label": `Group ${index + 1}: ${count(group.rows.length, "image")}, ${name}`, onclick: () => goTo(index),
      "--class": group.guess ? colour(classNumber(group.guess)) : "var(--line)" },
    make("span.four", {}, thumbs), make("b", {}, thousands(group.rows.length)), make("small", {}, name));
    drags(entry, () => group.rows);
    return entry;
  }

  function goTo(index) {
    at = Math.max(0, Math.min(list.length - 1, index));
    show();
  }

  function step(by) {
    if (by > 0 && at + 1 >= list.length) more();
    else goTo(at + by);
  }

  function acceptGroup() {
    const group = current();
    if (!group) return;
    if (group.guess) assign(group.guess);
    else if (state.classes.length) app.complain(`Which class is it? Press 1${state.classes.length > 1 ? ` to ${Math.min(9, state.classes.length)}` : ""}, or n for a new one.`);
    else newClass(app);
  }

  /** What is still in the group gets the class; what was taken out stays here. */
  function assign(name) {
    const group = current();
    const rows = group ? grid.kept() : [];
    if (!rows.length) {
      if (group) app.complain("Every image of this group is taken out: press space on one to put it back.");
      return;
    }
    leave(rows, true);
    app.label(rows, name, rows.length > 1 ? "page" : "human", { seen: group.seen });
  }

  /** These rows leave the groups, wherever they are. Of an accepted group what was taken out is left, to be named. */
  function leave(rows, accepted = false) {
    const gone = new Set(rows);
    for (const row of rows) recent.add(row);
    const was = current();
    list = list.map((group) => (group.rows.some((row) => gone.has(row))
      ? { ...group, mine: true, ...(group === was && accepted ? { title: "And these, which you took out?", guess: null } : {}),
        rows: group.rows.filter((row) => !gone.has(row)) } : group));
    const index = list.findIndex((group, other) => other === at && group.rows.length);
    const before = list.slice(0, at).filter((group) => group.rows.length).length;
    list = list.filter((group) => group.rows.length);
    at = index >= 0 ? before : Math.min(before, Math.max(0, list.length - 1));
    if (index >= 0 && !accepted) for (const row of rows) grid.out.delete(row);
    show(index >= 0 && !accepted);
    grid.element.closest("main")?.focus({ preventScroll: true });
    if (list.length < 3) more();
  }

  async function split() {
    const group = current();
    if (!group || group.rows.length < 2) return;
    try {
      const { groups: parts } = await ask("/api/split", { rows: group.rows });
      if (parts.length < 2) return app.complain("This group cannot be cut further.");
      list.splice(list.indexOf(group), 1, ...parts.map((part) => ({ ...part, seen: group.seen, mine: true })));
      app.tell(`The group was cut into ${parts.length}.`);
    } catch (error) {
      app.complain(error.message);
    }
    show();
  }

  function unite() {
    if (at + 1 < list.length) put(at, list[at + 1].rows);
  }

  /** Moves rows into another group. */
  function put(index, rows) {
    const into = list[index];
    const gone = new Set(rows);
    const added = rows.filter((row) => !into.rows.includes(row));
    if (!added.length) return;
    const here = current();
    list = list.map((group) => (group === into ? { ...group, mine: true, seen: Math.min(group.seen, here.seen), rows: [...group.rows, ...added] }
      : { ...group, rows: group.rows.filter((row) => !gone.has(row)) }));
    list = list.filter((group) => group.rows.length);
    at = Math.max(0, list.findIndex((group) => group.id === here.id));
    app.tell(`${count(added.length, "image")} moved to another group.`);
    show();
  }

  return {
    name: "groups",
    title: "Groups",
    keys: [["Enter", "accept the group as it is guessed"], ["1 … 9", "the group (without what was taken out) is this class"],
      ["← → ↑ ↓", "move"], ["space", "take out, or put back"], ["Shift+1 … 9", "what was taken out is this class (as dragging it there)"],
      ["n", "the group is a new class"], ["Shift+n", "what was taken out is a new group"], ["s", "split the group"], ["u", "unite it with the next"],
      ["j k", "next, previous group"], ["r", "other proposals"], ["v", "look at the image"], ["+ -", "larger, smaller"]],
    open(where) {
      place = where;
      head = make("div.head");
      bar = make("div.bar");
      strip = make("div.strip", { role: "group", "aria-label": "Groups that wait" });
      grid = new Grid({ label: "This group", changed: headline, opened: (row) => app.go("viewer", row) });
      drags(head, () => current() && grid.kept());
      place.append(strip, make("section.work", {}, head, grid.element, bar));
      dropsOn("group", (rows, element) => put(Number(element.dataset.index), rows));
      if (list.length) show();
      more(false);
    },
    close() {
      place = null;
    },
    changed(what) {
      if (what === "undo") more(true);
      else if (what === "model") learned();
      else if (what === "state" && place) {
        strip.replaceChildren(...list.map(card));
        headline();
      }
    },
    /** What was dragged or chosen has its class. */
    taken(rows) {
      leave(rows);
    },
    /** The number of the last event that these groups know of: what others did since is a conflict. */
    seen: () => current()?.seen,
    /** What was taken out, or the image with the focus. */
    chosen: () => grid.chosen(),
    everything: () => (current() ? grid.kept() : []),
    /** A group without a name yet. */
    aside(rows) {
      const gone = new Set(rows);
      const here = current();
      list = list.map((group) => ({ ...group, rows: group.rows.filter((row) => !gone.has(row)) }));
      made += 1;
      list.splice(at + 1, 0, { id: `mine-${made}`, seen: here?.seen ?? 0, rows, guess: null, title: "Your group: what are these?", mine: true });
      list = list.filter((group) => group.rows.length);
      at = Math.max(0, list.findIndex((group) => group.id === here?.id));
      show();
    },
    assign,
    key(event) {
      if (event.key === "Enter") acceptGroup();
      else if (event.key === "s") split();
      else if (event.key === "u") unite();
      else if (event.key === "j") step(1);
      else if (event.key === "k") step(-1);
      else if (event.key === "r") more(true);
      else if (event.key === "+" || event.key === "=") grid.resize(1.25);
      else if (event.key === "-") grid.resize(0.8);
      else return grid.key(event);
      return true;
    },
  };
}
