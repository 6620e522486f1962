// Keyboard of the view. A key that we handle goes no further.

const ARROWS = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };
const SIMPLE = { 0: "origin", n: "nextOrigin", p: "previousOrigin", "?": "help" };

// `act` is what the view can do; returns the listener.
export function keyboard(parts, act) {
  return (event) => {
    const { target, key } = event;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const scrolls = target.matches(".scroll, pre");
    const small = key.length === 1 ? key.toLowerCase() : key;
    if (ARROWS[key] && target === parts.map) act.move(...ARROWS[key]);
    else if (ARROWS[key] && !scrolls) act.step(...ARROWS[key]);
    else if ((key === "Home" || key === "End") && target === parts.map) act.end(key === "Home" ? -1 : 1);
    else if ((key === "PageUp" || key === "PageDown") && !scrolls) act.token(key === "PageUp" ? -1 : 1);
    else if (SIMPLE[small]) act[SIMPLE[small]](target);
    else if (key === "Escape") act.escape(target);
    else {
      if (key.length === 1 || target.tagName === "BUTTON") event.stopPropagation(); // single letters are notebook commands
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  };
}
