// Numbers, token texts and experts as the reader sees them.
import { inkOn } from "./palette.js";

export const escape = (text) =>
  String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/"/g, "&quot;");

// A number with U+2212 for minus; what is no number keeps its name.
export function fixed(value, digits = 2) {
  if (Number.isNaN(value)) return "NaN";
  if (value === Infinity) return "+Inf";
  if (value === -Infinity) return "−Inf";
  const text = value.toFixed(digits);
  return (Number(text) === 0 ? text.replace("-", "") : text).replace("-", "−");
}

// Gates below half a unit of the last place are not zero.
export const gate = (value) => (value > 0 && value < 0.005 ? "<0.01" : fixed(value));

export const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)} %`;
export const chanceText = (share) => percent(share, share < 0.1 && (100 * share) % 1 > 0.05 ? 1 : 0);
export const count = (n) => String(n).replace(/\B(?=(\d{3})+$)/g, ",");
export const plural = (n, one, many = one + "s") => `${count(n)} ${n === 1 ? one : many}`;

const VISIBLE = { "\n": "↵", "\t": "→", "\r": "␍", "\0": "␀" };
const JOINERS = { "\u200b": "ZWSP", "\u200c": "ZWNJ", "\u200d": "ZWJ" };
const selector = (c) => `VS${c.codePointAt(0) < 0xfe10 ? c.codePointAt(0) - 0xfe00 + 1 : c.codePointAt(0) - 0xe0100 + 17}`;
// What has no look of its own gets a mark or, when it is all there is, its short Unicode name; inside an emoji a joiner does its work.
const visible = (text) => {
  if (/^[\u200b-\u200d\ufe00-\ufe0f\u{e0100}-\u{e01ef}]+$/u.test(text)) return Array.from(text, (c) => JOINERS[c] ?? selector(c)).join(" ");
  return text.replace(/[\n\t\r\0]/g, (c) => VISIBLE[c]).replace(/[\x01-\x1f\x7f\u200b\u200c\u200e\u200f\u2028-\u202e\ufeff]/g, "␣").replace(/^\u200d|\u200d$/g, "ZWJ");
};

const UNKNOWN = 0xffffffff; // −1 as it arrives in unsigned ids

// A token as a word of its own: leading spaces are dots, line ends are arrows; without a text its vocabulary id, and a question mark when that is not known either.
export function word(text, id, longest = 24) {
  if (!text) return id === UNKNOWN || id < 0 ? "‹?›" : `‹${id}›`;
  const shown = visible(text.replace(/^ +| +$/g, (s) => "·".repeat(s.length)));
  const letters = Array.from(shown);
  return letters.length > longest ? letters.slice(0, longest - 1).join("") + "…" : shown;
}

// A token inside running text: one leading space stays a space.
export const inText = (text, id) => {
  const shown = word(text, id, 48);
  return shown.startsWith("·") && !shown.startsWith("··") && shown.length > 1 ? " " + shown.slice(1) : shown;
};

// The number of an expert on its colour; `outlined` for left out or second.
export function chip(view, expert, outlined = false) {
  const colour = expertColour(view, expert);
  const style = outlined ? `--c:${colour}` : `background:${colour};color:${inkOn(colour)}`;
  return `<span class="chip${outlined ? " o" : ""}" style="${style}">${expert}</span>`;
}

export function expertColour(view, expert) {
  const slot = view.slots.of(expert);
  return slot >= 0 ? view.palette.experts[slot] : view.palette.none;
}
