// The view: the moment that is shown, parts that draw it, and messages with Python.
import { renderer } from "../common/base_view.js";
import { SUPPRESS } from "../common/frame.js";
import { download } from "../common/page.js";
import { patch } from "../common/patch.js";
import { Actions } from "./actions.js";
import { Moment } from "./moment.js";
import { Recorded } from "./recorded.js";
import { stopSentence } from "./words.js";
import { passMap } from "./pass_map.js";
import { flowPicture } from "./flow.js";
import { breakpointList, changeList, changesRemark, watchList } from "./lists.js";
import { bufferDetail, bufferTable, defaultBuffer } from "./buffers.js";
import { Comparison, forkPanel } from "./fork_view.js";
import { routingEditor } from "./editor.js";
import { buildShell } from "./shell.js";
import { keyboard } from "./keyboard.js";
import { twin } from "./twin.js";
import { showWork } from "./work_state.js";

const REST = 250; // ms of rest before the table for screen readers is filled
const WIDE = 1056; // from here on the aggregator stands beside the experts

class StepperView extends Actions {
  constructor(model, root) {
    super(model, root, "stepper");
    Object.assign(this.view, { moment: null, token: 0, buffer: null, cursor: null, editing: null, comparison: null });
    this.recorded = new Recorded();
    this.sent = this.answered = 0;
    this.parts = buildShell(root);
    this.listen({ unit: () => this.showUnit(), selection: () => this.adopt() }, keyboard(this.parts, this.acts()));
    this.setTheme();
    this.showUnit();
    this.showState();
    model.send({ kind: "ready" });
  }

  // ---- from outside ----

  receive(content, buffers) {
    const { view, parts } = this;
    if (content.kind === "head") {
      this.head = content;
      parts.facts.textContent = content.title;
    } else if (content.kind === "frame" && this.head) {
      this.take(new Moment(this.head, content, buffers));
      if (this.answered === this.sent) this.seen(); // a frame that nobody asked for: from a cell
    } else if (content.kind === "compared" && this.head) {
      view.comparison = new Comparison(content, buffers);
      this.paintFork();
    } else if (content.kind === "html") {
      download(content.name, content.text);
      this.tell(`Saved as ${content.name}.`);
    } else if (content.kind === "done") {
      this.answered = content.number;
      this.showState();
      if (this.again) {
        const act = this.again;
        this.again = null;
        this.press(act);
      }
    }
  }

  take(moment) {
    const { view } = this;
    if (this.page) {
      this.recorded.add(moment);
      if (this.soon) return;
      this.soon = requestAnimationFrame(() => {
        this.soon = null;
        this.showMoment(this.recorded.now, false);
      });
      return;
    }
    const moved = view.moment && JSON.stringify(view.moment.place) !== JSON.stringify(moment.place);
    this.showMoment(moment, moved);
  }

  showMoment(moment, moved) {
    const { view } = this;
    view.moment = moment;
    view.token = moment.look.token;
    if (moved) view.cursor = null;
    if (view.editing && (moved || view.editing.sent)) view.editing = null;
    if (!moment.facts.buffers.some((b) => b.path === view.buffer) || moved) view.buffer = defaultBuffer(moment.facts.buffers);
    this.moved = moved;
    this.paint();
  }

  // A selection that Python made: its frame follows and brings everything; the token is shown at once.
  adopt() {
    const { view } = this;
    const wish = this.model.get("selection");
    if (!view.moment || this.page) return;
    const [first, stop] = view.moment.facts.window;
    if (wish.layer === view.moment.layer && wish.token >= first && wish.token < stop && wish.token !== view.token) {
      view.token = wish.token;
      this.paint();
    }
  }

  // ---- drawing ----

  // Here alone: asking at every step would force a layout of the whole page.
  measure() {
    this.parts.body.hidden = false;
    this.width = this.root.clientWidth;
    this.mapWidth = Math.max(300, this.parts.map.clientWidth || 458);
  }

  paint() {
    const { view, parts } = this;
    if (!view.moment || !this.root.isConnected) return;
    const started = performance.now();
    view.live = this.able();
    view.slots = view.moment.slots;
    if (!this.width) this.measure();
    const { facts } = view.moment;
    parts.body.hidden = false;
    patch(parts.say, stopSentence(view));
    this.paintMap();
    patch(parts.breaks, breakpointList(facts.breakpoints, view.live));
    patch(parts.watches, watchList(facts.watches, view.live));
    patch(parts.changes, changeList(facts.run.edits, view.live));
    parts.whose.textContent = changesRemark(facts.run.edits, facts.run.forked);
    parts.forks.hidden = !facts.run.forked;
    this.paintFlow();
    this.paintBuffers();
    this.paintFork();
    parts.code.textContent = facts.code;
    clearTimeout(this.resting);
    this.resting = setTimeout(() => patch(parts.twins, twin(view)), REST);
    this.showState();
    this.root.dataset.drawn = ++this.draws;
    this.root.dataset.took = (performance.now() - started).toFixed(1); // ms
    this.root.dataset.place = [facts.place.layer, facts.place.stage, facts.place.expert].filter((v) => v !== null).join(" ");
  }

  paintMap() {
    const { view, parts } = this;
    const [done, all] = view.moment.progress();
    const passes = this.head.passes.length;
    const number = this.head.passes.findIndex(([start]) => start === view.moment.facts.rows[0]) + 1;
    const kept = this.page ? ` · moment ${this.recorded.at + 1} of ${this.recorded.moments.length} kept` : "";
    parts.count.textContent = `${done} of ${all} stages done${passes > 1 ? `, pass ${number} of ${passes}` : ""}${kept}`;
    patch(parts.map, passMap(view, this.mapWidth));
    const at = view.cursor ?? view.moment.place;
    parts.map.setAttribute("aria-label", `Map of the forward pass. ${view.cursor ? "Cell" : "Stopped after"} ${at.stage ?? "nothing yet"}${at.layer === null || at.layer === undefined ? "" : `, layer ${at.layer}`}. Arrows move, Enter goes there, B sets a breakpoint.`);
  }

  paintFlow() {
    const { view, parts } = this;
    const { moment } = view;
    parts.flowtitle.textContent = moment.head.moe.includes(moment.layer) ? `Layer ${moment.layer}, from router to aggregator` : `Layer ${moment.layer}, dense`;
    parts.flow.setAttribute("aria-label", `Layer ${moment.layer}, token ${view.token}. Up and down choose another token, E edits.`);
    patch(parts.flowtools, view.live && moment.ids(view.token) ? `<button type="button" class="btn low" data-act="editrouting" ${SUPPRESS}>Edit token ${view.token}<kbd>E</kbd></button>` : "");
    const editing = view.editing?.kind === "routing";
    parts.editor.hidden = !editing;
    patch(parts.editor, editing ? routingEditor(view) : "");
    patch(parts.picture, flowPicture(view, this.width >= WIDE));
    parts.picture.classList.toggle("moved", Boolean(this.moved));
    this.moved = false;
  }

  paintBuffers() {
    patch(this.parts.table, bufferTable(this.view));
    patch(this.parts.detail, bufferDetail(this.view));
  }

  paintFork() {
    const { view, parts } = this;
    if (!view.moment) return;
    patch(parts.forkpanel, forkPanel(view));
    const own = view.moment.facts.run.edits.filter(([run]) => run === "fork");
    parts.forkwords.textContent = own.length ? own.at(-1)[1] : "";
  }

  // ---- states ----

  showUnit() {
    for (const node of this.parts.units) node.setAttribute("aria-pressed", String(node.dataset.unit === this.unit));
  }

  showState() {
    showWork(this);
  }
}

const render = renderer(StepperView);

export default { render };
