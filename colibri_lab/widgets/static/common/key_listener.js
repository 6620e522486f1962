// The keyboard of a view. A key that it handles goes no further; inside text fields only Enter and Esc are ours, and what moves a slider or a menu is theirs.

export const ARROWS = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };
const MOVES = [...Object.keys(ARROWS), "Home", "End", "PageUp", "PageDown"];

// `act` is what the view can do: `escape`, `enter` of a text field, and by `simple` what single keys do. `handle(key, target)` does the rest and
// returns false for a key that is not its own. Returns the listener.
export const keyListener = (act, simple, handle) => (event) => {
  const { target, key } = event;
  const done = () => {
    event.preventDefault();
    event.stopPropagation();
  };
  const own = target.tagName === "SELECT" || target.type === "range";
  if (target.tagName === "INPUT" && !own) {
    event.stopPropagation(); // the notebook must not read what is typed
    if (key === "Enter") return done(), act.enter(target);
    if (key === "Escape") return done(), act.escape(target);
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (own && MOVES.includes(key)) return event.stopPropagation();
  const small = key.length === 1 ? key.toLowerCase() : key;
  if (handle(key, target) !== false) done();
  else if (simple[small]) done(), act[simple[small]](target);
  else if (key === "Escape") done(), act.escape(target);
  else if (key.length === 1 || target.tagName === "BUTTON") event.stopPropagation(); // single letters are notebook commands
};
