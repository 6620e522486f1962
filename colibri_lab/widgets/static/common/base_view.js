// What a view's script listens to, and what it does in every view: theme, width, kernel, copying, words that fade, faults.
// A model gives get, set, save_changes, on, off and send; a saved page passes a small stand-in with the data in it (see html.py).
import { interrupter, keepOwnShell, watchKernel } from "./kernel.js";
import { copyText, watchTheme } from "./page.js";
import { isDark, makePalette } from "./palette.js";
import { showHelp, showWork } from "./states.js";

let views = 0;

// A view has `receive`, `clicked`, `measure`, `paint`, `showState`, and sets `parts` before it listens.
export class BaseView {
  constructor(model, root, name) {
    this.model = model;
    this.root = root;
    this.uid = `cl-${name}${++views}-${Math.random().toString(36).slice(2, 8)}`;
    this.view = { uid: this.uid, live: true };
    this.page = Boolean(model.get("_page"));
    this.kernel = "idle";
    this.draws = 0;
    this.seen = keepOwnShell(model, () => this.able());
    root.classList.add("clb", name);
  }

  // `traits`: what to do when one changes; `keys`: the listener of the keyboard.
  listen(traits, keys) {
    const { model, root } = this;
    const on = (name, handler) => {
      model.on(name, handler);
      this.leave.push(() => model.off(name, handler));
    };
    this.leave = [];
    on("msg:custom", (content, buffers) => this.receive(content, buffers || []));
    on("change:_status", () => this.showState());
    for (const [name, changed] of Object.entries(traits)) on(`change:${name}`, changed);
    const size = new ResizeObserver(() => this.resize());
    size.observe(root);
    this.leave.push(watchTheme(() => this.setTheme()), () => size.disconnect(), () => clearTimeout(this.resting));
    this.leave.push(watchKernel(model, (state) => this.kernelIs(state)));
    root.addEventListener("keydown", keys);
    root.addEventListener("click", (event) => this.clicked(event));
  }

  setTheme() {
    const theme = isDark(this.root) ? "dark" : "light";
    if (this.root.dataset.theme === theme && this.view.palette) return;
    this.root.dataset.theme = theme;
    this.view.palette = makePalette(this.root);
    requestAnimationFrame(() => {
      this.view.palette = makePalette(this.root); // the host's own colours follow its theme a moment later
      this.paint();
    });
  }

  resize() {
    if (this.root.clientWidth === this.width) return;
    this.measure();
    this.paint();
  }

  paintSoon() {
    this.soon ||= requestAnimationFrame(() => {
      this.soon = null;
      this.paint();
    });
  }

  able() {
    return !this.page && (this.kernel === "idle" || this.kernel === "busy");
  }

  kernelIs(state) {
    this.kernel = state;
    if (this.view.live !== this.able()) this.paint();
    this.showState();
  }

  // What runs, how far it is, and a fault. Work in a cell is stopped by interrupting the kernel, for no message is heard while one runs.
  showWork(why) {
    const { model } = this;
    showWork({ ...this, able: this.able() }, why, !model.get("_in_cell") || interrupter(model) !== null);
  }

  // The buttons that every view has; false for any other.
  pressCommon(act) {
    const { parts, model, view } = this;
    if (act === "stop") {
      if (!model.get("_in_cell")) model.send({ kind: "stop" });
      else interrupter(model)?.().catch(() => this.tell("The kernel could not be interrupted from here; use its own interrupt (■, or I I)."));
    } else if (act === "recipe") this.copy(`${view.store?.facts.recipe ?? ""}${parts.code.textContent}\n`);
    else if (act === "html") model.send({ kind: "html" });
    else if (act === "copy") this.copy(parts.code.textContent);
    else if (act === "traceback") parts.trace.hidden = !parts.trace.hidden;
    else if (act === "copytrace") this.copy(parts.trace.textContent);
    else if (act === "dismiss") {
      model.set("_status", { state: "idle" });
      model.save_changes();
      this.showState();
    } else if (act === "closehelp") showHelp(parts, false);
    else return false;
    return true;
  }

  copy(text) {
    copyText(text, (words) => this.tell(words, this.parts.copied));
  }

  tell(words, place = this.parts.said) {
    this.parts.said.textContent = this.parts.copied.textContent = "";
    place.textContent = words;
    clearTimeout(this.telling);
    this.telling = setTimeout(() => (place.textContent = ""), 6000);
  }

  close() {
    for (const leave of this.leave) leave();
  }
}

export const renderer = (View) => ({ model, el }) => {
  const root = document.createElement("div");
  el.appendChild(root);
  const view = new View(model, root);
  return () => view.close();
};
