// One layer as a picture: tokens → router → dispatcher → experts → aggregator, with the numbers of this moment.
import { escape, expertColour, fixed, gate, plural, word } from "../common/format.js";
import { inkOn } from "../common/palette.js";
import { strange, waiting } from "./flow_marks.js";
import { ring } from "../common/pointers.js";
import { weightedSum } from "./weighted.js";

const TOP = 44;
const ROW = 27;
const SHOWN = 10; // token rows
const MOST = 16; // experts
const LOGITS = 150; // left edges, in units of the picture
const EXPERTS = 590;
const BOX = 208;
const SUM = 842;
const SQUARES = 24;

// The rows around the selected token.
export function shownRows(moment, token) {
  const [start, stop] = moment.facts.window;
  const first = Math.max(start, Math.min(token - 5, stop - SHOWN));
  return Array.from({ length: Math.min(SHOWN, stop - first) }, (_, i) => first + i);
}

// All experts when they are few; else those that the shown tokens use, the selected token's first of all.
export function shownExperts(moment, rows, token) {
  const { experts } = moment.head;
  if (!moment.head.moe.includes(moment.layer)) return [];
  if (experts <= MOST) return Array.from({ length: experts }, (_, e) => e);
  const used = new Set((moment.ids(token) ?? []).filter((e) => e >= 0));
  if (moment.place.layer === moment.layer && moment.place.expert !== null) used.add(moment.place.expert);
  for (const t of rows) for (const e of moment.ids(t) ?? []) if (e >= 0 && used.size < MOST) used.add(e);
  for (let e = 0; e < experts && used.size < 8; e++) used.add(e);
  return [...used].sort((a, b) => a - b);
}

export function flowPicture(view, wide) {
  const { moment, token, palette } = view;
  const { head, facts } = moment;
  const rows = shownRows(moment, token);
  const experts = shownExperts(moment, rows, token);
  const tall = experts.length <= 10 ? [28, 6] : [24, 4];
  const pitch = tall[0] + tall[1];
  const body = Math.max(rows.length * ROW, experts.length * pitch);
  const rowTop = TOP + (body - rows.length * ROW) / 2;
  const expertTop = TOP + (body - experts.length * pitch) / 2;
  const cell = Math.min(17, 136 / Math.max(1, experts.length));
  const edge = LOGITS + (experts.length ? cell * experts.length : 136);
  const expertY = (e) => expertTop + experts.indexOf(e) * pitch + tall[0] / 2;
  const titles = [["tokens", 0], ...(experts.length ? [] : [["a dense layer: no router, no experts; its buffers stand below", LOGITS]])];
  if (experts.length) titles.push(["router: logits", LOGITS], ["dispatcher: rows by expert", Math.max(edge + 40, LOGITS + 176)], ["experts", EXPERTS]);
  let s = titles.map(([words, x]) => `<text class="b" x="${x}" y="12">${words}</text>`).join("");
  const scale = logitScale(moment, rows, experts);
  if (scale && cell >= 11) experts.forEach((e, i) => (s += `<text class="b" x="${LOGITS + i * cell + cell / 2}" y="${rowTop - 10}" text-anchor="middle" ${cell < 14 ? 'style="font-size:9px"' : ""}>${e}</text>`));
  const above = rows[0] - facts.rows[0];
  const below = facts.rows[1] - 1 - rows[rows.length - 1];
  if (above > 0) s += `<text x="0" y="${rowTop - 10}">⋯ rows ${facts.rows[0]}–${rows[0] - 1} above</text>`;
  let lines = "";
  let hot = "";
  rows.forEach((t, i) => {
    const y = rowTop + i * ROW;
    const current = t === token;
    s += `<g class="tokrow" data-token="${t}"><rect x="0" y="${y + 1}" width="${edge}" height="${ROW - 2}" fill="transparent"/><text x="26" y="${y + 18}" text-anchor="end">${t}</text><text class="m ${current ? "b" : "k"}" style="font-size:13px" x="34" y="${y + 18}">${escape(word(head.texts[t], head.ids[t], 13))}</text></g>`;
    const ids = moment.ids(t);
    if (scale) s += logitCells(view, t, ids, experts, y, cell, scale);
    if (ids) {
      const drawn = arrows(view, t, ids, { y: y + ROW / 2, x1: edge + 4, x2: EXPERTS - 8, expertY, experts, current });
      if (current) hot += drawn;
      else lines += drawn;
    }
    if (current) hot += ring(0, y + 1, edge + 2, ROW - 3);
  });
  const low = TOP + body + 16;
  if (below > 0) s += `<text x="0" y="${rowTop + rows.length * ROW + 12}">⋯ rows ${rows.at(-1) + 1}–${facts.rows[1] - 1} below</text>`;
  if (scale) s += legend(palette, scale, low + (below > 0 ? 14 : 0), head.top_k);
  else if (experts.length) s += `<text x="${LOGITS}" y="${rowTop + 18}">${waiting(moment, "router")}</text>`;
  experts.forEach((e, i) => (s += expertBox(view, e, expertTop + i * pitch, tall[0])));
  const hidden = head.experts - experts.length;
  if (hidden && experts.length) {
    const empty = Array.from({ length: head.experts }, (_, e) => e).filter((e) => !experts.includes(e) && moment.load(moment.layer, e) === 0).length;
    const words = moment.ids(token) ? `${hidden} more experts, ${empty} of them without tokens` : `${hidden} more experts`;
    s += `<text x="${EXPERTS}" y="${expertTop + experts.length * pitch + 12}">⋯ ${words}</text>`;
  }
  const sum = !experts.length ? { svg: "", links: "", height: 0 } : weightedSum(view, wide ? SUM : 30, wide ? { x: EXPERTS + BOX, y: expertY, experts } : null);
  const height = Math.max(low + 20, wide ? sum.height : 0);
  const label = `Layer ${moment.layer}: ${describe(view)}`;
  const svg = (w, h, inside, extra = "") => `<svg viewBox="0 0 ${w} ${h}" ${extra} role="img" aria-label="${escape(label)}">${inside}</svg>`;
  if (wide) return svg(1152, height, s + lines + hot + sum.links + sum.svg, 'width="100%"');
  const left = svg(804, low + 20, s + lines + hot, 'width="100%"');
  return !experts.length ? left : left + svg(400, sum.height, sum.svg, 'class="sum" width="440"');
}

// The finite logits of what is shown: the ends of the colour scale; null while there are none.
function logitScale(moment, rows, experts) {
  let [low, high] = [Infinity, -Infinity];
  for (const t of rows) {
    const logits = moment.row("logits", t);
    if (!logits) return null;
    for (const e of experts) if (Number.isFinite(logits[e])) [low, high] = [Math.min(low, logits[e]), Math.max(high, logits[e])];
  }
  return low <= high ? [low, Math.max(high, low + 1e-6)] : [0, 1];
}

function logitCells(view, t, ids, experts, y, cell, [low, high]) {
  const logits = view.moment.row("logits", t);
  let s = "";
  experts.forEach((e, i) => {
    const x = LOGITS + i * cell;
    const v = logits[e];
    const size = cell - 1;
    if (!Number.isFinite(v)) {
      s += strange(v, x, y + 4, size, ROW - 8);
      return;
    }
    const strength = (v - low) / (high - low);
    s += `<rect x="${x}" y="${y + 4}" width="${size}" height="${ROW - 8}" fill="${view.palette.of(strength)}"><title>logit of expert ${e}: ${fixed(v, 3)}</title></rect>`;
    const slot = ids ? ids.indexOf(e) : -1;
    if (slot >= 0) s += `<text x="${x + size / 2}" y="${y + 18}" text-anchor="middle" pointer-events="none" style="font-weight:700;font-size:${Math.min(13, cell)}px;fill:${view.palette.inkOf(strength)}">${slot === 0 ? "●" : "○"}</text>`;
  });
  return s;
}

function arrows(view, t, ids, { y, x1, x2, expertY, experts, current }) {
  const { moment } = view;
  const gates = moment.gates(t);
  const order = ids.map((e, slot) => ({ e, slot })).filter(({ e }) => experts.includes(e)).sort((a, b) => a.e - b.e);
  const spread = current ? 8 : 0;
  let back = "";
  let front = "";
  order.forEach(({ e, slot }, i) => {
    const from = y + (i - (order.length - 1) / 2) * spread;
    const to = expertY(e) + (order.length > 1 ? (slot % 2 ? -4 : 4) : 0);
    const path = `M${x1} ${from}C${x1 + 110} ${from} ${x2 - 110} ${to} ${x2} ${to}`;
    const colour = expertColour(view, e);
    if (!current) {
      back += `<path class="way" d="${path}" fill="none" stroke="${colour}" stroke-opacity=".6" stroke-width="1.2"/>`;
      return;
    }
    const g = gates ? gates[slot] : NaN;
    const width = Number.isFinite(g) ? 2 + 7 * Math.min(1, Math.abs(g)) : 2;
    back += `<path d="${path}" fill="none" stroke="var(--card)" stroke-width="${width + 4}"/>`;
    front += `<path class="way hot" pathLength="1" d="${path}" fill="none" stroke="${colour}" stroke-width="${width}"/><path d="M${x2 - 1} ${to - 7}l9 7l-9 7Z" fill="${colour}"/>`;
    const share = 0.5 + 0.3 * (order.length > 1 ? i / (order.length - 1) : 0.5);
    const at = bezier(share, x1, from, x2, to);
    front += `<g class="pill" data-edit="routing" transform="translate(${at[0]},${at[1]})"><title>gate of expert ${e}; click to edit</title><rect x="-24" y="-10" width="48" height="19" rx="9" fill="var(--card)" stroke="${colour}" stroke-width="1.5"/><text class="b" y="4" text-anchor="middle">${gates ? gate(g) : "?"}</text></g>`;
  });
  return back + front;
}

function bezier(u, x1, y1, x2, y2) {
  const v = 1 - u;
  return [v ** 3 * x1 + 3 * v * v * u * (x1 + 110) + 3 * v * u * u * (x2 - 110) + u ** 3 * x2, v ** 3 * y1 + 3 * v * v * u * y1 + 3 * v * u * u * y2 + u ** 3 * y2];
}

function legend(palette, [low, high], y, k) {
  const steps = Array.from({ length: 16 }, (_, i) => `<rect x="${i * 5}" width="5.5" height="8" fill="${palette.of(i / 15)}"/>`).join("");
  return `<text x="0" y="${y + 8}">● first choice${k > 1 ? `  ○ ${k > 2 ? "others" : "second"}` : ""}</text><g transform="translate(${LOGITS},${y})">${steps}<text x="86" y="8">logit ${fixed(low, 1)} to ${fixed(high, 1)}</text></g>`;
}

function expertBox(view, e, y, h) {
  const { moment, token } = view;
  const colour = expertColour(view, e);
  const mine = (moment.ids(token) ?? []).includes(e);
  const n = moment.ids(token) || moment.load(moment.layer, e) !== null ? moment.load(moment.layer, e) : null;
  const here = moment.place.stage === "expert" && moment.place.layer === moment.layer && moment.place.expert === e;
  const done = n > 0 && moment.done("expert", moment.layer, e);
  const text = n === null ? "" : plural(n, "row");
  let s = `<g class="exbox" data-expert="${e}"><rect x="${EXPERTS}" y="${y}" width="${BOX}" height="${h}" rx="4" fill="var(--card)" stroke="${mine ? colour : "var(--line2)"}" stroke-width="${mine ? 2.5 : 1}" ${n === 0 ? 'stroke-dasharray="2 2"' : ""}/><rect x="${EXPERTS}" y="${y}" width="26" height="${h}" rx="4" fill="${colour}"/><text x="${EXPERTS + 13}" y="${y + h / 2 + 4}" text-anchor="middle" style="font-weight:700;fill:${inkOn(colour)};font-size:12px">${e}</text><text class="k" x="${EXPERTS + 34}" y="${y + h / 2 + 4}">${text}</text>`;
  const tokens = n && n <= 4096 ? moment.tokensOf(e) : [];
  const squares = tokens.slice(0, SQUARES);
  if (mine && !squares.includes(token) && squares.length === SQUARES) squares[SQUARES - 1] = token;
  squares.forEach((t, i) => {
    const x = EXPERTS + (n < 1000 ? 88 : 102) + (i % 12) * 8.2;
    const top = y + h / 2 - 8 + (i < 12 ? 0 : 9);
    s += t === token ? `<rect x="${x - 1}" y="${top - 1}" width="8.6" height="8.6" fill="var(--sel)"/>` : `<rect x="${x}" y="${top}" width="6.6" height="6.6" fill="${colour}" fill-opacity="${done ? 0.75 : 0.4}"/>`;
  });
  if (done) s += `<text x="${EXPERTS + BOX - 8}" y="${y + h / 2 + 4}" text-anchor="end" class="k">✓</text>`;
  if (here) s += ring(EXPERTS, y, BOX, h);
  return s + "</g>";
}

function describe(view) {
  const ids = view.moment.ids(view.token);
  if (!ids) return waiting(view.moment, "router");
  const gates = view.moment.gates(view.token);
  const held = ids.flatMap((e, slot) => (e < 0 ? [] : [`expert ${e}${gates ? ` with gate ${gate(gates[slot])}` : ""}`]));
  return `token ${view.token} goes to ${held.join(" and ") || "no expert"}`;
}
