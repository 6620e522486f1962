// From the origin to the ruined logits: boxes in three columns, arrows that say what each step did. What stayed clean is a box too.
import { count, escape, plural } from "../common/format.js";
import { SUPPRESS } from "../common/frame.js";
import { markAt } from "../common/marks.js";
import { ring } from "../common/pointers.js";

const SHARES = [0.355, 0.365, 0.28]; // of the width, by column
const GAP = 32; // between columns: room for an arrow
const TOP = 24;
const BOX = 40;
const PITCH = 62; // from box to box: an arrow with its words between
const LISTED = 4; // origins
const LAYERS = 2; // that are spelt out

// As much of a text as fits, measured in the font it is drawn in.
const pen = document.createElement("canvas").getContext("2d");
function cut(text, width, bold, { ui }) {
  pen.font = `${bold ? "bold " : ""}11px ${ui}`;
  if (pen.measureText(text).width <= width) return text;
  const letters = Array.from(text);
  while (letters.length > 3 && pen.measureText(`${letters.join("")}…`).width > width) letters.pop();
  return `${letters.join("").trimEnd()}…`;
}

// Where each box stands: in its column from above, one of the last column beside the one it comes from.
function placed(boxes, width) {
  const room = width - 2 * GAP - 4;
  const w = SHARES.map((share) => share * room);
  const x = [2, 2 + w[0] + GAP, 2 + w[0] + w[1] + 2 * GAP];
  const next = [TOP, TOP, TOP];
  const last = boxes.filter(({ column }) => column === 2).length - 1; // the last box of the last column ends where its source does
  return boxes.map((box, i) => {
    const { column, source } = box;
    let y = next[column];
    if (column === 2 && source !== null && source < i) y = Math.max(y, TOP + PITCH * (rankIn(boxes, source) - last));
    next[column] = y + PITCH;
    return { ...box, x: x[column], y, w: w[column] };
  });
}

const rankIn = (boxes, i) => boxes.slice(0, i).filter(({ column }) => column === boxes[i].column).length;

export function treePicture(view, width) {
  const way = view.store.ways.get(view.chosen);
  if (!way) return '<p class="q pad">The way of this origin was not fetched; that needs Python.</p>';
  const boxes = placed(way.boxes, width);
  const tall = Math.max(...boxes.map(({ y }) => y)) + BOX + 6;
  const heads = [0, 1, 2].map((c) => `<text class="b" x="${columnX(boxes, c, width)}" y="12">${escape(way.columns[c])}</text>`).join("");
  const used = new Set(boxes.map(({ column }) => column));
  const lines = [1, 2].filter((c) => used.has(c)).map((c) => `<path d="M${columnX(boxes, c, width) - GAP / 2} 4V${tall - 4}" stroke="var(--line)"/>`).join("");
  const arrows = boxes.map((box) => (box.source === null ? "" : arrow(view, boxes[box.source], box))).join("");
  const drawn = boxes.map((box, i) => boxHtml(view, box, i, boxes[box.source])).join("");
  return `<svg width="${width}" height="${tall}">${heads}${lines}${arrows}${drawn}</svg>`;
}

const columnX = (boxes, column, width) => boxes.find((box) => box.column === column)?.x ?? placed([{ column, source: null }], width)[0].x;

function arrow({ palette }, from, to) {
  const ink = 'fill="none" stroke="var(--ink)" stroke-width="1.6"';
  if (from.column === to.column && to.y - from.y === PITCH) {
    const x = from.x + 22;
    const [a, b] = [from.y + BOX, to.y];
    return `<path d="M${x} ${a + 1}V${b - 7}" ${ink}/><path d="M${x - 5} ${b - 8}h10l-5 8Z" fill="var(--ink)"/><text x="${x + 10}" y="${(a + b) / 2 + 4}">${escape(cut(to.label, to.w - 26, false, palette))}<title>${escape(to.label)}</title></text>`;
  }
  const [a, b, d] = [from.x + from.w, from.y + BOX / 2, to.y + BOX / 2];
  const e = d - 10; // above the arrow that leaves from here
  if (from.column === to.column) return `<path d="M${a} ${b}C${a + 20} ${b} ${a + 20} ${e} ${a + 8} ${e}" ${ink}/><path d="M${a + 8} ${e - 5}l-8 5l8 5Z" fill="var(--ink)"/>`;
  const c = to.x;
  const middle = c - GAP / 2;
  const start = middle - GAP / 2; // a straight run up to the gap before the box
  return `<path d="M${a} ${b}H${start}C${middle} ${b} ${middle - 4} ${d} ${c - 7} ${d}" ${ink}/><path d="M${c - 8} ${d - 5}l8 5l-8 5Z" fill="var(--ink)"/>`;
}

function boxHtml({ box: here, palette }, box, i, from) {
  const on = i === here;
  const { x, y, w, title, sub, mark, label } = box;
  const inset = mark ? 33 : 10;
  const said = label && from && from.column !== box.column ? `${sub.split(":")[0]}: ${label}` : sub;
  const frame = `<rect x="${x}" y="${y}" width="${w}" height="${BOX}" rx="4" fill="var(--card)" stroke="${on ? "none" : "var(--line2)"}"${title.startsWith("⋯") ? ' stroke-dasharray="3 3"' : ""}/>`;
  const text = `<text class="b" x="${x + inset}" y="${y + 17}">${escape(cut(title, w - inset - 6, true, palette))}</text><text class="k" x="${x + inset}" y="${y + 32}">${escape(cut(said, w - inset - 6, false, palette))}</text>`;
  return `<g class="box" data-box="${i}"><title>${escape([title, sub, label].filter(Boolean).join(" · "))}</title>${on ? ring(x, y, w, BOX) : ""}${frame}${mark ? markAt(mark, x + 8, y + 9, 18, 16, i > 0) : ""}${text}</g>`;
}

// Several origins: a list to choose from.
export function originList(view) {
  const { store, chosen, allOrigins } = view;
  const { origins, all_origins: all } = store.facts;
  if (all < 2) return "";
  const shown = allOrigins ? origins.map((_, i) => i) : windowOf(origins.length, chosen);
  const rows = shown.map((i) => {
    const { kind, name, layer, token_words: tokens } = origins[i];
    return `<li><button type="button" class="name" data-origin="${i}" aria-pressed="${i === chosen}" ${SUPPRESS}><b>${i + 1}</b> ${escape(kind)}: ${layer === null ? "" : `layer ${layer}, `}${escape(name)}, ${escape(tokens)}</button></li>`;
  });
  const missing = all > origins.length ? ` These are the first ${count(origins.length)} of ${count(all)}; the others are in <span class="m">view.found.origins</span>.` : "";
  const more = origins.length > LISTED ? `<p class="q small">${allOrigins ? "" : `⋯ ${count(all - shown.length)} more. `}<button type="button" class="link" data-act="${allOrigins ? "feworigins" : "allorigins"}" ${SUPPRESS}>${allOrigins ? "Show few" : `Show ${all > origins.length ? "the first" : "all"} ${count(origins.length)}`}</button>${missing}</p>` : "";
  const scroll = allOrigins && origins.length > 8;
  return `<div class="${scroll ? "scroll" : ""}"${scroll ? ` tabindex="0" role="region" aria-label="Origins" ${SUPPRESS}` : ""}><ul>${rows.join("")}</ul></div>${more}`;
}

// A few origins around the chosen one.
function windowOf(n, chosen) {
  const from = Math.max(0, Math.min(n - LISTED, chosen - 1));
  return Array.from({ length: Math.min(n, LISTED) }, (_, i) => from + i);
}

export function wayEnds({ store }) {
  const { way, all_origins: all, notes } = store.facts;
  if (!way) return "";
  const lines = [`Independent origins: <b>${count(all)}</b>`];
  const by = (entries) => entries.slice(0, LAYERS).map(([layer, tokens]) => `layer ${layer}: ${escape(tokens)}`).join("; ") + (entries.length > LAYERS ? `; and ${plural(entries.length - LAYERS, "more layer")}` : "");
  if (way.cache.length) lines.push(`Kept in the KV cache for all later tokens: ${by(way.cache)}`);
  if (way.routing.length) lines.push(`Expert ids that mean nothing: ${by(way.routing)}`);
  lines.push(...way.swallowed.map((words) => `Swallowed: ${escape(words)}`), ...notes.map((note) => escape(note)));
  return `<ul class="ends">${lines.map((words) => `<li>${words}</li>`).join("")}</ul>`;
}

// The box that an arrow leads to: right to the first that comes from here, left to where this one comes from, up and down in the column.
export function stepInTree(way, at, right, down) {
  const boxes = way.boxes;
  if (at === null) return 0;
  if (down) {
    const column = boxes.map((box, i) => [box, i]).filter(([box]) => box.column === boxes[at].column).map(([, i]) => i);
    return column[column.indexOf(at) + down] ?? at;
  }
  if (right < 0) return boxes[at].source ?? at;
  const next = boxes.findIndex(({ source }) => source === at);
  return next < 0 ? at : next;
}

// The tree in words for screen readers.
export const treeLabel = ({ store, chosen, box }) => {
  const boxes = store.ways.get(chosen)?.boxes ?? [];
  const here = boxes[box];
  return `Steps from the origin, ${plural(boxes.length, "box", "boxes")}. ${here ? `${here.title}, ${here.sub}${here.label ? `, ${here.label}` : ""}.` : ""} Right goes to the next step, left back.`;
};
