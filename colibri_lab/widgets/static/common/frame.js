// The frame that views share: buttons, the line of a fault, the last line with its code, Copy and keys, the list of keys.

export const SUPPRESS = 'data-lm-suppress-shortcuts="true"'; // on each focusable element itself: JupyterLab asks no parent
export const button = (name, words, extra = "", title = "") => `<button type="button" class="btn ${extra}" data-act="${name}" ${title && `title="${title}"`} ${SUPPRESS}>${words}</button>`;

export const fault = () => `<div class="fault" role="alert" hidden><p><span class="badge bad">ERROR</span> <span class="faulttext"></span></p><div>${button("traceback", "Show traceback", "low")}${button("copytrace", "Copy", "low")}${button("dismiss", "Dismiss", "low")} <span class="q">The view keeps its last good state.</span></div><pre class="trace" hidden tabindex="0" ${SUPPRESS}></pre></div>
<p class="say" aria-live="polite"><span class="q">Waiting for data from Python … If nothing comes, run the cell again.</span></p>`;

const pressed = (key) => `<span class="kbd">${key}</span>`;

// `label` says what the code is of; `hints` are the few keys that stand there, `keys` all of them: [key, words].
export const lastLine = (label, hints, keys) => `<div class="foot"><span>${label}</span><code class="code here"></code>${button("copy", "Copy", "low")}<span class="copied" role="status"></span><span class="sp"></span><span class="hints">${hints.map(([key, words]) => `${pressed(key)} ${words}`).join(" ")}</span></div>
<div class="help card" role="dialog" aria-label="Keys" hidden><h3>Keys</h3><table>${keys.map(([key, words]) => `<tr><td>${pressed(key)}</td><td>${words}</td></tr>`).join("")}</table>${button("closehelp", "Close", "low")}</div>`;

const COMMON = ["facts", "live", "work", "worktext", "said", "fault", "faulttext", "trace", "say", "body", "twins", "copied", "hints", "help"];

// The parts of a frame by their class: those of every view, and `own`; buttons by what they do.
export function partsOf(root, own) {
  const parts = Object.fromEntries([...COMMON, ...own].map((name) => [name, root.querySelector("." + name)]));
  parts.code = root.querySelector("code.here");
  parts.actions = Object.fromEntries(Array.from(root.querySelectorAll("[data-act]"), (node) => [node.dataset.act, node]));
  return parts;
}
