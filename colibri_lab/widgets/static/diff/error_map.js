// The error map: taps × layers on a log scale, exponents printed. Colour only for what exceeds its tolerance.
import { escape, plural } from "../common/format.js";
import { pointer, ring } from "../common/pointers.js";
import { kindOf } from "../common/tap_map.js";
import { isIds } from "./store.js";
import { MARKS, declared, power } from "./words.js";

const LEFT = 132;
const TOP = 40;
const END = 46; // columns before and behind the layers, if there are any

// Measures shared by drawing, pointing and keys.
export function mapLayout(store, width) {
  const before = store.before.length ? END : 0;
  const after = store.after.length ? END : 0;
  const cw = Math.max(2.5, Math.min(60, (width - LEFT - before - after - 8) / Math.max(1, store.layers.length)));
  const ch = store.kinds.length > 16 ? 18 : 21;
  return { cw, ch, before, after, first: LEFT + before, end: LEFT + before + cw * store.layers.length, tall: ch * Math.max(store.kinds.length, 2 * Math.max(store.before.length, store.after.length), 1), gap: cw > 12 ? 2 : 0.5 };
}

export const wide = (store) => store.layers.length > 10; // then the map takes the whole width

export const rowName = (kind) => (kind === "output" ? "layer output" : kind.replace(/^moe\.(router_logits|scores|expert_ids|gates|routed|shared\.|experts\.)/, "$1"));

export function errorMap(view, width) {
  const { store, palette } = view;
  const at = mapLayout(store, width);
  const { first } = store.facts;
  let s = `<text x="${LEFT - 12}" y="12" text-anchor="end">tap ↓</text><text x="${at.first}" y="12">layer →</text>`;
  if (at.before) s += ends(view, at, store.before, LEFT, "in");
  if (at.after) s += ends(view, at, store.after, at.end, "out");
  const every = at.cw >= 20 ? 1 : at.cw >= 8 ? 4 : 16;
  const here = store.row(view.path)?.layer;
  store.layers.forEach((layer, i) => {
    const near = [first?.layer, here].some((l) => l !== layer && l !== undefined && l !== null && Math.abs(store.layers.indexOf(l) - i) * at.cw < 20);
    if (layer === first?.layer || layer === here || (layer % every === 0 && !near)) s += `<text x="${at.first + (i + 0.5) * at.cw}" y="${TOP - 11}" text-anchor="middle"${layer === here ? ' class="b"' : ""}>${layer}</text>`;
  });
  store.kinds.forEach((kind, j) => {
    const named = kindOf(view.path) === kind;
    s += `<text class="${named ? "b" : "k"}" x="${LEFT - 12}" y="${TOP + j * at.ch + at.ch / 2 + 3}" text-anchor="end">${escape(rowName(kind))}</text>`;
    store.layers.forEach((layer, i) => {
      const path = store.path(kind, layer);
      if (path) s += cell(view, path, at.first + i * at.cw, TOP + j * at.ch, at.cw - at.gap, at.ch - at.gap);
    });
  });
  if (first && first.layer !== null) {
    const x = at.first + (store.layers.indexOf(first.layer) + 0.5) * at.cw;
    const y = TOP + (store.kinds.indexOf(kindOf(first.path)) + 0.5) * at.ch;
    s += pointer(x, TOP - 1, "v") + pointer(LEFT - 2, y, ">") + `<text x="${x}" y="12" text-anchor="middle" class="first">first</text>`;
  }
  const box = boxOf(view, at, view.path);
  if (box) s += ring(...box);
  const low = TOP + at.tall + 12;
  return `<svg width="${width}" height="${low + 46}">${s}${key(view, low, palette)}</svg>`;
}

// Taps outside the layers share the height of the map.
function ends(view, at, paths, x, name) {
  const h = at.tall / paths.length;
  return `<text x="${x + (END - 2) / 2}" y="${TOP - 11}" text-anchor="middle">${name}</text>` + paths.map((path, i) => cell(view, path, x, TOP + i * h, END - 2, h - 2, path)).join("");
}

export function boxOf(view, at, path) {
  const { store } = view;
  const row = store.row(path);
  if (!row) return null;
  if (row.layer >= 0) return [at.first + store.layers.indexOf(row.layer) * at.cw, TOP + store.kinds.indexOf(kindOf(path)) * at.ch, at.cw - at.gap, at.ch - at.gap];
  const side = store.before.includes(path) ? store.before : store.after;
  const h = at.tall / side.length;
  return [side === store.before ? LEFT : at.end, TOP + side.indexOf(path) * h, END - 2, h - 2];
}

function cell(view, path, x, y, w, h, name = "") {
  const { store } = view;
  const row = store.row(path);
  const [look, fill, ink, words] = dress(view, row);
  const middle = y + h / 2 + 4;
  const room = w >= 40 || name;
  const text = room ? words : w >= 16 ? narrow(words) : "";
  let inside = `<rect class="${look}" x="${x}" y="${y}" width="${w}" height="${h}"${fill ? ` style="fill:${fill}"` : ""}/>`;
  if (words === "NaN") inside += nan(x, y, w, h, name);
  else if (name) inside += `<text x="${x + w / 2}" y="${middle - 8}" text-anchor="middle" style="${ink && `fill:${ink}`}">${escape(name)}</text><text x="${x + w / 2}" y="${middle + 8}" text-anchor="middle" style="${ink && `fill:${ink}`}">${text}</text>`;
  else if (text) inside += `<text x="${x + w / 2}" y="${middle}" text-anchor="middle" class="${look}" style="${ink && `fill:${ink}`}">${text}</text>`;
  else if (look === "tie" || look === "flips") inside += `<circle cx="${x + w / 2}" cy="${y + h / 2}" r="${Math.min(2, w / 3)}" fill="var(--mark)"/>`;
  return `<g class="cell" data-path="${path}"><title>${escape(`${path}: ${described(row)}`)}</title>${inside}</g>`;
}

// In a narrow cell: the exponent, or the mark alone.
const narrow = (words) => words.replace(/^.e/, "").replace(/^([≈✗↓]).*/, "$1");

const described = (row) => (isIds(row.path) ? (row.moved ? `${plural(row.moved, "token")} to other experts` : "same experts") : row.state === "same bits" ? "same bits" : `${power(row.rel, 1)}, ${row.state} tolerance ${power(row.tolerance)}`);

// How a cell looks: class, fill, ink, words.
function dress(view, row) {
  const { store, palette } = view;
  if (row.state === "same bits" || row.state === "same") return ["same", "", "", "="];
  if (isIds(row.path)) {
    const of = store.flipsOf.get(row.layer) ?? {};
    if (row.state === "tie") return ["tie", "", "", `≈ ${row.moved} tie`];
    const fill = palette.of(0.62);
    return ["flips", fill, palette.inkOf(0.62), `${of.defect ? MARKS.defect : MARKS.downstream} ${row.moved}`];
  }
  if (row.state === "within") return ["within", "", "", power(row.rel)];
  if (!Number.isFinite(row.rel)) return ["beyond", "", "", "NaN"];
  const v = strength(store, row.rel);
  return ["beyond", palette.of(v), palette.inkOf(v), power(row.rel)];
}

// 0 at the declared tolerance, 1 at 1, on a log scale.
function strength(store, rel) {
  const low = Math.log10(Math.max(store.facts.tolerance[0], 1e-12));
  return Math.max(0, Math.min(1, (Math.log10(rel) - low) / (0 - low || 1)));
}

function nan(x, y, w, h, name) {
  const r = Math.min(7, Math.min(w, h) * 0.3);
  const [cx, cy] = [x + w / 2, y + h / 2 + (name ? 10 : 0)];
  return `<rect x="${x + 0.75}" y="${y + 0.75}" width="${w - 1.5}" height="${h - 1.5}" fill="var(--markp)" stroke="var(--mark)" stroke-width="1.5"/><path d="M${cx - r} ${cy - r}L${cx + r} ${cy + r}M${cx + r} ${cy - r}L${cx - r} ${cy + r}" stroke="var(--mark)" stroke-width="2"/>${name ? `<text class="k" x="${cx}" y="${y + h / 2 - 6}" text-anchor="middle">${escape(name)}</text>` : ""}`;
}

// Tolerance, colours, marks.
function key(view, y, palette) {
  const { store } = view;
  const { facts } = store;
  const stops = Array.from({ length: 16 }, (_, i) => `<rect x="${60 + (i * 150) / 16}" y="0" width="${150 / 16 + 0.5}" height="9" fill="${palette.of(i / 15)}"/>`).join("");
  const nans = facts.paths.some((path) => !isIds(path) && !Number.isFinite(store.row(path).rel));
  const marks = [facts.states.includes("same bits") || facts.states.includes("same") ? ["=", "same bits"] : null, facts.flips.counts.tie ? ["≈ n", "near-ties"] : null, facts.flips.counts.downstream ? ["↓ n", "tokens re-routed as a consequence"] : null, facts.flips.counts.defect ? ["✗ n", "tokens routed wrongly"] : null, nans ? ["×", "NaN or Inf on one side"] : null].filter(Boolean);
  const scale = `<rect x="0" y="0" width="60" height="9" fill="var(--sunk)" stroke="var(--line)"/>${stops}<path d="M60 -3V12" stroke="var(--ink)" stroke-width="2"/><text class="k" x="60" y="23" text-anchor="middle">tolerance ${declared(facts)}</text><text x="210" y="23" text-anchor="end">1</text><text x="218" y="9">largest difference ÷ largest value</text>`;
  const valued = facts.paths.some((path) => !isIds(path));
  return `<g transform="translate(${LEFT},${y})">${valued ? scale : ""}<text x="0" y="${valued ? 41 : 8}">${marks.map(([mark, words]) => `<tspan class="b">${mark}</tspan> ${words}`).join("   ")}</text></g>`;
}
