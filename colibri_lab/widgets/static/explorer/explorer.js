// The view: one state (layer, token, expert, colouring), parts that draw it, and messages with Python.
// A model gives get, set, save_changes, on, off and send; a saved page passes a small stand-in with the data in it (see html.py).
import { isDark, makePalette } from "../common/palette.js";
import { unpack } from "../common/wire.js";
import { copyText, download, watchTheme } from "../common/page.js";
import { Store } from "./store.js";
import { loadSentence, tokenSentence } from "./sentence.js";
import { TextStrip } from "./text_strip.js";
import { TokenCard } from "./token_card.js";
import { ExpertCard } from "./expert_card.js";
import { Maps } from "./maps.js";
import { buildShell } from "./shell.js";
import { keyboard } from "./keys.js";
import { makeActions } from "./actions.js";
import { twinTables } from "./twins.js";
import { interrupter, keepOwnShell, watchKernel } from "../common/kernel.js";
import { showHelp } from "../common/states.js";
import { showStatus } from "./view_states.js";

const BATCH = 8; // layers asked for at once
const REST = 250; // ms of rest before the tables for screen readers are filled
let views = 0;

export class Explorer {
  constructor(model, root) {
    this.model = model;
    this.root = root;
    this.uid = `clb${++views}-${Math.random().toString(36).slice(2, 8)}`;
    this.view = { uid: this.uid, layer: 0, token: 0, expert: 0, by: model.get("colour_by") || "expert", store: null };
    this.gone = false;
    this.draws = 0;
    this.seen = keepOwnShell(model, () => !["gone", "lost", "page"].includes(this.kernelState));
    root.classList.add("clb");
    this.parts = buildShell(root, this.uid);
    this.strip = new TextStrip(this.parts.strip, (t) => this.choose({ token: t }), (t) => this.preview(t === null ? null : { token: t }));
    this.tokenCard = new TokenCard(this.parts.tcard, (l) => this.choose({ layer: l }), (e) => this.choose({ expert: e }));
    this.expertCard = new ExpertCard(this.parts.ecard, (t) => this.choose({ token: t, expert: this.view.expert }), (e) => this.choose({ expert: e }));
    this.maps = new Maps(this.parts.maps, { onSelect: (hit) => this.choose(hit), onHover: (hit) => this.preview(hit), onWindow: () => this.slide() });
    this.listen();
    this.setTheme();
    this.markColour();
    this.showState();
    model.send({ kind: "ready" });
  }

  // ---- from outside ----

  listen() {
    const { model, parts, root } = this;
    const on = (name, handler) => {
      model.on(name, handler);
      this.leave.push(() => model.off(name, handler));
    };
    this.leave = [];
    on("msg:custom", (content, buffers) => this.receive(content, buffers || []));
    on("change:selection", () => this.adopt(model.get("selection")));
    on("change:colour_by", () => this.setColour(model.get("colour_by"), false));
    on("change:_status", () => this.showState());
    const size = new ResizeObserver(() => this.resize());
    size.observe(root);
    this.leave.push(watchTheme(() => this.setTheme()), () => size.disconnect(), () => clearTimeout(this.resting));
    this.leave.push(watchKernel(model, (state) => this.kernel(state)));
    root.addEventListener("keydown", keyboard(parts, makeActions(this)));
    parts.layer.addEventListener("input", () => this.choose({ layer: Number(parts.layer.value) }));
    root.addEventListener("click", (event) => {
      const act = event.target.closest("[data-act]")?.dataset.act;
      const by = event.target.closest("[data-by]")?.dataset.by;
      if (act) this.press(act);
      else if (by) this.setColour(by, true);
    });
    parts.prompt.addEventListener("input", () => fitPrompt(parts.prompt));
  }

  receive(content, buffers) {
    if (content.kind === "head" || content.last) this.seen();
    if (content.kind === "head") return this.adoptTrace(new Store(content.facts, unpack(content.arrays, buffers), content.version));
    if (content.kind === "html") {
      download(content.name, content.text);
      return this.tell(`Saved as ${content.name}.`);
    }
    const { store } = this.view;
    if (!store || content.version !== store.version) return; // of a trace that is no longer shown
    const arrays = unpack(content.arrays, buffers);
    if (content.kind === "block") {
      store.addBlock(content.layer, arrays);
      this.parts.top.dataset.missing = store.missingLayers().length;
      if (content.layer === this.view.layer) this.paintLayer();
      else this.paintSoon();
      if (content.last) this.askForLayers();
    } else if (content.kind === "column") {
      store.addColumn(content.token, arrays);
      if (content.token === this.view.token) this.paintToken();
    }
  }

  adoptTrace(store) {
    const { parts, view } = this;
    view.store = store;
    this.strip.reset();
    this.maps.from = 0;
    parts.layer.max = Math.max(0, store.L - 1);
    const names = store.facts.layers;
    parts.layerspan.textContent = store.L ? `of ${names[0]}–${names[store.L - 1]}` : "";
    parts.facts.textContent = store.facts.title;
    parts.hints.innerHTML = [["←→", "token"], ["↑↓", "layer"], [store.E <= 10 ? `0–${store.E - 1}` : "X", "expert"], ["C", "colour"], ["?", "all keys"]].map(([k, w]) => `<span class="kbd">${k}</span> ${w}`).join(" ");
    if (store.facts.prompt !== this.ran) parts.prompt.value = this.ran = store.facts.prompt; // else what stands there is the reader's
    this.showState();
    fitPrompt(parts.prompt);
    this.adopt(this.model.get("selection"), true);
  }

  // A selection from Python (model's layer number) or from the browser.
  adopt(selection, everything = false) {
    const { view } = this;
    if (!view.store) return;
    const layer = Math.max(0, view.store.facts.layers.indexOf(selection.layer));
    const token = Math.min(selection.token ?? 0, Math.max(0, view.store.T - 1));
    const expert = Math.min(selection.expert ?? 0, view.store.E - 1);
    if (everything) Object.assign(view, { layer, token, expert }), this.paintAll();
    else if (this.show(layer, token, expert)) this.seen();
  }

  // ---- choosing ----

  choose(wish) {
    const { view, model } = this;
    const { store } = view;
    if (!store || !store.T) return;
    const layer = wish.layer ?? view.layer;
    const token = wish.token ?? view.token;
    const moved = layer !== view.layer || token !== view.token;
    const first = store.at(layer, token)?.ids[0];
    let expert = wish.expert ?? (moved && first !== undefined ? first : view.expert);
    expert = Math.min(expert, store.E - 1);
    this.show(layer, token, expert);
    model.set("selection", { layer: store.facts.layers[layer], token, expert });
    model.save_changes();
  }

  // Draws another place, and says so; nothing when it is the one shown, as when our own choice comes back from the model.
  show(layer, token, expert) {
    const { view } = this;
    if (layer === view.layer && token === view.token && expert === view.expert) return false;
    const another = layer !== view.layer;
    Object.assign(view, { layer, token, expert });
    if (another) this.paintLayer();
    else this.paintToken();
    return true;
  }

  preview(hit) {
    const { parts, view } = this;
    if (!view.store?.T) return;
    parts.say.setAttribute("aria-live", hit ? "off" : "polite");
    const layer = hit?.layer ?? view.layer;
    const ofLoad = hit && hit.token === undefined;
    const html = ofLoad ? loadSentence({ ...view, slots: view.store.slots(layer) }, layer, hit.expert) : tokenSentence(view, layer, hit?.token ?? view.token);
    if (this.said !== html) parts.say.innerHTML = this.said = html;
    parts.say.classList.toggle("hover", Boolean(hit));
  }

  setColour(by, tell) {
    if (by === this.view.by && !tell) return;
    this.view.by = by;
    this.markColour();
    if (this.view.store?.T) this.strip.paint(this.view);
    if (!tell) return;
    this.model.set("colour_by", by);
    this.model.save_changes();
  }

  markColour() {
    for (const node of this.parts.by) node.setAttribute("aria-pressed", String(node.dataset.by === this.view.by));
  }

  press(act) {
    const { parts, model } = this;
    if (act === "run" || act === "generate") this.work(act);
    else if (act === "stop") this.stop();
    else if (act === "html") model.send({ kind: "html" });
    else if (act === "copy") this.copy(parts.code.textContent, parts.copied);
    else if (act === "recipe") this.copy(`${this.view.store?.facts.recipe ?? ""}${parts.code.textContent}\n`);
    else if (act === "traceback") parts.trace.hidden = !parts.trace.hidden;
    else if (act === "copytrace") this.copy(parts.trace.textContent);
    else if (act === "dismiss") {
      parts.fault.hidden = true;
      model.set("_status", { state: "idle" });
      model.save_changes();
    }
    else if (act === "closehelp") showHelp(parts, false);
  }

  // Run takes the prompt; Generate goes on with what is shown, unless the prompt was changed or nothing has run.
  work(act) {
    const { parts, model, view } = this;
    const text = parts.prompt.value;
    if (parts.actions.run.disabled) return;
    const fresh = act === "run" || !view.store.T || text !== this.ran;
    if (fresh && !text) {
      parts.prompt.focus();
      return this.tell("Type a prompt first.");
    }
    this.tell("");
    model.send({ kind: act, ...(fresh && { text }), ...(act === "generate" && { count: 32 }) });
  }

  stop() {
    const { model, parts } = this;
    if (parts.actions.stop.disabled) return;
    if (!model.get("_in_cell")) return model.send({ kind: "stop" });
    interrupter(model)().catch(() => this.tell("The kernel could not be interrupted from here; use its own interrupt (■, or I I)."));
  }

  copy(text, place) {
    copyText(text, (words) => this.tell(words, place));
  }

  tell(words, place = this.parts.said) {
    this.parts.said.textContent = this.parts.copied.textContent = "";
    place.textContent = words;
    clearTimeout(this.telling);
    this.telling = setTimeout(() => (this.parts.said.textContent = this.parts.copied.textContent = ""), 6000);
  }

  // ---- drawing ----

  setTheme() {
    const theme = isDark(this.root) ? "dark" : "light";
    if (this.root.dataset.theme === theme && this.view.palette) return;
    this.root.dataset.theme = theme;
    requestAnimationFrame(() => this.paintAll()); // the host's own colours follow its theme a moment later
    this.view.palette = makePalette(this.root);
  }

  resize() {
    if (this.view.store?.T && this.parts.maps.clientWidth !== this.maps.layout?.width) this.paintAll();
  }

  paintAll() {
    const { view, parts } = this;
    if (!view.store?.T || !this.root.isConnected || !parts.maps.clientWidth) return this.markDrawn();
    view.palette = makePalette(this.root);
    view.slots = view.store.slots(view.layer);
    view.cardWidth = parts.tcard.clientWidth - 20; // measured here alone: asking at every step would force a layout
    this.maps.draw(view);
    this.tokenCard.draw(view);
    this.strip.update(view);
    this.cards();
    this.settle();
  }

  paintLayer() {
    const { view } = this;
    if (!view.store?.T || !this.maps.layout) return this.paintAll();
    view.slots = view.store.slots(view.layer);
    this.maps.follow(view);
    this.maps.drawLayer(view);
    this.tokenCard.draw(view);
    this.strip.update(view);
    this.cards();
    this.settle();
  }

  paintToken() {
    const { view } = this;
    if (!view.store?.T || !this.maps.layout) return this.paintAll();
    const before = this.maps.from;
    this.maps.follow(view);
    if (this.maps.from !== before) this.maps.drawLayer(view);
    else this.maps.select(view);
    this.tokenCard.draw(view);
    this.strip.move(view);
    this.cards();
    this.settle();
  }

  // Data of another layer came: the selected token's path may show it, once per frame.
  paintSoon() {
    this.soon ||= requestAnimationFrame(() => {
      this.soon = null;
      if (!this.view.store.T) return;
      this.tokenCard.draw(this.view);
      this.tokenCard.patch(this.view);
    });
  }

  cards() {
    const { view, parts } = this;
    this.askForToken();
    this.tokenCard.patch(view);
    this.expertCard.update(view);
    this.preview(null);
    const name = view.store.facts.layers[view.layer];
    parts.layer.value = view.layer;
    parts.layername.textContent = name;
    parts.code.textContent = `explorer.selection = dict(layer=${name}, token=${view.token}, expert=${view.expert})`;
    parts.top.setAttribute("aria-label", `Load map and token map, layer ${name}, token ${view.token}, expert ${view.expert}. Arrows move the selection.`);
  }

  settle() {
    this.markDrawn();
    clearTimeout(this.resting);
    this.resting = setTimeout(() => {
      if (this.view.store?.T) this.parts.twins.innerHTML = twinTables(this.view);
    }, REST);
  }

  // The window of the token map moved under the mouse.
  slide() {
    this.maps.drawLayer(this.view);
    this.markDrawn();
  }

  markDrawn() {
    this.parts.top.dataset.drawn = ++this.draws;
    if (this.maps.layout) this.parts.top.dataset.from = this.maps.layout.tokens.start;
  }

  // ---- data ----

  askForToken() {
    const { store, token } = this.view;
    if (this.gone || store.hasColumn(token) || (store.facts.every_value && this.asking)) return;
    if (this.asked === token && this.askedOf === store.version) return;
    Object.assign(this, { asked: token, askedOf: store.version });
    this.model.send({ kind: "column", version: store.version, token });
  }

  askForLayers() {
    const { store, layer } = this.view;
    const missing = store.missingLayers().sort((a, b) => Math.abs(a - layer) - Math.abs(b - layer));
    this.asking = missing.length > 0;
    if (missing.length && !this.gone) this.model.send({ kind: "blocks", version: store.version, layers: missing.slice(0, BATCH) });
  }

  // ---- states ----

  kernel(state) {
    this.gone = state === "gone";
    if (this.gone && this.view.store) this.view.store.facts.no_values ||= "No kernel: the router logits of this token were not fetched before.";
    this.parts.live.dataset.state = state;
    this.kernelState = state;
    this.showState();
  }

  showState() {
    showStatus(this.parts, this.view.store, this.model.get("_status"), this.kernelState ?? "idle", !this.model.get("_in_cell") || interrupter(this.model) !== null);
  }

  close() {
    for (const leave of this.leave) leave();
  }
}

// As high as its text, up to the style sheet's limit; what is below moves down.
function fitPrompt(prompt) {
  prompt.style.height = "";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function render({ model, el }) {
  const root = document.createElement("div");
  el.appendChild(root);
  const explorer = new Explorer(model, root);
  return () => explorer.close();
}

export default { render };
