// The map of the forward pass: layers × stages; done, ahead, here, breakpoints. A click runs there or goes back there.
import { escape } from "../common/format.js";
import { ring } from "../common/pointers.js";
import { stageName } from "./words.js";

const LEFT = 76;
const TOP = 34;
const ROW = 24;

export function octagon(x, y, r, name, off) {
  const a = r * 0.414;
  const fill = off ? "var(--card)" : "var(--bad)";
  const shown = String(name).length > 2 ? "•" : name;
  return `<g pointer-events="none"><path d="M${x - a} ${y - r}H${x + a}L${x + r} ${y - a}V${y + a}L${x + a} ${y + r}H${x - a}L${x - r} ${y + a}V${y - a}Z" fill="${fill}" stroke="var(--bad)" stroke-width="1.5"/><text x="${x}" y="${y + 4}" text-anchor="middle" style="font-weight:700;fill:${off ? "var(--bad)" : "var(--card)"}">${escape(shown)}</text></g>`;
}

// The stages that some layer has, as rows.
export function mapRows(moment) {
  const has = (stage) => Array.from({ length: moment.head.layers }, (_, l) => l).some((l) => moment.stagesOf(l).includes(stage));
  return ["attention", "router", "dispatcher", "expert", "shared", "aggregator", "mlp", "residual"].filter(has);
}

export function passMap(view, width) {
  const { moment } = view;
  const { head, facts } = moment;
  const rows = mapRows(moment);
  const columns = head.layers + 2;
  const cw = Math.min(46, Math.max(4, (width - LEFT) / columns));
  const end = Math.max(cw, 42); // "in" and "out" are never narrower than their words
  const inner = columns > 10 ? Math.min(46, Math.max(3, (width - LEFT - 2 * end) / head.layers)) : cw;
  const tall = rows.length * ROW;
  const at = (layer) => (layer === null || layer < 0 ? LEFT : LEFT + end + layer * inner);
  const out = LEFT + end + head.layers * inner;
  let s = `<text x="${LEFT - 8}" y="12" text-anchor="end">stage ↓</text><text x="${(LEFT + end + out) / 2}" y="12" text-anchor="middle">layer →</text><text x="${LEFT + end / 2}" y="${TOP - 8}" text-anchor="middle">in</text><text x="${out + end / 2}" y="${TOP - 8}" text-anchor="middle">out</text>`;
  const every = inner >= 16 ? 1 : inner >= 8 ? 4 : 16;
  const { place } = facts;
  for (let l = 0; l < head.layers; l++)
    if (l % every === 0 || l === place.layer) s += `<text${l === place.layer ? ' class="b"' : ""} x="${at(l) + inner / 2}" y="${TOP - 8}" text-anchor="middle">${l === place.layer || Math.abs(l - (place.layer ?? -9)) * inner > 18 ? l : ""}</text>`;
  rows.forEach((stage, j) => {
    s += `<text${stage === place.stage ? ' class="b"' : ""} x="${LEFT - 8}" y="${TOP + j * ROW + 16}" text-anchor="end">${stageName(stage)}</text>`;
  });
  const gap = inner > 12 ? 2 : 0.5;
  const cell = (stage, layer, x, y, w, h, label = "") => {
    const current = place.stage === stage && (layer === null || place.layer === layer);
    const done = current || moment.done(stage, layer, stage === "expert" ? moment.lastExpert(layer) : null);
    const look = current ? "here" : done ? "done" : "ahead";
    let inside = `<rect class="${look}" x="${x}" y="${y}" width="${w}" height="${h}" rx="2"/>`;
    if (stage === "expert" && w >= 2 * head.experts) inside = ticks(moment, layer, x, y, w, h);
    if (label) inside += `<text x="${x + w / 2}" y="${y + h / 2 + 4}" text-anchor="middle"${done && !current ? ' class="on"' : current ? ' class="b"' : ""}>${label}</text>`;
    const middle = label ? y + 14 : y + h / 2; // a name stands in the middle
    if (current) inside += ring(x, y, w, h) + (w > 24 ? `<path d="M${x + 6} ${middle - 6}l10 6l-10 6Z" fill="var(--sel)"/>` : "");
    return `<g class="cell" data-stage="${stage}"${layer === null ? "" : ` data-layer="${layer}"`}><title>${stageName(stage)}${layer === null ? "" : `, layer ${layer}`}: ${current ? "here" : done ? "done; click to go back" : "ahead; click to run there"}</title><rect x="${x - gap}" y="${y - 2}" width="${w + 2 * gap}" height="${h + 4}" fill="transparent"/>${inside}</g>`;
  };
  let over = "";
  const cells = [];
  for (let l = 0; l < head.layers; l++)
    rows.forEach((stage, j) => {
      if (moment.stagesOf(l).includes(stage)) cells.push([stage, l, at(l) + gap, TOP + j * ROW + 2, inner - 2 * gap, ROW - 4]);
    });
  const half = Math.ceil(rows.length / 2) * ROW;
  cells.push(["embed", null, LEFT + 2, TOP + 2, end - 4, tall - 4, "embed"], ["norm", null, out + 2, TOP + 2, end - 4, half - 4, "norm"], ["logits", null, out + 2, TOP + half + 2, end - 4, tall - half - 4, "logits"]);
  for (const c of cells) {
    const drawn = cell(...c);
    if (c[0] === place.stage && (c[1] === null || c[1] === place.layer)) over += drawn;
    else s += drawn;
  }
  s += over;
  const where = (stage, layer) => cells.find((c) => c[0] === stage && c[1] === (layer ?? null));
  for (const point of facts.breakpoints) {
    const found = point.place && where(point.place[1], point.place[0]);
    if (found) s += octagon(found[2] + Math.max(found[4] - 7, found[4] / 2), found[3] + found[5] / 2, 8, point.name, !point.enabled);
  }
  const cursor = view.cursor && where(view.cursor.stage, view.cursor.layer);
  if (cursor) s += `<rect class="cursor" x="${cursor[2] - 1}" y="${cursor[3] - 1}" width="${cursor[4] + 2}" height="${cursor[5] + 2}" rx="2"/>`;
  const y = TOP + tall + 18;
  s += `<rect class="done" x="${LEFT}" y="${y - 9}" width="14" height="10"/><text x="${LEFT + 18}" y="${y}">done</text><rect class="ahead" x="${LEFT + 54}" y="${y - 9}" width="14" height="10"/><text x="${LEFT + 72}" y="${y}">ahead</text>${ring(LEFT + 115, y - 8, 13, 8)}<text x="${LEFT + 135}" y="${y}">here</text>${octagon(LEFT + 177, y - 4, 7, "n")}<text x="${LEFT + 188}" y="${y}">breakpoint</text>${octagon(LEFT + 258, y - 4, 7, "n", true)}<text x="${LEFT + 269}" y="${y}">off</text>`;
  const wide = Math.max(out + end, LEFT + 300);
  return `<svg width="${wide}" height="${y + 6}" viewBox="0 0 ${wide} ${y + 6}" aria-hidden="true">${s}</svg>`;
}

function ticks(moment, layer, x, y, w, h) {
  const { head, place } = moment;
  let s = "";
  for (let e = 0; e < head.experts; e++) {
    const n = moment.load(layer, e);
    const done = moment.done("expert", layer, e);
    const now = place.stage === "expert" && place.layer === layer && place.expert === e;
    const look = now ? "now" : !done ? "ahead" : n === 0 ? "none" : "done";
    s += `<rect class="${look}" x="${x + (e * w) / head.experts + 0.5}" y="${y}" width="${Math.max(1, w / head.experts - 1)}" height="${h}"/>`;
  }
  return s;
}

// The cursor of the keyboard on the map.
export function moveCursor(moment, cursor, right, down) {
  const rows = mapRows(moment);
  const { place } = moment;
  const now = cursor ?? (place.layer === null ? { stage: rows[0], layer: 0 } : { stage: place.stage, layer: place.layer });
  const layer = Math.max(0, Math.min(moment.head.layers - 1, (now.layer ?? 0) + right));
  const stages = moment.stagesOf(layer);
  let at = rows.indexOf(now.stage) + down;
  while (rows[at] && !stages.includes(rows[at])) at += down || 1;
  return { layer, stage: rows[Math.max(0, Math.min(rows.length - 1, at))] ?? stages[0] };
}
