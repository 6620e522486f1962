// What it does to the prediction: KL by position, and the next tokens of the selected one, A solid, B hatched.
import { count, escape, expertColour, fixed, plural, word } from "../common/format.js";
import { hatch, swatch } from "../common/hatch.js";
import { ring } from "../common/pointers.js";
import { period, power, size, tokenHtml } from "./words.js";

const LEFT = 34;
const TALL = 66;
const FLOOR = 1e-6; // nats; anything less is drawn as nothing
const BAR = 170;

export function predictionRemark(view) {
  const { facts } = view.store;
  const first = facts.first;
  const used = first?.expert !== null && first?.expert !== undefined && view.store.table.used?.some((u) => u) ? `; coloured: used expert ${first.expert} in layer ${first.layer}` : "";
  return view.store.table.kl ? `KL(A‖B) by position in nats, log scale${used}` : "";
}

// Positions share bars when there are more than the width has room for; each bar is the largest of its positions.
export function barsOf(store, width) {
  const n = store.table.positions?.length ?? 0;
  const room = Math.max(20, Math.floor((width - LEFT - 34) / 4));
  const each = Math.max(1, Math.ceil(n / room));
  return Array.from({ length: Math.ceil(n / each) }, (_, j) => {
    let best = j * each;
    for (let i = j * each; i < Math.min(n, (j + 1) * each); i++) if (store.table.kl[i] > store.table.kl[best] || Number.isNaN(store.table.kl[i])) best = i;
    return { from: j * each, to: Math.min(n, (j + 1) * each), best };
  });
}

export function klPicture(view, width) {
  const { store, token } = view;
  const { kl, positions, used } = store.table;
  if (!kl) return '<p class="q pad">No logits in both runs, so nothing is said about the next token. <span class="m">capture="all"</span> keeps them.</p>';
  if (!kl.length) return '<p class="q pad">No position has logits in both runs.</p>';
  const bars = barsOf(store, width);
  const step = Math.min(24, (width - LEFT - 34) / bars.length);
  const top = Math.max(...Array.from(kl).filter(Number.isFinite), FLOOR);
  const high = Math.max(0, Math.ceil(Math.log10(top)));
  const low = Math.min(high - 3, Math.max(-6, Math.floor(Math.log10(Math.max(FLOOR, Math.min(...Array.from(kl).filter((v) => v > 0), top))))));
  const y = (v) => 6 + TALL * (1 - (Math.log10(Math.max(v, 10 ** low)) - low) / (high - low));
  let s = "";
  for (const p of [high, Math.round((high + low) / 2), low]) s += `<path d="M${LEFT - 2} ${y(10 ** p)}H${LEFT + step * bars.length}" stroke="var(--line)"/><text x="${LEFT - 6}" y="${y(10 ** p) + 4}" text-anchor="end">${p ? power(10 ** p) : "1"}</text>`;
  const first = store.facts.first;
  const colour = first?.expert !== null && first?.expert !== undefined ? expertColour({ ...view, slots: store.slots(first.layer) }, first.expert) : "";
  let over = "";
  const each = bars[0].to - bars[0].from;
  const every = [1, 2, 5, 10, 20, 50, 100].find((m) => m * step >= 26) ?? 200;
  bars.forEach(({ from, to, best }, j) => {
    const x = LEFT + j * step;
    const v = kl[best];
    const w = Math.max(1, Math.min(12, step - (step > 3 ? 1.5 : 0)));
    const here = positions.subarray(from, to).includes(token);
    const h = Number.isFinite(v) ? (v > 10 ** low ? TALL + 6 - y(v) : 0) : TALL;
    s += Number.isNaN(v) ? `<path d="M${x} ${TALL - 2}l6 6m0 -6l-6 6" stroke="var(--mark)" stroke-width="1.5"/>` : h ? `<rect x="${x}" y="${TALL + 6 - h}" width="${w}" height="${h}" fill="${used[best] && colour ? colour : "var(--line2)"}"/>` : "";
    if (here) over += ring(x, TALL + 6 - Math.max(h, 3), w, Math.max(h, 3));
    s += `<rect class="hit" data-token="${positions[best]}" x="${x - 0.5}" y="0" width="${step}" height="${TALL + 10}" fill="transparent"><title>token ${positions[best]}: KL ${size(v)}</title></rect>`;
    if (each > 1 ? j % Math.round(60 / step) === 0 : positions[from] % every === 0) s += `<text x="${x + w / 2}" y="${TALL + 22}" text-anchor="middle">${positions[from]}</text>`;
  });
  const end = LEFT + step * bars.length + 6;
  const cut = store.facts.cut ? `<path d="M${end} 4${Array.from({ length: 11 }, (_, i) => `l${i % 2 ? -5 : 5} 6`).join("")}" fill="none" stroke="var(--mark)" stroke-width="1.5"/><text x="${end + 9}" y="${TALL / 2 + 4}">cut</text>` : "";
  return `<svg width="${Math.max(end + 36, 100)}" height="${TALL + 26}" role="img" aria-label="KL by position, largest ${power(top, 1)}">${s}<path d="M${LEFT - 2} ${TALL + 6.5}H${end - 6}" stroke="var(--line2)"/>${over}${cut}</svg>`;
}

export function nextPicture(view) {
  const { store, token } = view;
  const next = store.next.get(token);
  if (!next?.next.length) return "";
  const id = `${view.uid}-hatch`;
  const rows = next.next.map(([t, text], i) => [word(text, t, 9), next.chances[2 * i], next.chances[2 * i + 1]]);
  const top = Math.max(...rows.flatMap(([, p, q]) => [p, q]).filter(Number.isFinite), 1e-9);
  const long = (p) => (Number.isFinite(p) ? Math.max(1, (BAR * p) / top) : 0);
  const words = (p) => (p > 0 && p < 0.005 ? "<0.01" : fixed(p));
  const drawn = rows.map(([name, p, q], i) => {
    const y = i * 25;
    return `<text class="m k" x="70" y="${y + 16}" text-anchor="end">${escape(name)}</text><rect x="76" y="${y + 2}" width="${long(p)}" height="8" fill="var(--ink)" fill-opacity=".8"/><text class="k" x="${82 + long(p)}" y="${y + 10}">${escape(words(p))}</text><rect x="76.6" y="${y + 12.6}" width="${Math.max(1, long(q) - 1.2)}" height="7" fill="url(#${id})" stroke="var(--ink)"/><text class="k" x="${82 + long(q)}" y="${y + 21}">${escape(words(q))}</text>`;
  });
  const label = rows.map(([name, p, q]) => `${name} ${words(p)} against ${words(q)}`).join(", ");
  return `<svg width="${76 + BAR + 46}" height="${rows.length * 25 + 2}" role="img" aria-label="Next token, A against B: ${escape(label)}">${hatch(id)}${drawn.join("")}</svg>`;
}

export function predictionWords(view) {
  const { store, token, uid } = view;
  const { kl, same_top: same, positions, agreement } = store.table;
  if (!kl?.length) return "";
  const legend = `<div class="lg"><span>${swatch(`${uid}-a`, false)} A</span><span>${swatch(`${uid}-b`, true)} B</span></div>`;
  const i = store.positionOf.get(token);
  const next = store.next.get(token);
  let here = `<p>${tokenHtml(store, token)} has no logits in both runs.</p>`;
  if (i !== undefined) {
    const nats = `After ${tokenHtml(store, token)}: KL <b>${size(kl[i])}</b> nats`;
    const names = next?.top?.map((t) => next.next.find(([one]) => one === t)).map((t) => (t ? `<b class="tt">${escape(word(t[1], t[0]))}</b>` : "another"));
    const top = same[i] ? "; the likeliest token is the same" : names ? `; the likeliest token changes from ${names[0]} to ${names[1]}` : "; the likeliest token changes";
    const unknown = next ? "" : view.live ? "" : " Its next tokens were not fetched before; they need Python.";
    here = `<p>${Number.isNaN(kl[i]) ? `After ${tokenHtml(store, token)}: no distribution, NaN in the logits` : nats + top}.${unknown}</p>`;
  }
  const good = same.reduce((sum, v) => sum + v, 0);
  const five = agreement.reduce((sum, v) => sum + v, 0) / agreement.length;
  return `${legend}${here}<p class="q">The likeliest token agrees at ${count(good)} of ${plural(positions.length, "position")}; of A’s five likeliest, B has ${Math.round(100 * five)} % among its own.${store.facts.cut ? ` ${escape(period(store.facts.cut))}` : ""}</p>`;
}
