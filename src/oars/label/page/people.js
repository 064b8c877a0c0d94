// People: who labels here, and the images about which they do not agree. A disputed image is not trained on until somebody
// settles it.

import { act, json } from "./api.js";
import { askText } from "./dialogs.js";
import { colour, count, make, thousands } from "./dom.js";
import { Picture } from "./picture.js";
import { classNumber, state } from "./state.js";
import { paint } from "./thumbs.js";

export function people(app) {
  let disputes = [];
  let at = 0;
  let list, head, big, who, place;

  async function load() {
    try {
      await app.idle();
      disputes = (await json("/api/disputes")).rows;
    } catch (error) {
      app.complain(error.message);
    }
    at = Math.max(0, Math.min(at, disputes.length - 1));
    if (place) show();
  }

  function show() {
    const here = disputes[at] || null;
    who.replaceChildren(make("table", {}, make("caption", {}, "Who labels here"), make("tbody", {}, state.people.map(({ name, actions }) =>
      make("tr", {}, make("th", { scope: "row" }, name, name === state.person ? make("em", {}, " (you)") : null), make("td", {}, count(actions, "action")))))),
    make("button", { onclick: rename }, `You are ${state.person || "nobody"}: change`),
    make("a", { href: "/api/labels.csv", download: "labels.csv" }, "All labels as a CSV file"));
    head.replaceChildren(...(here ? [make("h1", {}, `Which is right? ${disputes.length > 1 ? `${thousands(at + 1)} of ${thousands(disputes.length)}` : ""}`),
      make("p", {}, `Image ${here.row}: `, here.labels.map(({ by, class: name }, index) => [index ? " – " : "", make("button.guess",
        { "--class": colour(classNumber(name)), onclick: () => assign(name) }, name, make("small", {}, by))]).flat())]
      : [make("h1", {}, "Nobody disagrees"), make("p", {}, "When two people label an image differently, it waits here and is not trained on.")]));
    list.replaceChildren(...disputes.slice(0, 60).map(({ row, labels }, index) => {
      const picture = make("i");
      paint(picture, row);
      return make("button.card.dispute", { "aria-current": index === at ? "true" : null, "aria-label": `Image ${row}: ${labels.map((one) => `${one.class} by ${one.by}`).join(", ")}`,
        onclick: () => step(index - at) }, picture, make("small", {}, labels.map((one) => one.class).join(" / ")));
    }));
    big.element.hidden = !here;
    big.show(here ? here.row : null).catch((error) => app.complain(error.message));
  }

  function step(by) {
    at = Math.max(0, Math.min(disputes.length - 1, at + by));
    show();
  }

  async function assign(name) {
    const here = disputes[at];
    if (!here) return;
    disputes.splice(at, 1);
    at = Math.max(0, Math.min(at, disputes.length - 1));
    show();
    await app.label([here.row], name, "human", { final: true });
    load();
  }

  async function rename() {
    const name = await askText("Your name", { label: "Others see it beside your labels", value: state.person, button: "Save" });
    if (!name) return;
    try {
      await act("/api/person", { name });
    } catch (error) {
      app.complain(error.message);
    }
    app.refresh();
  }

  return {
    name: "people",
    title: "People",
    keys: [["1 … 9", "this class is right"], ["← →", "the dispute before, after"], ["+ - 0", "zoom in, out, whole image"], ["v", "look at it in the viewer"]],
    open(where) {
      place = where;
      list = make("div.strip", { role: "group", "aria-label": "Disputed images" });
      head = make("div.head");
      who = make("section.side");
      big = new Picture({ label: "Disputed image" });
      place.append(list, make("section.work", {}, head, big.element), who);
      show();
      load();
    },
    close() {
      place = null;
    },
    changed(what) {
      if (place && (what === "label" || what === "undo" || what === "state")) load();
    },
    chosen: () => (disputes[at] ? [disputes[at].row] : []),
    assign,
    key(event) {
      if (big.key(event)) return true;
      if (event.key === "ArrowRight" || event.key === "ArrowDown") step(1);
      else if (event.key === "ArrowLeft" || event.key === "ArrowUp") step(-1);
      else if (event.key === "v" && disputes[at]) app.go("viewer", disputes[at].row);
      else return false;
      return true;
    },
  };
}
