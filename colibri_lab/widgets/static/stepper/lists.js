// Breakpoints, watches and changes made, each a short list that can be added to.
import { escape, plural } from "../common/format.js";
import { SUPPRESS } from "../common/frame.js";
import { octagon } from "./pass_map.js";

const small = (act, words, label, extra = "") => `<button type="button" class="btn low x" data-act="${act}" ${extra} aria-label="${escape(label)}" title="${escape(label)}" ${SUPPRESS}>${words}</button>`;

export function breakpointList(points, live) {
  const rows = points.map((p) => {
    const hits = p.enabled ? (p.hits ? `hit ${p.hits}×` : "no hit yet") : "off";
    const name = escape(p.name);
    const mark = `<svg width="18" height="16" aria-hidden="true">${octagon(9, 8, 7, p.name, !p.enabled)}</svg>`;
    const toggle = `<button type="button" class="mark" data-act="toggle" data-name="${name}" aria-pressed="${p.enabled}" aria-label="Breakpoint ${name} ${p.enabled ? "on: switch off" : "off: switch on"}" ${live ? "" : "disabled"} ${SUPPRESS}>${mark}</button>`;
    return `<li class="${p.here ? "here" : ""}">${toggle}<span class="m">${escape(p.condition)}</span><span class="dots"></span>${p.here ? "<b>stopped here</b>" : ""}<span class="q">${hits}</span>${live ? small("unbreak", "×", `Remove breakpoint ${p.name}`, `data-name="${name}"`) : ""}</li>`;
  });
  return rows.join("") || '<li class="q">none</li>';
}

export function watchList(watches, live) {
  const rows = watches.map((w) => {
    const value = w.value === null ? '<span class="q">unknown here</span>' : `<span class="m">${escape(w.value)}</span>`;
    const of = w.token === null ? "" : `<span class="q">token ${w.token}</span>`;
    return `<li><span class="m">${escape(w.text)}</span><span class="dots"></span>${of}${value}${live ? small("unwatch", "×", `Remove watch ${w.text}`, `data-text="${escape(w.text)}"`) : ""}</li>`;
  });
  return rows.join("") || '<li class="q">none</li>';
}

export function changeList(edits, live) {
  const rows = edits.map(([, code], i) => {
    const last = i === edits.length - 1;
    const undo = last && live ? `<button type="button" class="btn low" data-act="undo" ${SUPPRESS}>Undo<kbd>U</kbd></button>` : "";
    return `<li><span aria-hidden="true">✎</span><span class="m wrap">${escape(code)}</span><span class="dots"></span>${undo}</li>`;
  });
  return rows.join("") || '<li class="q">none; E edits gates and experts, in a fork</li>';
}

export function changesRemark(edits, forked) {
  const own = edits.filter(([run]) => run === "original").length;
  if (!edits.length) return forked ? "fork and original are the same" : "";
  return own ? `${plural(own, "change")} of the original` : "fork only; the original is untouched";
}
