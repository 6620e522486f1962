// One moment of the walk: the facts and arrays of a frame, asked by token and expert. See stepper_data.py for what each array is.
import { SLOTS } from "../common/palette.js";
import { unpack } from "../common/wire.js";

const UNKNOWN = 0xffffffff;

export class Moment {
  constructor(head, content, buffers) {
    Object.assign(this, { head, facts: content });
    this.arrays = unpack(content.arrays, buffers);
    this.shapes = Object.fromEntries(content.arrays.map(({ name, shape }) => [name, shape]));
    this.look = content.look;
  }

  get layer() {
    return this.look.layer;
  }

  get place() {
    return this.facts.place;
  }

  has(name) {
    return name in this.arrays;
  }

  // One row of an array over the window, or null.
  row(name, token) {
    const shape = this.shapes[name];
    const at = token - this.facts.window[0];
    if (!shape || at < 0 || at >= shape[0]) return null;
    const size = shape.slice(1).reduce((a, b) => a * b, 1);
    return this.arrays[name].subarray(at * size, (at + 1) * size);
  }

  // The experts of a token by slot, −1 for an empty one; null while the router has not run.
  ids(token) {
    const at = token - this.facts.rows[0];
    const k = this.shapes.ids?.[1];
    return k && at >= 0 && at < this.shapes.ids[0] ? Array.from(this.arrays.ids.subarray(at * k, (at + 1) * k)) : null;
  }

  gates(token) {
    const row = this.row("gates", token);
    return row ? Array.from(row) : null;
  }

  // What the expert in a slot gave back: its first values and the length of the whole; null when it is not there.
  output(token, slot) {
    if (!this.row("there", token)?.[slot]) return null;
    const width = this.shapes.outputs[2];
    return { values: this.row("outputs", token).subarray(slot * width, (slot + 1) * width), length: this.row("lengths", token)[slot] };
  }

  load(layer, expert) {
    const n = this.arrays.load[layer * this.shapes.load[1] + expert];
    return n === UNKNOWN ? null : n;
  }

  tokensOf(expert) {
    const [first] = this.facts.rows;
    const k = this.shapes.ids?.[1] ?? 1;
    const found = [];
    (this.arrays.ids ?? []).forEach((e, i) => {
      if (e === expert) found.push(first + Math.floor(i / k));
    });
    return found;
  }

  // Sorts places of a pass as they are run; the start is before all.
  rank(stage, layer, expert) {
    if (stage === null) return [-2, 0, 0];
    const depth = stage === "embed" ? -1 : stage === "norm" || stage === "logits" ? Infinity : layer;
    return [depth, this.head.stages.indexOf(stage), expert ?? -1];
  }

  done(stage, layer, expert) {
    const { place } = this;
    return compare(this.rank(stage, layer, expert), this.rank(place.stage, place.layer, place.expert)) <= 0;
  }

  stagesOf(layer) {
    if (!this.head.moe.includes(layer)) return ["attention", "mlp", "residual"];
    return ["attention", "router", "dispatcher", "expert", ...(this.head.shared.includes(layer) ? ["shared"] : []), "aggregator", "residual"];
  }

  // [done, all] stages of the pass, the experts of a layer together as one.
  progress() {
    let [done, all] = [0, 0];
    const count = (stage, layer, expert) => {
      all++;
      if (this.done(stage, layer, expert)) done++;
    };
    count("embed");
    for (let l = 0; l < this.head.layers; l++) for (const stage of this.stagesOf(l)) count(stage, l, stage === "expert" ? this.lastExpert(l) : null);
    count("norm");
    count("logits");
    return [done, all];
  }

  // The last expert of a layer that gets rows; the last of all while that is not known.
  lastExpert(layer) {
    for (let e = this.head.experts - 1; e >= 0; e--) if (this.load(layer, e)) return e;
    return this.head.experts - 1;
  }

  // Colours: by number up to eight experts, else for the busiest of the layer that is looked at.
  get slots() {
    if (this.head.experts <= SLOTS) return { of: (e) => e };
    const load = Array.from({ length: this.head.experts }, (_, e) => this.load(this.layer, e) ?? 0);
    const busiest = Array.from(load.keys()).sort((a, b) => load[b] - load[a] || a - b).slice(0, SLOTS);
    return { of: (e) => busiest.indexOf(e) };
  }
}

export function compare(a, b) {
  for (let i = 0; i < a.length; i++) if (a[i] !== b[i]) return a[i] < b[i] ? -1 : 1;
  return 0;
}
