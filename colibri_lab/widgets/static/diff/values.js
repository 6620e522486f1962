// One tap of both runs: A against B, a histogram of B − A with clipped ends, the rows that differ most.
import { chip, count, escape, plural, word } from "../common/format.js";
import { SUPPRESS } from "../common/frame.js";
import { markKey } from "../common/marks.js";
import { chips } from "./flips.js";
import { isIds } from "./store.js";
import { power, size } from "./words.js";

const SIDE = 200; // of the scatter
const WIDE = 240; // of the histogram
const TALL = 150;
const LISTED = 40; // re-routed tokens

const held = (view) => {
  const seen = view.store.values(view.path, view.expert);
  return seen && seen.expert === view.expert ? seen : null;
};

export function valuesRemark(view) {
  const { store, path, expert } = view;
  if (!path) return "";
  const seen = held(view) ?? store.values(path, expert);
  const name = `<span class="m">${escape(seen && seen.expert === null ? path : path.replace("*", expert ?? "*"))}</span>`;
  if (!seen) return name;
  const looked = seen.looked !== undefined && seen.looked < seen.rows ? `, ${count(seen.looked)} looked at` : "";
  return `${name}, ${plural(seen.rows, "row")} × ${seen.shape.join("×") || 1}${looked}`;
}

export function valuesCard(view) {
  const { store, path, expert } = view;
  if (!path) return '<p class="q">Nothing was compared.</p>';
  const seen = store.values(path, expert);
  if (!seen) return `<p class="q pad">${view.live ? "Waiting for the values …" : "The values of this tap were not fetched before; they need Python."}</p>`;
  if (isIds(path)) return rerouted(view, seen);
  const whole = seen.expert !== expert ? `<p class="q small">All experts: the values of expert ${expert} alone need Python.</p>` : "";
  if (!seen.rows) return `${whole}<p class="q pad">${expert === null ? "No row is in both runs." : `Expert ${expert} has no row in both runs.`}</p>`;
  return `${whole}<div class="plots">${scatter(seen)}${histogram(seen)}</div>${strange(seen)}${worstRows(view, seen)}`;
}

function strange({ nonfinite: [a, b] }) {
  if (!a && !b) return "";
  return `<p class="lg">${markKey([["nan", "NaN or Inf in A", a], ["nan", "NaN or Inf in B", b]])}<span>left out of both pictures</span></p>`;
}

function scatter(seen) {
  const { a, b } = seen;
  const finite = [a, b].map((x) => x.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]));
  const low = Math.min(finite[0][0], finite[1][0]);
  const high = Math.max(finite[0][1], finite[1][1]);
  if (!(low <= high)) return '<p class="q pad">No value is an ordinary number in both runs.</p>';
  const span = high - low || Math.abs(high) || 1;
  const [from, to] = [low - 0.04 * span, high + 0.04 * span];
  const x = (v) => 30 + (SIDE * (v - from)) / (to - from);
  const y = (v) => 4 + SIDE * 0.75 * (1 - (v - from) / (to - from));
  const dots = Array.from(a, (v, i) => `M${(x(v) - 1.7).toFixed(1)} ${y(b[i]).toFixed(1)}a1.7 1.7 0 1 0 3.4 0a1.7 1.7 0 1 0 -3.4 0`).join("");
  const foot = 4 + SIDE * 0.75;
  const label = `A against B, ${plural(a.length, "value")} from ${size(low)} to ${size(high)}`;
  return `<svg class="scatter" width="${SIDE + 40}" height="${foot + 34}" role="img" aria-label="${label}"><rect x="30" y="4" width="${SIDE}" height="${SIDE * 0.75}" fill="var(--sunk)"/><path d="M30 ${foot}L${30 + SIDE} 4" stroke="var(--line2)" stroke-dasharray="4 3"/><path d="${dots}" fill="none" stroke="var(--ink)" stroke-opacity=".7"/><text x="30" y="${foot + 14}">${size(low)}</text><text x="${30 + SIDE}" y="${foot + 14}" text-anchor="end">${size(high)}</text><text class="k" x="${30 + SIDE / 2}" y="${foot + 14}" text-anchor="middle">A</text><text class="k" x="20" y="${4 + (SIDE * 0.75) / 2}" text-anchor="end">B</text><text x="30" y="${foot + 30}">${a.length < seen.looked * seen.shape.reduce((p, n) => p * n, 1) - seen.nonfinite[0] - seen.nonfinite[1] ? `${count(a.length)} values drawn; on the line: equal` : "on the line: equal"}</text></svg>`;
}

function histogram({ bins, range, sampled, clipped: beyond }) {
  const n = bins.length;
  if (!range) return `<div class="histogram q pad">B − A is 0 in all ${count(sampled)} values looked at.</div>`;
  const inner = Math.max(1, ...bins.subarray(1, n - 1));
  const tall = (v) => (v ? Math.max(1, (TALL - 14) * Math.min(1, v / inner)) : 0);
  const bars = Array.from(bins, (v, i) => `<rect x="${(i * WIDE) / n}" y="${TALL - tall(v)}" width="${WIDE / n - 1}" height="${tall(v)}" fill="var(--line2)"/>`).join("");
  const clipped = [0, n - 1].filter((i) => beyond[i ? 1 : 0]);
  const corners = clipped.map((i) => `<path d="M${(i * WIDE) / n} ${TALL - tall(bins[i])}h7v7Z" fill="var(--markp)" stroke="var(--mark)"/>`).join("");
  const words = clipped.length ? `corner: ${clipped.map((i) => `${count(beyond[i ? 1 : 0])} ${i ? "above" : "below"}`).join(", ")}, drawn in the last bins` : "";
  return `<svg class="histogram" width="${WIDE}" height="${TALL + 34}" role="img" aria-label="Histogram of B minus A from ${power(-range, 1)} to ${power(range, 1)}">${bars}<path d="M0 ${TALL + 0.5}H${WIDE}" stroke="var(--line2)"/><path d="M${WIDE / 2} 6V${TALL + 4}" stroke="var(--ink)" stroke-dasharray="2 2"/>${corners}<text x="0" y="${TALL + 14}">${beyond[0] ? "≤ " : ""}${size(-range)}</text><text class="k" x="${WIDE / 2}" y="${TALL + 14}" text-anchor="middle">B − A</text><text x="${WIDE}" y="${TALL + 14}" text-anchor="end">${beyond[1] ? "≥ " : ""}${size(range)}</text><text x="0" y="${TALL + 30}">${words}</text></svg>`;
}

function worstRows(view, seen) {
  const { store, token } = view;
  const named = seen.row_expert.some((e) => e >= 0);
  const slots = store.slots(store.row(view.path).layer);
  const order = Array.from(seen.row_token, (t, i) => i);
  if (!order.length) return "";
  const rows = order.map((i) => {
    const [rel, a, b, at] = seen.worst.subarray(4 * i, 4 * i + 4);
    const t = seen.row_token[i];
    const e = seen.row_expert[i];
    return `<tr class="${t === token ? "on" : ""}"><td><button type="button" class="name" data-token="${t}" aria-pressed="${t === token}" ${SUPPRESS}>${t}</button> <span class="tt">${escape(word(store.facts.texts[t] ?? "", store.facts.ids[t]))}</span></td>${named ? `<td>${e < 0 ? "" : chip({ ...view, slots }, e)}</td>` : ""}<td class="num">${size(rel)}</td><td class="num">${size(a)}</td><td class="num">${size(b)}</td><td class="num q">${at}</td></tr>`;
  });
  return `<table class="t rows"><caption>Rows that differ most${Number.isInteger(seen.of_token) ? ", and those of the selected token" : ""}</caption><thead><tr><th>token</th>${named ? "<th>expert</th>" : ""}<th class="num">difference</th><th class="num">A</th><th class="num">B</th><th class="num">at</th></tr></thead><tbody>${rows.join("")}</tbody></table>`;
}

function rerouted(view, seen) {
  const { store, token } = view;
  if (!seen.moved_tokens.length) return '<p class="q pad">Every token goes to the same experts in both runs.</p>';
  const k = seen.shape[0];
  const slots = store.slots(store.row(view.path).layer);
  const chosen = (ids, i) => Array.from(ids.subarray(i * k, i * k + k)).filter((e) => e >= 0);
  const set = (i, ids, others) => chips({ ...view, slots }, chosen(ids, i), chosen(others, i));
  const rows = Array.from(seen.moved_tokens.subarray(0, LISTED), (t, i) => `<tr class="${t === token ? "on" : ""}"><td><button type="button" class="name" data-token="${t}" aria-pressed="${t === token}" ${SUPPRESS}>${t}</button> <span class="tt">${escape(word(store.facts.texts[t] ?? "", store.facts.ids[t]))}</span></td><td>${set(i, seen.ids_a, seen.ids_b)}</td><td>${set(i, seen.ids_b, seen.ids_a)}</td></tr>`);
  const more = seen.moved > rows.length ? `<p class="q small">and ${count(seen.moved - rows.length)} more</p>` : "";
  const long = rows.length > 8;
  return `<div class="${long ? "scroll" : ""}"${long ? ` tabindex="0" role="region" aria-label="Tokens that go to other experts" ${SUPPRESS}` : ""}><table class="t rows"><caption>Tokens that go to other experts; filled: exchanged</caption><thead><tr><th>token</th><th>experts in A</th><th>in B</th></tr></thead><tbody>${rows.join("")}</tbody></table></div>${more}`;
}
