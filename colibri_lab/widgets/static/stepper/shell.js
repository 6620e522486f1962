// The frame of the view: title, transport, sentence, cards, last line. Built once; everything else is patched into it.
import { SUPPRESS, button, fault, lastLine, partsOf } from "../common/frame.js";

const KEYS = [
  [". ,", "step on, back, by the unit"],
  ["1 2 3 4", "unit: stage, expert, layer, token"],
  ["R", "type a condition to run to; Enter runs, empty means the next breakpoint"],
  ["F", "finish: run to the end, past breakpoints"],
  ["Esc", "stop a run; else leave the field or panel"],
  ["↑ ↓", "token before, after (in the map: the cell above, below)"],
  ["← →", "in the map: the layer before, after"],
  ["Enter", "in the map: run to the cell, or go back to it"],
  ["B", "breakpoint at the cell, or where the walk stands; again takes it off"],
  ["E", "edit: gates and experts of the token; in the buffer panel its values"],
  ["K", "make a fork; then show the other run"],
  ["U", "undo the last change"],
  ["?", "this list"],
];

const HINTS = [[".", "step"], [",", "back"], ["1–4", "unit"], ["B", "breakpoint"], ["K", "fork"], ["E", "edit"], ["?", "keys"]];

const adder = (act, label) => `<div class="add"><input class="m" data-add="${act}" aria-label="${label}" placeholder="${label}" spellcheck="false" ${SUPPRESS}>${button(act, "Add", "low")}</div>`;

export function buildShell(root) {
  const units = ["stage", "expert", "layer", "token"].map((u, i) => `<button type="button" data-unit="${u}" aria-pressed="false" title="${i + 1}" ${SUPPRESS}>${u}</button>`).join("");
  root.innerHTML = `
<div class="head"><b>Token Stepper</b><span class="facts"></span><span class="sp"></span><span class="badge warn forks" hidden>1 fork</span><span class="live" data-state="idle"></span>${button("recipe", "Copy as code")}${button("html", "Save HTML")}</div>
<div class="tbar"><span class="seg" role="group" aria-label="Step unit">${units}</span>${button("back", "◀ Back<kbd>,</kbd>")}${button("step", "Step ▶<kbd>.</kbd>", "pri")}<span class="sep"></span>${button("run", "Run to<kbd>R</kbd>")}<input class="condition" aria-label="Condition" placeholder="next breakpoint, or a condition: layer == 3 and margin &lt; 0.05" spellcheck="false" ${SUPPRESS}><span class="sep"></span>${button("finish", "Finish<kbd>F</kbd>")}${button("stop", "Stop")}</div>
<div class="work" role="status"><span class="worktext"></span><span class="said"></span><div class="meter" hidden><span></span></div></div>
${fault()}
<div class="body" hidden>
<div class="two"><section class="card" aria-label="Forward pass"><h3>Forward pass<small class="count"></small></h3><div class="map" tabindex="0" role="application" aria-label="Map of the forward pass" ${SUPPRESS}></div></section>
<section class="card lists" aria-label="Breakpoints, watches, changes"><h3>Breakpoints<small>B sets one on the focused cell</small></h3><ul class="breaks"></ul>${adder("break", "stop when: nonfinite &gt; 0")}<h3 class="gap">Watches</h3><ul class="watches"></ul>${adder("watch", "watch: margin")}<h3 class="gap">Changes made<small class="whose"></small></h3><ul class="changes"></ul></section></div>
<section class="card mt flow" tabindex="0" role="application" aria-label="Layer" ${SUPPRESS}><h3><span class="flowtitle"></span><small>every number is read from the buffers of this moment</small><span class="sp"></span><span class="flowtools"></span></h3><div class="editor" hidden></div><div class="picture"></div></section>
<div class="half mt"><section class="card bufs" tabindex="0" aria-label="Buffers" ${SUPPRESS}><h3>Buffers in reach<small>Enter opens, E edits what is still to be read</small></h3><div class="table"></div><div class="detail"></div></section>
<section class="card forkcard" aria-label="Fork"><h3>Fork beside the original<small class="forkwords"></small></h3><div class="forkpanel"></div></section></div>
<div class="sr twins"></div>
</div>
${lastLine("Here", HINTS, KEYS)}`;
  const parts = partsOf(root, ["forks", "condition", "count", "map", "breaks", "watches", "whose", "changes", "flow", "flowtitle", "flowtools", "editor", "picture", "bufs", "table", "detail", "forkwords", "forkpanel"]);
  parts.meter = root.querySelector(".meter span");
  parts.units = Array.from(root.querySelectorAll("[data-unit]"));
  return parts;
}
