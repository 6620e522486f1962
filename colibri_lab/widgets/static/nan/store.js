// What Python sent: the map by place, the ways of origins, cells, cures.
import { SLOTS } from "../common/palette.js";
import { kindOf } from "../common/tap_map.js";

export const shared = (path) => path.replace(/(\.moe\.experts\.)\d+\./, "$1*."); // experts of a layer are one row of the map
// A number that came as a word because JSON knows no NaN.
export const number = (value) => (typeof value === "string" ? { nan: NaN, inf: Infinity, "-inf": -Infinity }[value] : value);
const STATES = ["finite", "near", "subnormal", "origin", "passed"];

export class Store {
  constructor(facts, table) {
    Object.assign(this, { facts, table, E: facts.experts, n: facts.tokens });
    this.kinds = [];
    this.layers = [];
    this.before = []; // taps before the layers, and behind them
    this.after = [];
    this.at = new Map(); // path → row of the map
    facts.paths.forEach((path, i) => {
      this.at.set(path, i);
      const layer = table.layer[i];
      if (layer < 0) return void (this.layers.length ? this.after : this.before).push(path);
      if (!this.layers.includes(layer)) this.layers.push(layer);
      if (!this.kinds.includes(kindOf(path))) this.kinds.push(kindOf(path));
    });
    this.layers.sort((a, b) => a - b);
    this.born = new Map(); // path of the map → number of its first origin
    facts.origins.forEach(({ at }, i) => !this.born.has(at) && this.born.set(at, i));
    this.ways = new Map();
    this.cells = new Map();
    this.cures = [];
    this.replayed = null; // largest magnitudes of the same run in float32, by row
  }

  path(kind, layer) {
    const path = `layers.${layer}.${kind}`;
    return this.at.has(path) ? path : null;
  }

  row(path) {
    const i = this.at.get(path);
    if (i === undefined) return null;
    const { table, facts } = this;
    const counts = Object.fromEntries(["n", "n_nan", "n_inf", "n_negative_inf", "n_subnormal", "absmax", "bits_left", "layer"].map((name) => [name, table[name][i]]));
    return { path, name: facts.names[i], state: STATES[table.state[i]], ...counts };
  }

  // The mark of a row's values that are no ordinary numbers: the kind that is most of them, at an origin that of its value.
  mark(row) {
    const origin = this.facts.origins[this.born.get(row.path)];
    if (origin?.mark && shared(origin.path) === row.path) return origin.mark;
    if (row.n_nan >= row.n_inf) return "nan";
    return row.n_negative_inf * 2 > row.n_inf ? "-inf" : "+inf";
  }

  // Bits left in a format: log2(largest ÷ absmax); NaN where no value is finite.
  bits(row, format) {
    const largest = this.facts.formats[format];
    return row && row.absmax > 0 ? Math.log2(largest / row.absmax) : NaN;
  }

  // The same for the run in float32, when there is one.
  replayedBits(row, format) {
    const absmax = this.replayed?.[this.at.get(row.path)];
    return absmax > 0 ? Math.log2(this.facts.formats[format] / absmax) : NaN;
  }

  cell(path, token, expert) {
    return this.cells.get(`${path} ${token} ${expert}`) ?? null;
  }

  addCell(cell) {
    this.cells.set(`${cell.path} ${cell.token} ${cell.expert}`, cell);
  }

  // The colour slot of an expert: its number up to eight experts; of more, those in which something was born.
  get slots() {
    if (this.E <= SLOTS) return { of: (expert) => expert };
    const named = [...new Set(this.facts.origins.map(({ expert }) => expert).filter((e) => e !== null))].slice(0, SLOTS);
    return { of: (expert) => named.indexOf(expert) };
  }
}
