// The state of work and kernel, in the same words and places in every view.
import { escape } from "./format.js";
import { patch } from "./patch.js";

export const LIVE = { idle: "kernel idle", busy: "kernel busy", gone: "no kernel", lost: "connection lost", page: "saved page" };

export function showFault(parts, { text, traceback }) {
  parts.fault.hidden = false;
  parts.faulttext.textContent = text;
  parts.trace.textContent = traceback || "";
  parts.trace.hidden = true;
  parts.actions.traceback.hidden = parts.actions.copytrace.hidden = !traceback;
}

export function showHelp(parts, open) {
  parts.help.hidden = !open;
  if (open) {
    parts.help.back = document.activeElement;
    parts.actions.closehelp.focus();
  } else parts.help.back?.focus();
}

// The kernel's state, what runs and how far it is, and a fault. `why` says what goes on without a kernel; a view that never works has no Stop.
export function showWork({ parts, model, kernel, page, able }, why, stoppable) {
  const status = model.get("_status") ?? {};
  const working = status.state === "working" || status.state === "busy";
  const done = status.total ? status.done / status.total : 0;
  const { stop, html } = parts.actions;
  parts.live.textContent = LIVE[kernel];
  parts.live.dataset.state = kernel;
  html.disabled = !able;
  html.hidden = page;
  if (stop) {
    stop.hidden = !working;
    stop.disabled = !stoppable || !able;
    parts.meter.parentElement.hidden = !working || !status.total;
    parts.meter.style.width = `${100 * done}%`;
  }
  const words = why ? `<b class="bad">✗</b> ${escape(why)}` : working ? `${escape(status.text ?? "")}${status.total ? `, ${Math.round(100 * done)} %` : ""}` : status.state === "idle" ? escape(status.text ?? "") : "";
  patch(parts.worktext, words);
  if (status.state === "error") showFault(parts, status);
  else parts.fault.hidden = true;
}
