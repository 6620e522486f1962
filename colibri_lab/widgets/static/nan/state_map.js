// Taps by layer: where values are finite, near their limit, born non-finite, passed on. Only an origin is filled.
import { count, escape, fixed } from "../common/format.js";
import { markAt, markSvg } from "../common/marks.js";
import { pointer, ring } from "../common/pointers.js";
import { kindOf } from "../common/tap_map.js";
import { bitsText } from "./words.js";

const LEFT = 132;
const TOP = 40;
const END = 48; // columns before and behind the layers, if there are any
const NARROWEST = 7; // of a layer; when there are more, a window of them is drawn

// Measures shared by drawing, pointing and keys; `from` and `to` are the window of layers.
export function mapLayout(view, width) {
  const { store, path } = view;
  const before = store.before.length ? END : 0;
  const after = store.after.length ? END : 0;
  const room = width - LEFT - before - after - 10;
  const all = store.layers.length;
  const shown = Math.max(1, Math.min(all, Math.floor(room / NARROWEST)));
  const here = store.layers.indexOf(store.row(path)?.layer);
  const from = Math.max(0, Math.min(all - shown, (here < 0 ? 0 : here) - Math.floor(shown / 2)));
  const cw = Math.min(60, room / shown);
  const ch = store.kinds.length > 12 ? 19 : 25;
  return { cw, ch, before, after, from, to: from + shown, all, first: LEFT + before, end: LEFT + before + cw * shown, tall: ch * Math.max(store.kinds.length, 2 * Math.max(store.before.length, store.after.length), 1), gap: cw > 12 ? 2 : 0.5 };
}

export const wide = (store) => store.layers.length > 10; // then the map takes the whole width

const rowName = (kind) => (kind === "output" ? "layer output" : kind.replace(/^moe\.(router_logits|scores|gates|routed|shared\.|experts\.)/, "$1"));

export function stateMap(view, width) {
  const { store, path, chosen } = view;
  const { facts } = store;
  const at = mapLayout(view, width);
  const origin = facts.origins[chosen];
  const born = origin?.at;
  let s = `<text x="${LEFT - 12}" y="12" text-anchor="end">stage ↓</text>`;
  if (at.before) s += ends(view, at, store.before, LEFT, "in");
  if (at.after) s += ends(view, at, store.after, at.end, "out");
  s += layerNames(view, at, origin?.layer);
  store.kinds.forEach((kind, j) => {
    const named = kindOf(path) === kind;
    s += `<text class="${named ? "b" : "k"}" x="${LEFT - 12}" y="${TOP + j * at.ch + at.ch / 2 + 3}" text-anchor="end">${escape(rowName(kind))}</text>`;
    for (let i = at.from; i < at.to; i++) {
      const one = store.path(kind, store.layers[i]);
      if (one) s += cell(view, one, at.first + (i - at.from) * at.cw, TOP + j * at.ch, at.cw - at.gap, at.ch - at.gap);
    }
  });
  for (const x of [at.from > 0 && at.first - 2, at.to < at.all && at.end - 5]) if (x) s += `<path d="M${x} ${TOP}${Array.from({ length: Math.floor(at.tall / 6) }, (_, i) => `l${i % 2 ? -4 : 4} 6`).join("")}" fill="none" stroke="var(--mark)" stroke-width="1.5"/>`;
  const place = born ? boxOf(view, at, born) : null;
  if (place) {
    const [x, y, w, h] = place;
    const left = Math.max(LEFT + 18, Math.min(width - 18, x + w / 2));
    s += `${pointer(x + w / 2, TOP - 1, "v")}${pointer(LEFT - 2, y + Math.min(h, at.ch) / 2, ">")}<text x="${left}" y="12" text-anchor="middle" class="first">origin</text>`;
  }
  if (!place || place[0] + place[2] / 2 > at.first + 66) s += `<text x="${at.first}" y="12">layer →</text>`; // else the word "origin" stands there
  const here = boxOf(view, at, path);
  if (here) s += ring(...here);
  return `<svg width="${width}" height="${TOP + at.tall + 4}">${s}</svg>`;
}

function layerNames({ store, path }, at, origin) {
  const every = at.cw >= 20 ? 1 : at.cw >= 8 ? 4 : 16;
  const here = store.row(path)?.layer;
  const marked = [origin, here].filter((l) => l !== undefined && l !== null && l >= 0);
  let s = "";
  for (let i = at.from; i < at.to; i++) {
    const layer = store.layers[i];
    const near = marked.some((l) => l !== layer && Math.abs(store.layers.indexOf(l) - i) * at.cw < 20);
    if (marked.includes(layer) || (layer % every === 0 && !near)) s += `<text x="${at.first + (i - at.from + 0.5) * at.cw}" y="${TOP - 11}" text-anchor="middle"${layer === here ? ' class="b"' : ""}>${layer}</text>`;
  }
  return s;
}

// Taps outside the layers share the height of the map.
function ends(view, at, paths, x, name) {
  const h = at.tall / paths.length;
  return `<text x="${x + (END - 2) / 2}" y="${TOP - 11}" text-anchor="middle">${name}</text>` + paths.map((path, i) => cell(view, path, x, TOP + i * h, END - 2, h - 2, path)).join("");
}

function boxOf({ store }, at, path) {
  const row = store.row(path);
  if (!row) return null;
  if (row.layer >= 0) {
    const i = store.layers.indexOf(row.layer);
    return i < at.from || i >= at.to ? null : [at.first + (i - at.from) * at.cw, TOP + store.kinds.indexOf(kindOf(path)) * at.ch, at.cw - at.gap, at.ch - at.gap];
  }
  const side = store.before.includes(path) ? store.before : store.after;
  const h = at.tall / side.length;
  return [side === store.before ? LEFT : at.end, TOP + side.indexOf(path) * h, END - 2, h - 2];
}

function cell(view, path, x, y, w, h, name = "") {
  const { store } = view;
  const row = store.row(path);
  const [cx, cy] = [x + w / 2, y + h / 2];
  const odd = row.state === "origin" || row.state === "passed";
  let inside = "";
  if (odd) inside = markAt(store.mark(row), x, y, w, h, row.state === "passed");
  else if (row.state === "near") inside = `<rect x="${x + 1}" y="${y + 1}" width="${w - 2}" height="${h - 2}" fill="none" stroke="var(--warn)" stroke-width="2"/>${name || w < 10 ? "" : `<text x="${cx}" y="${cy + 4}" text-anchor="middle" class="near">${w >= 46 ? `! ${fixed(row.bits_left, 1)} b` : w >= 32 ? `! ${fixed(row.bits_left, 1)}` : "!"}</text>`}`;
  else if (row.state === "subnormal") inside = markAt("subnormal", x, y, w, h);
  else inside = `<rect class="finite" x="${x}" y="${y}" width="${w}" height="${h}"/>${name || w < 12 ? "" : `<text x="${cx}" y="${cy + 4}" text-anchor="middle">·</text>`}`;
  if (name) inside += endWords(view, row, cx, odd ? cy + 24 : cy, name);
  return `<g class="cell" data-path="${path}"><title>${escape(`${path}: ${described(row)}`)}</title>${inside}</g>`;
}

// The name stands in the cell, for nothing else names it; logits with the number of ruined tokens.
function endWords({ store }, row, x, y, name) {
  const { way, tokens } = store.facts;
  const on = row.state === "origin" ? " on" : ""; // on a filled cell
  const ruined = way && way.last === row.path && way.ruined ? amount(count(way.ruined), count(tokens), x, y + 15, on) : "";
  const near = row.state === "near" ? `<text x="${x}" y="${y + 15}" text-anchor="middle" class="near">! ${fixed(row.bits_left, 1)} b</text>` : "";
  return `<text class="b${on}" x="${x}" y="${y + 3}" text-anchor="middle">${escape(name)}</text>${ruined}${near}`;
}

// "5 of 40"; what is too long for the cell on two lines.
function amount(n, all, x, y, on) {
  const line = (words, dy) => `<text class="k${on}" x="${x}" y="${y + dy}" text-anchor="middle">${words}</text>`;
  return `${n}${all}`.length < 4 ? line(`${n} of ${all}`, 0) : line(n, 0) + line(`of ${all}`, 13);
}

const described = (row) => (row.n_nan || row.n_inf ? `${count(row.n_nan)} NaN, ${count(row.n_inf)} Inf${row.n_negative_inf ? ` (${count(row.n_negative_inf)} negative)` : ""}, ${row.state === "origin" ? "born here" : "passed on"}` : `finite, ${bitsText(row.bits_left)} bits left`);

// Each mark with its number of cells; what does not occur is not listed.
export function mapKey(view, width) {
  const { store } = view;
  const n = {};
  let passed = 0;
  for (const path of store.facts.paths) {
    const row = store.row(path);
    const odd = row.state === "origin" || row.state === "passed";
    const kind = odd ? store.mark(row) : row.state;
    n[kind] = (n[kind] ?? 0) + 1;
    passed += row.state === "passed";
  }
  const entries = [["finite", "finite"], ["near", "under 2 bits left"], ["subnormal", "many subnormals"], ["+inf", "+Inf"], ["-inf", "−Inf"], ["nan", "NaN"]];
  const keys = entries.filter(([kind]) => n[kind]).map(([kind, words]) => `<span class="mk">${markSvg(kind)}${words} (${count(n[kind])})</span>`);
  if (n.nan || n["+inf"] || n["-inf"]) keys.push(`<span>filled: origin${passed ? "; pale: passed on" : ""}</span>`);
  const at = mapLayout(view, width);
  const hidden = at.all - (at.to - at.from);
  if (hidden) keys.push(`<span class="mk">${markSvg("cut")}cut: ${count(hidden)} more layers</span>`);
  return keys.join("");
}
