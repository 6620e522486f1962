// Why we think so: which experts differ, what was tried as an explanation, code that confirms it, how the tolerance was declared.
import { chip, escape } from "../common/format.js";
import { SUPPRESS } from "../common/frame.js";
import { ofExpert } from "../common/tap_map.js";
import { size } from "./words.js";

const SIGNS = { explains: "✓", tried: "✗", excluded: "–" };
const LISTED = 16; // experts
const TRIED = 5; // faults

export function whyCard(view) {
  const { facts } = view.store;
  return [byExpert(view), calm(facts), tried(view), confirm(facts), tolerance(facts), notes(facts)].filter(Boolean).join("");
}

// Rows that differ beyond tolerance, by expert: of the tap that is selected, else of the first divergence.
function byExpert(view) {
  const { store } = view;
  const path = ofExpert(view.path ?? "") ? view.path : store.facts.first?.path;
  const seen = path && ofExpert(path) ? store.seen.get(`${path} `) ?? store.values(path, view.expert) : null;
  if (!seen?.expert_rows) return "";
  const slots = store.slots(store.row(path).layer);
  const order = Array.from(seen.expert_rows.keys()).filter((e) => seen.expert_rows[e]);
  const many = order.length > LISTED;
  if (many) order.sort((a, b) => seen.expert_beyond[b] / seen.expert_rows[b] - seen.expert_beyond[a] / seen.expert_rows[a] || a - b);
  const bad = order.filter((e) => seen.expert_beyond[e]);
  const boxes = order.slice(0, LISTED).map((e) => {
    const on = view.path === path && view.expert === e;
    return `<button type="button" class="ex${on ? " on" : ""}" data-expert="${e}" data-of="${path}" aria-pressed="${on}" aria-label="Expert ${e}: ${seen.expert_beyond[e]} of ${seen.expert_rows[e]} rows differ" ${SUPPRESS}>${chip({ ...view, slots }, e)} <span class="${seen.expert_beyond[e] ? "differ" : "q"}">${seen.expert_beyond[e]}/${seen.expert_rows[e]}</span></button>`;
  });
  const rest = many ? `<span class="q small">and ${order.length - LISTED} more, ${bad.length > LISTED ? `${bad.length - LISTED} of them differ` : "none of them differs"}</span>` : "";
  return `<p class="lead">Rows that differ in <span class="m">${escape(path)}</span>, by expert:</p><div class="experts">${boxes.join("")}${rest}</div>`;
}

const CALM = {
  identical: "There is nothing to explain.",
  tie: "What differs follows from near-ties; each is explained below.",
  downstream: "What differs was changed on purpose; what follows from it is no fault.",
  defect: "No fault was tried as an explanation.",
};
const calm = ({ verdict, diagnosis }) => (diagnosis ? "" : `<p class="lead">${CALM[verdict]}</p>`);

// What explains it, then what leaves least over; what is excluded without a trial stands in one line.
function tried({ store: { facts }, allTried }) {
  const attempts = facts.diagnosis?.attempts ?? [];
  if (!attempts.length) return "";
  const by = (state) => attempts.filter((a) => a.state === state);
  const left = (a) => a.left ?? Infinity;
  const ordered = [...by("explains"), ...by("tried").sort((a, b) => left(a) - left(b))];
  const shown = allTried ? ordered : ordered.slice(0, TRIED);
  const rows = shown.map((a) => line(a.state, a.words, [a.left === null ? "" : `left over ${size(a.left, 2)}`, a.note].filter(Boolean).join("; ")));
  const excluded = by("excluded");
  const hidden = ordered.length > TRIED || excluded.length > 2;
  if (allTried || excluded.length < 3) rows.push(...excluded.map((a) => line("excluded", a.words, a.note || "excluded")));
  else rows.push(line("excluded", excluded.map((a) => a.words).join("; "), "excluded"));
  const more = hidden ? `<button type="button" class="link small" data-act="${allTried ? "fewtried" : "alltried"}" ${SUPPRESS}>${allTried ? "Show few" : `Show all ${attempts.length} with their reasons`}</button>` : "";
  return `<h3 class="gap">Faults tried</h3><table class="tried"><tbody>${rows.join("")}</tbody></table>${more}`;
}

function line(state, words, says) {
  const name = state === "explains" ? `<b>${escape(words)}</b>` : escape(words);
  return `<tr><td class="sign${state === "explains" ? " ok" : ""}"><span aria-hidden="true">${SIGNS[state]}</span><span class="sr">${state}</span></td><td>${name}</td><td class="q">${escape(says)}</td></tr>`;
}

function confirm({ diagnosis }) {
  if (!diagnosis?.confirm) return "";
  return `<h3 class="gap">Confirm it yourself <button type="button" class="btn low" data-act="copyconfirm" ${SUPPRESS}>Copy</button></h3><pre class="confirm" tabindex="0" role="region" aria-label="Code that confirms it" ${SUPPRESS}>${escape(diagnosis.confirm)}</pre>`;
}

const tolerance = ({ tolerance: [, words] }) => (words ? `<p class="q small gap">Tolerance: ${escape(words)}</p>` : "");

function notes({ notes: said }) {
  if (!said.length) return "";
  return `<h3 class="gap">Notes</h3><ul class="notes">${said.map((note) => `<li>${escape(note)}</li>`).join("")}</ul>`;
}
