// Where everything in the maps card stands: load map | token map | load bars, on one shared expert axis or below each other. Pure numbers, no drawing.

const LEFT = 34; // expert labels
const GAP = 34;
const CUT = 14; // room for the jagged edge of a cut token map
const HEAD = { plain: 26, cut: 42 };
const NOTES = 160; // with the gap, room for the notes below the load map
const BARS = { few: 170, many: 140 };
const TALL = 400; // height the experts share
const ROW = { least: 1, most: 22 };
const CELL = { least: 3, most: 30 }; // width of a token column
const TITLE = 290; // room for the token map's title, however few the tokens

// Every n-th index that fits: steps of 1, 2, 5, 10 … or powers of two.
function tickStep(pixelsPerItem, room, twos) {
  for (let power = 1; ; power *= twos ? 2 : 10) for (const step of twos ? [power] : [power, 2 * power, 5 * power]) if (step * pixelsPerItem >= room) return step;
}

// Multiples of `step` from `start` on, of `size` in all.
const multiples = (start, size, step) => Array.from({ length: Math.max(0, Math.ceil((start + size) / step) - Math.ceil(start / step)) }, (_, i) => (Math.ceil(start / step) + i) * step);

// The same up to the last index, which always has a number: one that would touch it gives way.
const toTheLast = (size, step, room) => multiples(0, size, step).filter((i) => size - 1 - i >= room).concat(size - 1);

// Side by side, all parts share one top; where that leaves the token map less than its title needs, they stand one below the other.
export function layoutMaps(store, width, from) {
  const { L, T, E } = store;
  const row = Math.max(ROW.least, Math.min(ROW.most, Math.floor(TALL / E)));
  const height = E * row;
  const full = row >= 14 ? BARS.few : BARS.many;
  const fit = (room) => Math.max(2, Math.min(34, Math.floor(room / L)));
  const beside = fit(width * (L > 24 ? 0.24 : 0.2));
  const right = LEFT + Math.max(NOTES, L * beside) + GAP;
  const stacked = width - right - full - 24 < TITLE;
  const column = stacked ? fit(width - LEFT - 4) : beside;
  const room = Math.max(60, width - (stacked ? LEFT + 2 * CUT : right + full + 24));
  const cell = Math.max(CELL.least, Math.min(CELL.most, room / Math.max(1, T)));
  const shown = Math.min(T, Math.floor(room / cell));
  const start = Math.max(0, Math.min(T - shown, from));
  const cut = shown < T;
  const labels = cell >= 11;
  const head = cut ? HEAD.cut : HEAD.plain; // title, and the strip of all tokens
  const foot = labels ? 92 : 76; // axis and keys
  const next = (y, above) => y + above + height + foot + 8;
  const y = { load: 0, tokens: stacked ? next(0, HEAD.plain) : 0 };
  y.bars = stacked ? next(y.tokens, head) : 0;
  const top = (part) => y[part] + (stacked && part !== "tokens" ? HEAD.plain : head);
  const x = stacked ? LEFT + (cut ? CUT : 0) : right;
  const size = stacked ? Math.min(300, width - LEFT) : full;
  return {
    width, row, height, stacked,
    load: { x: LEFT, y: y.load, top: top("load"), width: L * column, column, room: (stacked ? width : right) - LEFT },
    tokens: { x, y: y.tokens, top: top("tokens"), cell, shown, start, cut, labels, width: shown * cell },
    bars: { x: stacked ? LEFT : x + Math.max(shown * cell, Math.min(TITLE, room)) + 16, y: y.bars, top: top("bars"), width: size - 60, full: size },
    tops: [...new Set(["load", "tokens", "bars"].map(top))], // each has its own expert axis
    strip: { y: y.tokens + 18, height: 8 },
    layerTicks: toTheLast(L, tickStep(column, L > 12 ? 30 : 16, true), 20 / column),
    expertTicks: toTheLast(E, row >= 12 ? 1 : 2 ** Math.ceil(Math.log2(30 / row)), 12 / row),
    tokenTicks: labels ? [] : multiples(start, shown, tickStep(cell, 36, false)),
    total: top("bars") + height + foot,
    chips: row >= 16,
    numbers: row >= 14 && column >= 22,
    halves: row >= 8,
  };
}

// What lies under a point: {layer, expert}, {token, expert}, {strip: token} or null.
export function hitMaps(layout, store, px, py) {
  const { load, tokens, bars, strip, row, height, tops } = layout;
  if (tokens.cut && py >= strip.y - 6 && py <= strip.y + strip.height + 6 && px >= tokens.x - 4 && px <= tokens.x + tokens.width + 4)
    return { strip: Math.max(0, Math.min(store.T - 1, Math.floor(((px - tokens.x) / tokens.width) * store.T))) };
  const top = tops.find((y) => py >= y && py < y + height);
  if (top === undefined) return null;
  const expert = Math.floor((py - top) / row);
  if (top === load.top && px >= load.x && px < load.x + load.width) return { layer: Math.floor((px - load.x) / load.column), expert };
  if (top === tokens.top && px >= tokens.x && px < tokens.x + tokens.width) return { token: tokens.start + Math.floor((px - tokens.x) / tokens.cell), expert };
  if ((top === bars.top && px >= bars.x) || px < load.x) return { expert };
  return null;
}
