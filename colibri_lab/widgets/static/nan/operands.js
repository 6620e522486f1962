// The operation that broke: its operands with their bits, and what the exact result would have been. In a clean run: what comes nearest.
import { count, escape, percent, plural } from "../common/format.js";
import { markSvg } from "../common/marks.js";
import { bitsText, size } from "./words.js";
import { number } from "./store.js";

const LISTED = 12; // taps of a clean run

export function operationTitle({ store, chosen }) {
  if (store.facts.clean) return ["Subnormal values", `too small for full precision in ${store.facts.format}`];
  const origin = store.facts.origins[chosen];
  return ["The operation that broke", `${origin.point}[${origin.token}, ${origin.index.join(", ")}]`];
}

export function operationBody(view) {
  const { store, chosen } = view;
  return store.facts.clean ? subnormals(store) : operation(store, store.facts.origins[chosen]);
}

function operation({ facts }, origin) {
  const rows = origin.operands.map((operand) => `<tr><td title="${escape(operand.name)}">${escape(short(operand.name))}</td><td class="num m">${operand.mark ? `${markSvg(operand.mark)} ` : ""}${operand.text}</td><td class="m">${operand.hex}</td><td class="bitcell">${operand.fields.map(bits).join("")}</td></tr>`);
  const formats = new Set(origin.operands.map(({ fields }) => `sign · exponent (${fields[1].length}) · fraction (${fields[2].length})`));
  const heads = formats.size === 1 ? [...formats][0] : "sign · exponent · fraction";
  const table = rows.length ? `<table class="t ops"><thead><tr><th>operand</th><th class="num">value</th><th>bits</th><th>${heads}</th></tr></thead><tbody>${rows.join("")}</tbody></table>` : '<p class="q pad">The operands were not recorded.</p>';
  return `${table}<p class="opsay">${said(facts, origin)}</p>${weight(origin.weight)}${needs(origin)}`;
}

// An element of a weight by its index alone; the weight is named below.
const short = (name) => name.replace(/^[\w]+(\.[\w]+)+\[/, "weight[");

// One group of bits; 1 is filled.
const bits = (text, _, fields) => `<span class="bits${fields.join("").length > 16 ? " fine" : ""}" aria-hidden="true">${Array.from(text, (bit) => `<i${bit === "1" ? ' class="one"' : ""}>${bit}</i>`).join("")}</span>`;

function said(facts, origin) {
  const cause = escape(origin.cause.slice(0, 1).toUpperCase() + origin.cause.slice(1).replace(/[.]?$/, "."));
  const parts = [cause];
  const exact = number(origin.exact);
  const largest = facts.formats[origin.dtype];
  if (exact !== null && Number.isFinite(exact)) {
    const share = largest && Math.abs(exact) > largest ? `, ${Number((Math.abs(exact) / largest).toPrecision(3))} × the largest ${origin.dtype}` : "";
    parts.push(`Exact result ${size(exact)}${share}.`);
  }
  parts.push(`<span class="q">${plural(origin.n_values, "value")} of this tap ${origin.n_values === 1 ? "is" : "are"} born here, in ${escape(origin.token_words)}.</span>`);
  return parts.join(" ");
}

function weight(place) {
  if (!place) return "";
  const where = place.file ? ` In <span class="m">${escape(place.file)}</span>${place.offset === null ? "" : `, byte ${count(place.offset)}`}.` : "";
  return `<p class="opsay">The weight <span class="m">${escape(place.name)}[${place.index.join(", ")}]</span> is <b>${place.value}</b> <span class="m">${place.bits}</span> (${escape(place.dtype)})${place.signalling ? ", a signalling NaN" : ""}.${where}</p>`;
}

function needs({ kind, needs: taps }) {
  if (kind !== "unknown" || !taps.length) return "";
  return `<p class="opsay q">What would tell: ${taps.map((tap) => `<span class="m">${escape(tap)}</span>`).join(", ")}.</p>`;
}

// The taps of a clean run that come nearest to overflow.
export function nearest({ store }) {
  const { facts } = store;
  const rows = facts.paths.map((path) => store.row(path)).filter((row) => row.absmax > 0).sort((a, b) => b.absmax - a.absmax).slice(0, LISTED);
  if (!rows.length) return '<p class="q pad">There is no value to look at.</p>';
  const line = (row) => `<tr class="${row.path === facts.closest?.path ? "on" : ""}"><td>${row.layer < 0 ? "" : `layer ${row.layer}, `}${escape(row.name)}</td><td class="num">${size(row.absmax)}</td><td class="num">${bitsText(store.bits(row, facts.format))}</td></tr>`;
  return `<table class="t"><thead><tr><th>tap</th><th class="num">largest magnitude</th><th class="num">bits left in ${escape(facts.format)}</th></tr></thead><tbody>${rows.map(line).join("")}</tbody></table>`;
}

function subnormals({ facts }) {
  if (!facts.small.length) return '<p class="q pad">No tap holds any.</p>';
  const line = ([name, n, all]) => `<tr><td>${escape(name)}</td><td class="num">${count(n)}</td><td class="num">${count(all)}</td><td class="num">${n / all < 0.0005 ? "<0.1 %" : percent(n / all, 1)}</td></tr>`;
  return `<table class="t"><thead><tr><th>tap</th><th class="num">subnormal or zero</th><th class="num">of values</th><th class="num">share</th></tr></thead><tbody>${facts.small.map(line).join("")}</tbody></table>`;
}
