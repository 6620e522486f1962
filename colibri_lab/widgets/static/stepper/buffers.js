// The buffers in reach as a table; the open one with its histogram, first values, and the expression for Python.
import { escape, fixed } from "../common/format.js";
import { SUPPRESS } from "../common/frame.js";
import { markSvg } from "../common/marks.js";

const BINS = 24;
const VALUES = 8;
const WIDTH = 230;
const TALL = 48;

const DTYPES = { float32: "f32", int32: "i32", int64: "i64", float16: "f16" };

// What is opened by itself: the newest buffer that can still be edited, of the block before the rest.
export function defaultBuffer(buffers) {
  const near = buffers.filter((b) => b.readers.length && !b.path.includes(".attn."));
  return (near[0] ?? buffers[0])?.path ?? null;
}

export function shortName(path, layer) {
  const prefix = `layers.${layer}.`;
  return path.startsWith(prefix) ? path.slice(prefix.length) : path;
}

export function bufferTable(view) {
  const { moment } = view;
  const { buffers } = moment.facts;
  if (!buffers.length) return '<p class="q pad">Nothing has been computed at this place.</p>';
  const rows = buffers.map((b) => {
    const on = b.path === view.buffer;
    const strange = b.nonfinite ? `<span class="mk1">${markSvg("nan")}</span>` : "";
    const size = b.absmax === null ? "–" : b.absmax >= 1e4 || (b.absmax && b.absmax < 1e-3) ? b.absmax.toExponential(2) : String(Number(b.absmax.toPrecision(4)));
    const state = b.readers.length ? '<span class="edit">✎ editable</span>' : "✓ read";
    const why = b.readers.length ? `still read by ${b.readers.join(", ")}` : "nobody will read it again";
    return `<tr class="${on ? "on" : ""}"><td><button type="button" class="name m" data-act="open" data-path="${b.path}" aria-expanded="${on}" ${SUPPRESS}>${escape(shortName(b.path, moment.layer))}</button></td><td>${b.shape.join("×")}</td><td>${DTYPES[b.dtype] ?? b.dtype}</td><td class="num">${size}</td><td class="num">${strange}${b.nonfinite}</td><td class="q" title="${escape(why)}">${state}</td></tr>`;
  });
  return `<table class="t"><thead><tr><th>${buffers.some((b) => b.path.startsWith(`layers.${moment.layer}.`)) ? `layers.${moment.layer}.` : "buffer"}</th><th>shape</th><th>dtype</th><th class="num">absmax</th><th class="num">non-finite</th><th>state</th></tr></thead><tbody>${rows.join("")}</tbody></table>`;
}

export function bufferDetail(view) {
  const { moment } = view;
  const at = moment.facts.buffers.findIndex((b) => b.path === view.buffer);
  if (at < 0) return "";
  const b = moment.facts.buffers[at];
  const name = escape(shortName(b.path, moment.layer));
  const code = `stepper.locals()["${b.path}"]${b.row === null ? "" : `[${b.row}]`}`;
  return `<div class="pair"><div><div class="q small">values of <span class="m">${name}</span></div>${histogram(moment, at)}</div><div class="grow">${values(view, b, at)}<div class="line"><code class="code">${escape(code)}</code><button type="button" class="btn low" data-act="copybuffer" data-code="${escape(code)}" ${SUPPRESS}>Copy</button></div></div></div>`;
}

function histogram(moment, at) {
  const counts = moment.arrays.histograms.subarray(at * BINS, (at + 1) * BINS);
  const [low, high] = moment.arrays.spans.subarray(at * 2, at * 2 + 2);
  const most = Math.max(1, ...counts);
  const zero = (-low / (high - low)) * WIDTH;
  const bars = Array.from(counts, (n, i) => `<rect x="${(i * WIDTH) / BINS}" y="${TALL - (TALL * n) / most}" width="${WIDTH / BINS - 1}" height="${(TALL * n) / most}" fill="var(--line2)"/>`).join("");
  const end = (v) => (Math.abs(v) >= 1000 || (v && Math.abs(v) < 0.01) ? v.toExponential(1).replace("-", "−") : fixed(v, 2));
  const ends = low < 0 ? `<text x="0" y="${TALL + 14}">${end(low)}</text><text x="${zero}" y="${TALL + 14}" text-anchor="middle">0</text>` : `<text x="0" y="${TALL + 14}">0</text>`;
  return `<svg width="${WIDTH}" height="${TALL + 16}" role="img" aria-label="Histogram from ${end(low)} to ${end(high)}">${bars}<path d="M0 ${TALL + 0.5}H${WIDTH}" stroke="var(--line2)"/>${low < 0 ? `<path d="M${zero} 0V${TALL + 4}" stroke="var(--ink)" stroke-dasharray="2 2"/>` : ""}${ends}<text x="${WIDTH}" y="${TALL + 14}" text-anchor="end">${end(high)}</text></svg>`;
}

function values(view, b, at) {
  const { moment, token, editing } = view;
  if (b.row === null) return `<div class="q small">token ${token} has no row here</div>`;
  const shown = Math.min(VALUES, b.width);
  const row = Array.from(moment.arrays.values.subarray(at * VALUES, at * VALUES + shown));
  const title = `<div class="q small">token ${token}, ${shown < b.width ? `first ${shown} of ${b.width}` : `all ${shown}`}</div>`;
  if (editing?.kind === "values" && editing.path === b.path) {
    const boxes = row.map((v, i) => `<input class="num m" data-value="${i}" value="${plain(v)}" aria-label="value ${i}" ${SUPPRESS}>`).join("");
    return `${title}<div class="boxes">${boxes}</div><div class="line"><button type="button" class="btn low pri" data-act="apply" ${SUPPRESS}>Apply</button><button type="button" class="btn low" data-act="cancel" ${SUPPRESS}>Cancel</button></div>`;
  }
  const figure = (v) => (b.dtype.startsWith("int") ? String(v) : fixed(v, 3)).padStart(8);
  const lines = [row.slice(0, 4), row.slice(4)].filter((part) => part.length).map((part) => part.map(figure).join(" "));
  const edit = view.live ? `<button type="button" class="btn low" data-act="editvalues" ${SUPPRESS}>Edit<kbd>E</kbd></button>` : "";
  return `${title}<div class="m figures">${lines.join("\n")}</div><div class="line">${edit}</div>`;
}

// A float32 in the fewest digits that give it back, so that a value nobody touched is written as it was.
export const plain = (v) => (Number.isNaN(v) ? "nan" : v === Infinity ? "inf" : v === -Infinity ? "-inf" : shortest(v));
const shortest = (v) => [6, 7, 8, 9].map((digits) => String(Number(v.toPrecision(digits)))).find((text) => Math.fround(Number(text)) === Math.fround(v)) ?? String(v);
