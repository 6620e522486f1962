// What would cure it: one row for each change, tried or not.
import { escape, plural } from "../common/format.js";
import { SUPPRESS } from "../common/frame.js";
import { number } from "./store.js";
import { bitWord, bitsText } from "./words.js";

export function cureTable(view) {
  const { store, live, running, chosen } = view;
  if (store.facts.clean) return '<p class="q pad">Nothing needs a cure.</p>';
  if (!store.cures.length) return `<p class="q pad">${escape(store.facts.no_cures || "No change can be tried on this run.")}</p>`;
  const rows = store.cures.map((row, i) => (row.of === chosen ? cureRow(row, i, { live, running, best: firstGone(store, chosen) }) : ""));
  const body = rows.join("") || '<tr><td colspan="5" class="q">No change can be tried for this origin.</td></tr>';
  return `<table class="t curetable"><thead><tr><th>change</th><th>NaN and Inf</th><th>tightest headroom after,<br>in that tap's format</th><th>prediction (KL, nats)</th><th class="num">try</th></tr></thead><tbody>${body}</tbody></table>`;
}

// The first cure that works: what the sentence recommends.
const firstGone = (store, chosen) => store.cures.findIndex((row) => row.gone && row.of === chosen);

function cureRow(row, i, { live, running, best }) {
  const working = running === i;
  const tried = row.gone !== null;
  const why = tried ? "" : row.note ? `not tried: ${row.note.replace(/^not tried: /, "")}` : "not tried yet";
  const outcome = working ? "<b>running …</b>" : !tried ? `<span class="q">${escape(why)}</span>` : row.gone ? '<b class="okc">✓ gone</b>' : `<b class="bad">✗ still there</b>${row.left ? ` <span class="q">${escape(row.left)}</span>` : ""}`;
  const bits = number(row.bits);
  const room = bits === null || bits === undefined ? "" : `${bits < 2 ? '<b class="warn" title="under 2 bits">!</b> ' : ""}${bitsText(bits)} ${bitWord(bits)}${row.where ? `, ${escape(row.where)}` : ""}`;
  const kl = number(row.kl);
  const prediction = kl === null || kl === undefined ? "" : `${kl > 0 && kl < 0.00005 ? "<0.0001" : Number.isFinite(kl) ? kl.toFixed(4) : "NaN"}${row.rerouted ? `; ${plural(row.rerouted, "route")} changed` : ""}`;
  const button = `<button type="button" class="btn low" data-cure="${i}" aria-label="${tried ? "Run again" : "Run"}: ${escape(row.change)}" ${row.runs && live && running === null ? "" : "disabled"} ${SUPPRESS}>${tried ? "Run again" : "Run"}</button>`;
  const note = tried && row.note ? `<br><span class="q">${escape(row.note)}</span>` : "";
  return `<tr class="${i === best ? "on" : ""}"><td title="${escape(row.code)}">${escape(row.change)}${note}</td><td>${outcome}</td><td>${room}</td><td>${prediction}</td><td class="num">${button}</td></tr>`;
}
