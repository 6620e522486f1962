// The fork beside the original: next token as paired bars, change of the residual stream by layer, what was re-routed.
import { escape, fixed, percent, plural, word } from "../common/format.js";
import { SUPPRESS } from "../common/frame.js";
import { hatch, swatch } from "../common/hatch.js";
import { unpack } from "../common/wire.js";

const BAR = 190;
const LISTED = 6;

export class Comparison {
  constructor(content, buffers) {
    this.facts = content;
    const arrays = unpack(content.arrays, buffers);
    Object.assign(this, { residual: arrays.residual, chances: arrays.chances, kl: arrays.kl[0] });
    [this.L, this.T] = content.arrays.find((a) => a.name === "residual").shape;
  }

  change(layer, token) {
    return this.residual[layer * this.T + token - this.facts.first];
  }
}

export function forkPanel(view) {
  const { comparison: c, moment, live, uid } = view;
  if (!moment.facts.run.forked)
    return `${likely(moment)}<p class="pad q">No fork yet. <b>K</b> makes one here; any change made in this view makes one by itself and leaves the original as it is.</p>${live ? `<button type="button" class="btn" data-act="fork" ${SUPPRESS}>Fork here<kbd>K</kbd></button>` : ""}`;
  const side = `<span class="seg" role="group" aria-label="Whose buffers are shown">${["original", "fork"].map((which) => `<button type="button" data-look="${which}" aria-pressed="${moment.facts.run.look === which}" ${live ? "" : "disabled"} ${SUPPRESS}>${which}</button>`).join("")}</span>`;
  const drop = live ? `<button type="button" class="btn low" data-act="drop" ${SUPPRESS}>Drop the fork</button>` : "";
  const bar = `<div class="line"><span class="q">Show the buffers of</span>${side}<span class="sp"></span>${drop}</div>`;
  if (!c) return bar;
  const id = `${uid}-hatch`;
  const last = moment.head.ids.length - 1;
  const after = word(moment.head.texts[last], moment.head.ids[last]);
  return `${bar}<div class="pair"><div><div class="lg"><span>Next token after <span class="m">${escape(after)}</span>:</span><span>${swatch(id + "a", false)} original</span><span>${swatch(id + "b", true)} fork</span></div>${bars(c, id)}</div><div class="grow"><div class="q small">change of the residual stream at token ${view.token}, by layer</div>${residual(view, c, id)}<div class="verdict">${verdict(c)}</div></div></div>${view.allChanges ? changes(c) : ""}`;
}

// At the end of a pass, before there is a fork: what comes next.
function likely(moment) {
  const { likely: tokens } = moment.facts;
  if (!tokens?.length) return "";
  const last = moment.head.ids.length - 1;
  const rows = tokens.map(([text, p]) => `<tr><th scope="row" class="m">${escape(word(text, -1, 12))}</th><td>${p === null ? "NaN" : p < 0.005 ? "&lt;0.01" : fixed(p)}</td><td><span class="likely" style="width:${Math.round(BAR * (p ?? 0))}px"></span></td></tr>`);
  return `<table class="likelies"><caption>Next token after <span class="m">${escape(word(moment.head.texts[last], moment.head.ids[last]))}</span></caption><tbody>${rows.join("")}</tbody></table>`;
}

function bars(c, id) {
  const order = c.facts.tokens.map((_, i) => i).sort((a, b) => Math.max(c.chances[2 * b], c.chances[2 * b + 1]) - Math.max(c.chances[2 * a], c.chances[2 * a + 1]) || a - b).slice(0, LISTED);
  const rows = order.map((i) => [word(c.facts.tokens[i][1], c.facts.tokens[i][0], 9), c.chances[2 * i], c.chances[2 * i + 1]]);
  const rest = [0, 1].map((which) => Math.max(0, 1 - order.reduce((sum, i) => sum + c.chances[2 * i + which], 0)));
  rows.push(["others", ...rest]);
  const top = Math.max(...rows.flatMap(([, p, q]) => [p, q]).filter(Number.isFinite), 1e-9);
  const long = (p) => (Number.isFinite(p) ? Math.max(1, (BAR * p) / top) : 0);
  const words = (p) => (p > 0 && p < 0.005 ? "<0.01" : fixed(p));
  const drawn = rows.map(([name, p, q], i) => {
    const y = i * 27;
    return `<text class="m k" x="66" y="${y + 17}" text-anchor="end" style="font-size:12px">${escape(name)}</text><rect x="74" y="${y + 2}" width="${long(p)}" height="9" fill="var(--ink)" fill-opacity=".8"/><text class="k" x="${80 + long(p)}" y="${y + 11}">${escape(words(p))}</text><rect x="74.6" y="${y + 13}" width="${Math.max(1, long(q) - 1.2)}" height="8" fill="url(#${id})" stroke="var(--ink)" stroke-width="1.2"/><text class="k" x="${80 + long(q)}" y="${y + 22}">${escape(words(q))}</text>`;
  });
  const label = rows.map(([name, p, q]) => `${name} ${words(p)} against ${words(q)}`).join(", ");
  return `<svg class="chances" width="305" height="${rows.length * 27 + 2}" role="img" aria-label="Next token, original against fork: ${escape(label)}">${hatch(id)}${drawn.join("")}</svg>`;
}

function residual(view, c, id) {
  const step = Math.min(37, 240 / c.L);
  const values = Array.from({ length: c.L }, (_, l) => c.change(l, view.token));
  const top = Math.max(...values.filter(Number.isFinite), 1e-9);
  const named = step >= 30;
  const drawn = values.map((v, l) => {
    const x = 4 + l * step;
    const h = Number.isFinite(v) ? (52 * v) / top : 52;
    const label = !named ? "" : Number.isNaN(v) || v === undefined ? "NaN" : v === 0 ? "0" : percent(v, v < 0.001 ? 3 : v < 0.01 ? 2 : v < 0.1 ? 1 : 0);
    const bar = v === 0 ? "" : `<rect x="${x}" y="${70 - h}" width="${step * 0.66}" height="${h}" fill="url(#${id}r)" stroke="var(--ink)" stroke-width="${named ? 1.2 : 0.6}"/>`;
    return `${bar}<text class="k" x="${x + step * 0.33}" y="${66 - (v === 0 ? 0 : h)}" text-anchor="middle" style="font-size:${label.length > 5 ? 9 : 11}px">${label}</text>${named || l % 8 === 0 ? `<text x="${x + step * 0.33}" y="84" text-anchor="middle"${l === view.moment.place.layer ? ' class="b"' : ""}>${l}</text>` : ""}`;
  });
  return `<svg class="residual" width="${Math.max(60, 8 + c.L * step)}" height="90" viewBox="0 0 ${Math.max(60, 8 + c.L * step)} 90" role="img" aria-label="Change of the residual stream by layer, up to ${percent(top, 2)}">${hatch(id + "r")}<path d="M0 70.5H${8 + c.L * step}" stroke="var(--line2)"/>${drawn.join("")}</svg>`;
}

function verdict(c) {
  if (c.facts.identical) return "<b>=</b> Same bits everywhere: nothing that was changed is read by anything, or nothing was changed.";
  const best = (which) => c.facts.tokens[c.facts.tokens.map((_, i) => i).reduce((a, b) => (c.chances[2 * b + which] > c.chances[2 * a + which] ? b : a), 0)];
  const [a, b] = [best(0), best(1)];
  const name = (t) => `<b class="m">${escape(word(t[1], t[0]))}</b>`;
  const kl = Number.isNaN(c.kl) ? "unknown (NaN in the logits)" : c.kl < 1e-3 && c.kl > 0 ? c.kl.toExponential(1).replace("-", "−") : fixed(c.kl, 3);
  const top = a[0] === b[0] ? `Top token is the same, ${name(a)}.` : `Top token turns from ${name(a)} to ${name(b)}.`;
  const flips = c.facts.rerouted.map(([layer, n]) => `<b>${n}</b> in layer ${layer}`).join(", ");
  const routed = flips ? `Routing changed for ${flips.replace("</b> in", `</b> of ${plural(c.T, "token")} in`)}.` : "No token is routed to other experts.";
  return `KL <b>${kl}</b> nats. ${top}<br>${routed}${c.facts.flips.length ? ` <button type="button" class="btn low" data-act="allchanges" ${SUPPRESS}>Show all changes</button>` : ""}`;
}

function changes(c) {
  const set = (ids) => ids.map((e) => (e < 0 ? "–" : e)).join(", ");
  const rows = c.facts.flips.map(([layer, token, before, after]) => `<tr><td>${layer}</td><td>${token}</td><td>${set(before)}</td><td>${set(after)}</td></tr>`);
  return `<div class="all" tabindex="0" role="region" aria-label="Re-routed tokens" ${SUPPRESS}><table class="t"><thead><tr><th>layer</th><th>token</th><th>experts before</th><th>in the fork</th></tr></thead><tbody>${rows.join("")}</tbody></table></div>`;
}
