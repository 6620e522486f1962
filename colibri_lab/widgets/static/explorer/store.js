// The trace as the browser holds it: one head, blocks (a layer), columns (a token). See explorer_data.py for what each array is.
// Layers are indices 0 … L−1 into `facts.layers`, the model's own numbers.
import { SLOTS } from "../common/palette.js";

export const FLAG = { nan: 1, plusInf: 2, minusInf: 4, unranked: 8, unrecorded: 16, tie: 32 };

const KEPT_COLUMNS = 64;

export class Store {
  constructor(facts, arrays, version) {
    Object.assign(this, arrays, { facts, version });
    this.L = facts.layers.length;
    this.T = facts.tokens;
    this.E = facts.experts;
    this.K = facts.top_k;
    this.many = this.E > SLOTS;
    this.noId = this.E < 255 ? 255 : 65535;
    this.blocks = Array(this.L).fill(null);
    this.columns = new Map();
    this.pins = new Map(); // layer -> pinned experts
    this.occurrences = new Map();
    for (const kind of this.kind || []) this.occurrences.set(kind, (this.occurrences.get(kind) || 0) + 1);
    this.scaleTop = this.loadTop();
  }

  addBlock(layer, arrays) {
    this.blocks[layer] = arrays;
  }

  addColumn(token, arrays) {
    this.columns.delete(token);
    this.columns.set(token, arrays);
    if (this.columns.size > KEPT_COLUMNS) this.columns.delete(this.columns.keys().next().value);
  }

  missingLayers() {
    return this.blocks.flatMap((block, layer) => (block ? [] : [layer]));
  }

  // One token in one layer, from whichever part is here; null when neither is. A slot without an expert is left out of ids and gates.
  at(layer, token) {
    const block = this.blocks[layer];
    const part = block || this.columns.get(token);
    if (!part || token < 0 || token >= this.T) return null;
    const row = block ? token : layer;
    const K = this.K;
    const flags = part.flags[row];
    const ids = part.ids.subarray(row * K, row * K + K);
    const gates = part.gates.subarray(row * K, row * K + K);
    const whole = !ids.includes(this.noId);
    return {
      ids: whole ? ids : ids.filter((e) => e !== this.noId),
      gates: whole ? gates : gates.filter((_, slot) => ids[slot] !== this.noId),
      margin: part.margin[row],
      entropy: part.entropy[row],
      flags,
      ranked: !(flags & (FLAG.unranked | FLAG.unrecorded)),
    };
  }

  // All E values of one token in one layer, or null when they are not here.
  values(layer, token) {
    const inBlock = this.blocks[layer]?.values;
    if (inBlock) return inBlock.subarray(token * this.E, (token + 1) * this.E);
    const inColumn = this.columns.get(token)?.values;
    return inColumn ? inColumn.subarray(layer * this.E, (layer + 1) * this.E) : null;
  }

  hasColumn(token) {
    return this.columns.has(token) || (this.facts.every_value && this.missingLayers().length === 0);
  }

  share(layer, expert) {
    return this.counted[layer] ? this.load[layer * this.E + expert] / this.counted[layer] : 0;
  }

  get chance() {
    return this.K / this.E;
  }

  // The share at the strong end of the load scale: the largest there is, but at most four times chance.
  loadTop() {
    let top = 0;
    for (let l = 0; l < this.L; l++) for (let e = 0; e < this.E; e++) top = Math.max(top, this.share(l, e));
    return Math.min(top || 1, 4 * this.chance);
  }

  // Colour slots of a layer: expert number up to 8 experts; else the busiest, where a pinned one takes the place of the least busy.
  slots(layer) {
    if (!this.many) return { of: (e) => e, shown: Array.from({ length: this.E }, (_, e) => e) };
    const row = this.load.subarray(layer * this.E, (layer + 1) * this.E);
    const shown = Array.from(row.keys()).sort((a, b) => row[b] - row[a] || a - b).slice(0, SLOTS);
    const pinned = this.pins.get(layer) || [];
    for (const e of pinned) {
      if (shown.includes(e)) continue;
      for (let i = SLOTS - 1; i >= 0; i--)
        if (!pinned.includes(shown[i])) {
          shown[i] = e;
          break;
        }
    }
    const slot = new Int8Array(this.E).fill(-1);
    shown.forEach((e, i) => (slot[e] = i));
    return { of: (e) => slot[e], shown };
  }

  pin(layer, expert) {
    const pinned = (this.pins.get(layer) || []).filter((e) => e !== expert);
    const added = pinned.length === (this.pins.get(layer) || []).length;
    if (added) pinned.push(expert);
    this.pins.set(layer, pinned.slice(-SLOTS));
    return added;
  }

  // The next token, from (layer, token) on in reading order and around the end, whose margin is under one bfloat16 step.
  nextTie(layer, token) {
    for (let step = 1; step <= this.L * this.T; step++) {
      const place = (layer * this.T + token + step) % (this.L * this.T);
      const l = Math.floor(place / this.T);
      const block = this.blocks[l];
      if (block && block.flags[place % this.T] & FLAG.tie) return { layer: l, token: place % this.T };
    }
    return null;
  }
}
