// What Python sent: the comparison's table by place, flips, prediction, and the figures of taps as they arrive.
import { SLOTS } from "../common/palette.js";
import { kindOf } from "../common/tap_map.js";
import { unpack } from "../common/wire.js";

export const isIds = (path) => path.endsWith(".moe.expert_ids");
const number = (value) => (typeof value === "string" ? { nan: NaN, inf: Infinity, "-inf": -Infinity }[value] : value);

export class Store {
  constructor(facts, arrays) {
    this.facts = facts;
    Object.assign(this, { table: arrays, E: facts.experts, n: facts.tokens });
    this.kinds = [];
    this.layers = [];
    this.before = []; // taps before the layers, and behind them
    this.after = [];
    this.at = new Map(); // path → row of the table
    facts.paths.forEach((path, i) => {
      this.at.set(path, i);
      const layer = arrays.layer[i];
      if (layer < 0) return void (this.layers.length ? this.after : this.before).push(path);
      if (!this.layers.includes(layer)) this.layers.push(layer);
      if (!this.kinds.includes(kindOf(path))) this.kinds.push(kindOf(path));
    });
    this.layers.sort((a, b) => a - b);
    this.flipsOf = new Map(facts.flips.layers);
    this.positionOf = new Map(Array.from(arrays.positions ?? [], (t, i) => [t, i]));
    this.seen = new Map(); // values by tap and expert
    this.next = new Map(); // next tokens by position
    if (facts.first) facts.first.error = number(facts.first.error);
    for (const attempt of facts.diagnosis?.attempts ?? []) attempt.left = number(attempt.left);
  }

  path(kind, layer) {
    const path = `layers.${layer}.${kind}`;
    return this.at.has(path) ? path : null;
  }

  row(path) {
    const i = this.at.get(path);
    const { table, facts } = this;
    if (i === undefined) return null;
    return { path, state: facts.states[i], rel: table.max_rel[i], abs: table.max_abs[i], cosine: table.cosine[i], ulp: table.ulp[i], tolerance: table.tolerance[i], layer: table.layer[i], token: table.token[i], moved: table.moved[i] };
  }

  flip(i) {
    const { table, facts } = this;
    const k = facts.flips.verdicts.length ? table.flip_a.length / facts.flips.verdicts.length : 0;
    const ids = (name) => Array.from(table[name].subarray(i * k, i * k + k)).filter((e) => e >= 0);
    const [margin, moved, consequence] = table.flip_numbers.subarray(3 * i, 3 * i + 3);
    return { layer: table.flip_layer[i], token: table.flip_token[i], a: ids("flip_a"), b: ids("flip_b"), margin, moved, consequence, verdict: facts.flips.verdicts[i], cause: facts.flips.causes[i] };
  }

  get flips() {
    return this.facts.flips.verdicts.length;
  }

  addValues(facts, buffers, specs) {
    this.seen.set(key(facts.path, facts.expert), { ...facts, ...unpack(specs, buffers) });
  }

  addNext(facts, buffers, specs) {
    this.next.set(facts.token, { ...facts, ...unpack(specs, buffers) });
  }

  // The figures of a tap: of the chosen expert, else of all experts, which a saved page has of every tap.
  values(path, expert) {
    return this.seen.get(key(path, expert)) ?? this.seen.get(key(path, null)) ?? null;
  }

  // The colour slot of an expert of one layer: its number up to eight experts, else for the busiest eight; −1 without one.
  slots(layer) {
    if (this.E <= SLOTS) return { of: (expert) => expert };
    const load = this.table.load.subarray(Math.max(0, layer) * this.E, (Math.max(0, layer) + 1) * this.E);
    const busiest = Array.from(load.keys()).sort((a, b) => load[b] - load[a] || a - b).slice(0, SLOTS);
    return { of: (expert) => busiest.indexOf(expert) };
  }
}

const key = (path, expert) => `${path} ${expert ?? ""}`;
