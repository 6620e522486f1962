// What the keys do, as named acts on the view.
import { showHelp } from "../common/states.js";

export function makeActions(explorer) {
  const { parts, view } = explorer;
  const within = (n, size) => Math.max(0, Math.min(size - 1, n));
  return {
    token: (step) => explorer.choose({ token: within(view.token + step, view.store?.T ?? 1) }),
    layer: (step) => explorer.choose({ layer: within(view.layer + step, view.store?.L ?? 1) }),
    digit: (n) => {
      if (!view.store || view.store.E > 10 || n >= view.store.E) return false;
      explorer.choose({ expert: n });
      return true;
    },
    nextColour: () => explorer.setColour({ expert: "entropy", entropy: "margin", margin: "expert" }[view.by], true),
    pin: () => {
      if (!view.store?.many) return explorer.tell(`Nothing to pin: each of the ${view.store?.E ?? 0} experts has a colour of its own.`);
      const on = view.store.pin(view.layer, view.expert);
      explorer.paintLayer();
      explorer.tell(on ? `Expert ${view.expert} keeps a colour in this layer.` : `Expert ${view.expert} is no longer pinned.`);
    },
    nextTie: () => {
      const place = view.store?.T ? view.store.nextTie(view.layer, view.token) : null;
      if (place) explorer.choose(place);
      else explorer.tell("No near-tie: every margin here exceeds one bfloat16 step.");
    },
    open: () => {
      const strongest = explorer.parts.ecard.querySelector("[data-token]");
      if (strongest) explorer.choose({ token: Number(strongest.dataset.token), expert: view.expert });
    },
    askNumber: () => {
      parts.numberbox.hidden = false;
      parts.number.value = "";
      explorer.back = document.activeElement;
      parts.number.focus();
    },
    chooseNumber: () => {
      const wanted = parts.number.value.trim();
      parts.numberbox.hidden = true;
      explorer.back?.focus();
      const last = (view.store?.E ?? 1) - 1;
      if (/^\d+$/.test(wanted) && Number(wanted) <= last) explorer.choose({ expert: Number(wanted) });
      else explorer.tell(`Expert ${wanted || "?"} does not exist: experts are 0 to ${last}.`);
    },
    run: () => explorer.press("run"),
    help: () => showHelp(parts, parts.help.hidden),
    escape: (target) => {
      if (!parts.numberbox.hidden) {
        parts.numberbox.hidden = true;
        explorer.back?.focus();
      } else if (!parts.help.hidden) showHelp(parts, false);
      else if (explorer.model.get("_status").state === "working") explorer.press("stop");
      else target.blur();
    },
  };
}
