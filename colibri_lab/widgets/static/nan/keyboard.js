// Keyboard of the view.
import { ARROWS, keyListener } from "../common/key_listener.js";

const SIMPLE = { 0: "origin", n: "nextOrigin", p: "previousOrigin", "?": "help" };

// `act` is what the view can do; returns the listener.
export const keyboard = (parts, act) =>
  keyListener(act, SIMPLE, (key, target) => {
    const scrolls = target.matches(".scroll, pre");
    if (ARROWS[key] && target === parts.map) act.move(...ARROWS[key]);
    else if (ARROWS[key] && !scrolls) act.step(...ARROWS[key]);
    else if ((key === "Home" || key === "End") && target === parts.map) act.end(key === "Home" ? -1 : 1);
    else if ((key === "PageUp" || key === "PageDown") && !scrolls) act.token(key === "PageUp" ? -1 : 1);
    else return false;
  });
