// The frame of the view: title, controls, sentence, cards, last line. Built once; everything else is patched into it.
import { SUPPRESS, button, fault, lastLine, partsOf } from "../common/frame.js";

const KEYS = [
  ["← →", "capacity; in the timeline and the KV cache the token, in the memory map the layer"],
  ["↑ ↓", "capacity; in the timeline and the memory map the expert"],
  ["Home End", "the smallest, largest cache; in the timeline the first, last token"],
  ["PageUp PageDown", "a cache ten steps larger, smaller; in the timeline ten tokens back, on"],
  ["P", "next policy"],
  ["S", "per layer or global"],
  ["M N", "next, previous miss"],
  ["0–9", "that expert, up to 10 experts"],
  ["X", "a number, then Enter: that expert"],
  ["Esc", "stops a run, else leaves the panel"],
  ["?", "this list"],
];
const HINTS = [["←→", "capacity"], ["P", "policy"], ["M", "next miss"], ["?", "keys"]];

export function buildShell(root) {
  root.innerHTML = `
<div class="head"><b>Cache Lab</b><span class="facts"></span><span class="sp"></span><span class="live" data-state="idle"></span>${button("recipe", "Copy as code")}${button("html", "Save HTML")}</div>
<div class="ctl" hidden><span class="policies"></span><span class="capacity"><label class="capname"></label> <input class="range" type="range" aria-label="Capacity" ${SUPPRESS}> <b class="capnow"></b></span><span class="scopes"></span><span class="prefetches"></span><span class="passes"></span></div>
<div class="work" role="status"><span class="worktext"></span><span class="said"></span><span class="meter" hidden><span></span></span>${button("stop", "Stop<kbd>Esc</kbd>", "low")}</div>
${fault()}
<div class="body" hidden>
<div class="two"><section class="card curvecard" aria-label="Misses and speed by cache size"><h3>Misses and speed by cache size<small>drag the handle, or ← →</small></h3><div class="curves" tabindex="0" role="slider" aria-label="Capacity" aria-valuemin="0" aria-valuemax="0" aria-valuenow="0" ${SUPPRESS}></div><p class="q small speednote"></p></section>
<section class="card counters" aria-label="Counters"><h3>Counters<small class="countersremark"></small></h3><div class="countertable"></div><h3 class="saysgap">What the numbers say</h3><ul class="findings"></ul></section></div>
<section class="card mt timecard" aria-label="Cache of a layer, token by token"><div class="timehead"><h3><span class="timetitle"></span><small class="timeremark"></small></h3><span class="sp"></span><span class="layers"></span><label class="numberlabel" hidden>Expert <input class="number" type="number" min="0" ${SUPPRESS}></label><span class="lg timekey"></span></div><div class="time" tabindex="0" role="application" aria-label="Timeline" ${SUPPRESS}></div><p class="misssay" aria-live="polite"></p></section>
<div class="three mt"><section class="card" aria-label="In memory now"><h3>In memory now<small>% of each expert’s pages</small></h3><div class="panel" data-place="residency"></div><p class="memorysay" data-place="residencysay" aria-live="polite"></p></section>
<section class="card" aria-label="What limits each stage"><h3>What limits each stage</h3><div class="panel" data-place="roofline"></div></section>
<section class="card" aria-label="In words"><h3>In words</h3><div class="panel" data-place="stagewords" aria-live="polite"></div></section></div>
<section class="card mt" aria-label="KV cache"><h3>KV cache<small>which keys the selected token uses</small></h3><p data-place="keyssay"></p><div class="panel" data-place="keys"></div></section>
<div class="sr twins"></div>
</div>
${lastLine("Selected", HINTS, KEYS)}`;
  const parts = partsOf(root, ["ctl", "policies", "capname", "range", "capnow", "scopes", "prefetches", "passes", "two", "curves", "speednote", "countersremark", "countertable", "findings", "timetitle", "timeremark", "timekey", "layers", "numberlabel", "number", "time", "misssay"]);
  parts.meter = root.querySelector(".meter span");
  parts.places = Object.fromEntries(Array.from(root.querySelectorAll("[data-place]"), (node) => [node.dataset.place, node]));
  return parts;
}
