// Which cached keys the selected token's query uses in the selected layer: one bar for each position, heads averaged.
import { count, escape, fixed, percent, plural, word } from "../common/format.js";
import { SUPPRESS } from "../common/frame.js";
import { ring } from "../common/pointers.js";
import { sizeText } from "./words.js";

const LEFT = 40;
const TALL = 112;
const TOP = 8;
const FOOT = 22;
const LISTED = 60; // rows of the table for screen readers

// Positions share a bar where there are more of them than pixels; its height is the largest of them.
function layout({ weights }, width) {
  const n = weights.length;
  const each = Math.max(1, Math.ceil((2 * n) / (width - LEFT - 4)));
  const bars = Math.ceil(n / each);
  const cw = Math.min(34, (width - LEFT - 4) / bars);
  const heights = Array.from({ length: bars }, (_, i) => Math.max(...weights.slice(i * each, (i + 1) * each)));
  return { each, bars, cw, heights, top: Math.max(...heights, 1e-6) };
}

function keysPicture(state, width) {
  const at = layout(state, width);
  const used = (i) => state.mask.subarray(i * at.each, (i + 1) * at.each).includes(1);
  const y = (weight) => TALL - FOOT - ((TALL - FOOT - TOP) * weight) / at.top;
  let s = `<path d="M${LEFT} ${TALL - FOOT}H${LEFT + at.bars * at.cw}" stroke="var(--line2)"/>`;
  for (const tick of [at.top, at.top / 2]) s += `<path d="M${LEFT} ${y(tick)}H${LEFT + at.bars * at.cw}" stroke="var(--line)"/><text x="${LEFT - 6}" y="${y(tick) + 4}" text-anchor="end">${percent(tick, at.top < 0.05 ? 1 : 0)}</text>`;
  if (state.first > 0) s += `<rect x="${LEFT}" y="${TOP}" width="${(state.first / at.each) * at.cw}" height="${TALL - FOOT - TOP}" fill="var(--sunk)"/><text x="${LEFT + 4}" y="${TOP + 12}">out of the window's reach</text>`;
  at.heights.forEach((weight, i) => {
    const h = TALL - FOOT - y(weight);
    const gap = at.cw > 4 ? 2 : 0;
    if (weight > 0) s += `<rect x="${(LEFT + i * at.cw).toFixed(1)}" y="${(TALL - FOOT - Math.max(1, h)).toFixed(1)}" width="${(at.cw - gap).toFixed(1)}" height="${Math.max(1, h).toFixed(1)}" fill="var(--${used(i) ? "ink" : "line2"})"${used(i) ? "" : ' fill-opacity=".55"'}/>`;
  });
  const here = Math.floor(state.token / at.each);
  s += ring(LEFT + here * at.cw, TOP, at.cw - (at.cw > 4 ? 2 : 0), TALL - FOOT - TOP) + names(state, at);
  return `<svg width="${width}" height="${TALL}" viewBox="0 0 ${width} ${TALL}" aria-hidden="true">${s}</svg>`;
}

// Under the bars: the positions, thinned; the last is the query's own.
function names(state, at) {
  const every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 10000].find((n) => (n / at.each) * at.cw >= 30) ?? 50000;
  let s = "";
  for (let p = 0; p < state.weights.length; p += every) {
    const x = LEFT + (p / at.each + 0.5) * at.cw;
    if (Math.abs(x - (LEFT + (state.token / at.each + 0.5) * at.cw)) > 30) s += `<text x="${x}" y="${TALL - 8}" text-anchor="middle">${p}</text>`;
  }
  return `${s}<text class="b" x="${LEFT + (Math.floor(state.token / at.each) + 0.5) * at.cw}" y="${TALL - 8}" text-anchor="middle">${state.token}</text>`;
}

// The position under a point of the picture.
function positionAt(state, width, x) {
  const at = layout(state, width);
  const bar = Math.floor((x - LEFT) / at.cw);
  if (bar < 0 || bar >= at.bars) return null;
  const part = Array.from(state.weights.slice(bar * at.each, (bar + 1) * at.each));
  return bar * at.each + part.indexOf(Math.max(...part));
}

const token = ({ position, text, id }) => `<span class="tt">${escape(word(text, id))}</span> (${position})`;

function keysWords(state) {
  const { used, reached, layer, held } = state;
  const names = used.slice(0, 6).map(token).join(", ");
  const most = state.count > 6 ? `, and ${count(state.count - 6)} more` : "";
  return `Token ${token(state.query)} reads layer ${layer}: <b>${count(state.count)} of ${plural(reached, "key")}</b> hold ${percent(held)} of its attention, heads averaged: ${names}${most}. <span class="q">One head alone needs ${fixed(state.one_head, 1)} in the mean.</span>`;
}

// What the cache costs, and how far a query reaches.
function keysCost({ bytes_per_token: each, total, tokens, windows, layer }) {
  const same = each.every((n) => n === each[0]);
  const window = windows[layer];
  const per = same ? `${count(each[0])} bytes for a token in each of ${plural(each.length, "layer")}` : `${count(each[layer])} bytes for a token in layer ${layer}, ${count(each.reduce((a, b) => a + b, 0))} in all ${plural(each.length, "layer")}`;
  const limited = windows.filter((n) => n !== null).length;
  const reach = window === null ? `Layer ${layer} reaches back to the first token` : `Layer ${layer} reaches back ${plural(window, "token")}`;
  const others = limited && limited < windows.length ? `; ${limited} of ${windows.length} layers have a window` : "";
  return `${per}; ${sizeText(total)} for the ${plural(tokens, "token")} so far. ${reach}${others}.`;
}

const keysLabel = (state) => `Attention of token ${state.token} in layer ${state.layer} by position: ${state.used.slice(0, 10).map(({ position, weight }) => `${position}: ${percent(weight, 1)}`).join(", ")}.`;

function keysTable(state) {
  const rows = state.used.slice(0, LISTED).map(({ position, text, id, weight }) => `<tr><td>${position}</td><td>${escape(word(text, id))}</td><td>${percent(weight, 1)}</td></tr>`);
  const rest = state.count > LISTED ? `<tr><td colspan="3">${count(state.count - LISTED)} more</td></tr>` : "";
  return `<table><caption>Keys that hold ${percent(state.held)} of the attention of token ${state.token} in layer ${state.layer}</caption><thead><tr><th>position</th><th>token</th><th>share</th></tr></thead><tbody>${rows.join("")}${rest}</tbody></table>`;
}

const cost = (panel) => (panel.bytes_per_token ? `<p class="q small">${escape(keysCost(panel))}</p>` : "");
const readButton = ({ live }) => `<div class="acts"><button type="button" class="btn low" data-panel="keys" data-do="read" ${live ? "" : "disabled"} ${SUPPRESS}>Read them</button>${live ? "" : '<span class="q small">needs Python</span>'}</div>`;

export const keys = {
  name: "keys",
  html: (panel, view, width) => {
    if (!panel) return "";
    if (panel.reason) return (panel.can ? readButton(view) : "") + cost(panel);
    return `<div class="keymap" tabindex="0" role="application" data-map="keys" aria-label="${escape(keysLabel(panel))} ← → move to other tokens." ${SUPPRESS}>${keysPicture(panel, width)}</div>${cost(panel)}<div class="sr">${keysTable(panel)}</div>`;
  },
  // The token whose key a click is about; arrow keys go to other queries.
  at: (panel, width, x) => {
    const token = positionAt(panel, width, x);
    return token === null ? null : { token };
  },
  step: (panel, { token }, right) => ({ token: Math.max(0, Math.min(panel.tokens - 1, token + right)) }),
};

export const keysSay = {
  name: "keyssay",
  of: "keys",
  html: (panel, view) => {
    if (!panel) return "";
    if (panel.reason) return `<span class="q">${escape(panel.reason)}</span>`;
    const other = panel.layer !== view.layer || panel.token !== view.token;
    return keysWords(panel) + (other && !view.live ? ' <span class="q">Other tokens and layers need Python.</span>' : "");
  },
};
