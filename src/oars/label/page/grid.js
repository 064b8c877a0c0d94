// A grid of thumbnails of any number of rows: only those in sight have elements. Each can be taken out by a click, a tap
// or space, and dragged; what was taken out is dragged together.

import { make, thousands } from "./dom.js";
import { drags } from "./drag.js";
import { paint, sharpen } from "./thumbs.js";

const GAP = 6;
let size = 92;

export class Grid {
  /** `changed()` is called when something is taken out or put back; `opened(row)` when one is to be looked at. */
  constructor({ label, changed = () => {}, opened = null, marks = true, describe = () => "" }) {
    Object.assign(this, { label, changed, opened, marks, describe });
    this.rows = [];
    this.out = new Set();
    this.at = 0;
    this.tiles = new Map();  // index -> element
    this.spare = [];
    this.inner = make("div.tiles", { role: "listbox", "aria-multiselectable": "true", "aria-label": label });
    this.element = make("div.grid.none", { onscroll: () => this.soon() }, this.inner);
    this.inner.addEventListener("click", (event) => this.clicked(event));
    this.inner.addEventListener("focusin", (event) => { this.at = Number(event.target.dataset.index); });
    this.inner.addEventListener("dblclick", (event) => this.opened && this.tileOf(event) && this.opened(this.rowOf(event)));
    drags(this.inner, (event) => this.tileOf(event) && this.taken(this.rowOf(event)));
    new ResizeObserver(() => this.layout()).observe(this.element);
  }

  show(rows, keep = false) {
    this.rows = rows;
    this.element.classList.toggle("none", !rows.length);
    if (!keep) {
      this.out.clear();
      this.at = 0;
      this.element.scrollTop = 0;
    }
    this.at = Math.max(0, Math.min(this.at, rows.length - 1));
    this.name();
    this.layout();
  }

  name() {
    const out = this.out.size ? `, ${thousands(this.out.size)} taken out` : "";
    this.inner.setAttribute("aria-label", `${this.label}: ${thousands(this.rows.length)} images${out}`);
  }

  /** What a drag or key that begins at this row moves: all that was taken out if it is among them, else itself. */
  taken(row) {
    return this.out.has(row) ? [...this.out] : [row];
  }

  kept() {
    return this.out.size ? this.rows.filter((row) => !this.out.has(row)) : this.rows;
  }

  /** The rows that keys for a selection mean: those taken out, or the one that has the focus. */
  chosen() {
    if (this.out.size) return [...this.out];
    return this.inner.contains(document.activeElement) && this.rows.length ? [this.rows[this.at]] : [];
  }

  remove(rows) {
    const gone = new Set(rows);
    for (const row of rows) this.out.delete(row);
    this.show(this.rows.filter((row) => !gone.has(row)), true);
    this.changed();
  }

  toggle(index) {
    if (!this.marks) return;
    const row = this.rows[index];
    if (!this.out.delete(row)) this.out.add(row);
    const tile = this.tiles.get(index);
    if (tile) this.dress(tile, index);
    this.name();
    this.changed();
  }

  focus() {
    this.scrollTo(this.at);
    this.render();
    this.tiles.get(this.at)?.focus({ preventScroll: true });
  }

  key(event) {
    if (!this.inner.contains(document.activeElement)) {
      if (!event.key.startsWith("Arrow") || !this.rows.length) return false;
      this.focus();
      return true;
    }
    const page = this.columns * Math.max(1, Math.floor(this.element.clientHeight / this.pitch));
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns, Home: -this.rows.length,
      End: this.rows.length, PageUp: -page, PageDown: page };
    if (event.key in steps) {
      this.goTo(Math.max(0, Math.min(this.rows.length - 1, this.at + steps[event.key])));
    } else if (event.key === " ") {
      if (this.marks) this.toggle(this.at);
      else this.opened?.(this.rows[this.at]);
    } else if (event.key === "v" && this.opened) this.opened(this.rows[this.at]);
    else return false;
    return true;
  }

  resize(factor) {
    size = Math.round(Math.max(48, Math.min(220, size * factor)));
    if (sharpen(size > 110)) for (const tile of [...this.tiles.values(), ...this.spare]) tile.dataset.row = "";
    this.layout();
  }

  goTo(index) {
    this.at = index;
    this.focus();
  }

  clicked(event) {
    const tile = this.tileOf(event);
    if (!tile) return;
    const index = Number(tile.dataset.index);
    const from = this.at;
    this.at = index;
    tile.focus({ preventScroll: true });
    if (!this.marks) return this.opened?.(this.rows[index]);
    if (event.shiftKey) {
      for (let other = Math.min(from, index); other <= Math.max(from, index); other += 1) this.out.add(this.rows[other]);
      this.render(true);
      this.name();
      this.changed();
    } else this.toggle(index);
  }

  tileOf(event) {
    return event.target.closest(".tile");
  }

  rowOf(event) {
    return this.rows[Number(this.tileOf(event).dataset.index)];
  }

  scrollTo(index) {
    const top = Math.floor(index / this.columns) * this.pitch;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop) this.element.scrollTop = top;
    else if (top + this.pitch > scrollTop + clientHeight) this.element.scrollTop = top + this.pitch - clientHeight;
  }

  layout() {
    const wide = this.element.clientWidth - GAP;
    this.columns = Math.max(1, Math.round(wide / (size + GAP)));
    this.pitch = wide / this.columns;
    if (wide <= 0) return;
    this.inner.style.height = `${Math.ceil(this.rows.length / this.columns) * this.pitch + GAP}px`;
    this.inner.style.setProperty("--tile", `${this.pitch - GAP}px`);
    this.render(true);
  }

  soon() {
    this.due ??= requestAnimationFrame(() => {
      this.due = null;
      this.render();
    });
  }

  render(all = false) {
    const { scrollTop, clientHeight } = this.element;
    const first = Math.max(0, Math.floor(scrollTop / this.pitch) - 1) * this.columns;
    const last = Math.min(this.rows.length, (Math.ceil((scrollTop + clientHeight) / this.pitch) + 1) * this.columns);
    for (const [index, tile] of this.tiles) {
      if (index >= first && index < last) continue;
      if (tile === document.activeElement) this.element.focus({ preventScroll: true });
      this.tiles.delete(index);
      tile.remove();
      if (this.spare.length < 200) this.spare.push(tile);
    }
    for (let index = first; index < last; index += 1) {
      const known = this.tiles.get(index);
      if (known && !all) continue;
      const tile = known || this.spare.pop() || make("div.tile", { role: "option" });
      this.place(tile, index);
      this.dress(tile, index);
      if (!known) {
        this.tiles.set(index, tile);
        this.inner.append(tile);
      }
    }
    this.anchor(this.at >= first && this.at < last ? this.at : Math.min(last - 1, first + this.columns));
  }

  /** Tab reaches one tile: the one that had the focus, or one in sight if that was scrolled away. */
  anchor(index) {
    if (this.reached !== index && this.tiles.has(this.reached)) this.tiles.get(this.reached).tabIndex = -1;
    if (this.tiles.has(index)) this.tiles.get(index).tabIndex = 0;
    this.reached = index;
  }

  place(tile, index) {
    tile.dataset.index = index;
    const x = GAP + (index % this.columns) * this.pitch;
    const y = GAP + Math.floor(index / this.columns) * this.pitch;
    tile.style.transform = `translate(${x}px, ${y}px)`;
    tile.tabIndex = -1;
    if (tile.dataset.row !== String(this.rows[index])) paint(tile, this.rows[index]);
  }

  dress(tile, index) {
    const row = this.rows[index];
    const out = this.out.has(row);
    tile.classList.toggle("out", out);
    tile.setAttribute("aria-selected", String(!out));
    tile.setAttribute("aria-posinset", index + 1);
    tile.setAttribute("aria-setsize", this.rows.length);
    tile.setAttribute("aria-label", `image ${thousands(row)}${out ? ", taken out" : ""}${this.describe(row)}`);
  }
}
