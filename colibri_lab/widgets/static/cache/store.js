// What Python sent: facts, curves by policy, windows of timelines, panels.
import { SLOTS } from "../common/palette.js";
import { unpack } from "../common/wire.js";

export const OUTCOMES = ["pin", "hit", "prefetch", "late", "miss"];
// Policies that have a button and a curve; the others are in the menu.
export const SHOWN = ["lru", "lfu", "fifo", "arc", "static", "belady"];
const TITLES = { lru: "LRU", lfu: "LFU", fifo: "FIFO", clock: "CLOCK", slru: "SLRU", lfru: "LFRU", "lru-k": "LRU-k", arc: "ARC", static: "static pin", belady: "Belady" };
export const title = (policy) => TITLES[policy] ?? policy;

// A fixed set lets nobody in, so nothing can be fetched ahead for it.
export const fits = (policy, prefetch) => policy !== "static" || prefetch === "none";

const curveKey = ({ scope, passes, prefetch }, policy) => [policy, scope, passes, prefetch].join(" ");
const timeKey = (setting, layer) => [curveKey(setting, setting.policy), setting.capacity, layer].join(" ");

export class Store {
  constructor(facts) {
    Object.assign(this, { facts, E: facts.experts, n: facts.layers.length ? facts.tokens : 0, L: facts.layers.length });
    this.curves = new Map();
    this.blocks = new Map(); // the last window of each timeline
    this.panels = {};
    this.loads = new Map(); // requests of each expert, by layer: who gets a colour
  }

  // ---- curves ----

  addCurve(curve) {
    this.curves.set(curveKey(curve, curve.policy), curve);
  }

  curve(setting, policy = setting.policy) {
    return this.curves.get(curveKey(setting, policy)) ?? null;
  }

  // The curves that are drawn, the chosen policy first.
  drawn(setting) {
    return [setting.policy, ...SHOWN.filter((policy) => policy !== setting.policy)].map((policy) => this.curve(setting, policy)).filter(Boolean);
  }

  // A policy whose curve is still to be asked for; of a small trace all of them, for the comparison.
  wanting(setting) {
    return [setting.policy, "static", "belady", ...SHOWN, ...(this.facts.compares_all ? Object.keys(this.facts.policies) : [])].find((policy) => policy in this.facts.policies && fits(policy, setting.prefetch) && !this.stands(this.curve(setting, policy), setting)) ?? null;
  }

  // A curve that holds the capacity of the setting, which on a coarse grid is added to it.
  stands(curve, setting) {
    return curve !== null && curve.capacities.includes(setting.capacity);
  }

  // Counters of one policy at one capacity: of decode, of prefill, of both.
  counts(curve, capacity) {
    const i = curve?.capacities.indexOf(capacity) ?? -1;
    if (i < 0) return null;
    const of = (part) => Object.fromEntries(Object.entries(curve[part]).map(([name, values]) => [name, values[i]]));
    const [decode, prefill] = [of("decode"), of("prefill")];
    const all = Object.fromEntries(Object.keys(decode).map((name) => [name, decode[name] === null ? null : decode[name] + prefill[name]]));
    return { decode, prefill, all, speed: curve.speed[i], capacity, policy: curve.policy };
  }

  // Bytes that a cache of so many experts holds.
  bytes(setting, capacity = setting.capacity) {
    const { expert_bytes: one } = this.facts;
    return one === null ? null : one * capacity * (setting.scope === "layer" ? this.L : 1);
  }

  // ---- timelines ----

  addTimeline(facts, specs, buffers) {
    const block = { ...facts, ...unpack(specs, buffers) };
    block.requests = Array.from(block.token, (token, i) => ({ token, expert: block.expert[i], outcome: OUTCOMES[block.outcome[i]], kept: Boolean(block.kept[i]), evicted: block.evicted[i], of: block.evicted_layer[i] }));
    this.blocks.set(timeKey(facts.setting, facts.layer), block);
    const load = new Array(this.E).fill(0);
    for (const { expert } of block.requests) load[expert] += 1;
    this.loads.set(facts.layer, load);
    this.last = block;
  }

  timeline(setting, layer, token) {
    const block = this.blocks.get(timeKey(setting, layer));
    return block && (token === null || (token >= block.start && token < block.stop)) ? block : null;
  }

  // Whether an expert is in the cache after a token; with `token` one before the window, as it begins.
  inside(block, token, expert) {
    const bytes = block.before.length;
    const row = token - block.start;
    const byte = row < 0 ? block.before[expert >> 3] : block.inside[row * bytes + (expert >> 3)];
    return Boolean((byte >> (expert & 7)) & 1);
  }

  // The colour slot of an expert of a layer: its number up to eight experts, else for the busiest eight of the window; −1 without one.
  slots(layer) {
    if (this.E <= SLOTS) return { of: (expert) => expert };
    const load = this.loads.get(layer) ?? [];
    const busiest = Array.from(load.keys()).sort((a, b) => load[b] - load[a] || a - b).slice(0, SLOTS);
    return { of: (expert) => busiest.indexOf(expert) };
  }
}
