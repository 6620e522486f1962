// Bits left before overflow, layer by layer, for the selected tap. Formats off the scale stand at its edge with the corner mark.
import { escape, fixed } from "../common/format.js";
import { markAt } from "../common/marks.js";
import { ring } from "../common/pointers.js";
import { kindOf } from "../common/tap_map.js";
import { number, shared } from "./store.js";
import { bitsText } from "./words.js";

const TALL = 216;
const TOP = 28;
const FOOT = 42;
const LEFT = 40;
const RIGHT = 78;
const LOW = -2;
const HIGH = [7, 16]; // the scale ends between these, a little above the curve

// The curve of one kind of tap: [{layer, bits, state}]; at an overflow the bits of the exact result.
function points(view, kind, format) {
  const { store, chosen } = view;
  const origin = store.facts.origins[chosen];
  return store.layers.map((layer) => store.row(store.path(kind, layer))).filter(Boolean).map((row) => {
    const born = origin && shared(origin.path) === row.path;
    const exact = born ? Math.abs(number(origin.exact) ?? NaN) : NaN;
    const odd = row.state === "passed" || (row.state === "origin" && !born);
    const again = odd ? store.replayedBits(row, format) : NaN;
    const bits = Number.isFinite(exact) ? Math.log2(store.facts.formats[format] / exact) : Number.isFinite(again) ? again : store.bits(row, format);
    return { layer: row.layer, bits, odd };
  });
}

export function headroomPicture(view, width) {
  const { store, path } = view;
  const row = store.row(path);
  if (!row || row.layer < 0) return `<p class="q pad">${row ? `<span class="m">${escape(path)}</span> stands outside the layers: ${bitsText(store.bits(row, store.facts.format))} bits left in ${escape(store.facts.format)}.` : "Nothing is selected."}</p>`;
  const { facts } = store;
  const kind = kindOf(path);
  const curve = points(view, kind, facts.format);
  const seen = curve.map(({ bits }) => bits).filter(Number.isFinite);
  const high = Math.min(HIGH[1], Math.max(HIGH[0], Math.ceil(Math.max(...seen, 0) + 0.6)));
  const lowest = curve.reduce((best, { bits }, i) => (bits < (curve[best].bits || Infinity) ? i : best), 0);
  const third = Math.ceil(curve.length / 3);
  const marked = (part) => part.some(({ bits }) => Number.isNaN(bits)); // marks of NaN lie in the band of overflow
  const right = !marked(curve.slice(-third)) && (marked(curve.slice(0, third)) || lowest < curve.length / 2);
  const clamp = (bits) => Math.max(LOW, Math.min(high, bits));
  const end = width - RIGHT;
  const y = (bits) => TOP + ((TALL - TOP - FOOT) * (high - clamp(bits))) / (high - LOW);
  const step = (end - LEFT - 28) / Math.max(1, curve.length - 1);
  const x = (i) => (curve.length === 1 ? (LEFT + end) / 2 : LEFT + 14 + i * step);
  return `<svg width="${width}" height="${TALL}" role="img" aria-label="${escape(label(curve, facts.format))}">${ground(y, end, high, right)}${line(curve, x, y)}${dots(view, curve, x, y, step, [LOW, high])}${edge(view, kind, end, high)}<text x="${(LEFT + end) / 2}" y="${TALL - 4}" text-anchor="middle">layer</text></svg>`;
}

// The words stand where no mark of NaN does, and the curve is not at its lowest.
function ground(y, end, high, right) {
  let s = "";
  for (let b = 0; b < high; b += high > 10 ? 4 : 2) s += `<path d="M${LEFT} ${y(b)}H${end}" stroke="var(--line)"/><text x="${LEFT - 6}" y="${y(b) + 4}" text-anchor="end">${b}</text>`;
  const band = (from, to, colour) => `<rect x="${LEFT}" y="${y(from)}" width="${end - LEFT}" height="${y(to) - y(from)}" fill="var(--${colour})" fill-opacity=".13"/>`;
  const word = (at, words, colour) => `<text x="${right ? end - 6 : LEFT + 6}" y="${y(at) + 4}"${right ? ' text-anchor="end"' : ""} class="${colour} strong">${words}</text>`;
  return `${s}${band(2, 0, "warn")}${band(0, LOW, "bad")}${word(1, "under 2 bits: warned", "warn")}${word(-1, "overflow", "bad")}<path d="M${LEFT} ${y(0)}H${end}" stroke="var(--bad)" stroke-width="1.5"/>`;
}

// Solid up to the origin, dotted behind it: there it is what stayed finite, or the run again in float32.
function line(curve, x, y) {
  const drawn = (odd) => {
    let s = "";
    for (let i = 1; i < curve.length; i++) {
      const [a, b] = [curve[i - 1], curve[i]];
      if (Number.isFinite(a.bits) && Number.isFinite(b.bits) && (b.odd || a.odd) === odd) s += `M${x(i - 1)} ${y(a.bits)}L${x(i)} ${y(b.bits)}`;
    }
    return s;
  };
  return `<path d="${drawn(false)}" fill="none" stroke="var(--ink)" stroke-width="2"/><path d="${drawn(true)}" fill="none" stroke="var(--ink)" stroke-width="2" stroke-dasharray="2 4"/>`;
}

function dots(view, curve, x, y, step, [low, high]) {
  const here = view.store.row(view.path).layer;
  const every = step >= 22 ? 1 : step >= 8 ? 4 : 16;
  const said = step >= 30;
  const low3 = curve.reduce((best, point) => (point.bits < (best?.bits ?? Infinity) ? point : best), null);
  let s = "";
  curve.forEach((point, i) => {
    const { layer, bits, odd } = point;
    const at = layer === here;
    if (at || (layer % every === 0 && !(here >= 0 && Math.abs(curve.findIndex((p) => p.layer === here) - i) * step < 20))) s += `<text x="${x(i)}" y="${TALL - 20}" text-anchor="middle"${at ? ' class="b"' : ""}>${layer}</text>`;
    if (!Number.isFinite(bits)) {
      s += bits === Infinity ? "" : markAt("nan", x(i) - 7, y(low) - 15, 14, 14, true);
      if (at) s += ring(x(i) - 7, y(low) - 15, 14, 14);
      return;
    }
    const r = step >= 12 ? 4 : Math.max(1.5, step / 4);
    s += `<circle cx="${x(i)}" cy="${y(bits)}" r="${r}" fill="${odd ? "var(--card)" : "var(--ink)"}" stroke="var(--ink)" stroke-width="1.5"/>`;
    if (bits > high || bits < low) s += markAt("clip", x(i) + 2, y(bits) - 8, 8, 8);
    if (said || at || point === low3) s += `<text class="b halo" x="${x(i)}" y="${y(bits) + (bits > high ? 18 : -9)}" text-anchor="middle">${fixed(bits, Math.abs(bits) < 100 ? 1 : 0)}</text>`;
    if (at) s += ring(x(i) - 6, y(bits) - 6, 12, 12);
  });
  return s;
}

// The other formats, which mostly have so much room that they are off the scale; and the name of the curve.
function edge(view, kind, end, high) {
  const { store } = view;
  const { facts } = store;
  const own = points(view, kind, facts.format).filter(({ bits }) => Number.isFinite(bits)).at(-1);
  const y = (bits) => TOP + ((TALL - TOP - FOOT) * (high - Math.max(LOW, Math.min(high, bits)))) / (high - LOW);
  const others = Object.keys(facts.formats).filter((format) => format !== facts.format);
  const off = others.filter((format) => Math.min(...points(view, kind, format).map(({ bits }) => bits).filter(Number.isFinite)) > high);
  const top = off.length ? `<path d="M${LEFT} 9H${end}" stroke="var(--ink)" stroke-dasharray="7 4"/>${markAt("clip", end - 8, 5, 8, 8)}${off.slice(0, 2).map((format, i) => `<text class="k" x="${end + 8}" y="${13 + 13 * i}">${escape(format)} ↑</text>`).join("")}` : "";
  const name = own ? Math.max(off.length * 13 + 22, y(own.bits) + 4) : 0;
  return `${top}${own ? `<text class="k" x="${end + 8}" y="${name}">${escape(facts.format)}</text>` : ""}`;
}

const label = (curve, format) => `Bits left in ${format} by layer: ${curve.slice(0, 64).map(({ layer, bits }) => `${layer}: ${bitsText(bits)}`).join(", ")}`;

export function headroomWords(view) {
  const { store, path } = view;
  const row = store.row(path);
  if (!row || row.layer < 0) return "";
  const kind = kindOf(path);
  const curve = points(view, kind, store.facts.format);
  const odd = curve.some(({ odd: behind }) => behind) ? ` Open dots: behind the origin, ${store.replayed ? "replayed in float32" : "of what stayed finite"}.` : "";
  const off = Object.keys(store.facts.formats).filter((format) => format !== store.facts.format);
  const rooms = off.map((format) => [format, Math.min(...points(view, kind, format).map(({ bits }) => bits).filter(Number.isFinite))]).filter(([, bits]) => bits > HIGH[1] && Number.isFinite(bits));
  const corner = rooms.length ? ` Corner: ${rooms.map(([format]) => format).join(" and ")} ${rooms.length > 1 ? "have" : "has"} ${Math.floor(Math.min(...rooms.map(([, bits]) => bits)))} bits or more, off this scale.` : "";
  return `Bits left = log2(largest ÷ absmax) in <span class="m">${escape(kind)}</span>.${odd}${corner}`;
}
