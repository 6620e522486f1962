// The view: one selection (tap, token, expert) and one chosen origin, parts that draw them, and messages with Python.
import { BaseView, renderer } from "../common/base_view.js";
import { download } from "../common/page.js";
import { patch } from "../common/patch.js";
import { showHelp } from "../common/states.js";
import { kindOf, ofExpert, stepOnMap } from "../common/tap_map.js";
import { unpack } from "../common/wire.js";
import { cureTable } from "./cures.js";
import { headroomPicture, headroomWords } from "./headroom.js";
import { keyboard } from "./keyboard.js";
import { nearest, operationBody, operationTitle } from "./operands.js";
import { buildShell } from "./shell.js";
import { mapKey, stateMap, wide } from "./state_map.js";
import { Store, shared } from "./store.js";
import { mapLabel, twinTables } from "./twins.js";
import { originList, stepInTree, treeLabel, treePicture, wayEnds } from "./way.js";
import { sentence, tapSentence } from "./words.js";

const REST = 250; // ms of rest before the tables for screen readers are filled
const WHY = { gone: "No kernel. What was fetched can be looked at; run the cell again for the rest and for cures.", lost: "The connection to the kernel is lost.", page: "" };

class NanView extends BaseView {
  constructor(model, root) {
    super(model, root, "nan");
    Object.assign(this.view, { store: null, path: null, token: null, expert: null, chosen: 0, box: null, allOrigins: false, running: null });
    this.parts = buildShell(root);
    this.listen({ selection: () => this.adopt(), chosen: () => this.adopt(), _in_cell: () => this.showState() }, keyboard(this.parts, this.acts()));
    this.setTheme();
    this.showState();
    model.send({ kind: "ready" });
  }

  // ---- from outside ----

  receive(content, buffers) {
    const { view, parts } = this;
    const { store } = view;
    if (content.kind !== "heard") this.seen();
    if (content.kind === "head") {
      view.store = new Store(content.facts, unpack(content.arrays, buffers));
      parts.facts.textContent = parts.facts.title = content.facts.title;
      this.adopt(true);
    } else if (content.kind === "html") {
      download(content.name, content.text);
      this.tell(`Saved as ${content.name}.`);
    } else if (!store) return;
    else if (content.kind === "origin") {
      store.ways.set(content.number, content);
      if (content.number === view.chosen) this.atBox();
    } else if (content.kind === "cell") store.addCell(content.cell);
    else if (content.kind === "replayed") store.replayed = unpack(content.arrays, buffers).absmax;
    else if (content.kind === "cures") {
      store.cures = content.rows;
      view.running = content.running;
    }
    if (store) this.paintSoon();
  }

  adopt(everything = false) {
    const { view, model } = this;
    const { path = null, token = null, expert = null } = model.get("selection") ?? {};
    const chosen = model.get("chosen") ?? 0;
    if (!view.store || (!everything && path === view.path && token === view.token && expert === view.expert && chosen === view.chosen)) return;
    Object.assign(view, { path, token, expert, chosen });
    this.atBox();
    this.paint();
  }

  // The box of the tree that the selection is about, if any.
  atBox() {
    const { view } = this;
    const boxes = view.store.ways.get(view.chosen)?.boxes ?? [];
    const is = (box) => box.path !== null && shared(box.path) === view.path && (box.token === view.token || box.column === 0);
    if (!is(boxes[view.box] ?? { path: null })) {
      const found = boxes.findIndex(is);
      view.box = found < 0 ? null : found;
    }
  }

  // ---- choosing ----

  // Keys left out keep their value; an expert stays within its layer; the place of an origin chooses it.
  choose(wish) {
    const { view, model } = this;
    const { store } = view;
    if (!store) return;
    const path = wish.path === undefined ? view.path : shared(wish.path);
    if (path !== null && !store.at.has(path)) return;
    const row = store.row(path);
    const token = wish.token ?? view.token;
    const stays = path && view.path && ofExpert(path) && row?.layer === store.row(view.path)?.layer;
    const expert = wish.expert !== undefined ? wish.expert : stays ? view.expert : null;
    const chosen = wish.chosen ?? view.chosen;
    if (wish.box !== undefined) view.box = wish.box;
    if (path === view.path && token === view.token && expert === view.expert && chosen === view.chosen) return this.paint();
    Object.assign(view, { path, token, expert, chosen });
    model.set("selection", { path, layer: row && row.layer >= 0 ? row.layer : null, token, expert: path && ofExpert(path) ? expert : null });
    model.set("chosen", chosen);
    model.save_changes();
    this.atBox();
    this.paint();
  }

  goOrigin(number) {
    const origins = this.view.store?.facts.origins ?? [];
    if (!origins.length) {
      const { closest } = this.view.store?.facts ?? {};
      return closest ? this.choose({ path: closest.path }) : this.tell("There is no origin: the run is clean.");
    }
    const chosen = (number + origins.length) % origins.length;
    const { at: path, token, expert } = origins[chosen];
    this.choose({ path, token, expert, chosen, box: 0 });
  }

  goBox(i) {
    const box = this.view.store.ways.get(this.view.chosen)?.boxes[i];
    if (!box) return;
    if (box.path === null || !this.view.store.at.has(shared(box.path))) {
      this.view.box = i;
      return this.paint();
    }
    this.choose({ path: box.path, token: box.token ?? undefined, expert: box.expert, box: i });
  }

  acts() {
    const { parts, view } = this;
    return {
      origin: () => this.goOrigin(0),
      nextOrigin: () => this.goOrigin(view.chosen + 1),
      previousOrigin: () => this.goOrigin(view.chosen - 1),
      move: (right, down) => view.store && this.choose({ path: stepOnMap(view.store, view.path, right, down) }),
      step: (right, down) => this.stepTree(right, down),
      end: (by) => this.goEnd(by),
      token: (by) => view.token !== null && this.choose({ token: Math.max(0, Math.min(view.store.n - 1, view.token + by)) }),
      help: () => showHelp(parts, parts.help.hidden),
      escape: (target) => {
        if (!parts.help.hidden) showHelp(parts, false);
        else if (!parts.actions.stop.hidden && !parts.actions.stop.disabled) this.press("stop");
        else target.blur();
      },
    };
  }

  stepTree(right, down) {
    const way = this.view.store?.ways.get(this.view.chosen);
    if (way) this.goBox(stepInTree(way, this.view.box, right, down));
  }

  goEnd(by) {
    const { store, path } = this.view;
    if (!path || store.row(path).layer < 0) return;
    const layers = by < 0 ? store.layers : [...store.layers].reverse();
    this.choose({ path: layers.map((layer) => store.path(kindOf(path), layer)).find(Boolean) });
  }

  clicked(event) {
    const near = (name) => event.target.closest(`[data-${name}]`)?.dataset[name];
    if (near("act")) return this.press(near("act"));
    if (near("cure") !== undefined) return this.runCure(Number(near("cure")));
    if (near("origin") !== undefined) return this.goOrigin(Number(near("origin")));
    if (near("box") !== undefined) return this.goBox(Number(near("box")));
    const path = near("path");
    if (path === undefined) return;
    const { store } = this.view;
    if (store.born.has(path)) this.goOrigin(store.born.get(path));
    else this.choose({ path });
  }

  press(act) {
    const { parts, view } = this;
    if (act === "allorigins" || act === "feworigins") {
      view.allOrigins = act === "allorigins";
      patch(parts.origins, originList(view));
      parts.origins.querySelector(view.allOrigins ? "[data-act=feworigins]" : "[data-act=allorigins]")?.focus({ preventScroll: true });
    } else this.pressCommon(act);
  }

  runCure(i) {
    if (!this.able() || this.view.running !== null) return;
    this.view.running = i;
    this.model.send({ kind: "cure", name: this.view.store.cures[i].name });
    this.paint();
  }

  // ---- drawing ----

  // Here alone: asking at every step would force a layout of the whole page.
  measure() {
    const { parts, view } = this;
    if (!view.store) return;
    parts.body.hidden = false;
    parts.two.classList.toggle("whole", wide(view.store));
    this.width = this.root.clientWidth;
    this.mapWidth = Math.max(300, parts.map.clientWidth);
    this.treeWidth = Math.max(480, parts.tree.clientWidth);
    this.curveWidth = Math.max(260, parts.curve.clientWidth);
  }

  paint() {
    const { view, parts } = this;
    if (!view.store || !this.root.isConnected) return;
    const started = performance.now();
    const { facts } = view.store;
    view.live = this.able();
    if (!this.width) this.measure();
    parts.body.hidden = !facts.paths.length; // a clean run that brought no map
    patch(parts.say, sentence(view));
    parts.say.classList.toggle("defect", !facts.clean);
    patch(parts.map, stateMap(view, this.mapWidth));
    patch(parts.mapkey, mapKey(view, this.mapWidth));
    parts.map.setAttribute("aria-label", mapLabel(view));
    patch(parts.tapsay, tapSentence(view));
    this.paintWay();
    [parts.optitle.textContent, parts.opremark.textContent] = operationTitle(view);
    parts.opremark.classList.toggle("m", !facts.clean);
    parts.operation.setAttribute("aria-label", parts.optitle.textContent);
    parts.waycard.setAttribute("aria-label", parts.waytitle.textContent);
    patch(parts.opbody, operationBody(view));
    patch(parts.curve, headroomPicture(view, this.curveWidth));
    patch(parts.curvewords, headroomWords(view));
    patch(parts.cures, cureTable(view));
    parts.code.textContent = codeOf(view);
    clearTimeout(this.resting);
    this.resting = setTimeout(() => patch(parts.twins, twinTables(view)), REST);
    this.showState();
    this.root.dataset.drawn = ++this.draws;
    this.root.dataset.took = (performance.now() - started).toFixed(1); // ms
    this.root.dataset.place = [view.path, view.token, view.expert].filter((v) => v !== null).join(" ");
  }

  paintWay() {
    const { view, parts } = this;
    const { clean } = view.store.facts;
    parts.waytitle.textContent = clean ? "Nearest to overflow" : "From the origin to the ruined logits";
    parts.wayremark.textContent = clean ? `no origin: ${view.store.facts.paths.length} taps hold neither NaN nor Inf` : "what each step did to it";
    parts.tree.hidden = clean;
    patch(parts.origins, originList(view));
    if (!clean) {
      patch(parts.tree, treePicture(view, this.treeWidth));
      parts.tree.setAttribute("aria-label", treeLabel(view));
    }
    patch(parts.wayends, clean ? nearest(view) : wayEnds(view));
  }

  // ---- states ----

  showState() {
    this.showWork(WHY[this.kernel]);
  }
}

const codeOf = ({ path, token, expert }) => (path === null ? "view.selection" : `view.selection = dict(${[`path="${path}"`, token === null ? "" : `token=${token}`, expert === null ? "" : `expert=${expert}`].filter(Boolean).join(", ")})`);

const render = renderer(NanView);

export default { render };
