// Elements by hand. Text is always set as text, never as markup: names of files and classes may hold anything.

/** make("button.big", {title: "…", onclick}, "text", child) */
export function make(what, attributes = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  set(element, attributes);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (value === false || value === null || value === undefined) element.removeAttribute(name);
    else element.setAttribute(name, value === true ? "" : value);
  }
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("--")) element.style.setProperty(name, value);
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** "1 image", "1,234 images" */
export function count(number, one, many = `${one}s`) {
  return `${thousands(number)} ${number === 1 ? one : many}`;
}

export function thousands(number) {
  return Math.round(number).toLocaleString("en-US");
}

export function percent(share, digits = 0) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(digits)} %`;
}

// As far apart as nine colours can be, also for those who see red and green alike; each class has its number beside it.
const COLOURS = ["#1d93d4", "#c97800", "#25986a", "#d95f9d", "#9d8b00", "#7a6ff0", "#d1495b", "#5f8d00", "#8a6d4b"];

export function colour(index) {
  return COLOURS[index % COLOURS.length];
}
