// What limits each stage: arithmetic by bytes read, both axes logarithmic, under the two limits measured in the same process.
import { escape, percent } from "../common/format.js";
import { SUPPRESS } from "../common/frame.js";

const LEFT = 46;
const TOP = 18;
const FOOT = 34;
const LEGEND = 132; // beside the plot; below a width it goes under it
const R = 8; // of a letter's circle
const TALL = 300;
const RING = [[1, 0], [1, 1], [-1, 0], [1, -1], [0, 1], [-1, 1], [-1, -1], [0, -1]]; // where a letter goes whose place is taken
const HALO = 'style="paint-order:stroke;stroke:var(--card);stroke-width:4px"';

const giga = (rate) => {
  const value = rate / 1e9;
  return value >= 10 ? value.toFixed(0) : value >= 0.1 ? value.toFixed(1) : value.toPrecision(1);
};
const power = (k) => (k >= 0 ? String(2 ** k) : ({ "-1": "½", "-2": "¼", "-3": "⅛" }[k] ?? `1/${2 ** -k}`));

function rooflinePicture(state, width) {
  const { points, limits } = state;
  if (!points.length) return '<p class="q pad">No stage of this run did arithmetic.</p>';
  const beside = width >= 420;
  const at = scales(points, limits, width - (beside ? LEGEND : 12));
  const marks = places(at, state);
  const names = legend(points);
  const tall = TALL + (beside ? Math.max(0, names.length * 15 + TOP + 40 - TALL) : 16 * Math.ceil(names.length / 3) + 20);
  const where = beside ? (i) => [at.right + 14, TOP + 14 + 15 * i] : (i) => [LEFT + (i % 3) * ((width - LEFT) / 3), TALL + 14 + 16 * Math.floor(i / 3)];
  const key = names.map(([letter, stage], i) => `<text class="${stage === state.slowest ? "b" : "k"}" x="${where(i)[0]}" y="${where(i)[1]}">${letter} ${escape(stage)}</text>`).join("");
  const [x, y] = where(beside ? names.length : 3 * Math.ceil(names.length / 3));
  return `<svg width="${width}" height="${tall}" viewBox="0 0 ${width} ${tall}" role="img" aria-label="${escape(label(state))}">${ground(at)}${roof(at, limits, marks)}${drawn(marks, state)}${key}${shapes(x, y, points, beside)}</svg>`;
}

// Whole powers of two around the points, the limits and their crossing.
function scales(points, limits, right) {
  const crossing = limits.flops / limits.read;
  const xs = [...points.map((p) => p.intensity), crossing].map(Math.log2);
  const [low, high] = [Math.floor(Math.min(...xs) - 0.5), Math.ceil(Math.max(...xs) + 1.5)];
  const ys = [...points.map((p) => p.rate), limits.flops].map((rate) => Math.log2(rate / 1e9));
  const [bottom, top] = [Math.floor(Math.min(...ys) - 0.5), Math.max(...ys) + 0.4];
  const x = (intensity) => LEFT + ((Math.log2(intensity) - low) * (right - LEFT)) / (high - low);
  const y = (rate) => TALL - FOOT - ((Math.log2(rate / 1e9) - bottom) * (TALL - FOOT - TOP)) / (top - bottom);
  return { x, y, low, high, bottom, top, right, crossing };
}

function ground({ x, y, low, high, bottom, top, right }) {
  let s = "";
  const [acrossStep, upStep] = [Math.max(1, Math.round((high - low) / 5)), Math.max(1, Math.round((top - bottom) / 4))];
  for (let k = low; k <= high; k += acrossStep) s += `<path d="M${x(2 ** k)} ${TOP}V${TALL - FOOT}" stroke="var(--line)"/><text x="${x(2 ** k)}" y="${TALL - FOOT + 14}" text-anchor="middle">${power(k)}</text>`;
  for (let k = Math.ceil(bottom); k <= top; k += upStep) if (y(2 ** k * 1e9) < TALL - FOOT - 6) s += `<path d="M${LEFT} ${y(2 ** k * 1e9)}H${right}" stroke="var(--line)"/><text x="${LEFT - 6}" y="${y(2 ** k * 1e9) + 4}" text-anchor="end">${power(k)}</text>`;
  return `${s}<text x="${LEFT}" y="${TALL - 4}">FLOP per byte read →</text><text x="2" y="11">GFLOP/s ↑</text>`;
}

function roof({ x, y, low, bottom, right, crossing }, { read, flops }, marks) {
  const start = Math.max(2 ** low, (2 ** bottom * 1e9) / read); // where the slope enters the plot
  const [x0, y0, x1, y1] = [x(start), y(read * start), x(crossing), y(flops)];
  const words = `read limit ${giga(read)} GB/s`;
  const long = 6.2 * words.length;
  const ends = [0.9, 0.78, 0.66, 0.54, 0.42].map((t) => [x0 + t * (x1 - x0) - 10, y0 + t * (y1 - y0) + 4]);
  const clear = ([right, base]) => right - long > LEFT && marks.every(({ place: [a, b] }) => a < right - long - R || a > right + R || Math.abs(b - base + 4) > R + 7);
  const [end, base] = ends.find(clear) ?? ends[0];
  return `<path d="M${x0} ${y0}L${x1} ${y1}H${right}" fill="none" stroke="var(--ink)" stroke-width="2"/><text class="k" x="${end}" y="${base}" text-anchor="end" ${HALO}>${words}</text><text class="k" x="${right}" y="${y1 - 6}" text-anchor="end" ${HALO}>FMA limit ${giga(flops)} GFLOP/s</text>`;
}

// Where each letter stands: at its point, or aside when that place is taken.
function places(at, { points, slowest }) {
  const out = [];
  const free = ([x, y]) => x > LEFT + R && x < at.right - R && y > TOP + R && y < TALL - FOOT - R && out.every(({ place: [a, b] }) => Math.hypot(a - x, b - y) > 2 * R + 1);
  const order = [...points].sort((a, b) => Number(b.stage === slowest) - Number(a.stage === slowest) || b.seconds - a.seconds);
  for (const point of order) {
    const home = [at.x(point.intensity), at.y(point.rate)];
    const ring = [1, 2, 3, 4].flatMap((n) => RING.map(([dx, dy]) => [home[0] + 19 * n * dx, home[1] + 19 * n * dy]));
    out.push({ point, home, place: [home, ...ring].find(free) ?? home });
  }
  return out;
}

// A letter that stands aside keeps a line to its point.
function drawn(marks, { slowest }) {
  const lines = marks.filter(({ home, place }) => place !== home).map(({ home: [x, y], place: [a, b] }) => `<path d="M${x} ${y}L${a} ${b}" stroke="var(--line2)"/><circle cx="${x}" cy="${y}" r="2" fill="var(--ink)"/>`);
  return lines.join("") + marks.map(({ point, place }) => letter(point, place, point.stage === slowest)).join("");
}

function letter(point, [x, y], filled) {
  const style = `fill="${filled ? "var(--mark)" : "var(--card)"}" stroke="var(--mark)" stroke-width="1.5"`;
  const shape = point.phase === "decode" ? `<circle cx="${x}" cy="${y}" r="${R}" ${style}/>` : `<rect x="${x - R + 0.5}" y="${y - R + 0.5}" width="${2 * R - 1}" height="${2 * R - 1}" rx="3" ${style}/>`;
  return `<g class="stage"><title>${escape(pointWords(point))}</title>${shape}<text x="${x}" y="${y + 4}" text-anchor="middle" style="font-weight:700;fill:${filled ? "var(--markp)" : "var(--ink)"}">${point.letter}</text></g>`;
}

const pointWords = (p) => `${p.stage}, ${p.phase}: ${giga(p.rate)} GFLOP/s at ${p.intensity.toPrecision(2)} FLOP per byte, ${percent(p.share)} of the ${p.bound === "read" ? "read" : "FMA"} limit`;
const label = ({ points }) => `Roofline by stage. ${points.map(pointWords).join(". ")}.`;

const legend = (points) => [...new Map(points.map(({ letter: name, stage }) => [name, stage]))];

function shapes(x, y, points, beside) {
  const seen = new Set(points.map(({ phase }) => phase));
  const style = 'fill="none" stroke="var(--mark)" stroke-width="1.3"';
  const items = [["decode", `<circle cx="5" cy="-4" r="5" ${style}/>`], ["prefill", `<rect y="-9" width="10" height="10" rx="2" ${style}/>`]].filter(([phase]) => seen.has(phase));
  return items.map(([phase, shape], i) => `<g transform="translate(${beside ? x : x + 90 * i},${y + 6 + (beside ? 15 * i : 0)})">${shape}<text x="15">${phase}</text></g>`).join("");
}

// The twin of the picture: what stands on the axes, and what stands on neither.
function rooflineTable({ points, unplaced }) {
  const heads = ["stage", "pass", "time", "FLOP per byte", "GFLOP/s", "of the nearest limit"];
  const rows = points.map((p) => [p.stage, p.phase, percent(p.part, p.part < 0.1 ? 1 : 0), p.intensity.toPrecision(2), giga(p.rate), `${percent(p.share)} ${p.bound === "read" ? "reading" : "arithmetic"}`]);
  const rest = unplaced.map((p) => [p.stage, p.phase, percent(p.part, p.part < 0.1 ? 1 : 0), "0", "", "no arithmetic"]);
  const line = (cells, tag) => `<tr>${cells.map((cell, i) => `<${tag}${i > 1 && i < 5 ? ' class="num"' : ""}>${escape(cell)}</${tag}>`).join("")}</tr>`;
  return `<table class="t"><thead>${line(heads, "th")}</thead><tbody>${[...rows, ...rest].map((cells) => line(cells, "td")).join("")}</tbody></table>`;
}

// The picture, or why there is none; it is measured when the reader asks for it.
export const roofline = {
  name: "roofline",
  html: (panel, view, width) => {
    if (panel?.reason) return `<p class="q">${escape(panel.reason)}</p>`;
    const words = view.live ? "Not measured yet. Measuring runs the first tokens several times, stage by stage." : "Not measured.";
    const again = panel?.points ? "Measure again" : "Measure";
    const measure = `<div class="acts"><button type="button" class="btn low" data-panel="roofline" data-do="measure" ${view.live && panel ? "" : "disabled"} ${SUPPRESS}>${again}</button><span class="q small">${panel?.points ? escape(panel.remark) : view.live ? "" : "needs Python"}</span></div>`;
    if (!panel?.points) return `<p class="q pad">${escape(words)}</p>${measure}`;
    return `${rooflinePicture(panel, width)}${measure}<details class="rooftwin"><summary ${SUPPRESS}>As a table</summary>${rooflineTable(panel)}</details>`;
  },
};
