// The expert card: its share against chance, strongest gates, most typical tokens, and who is chosen together with it.
import { FLAG } from "./store.js";
import { chanceText, chip, count, escape, expertColour, gate, percent, plural, word } from "../common/format.js";

const TYPICAL = 5;
const TOGETHER = 5;
const LONG_TEXT = 200; // from so many tokens on, a kind must occur OFTEN times to be called typical
const OFTEN = 4;

const size = (gate) => (Number.isNaN(gate) ? -1e30 : gate);

// Who came to `expert` of `layer`: rows with their gate, kinds of token by share, partners by count. Null while the layer is not here.
function expertFacts(store, layer, expert) {
  const block = store.blocks[layer];
  if (!block) return null;
  const { ids, gates, flags } = block;
  const K = store.K;
  const came = [];
  const kinds = new Map();
  const partners = new Uint32Array(store.E);
  for (let t = 0; t < store.T; t++) {
    if (flags[t] & FLAG.unrecorded) continue;
    for (let slot = 0; slot < K; slot++) {
      if (ids[t * K + slot] !== expert) continue;
      came.push({ token: t, gate: gates[t * K + slot] });
      const kind = store.kind[t];
      if (!kinds.has(kind)) kinds.set(kind, { token: t, n: 0, all: store.occurrences.get(kind) });
      kinds.get(kind).n++;
      for (let other = 0; other < K; other++) if (other !== slot && ids[t * K + other] !== store.noId) partners[ids[t * K + other]]++;
    }
  }
  const least = store.T > LONG_TEXT ? OFTEN : 1;
  const typical = Array.from(kinds.values()).filter((k) => k.all >= least).sort((a, b) => b.n / b.all - a.n / a.all || b.n - a.n || a.token - b.token);
  const together = Array.from(partners, (n, e) => ({ expert: e, n })).filter((p) => p.expert !== expert).sort((a, b) => b.n - a.n || a.expert - b.expert);
  const strongest = came.slice().sort((a, b) => size(b.gate) - size(a.gate) || a.token - b.token);
  return { came, strongest, typical, together, least };
}

export class ExpertCard {
  constructor(host, onToken, onExpert) {
    this.host = host;
    host.addEventListener("click", (event) => {
      const token = event.target.closest("[data-token]");
      const expert = event.target.closest("[data-expert]");
      if (token) onToken(Number(token.dataset.token));
      else if (expert) onExpert(Number(expert.dataset.expert));
    });
  }

  update(view) {
    const { store, layer, expert } = view;
    const facts = expertFacts(store, layer, expert);
    if (!facts) {
      this.host.innerHTML = `<h3>Expert ${chip(view, expert)} of layer ${store.facts.layers[layer]}</h3><p class="q">Waiting for this layer …</p>`;
      return;
    }
    this.host.innerHTML = `<div class="ex"><div>${share(view)}</div><div>${tokens(view, facts)}</div><div>${together(view, facts)}</div></div>`;
  }
}

function share(view) {
  const { store, layer, expert } = view;
  const n = store.load[layer * store.E + expert];
  const all = store.counted[layer];
  const top = Math.max(Math.min(1, 4 * store.chance), store.share(layer, expert));
  const at = (v) => `${Math.min(100, (100 * v) / top).toFixed(1)}%`;
  return (
    `<h3>Expert ${chip(view, expert)} of layer ${store.facts.layers[layer]}</h3><div class="big"><b>${count(n)}</b> <span class="q">of ${plural(all, "token")} come here</span></div>` +
    `<div class="track"><span style="width:${at(store.share(layer, expert))};background:${expertColour(view, expert)}"></span><i style="left:${at(store.chance)}"></i></div>` +
    `<div class="small scale"><span>${percent(store.share(layer, expert))} of tokens</span><span class="q">| chance k/E ${chanceText(store.chance)}</span></div>` +
    `<div class="q small note">The same number in another layer is another expert.</div>`
  );
}

function tokens(view, facts) {
  const { store } = view;
  const shown = store.many ? 5 : 6;
  const tag = (t) => `<span class="tt">${escape(word(store.facts.texts[t], store.kind[t]))}</span>`;
  const place = (t, words) => `<button type="button" class="place" data-lm-suppress-shortcuts="true" data-token="${t}">${tag(t)} ${words}</button>`;
  if (!facts.came.length) return '<h3>Strongest gates</h3><p class="q">Nobody came.</p>';
  const known = !Number.isNaN(facts.strongest[0].gate);
  const strongest = facts.strongest.slice(0, shown).map((c) => place(c.token, `${known ? gate(c.gate) : ""} <span class="q">#${c.token}</span>`));
  const typical = facts.typical.slice(0, TYPICAL).map((k) => place(k.token, `${k.n} of ${k.all}`));
  const of = facts.came.length > shown ? `${shown} of ${count(facts.came.length)}` : "";
  const rule = facts.least > 1 ? `, of tokens that occur ${facts.least} times or more` : "";
  return (
    `<h3>${known ? "Strongest gates" : "Tokens that came"}<small>${of}</small></h3><div class="places">${strongest.join("")}</div>` +
    `<h3>Most typical<small>share of that token’s occurrences that come here${rule}</small></h3><div class="places">${typical.join("") || '<span class="q">none occurs so often</span>'}</div>`
  );
}

function together(view, facts) {
  const { store } = view;
  if (store.K < 2) return '<h3>Chosen together with</h3><p class="q">One expert is chosen per token.</p>';
  const chance = (store.K - 1) / (store.E - 1);
  const came = facts.came.length;
  const rows = facts.together.slice(0, TOGETHER).map(({ expert, n }) => {
    const part = came ? n / came : 0;
    return `<tr data-expert="${expert}"><td>${chip(view, expert, true)}</td><td><div class="track thin"><span style="width:${Math.max(0.8, 100 * part).toFixed(1)}%;background:${expertColour(view, expert)}"></span><i style="left:${(100 * chance).toFixed(1)}%"></i></div></td><td class="num">${percent(part)}</td><td class="num q">${count(n)}</td></tr>`;
  });
  return `<h3>Chosen together with<small>| chance ${chanceText(chance)}</small></h3><table class="hb" aria-label="Chosen together with"><colgroup><col style="width:36px"><col><col style="width:48px"><col style="width:44px"></colgroup><tbody>${rows.join("")}</tbody></table>`;
}
