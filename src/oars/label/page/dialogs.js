// Small windows: they take the keyboard while they are open and give it back to where it was.

import { make } from "./dom.js";

/** A small window that asks for one line of text. Null if it was closed. */
export function askText(title, { label, value = "", button = "OK", hint = "", empty = false, names = [] }) {
  return new Promise((settled) => {
    const input = make("input", { type: "text", maxlength: 40, list: "names", autocomplete: "off", "aria-label": label });
    input.value = value;
    const form = make("form", { method: "dialog" }, make("h2", {}, title), make("label", {}, label, input),
      make("datalist", { id: "names" }, names.map((known) => make("option", { value: known }))),
      hint ? make("p.hint", {}, hint) : null,
      make("p.buttons", {}, make("button.main", { value: "yes" }, button),
        make("button", { type: "button", onclick: () => dialog.close() }, "Cancel")));
    const dialog = make("dialog", { "aria-label": title, onclose() {
      dialog.remove();
      const text = input.value.trim();
      settled(dialog.returnValue === "yes" && (text || empty) ? text : null);
    } }, form);
    document.body.append(dialog);
    dialog.showModal();
    input.select();
  });
}

/** The keys of a screen, and those that hold everywhere. */
export function showKeys(title, tables) {
  const body = tables.map(([heading, keys]) => make("section", {}, make("h3", {}, heading),
    make("dl", {}, keys.map(([key, what]) => [make("dt", {}, key.split(" ").map((one) => make("kbd", {}, one))),
      make("dd", {}, what)]).flat())));
  const dialog = make("dialog.keys", { "aria-label": "Keys", onclose: () => dialog.remove() }, make("h2", {}, title),
    make("div", {}, body), make("form.buttons", { method: "dialog" }, make("button.main", {}, "Close")));
  document.body.append(dialog);
  dialog.showModal();
}
