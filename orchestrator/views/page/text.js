"use strict";
// Elements and numbers. Text from a run becomes text nodes only: nothing here, or anywhere, parses it as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element: `h("td.wrap", {title: "…"}, "text", child)`; functions become listeners, false and null are left out. */
function h(what, attributes, ...children) {
  const [tag, ...classes] = what.split(".");
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.join(" ");
  return dress(node, attributes, children);
}

function s(tag, attributes, ...children) {
  return dress(document.createElementNS(SVG, tag), attributes, children);
}

function dress(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}

const byId = (id) => document.getElementById(id);

/** Put children into a node, leaving it alone where it says and shows the same already: nothing flickers, focus stays. */
function fill(node, ...children) {
  const fresh = document.createElement("div");
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined && child !== false) fresh.append(child);
  adopt(node, fresh);
  return node;
}

/** Make a node's children like those of another, keeping what is equal. Listeners stay with the kept ones. */
function adopt(node, fresh) {
  const olds = [...node.childNodes], news = [...fresh.childNodes];
  news.forEach((next, place) => {
    const old = olds[place];
    if (!old) node.append(next);
    else if (old.nodeType === Node.TEXT_NODE && next.nodeType === Node.TEXT_NODE) {
      if (old.data !== next.data) old.data = next.data;
    } else if (old.nodeType === Node.ELEMENT_NODE && next.nodeType === Node.ELEMENT_NODE && alike(old, next)) {
      for (const { name } of [...old.attributes]) if (!next.hasAttribute(name) && name !== "style") old.removeAttribute(name);
      for (const { name, value } of [...next.attributes]) if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
      if (old.style.cssText !== next.style.cssText) old.style.cssText = next.style.cssText;
      adopt(old, next);
    } else old.replaceWith(next);
  });
  for (const old of olds.slice(news.length)) old.remove();
}

// What has listeners is told apart by its key, so that a kept element never does the work of another.
const alike = (old, next) => old.tagName === next.tagName && old.dataset?.key === next.dataset?.key;

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function number(value, digits = 3) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e15 || (size > 0 && size < 1e-4)) return value.toExponential(1);
  if (size >= 1e9) return (value / 1e9).toFixed(1) + "G";
  if (size >= 1e6) return (value / 1e6).toFixed(1) + "M";
  if (size >= 1e4) return (value / 1e3).toFixed(size >= 1e5 ? 0 : 1) + "k";
  if (Number.isInteger(value)) return String(value);
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(digits);
}

const percent = (share) => (isNumber(share) ? (100 * share).toFixed(1) + " %" : "–");

function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 1) return (1000 * seconds).toFixed(0) + " ms";
  if (seconds < 10) return seconds.toFixed(1) + " s";
  const whole = Math.round(seconds);
  if (whole < 60) return whole + " s";
  const minutes = Math.floor(whole / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  if (minutes >= 10 && hours < 1) return `${minutes} m`;
  if (hours < 1) return `${minutes} m ${String(whole % 60).padStart(2, "0")} s`;
  if (days < 1) return `${hours} h ${String(minutes % 60).padStart(2, "0")} m`;
  return `${days} d ${hours % 24} h`;
}

const clockTime = (at) => (at ? new Date(1000 * at).toISOString().replace("T", " ").slice(0, 19) + "Z" : "–");

/** A table in a box of its own. `columns`: [{name, left, wrap, cell: row => text or node}], `rows` with a key each. */
function table(columns, rows, { key = (_, place) => place, pick = null, picked = null, empty = "nothing yet" } = {}) {
  if (!rows.length) return h("p.note", { "data-key": "empty" }, empty);
  const side = (column) => (column.wrap ? "wrap" : column.left ? "left" : "");
  return h("div.scroll", { tabindex: 0, "data-key": "table" }, h("table", null,
    h("thead", null, h("tr", null, columns.map((column) => h("th", { class: column.left || column.wrap ? "left" : "", scope: "col" }, column.name)))),
    h("tbody", null, rows.map((row, place) => h("tr", {
      "data-key": key(row, place),
      class: [pick ? "pick" : "", picked !== null && key(row, place) === picked ? "picked" : ""].join(" ").trim() || null,
      click: pick ? (event) => { if (!event.target.closest("button, a")) pick(row); } : null,
    }, columns.map((column) => {
      const inside = column.cell(row);
      return h("td", { class: [side(column), column.cls || ""].join(" ").trim() || null }, inside);
    }))))));
}

function meter(share, target, color) {
  const bar = h("i"), mark = h("u");
  bar.style.width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
  mark.style.left = `${Math.max(0, Math.min(1, target || 0)) * 100}%`;
  return h("span.meter", { class: `meter ${color}`, title: `target ${percent(target)}` }, bar, mark);
}
