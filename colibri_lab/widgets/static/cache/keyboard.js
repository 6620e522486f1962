// Keyboard of the view.
import { ARROWS, keyListener } from "../common/key_listener.js";

const SIMPLE = { m: "nextMiss", n: "previousMiss", p: "nextPolicy", s: "scope", x: "askNumber", "?": "help" };

// `act` is what the view can do; returns the listener.
export const keyboard = (parts, act) =>
  keyListener(act, SIMPLE, (key, target) => {
    const inTime = target === parts.time;
    if (ARROWS[key] && inTime) act.move(...ARROWS[key]);
    else if (ARROWS[key] && target.dataset.map) act.moveOn(target, ...ARROWS[key]);
    else if (ARROWS[key]) act.step(ARROWS[key][0] - ARROWS[key][1]); // up is more, as on any slider; so is PageUp
    else if (key === "Home" || key === "End") act.end(key === "Home" ? -1 : 1, inTime);
    else if (key === "PageUp" || key === "PageDown") act.page((key === "PageUp") === inTime ? -1 : 1, inTime);
    else return /^[0-9]$/.test(key) && Boolean(act.digit(Number(key)));
  });
