// The cells of the maps, painted once per layer, window and theme; the selection lies above them on its own canvas.
import { FLAG } from "./store.js";
import { chanceText, count, expertColour, fixed, percent, word } from "../common/format.js";
import { inkOn } from "../common/palette.js";
import { drawMark } from "../common/marks.js";
import { beyond, strangeMark } from "./sentence.js";

const bold = (view) => `bold 11px ${view.palette.ui}`;
const plain = (view) => `11px ${view.palette.ui}`;
const mono = (view) => `11px ${view.palette.mono}`;

export function text(ctx, words, x, y, font, colour, align = "left") {
  ctx.font = font;
  ctx.fillStyle = colour;
  ctx.textAlign = align;
  ctx.fillText(words, x, y);
}

export function drawLoad(ctx, view, layout) {
  const { store, palette } = view;
  const { load, row, height, numbers } = layout;
  const { top } = load;
  const top1 = store.scaleTop;
  text(ctx, "Load: layer × expert", 0, load.y + 10, bold(view), palette.ink);
  let clipped = 0;
  let empty = 0;
  const line = load.column >= 8 && row >= 8 ? 1 : 0;
  for (let l = 0; l < store.L; l++) {
    for (let e = 0; e < store.E; e++) {
      const x = load.x + l * load.column;
      const y = top + e * row;
      const n = store.load[l * store.E + e];
      const share = store.share(l, e);
      if (!n) {
        empty++;
        emptyCell(ctx, palette, x, y, load.column - line, row - line);
      } else {
        ctx.fillStyle = palette.of(share / top1);
        ctx.fillRect(x, y, load.column - line, row - line);
      }
      if (numbers) {
        const side = beyond(store, l, e);
        text(ctx, n + (side > 0 ? "▴" : side < 0 ? "▾" : ""), x + load.column / 2, y + row / 2 + 4, plain(view), n ? palette.inkOf(share / top1) : palette.ink, "center");
      }
      if (share > top1 * (1 + 1e-9)) {
        clipped++;
        drawMark(ctx, clipInk(palette), "clip", x, y, load.column - line, row - line);
      }
    }
  }
  expertAxis(ctx, view, layout);
  for (const l of layout.layerTicks) text(ctx, String(store.facts.layers[l]), load.x + (l + 0.5) * load.column, top + height + 13, plain(view), palette.ink2, "center");
  loadKey(ctx, view, layout, clipped, empty);
}

// A clipped cell stands at the strong end, so its mark is drawn in the ink that shows there.
const clipInk = (palette) => ({ ...palette, markp: palette.inkOf(1), mark: palette.inkOf(1) });

function emptyCell(ctx, palette, x, y, w, h) {
  if (w < 6 || h < 6) {
    ctx.fillStyle = palette.card; // too small for a dotted box: left open, and counted in the key
    ctx.fillRect(x, y, w, h);
    return;
  }
  ctx.strokeStyle = palette.line2;
  ctx.lineWidth = 1;
  ctx.setLineDash([2, 2]);
  ctx.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
  ctx.setLineDash([]);
}

function expertAxis(ctx, view, layout) {
  const { palette } = view;
  const { row, tops, load, tokens, chips, expertTicks, stacked } = layout;
  if (chips) return; // coloured by layer: drawn with the tokens
  for (const [e, y] of tops.flatMap((top) => expertTicks.map((e) => [e, top + e * row]))) {
    text(ctx, String(e), load.x - 6, y + row / 2 + 4, plain(view), palette.ink2, "right");
    ctx.fillStyle = palette.line2;
    ctx.fillRect(load.x - 4, y + row / 2, 3, 1);
    if (!stacked) ctx.fillRect(tokens.x - (tokens.cut ? 16 : 4), y + row / 2, 3, 1);
  }
}

function rampBar(ctx, x, y, width, colour) {
  for (let i = 0; i < 16; i++) {
    ctx.fillStyle = colour(i / 15);
    ctx.fillRect(x + (i * width) / 16, y, width / 16 + 0.5, 8);
  }
}

function loadKey(ctx, view, layout, clipped, empty) {
  const { store, palette } = view;
  const x = layout.load.x;
  const y = layout.load.top + layout.height + 20;
  const { row } = layout;
  const width = Math.max(80, Math.min(140, layout.load.width - 90));
  const room = layout.load.room - width - 16;
  const label = percent(store.scaleTop) + (room > 88 ? " of tokens" : "");
  rampBar(ctx, x, y, width, palette.of);
  const at = x + (width * store.chance) / store.scaleTop;
  ctx.fillStyle = palette.ink;
  ctx.fillRect(at - 1, y - 2, 2, 13);
  text(ctx, "0", x, y + 20, plain(view), palette.ink2);
  text(ctx, chanceText(store.chance), Math.max(at, x + 30), y + 20, plain(view), palette.ink, "center");
  text(ctx, label, x + width + 6, y + 8, plain(view), palette.ink2);
  const lines = layout.numbers ? ["▴ ▾ beyond chance (95 %)", "numbers: tokens that came"] : [];
  if (clipped) lines.push(`${row < 8 ? "dot" : "corner"} in a cell: above the scale (${count(clipped)})`);
  if (empty && !layout.numbers) lines.push(`left open: nobody came (${count(empty)})`);
  lines.forEach((words, i) => text(ctx, words, x, y + 37 + 15 * i, plain(view), palette.ink2));
}

export function drawTokens(ctx, view, layout) {
  const { store, palette, layer } = view;
  const { tokens, row, height } = layout;
  const { top } = tokens;
  const name = store.facts.layers[layer];
  text(ctx, `Layer ${name}: token × expert, gate strength`, tokens.x, tokens.y + 10, bold(view), palette.ink);
  ctx.fillStyle = palette.sunk;
  ctx.fillRect(tokens.x, top, tokens.width, height);
  if (layout.chips) chipAxis(ctx, view, layout);
  let clipped = 0;
  if (!store.blocks[layer]) text(ctx, "waiting for this layer …", tokens.x + 8, top + 16, plain(view), palette.ink2);
  else clipped = tokens.cell >= 8 && row >= 8 ? drawLargeCells(ctx, view, layout) : drawSmallCells(ctx, view, layout);
  if (tokens.cut) drawOverviewStrip(ctx, view, layout);
  tokenAxis(ctx, view, layout);
  drawBars(ctx, view, layout, clipped);
}

const isStrange = (flags) => flags & (FLAG.unranked | FLAG.unrecorded);

// Cells with room for a hairline; the first choice fills its cell, the others half of theirs. Returns how many exceed the scale.
function drawLargeCells(ctx, view, layout) {
  const { store, palette, layer } = view;
  const { tokens, row, halves } = layout;
  const { top } = tokens;
  const block = store.blocks[layer];
  const K = store.K;
  let clipped = 0;
  for (let i = 0; i < tokens.shown; i++) {
    const t = tokens.start + i;
    const x = tokens.x + i * tokens.cell;
    if (isStrange(block.flags[t])) {
      strangeColumn(ctx, view, layout, x, block.flags[t], block.ids.subarray(t * K, t * K + K));
      continue;
    }
    for (let slot = 0; slot < K; slot++) {
      if (block.ids[t * K + slot] === store.noId) continue;
      const value = Math.abs(block.gates[t * K + slot]) / store.facts.gate_top;
      const half = halves && slot > 0;
      const y = top + block.ids[t * K + slot] * row + (half ? row * 0.27 : 0);
      const h = half ? row * 0.5 : row;
      ctx.fillStyle = value >= 0 ? palette.sparse(value) : palette.line2;
      ctx.fillRect(x + 0.5, y + 0.5, tokens.cell - 1, h - 1);
      ctx.strokeStyle = palette.edge;
      ctx.lineWidth = 1;
      ctx.strokeRect(x + 1, y + 1, tokens.cell - 2, h - 2);
      if (value > 1 + 1e-6) {
        clipped++;
        drawMark(ctx, clipInk(palette), "clip", x, y, tokens.cell, h);
      }
    }
  }
  return clipped;
}

// Many small cells: one pixel each in an image that is scaled up. A cell above the scale keeps the strongest colour and is counted.
function drawSmallCells(ctx, view, layout) {
  const { store, palette, layer } = view;
  const { tokens, row, halves } = layout;
  const { top } = tokens;
  const block = store.blocks[layer];
  const { K, E } = store;
  const parts = halves && K > 1 ? 4 : 1; // pixels per cell: a half cell is the middle two of four
  const image = new Uint32Array(tokens.shown * E * parts);
  const unknown = 0xff9a8f8a; // the strong line of both themes, for gates that were not recorded
  let clipped = 0;
  for (let i = 0; i < tokens.shown; i++) {
    const t = tokens.start + i;
    if (isStrange(block.flags[t])) continue;
    for (let slot = 0; slot < K; slot++) {
      if (block.ids[t * K + slot] === store.noId) continue;
      const value = Math.abs(block.gates[t * K + slot]) / store.facts.gate_top;
      if (value > 1 + 1e-6) clipped++;
      const pixel = value >= 0 ? palette.pixelSparse(value) : unknown;
      const half = parts > 1 && slot > 0 ? 1 : 0;
      const first = block.ids[t * K + slot] * parts;
      for (let part = half; part < parts - half; part++) image[(first + part) * tokens.shown + i] = pixel;
    }
  }
  drawImage(ctx, image, tokens.shown, E * parts, tokens.x, top, tokens.width, E * row);
  for (let i = 0; i < tokens.shown; i++) {
    const t = tokens.start + i;
    if (isStrange(block.flags[t])) strangeColumn(ctx, view, layout, tokens.x + i * tokens.cell, block.flags[t], block.ids.subarray(t * K, t * K + K));
  }
  return clipped;
}

// A canvas off the screen for each size in use, kept, because making one costs more than filling it.
const scratches = new Map();
function scratch(columns, rows) {
  const size = `${columns}×${rows}`;
  if (!scratches.has(size)) {
    if (scratches.size >= 4) scratches.delete(scratches.keys().next().value);
    const canvas = new OffscreenCanvas(columns, rows);
    scratches.set(size, { canvas, context: canvas.getContext("2d", { willReadFrequently: true }) }); // kept in memory, not on a GPU
  }
  return scratches.get(size);
}

// `pixels` (columns × rows, row by row) stretched over a rectangle without smoothing.
function drawImage(ctx, pixels, columns, rows, x, y, width, height) {
  const { canvas, context } = scratch(columns, rows);
  context.putImageData(new ImageData(new Uint8ClampedArray(pixels.buffer), columns, rows), 0, 0);
  ctx.save();
  ctx.imageSmoothingEnabled = false;
  ctx.drawImage(canvas, x, y, width, height);
  ctx.restore();
}

// A token without a ranking: its whole column is hatched, with one mark where the meaningless ids stand if there is room.
function strangeColumn(ctx, view, layout, x, flags, ids) {
  const { palette } = view;
  const { tokens, row, height } = layout;
  const { top } = tokens;
  const kind = flags & FLAG.unrecorded ? "unknown" : strangeMark(flags);
  ctx.save();
  ctx.beginPath();
  ctx.rect(x, top, tokens.cell, height);
  ctx.clip();
  ctx.strokeStyle = palette.line2;
  ctx.lineWidth = 1;
  ctx.beginPath();
  for (let y = top - tokens.cell; y < top + height; y += 6) {
    ctx.moveTo(x, y + tokens.cell);
    ctx.lineTo(x + tokens.cell, y);
  }
  ctx.stroke();
  ctx.restore();
  const w = Math.max(3, tokens.cell - 1);
  const h = Math.max(6, Math.min(16, row - 2));
  const rows = row >= 8 && kind !== "unknown" ? Array.from(ids) : [Math.floor(view.store.E / 2)];
  for (const e of rows) drawMark(ctx, palette, kind, x + (tokens.cell - w) / 2, top + e * row + (row - h) / 2, w, h);
}

function chipAxis(ctx, view, layout) {
  const { store, palette } = view;
  const rows = layout.tops.flatMap((top) => Array.from({ length: store.E }, (_, e) => [e, top + e * layout.row]));
  for (const [e, y] of rows) {
    const colour = expertColour(view, e);
    ctx.fillStyle = colour;
    ctx.beginPath();
    ctx.roundRect(8, y + layout.row / 2 - 8, 18, 16, 3);
    ctx.fill();
    text(ctx, String(e), 17, y + layout.row / 2 + 4, bold(view), inkOn(colour), "center");
  }
}

function tokenAxis(ctx, view, layout) {
  const { store, palette } = view;
  const { tokens, height } = layout;
  const { top } = tokens;
  if (tokens.labels) {
    for (let i = 0; i < tokens.shown; i++) {
      const t = tokens.start + i;
      ctx.save();
      ctx.translate(tokens.x + (i + 0.5) * tokens.cell - 3, top + height + 7);
      ctx.rotate(Math.PI / 2);
      text(ctx, word(store.facts.texts[t], store.kind[t], 10), 0, 0, mono(view), palette.ink2);
      ctx.restore();
    }
  } else {
    for (const t of layout.tokenTicks)
      text(ctx, String(t), tokens.x + (t - tokens.start + 0.5) * tokens.cell, top + height + 13, plain(view), palette.ink2, "center");
  }
  if (tokens.cut) {
    const after = store.T - tokens.start - tokens.shown;
    if (tokens.start > 0) drawMark(ctx, palette, "cut", tokens.x - 9, top, 5, height);
    if (after > 0) drawMark(ctx, palette, "cut", tokens.x + tokens.width + 4, top, 5, height);
    const words = [`↤ ${count(tokens.start)} tokens before, ${count(after)} after ↦`, `strip above: all ${count(store.T)} by entropy; frame: shown here`];
    (tokens.width < 480 ? words : [words.join(" · ")]).forEach((line, i) => text(ctx, line, tokens.x, top + height + 50 + 15 * i, plain(view), palette.ink2));
  }
}

// All tokens by entropy, one thin line each (the largest entropy where several share a pixel).
function drawOverviewStrip(ctx, view, layout) {
  const { store, palette, layer } = view;
  const { tokens, strip } = layout;
  const entropy = store.blocks[layer]?.entropy;
  ctx.fillStyle = palette.sunk;
  ctx.fillRect(tokens.x, strip.y, tokens.width, strip.height);
  if (!entropy) return;
  const pixels = Math.floor(tokens.width);
  const image = new Uint32Array(pixels);
  for (let p = 0; p < pixels; p++) {
    const first = Math.floor((p * store.T) / pixels);
    const last = Math.max(first + 1, Math.floor(((p + 1) * store.T) / pixels));
    let most = -1;
    for (let t = first; t < last; t++) if (entropy[t] > most) most = entropy[t];
    if (most >= 0) image[p] = palette.pixelOf(most);
  }
  drawImage(ctx, image, pixels, 1, tokens.x, strip.y, tokens.width, strip.height);
}

function drawBars(ctx, view, layout, clipped) {
  const { store, palette, layer } = view;
  const { bars, row, height } = layout;
  const { top } = bars;
  const wide = row >= 14;
  text(ctx, wide ? `Load, layer ${store.facts.layers[layer]}` : "Load", bars.x, bars.y + 10, bold(view), palette.ink);
  for (let e = 0; e < store.E; e++) {
    const share = store.share(layer, e);
    const y = top + e * row;
    const thick = wide ? 12 : Math.max(1, row * 0.8);
    ctx.fillStyle = expertColour(view, e);
    ctx.fillRect(bars.x, y + (row - thick) / 2, Math.max(share ? 0.5 : 0, bars.width * Math.min(1, share / store.scaleTop)), thick);
    if (wide) text(ctx, percent(share) + (share > store.scaleTop * (1 + 1e-9) ? "›" : ""), bars.x + bars.full - 6, y + row / 2 + 4, plain(view), palette.ink, "right");
  }
  const x = bars.x + (bars.width * store.chance) / store.scaleTop;
  ctx.strokeStyle = palette.ink;
  ctx.lineWidth = 1.5;
  ctx.setLineDash([3, 2]);
  ctx.beginPath();
  ctx.moveTo(x, top - 3);
  ctx.lineTo(x, top + height + 3);
  ctx.stroke();
  ctx.setLineDash([]);
  text(ctx, `chance ${chanceText(store.chance)}`, bars.x, top + height + 14, plain(view), palette.ink);
  const y = top + height + 24;
  if (!store.facts.gates) return text(ctx, "gates: not recorded", bars.x, y + 8, plain(view), palette.ink2);
  const width = Math.min(110, bars.full - 60);
  rampBar(ctx, bars.x, y, width, palette.sparse);
  text(ctx, "0", bars.x, y + 19, plain(view), palette.ink2);
  text(ctx, `${fixedGate(store.facts.gate_top)}${clipped ? "+" : ""} gate`, bars.x + width + 4, y + 8, plain(view), palette.ink2);
  const lines = layout.halves && store.K > 1 ? ["full cell: 1st choice", `half cell: ${store.K > 2 ? "the others" : "2nd"}`] : [];
  if (clipped) lines.unshift(`above the scale (${count(clipped)})`);
  lines.slice(0, 3).forEach((words, i) => text(ctx, words, bars.x, y + 34 + 14 * i, plain(view), palette.ink2));
}

const fixedGate = (v) => (Number.isInteger(v) ? String(v) : fixed(v, v < 0.1 ? 2 : 1));
