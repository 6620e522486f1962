// Keyboard of the view. A key that we handle goes no further; inside text fields only Shift+Enter and Esc are ours.

const STEP = 10;

// `act` is what the view can do; returns the listener.
export function keyboard(parts, act) {
  return (event) => {
    const field = event.target === parts.prompt || event.target === parts.number;
    const done = () => {
      event.preventDefault();
      event.stopPropagation();
    };
    if (field) {
      event.stopPropagation(); // the notebook must not read what is typed
      if (event.target === parts.prompt && event.key === "Enter" && event.shiftKey) return done(), act.run();
      if (event.target === parts.number && event.key === "Enter") return done(), act.chooseNumber();
      if (event.key === "Escape") return done(), act.escape(event.target);
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const slider = event.target === parts.layer;
    const isButton = event.target.tagName === "BUTTON";
    const key = event.key;
    if (key === "ArrowRight" && !slider) act.token(1);
    else if (key === "ArrowLeft" && !slider) act.token(-1);
    else if (key === "ArrowDown" && !slider) act.layer(1);
    else if (key === "ArrowUp" && !slider) act.layer(-1);
    else if (key === "PageDown" && !slider) act.token(STEP);
    else if (key === "PageUp" && !slider) act.token(-STEP);
    else if (key === "Home" && !slider) act.token(-Infinity);
    else if (key === "End" && !slider) act.token(Infinity);
    else if (/^[0-9]$/.test(key) && act.digit(Number(key))) return done();
    else if (key === "x" || key === "X") act.askNumber();
    else if (key === "c" || key === "C") act.nextColour();
    else if (key === "p" || key === "P") act.pin();
    else if (key === "m" || key === "M") act.nextTie();
    else if (key === "?") act.help();
    else if (key === "Escape") act.escape(event.target);
    else if (key === "Enter" && !isButton) act.open();
    else {
      if (slider || isButton) return event.stopPropagation();
      if (key.length === 1) event.stopPropagation(); // single letters are notebook commands
      return;
    }
    done();
  };
}
