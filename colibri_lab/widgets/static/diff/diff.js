// The view: one selection (tap, token, expert), parts that draw it, and messages with Python.
import { BaseView, renderer } from "../common/base_view.js";
import { escape, plural } from "../common/format.js";
import { download } from "../common/page.js";
import { patch } from "../common/patch.js";
import { showHelp } from "../common/states.js";
import { kindOf, ofExpert, stepOnMap } from "../common/tap_map.js";
import { unpack } from "../common/wire.js";
import { errorMap, wide } from "./error_map.js";
import { flipHere, flipTable, flipsRemark } from "./flips.js";
import { keyboard } from "./keyboard.js";
import { klPicture, nextPicture, predictionRemark, predictionWords } from "./prediction.js";
import { buildShell } from "./shell.js";
import { Store, isIds } from "./store.js";
import { mapLabel, twinTables } from "./twins.js";
import { valuesCard, valuesRemark } from "./values.js";
import { whyCard } from "./why.js";
import { tapSentence, verdictSentence } from "./words.js";

const REST = 250; // ms of rest before the tables for screen readers are filled
const WHY = { gone: "No kernel. What was fetched can be looked at; run the cell again for the rest.", lost: "The connection to the kernel is lost.", page: "" };

class DiffView extends BaseView {
  constructor(model, root) {
    super(model, root, "diff");
    Object.assign(this.view, { store: null, path: null, token: null, expert: null, allFlips: false, allTried: false });
    this.parts = buildShell(root);
    this.listen({ selection: () => this.adopt() }, keyboard(this.parts, this.acts()));
    this.setTheme();
    this.showState();
    model.send({ kind: "ready" });
  }

  // ---- from outside ----

  receive(content, buffers) {
    const { view, parts } = this;
    if (content.kind !== "heard") this.seen();
    if (content.kind === "head") {
      view.store = new Store(content.facts, unpack(content.arrays, buffers));
      patch(parts.facts, factsHtml(content.facts));
      parts.facts.title = parts.facts.textContent;
      this.adopt(true);
    } else if (content.kind === "html") {
      download(content.name, content.text);
      this.tell(`Saved as ${content.name}.`);
    } else if (view.store && content.kind === "values") {
      view.store.addValues(content.facts, buffers, content.arrays);
      if (content.facts.path === view.path) this.paintSoon();
    } else if (view.store && content.kind === "next") {
      view.store.addNext(content.facts, buffers, content.arrays);
      if (content.facts.token === view.token) this.paintSoon();
    }
  }

  adopt(everything = false) {
    const { view, model } = this;
    const { path = null, token = null, expert = null } = model.get("selection") ?? {};
    if (!view.store || (!everything && path === view.path && token === view.token && expert === view.expert)) return;
    Object.assign(view, { path, token, expert });
    this.paint();
  }

  // ---- choosing ----

  // Keys left out keep their value; an expert stays within its layer.
  choose(wish) {
    const { view, model } = this;
    const { store } = view;
    if (!store) return;
    const path = wish.path ?? view.path;
    const row = store.row(path);
    const token = wish.token ?? view.token;
    const stays = path && view.path && ofExpert(path) && row?.layer === store.row(view.path)?.layer;
    const expert = wish.expert !== undefined ? wish.expert : stays ? view.expert : null;
    if (path === view.path && token === view.token && expert === view.expert) return;
    Object.assign(view, { path, token, expert });
    model.set("selection", { path, layer: row && row.layer >= 0 ? row.layer : null, token, expert });
    model.save_changes();
    this.paint();
  }

  goFirst() {
    const { store } = this.view;
    const first = store?.facts.first;
    if (first) this.choose({ path: first.path, token: first.token >= 0 ? first.token : this.view.token, expert: first.expert });
    else this.tell("There is no divergence to go to.");
  }

  goFlip(by) {
    const { view } = this;
    const { store } = view;
    if (!store?.flips) return this.tell("No token is routed differently.");
    const here = flipHere(view);
    const next = here < 0 ? (by > 0 ? 0 : store.flips - 1) : (here + by + store.flips) % store.flips;
    this.selectFlip(next);
  }

  selectFlip(i) {
    const flip = this.view.store.flip(i);
    const path = `layers.${flip.layer}.moe.expert_ids`;
    if (this.view.store.at.has(path)) this.choose({ path, token: flip.token });
  }

  acts() {
    const { parts, view } = this;
    return {
      first: () => this.goFirst(),
      nextFlip: () => this.goFlip(1),
      previousFlip: () => this.goFlip(-1),
      flip: (by) => this.goFlip(by),
      move: (right, down) => view.store && this.choose({ path: stepOnMap(view.store, view.path, right, down) }),
      position: (by) => this.goPosition(by),
      token: (by) => view.token !== null && this.choose({ token: Math.max(0, Math.min(view.store.n - 1, view.token + by)) }),
      end: (by, prediction) => (prediction ? this.goPosition(by * Infinity) : this.goEnd(by)),
      help: () => showHelp(parts, parts.help.hidden),
      escape: (target) => (parts.help.hidden ? target.blur() : showHelp(parts, false)),
    };
  }

  goPosition(by) {
    const { store, token } = this.view;
    const positions = store?.table.positions;
    if (!positions?.length) return;
    const nearest = store.positionOf.get(token) ?? positions.findLastIndex((t) => t <= token);
    this.choose({ token: positions[Math.max(0, Math.min(positions.length - 1, nearest + by))] });
  }

  goEnd(by) {
    const { store, path } = this.view;
    if (!path || store.row(path).layer < 0) return;
    const layers = by < 0 ? store.layers : [...store.layers].reverse();
    this.choose({ path: layers.map((layer) => store.path(kindOf(path), layer)).find(Boolean) });
  }

  clicked(event) {
    const { view } = this;
    const near = (name) => event.target.closest(`[data-${name}]`)?.dataset[name];
    const act = near("act");
    if (act) return this.press(act);
    if (near("flip") !== undefined) {
      this.selectFlip(Number(near("flip")));
      return this.parts.fliplist.querySelector(`button[data-flip="${near("flip")}"]`)?.focus({ preventScroll: true });
    }
    if (near("expert") !== undefined) {
      const expert = Number(near("expert"));
      return this.choose({ path: near("of"), expert: view.path === near("of") && view.expert === expert ? null : expert });
    }
    if (near("token") !== undefined) return this.choose({ token: Number(near("token")) });
    if (near("path") === undefined) return;
    const first = view.store.facts.first;
    const path = near("path");
    if (first?.path === path) this.goFirst();
    else this.choose({ path, token: firstToken(view, path) });
  }

  press(act) {
    const { parts, view } = this;
    if (act === "allflips" || act === "fewflips") {
      view.allFlips = act === "allflips";
      this.paintFlips();
      parts.fliplist.querySelector(view.allFlips ? "[data-act=fewflips]" : "[data-act=allflips]")?.focus({ preventScroll: true });
    } else if (act === "alltried" || act === "fewtried") {
      view.allTried = act === "alltried";
      patch(parts.reasons, whyCard(view));
      parts.reasons.querySelector(view.allTried ? "[data-act=fewtried]" : "[data-act=alltried]")?.focus({ preventScroll: true });
    } else if (act === "copyconfirm") this.copy(view.store.facts.diagnosis.confirm);
    else this.pressCommon(act);
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
    this.klWidth = Math.max(240, parts.kl.clientWidth);
  }

  paint() {
    const { view, parts } = this;
    if (!view.store || !this.root.isConnected) return;
    const started = performance.now();
    view.live = this.able();
    if (!this.width) this.measure();
    parts.body.hidden = false;
    view.slots = view.store.slots(view.store.row(view.path)?.layer ?? -1);
    patch(parts.say, verdictSentence(view));
    parts.say.classList.toggle("defect", view.store.facts.verdict === "defect");
    patch(parts.map, errorMap(view, this.mapWidth));
    parts.map.setAttribute("aria-label", mapLabel(view));
    patch(parts.tapsay, tapSentence(view));
    patch(parts.reasons, whyCard(view));
    this.paintFlips();
    patch(parts.valuesremark, valuesRemark(view));
    patch(parts.valuesbody, valuesCard(view));
    this.paintPrediction();
    parts.code.textContent = codeOf(view);
    clearTimeout(this.resting);
    this.resting = setTimeout(() => patch(parts.twins, twinTables(view)), REST);
    this.showState();
    this.root.dataset.drawn = ++this.draws;
    this.root.dataset.took = (performance.now() - started).toFixed(1); // ms
    this.root.dataset.place = [view.path, view.token, view.expert].filter((v) => v !== null).join(" ");
  }

  paintFlips() {
    const { view, parts } = this;
    parts.flipsremark.textContent = flipsRemark(view.store);
    patch(parts.fliplist, flipTable(view));
  }

  paintPrediction() {
    const { view, parts } = this;
    parts.predictionremark.textContent = predictionRemark(view);
    patch(parts.kl, klPicture(view, this.klWidth));
    patch(parts.next, nextPicture(view));
    patch(parts.nextwords, predictionWords(view));
  }

  // ---- states ----

  showState() {
    this.showWork(WHY[this.kernel]);
  }
}

function factsHtml({ names, made, lengths, tokens }) {
  const run = (letter, i) => `<b>${letter}</b> ${escape(names[i])}${made[i] && made[i] !== names[i] ? `, ${escape(made[i])}` : ""}`;
  const same = lengths[0] === tokens && lengths[1] === tokens;
  return `${run("A", 0)} · ${run("B", 1)} · ${same ? `same ${plural(tokens, "token")}` : `the first ${plural(tokens, "token")} of ${lengths.join(" and ")}`}`;
}

const codeOf = ({ path, token, expert }) => `view.selection = dict(${[path === null ? "" : `path="${path}"`, token === null ? "" : `token=${token}`, expert === null ? "" : `expert=${expert}`].filter(Boolean).join(", ")})`;

// Where to look in a tap: the first token that differs there; of expert ids its weightiest flip.
function firstToken({ store, token }, path) {
  const row = store.row(path);
  if (isIds(path)) for (let i = 0; i < store.flips; i++) if (store.table.flip_layer[i] === row.layer) return store.table.flip_token[i];
  return row.token >= 0 ? row.token : token;
}

const render = renderer(DiffView);

export default { render };
