// The picture as a table.
import { escape, fixed, word } from "../common/format.js";

// For screen readers: the tokens of the picture as a table.
export function twin(view) {
  const { moment, token } = view;
  const [start, stop] = moment.facts.window;
  const rows = [];
  for (let t = Math.max(start, token - 8); t < Math.min(stop, token + 9); t++) {
    const ids = moment.ids(t);
    const gates = moment.gates(t);
    rows.push(`<tr><td>${t}</td><td>${escape(word(moment.head.texts[t], moment.head.ids[t]))}</td><td>${ids ? ids.map((e, i) => (e < 0 ? "–" : `${e}${gates ? ` (${fixed(gates[i])})` : ""}`)).join(", ") : "not chosen yet"}</td></tr>`);
  }
  return `<table><caption>Tokens around the selected one, layer ${moment.layer}</caption><thead><tr><th>token</th><th>text</th><th>experts (gate)</th></tr></thead><tbody>${rows.join("")}</tbody></table>`;
}
