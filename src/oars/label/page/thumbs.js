// Thumbnails: asked for in strips of many, kept as long as there is room, painted as a part of their strip.

import { get } from "./api.js";

const USUAL = 64;  // as the server keeps them
const SHARP = 128;
const STRIP = 60;
const KEEP = 400;
const AT_ONCE = 3;

const places = new Map();  // row -> {url, at, of}
const strips = [];
const wanted = new Map();  // row -> elements that show it
let under = 0;
let planned = false;
let size = USUAL;

/** Larger thumbnails want more pixels. True if all are to be painted again. */
export function sharpen(sharp) {
  if (size === (sharp ? SHARP : USUAL)) return false;
  size = sharp ? SHARP : USUAL;
  while (strips.length) forget(strips.shift());
  return true;
}

/** Shows the thumbnail of a row in an element, now or as soon as it is there. */
export function paint(element, row) {
  element.dataset.row = row;
  const place = places.get(row);
  if (place) {
    put(element, place);
    return;
  }
  element.style.backgroundImage = "";
  if (!wanted.has(row)) wanted.set(row, new Set());
  wanted.get(row).add(element);
  if (!planned) {
    planned = true;
    requestAnimationFrame(ask);
  }
}

function put(element, { url, at, of }) {
  element.style.backgroundImage = `url(${url})`;
  element.style.backgroundSize = `${100 * of}% 100%`;
  element.style.backgroundPosition = of > 1 ? `${100 * at / (of - 1)}% 0` : "0 0";
}

function ask() {
  planned = false;
  while (under < AT_ONCE && wanted.size) {
    const rows = [];
    for (const [row, elements] of wanted) {
      for (const element of elements) if (element.dataset.row !== String(row)) elements.delete(element);
      if (elements.size) rows.push(row);
      else wanted.delete(row);  // it was scrolled past
      if (rows.length === STRIP) break;
    }
    if (rows.length) fetchStrip(rows);
  }
}

async function fetchStrip(rows) {
  const elements = new Map(rows.map((row) => [row, wanted.get(row)]));
  for (const row of rows) wanted.delete(row);
  under += 1;
  try {
    const answer = await get(`/api/thumbs?rows=${rows.join(",")}&size=${size}`);
    const strip = { url: URL.createObjectURL(await answer.blob()), rows };
    strips.push(strip);
    rows.forEach((row, at) => {
      const place = { url: strip.url, at, of: rows.length };
      places.set(row, place);
      for (const element of elements.get(row)) if (element.dataset.row === String(row)) put(element, place);
    });
    while (strips.length > KEEP) forget(strips.shift());
  } catch (error) {
    console.warn(error.message);
  } finally {
    under -= 1;
    ask();
  }
}

function forget(strip) {
  URL.revokeObjectURL(strip.url);
  for (const row of strip.rows) if (places.get(row)?.url === strip.url) places.delete(row);
}
