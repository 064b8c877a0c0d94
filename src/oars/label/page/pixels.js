// Raw images: fetched as they are in the source, and made visible: a scale, percentiles, a colour map.

import { get } from "./api.js";

const KEEP = 12;
const cache = new Map();
const TYPES = { uint8: Uint8Array, uint16: Uint16Array, float32: Float32Array };

/** {row, height, width, dtype, data}; the last few are kept, so that the next image is there before it is asked for. */
export function image(row) {
  if (!cache.has(row)) {
    const asked = load(row);
    asked.catch(() => cache.delete(row));
    cache.set(row, asked);
    if (cache.size > KEEP) cache.delete(cache.keys().next().value);
  }
  return cache.get(row);
}

async function load(row) {
  const answer = await get(`/api/image?row=${row}`);
  const dtype = answer.headers.get("X-Dtype");
  const data = new TYPES[dtype](await answer.arrayBuffer());
  const [height, width] = [Number(answer.headers.get("X-Height")), Number(answer.headers.get("X-Width"))];
  return { row, height, width, dtype, data };
}

/** Values at two percentiles of an image (of at most 60,000 of its pixels, which shows no difference). */
export function levels({ data }, low, high) {
  const step = Math.max(1, Math.floor(data.length / 60000));
  const some = [];
  for (let at = 0; at < data.length; at += step) if (Number.isFinite(data[at])) some.push(data[at]);
  if (!some.length) return [0, 1];
  some.sort((a, b) => a - b);
  const value = (share) => some[Math.min(some.length - 1, Math.round(share / 100 * (some.length - 1)))];
  const [dark, bright] = [value(low), value(high)];
  return [dark, bright > dark ? bright : dark + 1];
}

const SCALES = { linear: (x) => x, root: Math.sqrt, log: (x) => Math.log1p(255 * x) / Math.log(256) };
export const SCALE_NAMES = Object.keys(SCALES);

// Each map is a few colours that are mixed; the last is the brightest.
const MAPS = {
  gray: ["#000000", "#ffffff"],
  fire: ["#000000", "#5a0a2c", "#c2321f", "#f9a01b", "#fffbd0"],
  ice: ["#05030f", "#1b2a63", "#1e7ba8", "#6fd3c0", "#fbfff0"],
  print: ["#ffffff", "#000000"],
};
export const MAP_NAMES = Object.keys(MAPS);

function table(name) {
  const stops = MAPS[name].map((text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16)));
  const colours = new Uint32Array(256);
  for (let level = 0; level < 256; level += 1) {
    const along = level / 255 * (stops.length - 1);
    const at = Math.min(stops.length - 2, Math.floor(along));
    const [red, green, blue] = stops[at].map((from, channel) => Math.round(from + (along - at) * (stops[at + 1][channel] - from)));
    colours[level] = 0xff000000 | blue << 16 | green << 8 | red;
  }
  return colours;
}

const tables = Object.fromEntries(MAP_NAMES.map((name) => [name, table(name)]));
const MISSING = 0xffa03cd2;  // a colour that no map has
const FULL = 0xff3ce6ff;

/** A canvas with the image. `faults` marks pixels that are no number, and those at the top of an integer's range. */
export function picture(raw, { scale = "root", low = 1, high = 99.7, map = "gray", faults = false } = {}) {
  const { data, height, width, dtype } = raw;
  const [dark, bright] = levels(raw, low, high);
  const curve = SCALES[scale];
  const colours = tables[map];
  const top = { uint8: 255, uint16: 65535, float32: Infinity }[dtype];
  const colourOf = (value) => {
    if (faults && (Number.isNaN(value) || value >= top)) return value >= top ? FULL : MISSING;
    const share = Math.max(0, Math.min(1, (value - dark) / (bright - dark)));
    return colours[Math.round(255 * (curve(share) || 0))];
  };
  const out = new ImageData(width, height);
  const pixels = new Uint32Array(out.data.buffer);
  if (dtype === "float32") for (let at = 0; at < data.length; at += 1) pixels[at] = colourOf(data[at]);
  else {
    const known = new Uint32Array(top + 1);
    for (let at = 0; at < data.length; at += 1) pixels[at] = known[data[at]] ||= colourOf(data[at]);
  }
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width, height];
  canvas.getContext("2d").putImageData(out, 0, 0);
  return canvas;
}
