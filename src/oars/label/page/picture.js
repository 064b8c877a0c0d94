// One large image that can be zoomed and moved; as long as it is shown whole, it can be dragged onto a class.

import { make } from "./dom.js";
import { drags } from "./drag.js";
import { image, picture } from "./pixels.js";

export class Picture {
  /** `hover({x, y, value})` hears of the pixel under the pointer. */
  constructor({ label, hover = null, options = {} }) {
    Object.assign(this, { label, hover, options });
    this.row = null;
    this.raw = null;
    this.pointers = new Map();
    this.canvas = make("canvas", { tabindex: 0, role: "img", "aria-label": label });
    this.element = make("div.picture", {}, this.canvas);
    drags(this.canvas, () => (this.zoom === 1 && this.row !== null && !this.still ? [this.row] : null));
    this.canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoomBy(Math.exp(-event.deltaY / 400), event);
    }, { passive: false });
    this.canvas.addEventListener("dblclick", () => this.fit());
    for (const name of ["pointerdown", "pointermove", "pointerup", "pointercancel"]) {
      this.canvas.addEventListener(name, (event) => this.pointer(event));
    }
    this.canvas.addEventListener("touchmove", (event) => this.zoom > 1 && event.preventDefault(), { passive: false });
    new ResizeObserver(() => this.draw()).observe(this.element);
    this.fit();
  }

  async show(row) {
    this.row = row;
    if (row === null) {
      this.raw = null;
      this.draw();
      return;
    }
    const raw = await image(row);
    if (this.row !== row) return;
    this.raw = raw;
    this.canvas.setAttribute("aria-label", `${this.label} ${row}`);
    this.canvas.dataset.row = row;
    this.fit();
    this.paint(this.options);
  }

  paint(options) {
    this.options = options;
    if (!this.raw) return;
    this.shown = picture(this.raw, options);
    this.draw();
  }

  fit() {
    [this.zoom, this.x, this.y] = [1, 0, 0];
    this.draw();
  }

  zoomBy(factor, event = null) {
    const [x, y] = event ? this.inside(event) : [0, 0];
    const zoom = Math.max(1, Math.min(60, this.zoom * factor));
    this.x = x - (x - this.x) * zoom / this.zoom;
    this.y = y - (y - this.y) * zoom / this.zoom;
    this.zoom = zoom;
    if (zoom === 1) [this.x, this.y] = [0, 0];
    this.draw();
  }

  moveBy(x, y) {
    if (this.zoom === 1) return;
    this.x += x;
    this.y += y;
    this.draw();
  }

  key({ key }) {
    const moves = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };
    if (key === "+" || key === "=") this.zoomBy(1.5);
    else if (key === "-") this.zoomBy(1 / 1.5);
    else if (key === "0") this.fit();
    else if (key in moves && this.zoom > 1) this.moveBy(...moves[key]);
    else return false;
    return true;
  }

  /** A place on the canvas, from its middle, in pixels of the screen. */
  inside({ clientX, clientY }) {
    const box = this.canvas.getBoundingClientRect();
    return [clientX - box.left - box.width / 2, clientY - box.top - box.height / 2];
  }

  pointer(event) {
    const last = this.pointers.get(event.pointerId);
    if (event.type === "pointerdown") {
      this.pointers.set(event.pointerId, event);
      if (this.zoom > 1) this.canvas.setPointerCapture(event.pointerId);
    } else if (event.type === "pointermove") {
      if (last && this.pointers.size === 2) {
        const other = [...this.pointers].find(([id]) => id !== event.pointerId)[1];
        const apart = (one) => Math.hypot(one.clientX - other.clientX, one.clientY - other.clientY);
        this.zoomBy(apart(event) / Math.max(1, apart(last)), other);
      } else if (last) this.moveBy(event.clientX - last.clientX, event.clientY - last.clientY);
      if (last) this.pointers.set(event.pointerId, event);
      this.tell(event);
    } else this.pointers.delete(event.pointerId);
  }

  tell(event) {
    if (!this.hover || !this.raw) return;
    const [x, y] = this.inside(event);
    const { height, width, data } = this.raw;
    const column = Math.floor((x - this.x) / this.unit() + width / 2);
    const line = Math.floor((y - this.y) / this.unit() + height / 2);
    const within = column >= 0 && line >= 0 && column < width && line < height;
    this.hover(within ? { x: column, y: line, value: data[line * width + column] } : null);
  }

  unit() {
    const { clientWidth, clientHeight } = this.element;
    return this.zoom * Math.min(clientWidth / this.raw.width, clientHeight / this.raw.height);
  }

  draw() {
    if (!this.element) return;
    const { clientWidth, clientHeight } = this.element;
    const dense = window.devicePixelRatio || 1;
    const [width, height] = [Math.round(clientWidth * dense), Math.round(clientHeight * dense)];
    if (this.canvas.width !== width || this.canvas.height !== height) Object.assign(this.canvas, { width, height });
    const pen = this.canvas.getContext("2d");
    pen.clearRect(0, 0, width, height);
    if (!this.raw || !this.shown) return;
    const unit = this.unit() * dense;
    pen.imageSmoothingEnabled = false;
    pen.drawImage(this.shown, width / 2 + this.x * dense - unit * this.raw.width / 2,
      height / 2 + this.y * dense - unit * this.raw.height / 2, unit * this.raw.width, unit * this.raw.height);
  }
}
