// The token card: every router logit of the selected token as sorted bars, the cut between chosen and left out, and its path through all layers.
import { FLAG } from "./store.js";
import { chip, escape, expertColour, fixed, gate, word } from "../common/format.js";
import { strange, strangeMark } from "./sentence.js";
import { markSvg } from "../common/marks.js";

const LISTED = 12; // up to so many experts are all listed
const LEFT_OUT = 3; // of more, the chosen and so many of the rest
const CELLS = 8; // up to so many layers get a cell each
const BF16_BITS = 8;

const FRAME = `<h3></h3><div class="bars"></div><canvas class="rest" role="img" hidden></canvas><div class="q small tail"></div><h3 class="gap"></h3><div class="cells"></div><canvas class="sparks" role="img" hidden></canvas>`;

export class TokenCard {
  constructor(host, onLayer, onExpert) {
    host.innerHTML = FRAME;
    [this.title, this.pathTitle] = host.querySelectorAll("h3");
    for (const name of ["bars", "rest", "tail", "cells", "sparks"]) this[name] = host.querySelector("." + name);
    host.addEventListener("click", (event) => {
      const cell = event.target.closest("[data-layer]");
      const row = event.target.closest("[data-expert]");
      if (cell) onLayer(Number(cell.dataset.layer));
      else if (row) onExpert(Number(row.dataset.expert));
    });
  }

  // The canvases. Called before anything changes the page, for a canvas asks the style of its element to set a font.
  draw(view) {
    const { store, layer, token } = view;
    const here = store.at(layer, token);
    const values = store.values(layer, token);
    this.unlisted = here && values && !(here.flags & FLAG.unrecorded) ? Math.max(0, store.E - listed(store, here)) : 0;
    if (this.unlisted) drawRest(this.rest, view, here, values);
    if (store.L > CELLS) drawSparks(this.sparks, view);
  }

  // The rest.
  patch(view) {
    const { store, layer, token } = view;
    const here = store.at(layer, token);
    const values = store.values(layer, token);
    const what = store.facts.by_score[layer] ? "selection scores" : "router logits";
    const name = escape(word(store.facts.texts[token], store.kind[token]));
    const few = store.L <= CELLS;
    this.title.innerHTML = `Token ${token} <span class="tt">${name}</span> in layer ${store.facts.layers[layer]}<small>${what}, sorted</small>`;
    this.bars.innerHTML = here ? bars(view, here, values) : '<p class="q">Waiting for this layer …</p>';
    this.rest.hidden = !this.unlisted;
    this.tail.textContent = this.unlisted ? `all ${store.E} sorted · ${this.unlisted} not listed, down to ${fixed(lowest(values), 1)}${oddities(values)}` : "";
    this.rest.setAttribute("aria-label", `All ${store.E} values sorted, chosen ones first`);
    this.pathTitle.innerHTML = few
      ? `Path through all layers<small>${store.K > 1 ? "first, second choice" : "choice"}; margin below</small>`
      : "Through the layers<small>— margin (log), ··· one bf16 step, - - entropy</small>";
    this.cells.innerHTML = few ? path(view) : "";
    this.sparks.hidden = few;
    this.sparks.setAttribute("aria-label", `Margin and entropy of token ${token} by layer`);
  }
}

// A scale that holds zero and every finite value, as parts of its whole: where zero stands, and how far from it a value reaches.
function fromZero(values) {
  const finite = Array.from(values).filter(Number.isFinite);
  const low = Math.min(0, ...finite);
  const span = Math.max(0, ...finite) - low || 1;
  return { zero: -low / span, size: (v) => v / span };
}

const lowest = (values) => Math.min(...Array.from(values).filter(Number.isFinite));
const listed = (store, here) => (store.E <= LISTED ? store.E : (here.ranked ? store.K : 0) + LEFT_OUT);

// Chosen experts in the order of their slots, then the rest from the strongest down; NaN last.
function ranked(store, here, values) {
  const chosen = here.ranked ? Array.from(here.ids) : [];
  const rest = [];
  for (let e = 0; e < store.E; e++) if (!chosen.includes(e)) rest.push(e);
  const key = (e) => (Number.isNaN(values[e]) ? -Infinity : values[e]);
  rest.sort((a, b) => key(b) - key(a) || a - b);
  return { chosen, rest };
}

function bars(view, here, values) {
  const { store, layer } = view;
  const head = '<table class="lb"><thead><tr><th>exp.</th><th>' + (store.facts.by_score[layer] ? "score" : "logit") + ', from zero</th><th><span class="sr">value</span></th><th class="num">gate</th></tr></thead><tbody>';
  if (here.flags & FLAG.unrecorded) return `${head}</tbody></table><p class="q">The trace holds no expert ids for this token.</p>`;
  if (!values) {
    const rows = Array.from(here.ids, (e, i) => row(view, e, null, here.gates[i], null)).join("");
    const why = store.facts.no_values || "Router logits are being fetched …";
    return `${head}${rows}</tbody></table><p class="q">${escape(why)}</p>`;
  }
  const { chosen, rest } = ranked(store, here, values);
  const { zero, size } = fromZero(values);
  const place = (v) => (Number.isFinite(v) ? { zero: 100 * zero, left: 100 * (zero + Math.min(0, size(v))), width: 100 * Math.abs(size(v)) } : null);
  const left = store.E <= LISTED ? rest : rest.slice(0, LEFT_OUT);
  const html = [head];
  chosen.forEach((e, i) => html.push(row(view, e, values[e], here.gates[i], place(values[e]))));
  if (!here.ranked) html.push(cut(`${strange(here.flags)} in the logits: no ranking, ids here mean nothing`));
  else if (rest.length) html.push(cut(`chosen above · margin ${fixed(here.margin)} · left out below`));
  for (const e of left) html.push(row(view, e, values[e], null, place(values[e])));
  html.push("</tbody></table>");
  return html.join("");
}

const cut = (words) => `<tr class="cut"><td colspan="4"><span>${words}</span></td></tr>`;

function row(view, expert, value, gateValue, at) {
  const colour = expertColour(view, expert);
  const chosen = gateValue !== null;
  const style = chosen ? `background:${colour}` : `box-shadow:inset 0 0 0 1.5px ${colour}`;
  const mark = value === null || Number.isFinite(value) ? "" : markSvg(Number.isNaN(value) ? "nan" : value > 0 ? "+inf" : "-inf");
  const bar = value === null ? '<span class="q small">not recorded</span>' : mark || `<span class="axis" style="--zero:${at.zero.toFixed(1)}%"><span class="bar" style="margin-left:${at.left.toFixed(1)}%;width:${at.width.toFixed(1)}%;${style}"></span></span>`;
  const gateText = chosen ? (Number.isNaN(gateValue) ? "–" : `<b>${gate(gateValue)}</b>`) : '<span class="q">–</span>';
  const selected = expert === view.expert ? ' class="on"' : "";
  return `<tr data-expert="${expert}"${selected}><td>${chip(view, expert, !chosen)}</td><td>${bar}</td><td class="num">${value === null ? "" : fixed(value)}</td><td class="num">${gateText}</td></tr>`;
}

function oddities(values) {
  const n = { NaN: 0, "+Inf": 0, "−Inf": 0 };
  for (const v of values) if (!Number.isFinite(v)) n[fixed(v)]++;
  return Object.entries(n).filter(([, c]) => c).map(([w, c]) => ` · ${w} (${c})`).join("");
}

function path(view) {
  const { store, token } = view;
  const cells = store.facts.layers.map((name, l) => {
    const here = store.at(l, token);
    const more = here?.ids.length > 2 ? ` <span class="q">+${here.ids.length - 2}</span>` : "";
    const experts = !here ? "…" : here.flags & FLAG.unrecorded ? markSvg("unknown") : !here.ranked ? markSvg(strangeMark(here.flags)) : Array.from(here.ids).slice(0, 2).map((e, i) => chip(layerView(view, l), e, i > 0)).join(" ") + more;
    const margin = here && !Number.isNaN(here.margin) ? fixed(here.margin) + (here.flags & FLAG.tie ? " ≈" : "") : "–";
    return `<button type="button" data-lm-suppress-shortcuts="true" data-layer="${l}" ${l === view.layer ? 'aria-current="true"' : ""}><span class="q">layer ${name}</span><br>${experts}<br><span>${margin}</span></button>`;
  });
  return `<div class="path" style="grid-template-columns:repeat(${store.L},1fr)">${cells.join("")}</div>`;
}

// Colours of another layer: an expert's number means something only inside its layer.
const layerView = (view, layer) => ({ ...view, slots: layer === view.layer ? view.slots : view.store.slots(layer) });

// The canvas at this size, empty, ready to draw in CSS pixels. Memory is taken anew only when the size changes.
export function fitCanvas(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  if (canvas.width === Math.round(width * scale) && canvas.height === Math.round(height * scale)) {
    const ctx = canvas.getContext("2d");
    ctx.clearRect(0, 0, width, height);
    return ctx;
  }
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const ctx = canvas.getContext("2d");
  ctx.scale(scale, scale);
  return ctx;
}

// All values as a row of thin bars, so that the tail is seen too.
function drawRest(canvas, view, here, values) {
  const { store, palette } = view;
  const w = view.cardWidth;
  const h = 28;
  const ctx = fitCanvas(canvas, w, h);
  const { chosen, rest } = ranked(store, here, values);
  const all = [...chosen, ...rest].map((e) => values[e]);
  const { zero, size } = fromZero(values);
  const base = h - 1 - (h - 2) * zero;
  const step = w / store.E;
  ctx.fillStyle = palette.sunk;
  ctx.fillRect(0, 0, w, h);
  all.forEach((v, r) => {
    if (!Number.isFinite(v)) return;
    ctx.fillStyle = r < chosen.length ? palette.ink : palette.line2;
    const tall = Math.max(0.5, (h - 2) * Math.abs(size(v)));
    ctx.fillRect(r * step, v < 0 ? base : base - tall, Math.max(0.7, step * 0.7), tall);
  });
  ctx.fillStyle = palette.line2;
  ctx.fillRect(0, base - 0.5, w, 1);
  ctx.fillStyle = palette.sel;
  if (chosen.length) ctx.fillRect(chosen.length * step - step * 0.15 - 0.75, 0, 1.5, h);
}

// Margin (log) and entropy of the token by layer; the dotted line is one bfloat16 step at the size of the logits compared.
function drawSparks(canvas, view) {
  const { store, palette, token } = view;
  const w = view.cardWidth;
  const h = 84;
  const ctx = fitCanvas(canvas, w, h);
  const x = (l) => 3 + (l * (w - 6)) / Math.max(1, store.L - 1);
  const logY = (m) => 14 - 11 * Math.max(-2.6, Math.min(1, Math.log10(Math.max(m, 1e-9))));
  const margins = [];
  const steps = [];
  const entropies = [];
  const ties = [];
  for (let l = 0; l < store.L; l++) {
    const here = store.at(l, token);
    const values = store.values(l, token);
    if (!here || !here.ranked) {
      margins.push(null), entropies.push(null), steps.push(null);
      continue;
    }
    margins.push(Number.isNaN(here.margin) ? null : [x(l), logY(here.margin)]);
    entropies.push(Number.isNaN(here.entropy) ? null : [x(l), 72 - 26 * here.entropy]);
    const edge = values ? Math.abs(values[here.ids.at(-1)]) : NaN;
    steps.push(edge > 0 ? [x(l), logY(2 ** (Math.floor(Math.log2(edge)) - BF16_BITS + 1))] : null);
    if (here.flags & FLAG.tie) ties.push([x(l), logY(here.margin)]);
  }
  line(ctx, steps, palette.warn, 1, [2, 3]);
  line(ctx, margins, palette.ink, 1.3, []);
  line(ctx, entropies, palette.line2, 1.5, [5, 2]);
  ctx.fillStyle = palette.ink;
  ctx.font = `bold 12px ${palette.ui}`;
  ctx.textAlign = "center";
  for (const [a, b] of ties) ctx.fillText("≈", a, b + 4);
  ctx.fillStyle = palette.sel;
  ctx.fillRect(x(view.layer) - 0.75, 0, 1.5, 72);
  ctx.font = `11px ${palette.ui}`;
  ctx.fillStyle = palette.ink2;
  const names = store.facts.layers;
  const at = x(view.layer);
  ctx.textAlign = "left";
  if (at > 60) ctx.fillText(`layer ${names[0]}`, 0, h - 1);
  ctx.textAlign = "right";
  if (at < w - 40) ctx.fillText(String(names[store.L - 1]), w, h - 1);
  ctx.fillStyle = palette.ink;
  ctx.font = `bold 11px ${palette.ui}`;
  ctx.textAlign = "center";
  ctx.fillText(String(names[view.layer]), Math.max(8, Math.min(w - 8, at)), h - 1);
}

function line(ctx, points, colour, width, dash) {
  ctx.save();
  ctx.strokeStyle = colour;
  ctx.lineWidth = width;
  ctx.setLineDash(dash);
  ctx.beginPath();
  let pen = false;
  for (const point of points) {
    if (!point) pen = false;
    else {
      if (pen) ctx.lineTo(...point);
      else ctx.moveTo(...point);
      pen = true;
    }
  }
  ctx.stroke();
  ctx.restore();
}
