// Where everything in the maps card stands: load map | token map | load bars, on one shared expert axis. Pure numbers, no drawing.

const LEFT = 34; // expert labels
const GAP = 34;
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

export function layoutMaps(store, width, from) {
  const { L, T, E } = store;
  const row = Math.max(ROW.least, Math.min(ROW.most, Math.floor(TALL / E)));
  const bars = row >= 14 ? BARS.few : BARS.many;
  const share = L > 24 ? 0.24 : 0.2;
  const column = Math.max(2, Math.min(34, Math.floor((width * share) / L)));
  const load = { x: LEFT, width: L * column, column };
  const x = LEFT + load.width + GAP;
  const room = Math.max(60, width - x - bars - 24);
  const cell = Math.max(CELL.least, Math.min(CELL.most, room / Math.max(1, T)));
  const shown = Math.min(T, Math.floor(room / cell));
  const start = Math.max(0, Math.min(T - shown, from));
  const cut = shown < T;
  const top = cut ? 42 : 26;
  const height = E * row;
  const labels = cell >= 11;
  return {
    width, row, top, height, load,
    layerTicks: toTheLast(L, tickStep(column, L > 12 ? 30 : 16, true), 20 / column),
    expertTicks: toTheLast(E, row >= 12 ? 1 : 2 ** Math.ceil(Math.log2(30 / row)), 12 / row),
    tokenTicks: labels ? [] : multiples(start, shown, tickStep(cell, 36, false)),
    total: top + height + (labels ? 92 : 76),
    tokens: { x, cell, shown, start, cut, labels, width: shown * cell },
    bars: { x: x + Math.max(shown * cell, Math.min(TITLE, room)) + 16, width: bars - 60, full: bars },
    strip: { y: 18, height: 8 },
    chips: row >= 16,
    numbers: row >= 14 && column >= 22,
    halves: row >= 8,
  };
}

// What lies under a point: {layer, expert}, {token, expert}, {strip: token} or null.
export function hitMaps(layout, store, px, py) {
  const { load, tokens, strip, top, row, height } = layout;
  if (tokens.cut && py >= strip.y - 6 && py <= strip.y + strip.height + 6 && px >= tokens.x - 4 && px <= tokens.x + tokens.width + 4)
    return { strip: Math.max(0, Math.min(store.T - 1, Math.floor(((px - tokens.x) / tokens.width) * store.T))) };
  if (py < top || py >= top + height) return null;
  const expert = Math.floor((py - top) / row);
  if (px >= load.x && px < load.x + load.width) return { layer: Math.floor((px - load.x) / load.column), expert };
  if (px >= tokens.x && px < tokens.x + tokens.width) return { token: tokens.start + Math.floor((px - tokens.x) / tokens.cell), expert };
  if (px >= layout.bars.x || px < load.x) return { expert };
  return null;
}
