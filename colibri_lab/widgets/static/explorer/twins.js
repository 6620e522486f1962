// For screen readers: what the pictures show, as two short tables. Filled when the selection has come to rest.
import { escape, fixed, percent, word } from "../common/format.js";

const ROWS = 16;
const SPAN = 8;

export function twinTables(view) {
  const { store, layer, token } = view;
  const order = Array.from({ length: store.E }, (_, e) => e).sort((a, b) => store.load[layer * store.E + b] - store.load[layer * store.E + a] || a - b);
  const load = order.slice(0, ROWS).map((e) => `<tr><td>${e}</td><td>${store.load[layer * store.E + e]}</td><td>${percent(store.share(layer, e))}</td></tr>`);
  const rows = [];
  for (let t = Math.max(0, token - SPAN); t <= Math.min(store.T - 1, token + SPAN); t++) {
    const here = store.at(layer, t);
    if (!here) continue;
    const experts = here.ranked ? Array.from(here.ids, (e, i) => (Number.isNaN(here.gates[i]) && !store.facts.gates ? `${e}` : `${e} (${fixed(here.gates[i])})`)).join(", ") : "no ranking";
    rows.push(`<tr><td>${t}</td><td>${escape(word(store.facts.texts[t], store.kind[t]))}</td><td>${experts}</td><td>${fixed(here.margin)}</td><td>${fixed(here.entropy)}</td></tr>`);
  }
  const name = store.facts.layers[layer];
  return (
    `<table><caption>Load of layer ${name}, busiest experts first</caption><thead><tr><th>expert</th><th>tokens</th><th>share</th></tr></thead><tbody>${load.join("")}</tbody></table>` +
    `<table><caption>Tokens around the selected one in layer ${name}</caption><thead><tr><th>token</th><th>text</th><th>experts (gate)</th><th>margin</th><th>entropy</th></tr></thead><tbody>${rows.join("")}</tbody></table>`
  );
}
