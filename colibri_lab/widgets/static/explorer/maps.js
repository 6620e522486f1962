// The maps card: three canvases (load cells, token cells, selection) over one layout, with mouse and hit test.
import { fitCanvas } from "./token_card.js";
import { hitMaps, layoutMaps } from "./map_layout.js";
import { drawLoad, drawTokens, text } from "./map_cells.js";
import { word } from "../common/format.js";

export class Maps {
  constructor(host, { onSelect, onHover, onWindow }) {
    this.host = host;
    [this.loadCanvas, this.tokenCanvas, this.top] = host.querySelectorAll("canvas");
    this.from = 0;
    const point = (event) => {
      const box = this.top.getBoundingClientRect();
      return this.layout ? hitMaps(this.layout, this.store, event.clientX - box.left, event.clientY - box.top) : null;
    };
    this.top.addEventListener("pointerdown", (event) => {
      const hit = point(event);
      if (!hit) return;
      if (hit.strip === undefined) return onSelect(hit);
      this.top.setPointerCapture(event.pointerId);
      const { start, shown } = this.layout.tokens;
      this.grip = hit.strip >= start && hit.strip < start + shown ? hit.strip - start : Math.floor(shown / 2);
      this.drag(hit.strip, onWindow);
    });
    this.top.addEventListener("pointermove", (event) => {
      if (this.grip === undefined) {
        const hit = point(event);
        this.top.style.cursor = hit ? (hit.strip === undefined ? "pointer" : "grab") : "default";
        return onHover(hit && hit.strip === undefined ? hit : null);
      }
      const box = this.top.getBoundingClientRect();
      const { x, width } = this.layout.tokens;
      this.drag(Math.floor(((event.clientX - box.left - x) / width) * this.store.T), onWindow);
    });
    const release = () => (this.grip = undefined);
    this.top.addEventListener("pointerup", release);
    this.top.addEventListener("pointercancel", release);
    this.top.addEventListener("pointerleave", () => onHover(null));
  }

  drag(token, onWindow) {
    const from = Math.max(0, Math.min(this.store.T - this.layout.tokens.shown, token - this.grip));
    if (from === this.layout.tokens.start) return;
    this.from = from;
    onWindow();
  }

  // Moves the window so that the token is inside it.
  follow(view) {
    const shown = this.layout?.tokens.shown ?? view.store.T;
    if (view.token < this.from || view.token >= this.from + shown) this.from = Math.max(0, view.token - Math.floor(shown / 2));
  }

  // Everything: data, size or theme changed.
  draw(view) {
    this.store = view.store;
    this.layout = layoutMaps(view.store, this.host.clientWidth, this.from);
    this.follow(view);
    this.layout = layoutMaps(view.store, this.host.clientWidth, this.from);
    this.host.style.height = `${this.layout.total}px`;
    this.contexts = [this.loadCanvas, this.tokenCanvas, this.top].map((canvas) => fitCanvas(canvas, this.layout.width, this.layout.total));
    drawLoad(this.contexts[0], view, this.layout);
    drawTokens(this.contexts[1], view, this.layout);
    this.select(view);
  }

  // Another layer or another window: the load cells stay.
  drawLayer(view) {
    this.layout = layoutMaps(view.store, this.layout.width, this.from);
    this.contexts[1].clearRect(0, 0, this.layout.width, this.layout.total);
    drawTokens(this.contexts[1], view, this.layout);
    this.select(view);
  }

  // Another token or expert: only the selection moves.
  select(view) {
    const ctx = this.contexts[2];
    const { store, palette, layer, token, expert } = view;
    const { load, tokens, row, height, tops } = this.layout;
    ctx.clearRect(0, 0, this.layout.width, this.layout.total);
    const thin = ({ x, width, top }) => {
      ctx.strokeStyle = palette.sel;
      ctx.lineWidth = 1.2;
      ctx.strokeRect(x - 2, top + expert * row - 0.5, width + 4, row);
    };
    thin(load);
    if (tokens.shown) thin(tokens);
    ring(ctx, palette, load.x + layer * load.column, load.top - 2, load.column - 1, height + 3);
    const layers = this.layout.layerTicks.map((l) => [store.facts.layers[l], load.x + (l + 0.5) * load.column]);
    label(ctx, view, store.facts.layers[layer], load.x + (layer + 0.5) * load.column, load.top + height + 13, palette.ink, layers);
    const i = token - tokens.start;
    if (i >= 0 && i < tokens.shown) {
      const x = tokens.x + i * tokens.cell;
      ring(ctx, palette, x, tokens.top - 2, tokens.cell, height + 3);
      const name = word(store.facts.texts[token], store.kind[token], 10);
      if (tokens.labels) {
        ctx.save();
        ctx.translate(x + tokens.cell / 2 - 3, tokens.top + height + 7);
        ctx.rotate(Math.PI / 2);
        ctx.fillStyle = palette.card;
        ctx.fillRect(-2, -10, 80, 13);
        text(ctx, name, 0, 0, `bold 11px ${palette.mono}`, palette.sel);
        ctx.restore();
      } else {
        const inside = (half) => Math.max(tokens.x + half, Math.min(tokens.x + Math.max(tokens.width, 2 * half) - half, x + tokens.cell / 2));
        const others = this.layout.tokenTicks.map((t) => [t, tokens.x + (t - tokens.start + 0.5) * tokens.cell]);
        label(ctx, view, token, inside(14), tokens.top + height + 13, palette.sel, others);
        text(ctx, name, inside(34), tokens.top + height + 29, `bold 11px ${palette.mono}`, palette.sel, "center");
      }
    }
    if (!this.layout.chips) for (const top of tops) this.expertLabel(ctx, view, top);
    if (tokens.cut) this.frame(ctx, view);
  }

  // In the place of the numbers that it would touch.
  expertLabel(ctx, { palette, expert }, top) {
    const { load, row, expertTicks } = this.layout;
    const y = top + (expert + 0.5) * row;
    ctx.fillStyle = palette.card;
    for (const e of [expert, ...expertTicks]) {
      const middle = top + (e + 0.5) * row;
      if (Math.abs(middle - y) < 12) ctx.fillRect(0, middle - 6, load.x - 5, 12);
    }
    text(ctx, String(expert), load.x - 6, y + 4, `bold 11px ${palette.ui}`, palette.sel, "right");
  }

  frame(ctx, view) {
    const { tokens, strip } = this.layout;
    const scale = tokens.width / view.store.T;
    ctx.strokeStyle = view.palette.ink;
    ctx.lineWidth = 1.5;
    ctx.beginPath();
    ctx.roundRect(tokens.x + tokens.start * scale, strip.y - 2.5, Math.max(8, tokens.shown * scale), strip.height + 5, 2);
    ctx.stroke();
    ctx.fillStyle = view.palette.sel;
    ctx.fillRect(tokens.x + view.token * scale - 1, strip.y - 2, 2, strip.height + 4);
  }
}

function ring(ctx, palette, x, y, w, h) {
  for (const [colour, width] of [[palette.halo, 4], [palette.sel, 2]]) {
    ctx.strokeStyle = colour;
    ctx.lineWidth = width;
    ctx.beginPath();
    ctx.roundRect(x - 1, y - 1, w + 2, h + 2, 2);
    ctx.stroke();
  }
}

// A bold number of an axis in the place of the plain ones, [number, x], that it would touch.
function label(ctx, { palette }, number, x, y, colour, others) {
  const half = (words, weight) => {
    ctx.font = `${weight}11px ${palette.ui}`;
    return ctx.measureText(words).width / 2 + 2;
  };
  const own = half(number, "bold ");
  ctx.fillStyle = palette.card;
  for (const [other, at] of [[number, x], ...others]) {
    const reach = half(other, "");
    if (Math.abs(at - x) < reach + own) ctx.fillRect(at - reach, y - 9, 2 * reach, 12);
  }
  text(ctx, String(number), x, y, `bold 11px ${palette.ui}`, colour, "center");
}
