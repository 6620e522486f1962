// What the view says about work, faults, a saved page, and a kernel that cannot answer.
import { escape } from "../common/format.js";
import { interrupter } from "../common/kernel.js";
import { LIVE, showFault } from "../common/states.js";
import { LATE } from "./actions.js";

const WHY = { gone: "No kernel. What is shown stays; run the cell again to go on.", lost: "The connection to the kernel is lost.", page: "" };

export function showWork(stepper) {
  const { parts, model, view } = stepper;
  const status = model.get("_status");
  const { state } = status;
  const able = stepper.able();
  const running = state === "working" || state === "busy";
  parts.live.textContent = LIVE[stepper.kernel];
  parts.live.dataset.state = stepper.kernel;
  const facts = view.moment?.facts;
  const { actions } = parts;
  const stoppable = !model.get("_in_cell") || interrupter(model) !== null;
  if (stepper.page) {
    actions.step.disabled = stepper.recorded.at >= stepper.recorded.moments.length - 1;
    actions.back.disabled = stepper.recorded.at <= 0;
    actions.run.disabled = actions.stop.disabled = actions.html.disabled = parts.condition.disabled = true;
    actions.html.hidden = true;
  } else {
    const focused = stepper.root.getRootNode().activeElement;
    actions.step.disabled = actions.finish.disabled = actions.run.disabled = !able || running || !facts || !facts.next;
    actions.back.disabled = !able || running || !facts || facts.place.stage === null;
    actions.stop.disabled = !able || !running || !stoppable;
    actions.html.disabled = !able;
    if (document.body.contains(focused) && focused?.disabled && stepper.root.contains(focused)) parts.flow.focus({ preventScroll: true }); // a disabled button hears no keys
  }
  for (const node of stepper.root.querySelectorAll("[data-add], [data-act=break], [data-act=watch]")) node.disabled = !able;
  parts.body.classList.toggle("dimmed", running);
  if (WHY[stepper.kernel]) parts.worktext.innerHTML = `<b class="bad">✗</b> ${escape(WHY[stepper.kernel])}`;
  else if (running) parts.worktext.textContent = `${status.text.replace(/\.$/, "")}${status.total ? ` · ${Math.round((100 * status.done) / status.total)} %` : ""}. ${stoppable ? "Stop (Esc) ends it." : "A cell is running this: stop it with the kernel’s own interrupt (■, or I I)."}`;
  else if (stepper.answered < stepper.sent && performance.now() - stepper.asked >= LATE && stepper.kernel === "busy") parts.worktext.textContent = "A cell is running; this waits until the kernel hears it.";
  else parts.worktext.textContent = state === "idle" ? status.text ?? "" : "";
  parts.meter.parentElement.hidden = !running || !status.total;
  parts.meter.style.width = `${status.total ? (100 * status.done) / status.total : 0}%`;
  if (state === "error") {
    if (view.editing) view.editing.sent = false;
    showFault(parts, status);
  } else parts.fault.hidden = true;
}
