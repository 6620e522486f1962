// Keyboard of the view. A key that we handle goes no further.

const SIMPLE = { m: "nextMiss", n: "previousMiss", p: "nextPolicy", s: "scope", x: "askNumber", "?": "help" };
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

// `act` is what the view can do; returns the listener.
export function keyboard(parts, act) {
  return (event) => {
    const { target, key } = event;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const done = () => {
      event.preventDefault();
      event.stopPropagation();
    };
    if (target === parts.number) {
      event.stopPropagation(); // the notebook must not read what is typed
      if (key === "Enter") return done(), act.chooseNumber();
      if (key === "Escape") return done(), act.escape(target);
      return;
    }
    const small = key.length === 1 ? key.toLowerCase() : key;
    const inTime = target === parts.time;
    const native = target === parts.range || target.tagName === "SELECT";
    if (native && (ARROWS[key] || key === "Home" || key === "End" || key.startsWith("Page"))) return event.stopPropagation();
    if (ARROWS[key] && inTime) act.move(...ARROWS[key]);
    else if (ARROWS[key]) act.step(ARROWS[key][0] - ARROWS[key][1]); // up is more, as on any slider
    else if (key === "Home" || key === "End") act.end(key === "Home" ? -1 : 1, inTime);
    else if (key === "PageUp" || key === "PageDown") act.page(key === "PageUp" ? -1 : 1, inTime);
    else if (/^[0-9]$/.test(key) && act.digit(Number(key))) return done();
    else if (SIMPLE[small]) act[SIMPLE[small]](target);
    else if (key === "Escape") act.escape(target);
    else {
      if (key.length === 1 || target.tagName === "BUTTON") event.stopPropagation(); // single letters are notebook commands
      return;
    }
    done();
  };
}
