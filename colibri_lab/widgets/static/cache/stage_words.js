// The profile in words, and the counters of the machine: a value, or why there is none.
import { escape } from "../common/format.js";

const NOWHERE = "not available here";

const stageWords = ({ words }) => words.map((sentence) => `<p>${escape(sentence).replace(/\*\*(.+?)\*\*/g, "<b>$1</b>")}</p>`).join("");

function counterTable({ counters }) {
  const cell = (text, reason) => `<td class="num${text === null ? " q" : ""}"${text === null ? ` title="${escape(reason)}"` : ""}>${escape(text ?? NOWHERE)}</td>`;
  const rows = counters.map(({ name, prefill, decode, reason }) => (prefill === null && decode === null ? `<tr><td>${escape(name)}</td><td class="num q" colspan="2" title="${escape(reason)}">${NOWHERE}</td></tr>` : `<tr><td>${escape(name)}</td>${cell(prefill, reason)}${cell(decode, reason)}</tr>`));
  return `<table class="t"><thead><tr><th>count</th><th class="num">prefill</th><th class="num">one token</th></tr></thead><tbody>${rows.join("")}</tbody></table>${reasons(counters)}`;
}

// Each reason once: several counters mostly share one.
function reasons(counters) {
  const why = [...new Set(counters.filter(({ reason }) => reason).map(({ reason }) => reason))];
  return why.map((reason) => `<p class="q small">${escape(`${NOWHERE[0].toUpperCase()}${NOWHERE.slice(1)}: ${reason}`)}</p>`).join("");
}

export const stageSay = {
  name: "stagewords",
  of: "roofline",
  html: (panel) => (panel?.points ? stageWords(panel) + counterTable(panel) : `<p class="q">${panel?.reason ? "Nothing can be measured here." : "What the machine does is said here once it has been measured."}</p>`),
};
