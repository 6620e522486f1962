// How much of each expert lies in memory: layers left to right, experts top to bottom, percent in the cells.
import { count, escape, percent } from "../common/format.js";
import { SUPPRESS } from "../common/frame.js";
import { ring } from "../common/pointers.js";
import { sizeText } from "./words.js";

const LEFT = 30;
const TOP = 18;
const NUMBERED = [26, 14]; // the smallest cell that a number fits in
const LEVELS = 16; // of colour, where cells are too small to be drawn one by one
const UNKNOWN = "unknown";

// Measures shared by drawing, pointing and keys. Small cells touch, for a gap would be most of them.
function mapLayout({ layers, experts }, width) {
  const cw = Math.max(3, Math.min(42, (width - LEFT - 4) / Math.max(1, layers.length)));
  const ch = experts > 64 ? 3 : experts > 16 ? Math.max(4, Math.floor(300 / experts)) : 21;
  const numbered = cw >= NUMBERED[0] && ch >= NUMBERED[1];
  return { cw, ch, numbered, gap: numbered ? 2 : 0, width: LEFT + cw * layers.length + 4, height: TOP + ch * experts + 4 };
}

function residencyMap(view, state, layer, expert, width) {
  const at = mapLayout(state, width);
  const row = state.layers.indexOf(layer);
  const cells = at.numbered ? numberedCells(view, state, at) : smallCells(view, state, at);
  const here = row >= 0 && expert !== null ? ring(LEFT + row * at.cw, TOP + expert * at.ch, at.cw - at.gap, at.ch - at.gap) : "";
  return `<svg width="${at.width}" height="${at.height}" viewBox="0 0 ${at.width} ${at.height}" aria-hidden="true">${axes(state, at, layer, expert)}${cells}${here}</svg>`;
}

// What the colours stand for: the more of an expert is in memory, the more its cell stands out from the page, dark on a light one, bright on a dark one.
function scale(view) {
  const steps = Array.from({ length: LEVELS }, (_, i) => `<rect x="${5 * i}" y="1" width="5.5" height="10" fill="${view.palette.of((i + 1) / LEVELS)}"/>`).join("");
  const box = (dots) => `<svg width="12" height="12" aria-hidden="true"><rect x=".5" y=".5" width="11" height="11" fill="none" stroke="var(--line2)" stroke-dasharray="${dots}"/></svg>`;
  return `<p class="lg"><span>${box("2 2")} none</span><span>a little <svg width="${5 * LEVELS + 1}" height="12" aria-hidden="true">${steps}</svg> all: stands out most</span><span>${box("1 2")} not known</span></p>`;
}

function axes({ layers, experts }, at, layer, expert) {
  let s = "";
  const thin = (size, needed) => (size >= needed ? 1 : size >= needed / 4 ? 4 : 16);
  const [everyLayer, everyExpert] = [thin(at.cw, 18), thin(at.ch, 12)];
  layers.forEach((name, i) => {
    const clear = layer === name || Math.abs(layers.indexOf(layer) - i) * at.cw >= 20;
    if (name === layer || (i % everyLayer === 0 && clear)) s += `<text x="${LEFT + (i + 0.5) * at.cw - at.gap / 2}" y="12" text-anchor="middle"${name === layer ? ' class="b"' : ""}>${name}</text>`;
  });
  for (let e = 0; e < experts; e++) {
    const clear = expert === null || expert === e || Math.abs(expert - e) * at.ch >= 12;
    if (e === expert || (e % everyExpert === 0 && clear)) s += `<text x="${LEFT - 8}" y="${TOP + (e + 0.5) * at.ch + 4 - at.gap / 2}" text-anchor="end"${e === expert ? ' class="b"' : ""}>${e}</text>`;
  }
  return s;
}

function numberedCells(view, state, at) {
  let s = "";
  state.layers.forEach((_, l) => {
    for (let e = 0; e < state.experts; e++) {
      const value = state.share[l * state.experts + e];
      const [x, y, w, h] = [LEFT + l * at.cw, TOP + e * at.ch, at.cw - at.gap, at.ch - at.gap];
      const empty = Number.isNaN(value) || value === 0;
      const dots = Number.isNaN(value) ? "1 2" : "2 2";
      s += empty ? `<rect x="${x + 0.5}" y="${y + 0.5}" width="${w - 1}" height="${h - 1}" fill="none" stroke="var(--line2)" stroke-dasharray="${dots}"/>` : `<rect x="${x}" y="${y}" width="${w}" height="${h}" fill="${view.palette.of(value)}"/>`;
      const ink = empty ? "" : ` style="fill:${view.palette.inkOf(value)}"`;
      s += `<text x="${x + w / 2}" y="${y + h / 2 + 4}" text-anchor="middle"${ink}>${cellWord(state, l, e)}</text>`;
    }
  });
  return s;
}

// One path for each level of colour: thousands of cells of their own would be slow to build.
function smallCells(view, state, at) {
  const paths = new Map();
  state.layers.forEach((_, l) => {
    for (let e = 0; e < state.experts; e++) {
      const value = state.share[l * state.experts + e];
      const level = Number.isNaN(value) ? UNKNOWN : value === 0 ? 0 : Math.max(1, Math.round(value * LEVELS));
      const box = `M${(LEFT + l * at.cw).toFixed(1)} ${TOP + e * at.ch}h${at.cw.toFixed(1)}v${at.ch}h-${at.cw.toFixed(1)}z`;
      paths.set(level, (paths.get(level) ?? "") + box);
    }
  });
  const fill = (level) => (level === 0 || level === UNKNOWN ? `fill="none" stroke="var(--line2)" stroke-width=".5" stroke-dasharray="${level === 0 ? "2 2" : "1 2"}"` : `fill="${view.palette.of(level / LEVELS)}"`);
  return [...paths].map(([level, d]) => `<path d="${d}" ${fill(level)}/>`).join("");
}

// What a cell says: percent, the word of a lock, or that nobody knows. A little is not nothing, and nearly all is not all.
function cellWord(state, l, e) {
  const i = l * state.experts + e;
  const value = state.share[i];
  if (state.locked[i]) return "lock";
  if (Number.isNaN(value)) return "?";
  const whole = Math.round(100 * value);
  return String(value > 0 && value < 1 ? Math.min(99, Math.max(1, whole)) : whole);
}

// The cell under a point of the picture; null beside the map.
function cellAt(state, width, x, y) {
  const at = mapLayout(state, width);
  const [l, e] = [Math.floor((x - LEFT) / at.cw), Math.floor((y - TOP) / at.ch)];
  return l >= 0 && l < state.layers.length && e >= 0 && e < state.experts ? { layer: state.layers[l], expert: e } : null;
}

function stepOnExperts(state, layer, expert, right, down) {
  const clamp = (v, most) => Math.max(0, Math.min(most, v));
  const row = state.layers.indexOf(layer);
  return { layer: state.layers[clamp((row < 0 ? 0 : row) + right, state.layers.length - 1)], expert: clamp((expert ?? 0) + down, state.experts - 1) };
}

// The selected expert in words; then what the last button did.
function residencyWords(state, layer, expert) {
  if (!state.layers.length) return `<span class="q">${escape(state.reason)}</span>`;
  if (!state.available) return `<b>Not available here:</b> ${escape(state.reason)}`;
  const row = state.layers.indexOf(layer);
  const i = row * state.experts + expert;
  const known = Array.from(state.share).filter((value) => !Number.isNaN(value));
  const all = known.length ? `Of all experts ${percent(held(state))} of ${sizeText(sum(state.size))} is in memory${known.length < state.share.length ? `, as far as known (${count(state.share.length - known.length)} of ${count(state.share.length)} are not: ${escape(state.reason)})` : ""}.` : escape(state.reason);
  if (row < 0 || expert === null) return all;
  const share = state.share[i];
  const here = Number.isNaN(share) ? "not known" : `${percent(share)} of ${sizeText(state.size[i])}`;
  return `Layer ${layer}, expert ${expert}: <b>${here}</b>${state.locked[i] ? ", locked" : ""}. ${state.change ? escape(state.change) : `<span class="q">${all}</span>`}`;
}

const sum = (values) => values.reduce((total, value) => total + value, 0);
function held({ share, size }) {
  let [inside, all] = [0, 0];
  share.forEach((value, i) => {
    if (Number.isNaN(value)) return;
    inside += value * size[i];
    all += size[i];
  });
  return all ? inside / all : 0;
}

// The twin of the map: one row for each expert, one column for each layer; a huge map as one row for each layer.
function residencyTable(state) {
  const cell = (tag, text) => `<${tag}>${escape(text)}</${tag}>`;
  const line = (cells) => `<tr>${cells.join("")}</tr>`;
  if (state.experts * state.layers.length > 600) {
    const rows = state.layers.map((name, l) => {
      const row = Array.from(state.share.slice(l * state.experts, (l + 1) * state.experts));
      return line([cell("th", name), cell("td", row.filter((v) => v === 1).length), cell("td", row.filter((v) => v > 0 && v < 1).length), cell("td", row.filter((v) => v === 0).length), cell("td", row.filter(Number.isNaN).length)]);
    });
    return `<table><caption>Experts in memory by layer</caption><thead>${line(["layer", "whole", "in part", "not at all", "not known"].map((h) => cell("th", h)))}</thead><tbody>${rows.join("")}</tbody></table>`;
  }
  const rows = Array.from({ length: state.experts }, (_, e) => line([cell("th", e), ...state.layers.map((__, l) => cell("td", cellWord(state, l, e)))]));
  return `<table><caption>Percent of each expert in memory</caption><thead>${line([cell("th", "expert"), ...state.layers.map((name) => cell("th", `layer ${name}`))])}</thead><tbody>${rows.join("")}</tbody></table>`;
}

const BUTTONS = [["warm", "Warm", "Read the pages of this expert into memory"], ["drop", "Drop", "Take the pages of this expert out of memory"], ["lock", "Lock", "Hold the pages of this expert in memory"], ["refresh", "Refresh", "Ask the system again"]];

function buttons(state, view) {
  const row = state.layers.indexOf(view.layer);
  const chosen = row >= 0 && view.expert !== null;
  const locked = chosen && state.locked[row * state.experts + view.expert];
  const able = (act) => view.live && state.available && (chosen || act === "refresh");
  const drawn = BUTTONS.map(([act, words, tip]) => {
    const [doing, shown, why] = act === "lock" && locked ? ["unlock", "Unlock", "Let the system move the pages of this expert again"] : [act, words, tip];
    return `<button type="button" class="btn low" data-panel="residency" data-do="${doing}" data-keep="${act}" title="${why}" ${able(act) ? "" : "disabled"} ${SUPPRESS}>${shown}</button>`;
  });
  const why = !view.live ? "needs Python" : chosen ? "" : "select an expert";
  return `<div class="acts">${drawn.join("")}<span class="q small">${why}</span></div>`;
}

const label = (state, { layer, expert }) => {
  const row = state.layers.indexOf(layer);
  const here = row < 0 || expert === null ? "" : ` Layer ${layer}, expert ${expert}: ${cellWord(state, row, expert)}.`;
  return `Percent of each expert in memory, layers by experts.${here} Arrows move.`;
};

// The map, its buttons and its twin; `panel` is what Python sent, null before that.
export const residency = {
  name: "residency",
  html: (panel, view, width) => {
    if (!panel?.layers.length) return "";
    return `<div class="memory" tabindex="0" role="application" data-map="residency" aria-label="${escape(label(panel, view))}" ${SUPPRESS}>${residencyMap(view, panel, view.layer, view.expert, width)}</div>${scale(view)}${buttons(panel, view)}<div class="sr">${residencyTable(panel)}</div>`;
  },
  // What a click or an arrow key in the map selects.
  at: (panel, width, x, y) => cellAt(panel, width, x, y),
  step: (panel, view, right, down) => stepOnExperts(panel, view.layer, view.expert, right, down),
};

// The sentence below the map, in a place of its own, so that it is read out when it changes.
export const residencySay = {
  name: "residencysay",
  of: "residency",
  html: (panel, view) => (panel ? residencyWords(panel, view.layer, view.expert) : '<span class="q">Asking the system …</span>'),
};
