// Keyboard of the view.
import { ARROWS, keyListener } from "../common/key_listener.js";

const UNITS = ["stage", "expert", "layer", "token"];
const SIMPLE = { r: "askCondition", f: "finish", b: "breakpoint", k: "fork", e: "edit", u: "undo", "?": "help", ".": "step", ",": "back" };

// `act` is what the view can do; returns the listener.
export const keyboard = (parts, act) =>
  keyListener(act, SIMPLE, (key, target) => {
    const inMap = target === parts.map;
    if (inMap && ARROWS[key]) act.cursor(...ARROWS[key]);
    else if (inMap && key === "Enter") act.goToCursor();
    else if (key === "ArrowUp" || key === "ArrowDown") act.token(ARROWS[key][1]);
    else if (key === "PageUp" || key === "PageDown") act.token(key === "PageUp" ? -10 : 10);
    else if (key === "Home" || key === "End") act.token(key === "Home" ? -Infinity : Infinity);
    else if (/^[1-4]$/.test(key)) act.unit(UNITS[Number(key) - 1]);
    else return false;
  });
