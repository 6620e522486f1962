// The view: one setting (policy, capacity, …), one selection (layer, token, expert), parts that draw them, and messages with Python.
import { BaseView, renderer } from "../common/base_view.js";
import { SUPPRESS } from "../common/frame.js";
import { download } from "../common/page.js";
import { patch } from "../common/patch.js";
import { showHelp } from "../common/states.js";
import { unpack } from "../common/wire.js";
import { passButtons, policyButtons, prefetchButtons, scopeButtons } from "./controls.js";
import { counterTable, countersRemark, findings } from "./counters.js";
import { capacityAt, capacityText, curvePicture, layoutCurves } from "./curves.js";
import { keyboard } from "./keyboard.js";
import { keys, keysSay } from "./keys.js";
import { residency, residencySay } from "./residency.js";
import { roofline } from "./roofline.js";
import { buildShell } from "./shell.js";
import { stageSay } from "./stage_words.js";
import { Store } from "./store.js";
import { hitTimeline, layoutTimeline, timelineKey, timelineLabel, timelinePicture, timelineRemark } from "./timeline.js";
import { twinTables } from "./twins.js";
import { requestSentence, sentence, speedNote } from "./words.js";

const REST = 250; // ms of rest before the tables for screen readers are filled
const SETTLED = 120; // ms of rest before a dragged capacity is told to Python
const PAGE = 10; // steps of PageUp and PageDown
const PANELS = [residency, residencySay, roofline, stageSay, keys, keysSay]; // each in the place of its name, with what Python sent for `of` or for that name
const WHY = { gone: "No kernel. What was fetched can be looked at; run the cell again for the rest.", lost: "The connection to the kernel is lost.", page: "" };

class CacheView extends BaseView {
  constructor(model, root) {
    super(model, root, "cache");
    Object.assign(this.view, { store: null, setting: null, layer: null, token: null, expert: null });
    this.parts = buildShell(root);
    this.listen({ setting: () => this.adopt(), selection: () => this.adopt(), _in_cell: () => this.showState() }, keyboard(this.parts, this.acts()));
    this.listenToPointer();
    this.setTheme();
    this.showState();
    model.send({ kind: "ready" });
  }

  listenToPointer() {
    const { curves, range, ctl } = this.parts;
    curves.addEventListener("pointerdown", (event) => {
      if (event.button || event.target.closest(".pick")) return;
      curves.setPointerCapture(event.pointerId);
      curves.focus({ preventScroll: true });
      this.dragging = true;
      this.drag(event);
    });
    curves.addEventListener("pointermove", (event) => this.dragging && this.drag(event));
    for (const end of ["pointerup", "pointercancel"]) curves.addEventListener(end, () => (this.dragging = false));
    range.addEventListener("input", () => this.stepTo(Number(range.value)));
    ctl.addEventListener("change", (event) => event.target.matches(".more") && event.target.value && this.set({ policy: event.target.value }));
    this.root.addEventListener("change", (event) => event.target.matches(".layer") && this.choose({ layer: Number(event.target.value) }));
  }

  drag(event) {
    const { store } = this.view;
    if (store?.curve(this.view.setting)) this.set({ capacity: capacityAt(this.curveLayout, event.clientX - this.parts.curves.getBoundingClientRect().left) });
  }

  // ---- from outside ----

  receive(content, buffers) {
    const { view, parts } = this;
    if (content.kind !== "heard") this.seen();
    if (content.kind === "head") {
      view.store = new Store(content.facts);
      parts.facts.textContent = parts.facts.title = content.facts.title;
      this.adopt(true);
    } else if (content.kind === "html") {
      download(content.name, content.text);
      this.tell(`Saved as ${content.name}.`);
    } else if (!view.store) return;
    else if (content.kind === "curve") {
      this.asked = null;
      view.store.addCurve(content);
      this.askCurve();
    } else if (content.kind === "timeline") view.store.addTimeline(content.facts, content.arrays, buffers);
    else if (content.kind === "panel") view.store.panels[content.name] = { ...content.facts, ...unpack(content.arrays, buffers) };
    else if (content.kind === "nomiss") this.tell(content.by > 0 ? "No miss follows in this layer." : "No miss stands before.");
    this.paintSoon();
  }

  adopt(everything = false) {
    const { view, model } = this;
    const setting = model.get("setting") ?? {};
    const { layer = null, token = null, expert = null } = model.get("selection") ?? {};
    const same = JSON.stringify(order(setting)) === JSON.stringify(order(view.setting ?? {}));
    if (!view.store || (!everything && same && layer === view.layer && token === view.token && expert === view.expert)) return;
    Object.assign(view, { layer, token, expert }, this.unsaid && !everything ? {} : { setting: { ...setting } });
    this.askCurve();
    this.paint();
  }

  // Curves are asked for one after the other, so that other requests come between.
  askCurve() {
    const { view } = this;
    if (this.asked || this.unsaid || !view.store?.n || !this.able()) return;
    this.asked = view.store.wanting(view.setting);
    if (this.asked) this.model.send({ kind: "curve", policy: this.asked });
  }

  // ---- choosing ----

  // Another setting: shown at once, told to Python when it has come to rest.
  set(wish) {
    const { view } = this;
    const { store } = view;
    if (!store?.n) return;
    const setting = { ...view.setting, ...wish };
    if (wish.scope && wish.scope !== view.setting.scope) {
      const [least, most] = [store.facts.top_k, store.E * (setting.scope === "global" ? store.L : 1)];
      const same = setting.scope === "global" ? setting.capacity * store.L : Math.floor(setting.capacity / store.L);
      setting.capacity = Math.max(least, Math.min(most, same));
    }
    if (!this.able() && !store.curve(setting)) return this.tell("That was not saved; it needs Python.");
    if (JSON.stringify(order(setting)) === JSON.stringify(order(view.setting))) return;
    view.setting = setting;
    this.unsaid = true;
    clearTimeout(this.settling);
    this.settling = setTimeout(() => this.settle(), "capacity" in wish ? SETTLED : 0);
    this.paint();
  }

  settle() {
    this.unsaid = false;
    this.told("setting", this.view.setting);
    this.asked = null;
    this.askCurve();
  }

  // To the capacity at a place of the axis.
  stepTo(i) {
    const all = this.capacities();
    if (all.length) this.set({ capacity: all[Math.max(0, Math.min(all.length - 1, i))] });
  }

  capacities() {
    const { store, setting } = this.view;
    return store?.curve(setting)?.capacities ?? [];
  }

  step(by) {
    this.stepTo(this.capacities().indexOf(this.view.setting?.capacity) + by);
  }

  choose(wish) {
    const { view } = this;
    if (!view.store?.n) return;
    const next = { layer: view.layer, token: view.token, expert: view.expert, ...wish };
    if (next.layer === view.layer && next.token === view.token && next.expert === view.expert) return;
    Object.assign(view, next);
    this.told("selection", next);
    this.paint();
  }

  // What was chosen goes to Python too; without a kernel it waits here, for sending would fail.
  told(name, value) {
    this.model.set(name, value);
    if (this.able()) this.model.save_changes();
  }

  goMiss(by) {
    const { view, model } = this;
    const { store, setting, layer, token, expert } = view;
    const block = store?.timeline(setting, layer, token);
    if (!block) return this.tell(this.able() ? "The timeline is not here yet." : "The timeline of this setting is not here; it needs Python.");
    const { requests } = block;
    const here = requests.findIndex((r) => r.token === token && r.expert === expert);
    const next = requests.findIndex((r) => r.token >= token);
    const from = here >= 0 ? here : (next < 0 ? requests.length : next) - (by > 0 ? 1 : 0);
    for (let i = from + by; i >= 0 && i < requests.length; i += by) if (requests[i].outcome === "miss") return this.choose({ token: requests[i].token, expert: requests[i].expert });
    if (by > 0 ? block.stop >= store.n : block.start <= 0) this.tell(by > 0 ? "No miss follows in this layer." : "No miss stands before.");
    else if (this.able()) model.send({ kind: "miss", by });
    else this.tell("What follows was not saved; that needs Python.");
  }

  acts() {
    const { parts, view } = this;
    const clamp = (value, count) => Math.max(0, Math.min(count - 1, value));
    const token = (value) => view.store && this.choose({ token: clamp(value, view.store.n) });
    return {
      step: (by) => this.step(by),
      move: (right, down) => (right ? token((view.token ?? -1) + right) : this.choose({ expert: clamp((view.expert ?? 0) + down, view.store?.E ?? 1) })),
      end: (by, inTime) => (inTime ? token(by * Infinity) : this.stepTo(by * Infinity)),
      page: (by, inTime) => (inTime ? token((view.token ?? -1) + PAGE * by) : this.step(PAGE * by)),
      moveOn: (map, right, down) => this.chooseOn(map, {}, [right, down]),
      nextMiss: () => this.goMiss(1),
      previousMiss: () => this.goMiss(-1),
      nextPolicy: () => this.nextPolicy(),
      scope: () => view.setting && this.set({ scope: view.setting.scope === "layer" ? "global" : "layer" }),
      digit: (expert) => view.store?.E <= 10 && expert < view.store.E && (this.choose({ expert }), true),
      askNumber: () => this.askNumber(true),
      enter: () => this.chooseNumber(),
      help: () => showHelp(parts, parts.help.hidden),
      escape: (target) => {
        if (!parts.help.hidden) showHelp(parts, false);
        else if (target === parts.number) this.askNumber(false);
        else if (!parts.actions.stop.hidden && !parts.actions.stop.disabled) this.pressCommon("stop");
        else target.blur();
      },
    };
  }

  nextPolicy() {
    const { store, setting } = this.view;
    if (!store?.n) return;
    const all = Array.from(this.parts.policies.querySelectorAll("[data-set=policy]:enabled"), (node) => node.dataset.value);
    this.set({ policy: all[(all.indexOf(setting.policy) + 1) % all.length] });
  }

  askNumber(open) {
    const { numberlabel, number, time } = this.parts;
    numberlabel.hidden = !open;
    number.value = "";
    (open ? number : time).focus({ preventScroll: true });
  }

  chooseNumber() {
    const expert = this.parts.number.value === "" ? NaN : Number(this.parts.number.value);
    if (!Number.isInteger(expert) || expert < 0 || expert >= this.view.store.E) return this.tell(`Experts are 0 to ${this.view.store.E - 1}.`);
    this.choose({ expert });
    this.askNumber(false);
  }

  clicked(event) {
    const near = (name) => event.target.closest(`[data-${name}]`)?.dataset;
    const { target } = event;
    if (near("act")?.act === "recipe") return this.copyRecipe();
    if (near("act")) return this.pressCommon(near("act").act);
    if (near("set")) return this.set({ [near("set").set]: near("set").value });
    if (near("do")) return this.parts.actions.stop.hidden ? this.model.send({ kind: "panel", name: near("do").panel, act: near("do").do }) : this.tell("Something runs already; Esc stops it.");
    if (near("map")) return this.chooseOn(target.closest("[data-map]"), event);
    if (!target.closest(".time") || !this.view.store?.n) return;
    const box = this.parts.time.getBoundingClientRect();
    const hit = hitTimeline(this.view, this.timeLayout, event.clientX - box.left, event.clientY - box.top);
    if (hit?.strip !== undefined) this.choose({ token: hit.strip });
    else if (hit) this.choose(hit);
  }

  // The line of code with what makes it a program beside the view.
  copyRecipe() {
    const [before, after] = this.view.store?.facts.recipe ?? ["", ""];
    this.copy(`${before}${this.parts.code.textContent}${after}`);
  }

  // A place of a panel's picture, by pointer or, with `steps` to the right and down, by key.
  chooseOn(map, { clientX, clientY }, steps = null) {
    const name = map.dataset.map;
    const panel = PANELS.find((one) => one.name === name);
    const facts = this.view.store.panels[name];
    const box = map.firstElementChild.getBoundingClientRect();
    const wish = steps ? panel.step(facts, this.view, ...steps) : panel.at(facts, this.widths[name], clientX - box.left, clientY - box.top);
    if (wish) this.choose(wish);
  }

  // ---- drawing ----

  // Here alone: asking at every step would force a layout of the whole page.
  measure() {
    const { parts, view } = this;
    if (!view.store) return;
    parts.ctl.hidden = parts.body.hidden = !view.store.n;
    this.width = this.root.clientWidth;
    this.curveWidth = Math.max(280, parts.curves.clientWidth);
    this.timeWidth = Math.max(280, parts.time.clientWidth);
    this.widths = Object.fromEntries(Object.entries(parts.places).map(([name, place]) => [name, Math.max(200, place.clientWidth)]));
  }

  paint() {
    const { view, parts } = this;
    if (!view.store || !view.setting || !this.root.isConnected) return;
    const started = performance.now();
    view.live = this.able();
    if (!this.width) this.measure();
    view.slots = view.store.slots(view.layer);
    patch(parts.say, sentence(view));
    if (view.store.n) {
      this.paintControls();
      this.paintCurves();
      this.paintTimeline();
      for (const { name, of = name, html } of PANELS) patch(parts.places[name], html(view.store.panels[of] ?? null, view, this.widths[name]));
    }
    parts.code.textContent = codeOf(view);
    clearTimeout(this.resting);
    this.resting = setTimeout(() => patch(parts.twins, twinTables(view)), REST);
    this.showState();
    this.root.dataset.drawn = ++this.draws;
    this.root.dataset.took = (performance.now() - started).toFixed(1); // ms
    this.root.dataset.setting = [view.setting.policy, view.setting.capacity, view.setting.scope].join(" ");
    this.root.dataset.place = [view.layer, view.token, view.expert].join(" ");
  }

  paintControls() {
    const { view, parts } = this;
    const { setting } = view;
    patch(parts.policies, policyButtons(view));
    patch(parts.scopes, scopeButtons(view));
    patch(parts.prefetches, prefetchButtons(view));
    patch(parts.passes, passButtons(view));
    const all = this.capacities();
    parts.capname.textContent = setting.scope === "layer" ? "Experts kept per layer" : "Experts kept in all";
    parts.capnow.textContent = setting.capacity.toLocaleString("en");
    Object.assign(parts.range, { min: 0, max: Math.max(0, all.length - 1), value: all.indexOf(setting.capacity), disabled: !all.length });
    parts.range.setAttribute("aria-valuetext", capacityText(view));
  }

  paintCurves() {
    const { view, parts } = this;
    const layout = (this.curveLayout = layoutCurves(view, this.curveWidth));
    patch(parts.curves, curvePicture(view, layout));
    for (const [name, value] of [["valuemin", layout.least], ["valuemax", layout.most], ["valuenow", view.setting.capacity], ["valuetext", capacityText(view)]]) parts.curves.setAttribute(`aria-${name}`, value);
    patch(parts.speednote, speedNote(view));
    parts.countersremark.textContent = countersRemark(view);
    patch(parts.countertable, counterTable(view));
    patch(parts.findings, findings(view));
  }

  paintTimeline() {
    const { view, parts } = this;
    const { store } = view;
    const block = view.layer === null ? null : store.timeline(view.setting, view.layer, view.token);
    const stale = !block && view.live && store.last?.layer === view.layer && view.token >= store.last.start && view.token < store.last.stop;
    const layout = (this.timeLayout = layoutTimeline(view, this.timeWidth));
    parts.timetitle.textContent = `Cache of layer ${view.layer}, token by token`;
    parts.timeremark.textContent = timelineRemark(view, layout);
    patch(parts.timekey, timelineKey(view));
    patch(parts.layers, layerMenu(view));
    patch(parts.time, timelinePicture(view, layout, block ?? (stale ? store.last : null)));
    parts.time.classList.toggle("stale", stale);
    parts.time.setAttribute("aria-label", timelineLabel(view));
    patch(parts.misssay, requestSentence(view));
  }

  // ---- states ----

  showState() {
    if (this.model.get("_status")?.state === "error") this.asked = null;
    this.showWork(WHY[this.kernel]);
  }
}

const order = (setting) => Object.entries(setting).sort(([a], [b]) => (a < b ? -1 : 1));

const layerMenu = ({ store, layer }) => (store.L < 2 ? "" : `<label>Layer <select class="layer" ${SUPPRESS}>${store.facts.layers.map((l) => `<option value="${l}"${l === layer ? " selected" : ""}>${l}</option>`).join("")}</select></label>`);

function codeOf({ setting: { policy, capacity, scope, passes, prefetch }, store: { facts } }) {
  const known = [...(facts.expert_bytes === null ? [] : ["expert_bytes=view.expert_bytes"]), ...(policy === "static" && !facts.own_profile ? ["profile=view.profile"] : [])];
  const ahead = prefetch === "none" ? [] : [prefetch === "look-ahead" ? "prefetch=lab.cache.look_ahead(view.trace)" : `prefetch=lab.cache.plan(view.trace, "${prefetch}")`];
  const words = [`policy="${policy}"`, `capacity=${capacity}`, `scope="${scope}"`, ...(passes === "trace" ? ['passes="trace"'] : []), ...known, ...ahead];
  return `lab.cache.simulate(view.trace, ${words.join(", ")})`;
}

const render = renderer(CacheView);

export default { render };
