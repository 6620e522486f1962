// The answer first: one sentence about one place, as markup.
import { FLAG } from "./store.js";
import { chip, count, escape, fixed, gate, percent, plural, word } from "../common/format.js";

const token = (view, t) => `token ${t} <b class="m">${escape(word(view.store.facts.texts[t], view.store.kind[t]))}</b>${part(view.store, t)}`;

// Why a token has an id in the place of a text.
function part({ facts, kind }, t) {
  if (facts.texts[t]) return "";
  const bytes = facts.parts[kind[t]];
  const words = bytes ? `a part of a character: byte${bytes.includes(" ") ? "s" : ""} ${bytes}` : "an id without a text of its own";
  return ` <span class="sub">(${words})</span>`;
}

// What the router made of one token in one layer.
export function tokenSentence(view, layer, t) {
  const { store } = view;
  const here = store.at(layer, t);
  const name = store.facts.layers[layer];
  if (!here) return `Layer <b>${name}</b>, ${token(view, t)}: not here yet.`;
  if (here.flags & FLAG.unrecorded)
    return `Layer <b>${name}</b>, ${token(view, t)}: <span class="badge warn">? NOT RECORDED</span> <span class="sub">The trace holds no expert ids for this token.</span>`;
  if (here.flags & FLAG.unranked)
    return `Layer <b>${name}</b>, ${token(view, t)}: <span class="badge bad">✗ ${strange(here.flags)}</span> in its router logits. <span class="sub">Such a token has no ranking, so the expert ids here mean nothing.</span>`;
  const experts = Array.from(here.ids);
  const gates = Array.from(here.gates);
  const known = !Number.isNaN(gates[0]);
  const one = (e, i) => chip(view, e) + (known && store.K <= 2 ? ` (gate <b>${gate(gates[i])}</b>)` : "");
  const list = experts.map(one).join(store.K <= 2 ? " and " : " ");
  const spread = known && store.K > 2 ? ` Gates ${gate(gates[0])} to ${gate(gates.at(-1))}.` : "";
  const minusInf = here.flags & FLAG.minusInf ? " Some of its logits are −Inf: switched off." : "";
  return `Layer <b>${name}</b> sends ${token(view, t)} to expert${experts.length > 1 ? "s" : ""} ${list}. <span class="sub">${behind(view, layer, here)}${spread}${minusInf}</span>`;
}

function behind(view, layer, here) {
  const { store } = view;
  const unit = store.facts.by_score[layer] ? " in score" : " in logits";
  const tie = here.flags & FLAG.tie ? ' <span class="badge warn">≈ near-tie in bf16</span>' : "";
  if (store.K >= store.E) return "Every expert is chosen here.";
  if (Number.isNaN(here.margin)) return "Router logits were not recorded, so margin and entropy are unknown.";
  const entropy = Number.isNaN(here.entropy) ? "" : `; router entropy ${fixed(here.entropy)} of 1`;
  return `The best expert left out is ${fixed(here.margin)} behind${unit}${tie}${entropy}.`;
}

// The mark of a token without a ranking: NaN wins over +Inf.
export const strangeMark = (flags) => (flags & FLAG.plusInf && !(flags & FLAG.nan) ? "+inf" : "nan");

export const strange = (flags) =>
  [[FLAG.nan, "NaN"], [FLAG.plusInf, "+Inf"], [FLAG.minusInf, "−Inf"]].filter(([bit]) => flags & bit).map(([, w]) => w).join(", ") || "NaN GATE";

// How many tokens one expert got, against chance.
export function loadSentence(view, layer, expert) {
  const { store } = view;
  const n = store.load[layer * store.E + expert];
  const all = store.counted[layer];
  const verdict = beyond(store, layer, expert);
  const words = verdict > 0 ? "more than chance explains (95 %)" : verdict < 0 ? "fewer than chance explains (95 %)" : "within chance (95 %)";
  const share = all ? ` (${percent(n / all)})` : "";
  return `Layer <b>${store.facts.layers[layer]}</b>, expert ${chip(view, expert)}: <b>${count(n)}</b> of ${plural(all, "token")}${share}, ${words}. <span class="sub">Chance is ${percent(store.chance, store.chance < 0.1 ? 1 : 0)}.</span>`;
}

// 1 above the 95 % band of chance, −1 below, 0 inside.
export function beyond(store, layer, expert) {
  const n = store.load[layer * store.E + expert];
  return n > store.band[2 * layer + 1] ? 1 : n < store.band[2 * layer] ? -1 : 0;
}
