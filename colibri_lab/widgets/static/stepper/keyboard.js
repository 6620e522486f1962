// Keyboard of the view. A key that we handle goes no further; inside text fields only Enter and Esc are ours.

const UNITS = ["stage", "expert", "layer", "token"];

// `act` is what the view can do; returns the listener.
export function keyboard(parts, act) {
  return (event) => {
    const { target, key } = event;
    const done = () => {
      event.preventDefault();
      event.stopPropagation();
    };
    if (target.tagName === "INPUT") {
      event.stopPropagation(); // the notebook must not read what is typed
      if (key === "Enter") return done(), act.enter(target);
      if (key === "Escape") return done(), act.escape(target);
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const inMap = target === parts.map;
    const arrows = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };
    const small = key.length === 1 ? key.toLowerCase() : key;
    const simple = { r: "askCondition", f: "finish", b: "breakpoint", k: "fork", e: "edit", u: "undo", "?": "help", ".": "step", ",": "back" };
    if (inMap && arrows[key]) act.cursor(...arrows[key]);
    else if (inMap && key === "Enter") act.goToCursor();
    else if (key === "ArrowUp" || key === "ArrowDown") act.token(arrows[key][1]);
    else if (key === "PageUp" || key === "PageDown") act.token(key === "PageUp" ? -10 : 10);
    else if (key === "Home" || key === "End") act.token(key === "Home" ? -Infinity : Infinity);
    else if (/^[1-4]$/.test(key)) act.unit(UNITS[Number(key) - 1]);
    else if (simple[small]) act[simple[small]](target);
    else if (key === "Escape") act.escape(target);
    else {
      if (key.length === 1 || target.tagName === "BUTTON") event.stopPropagation(); // single letters are notebook commands
      return;
    }
    done();
  };
}
