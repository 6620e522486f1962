// The aggregator for one token: gate × output of each of its experts as strips of values, summed.
import { expertColour, fixed, gate } from "../common/format.js";
import { strange, waiting } from "./flow_marks.js";
import { ring } from "../common/pointers.js";
import { signedColour } from "./signed.js";

const CELL = 9.4;
const FIGURES = 5;

// `x`: left edge. `from`: where the expert boxes end, for the bands that lead here; null when they stand elsewhere.
export function weightedSum(view, x, from) {
  const { moment, token } = view;
  const ids = moment.ids(token);
  const gates = moment.gates(token);
  const parts = [];
  (ids ?? []).forEach((e, slot) => {
    const out = e < 0 ? null : moment.output(token, slot);
    if (out && gates) parts.push({ name: `expert <tspan class="b">${e}</tspan>`, e, g: gates[slot], length: out.length, values: Array.from(out.values, (v) => v * gates[slot]) });
  });
  const shared = moment.row("shared", token);
  if (shared) {
    const g = moment.row("shared_gate", token)?.[0] ?? 1;
    parts.push({ name: "the shared expert", e: null, g, length: moment.row("shared_length", token)[0], values: Array.from(shared, (v) => v * g) });
  }
  const total = moment.row("total", token);
  const title = `<text class="b" x="${x}" y="12">aggregator: gate × output, summed</text>`;
  if (!parts.length) {
    const words = ids && !gates ? "gates are not kept" : ids ? "the experts of this token have not run yet" : waiting(moment, "router");
    return { svg: `${title}<text x="${x}" y="62">${words}</text>`, links: "", height: 90 };
  }
  const finite = parts.flatMap((p) => p.values.map(Math.abs)).concat(total ? Array.from(total, Math.abs) : []).filter(Number.isFinite);
  const top = Math.max(...finite, 1e-30);
  const figures = parts.length <= 3;
  const pitch = figures ? 74 : 46;
  let y = 52;
  let svg = title;
  let links = "";
  parts.forEach((p, i) => {
    svg += `<text class="k" x="${x}" y="${y}"><tspan class="b">${gate(p.g)}</tspan> × output of ${p.name} · length ${fixed(p.length)} → ${fixed(p.length * Math.abs(p.g))}</text>${strip(p.values, x, y + 8, top)}`;
    if (figures) svg += numbers(p.values, x, y + 42);
    if (i) svg += `<text class="b" x="${x - 18}" y="${y - 8}" style="font-size:15px">+</text>`;
    if (from && p.e !== null && from.experts.includes(p.e)) {
      const w = Number.isFinite(p.g) ? 2 + 7 * Math.min(1, Math.abs(p.g)) : 2;
      links += `<path class="way" d="M${from.x} ${from.y(p.e)}C${from.x + 30} ${from.y(p.e)} ${x - 34} ${y + 17} ${x - 8} ${y + 17}" fill="none" stroke="${expertColour(view, p.e)}" stroke-width="${w}"/>`;
    }
    y += pitch;
  });
  svg += `<path d="M${x} ${y - 20}h${32 * CELL}" stroke="var(--ink)" stroke-width="1.5"/>`;
  if (total) {
    const size = moment.row("total_length", token)[0];
    svg += `<text class="b" x="${x - 18}" y="${y + 22}" style="font-size:15px">=</text><text class="k" x="${x}" y="${y}"><tspan class="b">moe.output</tspan>, row ${token} · length ${fixed(size)}</text>${strip(total, x, y + 8, top)}${ring(x, y + 8, total.length * CELL, 18)}${numbers(total, x, y + 44, true)}`;
  } else svg += `<text x="${x}" y="${y}">the aggregator has not run yet</text><rect class="ahead" x="${x}" y="${y + 8}" width="${32 * CELL}" height="18"/>`;
  const wide = moment.facts.buffers.find((b) => b.path.endsWith("moe.input"))?.shape[1];
  const shown = parts[0].values.length;
  const key = Array.from({ length: 17 }, (_, i) => `<rect x="${i * 6}" width="6" height="8" fill="${signedColour((i - 8) / 8)}"/>`).join("");
  svg += `<g transform="translate(${x},${y + 60})">${key}<text x="108" y="8">${finite.length ? `±${top < 1e-20 ? 0 : top.toPrecision(2)}` : "nothing finite"} · first ${shown}${wide ? ` of ${wide}` : ""} values</text></g>`;
  return { svg, links, height: y + 80 };
}

function strip(values, x, y, top) {
  let s = "";
  values.forEach((v, j) => {
    s += Number.isFinite(v) ? `<rect x="${x + j * CELL}" y="${y}" width="${CELL - 0.6}" height="18" fill="${signedColour(v / top)}"/>` : strange(v, x + j * CELL, y, CELL - 0.6, 18);
  });
  return s;
}

const numbers = (values, x, y, strong = false) =>
  `<text class="m${strong ? " k" : ""}" style="white-space:pre" x="${x}" y="${y}">${Array.from(values.slice(0, FIGURES), (v) => fixed(v, 3).padStart(6)).join(" ")} …</text>`;
