// The tokens as readable text with their own line ends; tint = first choice, underline = second, numbers below.
// A long text is shown as a window around the selection. Layer and colour changes patch the tokens, they do not rebuild them.
import { withAlpha } from "../common/palette.js";
import { FLAG } from "./store.js";
import { chip, count, escape, expertColour, fixed, inText } from "../common/format.js";
import { markKey } from "../common/marks.js";
import { strangeMark } from "./sentence.js";

const ALL = 400; // up to so many tokens are shown at once
const WINDOW = 120; // tokens shown of a longer text
const CLEAR = { logit: 2, score: 0.2 }; // a margin from which a token is clear: no fill

export class TextStrip {
  constructor(host, onSelect, onHover) {
    this.host = host;
    this.list = host.querySelector(".tokens");
    this.legend = host.querySelector(".legend");
    this.start = this.stop = -1;
    this.nodes = [];
    const tokenOf = (event) => {
      const node = event.target.closest(".tok");
      return node ? Number(node.dataset.t) : null;
    };
    this.list.addEventListener("click", (event) => {
      const jump = event.target.closest("[data-jump]");
      const t = jump ? Number(jump.dataset.jump) : tokenOf(event);
      if (t !== null) onSelect(t);
    });
    this.list.addEventListener("mousemove", (event) => onHover(tokenOf(event)));
    this.list.addEventListener("mouseleave", () => onHover(null));
  }

  // New data: everything is built again.
  reset() {
    this.start = this.stop = -1;
  }

  // Another layer or other data.
  update(view) {
    this.follow(view);
    this.paint(view);
  }

  // Another token of the same layer.
  move(view) {
    if (this.follow(view)) this.paint(view);
    else this.select(view);
  }

  // Builds the tokens anew when the selection is not well inside what is shown; whether it did.
  follow(view) {
    const { store } = view;
    const all = store.T <= ALL;
    const inside = view.token >= this.start + (this.start > 0 ? 8 : 0) && view.token < this.stop - (this.stop < store.T ? 8 : 0);
    if (this.start >= 0 && (all || inside)) return false;
    const start = all ? 0 : Math.max(0, Math.min(view.token - WINDOW / 2, store.T - WINDOW));
    this.build(view, lineStart(store.facts.texts, start), all ? store.T : Math.min(store.T, start + WINDOW));
    return true;
  }

  build(view, start, stop) {
    const { store } = view;
    this.start = start;
    this.stop = stop;
    const html = ['<div class="line" role="none">'];
    const jump = (t, words) => `<span class="jump" role="none" data-jump="${t}">${words}</span>`;
    if (start > 0) html.push(jump(start - 1, `⋯ ${count(start)} tokens above`));
    for (let t = start; t < stop; t++) {
      const text = store.facts.texts[t];
      html.push(`<span class="tok" role="option" id="${view.uid}-t${t}" data-t="${t}" aria-selected="false"><span class="tx">${escape(inText(text, store.kind[t]))}</span><span class="tg"><b></b><i></i></span></span>`);
      if (text.includes("\n") && t + 1 < stop) html.push('</div><div class="line" role="none">');
    }
    if (stop < store.T) html.push(jump(stop, `⋯ ${count(store.T - stop)} tokens below`));
    html.push("</div>");
    this.list.innerHTML = html.join("");
    this.nodes = Array.from(this.list.querySelectorAll(".tok"), (node) => {
      const [text, tag] = node.children;
      return { node, text, tag, strong: tag.firstChild, weak: tag.lastChild, mark: "", style: "", first: "", second: "" };
    });
    this.selected = null;
  }

  paint(view) {
    const { store, palette } = view;
    const sides = look(view);
    this.nodes.forEach((entry, i) => {
      const [style, first, second, mark] = sides(store.at(view.layer, this.start + i));
      if (style !== entry.style) entry.text.style.cssText = entry.style = style;
      if (first !== entry.first) entry.strong.textContent = entry.first = first;
      if (second !== entry.second) entry.weak.textContent = entry.second = second;
      if (mark !== entry.mark) entry.tag.dataset.mark = entry.mark = mark;
    });
    this.select(view);
    this.legend.innerHTML = legend(view, palette);
  }

  select(view) {
    const entry = this.nodes[view.token - this.start];
    if (this.selected === entry) return;
    this.selected?.node.setAttribute("aria-selected", "false");
    entry?.node.setAttribute("aria-selected", "true");
    this.selected = entry;
    if (entry) {
      this.list.setAttribute("aria-activedescendant", entry.node.id);
      keepVisible(this.list, entry.node);
    }
  }
}

// The beginning of the line that token `start` stands in, if that is near.
function lineStart(texts, start) {
  for (let back = 0; back < 24 && back < start; back++) if (texts[start - 1 - back].includes("\n")) return start - back;
  return start;
}

// Scrolls inside the strip only; the page stays where it is.
function keepVisible(list, node) {
  const top = node.offsetTop; // the strip is the offset parent
  if (top < list.scrollTop) list.scrollTop = top - 6;
  else if (top + node.offsetHeight > list.scrollTop + list.clientHeight) list.scrollTop = top + node.offsetHeight - list.clientHeight + 6;
}

// How a token looks, as a function of what the router did: style, bold text, plain text, mark.
function look(view) {
  const { store, palette, by } = view;
  const single = store.many || store.K < 2;
  const clear = CLEAR[store.facts.by_score[view.layer] ? "score" : "logit"];
  return (here) => {
    if (!here) return [`border-color:${palette.line}`, "", "", ""];
    if (here.flags & FLAG.unrecorded) return [`border-color:${palette.line2};border-bottom-style:dotted`, "", "", "unknown"];
    if (here.flags & FLAG.unranked) return [`border-color:${palette.mark};border-bottom-style:double`, "", "", strangeMark(here.flags)];
    if (by === "expert") {
      const [first, second = first] = here.ids;
      const colour = expertColour(view, first);
      const line = single ? colour : expertColour(view, second);
      return [`background:${withAlpha(colour, view.slots.of(first) < 0 ? 0.12 : palette.tint)};border-color:${line}`, String(first), single || here.ids.length < 2 ? "" : String(second), ""];
    }
    const value = by === "entropy" ? here.entropy : here.margin;
    const strength = by === "entropy" ? value : 1 - Math.min(1, Math.max(0, value / clear));
    if (!(strength > 0.03)) return [`border-color:${palette.line}`, "", fixed(value), ""];
    const colour = palette.of(strength);
    return [`background:${colour};border-color:${colour};color:${palette.inkOf(strength)}`, "", fixed(value), ""];
  };
}

function legend(view, palette) {
  const { store, layer } = view;
  const parts = [];
  if (view.by === "expert" && store.many) {
    const chips = view.slots.shown.map((e) => chip(view, e)).join(" ");
    const pinned = store.pins.get(layer)?.length ? "busiest or pinned" : "busiest";
    const others = store.E > view.slots.shown.length ? ` <span class="chip" style="background:${palette.none};color:#111111">n</span> others` : "";
    parts.push(`<span>8 colours go to the ${pinned} experts of layer ${store.facts.layers[layer]}: ${chips}${others}</span>`);
  } else if (view.by === "expert") {
    parts.push(`<span>${store.K < 2 ? "tint and number: the chosen expert" : "tint and bold number: first choice; underline and plain number: second"}</span>`);
    parts.push(`<span>${view.slots.shown.map((e) => chip(view, e)).join(" ")}</span>`);
  } else {
    const clear = store.facts.by_score[layer] ? CLEAR.score : CLEAR.logit;
    const [weak, strong, words] = view.by === "entropy" ? ["0", "1", "no fill: sure; strongest: undecided"] : [`≥ ${clear}`, "0", "no fill: clear; strongest: tie"];
    parts.push(`<span class="ends">${weak} ${ramp(palette)} ${strong}</span><span>${words}</span>`);
  }
  parts.push(markKey(strangeTokens(view)));
  return parts.join("");
}

const ramp = (palette) =>
  `<span class="ramp" aria-hidden="true">${Array.from({ length: 16 }, (_, i) => `<i style="background:${palette.of(i / 15)}"></i>`).join("")}</span>`;

// Marks of the selected layer with their counts.
function strangeTokens({ store, layer }) {
  const block = store.blocks[layer];
  const n = { nan: 0, "+inf": 0, "-inf": 0, unknown: 0 };
  for (const flags of block ? block.flags : []) {
    if (flags & FLAG.nan || (flags & FLAG.unranked && !(flags & FLAG.plusInf))) n.nan++;
    if (flags & FLAG.plusInf) n["+inf"]++;
    if (flags & FLAG.minusInf) n["-inf"]++;
    if (flags & FLAG.unrecorded) n.unknown++;
  }
  return [["nan", "NaN", n.nan], ["+inf", "+Inf", n["+inf"]], ["-inf", "−Inf", n["-inf"]], ["unknown", "not recorded", n.unknown]];
}
