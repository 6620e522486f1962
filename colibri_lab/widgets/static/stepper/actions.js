// What the reader can do: by key, by click, by button; most of it is a request to Python.
import { BaseView } from "../common/base_view.js";
import { interrupter } from "../common/kernel.js";
import { showHelp } from "../common/states.js";
import { moveCursor } from "./pass_map.js";

export const LATE = 700; // ms after which an unanswered request is said to wait

// A view has parts, recorded, and paints itself.
export class Actions extends BaseView {
  request(kind, more = {}) {
    if (!this.able() || this.working()) return;
    this.model.send({ kind, number: ++this.sent, ...more });
    const number = this.sent;
    setTimeout(() => this.answered < number && this.showState(), LATE);
    this.asked = performance.now();
  }

  working() {
    const { state } = this.model.get("_status");
    return this.answered < this.sent || state === "working" || state === "busy";
  }

  choose(wish) {
    const { view, model } = this;
    const { moment } = view;
    if (!moment) return;
    const [start, stop] = moment.facts.rows;
    const token = Math.max(start, Math.min(stop - 1, wish.token ?? view.token));
    const layer = wish.layer ?? moment.layer;
    const expert = wish.expert ?? (token === view.token ? moment.look.expert : moment.ids(token)?.find((e) => e >= 0) ?? moment.look.expert);
    view.editing = null;
    const [first, last] = moment.facts.window;
    if (token >= first && token < last) {
      view.token = token;
      this.paint();
    }
    model.set("selection", { layer, token, expert });
    model.save_changes();
  }

  acts() {
    const { parts, view } = this;
    return {
      step: () => this.press("step"),
      back: () => this.press("back"),
      finish: () => this.press("finish"),
      undo: () => this.press("undo"),
      fork: () => this.press("fork"),
      unit: (unit) => this.setUnit(unit),
      token: (by) => this.choose({ token: view.token + by }),
      askCondition: () => {
        parts.condition.focus();
        parts.condition.select();
      },
      cursor: (right, down) => {
        view.cursor = moveCursor(view.moment, view.cursor, right, down);
        this.paintMap();
      },
      goToCursor: () => view.cursor && this.goTo(view.cursor.stage, view.cursor.layer),
      breakpoint: () => this.toggleBreakpoint(),
      edit: (target) => this.edit(target.closest(".bufs") ? "values" : "routing"),
      help: () => showHelp(parts, parts.help.hidden),
      enter: (target) => {
        if (target === parts.condition) this.press("run");
        else if (target.dataset.add) this.press(target.dataset.add);
        else this.press("apply");
      },
      escape: (target) => {
        if (!parts.help.hidden) showHelp(parts, false);
        else if (this.model.get("_status").state === "working" || this.model.get("_status").state === "busy") this.stop();
        else if (view.editing) this.press("cancel");
        else if (target.tagName === "INPUT") parts.flow.focus();
        else target.blur();
      },
    };
  }

  clicked(event) {
    const near = (name) => event.target.closest(`[data-${name}]`)?.dataset[name];
    const act = near("act");
    if (act) return this.press(act, event.target.closest("[data-act]"));
    if (near("unit")) return this.setUnit(near("unit"));
    if (near("look")) return this.setLook(near("look"));
    const cell = event.target.closest(".cell");
    if (cell) return this.goTo(cell.dataset.stage, cell.dataset.layer === undefined ? null : Number(cell.dataset.layer));
    if (near("edit")) return this.edit("routing");
    if (near("token")) return this.choose({ token: Number(near("token")) });
    if (near("expert")) this.choose({ expert: Number(near("expert")) });
  }

  press(act, node) {
    const { parts, view, recorded } = this;
    if (this.page && ["step", "back", "finish"].includes(act)) {
      const moved = act === "finish" ? (recorded.end(), true) : recorded.move(act === "step" ? 1 : -1, this.unit);
      if (!moved) return this.tell(act === "step" ? "This is the last moment that was kept." : "This is the first moment that was kept.");
      return this.showMoment(recorded.now, true);
    }
    if ((act === "step" || act === "back") && this.answered < this.sent) return void (this.again = act); // a held key: one more, not many
    if (act === "step" || act === "back") this.request(act, { unit: this.unit });
    else if (act === "run") this.request("run_to", { condition: parts.condition.value });
    else if (act === "finish" || act === "undo") this.request(act);
    else if (act === "fork") {
      if (view.moment?.facts.run.forked) this.setLook(view.moment.facts.run.look === "fork" ? "original" : "fork");
      else this.request("fork");
    } else if (act === "drop") {
      view.comparison = null;
      this.request("drop");
    } else if (act === "stop") this.stop();
    else if (act === "toggle") this.request("break", { what: node.getAttribute("aria-pressed") === "true" ? "disable" : "enable", name: node.dataset.name });
    else if (act === "unbreak") this.request("break", { what: "remove", name: node.dataset.name });
    else if (act === "unwatch") this.request("watch", { add: false, text: node.dataset.text });
    else if (act === "break" || act === "watch") this.addText(act);
    else if (act === "open") {
      view.buffer = node.dataset.path;
      view.editing = null;
      this.paintBuffers();
    } else if (act === "editvalues") this.edit("values");
    else if (act === "editrouting") this.edit("routing");
    else if (act === "apply") this.apply();
    else if (act === "off") {
      view.editing.sent = true;
      this.request("off", { layer: view.moment.layer, expert: Number(node.dataset.of) });
    } else if (act === "cancel") {
      const panel = view.editing?.kind === "values" ? parts.bufs : parts.flow;
      view.editing = null;
      this.paint();
      panel.focus();
    } else if (act === "allchanges") {
      view.allChanges = !view.allChanges;
      this.paintFork();
    } else if (act === "copybuffer") this.copy(node.dataset.code);
    else if (act === "recipe") this.copy(`${this.head?.recipe ?? ""}${(view.moment?.facts.run.edits ?? []).map(([, code]) => `# ${code}\n`).join("")}${parts.code.textContent}\n`);
    else this.pressCommon(act);
  }

  addText(act) {
    const field = this.root.querySelector(`[data-add="${act}"]`);
    const text = field.value.trim();
    if (!text) return field.focus();
    if (act === "break") this.request("break", { what: "add", name: text });
    else this.request("watch", { add: true, text });
    field.value = "";
  }

  toggleBreakpoint() {
    const { view } = this;
    const { moment, cursor } = view;
    if (!moment) return;
    const at = cursor ?? (moment.place.stage === null ? { stage: "embed", layer: null } : moment.place);
    const layer = at.layer ?? null;
    const there = moment.facts.breakpoints.find((p) => p.place && p.place[1] === at.stage && p.place[0] === layer);
    if (there) return this.request("break", { what: "remove", name: there.name });
    this.request("break", { what: "add", name: `${layer === null ? "" : `layer == ${layer} and `}stage == '${at.stage}'` });
  }

  goTo(stage, layer) {
    if (this.page) {
      if (this.recorded.find(stage, layer)) this.showMoment(this.recorded.now, true);
      else this.tell("That moment was not kept: the walk did not stop there.");
      return;
    }
    this.request("go_to", { stage, layer, expert: stage === "expert" ? this.view.moment.lastExpert(layer) : null });
  }

  edit(kind) {
    const { view, parts } = this;
    if (!view.moment || !this.able()) return;
    if (kind === "values") {
      const b = view.moment.facts.buffers.find((one) => one.path === view.buffer);
      if (!b || b.row === null) return this.tell("Open a buffer with a row of this token first.");
      view.editing = { kind, path: b.path };
      this.paintBuffers();
      parts.detail.querySelector("input")?.focus();
      return;
    }
    if (!view.moment.ids(view.token)) return this.tell("The router of this layer has not run: step there, then edit.");
    view.editing = { kind: "routing" };
    this.paintFlow();
    parts.editor.querySelector("[data-gate]")?.focus();
  }

  apply() {
    const { view, parts } = this;
    if (!view.editing) return;
    const values = (selector, from) => Array.from(from.querySelectorAll(selector), (node) => node.value);
    view.editing.sent = true;
    if (view.editing.kind === "values") this.request("values", { path: view.editing.path, token: view.token, values: values("[data-value]", parts.detail) });
    else this.request("routing", { layer: view.moment.layer, token: view.token, experts: values("[data-slot]", parts.editor), gates: values("[data-gate]", parts.editor) });
  }

  get unit() {
    return this.model.get("unit") || "stage";
  }

  setUnit(unit) {
    this.model.set("unit", unit);
    this.model.save_changes();
    this.showUnit();
  }

  setLook(look) {
    if (!this.able()) return;
    this.model.set("look", look);
    this.model.save_changes();
  }

  stop() {
    const { model, parts } = this;
    if (parts.actions.stop.disabled) return;
    this.again = null;
    if (!model.get("_in_cell")) return model.send({ kind: "stop" });
    interrupter(model)().catch(() => this.tell("The kernel could not be interrupted from here; use its own interrupt (■, or I I)."));
  }
}
