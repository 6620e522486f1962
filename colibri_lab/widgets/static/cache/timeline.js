// The cache of one layer, token by token: a row per expert; who is inside, hit, missed, pushed out. A window of what was sent.
import { count, escape, expertColour } from "../common/format.js";
import { inkOn } from "../common/palette.js";
import { ring } from "../common/pointers.js";
import { title } from "./store.js";
import { tokenName } from "./words.js";

const LEFT = 34;
const TOP = 16;
const TALL = 320; // height the experts share
const CELL = { least: 12, most: 28 };
const WORDS = 62; // room for token texts
const CUT = 12; // of a zigzag edge

// The tokens that are drawn and where: around the selected one, or where the window was moved to.
export function layoutTimeline(view, width) {
  const { store, token } = view;
  const row = Math.max(3, Math.min(20, Math.floor(TALL / store.E)));
  const room = width - LEFT - 4;
  const cell = Math.max(CELL.least, Math.min(CELL.most, room / Math.max(1, store.n)));
  const cut = store.n * CELL.least > room;
  const shown = cut ? Math.floor((room - 2 * CUT) / cell) : store.n;
  const start = Math.max(0, Math.min(store.n - shown, (token ?? 0) - Math.floor(shown / 2)));
  return { width, row, cell, shown, start, cut, left: LEFT + (cut ? CUT : 0), top: TOP + (cut ? 14 : 0), height: TOP + (cut ? 14 : 0) + row * store.E + WORDS + 6 };
}

export function hitTimeline(view, layout, px, py) {
  const { left, top, cell, row, shown, start } = layout;
  const column = Math.floor((px - left) / cell);
  const expert = Math.floor((py - top) / row);
  const inRows = expert >= 0 && expert < view.store.E;
  if (layout.cut && py < top - 4 && px >= left && px <= left + shown * cell) return { strip: Math.min(view.store.n - 1, Math.floor(((px - left) / (shown * cell)) * view.store.n)) };
  if (column < 0 || column >= shown || (!inRows && py < top)) return px < left && inRows ? { expert } : null;
  return inRows ? { token: start + column, expert } : { token: start + column };
}

export function timelinePicture(view, layout, block) {
  const { store, token, expert } = view;
  if (!block) return `<svg width="${layout.width}" height="${layout.height}" aria-hidden="true"><text x="${LEFT}" y="40">${view.live ? "Being simulated …" : "The timeline of this setting is not here."}</text></svg>`;
  const { left, top, cell, row, shown, start } = layout;
  const end = Math.min(start + shown, block.stop);
  const from = Math.max(start, block.start);
  const x = (t) => left + (t - start) * cell;
  const y = (e) => top + e * row;
  const here = token !== null && token >= start && token < start + shown;
  const band = here ? `<rect x="${x(token)}" y="${top - 2}" width="${cell}" height="${row * store.E + 4}" fill="var(--sel)" fill-opacity=".08"/>` : "";
  const at = here && expert !== null ? ring(x(token), y(expert) + (row > 8 ? 1 : 0), cell, row - (row > 8 ? 2 : 0)) : "";
  return `<svg width="${layout.width}" height="${layout.height}" aria-hidden="true">${rows(view, layout, y)}${band}${bands(view, block, from, end, x, y, layout)}${requests(view, block, from, end, x, y, layout)}${layout.cut ? edges(view, layout) : ""}${texts(view, block, from, end, x, layout)}${at}</svg>`;
}

function rows(view, { row, left, shown, cell, top }, y) {
  const { store, expert } = view;
  const every = row >= 12 ? 1 : 16;
  let s = "";
  for (let e = 0; e < store.E; e++) {
    if (row >= 12) {
      const colour = expertColour(view, e);
      s += `<rect x="6" y="${y(e) + row / 2 - 8}" width="${store.E > 99 ? 24 : 18}" height="16" rx="3" fill="${colour}"/><text class="b" x="${store.E > 99 ? 18 : 15}" y="${y(e) + row / 2 + 4}" text-anchor="middle" style="fill:${inkOn(colour)}">${e}</text><path d="M${left} ${y(e) + row - 0.5}H${left + shown * cell}" stroke="var(--line)"/>`;
    } else if (e % every === 0 && Math.abs(e - (expert ?? -99)) * row > 11) s += `<text x="28" y="${y(e) + 8}" text-anchor="end">${e}</text><path d="M${left} ${y(e)}H${left + shown * cell}" stroke="var(--line)"/>`;
  }
  if (row < 12 && expert !== null) s += `<text class="first" x="28" y="${Math.min(y(expert) + 6, top + store.E * row)}" text-anchor="end">${expert}</text>`;
  return s;
}

// Runs of tokens with an expert in the cache.
function bands(view, block, from, end, x, y, { row, cell }) {
  const { store } = view;
  const inset = row >= 12 ? 4 : 0;
  let s = "";
  for (let e = 0; e < store.E; e++) {
    let d = "";
    for (let t = from; t < end; ) {
      if (!store.inside(block, t, e)) {
        t += 1;
        continue;
      }
      let last = t;
      while (last < end && store.inside(block, last, e)) last += 1;
      d += `M${x(t)} ${y(e) + inset}H${x(last)}v${row - 2 * inset}H${x(t)}Z`;
      t = last;
    }
    if (d) s += `<path d="${d}" fill="${expertColour(view, e)}" fill-opacity=".28"/>`;
  }
  return s + outs(store, block, from, end, x, y, row, cell);
}

// Bars where an expert left: it was inside after the token before, and is not after this one.
function outs(store, block, from, end, x, y, row, cell) {
  const inset = row >= 12 ? 5 : 0;
  let d = "";
  for (let t = from; t < end; t++) for (let e = 0; e < store.E; e++) if (!store.inside(block, t, e) && store.inside(block, t - 1, e)) d += `M${x(t) + 1} ${y(e) + inset}v${row - 2 * inset}`;
  return cell ? `<path d="${d}" stroke="var(--ink)" stroke-width="${row >= 12 ? 2.2 : 1.2}" fill="none"/>` : "";
}

function requests(view, block, from, end, x, y, { row, cell }) {
  let s = "";
  const small = row < 12;
  for (const { token, expert, outcome } of block.requests) {
    if (token < from || token >= end) continue;
    const [px, py] = [x(token) + cell / 2, y(expert) + row / 2];
    if (small) s += outcome === "miss" ? `<rect x="${px - 2.5}" y="${py - row / 2}" width="5" height="${row}" fill="var(--ink)"/>` : `<rect x="${px - 1.5}" y="${py - row / 2}" width="3" height="${row}" fill="${expertColour(view, expert)}"/>`;
    else if (outcome === "miss") s += `<path d="M${px} ${py - 6}l6 6l-6 6l-6 -6Z" fill="var(--card)" stroke="var(--ink)" stroke-width="1.8"/>`;
    else s += `<circle cx="${px}" cy="${py}" r="4" fill="${expertColour(view, expert)}"/>${outcome === "hit" ? "" : LETTERS(outcome, px, py)}`;
  }
  return s;
}

// Hits that policy alone does not explain carry a ring: held for good, fetched ahead, late.
const LETTERS = (outcome, x, y) => `<circle cx="${x}" cy="${y}" r="6" fill="none" stroke="var(--ink)" stroke-width="1.2"${outcome === "late" ? ' stroke-dasharray="2 2"' : ""}/>`;

// Zigzag edges of a window, and above it the place of the window in all tokens.
function edges({ store }, { left, top, row, shown, cell, start }) {
  const tall = row * store.E;
  const zigzag = (px) => `M${px} ${top}${Array.from({ length: Math.ceil(tall / 6) }, (_, i) => `L${px + (i % 2 ? 0 : 6)} ${top + Math.min(tall, 6 * (i + 1))}`).join("")}`;
  const width = shown * cell;
  const ends = [start > 0 ? zigzag(left - 9) : "", start + shown < store.n ? zigzag(left + width + 3) : ""].join("");
  const at = left + (start / store.n) * width;
  return `<path d="${ends}" fill="none" stroke="var(--mark)" stroke-width="1.2"/><rect x="${left}" y="4" width="${width}" height="8" fill="var(--sunk)" stroke="var(--line2)" stroke-width=".8"/><rect x="${at}" y="3" width="${Math.max(4, (shown / store.n) * width)}" height="10" fill="var(--sel)" fill-opacity=".25" stroke="var(--sel)" stroke-width="1.5"/>`;
}

function texts(view, block, from, end, x, { row, cell, top }) {
  const { store, token } = view;
  const base = top + store.E * row + 6;
  let s = "";
  for (let t = from; t < end; t++) s += `<text class="m${t === token ? " first" : ""}" transform="translate(${x(t) + cell / 2 - 4},${base}) rotate(90)">${escape(tokenName(block, t, 9))}</text>`;
  return s;
}

export function timelineRemark({ store, setting }, layout) {
  const cut = layout.cut ? ` · tokens ${count(layout.start)}–${count(layout.start + layout.shown - 1)} of ${count(store.n)}` : "";
  return `${title(setting.policy)}, ${count(setting.capacity)} experts${setting.scope === "global" ? " for all layers" : ""}${cut}`;
}

export const timelineKey = ({ setting }) =>
  `<span><svg width="22" height="12"><rect width="22" height="12" fill="var(--line2)" fill-opacity=".4"/></svg>in the cache</span><span><svg width="12" height="12"><circle cx="6" cy="6" r="4" fill="var(--line2)"/></svg>hit</span>${setting.prefetch === "none" ? "" : '<span><svg width="14" height="14"><circle cx="7" cy="7" r="4" fill="var(--line2)"/><circle cx="7" cy="7" r="6" fill="none" stroke="var(--ink)"/></svg>hit, fetched ahead</span>'}<span><svg width="14" height="14"><path d="M7 1l6 6l-6 6l-6 -6Z" fill="none" stroke="var(--ink)" stroke-width="1.8"/></svg>miss</span><span><svg width="8" height="12"><path d="M4 1v10" stroke="var(--ink)" stroke-width="2.2"/></svg>pushed out</span>`;

// What the timeline says when it is focused.
export function timelineLabel(view) {
  const { token, expert, layer } = view;
  return `Cache of layer ${layer}, token by token. Selected: token ${token ?? "none"}, expert ${expert ?? "none"}. Arrows move, M goes to the next miss.`;
}
