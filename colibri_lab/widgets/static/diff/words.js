// The answer first: same or not, where it starts, what it is. And taps, tokens and errors in words.
import { chip, count, escape, plural, word } from "../common/format.js";
import { kindOf, ofExpert } from "../common/tap_map.js";
import { isIds } from "./store.js";

export const MARKS = { identical: "=", tie: "≈", defect: "✗", downstream: "↓" };
const BADGES = { identical: "= SAME", tie: "≈ TIE", defect: "✗ DEFECT", downstream: "↓ DOWNSTREAM" };
const NAMES = {
  "moe.input": "input of the block", "moe.router_logits": "router logits", "moe.scores": "router scores", "moe.expert_ids": "choice of experts", "moe.gates": "gates",
  "moe.shared.gate": "gate of the shared expert", "moe.shared.output": "output of the shared expert", "moe.routed": "sum of the experts", "moe.output": "output of the block", output: "output",
  "attn.norm": "norm before attention", "attn.q": "attention queries", "attn.k": "attention keys", "attn.v": "attention values", "attn.weights": "attention weights", "attn.out": "output of attention", "mlp.input": "input of the dense block", "mlp.output": "output of the dense block",
};

// A size as its power of ten: "1e−5"; more digits where asked.
export function power(value, digits = 0) {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "Inf" : "−Inf";
  if (value === 0) return "0";
  return value.toExponential(digits).replace("e+", "e").replace(/-/g, "−");
}

// A size to read: plain where it is short, else with its power of ten.
export function size(value, digits = 3) {
  if (!Number.isFinite(value) || value === 0) return power(value);
  if (Math.abs(value) >= 1e4 || Math.abs(value) < 1e-3) return power(value, digits > 2 ? 1 : 0);
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

export function tapName(path, expert) {
  const kind = kindOf(path);
  if (!ofExpert(path)) return NAMES[kind] ?? kind;
  const tap = kind.split(".").pop();
  const name = tap === "gate" || tap === "up" ? `${tap} projection` : tap;
  return expert === null ? `${name} of the experts` : `${name} of expert`;
}

export function placeHtml(view, path, expert) {
  const { store } = view;
  const layer = store.row(path)?.layer ?? -1;
  const which = ofExpert(path) && expert !== null ? ` ${chip({ ...view, slots: store.slots(layer) }, expert)}` : "";
  return `<b>${layer < 0 ? "" : `layer ${layer}, `}${escape(tapName(path, expert))}${which}</b>`;
}

export const tokenHtml = (store, token) => `token ${token} <span class="tt">${escape(word(store.facts.texts[token] ?? "", store.facts.ids[token]))}</span>`;

// Words of an analysis as a sentence.
export const period = (text) => {
  const words = text.trim();
  return words.slice(0, 1).toUpperCase() + words.slice(1) + (/[.!?]$/.test(words) ? "" : ".");
};

export function verdictSentence(view) {
  const { store } = view;
  const { facts } = store;
  const badge = `<span class="badge${facts.verdict === "defect" ? " bad" : ""}">${BADGES[facts.verdict]}</span>`;
  const within = `within the declared ${declared(facts)}`;
  const likely = facts.diagnosis ? ` <b>${facts.diagnosis.fault && facts.diagnosis.fault !== "unknown" && !/^likely/i.test(facts.diagnosis.words) ? "Likely fault: " : ""}${escape(facts.diagnosis.words.replace(/[.]?$/, "."))}</b>` : "";
  const { first } = facts;
  if (first) {
    const place = `${placeHtml(view, first.path, first.expert)}${first.token >= 0 ? `, ${tokenHtml(store, first.token)}` : ""}`;
    const cause = `<span class="sub">${escape(period(first.cause))}</span>`;
    if (facts.verdict === "downstream") return `${badge} B leaves A at ${place}, where ${edited(facts)} changed the computation itself: a consequence, not a fault.${likely} ${cause}`;
    const before = store.at.get(first.path) ? ` All earlier taps agree ${within}${facts.flips.counts.tie ? ", near-ties apart" : ""}.` : "";
    return `${badge} B leaves A at ${place}.${before}${likely} ${cause}`;
  }
  const all = plural(facts.paths.length, "compared tap");
  if (facts.verdict === "identical") {
    const same = facts.states.every((s) => s === "same bits" || s === "same");
    if (!facts.paths.length) return `${badge} Nothing could be compared.`;
    return `${badge} Both runs say the same. ${same ? `${facts.paths.length === 1 ? "The one compared tap holds" : `All ${all} hold`} <b>the same bits</b>.` : `All ${all} agree ${within}.`} <span class="sub">${closestWords(view)}</span>`;
  }
  if (facts.verdict === "tie") return `${badge} The runs send <b>${plural(facts.flips.all, "token")}</b> to other experts, because two experts score alike or because such a token came before; all else that differs follows from that. <span class="sub">Either choice is right; the first is at ${tieWords(view)}.</span>`;
  return `${badge} What differs is what ${edited(facts)} changed itself: a consequence, not a fault.${likely}`;
}

// The declared tolerance; where each tap has its own, the largest.
export const declared = ({ tolerance: [relative, , own] }) => `${own ? "≤ " : ""}${power(relative)}`;

const edited = ({ edited: [a, b] }) => (a && b ? "both runs" : a ? "A" : b ? "B" : "one run");

// How near the nearest tap comes to what is allowed.
function closestWords(view) {
  const { store } = view;
  if (store.facts.closest === null) return "";
  const path = store.facts.paths[store.facts.closest];
  const { rel, tolerance } = store.row(path);
  if (!(rel > 0)) return "";
  return `The nearest to its tolerance is ${placeHtml(view, path, null)}: ${power(rel, 1)}, ${share(rel / tolerance)} of what is allowed.`;
}

const share = (part) => (part >= 0.095 ? `${Math.round(100 * part)} %` : `${Number((100 * part).toPrecision(1))} %`);

function tieWords(view) {
  const { store } = view;
  let first = null;
  for (let i = 0; i < store.flips; i++) {
    const flip = store.flip(i);
    if (!first || flip.layer < first.layer || (flip.layer === first.layer && flip.token < first.token)) first = flip;
  }
  return first ? `layer ${first.layer}, ${tokenHtml(store, first.token)}` : "a token that is not listed";
}

// One tap in a sentence: how far B is from A there.
export function tapSentence(view) {
  const { store, path, expert } = view;
  const row = store.row(path);
  if (!row) return "";
  const name = `<span class="m">${escape(expert === null ? path : path.replace("*", expert))}</span>`;
  const first = store.facts.first;
  const here = first && first.path === path ? " B leaves A here." : "";
  if (isIds(path)) {
    const counts = Object.entries(store.flipsOf.get(row.layer) ?? {});
    if (!row.moved) return `${name}: every token goes to the same experts.${here}`;
    return `${name}: <b>${plural(row.moved, "token")}</b> of ${count(store.n)} ${row.moved === 1 ? "goes" : "go"} to other experts${counts.length ? `, ${counts.map(([verdict, n]) => `${n} ${MARKS[verdict]} ${verdict}`).join(", ")}` : ""}.${here}`;
  }
  if (row.state === "same bits") return `${name}: the same bits in both runs.`;
  const seen = store.values(path, expert);
  const values = seen && seen.expert === expert && expert !== null ? ` Of this expert’s ${plural(seen.rows, "row")}, ${count(seen.beyond)} differ beyond tolerance.` : "";
  if (row.state === "within") return `${name} agrees: largest difference ${power(row.rel, 1)} of the largest value, ${share(row.rel / row.tolerance)} of the tolerance ${power(row.tolerance)}.${values}`;
  const strange = seen && (seen.nonfinite[0] || seen.nonfinite[1]) ? ` No ordinary numbers: ${count(seen.nonfinite[0])} in A, ${count(seen.nonfinite[1])} in B.` : "";
  const apart = Number.isFinite(row.rel) ? `differs by up to <b>${size(row.rel)}</b> of the largest value, tolerance ${power(row.tolerance)}; |B − A| up to ${size(row.abs)}${Number.isNaN(row.cosine) ? "" : `, cosine ${cosine(row.cosine)}`}` : "holds NaN or Inf on one side alone";
  return `${name} ${apart}${row.token >= 0 ? `, first at ${tokenHtml(store, row.token)}` : ""}.${strange}${values}${here}`;
}

const cosine = (value) => (value > 0.99995 && value < 1 ? `1 − ${power(1 - value)}` : String(Number(value.toFixed(4))).replace("-", "−"));
