// The state of work and kernel, in the same words and places in every view.

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
