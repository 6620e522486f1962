// Tokens routed differently: what it cost first, each with its explanation.
import { chip, count, escape, plural } from "../common/format.js";
import { SUPPRESS } from "../common/frame.js";
import { MARKS, size, tokenHtml } from "./words.js";

const SHOWN = 5;
const WHOLE = 4; // experts of a token that are listed in full; of more only those exchanged

export function flipsRemark({ facts }) {
  const { all, counts } = facts.flips;
  if (!all) return "none: every compared token goes to the same experts";
  const words = { tie: (n) => plural(n, "tie"), defect: (n) => plural(n, "router defect"), downstream: (n) => `${count(n)} downstream` };
  return `${count(all)} in all: ${["tie", "defect", "downstream"].filter((v) => counts[v]).map((v) => words[v](counts[v])).join(", ")}; largest effect first`;
}

export function flipTable(view) {
  const { store, allFlips } = view;
  const { flips } = store;
  if (!flips) return "";
  const on = flipHere(view);
  const shown = allFlips ? flips : Math.max(Math.min(SHOWN, flips), 0);
  const rows = Array.from({ length: shown }, (_, i) => row(view, i, i === on));
  if (on >= shown) rows.push(row(view, on, true));
  const all = store.facts.flips.all;
  const missing = all > flips ? ` The other ${count(all - flips)} are in <span class="m">view.diff.flips</span>.` : "";
  const more = allFlips ? `${missing && `<span class="q">These are the ${flips} with the largest effect.${missing}</span> `}${flips > SHOWN ? `<button type="button" class="link" data-act="fewflips" ${SUPPRESS}>Show few</button>` : ""}` : flips > SHOWN ? `<span class="q">⋯ ${count(all - SHOWN)} more.</span> <button type="button" class="link" data-act="allflips" ${SUPPRESS}>Show all ${count(flips)}</button>${missing && `<span class="q">${missing}</span>`}` : "";
  return `<div class="${allFlips && flips > 12 ? "scroll" : ""}"${allFlips && flips > 12 ? ` tabindex="0" role="region" aria-label="Tokens routed differently" ${SUPPRESS}` : ""}><table class="t"><thead><tr><th>verdict</th><th>layer</th><th>token</th><th>A</th><th>B</th><th class="num" title="in A, between the last chosen and the best left out">margin in A</th><th class="num">score moved</th><th class="num" title="largest change of the block's output at this token, over its largest value">effect</th><th class="cause">in words</th></tr></thead><tbody>${rows.join("")}</tbody></table></div>${more && `<p class="small more">${more}</p>`}`;
}

// The flip that is selected, −1 without one.
export function flipHere({ store, path, token }) {
  const layer = store.row(path)?.layer;
  if (!path?.endsWith(".moe.expert_ids")) return -1;
  for (let i = 0; i < store.flips; i++) if (store.table.flip_layer[i] === layer && store.table.flip_token[i] === token) return i;
  return -1;
}

function row(view, i, on) {
  const { store } = view;
  const flip = store.flip(i);
  const slots = store.slots(flip.layer);
  const name = `${MARKS[flip.verdict]} ${flip.verdict}`;
  const figure = (value) => (Number.isNaN(value) ? '<span class="q" title="not kept">–</span>' : size(value));
  const cause = escape(flip.cause);
  return `<tr class="${on ? "on" : ""}" data-flip="${i}"><td><button type="button" class="name" data-flip="${i}" aria-pressed="${on}" ${SUPPRESS}>${name}</button></td><td>${flip.layer}</td><td>${tokenHtml(store, flip.token).replace("token ", "")}</td><td>${chips({ ...view, slots }, flip.a, flip.b)}</td><td>${chips({ ...view, slots }, flip.b, flip.a)}</td><td class="num">${figure(flip.margin)}</td><td class="num">${figure(flip.moved)}</td><td class="num">${figure(flip.consequence)}</td><td class="cause">${cause}</td></tr><tr class="below${on ? " on" : ""}" data-flip="${i}"><td colspan="8">${cause}</td></tr>`;
}

// The experts of a token in one run; those the other run chose too are outlined, and of many only counted.
export function chips(view, ids, others) {
  const kept = ids.filter((e) => others.includes(e)).length;
  const shown = ids.length > WHOLE ? ids.filter((e) => !others.includes(e)) : ids;
  return `<span class="chips">${shown.map((e) => chip(view, e, others.includes(e))).join(" ")}${shown.length < ids.length ? ` <span class="q">+${kept}</span>` : ""}</span>`;
}
