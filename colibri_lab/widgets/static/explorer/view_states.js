// What the view says about work, faults, an empty session, and a kernel that cannot answer. The same words and places in every view.
import { count, escape } from "../common/format.js";
import { LIVE, showFault } from "../common/states.js";

const WHY = {
  gone: "No kernel. Selecting, colouring and sliding work on the data already here; run the cell again to reconnect.",
  lost: "The connection to the kernel is lost; selecting, colouring and sliding go on.",
  page: "A saved page: selecting, colouring and sliding work; running needs Python.",
};

// `stoppable`: whether Stop reaches the work.
export function showStatus(parts, store, status, kernel, stoppable) {
  const { state } = status;
  const working = state === "working";
  const waiting = state === "busy";
  const able = kernel === "idle" || kernel === "busy";
  const runs = Boolean(store?.facts.runs);
  parts.live.textContent = LIVE[kernel];
  parts.live.dataset.state = kernel;
  parts.live.title = WHY[kernel] ?? "";
  const { run, generate, stop, html } = parts.actions;
  const focused = parts.say.getRootNode().activeElement;
  const mine = focused === run || focused === generate || focused === parts.prompt;
  run.disabled = !able || !runs || working || waiting;
  generate.disabled = run.disabled;
  stop.disabled = !able || !stoppable || !(working || waiting);
  html.disabled = !able;
  if (!stop.disabled && mine) stop.focus();
  else if (focused === stop && stop.disabled) (run.disabled ? parts.tokens : run).focus();
  html.hidden = kernel === "page";
  parts.prompt.disabled = !runs || !able;
  parts.prompt.placeholder = runs ? "Type a prompt, then press Run" : store?.facts.why_not ?? "";
  if (!runs && store) parts.prompt.value = "";
  const ended = state === "idle" && status.text; // how the last work ended, until the next begins
  parts.work.hidden = !(working || waiting || ended) && able;
  parts.work.classList.toggle("nokernel", !able);
  parts.body.classList.toggle("dimmed", working);
  if (!able) parts.worktext.innerHTML = kernel === "page" ? "" : `<b class="bad">✗</b> ${escape(WHY[kernel]).replace("No kernel.", "<b>No kernel.</b>")}`;
  else if (working) parts.worktext.innerHTML = progress(status, stoppable, Boolean(store?.T));
  else if (waiting || ended) parts.worktext.textContent = status.text;
  if (kernel === "page") parts.work.hidden = true;
  parts.meter.parentElement.hidden = !able || !status.total;
  parts.meter.style.width = `${status.total ? (100 * status.done) / status.total : 0}%`;
  if (state === "error") showFault(parts, status);
  else parts.fault.hidden = true;
  showEmpty(parts, store);
}

function progress(status, stoppable, picture) {
  const of = status.total ? `, <b>${count(status.done)} of ${count(status.total)}</b> tokens` : "";
  const left = status.seconds_left > 0 ? `, ${status.seconds_left} s left` : "";
  const how = stoppable ? "Stop ends it within a second." : "A cell is running this: stop it with the kernel’s own interrupt (■, or I I).";
  return `${escape(status.text)}${of}${left}. <span class="q">${how}${picture ? " The picture of the previous run stays, dimmed." : ""}</span>`;
}

function showEmpty(parts, store) {
  const nothing = !store || !store.T;
  parts.body.hidden = parts.say.hidden = nothing;
  parts.empty.hidden = !nothing;
  for (const node of [parts.code, parts.actions.copy, parts.actions.recipe, parts.code.previousElementSibling]) node.hidden = nothing;
  if (!store) parts.empty.firstElementChild.innerHTML = '<span class="q">Waiting for data from Python … If nothing comes, run the cell again.</span>';
  else if (nothing)
    parts.empty.firstElementChild.innerHTML = store.facts.runs
      ? 'Nothing has run yet. Type a prompt and press <b>Run</b>, or open a trace: <code class="code">lab.RoutingExplorer(lab.load_trace("run.safetensors"))</code>'
      : "This trace holds no tokens.";
}
