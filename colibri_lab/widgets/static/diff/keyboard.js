// Keyboard of the view.
import { ARROWS, keyListener } from "../common/key_listener.js";

const SIMPLE = { 0: "first", n: "nextFlip", p: "previousFlip", "?": "help" };

// `act` is what the view can do; returns the listener.
export const keyboard = (parts, act) =>
  keyListener(act, SIMPLE, (key, target) => {
    const scrolls = target.matches(".scroll, pre");
    if (ARROWS[key] && target.closest(".prediction")) act.position(ARROWS[key][0] || ARROWS[key][1]);
    else if (ARROWS[key] && target.closest(".flips") && !scrolls && ARROWS[key][1]) act.flip(ARROWS[key][1]);
    else if (ARROWS[key] && !scrolls) act.move(...ARROWS[key]);
    else if ((key === "Home" || key === "End") && !scrolls) act.end(key === "Home" ? -1 : 1, Boolean(target.closest(".prediction")));
    else if ((key === "PageUp" || key === "PageDown") && !scrolls) act.token(key === "PageUp" ? -1 : 1);
    else return false;
  });
