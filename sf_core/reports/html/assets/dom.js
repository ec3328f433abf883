"use strict";
/* Elements, numbers and embedded data. Text reaches the page as text nodes only: what agents wrote is untrusted. */

const byId = (id) => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null && child !== ""));
  return node;
}

/* The bytes of a data script: base64 over zlib. */
async function decodeBlock(id) {
  const packed = Uint8Array.from(atob(byId(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function decodeJson(id) {
  return JSON.parse(new TextDecoder().decode(await decodeBlock(id)));
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const fixed = (digits) => (value) => (isNumber(value) ? value.toFixed(digits) : "");
const whole = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en") : "");
const percent = (value) => (isNumber(value) ? (100 * value).toFixed(0) + " %" : "");
const short = (value) => (isNumber(value) ? String(Number(value.toPrecision(4))) : "");
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

/* What would move the cursor, turn the reading direction or show nothing is written out. */
function visible(text) {
  return text
    .replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, (c) => `\\u{${c.codePointAt(0).toString(16)}}`)
    .replace(/\n/g, "\u21b5\n");
}
