// For screen readers: what the pictures show, as tables. Filled when the selection has come to rest.
import { escape, word } from "../common/format.js";
import { flipHere } from "./flips.js";
import { isIds } from "./store.js";
import { power, size } from "./words.js";

const LISTED = 60; // rows of a table

const table = (caption, heads, rows) => `<table><caption>${escape(caption)}</caption><thead><tr>${heads.map((h) => `<th>${h}</th>`).join("")}</tr></thead><tbody>${rows.map((cells) => `<tr>${cells.map((c) => `<td>${escape(c)}</td>`).join("")}</tr>`).join("")}</tbody></table>`;

export function twinTables(view) {
  return [layerTable(view), binTable(view), klTable(view)].filter(Boolean).join("");
}

// The error map around the selection: all taps of its layer.
function layerTable({ store, path }) {
  const here = store.row(path);
  if (!here) return "";
  const rows = store.facts.paths.filter((p) => store.row(p).layer === here.layer).slice(0, LISTED).map((p) => {
    const row = store.row(p);
    return [p, isIds(p) ? `${row.moved} tokens to other experts` : power(row.rel, 1), row.state, row.token < 0 ? "" : String(row.token)];
  });
  return table(here.layer < 0 ? "Taps outside the layers" : `Taps of layer ${here.layer}`, ["tap", "largest difference over largest value", "state", "token"], rows);
}

function binTable({ store, path, expert }) {
  const seen = store.values(path, expert);
  if (!seen?.bins || !seen.range) return "";
  const width = (2 * seen.range) / seen.bins.length;
  return table("Histogram of B minus A", ["from", "to", "values"], Array.from(seen.bins, (n, i) => [size(-seen.range + i * width), size(-seen.range + (i + 1) * width), String(n)]));
}

function klTable({ store, token }) {
  const { kl, positions, same_top: same } = store.table;
  if (!kl) return "";
  const middle = store.positionOf.get(token) ?? 0;
  const from = Math.max(0, Math.min(middle - LISTED / 2, kl.length - LISTED));
  const rows = Array.from(positions.subarray(from, from + LISTED), (t, i) => [String(t), word(store.facts.texts[t] ?? "", store.facts.ids[t]), power(kl[from + i], 1), same[from + i] ? "same" : "another"]);
  return table("KL by position", ["token", "text", "KL in nats", "likeliest token"], rows);
}

// What the map says when it is focused.
export function mapLabel(view) {
  const { store, path } = view;
  const { first } = store.facts;
  const row = store.row(path);
  const flip = flipHere(view);
  const here = row ? `Selected: ${path}, ${isIds(path) ? `${row.moved} tokens to other experts` : `${power(row.rel, 1)}, ${row.state}`}${flip >= 0 ? `, flip ${flip + 1}` : ""}.` : "";
  return `Error by tap and layer. ${first ? `First divergence: ${first.path}.` : "No divergence."} ${here} Arrows move, 0 goes to the first divergence, N to the next flip.`;
}
