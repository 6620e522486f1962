// The frame of the view: title, sentence, cards, last line. Built once; everything else is patched into it.
import { SUPPRESS, button, fault, lastLine, partsOf } from "../common/frame.js";

const KEYS = [
  ["0", "the origin; with several, the first"],
  ["→ ←", "in the tree: the next step, back; in the map: the layer"],
  ["↑ ↓", "in the tree: the box above, below; in the map: the tap"],
  ["N P", "next, previous origin"],
  ["Home End", "in the map: the first, last layer"],
  ["PageUp PageDown", "token before, after"],
  ["Enter", "on a cure: runs it"],
  ["Esc", "stops a run, else leaves the panel"],
  ["?", "this list"],
];
const HINTS = [["0", "origin"], ["→", "next step"], ["←", "back"], ["?", "keys"]];

export function buildShell(root) {
  root.innerHTML = `
<div class="head"><b>NaN Tracer</b><span class="facts"></span><span class="sp"></span><span class="live" data-state="idle"></span>${button("recipe", "Copy as code")}${button("html", "Save HTML")}</div>
<div class="work" role="status"><span class="worktext"></span><span class="said"></span><span class="meter" hidden><span></span></span>${button("stop", "Stop<kbd>Esc</kbd>", "low")}</div>
${fault()}
<div class="body" hidden>
<div class="two"><section class="card mapcard" aria-label="Where values stop being finite"><h3>Where values stop being finite</h3><div class="map" tabindex="0" role="application" aria-label="Taps by layer" ${SUPPRESS}></div><div class="lg mapkey"></div><p class="tapsay" aria-live="polite"></p></section>
<section class="card waycard" aria-label="From the origin to the ruined logits"><h3><span class="waytitle"></span><small class="wayremark"></small></h3><div class="origins"></div><div class="tree" tabindex="0" role="application" aria-label="Steps from the origin" ${SUPPRESS}></div><div class="wayends"></div></section></div>
<div class="half mt"><section class="card operation" aria-label="The operation that broke"><h3><span class="optitle"></span><small class="m opremark"></small></h3><div class="opbody"></div></section>
<section class="card headroom" aria-label="Headroom"><h3>Headroom<small>how many doublings are left before overflow</small></h3><div class="curve"></div><p class="q small curvewords"></p></section></div>
<section class="card mt curecard" aria-label="What would cure it"><h3>What would cure it<small>each row replays the run once, with one change</small></h3><div class="cures"></div></section>
<div class="sr twins"></div>
</div>
${lastLine("Selected", HINTS, KEYS)}`;
  const parts = partsOf(root, ["waycard", "operation", "mapcard", "map", "mapkey", "tapsay", "two", "waytitle", "wayremark", "origins", "tree", "wayends", "optitle", "opremark", "opbody", "curve", "curvewords", "curecard", "cures"]);
  parts.meter = root.querySelector(".meter span");
  return parts;
}
