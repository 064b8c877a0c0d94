// Small charts in SVG: lines, bars, areas, with axes that a reader can follow.

import { draw, make, thousands } from "./dom.js";

const [WIDE, HIGH, LEFT, LOW, TOP, RIGHT] = [520, 200, 46, 24, 10, 12];

/** {title, x: [..], lines: [{name, y: [..], colour}], xName, marks: [{x, text}], bars, log, xText, yText, top} */
export function chart({ title, x, lines, xName = "", marks = [], bars = false, fill = false, xText = short, yText = short, top = null }) {
  const values = lines.flatMap(({ y }) => y).filter(Number.isFinite);
  const picture = draw("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": spoken(title, lines, yText) });
  const figure = make("figure.chart-of", {}, make("figcaption", {}, title, " ", lines.length > 1
    ? lines.map(({ name, colour }) => make("span.key", { "--class": colour }, name)) : null), picture);
  if (x.length < 2 || !values.length) {
    picture.append(draw("text", { x: WIDE / 2, y: HIGH / 2, class: "middle" }, "nothing yet"));
    return figure;
  }
  const [first, last] = [x[0], x[x.length - 1]];
  const high = top ?? (Math.max(...values, 1e-12) * 1.05);
  const low = Math.min(0, ...values);
  const across = (value) => LEFT + (value - first) / (last - first || 1) * (WIDE - LEFT - RIGHT);
  const up = (value) => HIGH - LOW - (value - low) / (high - low || 1) * (HIGH - LOW - TOP);
  for (const value of ticks(low, high, 4)) {
    picture.append(draw("line", { x1: LEFT, x2: WIDE - RIGHT, y1: up(value), y2: up(value), class: "rule" }),
      draw("text", { x: LEFT - 6, y: up(value) + 4, class: "end" }, yText(value)));
  }
  for (const value of ticks(first, last, 6)) {
    picture.append(draw("text", { x: across(value), y: HIGH - 8, class: "middle" }, xText(value)));
  }
  if (xName) picture.append(draw("text", { x: WIDE - RIGHT, y: HIGH - LOW - 5, class: "end name" }, xName));
  for (const { y, colour, name } of lines) {
    if (bars) {
      const wide = (WIDE - LEFT - RIGHT) / y.length;
      y.forEach((value, at) => picture.append(draw("rect", { x: LEFT + at * wide + 0.5, width: Math.max(1, wide - 1), y: up(value),
        height: Math.max(0, up(low) - up(value)), "--class": colour, class: "bar" })));
      continue;
    }
    const path = y.map((value, at) => (Number.isFinite(value) ? `${at && Number.isFinite(y[at - 1]) ? "L" : "M"}${across(x[at]).toFixed(1)} ${up(value).toFixed(1)}` : "")).join("");
    if (fill) picture.append(draw("path", { d: `${path}L${across(last)} ${up(low)}L${across(first)} ${up(low)}Z`, class: "area", "--class": colour }));
    picture.append(draw("path", { d: path, class: "curve", "--class": colour }, draw("title", {}, name)));
  }
  for (const [number, mark] of marks.entries()) {  // their words stand below each other: they are often at one place
    const at = across(mark.x);
    picture.append(draw("line", { x1: at, x2: at, y1: TOP, y2: HIGH - LOW, class: "mark" }, draw("title", {}, mark.text)),
      draw("text", { x: at, y: TOP + 8 + 15 * (number % 6), class: at > WIDE / 2 ? "end marked" : "marked" }, ` ${mark.text} `));
  }
  return figure;
}

function spoken(title, lines, text) {
  return `${title}: ${lines.map(({ name, y }) => `${name}, last ${y.length ? text(y[y.length - 1]) : "none"}`).join("; ")}`;
}

function ticks(low, high, about) {
  const rough = (high - low) / about;
  const ten = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((factor) => factor * ten).find((size) => size >= rough) || rough || 1;
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) found.push(Math.abs(value) < step / 1e6 ? 0 : value);
  return found;
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(0);
  if (size >= 1000) return thousands(value);
  return String(Number(value.toPrecision(3)));
}
