// For screen readers: what the pictures show, as tables. Filled when the selection has come to rest.
import { escape } from "../common/format.js";
import { bitsText } from "./words.js";

const LISTED = 60; // rows of a table

const table = (caption, heads, rows) => `<table><caption>${escape(caption)}</caption><thead><tr>${heads.map((h) => `<th>${h}</th>`).join("")}</tr></thead><tbody>${rows.map((cells) => `<tr>${cells.map((c) => `<td>${escape(c)}</td>`).join("")}</tr>`).join("")}</tbody></table>`;

export function twinTables(view) {
  return [layerTable(view), wayTable(view), bitTable(view)].filter(Boolean).join("");
}

function layerTable({ store, path }) {
  const here = store.row(path);
  if (!here) return "";
  const rows = store.facts.paths.map((p) => store.row(p)).filter((row) => row.layer === here.layer).slice(0, LISTED);
  return table(here.layer < 0 ? "Taps outside the layers" : `Taps of layer ${here.layer}`, ["tap", "state", "NaN", "Inf", "bits left"], rows.map((row) => [row.path, row.state, String(row.n_nan), String(row.n_inf), bitsText(row.bits_left)]));
}

function wayTable({ store, chosen }) {
  const way = store.ways.get(chosen);
  if (!way) return "";
  return table("Steps from the origin", ["step", "what", "came from", "what it did"], way.boxes.slice(0, LISTED).map((box) => [box.title, box.sub, box.source === null ? "" : way.boxes[box.source].title, box.label]));
}

function bitTable({ store, chosen }) {
  const origin = store.facts.origins[chosen];
  if (!origin?.operands.length) return "";
  return table("Operands", ["operand", "value", "bits", "sign", "exponent", "fraction"], origin.operands.map((o) => [o.name, o.text, o.hex, ...o.fields]));
}

// What the map says when it is focused.
export function mapLabel({ store, path, chosen }) {
  const row = store.row(path);
  const origin = store.facts.origins[chosen];
  const here = row ? `Selected: ${path}, ${row.n_nan || row.n_inf ? `${row.n_nan} NaN, ${row.n_inf} Inf` : `finite, ${bitsText(row.bits_left)} bits left`}.` : "";
  return `Taps by layer. ${origin ? `Origin: ${origin.path}, token ${origin.token}.` : "Everything is finite."} ${here} Arrows move, 0 goes to the origin.`;
}
