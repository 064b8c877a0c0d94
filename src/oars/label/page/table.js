// The map as a table, for keyboards and screen readers: any number of rows, of which those in sight have elements.

import { make, thousands } from "./dom.js";

const HIGH = 26;

export class Table {
  /** `cells(row)` gives the texts of a row; `taken(rows)` gets what was chosen. */
  constructor({ label, columns, cells, taken }) {
    Object.assign(this, { label, cells, taken });
    this.count = 0;
    this.at = 0;
    this.chosen = new Set();
    this.body = make("div.lines", { role: "rowgroup" });
    this.head = make("div.line.top", { role: "row", "aria-rowindex": 1 }, columns.map((name) => make("span", { role: "columnheader" }, name)));
    this.scroll = make("div.scroll", { onscroll: () => this.soon() }, this.body);
    this.element = make("div.table", { role: "grid", "aria-label": label, "aria-multiselectable": "true" }, this.head, this.scroll);
    this.lines = new Map();
    this.body.addEventListener("click", (event) => {
      const line = event.target.closest(".line");
      if (!line) return;
      this.at = Number(line.dataset.row);
      this.choose();
    });
    this.body.addEventListener("focusin", (event) => { this.at = Number(event.target.dataset.row); });
    new ResizeObserver(() => this.render(true)).observe(this.scroll);
  }

  show(count) {
    this.count = count;
    this.body.style.height = `${count * HIGH}px`;
    this.element.setAttribute("aria-rowcount", count + 1);
    this.render(true);
  }

  choose() {
    if (!this.chosen.delete(this.at)) this.chosen.add(this.at);
    this.element.setAttribute("aria-label", `${this.label}, ${thousands(this.chosen.size)} chosen`);
    this.goTo(this.at);
    this.render(true);
  }

  goTo(row) {
    this.at = Math.max(0, Math.min(this.count - 1, row));
    const { scrollTop, clientHeight } = this.scroll;
    if (this.at * HIGH < scrollTop) this.scroll.scrollTop = this.at * HIGH;
    else if ((this.at + 1) * HIGH > scrollTop + clientHeight) this.scroll.scrollTop = (this.at + 1) * HIGH - clientHeight;
    this.render(true);
    this.lines.get(this.at)?.focus({ preventScroll: true });
  }

  key(event) {
    if (!this.element.contains(document.activeElement)) return false;
    const page = Math.max(1, Math.floor(this.scroll.clientHeight / HIGH) - 1);
    const steps = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page, Home: -this.count, End: this.count };
    if (event.key in steps) {
      if (event.shiftKey) this.chosen.add(this.at);
      this.goTo(this.at + steps[event.key]);
      if (event.shiftKey) this.chosen.add(this.at);
      this.render(true);
    } else if (event.key === " ") this.choose();
    else if (event.key === "Enter") this.taken(this.chosen.size ? [...this.chosen].sort((a, b) => a - b) : [this.at]);
    else return false;
    return true;
  }

  soon() {
    this.due ??= requestAnimationFrame(() => {
      this.due = null;
      this.render();
    });
  }

  render(all = false) {
    const { scrollTop, clientHeight } = this.scroll;
    const first = Math.max(0, Math.floor(scrollTop / HIGH) - 2);
    const last = Math.min(this.count, Math.ceil((scrollTop + clientHeight) / HIGH) + 2);
    for (const [row, line] of this.lines) {
      if (row >= first && row < last) continue;
      if (line === document.activeElement) this.scroll.focus({ preventScroll: true });
      line.remove();
      this.lines.delete(row);
    }
    for (let row = first; row < last; row += 1) {
      const line = this.lines.get(row) || make("div.line", { role: "row", data: { row }, "aria-rowindex": row + 2 });
      if (!this.lines.has(row)) {
        this.lines.set(row, line);
        line.style.transform = `translateY(${row * HIGH}px)`;
        this.body.append(line);
      } else if (!all) continue;
      line.tabIndex = -1;
      line.setAttribute("aria-selected", String(this.chosen.has(row)));
      line.replaceChildren(...this.cells(row).map((text) => make("span", { role: "gridcell" }, text)));
    }
    // Tab reaches one line: the one that had the focus, or one in sight if that was scrolled away.
    const anchor = this.at >= first && this.at < last ? this.at : Math.min(last - 1, first + 3);
    for (const [row, line] of this.lines) line.tabIndex = row === anchor ? 0 : -1;
  }
}
