// The classes, at the side of every screen: press one, type its number, or drag images onto it. Below them is the place
// that makes a new one.

import { act } from "./api.js";
import { askText } from "./dialogs.js";
import { colour, count, make, percent, thousands } from "./dom.js";
import { dropsOn } from "./drag.js";
import { classNumber, listen, state } from "./state.js";

export function classPanel(place, app) {
  const list = make("div.list", { role: "group", "aria-label": "Classes: press one to label with it" });
  const fresh = make("button.fresh", { data: { drop: "new" }, onclick: () => newClass(app) },
    "Drag instances here to create a new group", make("kbd", {}, "n"));
  const facts = make("div.facts");
  place.append(make("h2", {}, "Classes"), list, fresh, facts);
  dropsOn("class", (rows, element) => app.assignRows(rows, element.dataset.name));
  dropsOn("new", (rows) => newClass(app, rows));
  const show = () => {
    const focus = document.activeElement?.dataset?.name;
    const more = list.contains(document.activeElement) && document.activeElement.classList.contains("more");
    list.replaceChildren(...state.classes.map((known, index) => entry(known, index, app)),
      state.classes.length ? "" : make("p", {}, "None yet: name a group, and it is one."));
    if (focus && (more || !document.activeElement?.dataset?.name)) {
      list.querySelector(`${more ? ".more" : ".class"}[data-name="${CSS.escape(focus)}"]`)?.focus();
    }
    facts.replaceChildren(...(app.blind() ? [] : standing()));
  };
  listen((what) => what === "state" && show());
  return show;
}

function entry(known, index, app) {
  const labelled = known.human + known.page + known.exam;
  const blind = app.blind();
  const counts = blind ? [] : [make("span", {}, `${thousands(labelled)} labelled`),
    known.model ? make("span", {}, `, ${thousands(known.model)} accepted`) : null];
  const spoken = `${known.name}${index < 9 ? `, key ${index + 1}` : ""}${blind ? "" : `, ${labelled} labelled, ${known.model} guesses accepted`}`;
  return make("div.row", { "--class": colour(index) },
    make("button.class", { data: { drop: "class", name: known.name }, "aria-label": spoken, onclick: () => app.assign(known.name) },
      make("kbd", {}, index < 9 ? String(index + 1) : "·"), make("span.name", {}, known.name), make("small", {}, counts)),
    make("button.more", { data: { name: known.name }, title: `Rename ${known.name}, or merge it with another`,
      "aria-label": `Rename or merge ${known.name}`, onclick: () => rename(app, known.name) }, "✎"));
}

function standing() {
  const { exam, model, features, coming, disputed } = state;
  const lines = [];
  if (exam.done) {
    lines.push(["Exam", `${percent(exam.accuracy, 1)} right (${percent(exam.low, 0)} to ${percent(exam.high, 0)})`]);
    if (exam.balanced !== null && exam.balanced !== undefined) lines.push(["Each class alike", percent(exam.balanced, 1)]);
  }
  if (model?.labels) lines.push([model.busy ? "Model (learning)" : "Model", `from ${thousands(model.labels)} labels`]);
  if (disputed) lines.push(["Disputed", thousands(disputed)]);
  const table = lines.length ? [make("dl", {}, lines.map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]).flat())] : [];
  const shown = ({ balanced, exam, before }) => (exam === undefined ? (balanced === null ? "soon" : percent(balanced, 1))
    : `exam ${percent(exam, 1)}, without ${percent(before, 1)}`);
  if (features?.some(({ balanced }) => balanced !== null)) {
    table.push(make("table", {}, make("caption", {}, "How well features separate the classes"),
      make("tbody", {}, features.map((one) => make("tr", {}, make("th", { scope: "row" }, one.name, one.used ? make("em", {}, " (in use)") : null),
        make("td", {}, shown(one)))),
      coming && !features.some(({ name }) => name === coming) ? make("tr", {}, make("th", { scope: "row" }, coming), make("td", {}, "is learning")) : null)));
  }
  if (model?.labels >= 50 && model.separates === false) {
    table.push(make("p.warn", {}, "None of the features separates these classes. Check the model's groups with care."));
  }
  return table;
}

/** Makes a class of these rows; without any, of what the screen is about: a group, an image. */
export async function newClass(app, rows = null) {
  const chosen = rows || app.everything();
  const later = app.screen.aside && rows ? " Leave the name empty to give it later." : "";
  const name = await askText("New group", { label: chosen.length === 1 ? "What is in this image?" : "What is in these images?",
    button: "Create", empty: Boolean(later), hint: chosen.length ? `${count(chosen.length, "image")} will be in it.${later}` : "" });
  if (name === null) return;
  if (!name) {
    app.screen.aside(chosen);
    return;
  }
  if (classNumber(name) < 0) {
    try {
      await act("/api/class", { name });
    } catch (error) {
      app.complain(error.message);
      return;
    }
    state.classes = [...state.classes, { name, human: 0, page: 0, model: 0, exam: 0 }];
  }
  if (rows) app.assignRows(rows, name);
  else if (chosen.length) app.assign(name);
  else app.tell(`There is a new class: ${name}.`);
  app.refresh();
}

async function rename(app, from) {
  const to = await askText(`Rename ${from}`, { label: "New name", value: from, button: "Rename",
    names: state.classes.map(({ name }) => name).filter((name) => name !== from),
    hint: "The name of another class merges the two." });
  if (to === null || to === from) return;
  const merged = classNumber(to) >= 0;
  try {
    await act("/api/class/rename", { from, to });
    app.tell(merged ? `${from} and ${to} are one class now: ${to}.` : `${from} is called ${to} now.`);
  } catch (error) {
    app.complain(error.message);
  }
  app.refresh();
}
