// The answer first: what was born where, why, what it ruined, what cures it. And numbers and places in words.
import { chip, count, escape, fixed, plural, word } from "../common/format.js";
import { kindOf, ofExpert } from "../common/tap_map.js";
import { number } from "./store.js";

export const bitsText = (bits) => (Number.isNaN(bits) ? "no finite value" : bits === Infinity ? "all zero" : fixed(bits, Math.abs(bits) < 100 ? 1 : 0));
export const bitWord = (bits) => (Math.abs(bits).toFixed(1) <= 1 ? "bit" : "bits");

// A size to read: plain with groups of three where it is short, else with its power of ten.
export function size(value) {
  if (!Number.isFinite(value)) return fixed(value);
  const much = Math.abs(value);
  if (much >= 1e7 || (much < 1e-3 && much > 0)) return value.toExponential(2).replace("e+", "e").replace(/-/g, "−");
  return value.toLocaleString("en", { maximumFractionDigits: much >= 1000 ? 1 : 4 }).replace("-", "−");
}

export const tokenHtml = ({ facts }, token) => `token ${token} <span class="tt">${escape(word(facts.texts[token] ?? "", facts.ids[token] ?? -1))}</span>`;

// What is left of a sentence that begins with its kind.
export function reason({ kind, cause }) {
  const rest = cause.toLowerCase().startsWith(kind.toLowerCase()) ? cause.slice(kind.length).replace(/^[\s:,;.–—-]+/, "") : cause;
  return rest.replace(/[.]?$/, "");
}

// Where in the token's row.
export function indexWords({ index, path, point }) {
  const kind = kindOf(point || path);
  if (index.length > 1) return `head ${index[0]}, ${/scores|weights/.test(kind) ? "key" : "channel"} ${index[1]}`;
  if (/experts\.\d+\.(hidden|gate|up)|inner/.test(kind)) return `neuron ${index[0]}`;
  if (/router_logits|moe\.scores/.test(kind)) return `expert ${index[0]}`;
  if (kind === "moe.gates") return `choice ${index[0]}`;
  return kind === "logits" ? `vocabulary entry ${index[0]}` : `channel ${index[0]}`;
}

export function placeHtml(view, origin) {
  const layer = origin.layer === null ? "" : `layer ${origin.layer}, `;
  const expert = origin.expert === null ? "" : `expert ${chip({ ...view, slots: view.store.slots }, origin.expert)}, `;
  const what = origin.operation.replace(/weight [\w]+(\.[\w]+)+/, "weight") || (origin.expert === null ? origin.name : origin.name.replace(/^expert \d+ /, ""));
  return `<b>${layer}${expert}${escape(what)}</b>`;
}

const capital = (words) => words.slice(0, 1).toUpperCase() + words.slice(1);

export function sentence(view) {
  const { store } = view;
  const { facts } = store;
  if (facts.clean) return cleanSentence(facts);
  const origin = facts.origins[view.chosen];
  const unknown = origin.kind === "unknown";
  const many = facts.all_origins > 1 ? `<b>${count(facts.all_origins)} independent origins</b>; ${view.chosen ? `number ${view.chosen + 1}` : "the first"}: born` : "Born";
  const others = origin.tokens > 1 ? ` (and ${plural(origin.tokens - 1, "other token")})` : "";
  const why = `${many} in ${placeHtml(view, origin)}, ${tokenHtml(store, origin.token)}${others}, ${indexWords(origin)}: ${escape(reason(origin))}.`;
  const { ruined, last } = facts.way;
  const damage = ruined ? ` ${facts.all_origins > 1 ? "Together they" : "It"} ruined the ${escape(last || "last values")} of <b>${count(ruined)} of ${count(facts.tokens)}</b> tokens.` : " No token is ruined by it.";
  const cure = store.cures.find((row) => row.gone && row.of === view.chosen);
  const said = cure ? ` <b>Cure: ${escape(cure.change.slice(0, 1).toLowerCase() + cure.change.slice(1))}.</b>` : "";
  const needs = unknown && origin.needs.length ? ` <span class="sub">What would tell: ${origin.needs.map((tap) => `<span class="m">${escape(tap)}</span>`).join(", ")}.</span>` : "";
  return `<span class="badge bad">${escape(origin.kind.toUpperCase())}</span> ${why}${damage}${said}${needs}${foretold(store, origin)}`;
}

function cleanSentence({ empty, closest, format, dtype, foretold }) {
  const badge = '<span class="badge ok">✓ CLEAN</span>';
  if (empty) return 'Nothing has run yet. Feed the session, then trace it: <code class="code">session.feed("…"); view = lab.NanTracer(session)</code>';
  if (!closest) return `${badge} Clean: nothing is NaN or Inf. <span class="sub">The view has no map of this run; give it the session or the trace.</span>`;
  const bits = number(closest.bits);
  const place = `<b>${closest.layer === null ? "" : `layer ${closest.layer}, `}${escape(closest.name)}, ${bitsText(bits)} ${bitWord(bits)}</b> in ${format}`;
  const over = bits < 0 ? " It would overflow there." : "";
  const other = dtype === format ? "" : ` <span class="sub">The run itself is in ${escape(dtype)}.</span>`;
  const ahead = foretold.length ? ` <b>Foretold:</b> ${escape(foretold[0])}` : "";
  return `${badge} Clean. Closest to overflow: ${place}.${over}${other}${ahead}`;
}

// How near the same tap was one layer earlier.
function foretold(store, origin) {
  if (origin.layer === null) return "";
  const layer = store.layers[store.layers.indexOf(origin.layer) - 1];
  const path = layer === undefined ? null : store.path(kindOf(origin.path).replace(/experts\.\d+/, "experts.*"), layer);
  const bits = path ? store.bits(store.row(path), store.facts.format) : NaN;
  if (!(bits < store.facts.warned) || !/overflow|inf/.test(origin.kind)) return "";
  return ` <span class="sub">Headroom had fallen to ${bitsText(bits)} ${bitWord(bits)} one layer earlier.</span>`;
}

// One tap in a sentence: what is in it, where it stops being finite.
export function tapSentence(view) {
  const { store, path, token, expert } = view;
  const row = store.row(path);
  if (!row) return '<span class="q">No tap of this run can be shown.</span>';
  const { facts } = store;
  const name = `<span class="m">${escape(path)}</span>`;
  const bits = store.bits(row, facts.format);
  const largest = row.absmax > 0 ? `largest ${size(row.absmax)}, ${bitsText(bits)} ${bitWord(bits)} left in ${facts.format}` : "no finite value but zeros";
  const small = row.state === "subnormal" ? ` ${count(row.n_subnormal)} of ${count(row.n)} are subnormal.` : "";
  if (!row.n_nan && !row.n_inf) return `${name}: finite, ${largest}.${small}${cellWords(view)}`;
  const kinds = [row.n_nan && `${count(row.n_nan)} NaN`, row.n_inf && `${count(row.n_inf)} Inf${row.n_negative_inf ? ` (${count(row.n_negative_inf)} negative)` : ""}`].filter(Boolean);
  const here = row.state === "origin" ? " <b>Born here.</b>" : " Passed on.";
  const of = ofExpert(path) && expert !== null ? `, expert ${expert}` : "";
  const cell = store.cell(path, token, expert);
  const where = cell?.bad ? ` Not finite in ${escape(cell.bad_words)}${of}.` : "";
  return `${name}: ${kinds.join(" and ")} of ${plural(row.n, "value")}.${here}${where}${cellWords(view)}`;
}

// The selected token's own row.
function cellWords({ store, path, token, expert, live }) {
  const cell = store.cell(path, token, expert);
  if (!cell) return live || token === null ? "" : ' <span class="q">The row of this token was not fetched; that needs Python.</span>';
  if (!cell.recorded) return ' <span class="q">Its values were not recorded, only counted.</span>';
  const name = tokenHtml(store, token);
  if (!cell.n) return ` <span class="q">${capital(name)} has no row here.</span>`;
  const odd = cell.n_nan + cell.n_inf;
  const largest = cell.absmax === null ? "" : `, largest ${size(number(cell.absmax))}`;
  return ` <span class="q">In ${name}: ${odd ? `${count(odd)} of ${plural(cell.n, "value")} not finite` : "all finite"}${largest}.</span>`;
}
