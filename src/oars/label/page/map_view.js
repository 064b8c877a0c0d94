// The map's canvas: moved and zoomed by mouse, fingers and keys; a line drawn around points takes them.

import { make } from "./dom.js";
import { Points } from "./points.js";

const QUICK = 24;   // ms: a frame below this leaves room for more points
const SLOW = 32;    // ms: above this fewer are drawn while the map moves
const CIRCLE = 0.22; // the part of the height that the keys' circle takes

export class MapView {
  /** `taken(rows)` gets what is inside the line; `hover(row, x, y)` the point under the pointer. */
  constructor({ taken, hover }) {
    Object.assign(this, { taken, hover });
    this.canvas = make("canvas", { tabindex: 0, role: "application", "aria-roledescription": "map",
      "aria-label": "Map of all images: arrows move, plus and minus zoom, Enter takes the points in the circle" });
    this.over = make("canvas.over", { "aria-hidden": "true" });
    this.element = make("div.chart", {}, this.canvas, this.over);
    this.points = new Points(this.canvas);
    this.view = { x: 0, y: 0, zoom: 0.95 };
    this.pointers = new Map();
    this.share = 1;
    this.moving = false;
    this.lasso = true;
    for (const name of ["pointerdown", "pointermove", "pointerup", "pointercancel", "pointerleave"]) {
      this.canvas.addEventListener(name, (event) => this.pointer(event));
    }
    this.canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoomBy(Math.exp(-event.deltaY / 500), event);
    }, { passive: false });
    // Else the browser takes a quick line for a fling, and the next tap for what stops it.
    this.canvas.addEventListener("touchstart", (event) => event.preventDefault(), { passive: false });
    this.canvas.addEventListener("contextmenu", (event) => event.preventDefault());
    for (const name of ["focus", "blur", "keydown"]) this.canvas.addEventListener(name, () => this.byKeys(name !== "blur"));
    new ResizeObserver(() => this.resize()).observe(this.element);
  }

  place(xy) {
    this.xy = xy;
    this.near = null;
    this.points.place(xy);
  }

  colour(kinds, palette) {
    this.points.colour(kinds, palette);
    this.ready = kinds.length === this.points.count;
    this.soon(false);
  }

  resize() {
    const dense = Math.min(2, window.devicePixelRatio || 1);
    const { clientWidth, clientHeight } = this.element;
    for (const canvas of [this.canvas, this.over]) {
      Object.assign(canvas, { width: Math.round(clientWidth * dense), height: Math.round(clientHeight * dense) });
    }
    this.dense = dense;
    this.soon(false);
    this.drawOver();
  }

  /** Draws at the next frame; while things move, as many points as there is time for, and all when they rest. */
  soon(moving = true) {
    this.moving ||= moving;
    this.rest = performance.now() + 160;
    this.due ??= requestAnimationFrame((time) => this.frame(time));
  }

  frame(time) {
    this.due = null;
    if (!this.ready || !this.element.isConnected) return;
    const took = time - this.last;
    this.last = time;
    const still = !this.moving || performance.now() > this.rest;
    if (this.moving && took < 1000) {
      if (took > SLOW) this.share = Math.max(0.05, this.share * Math.max(0.5, QUICK / took));
      else if (took < QUICK) this.share = Math.min(1, this.share * 1.08);
    }
    this.canvas.dataset.drawn = this.points.draw(this.view, still ? 1 : this.share);
    this.moving = !still;
    if (this.moving) this.due = requestAnimationFrame((next) => this.frame(next));
    else this.last = -1e9;
  }

  /** A place of the map from a place on the screen. */
  where({ clientX, clientY }) {
    const box = this.canvas.getBoundingClientRect();
    const side = Math.min(box.width, box.height) / 2 * this.view.zoom;
    return [(clientX - box.left - box.width / 2) / side + this.view.x, (box.top + box.height / 2 - clientY) / side + this.view.y];
  }

  zoomBy(factor, event = null) {
    const [x, y] = event ? this.where(event) : [this.view.x, this.view.y];
    const zoom = Math.max(0.5, Math.min(2000, this.view.zoom * factor));
    const part = this.view.zoom / zoom;
    this.view = { x: x - (x - this.view.x) * part, y: y - (y - this.view.y) * part, zoom };
    this.soon();
  }

  moveBy(across, along) {
    const side = Math.min(this.element.clientWidth, this.element.clientHeight) / 2 * this.view.zoom;
    this.view.x -= across / side;
    this.view.y += along / side;
    this.soon();
  }

  whole() {
    this.view = { x: 0, y: 0, zoom: 0.95 };
    this.soon();
  }

  pointer(event) {
    const last = this.pointers.get(event.pointerId);
    const now = { clientX: event.clientX, clientY: event.clientY };
    if (event.type === "pointerdown") {
      this.canvas.focus({ preventScroll: true });
      this.byKeys(false);
      this.canvas.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, now);
      this.line = this.pointers.size === 1 && this.lasso && !event.button && !event.shiftKey ? [this.where(event)] : null;
    } else if (event.type === "pointermove" && last) {
      if (this.pointers.size === 2) {
        const other = [...this.pointers].find(([id]) => id !== event.pointerId)[1];
        const apart = (one) => Math.hypot(one.clientX - other.clientX, one.clientY - other.clientY);
        this.moveBy((now.clientX - last.clientX) / 2, (now.clientY - last.clientY) / 2);
        this.zoomBy(apart(now) / Math.max(1, apart(last)), other);
      } else if (this.line) this.line.push(this.where(event));
      else this.moveBy(now.clientX - last.clientX, now.clientY - last.clientY);
      this.pointers.set(event.pointerId, now);
      if (this.line) this.drawOver();
    } else if (event.type === "pointermove") this.look(event);
    else if (event.type === "pointerleave") this.hover(null);
    else {
      this.pointers.delete(event.pointerId);
      const { line } = this;
      this.line = null;
      this.drawOver();
      if (line?.length > 2 && event.type === "pointerup") this.taken(this.inside(line));
    }
  }

  /** Keys get a circle to aim with, which a pointer does not need. */
  byKeys(keyed) {
    this.keyed = keyed;
    this.element.classList.toggle("keyed", keyed);
    this.drawOver();
  }

  key(event) {
    if (document.activeElement !== this.canvas && event.key.startsWith("Arrow")) return false;
    const moves = { ArrowLeft: [50, 0], ArrowRight: [-50, 0], ArrowUp: [0, 50], ArrowDown: [0, -50] };
    if (event.key in moves) this.moveBy(...moves[event.key]);
    else if (event.key === "+" || event.key === "=") this.zoomBy(1.3);
    else if (event.key === "-") this.zoomBy(1 / 1.3);
    else if (event.key === "0") this.whole();
    else if (event.key === "Enter" && document.activeElement === this.canvas) {
      const { clientWidth, clientHeight } = this.element;
      const radius = CIRCLE * clientHeight / (Math.min(clientWidth, clientHeight) / 2 * this.view.zoom);
      const turn = (step) => [this.view.x + radius * Math.cos(step * Math.PI / 24), this.view.y + radius * Math.sin(step * Math.PI / 24)];
      this.taken(this.inside(Array.from({ length: 48 }, (_, step) => turn(step))));
    } else return false;
    return true;
  }

  /** The rows inside a line: it is filled into a small picture, in which each point is looked up. */
  inside(line) {
    const [xs, ys] = [line.map(([x]) => x), line.map(([, y]) => y)];
    const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    const side = 1024;
    const [across, along] = [side / Math.max(1e-9, right - left), side / Math.max(1e-9, high - low)];
    const canvas = new OffscreenCanvas(side, side);
    const pen = canvas.getContext("2d", { willReadFrequently: true });
    pen.beginPath();
    for (const [x, y] of line) pen.lineTo((x - left) * across, (y - low) * along);
    pen.fill("evenodd");
    const mask = pen.getImageData(0, 0, side, side).data;
    const rows = [];
    for (let row = 0; row < this.points.count; row += 1) {
      const [x, y] = [this.xy[2 * row], this.xy[2 * row + 1]];
      if (x < left || x >= right || y < low || y >= high) continue;
      if (mask[4 * (Math.floor((y - low) * along) * side + Math.floor((x - left) * across)) + 3] > 127) rows.push(row);
    }
    return rows;
  }

  /** The nearest point to the pointer, at most 12 pixels away; the points lie sorted in squares for this. */
  look(event) {
    if (!this.xy || this.moving) return;
    const [x, y] = this.where(event);
    const far = 12 / (Math.min(this.element.clientWidth, this.element.clientHeight) / 2 * this.view.zoom);
    this.near ??= squares(this.xy);
    this.hover(nearest(this.near, this.xy, x, y, far), event.clientX, event.clientY);
  }

  drawOver() {
    const pen = this.over.getContext("2d");
    const { width, height } = this.over;
    pen.clearRect(0, 0, width, height);
    pen.lineWidth = 2 * this.dense;
    pen.strokeStyle = "#ffffff";
    if (this.line) {
      const side = Math.min(width, height) / 2 * this.view.zoom;
      pen.beginPath();
      for (const [x, y] of this.line) pen.lineTo((x - this.view.x) * side + width / 2, height / 2 - (y - this.view.y) * side);
      pen.closePath();
      pen.fillStyle = "rgb(255 255 255 / 15%)";
      pen.fill();
      pen.stroke();
    } else if (this.keyed) {
      pen.setLineDash([6 * this.dense, 6 * this.dense]);
      pen.beginPath();
      pen.arc(width / 2, height / 2, CIRCLE * height, 0, 2 * Math.PI);
      pen.stroke();
      pen.setLineDash([]);
    }
  }
}

const SIDE = 512;
const square = (value) => Math.max(0, Math.min(SIDE - 1, Math.floor((value + 1) / 2 * SIDE)));

function squares(xy) {
  const starts = new Uint32Array(SIDE * SIDE + 1);
  const count = xy.length / 2;
  const at = (row) => square(xy[2 * row + 1]) * SIDE + square(xy[2 * row]);
  for (let row = 0; row < count; row += 1) starts[at(row) + 1] += 1;
  for (let cell = 0; cell < SIDE * SIDE; cell += 1) starts[cell + 1] += starts[cell];
  const next = starts.slice();
  const rows = new Uint32Array(count);
  for (let row = 0; row < count; row += 1) {
    const cell = at(row);
    rows[next[cell]] = row;
    next[cell] += 1;
  }
  return { starts, rows };
}

function nearest({ starts, rows }, xy, x, y, far) {
  let [best, row] = [Math.min(far, 0.1) ** 2, null];
  for (let down = square(y - far); down <= square(y + far); down += 1) {
    for (let cell = down * SIDE + square(x - far); cell <= down * SIDE + square(x + far); cell += 1) {
      for (let at = starts[cell]; at < starts[cell + 1]; at += 1) {
        const apart = (xy[2 * rows[at]] - x) ** 2 + (xy[2 * rows[at] + 1] - y) ** 2;
        if (apart < best) [best, row] = [apart, rows[at]];
      }
    }
  }
  return row;
}
