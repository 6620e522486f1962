// The frame of the view: title, prompt, controls, sentence, cards, last line. Built once; everything else is patched into it.

const KEYS = [
  ["← →", "token before, after"],
  ["↑ ↓", "layer before, after"],
  ["Home End", "first, last token"],
  ["PageUp PageDown", "10 tokens back, on"],
  ["0–9", "expert with this number (up to 10 experts)"],
  ["X", "type an expert's number, then Enter"],
  ["Enter", "the selected expert's strongest token"],
  ["C", "colour text by expert, entropy, margin"],
  ["P", "with more than 8 experts: pin a colour to the selected one, or take it off"],
  ["M", "next near-tie"],
  ["Shift Enter", "run the prompt (inside the prompt box)"],
  ["Esc", "stop a run; else leave the panel"],
  ["?", "this list"],
];

const SUPPRESS = 'data-lm-suppress-shortcuts="true"'; // on each focusable element itself: JupyterLab asks no parent
const button = (name, words, extra = "", title = "") => `<button type="button" class="btn ${extra}" data-act="${name}" ${title && `title="${title}"`} ${SUPPRESS}>${words}</button>`;

export function buildShell(root, uid) {
  const keys = KEYS.map(([k, what]) => `<tr><td><span class="kbd">${k}</span></td><td>${what}</td></tr>`).join("");
  root.innerHTML = `
<div class="head"><b>Routing Explorer</b><span class="facts"></span><span class="sp"></span><span class="live" data-state="idle"></span>${button("recipe", "Copy as code")}${button("html", "Save HTML")}</div>
<div class="row promptrow"><textarea class="prompt" rows="1" aria-label="Prompt" spellcheck="false" ${SUPPRESS}></textarea>${button("run", "Run<kbd>⇧⏎</kbd>", "pri", "Starts afresh with the prompt")}${button("generate", "Generate 32", "", "Continues the text below by up to 32 tokens, again and again; a prompt not yet run is run first")}${button("stop", "Stop")}</div>
<div class="ctl"><span><label for="${uid}-layer">Layer</label> <input id="${uid}-layer" class="layer" type="range" min="0" max="0" value="0" ${SUPPRESS}> <b class="layername"></b> <span class="q layerspan"></span></span><span><span class="q" id="${uid}-by">Colour text by</span> <span class="seg" role="group" aria-labelledby="${uid}-by">${["expert", "entropy", "margin"].map((by) => `<button type="button" data-by="${by}" aria-pressed="false" ${SUPPRESS}>${by}</button>`).join("")}</span></span><span class="numberbox" hidden><label for="${uid}-x">Expert</label> <input id="${uid}-x" class="number" inputmode="numeric" size="4" ${SUPPRESS}></span><span class="said" role="status"></span></div>
<div class="work" role="status" hidden><span class="worktext"></span><div class="meter"><span></span></div></div>
<div class="fault" role="alert" hidden><p><span class="badge bad">ERROR</span> <span class="faulttext"></span></p><div>${button("traceback", "Show traceback", "low")}${button("copytrace", "Copy", "low")}${button("dismiss", "Dismiss", "low")} <span class="q">The view keeps its last good state.</span></div><pre class="trace" hidden tabindex="0" ${SUPPRESS}></pre></div>
<p class="say" aria-live="polite"></p>
<div class="body">
<div class="row top"><section class="card strip" aria-label="Text"><div class="tokens" role="listbox" aria-label="Tokens" tabindex="0" ${SUPPRESS}></div><div class="legend lg"></div></section><section class="card tcard" aria-label="Token"></section></div>
<section class="card mt" aria-label="Maps"><div class="maps"><canvas aria-hidden="true"></canvas><canvas aria-hidden="true"></canvas><canvas class="top" tabindex="0" role="application" data-testid="maps" ${SUPPRESS}></canvas></div></section>
<section class="card mt ecard" aria-label="Expert"></section>
<div class="sr twins"></div>
</div>
<div class="empty card" hidden><p></p></div>
<div class="foot"><span>Selected</span><code class="code"></code>${button("copy", "Copy", "low")}<span class="copied" role="status"></span><span class="sp"></span><span class="hints"></span></div>
<div class="help card" role="dialog" aria-label="Keys" hidden><h3>Keys</h3><table>${keys}</table>${button("closehelp", "Close", "low")}</div>`;
  const find = (selector) => root.querySelector(selector);
  const names = ["facts", "live", "prompt", "layer", "layername", "layerspan", "numberbox", "number", "work", "worktext", "fault", "faulttext", "trace", "say", "body", "strip", "tokens", "tcard", "maps", "ecard", "twins", "empty", "code", "said", "copied", "hints", "help"];
  const parts = Object.fromEntries(names.map((name) => [name, find("." + name)]));
  parts.meter = find(".meter span");
  parts.top = find("canvas.top");
  parts.actions = Object.fromEntries(Array.from(root.querySelectorAll("[data-act]"), (node) => [node.dataset.act, node]));
  parts.by = Array.from(root.querySelectorAll("[data-by]"));
  return parts;
}
