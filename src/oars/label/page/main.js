// The page: enters with its token, shows one screen at a time, and does what labels: assign, undo, redo. Everything that
// labels goes through here, so that it is said, can be undone and is sent again if the server was away.

import { act, enter, idle, onAbsence, resend } from "./api.js";
import { audit } from "./audit.js";
import { boundary } from "./boundary.js";
import { classPanel, newClass } from "./classes.js";
import { count, make, set, thousands } from "./dom.js";
import { exam } from "./exam.js";
import { groups } from "./groups.js";
import { help, listenToKeys } from "./keys.js";
import { live } from "./live.js";
import { map } from "./map.js";
import { people } from "./people.js";
import { follow, listen, refresh, state } from "./state.js";
import { viewer } from "./viewer.js";

const MOST = 100000;  // in one action

const place = (id) => document.getElementById(id);

class App {
  constructor() {
    this.screens = Object.fromEntries([groups, boundary, map, viewer, exam, audit, people, live].map((made) => {
      const screen = made(this);
      return [screen.name, screen];
    }));
    this.screen = null;
  }

  /** In the exam nothing is shown that could suggest an answer. */
  blind() {
    return this.screen?.name === "exam";
  }

  refresh() {
    refresh().catch((error) => this.complain(error.message));
  }

  tell(text) {
    place("said").replaceChildren(text);
    place("said").classList.remove("bad");
  }

  complain(text) {
    place("said").replaceChildren(text);
    place("said").classList.add("bad");
  }

  go(name, detail = null) {
    if (!this.screens[name] || (name === "live" && !state.live)) {
      if (name === "live") this.complain("Nothing is followed: start oars label with --live to watch a file that grows.");
      return;
    }
    this.screen?.close?.();
    if (this.screen) this.tell("");
    this.screen = this.screens[name];
    history.replaceState(null, "", `#${name}`);
    document.body.dataset.screen = name;
    for (const link of place("screens").children) {
      set(link, { "aria-current": link.dataset.name === name ? "page" : null });
    }
    place("screen").replaceChildren();
    place("screen").setAttribute("aria-label", this.screen.title);
    this.screen.open(place("screen"), detail);
    this.showClasses();
  }

  chosen() {
    return this.screen?.chosen?.() || [];
  }

  /** What a class would be given to: what is left of the group, or the image that is shown. */
  everything() {
    return this.screen?.everything ? this.screen.everything() : this.chosen();
  }

  /** A class was pressed or typed: the screen knows for which rows. */
  assign(name) {
    if (this.screen?.assign) this.screen.assign(name);
    else this.complain("There is nothing to label on this screen.");
  }

  /** The same as dragging what is chosen onto the class. */
  assignChosen(name) {
    const rows = this.chosen();
    if (rows.length) this.assignRows(rows, name);
    else this.complain("Nothing is chosen: move to an image with the arrows, or take some out with space.");
  }

  /** The same as dragging what is chosen to where a new group is made. */
  classOfChosen() {
    if (this.chosen().length) newClass(this, this.chosen());
    else this.complain("Nothing is chosen: move to an image with the arrows, or take some out with space.");
  }

  /** Rows that were dragged, or chosen by hand. */
  assignRows(rows, name) {
    const seen = this.screen?.seen?.() ?? state.event;
    this.screen?.taken?.(rows);
    return this.label(rows, name, this.blind() ? "exam" : "human", { seen });
  }

  async label(rows, name, how, more = {}) {
    if (!rows.length) return null;
    if (rows.length > MOST) {
      this.complain(`${count(rows.length, "image")} at once are too many: take at most ${thousands(MOST)}.`);
      this.screen?.changed?.("undo");
      return null;
    }
    this.tell(`${count(rows.length, "image")}: ${name} …`);
    try {
      const answer = await act("/api/label", { rows, class: name, how, seen: more.seen ?? state.event, ...more });
      if (answer.repeated) {
        this.tell(`Done: ${name}. The server's first answer was lost: images that others label differently are on People.`);
        this.refresh();
        return answer;
      }
      const fought = answer.conflicts?.length || 0;
      const left = answer.skipped?.length ?? answer.skipped ?? 0;
      const done = `${count(rows.length - fought - left, "image")} → ${name}.${left ? ` ${count(left, "image")} of the exam stayed out.` : ""}`;
      const others = [...new Set((answer.conflicts || []).map(({ by }) => by))].join(", ");
      if (fought) this.complain(`${done} ${count(fought, "image")} got another label from ${others}: see People.`);
      else this.tell(`${done} z takes it back.`);
      this.refresh();
      return answer;
    } catch (error) {
      this.complain(error.message);
      this.screen?.changed?.("undo");
      return null;
    }
  }

  undo() {
    return this.back("/api/undo", "Taken back", "There is nothing to take back.");
  }

  redo() {
    return this.back("/api/redo", "Done again", "There is nothing to do again.");
  }

  async back(path, word, nothing) {
    try {
      const { what, repeated } = await act(path, {});
      if (repeated) this.tell(`${word}.`);
      else if (what) this.tell(`${word}: ${what}.`);
      else this.complain(nothing);
      await refresh();
      this.screen?.changed?.("undo");
    } catch (error) {
      this.complain(error.message);
    }
  }

  /** When every action has its answer; one that is being done in the same breath is waited for too. */
  async idle() {
    await null;
    return idle();
  }

  showHeader() {
    const total = state.rows;
    place("source").replaceChildren(state.source.split("/").pop());
    place("source").title = `${state.source}: ${count(total, "image")}`;
    document.title = `${thousands(state.labelled)} of ${thousands(total)} · oars label`;
    const bar = place("done");
    set(bar, { "aria-valuemax": total, "aria-valuenow": state.labelled,
      "aria-valuetext": `${state.labelled} of ${count(total, "image")} labelled` });
    bar.firstElementChild.style.width = `${100 * state.labelled / Math.max(1, total)}%`;
    bar.lastElementChild.textContent = `${thousands(state.labelled)} of ${thousands(total)}`;
    set(this.undoButton, { disabled: !state.undo.can, title: state.undo.can ? `Undo: ${state.undo.what} (z)` : "Undo (z)" });
    set(this.redoButton, { disabled: !state.undo.redo });
    const { progress, note } = state;
    place("work").hidden = !progress && !note;
    place("work").replaceChildren(...(progress ? [`${progress.what}: ${thousands(progress.done)} of ${thousands(progress.total)} `,
      make("progress", { value: progress.done, max: progress.total, "aria-label": progress.what })] : []), note ? ` ${note}` : "");
    for (const link of place("screens").children) {
      if (link.dataset.name === "live") link.hidden = !state.live;
      if (link.dataset.name === "people") link.lastElementChild.textContent = state.disputed || "";
    }
  }

  start() {
    this.undoButton = make("button", { onclick: () => this.undo(), "aria-label": "Undo, key z" }, "↶ Undo");
    this.redoButton = make("button", { onclick: () => this.redo(), "aria-label": "Redo, key Shift z", title: "Redo (Shift+z)" }, "↷");
    place("tools").append(this.undoButton, this.redoButton,
      make("button", { onclick: () => help(this), "aria-label": "Keys, key ?", title: "Keys (?)" }, "?"));
    place("screens").append(...Object.values(this.screens).map((screen) => make("a", { href: `#${screen.name}`, data: { name: screen.name },
      onclick: (event) => {
        event.preventDefault();
        this.go(screen.name);
      } }, screen.title, make("sup"))));
    this.showClasses = classPanel(place("classes"), this);
    listenToKeys(this);
    listen((what) => {
      if (what === "state") this.showHeader();
      this.screen?.changed?.(what);
    });
    onAbsence((absent) => {
      place("trouble").hidden = !absent;
      place("trouble").textContent = absent ? "The server does not answer. What you did is kept and sent as soon as it is back." : "";
    });
    this.go(location.hash.slice(1) in this.screens ? location.hash.slice(1) : "groups");
    follow();
  }
}

try {
  await enter();
  await refresh();
  await resend();
  const app = new App();
  app.start();
  app.showHeader();
  document.body.dataset.ready = "yes";
} catch (error) {
  place("trouble").hidden = false;
  place("trouble").textContent = error.message;
}
