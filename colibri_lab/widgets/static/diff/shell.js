// The frame of the view: title, verdict, cards, last line. Built once; everything else is patched into it.
import { SUPPRESS, button, fault, lastLine, partsOf } from "../common/frame.js";

const KEYS = [
  ["0", "the first divergence"],
  ["N P", "next, previous flip"],
  ["← →", "in the map: the layer before, after; in the prediction: the token"],
  ["↑ ↓", "in the map: the tap above, below; in the list: the flip"],
  ["Home End", "the first, last layer; in the prediction the first, last token"],
  ["PageUp PageDown", "token before, after"],
  ["Enter", "on a row or an expert: select it"],
  ["Esc", "leave the panel"],
  ["?", "this list"],
];

const HINTS = [["←→", "layer"], ["↑↓", "tap"], ["N", "next flip"], ["0", "first divergence"], ["?", "keys"]];

export function buildShell(root) {
  root.innerHTML = `
<div class="head"><b>Diff View</b><span class="facts"></span><span class="sp"></span><span class="live" data-state="idle"></span>${button("recipe", "Copy as code")}${button("html", "Save HTML")}</div>
<div class="work" role="status"><span class="worktext"></span><span class="said"></span></div>
${fault()}
<div class="body" hidden>
<div class="two"><section class="card mapcard" aria-label="Where the two runs differ"><h3>Where the two runs differ</h3><div class="map" tabindex="0" role="application" aria-label="Error by tap and layer" ${SUPPRESS}></div><p class="tapsay" aria-live="polite"></p></section>
<section class="card why" aria-label="Why we think so"><h3>Why we think so</h3><div class="reasons"></div></section></div>
<section class="card mt flips" aria-label="Tokens routed differently"><h3>Tokens routed differently<small class="flipsremark"></small></h3><div class="fliplist"></div></section>
<div class="half mt"><section class="card values" aria-label="Values"><h3>Values<small class="valuesremark"></small></h3><div class="valuesbody"></div></section>
<section class="card prediction" tabindex="0" aria-label="What it does to the prediction" ${SUPPRESS}><h3>What it does to the prediction<small class="predictionremark"></small></h3><div class="kl"></div><div class="pair"><div class="next"></div><div class="grow nextwords"></div></div></section></div>
<div class="sr twins"></div>
</div>
${lastLine("Selected", HINTS, KEYS)}`;
  return partsOf(root, ["two", "mapcard", "map", "tapsay", "reasons", "flips", "flipsremark", "fliplist", "valuesremark", "valuesbody", "prediction", "predictionremark", "kl", "next", "nextwords"]);
}
