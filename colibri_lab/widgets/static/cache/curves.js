// Misses and speed on one axis of capacity, and one line through both: the working point. Policies differ by dash and marker.
import { count, escape } from "../common/format.js";
import { ring } from "../common/pointers.js";
import { title } from "./store.js";
import { experts, mainPart, measuredRuns, missShare, shareText, sizeText, speedText } from "./words.js";

const LEFT = 62;
const RIGHT = 134;
const TOP = 14;
const MISSES = 174; // height of each picture
const SPEED = 96;
const GAP = 34;
const FOOT = 48;
const DASHES = { lfu: "7 4", static: "2 3", belady: "10 3 2 3", fifo: "12 3", arc: "4 2 1 2" };

// Where everything stands: positions of capacities, and back.
export function layoutCurves(view, width) {
  const { store, setting } = view;
  const capacities = store.curve(setting)?.capacities ?? [setting.capacity];
  const [least, most] = [capacities[0], capacities.at(-1)];
  const speed = (store.curve(setting)?.speed.some((v) => v !== null) ?? false) || measuredRuns(view).length > 0;
  const narrow = width < 420;
  const end = width - (narrow ? 16 : RIGHT);
  const x = (capacity) => (most === least ? (LEFT + end) / 2 : LEFT + 14 + ((capacity - least) * (end - LEFT - 28)) / (most - least));
  const bottom = TOP + MISSES + (speed ? GAP + SPEED : 0);
  return { width, capacities, least, most, x, end, speed, narrow, bottom, height: bottom + FOOT + (narrow ? 18 * Math.ceil(store.drawn(setting).length / 2) : 0) };
}

// The capacity nearest to a place.
export const capacityAt = (layout, px) => layout.capacities.reduce((best, c) => (Math.abs(layout.x(c) - px) < Math.abs(layout.x(best) - px) ? c : best));

export function curvePicture(view, layout) {
  const { store, setting } = view;
  const curves = store.drawn(setting);
  if (!curves.length) return '<p class="q pad">Being simulated …</p>';
  const shares = curves.map((curve) => curve.capacities.map((c) => missShare(mainPart(store.counts(curve, c)))));
  const seen = Math.max(...shares.flat().filter(Number.isFinite), 0);
  const top = Math.max(0.1, Math.ceil(10 * Math.max(seen, Math.min(blind(view, layout.least), 1.4 * seen))) / 10);
  const y = (share) => TOP + MISSES * (1 - share / top);
  const names = legend(view, layout, curves);
  return `<svg width="${layout.width}" height="${layout.height}" aria-hidden="true">${grid(layout, y, top)}${layout.most > layout.least ? chance(view, layout, y, top) : ""}${curves.map((curve, i) => line(view, layout, curve, shares[i], y, i === 0)).reverse().join("")}${layout.speed ? speeds(view, layout) : ""}${axis(view, layout)}${names}${handle(view, layout, y)}</svg>`;
}

function grid({ end }, y, top) {
  const step = top > 0.5 ? 0.2 : top > 0.2 ? 0.1 : 0.05;
  let s = "";
  for (let share = 0; share <= top + 1e-9; share += step) s += `<path d="M${LEFT} ${y(share)}H${end}" stroke="var(--line)"/><text x="${LEFT - 6}" y="${y(share) + 4}" text-anchor="end">${Math.round(100 * share)} %</text>`;
  return s;
}

// Blind traffic: what a cache of C of E equally likely experts misses.
const blind = ({ store, setting }, capacity) => 1 - capacity / (setting.scope === "layer" ? store.E : store.E * store.L);

function chance(view, { x, least, most, end }, y, top) {
  const from = blind(view, least) > top ? most * (1 - top) : least; // where it enters the picture
  const places = [0.45, 0.25, 0.65].map((part) => least + part * (most - least)); // of the words, not under the handle
  const here = x(view.setting.capacity);
  const fits = (c) => c >= from && x(c) + 140 < end;
  const at = places.find((c) => fits(c) && (here < x(c) - 14 || here > x(c) + 150)) ?? places.find(fits);
  const words = at === undefined ? "" : `<text class="halo" x="${x(at) + 4}" y="${y(blind(view, at)) - 4}">uniform traffic, 1 − C/E</text>`;
  return `<path d="M${x(from)} ${y(blind(view, from))}L${x(most)} ${y(blind(view, most))}" stroke="var(--line2)" stroke-dasharray="1 3"/>${words}`;
}

const MARKERS = {
  lru: (x, y, ink) => `<circle cx="${x}" cy="${y}" r="3.5" fill="${ink}"/>`,
  lfu: (x, y, ink) => `<rect x="${x - 3}" y="${y - 3}" width="6" height="6" fill="var(--card)" stroke="${ink}" stroke-width="1.5"/>`,
  static: (x, y, ink) => `<path d="M${x - 4} ${y + 3}h8l-4 -7Z" fill="var(--card)" stroke="${ink}" stroke-width="1.5"/>`,
  belady: (x, y, ink) => `<path d="M${x} ${y - 4}l4 4l-4 4l-4 -4Z" fill="var(--card)" stroke="${ink}" stroke-width="1.5"/>`,
  fifo: (x, y, ink) => `<path d="M${x - 3} ${y - 3}l6 6m0 -6l-6 6" stroke="${ink}" stroke-width="1.5"/>`,
  arc: (x, y, ink) => `<path d="M${x - 4} ${y - 3}h8l-4 7Z" fill="var(--card)" stroke="${ink}" stroke-width="1.5"/>`,
};
const marker = (policy, x, y, ink) => (MARKERS[policy] ?? ((px, py) => `<path d="M${px - 4} ${py}h8M${px} ${py - 4}v8" stroke="${ink}" stroke-width="1.5"/>`))(x, y, ink);
const stroke = (policy, chosen) => `fill="none" stroke="var(--${chosen ? "ink" : "line2"})" stroke-width="${chosen ? 2.6 : 1.8}"${DASHES[policy] ? ` stroke-dasharray="${DASHES[policy]}"` : ""}`;

function line(view, { x, capacities }, curve, shares, y, chosen) {
  const points = curve.capacities.map((c, i) => [x(c), y(shares[i])]).filter(([, at]) => Number.isFinite(at));
  const every = Math.max(1, Math.ceil(14 / Math.max(1, (x(capacities.at(-1)) - x(capacities[0])) / Math.max(1, capacities.length - 1))));
  const ink = chosen ? "var(--ink)" : "var(--line2)";
  if (!points.length) return "";
  return `<path d="M${points.map((p) => p.join(" ")).join("L")}" ${stroke(curve.policy, chosen)}/>${points.filter((_, i) => i % every === 0).map(([px, py]) => marker(curve.policy, px, py, ink)).join("")}`;
}

function legend(view, layout, curves) {
  const { store, setting } = view;
  const { end, narrow, bottom } = layout;
  const rows = curves.map((curve, i) => {
    const counts = store.counts(curve, setting.capacity);
    const [px, py] = narrow ? [LEFT + (i % 2) * 150, bottom + FOOT + 6 + 18 * Math.floor(i / 2)] : [end + 14, 22 + i * 20];
    const share = counts ? ` ${shareText(missShare(mainPart(counts)))}` : "";
    return `<g data-set="policy" data-value="${curve.policy}" class="pick"><rect x="${px - 4}" y="${py - 9}" width="128" height="18" fill="transparent"/><path d="M${px} ${py}h28" ${stroke(curve.policy, i === 0)}/>${marker(curve.policy, px + 14, py, i ? "var(--line2)" : "var(--ink)")}<text class="${i ? "k" : "b"}" x="${px + 34}" y="${py + 4}">${escape(title(curve.policy))}${share}</text></g>`;
  });
  const y = 22 + curves.length * 20;
  const words = setting.scope === "layer" ? `${count(setting.capacity)} per layer` : `${count(setting.capacity)} in all`;
  return rows.join("") + (narrow ? "" : `<text x="${end + 14}" y="${y + 4}">share of requests</text><text x="${end + 14}" y="${y + 18}">that miss, at</text><text x="${end + 14}" y="${y + 32}">${words}</text>`);
}

// ---- speed ----

const speedTop = (view) => Math.max(...(view.store.curve(view.setting)?.speed ?? []), ...measuredRuns(view).map((run) => run.speed), 1e-9) * 1.12;
const speedY = (view) => {
  const most = speedTop(view);
  return (v) => TOP + MISSES + GAP + SPEED * (1 - v / most);
};

function speeds(view, { x, end, narrow, capacities }) {
  const { store, setting } = view;
  const curve = store.curve(setting);
  const y = speedY(view);
  const most = speedTop(view);
  const step = niceStep(most / 2.5);
  let s = "";
  for (let v = 0; v <= most; v += step) s += `<path d="M${LEFT} ${y(v)}H${end}" stroke="var(--line)"/><text x="${LEFT - 6}" y="${y(v) + 4}" text-anchor="end">${count(Number(v.toPrecision(6)))}</text>`;
  const points = (curve?.speed ?? []).map((v, i) => [v, curve.capacities[i]]).filter(([v]) => v !== null);
  const falls = slower(curve);
  if (falls !== null) {
    const [from, to] = [x(capacities[falls]), x(capacities.at(-1)) + 10];
    s += `<rect x="${from}" y="${y(most) - 4}" width="${to - from}" height="${y(0) - y(most) + 4}" fill="var(--warn)" fill-opacity=".13"/><text x="${to - 4}" y="${y(most) + 7}" text-anchor="end" class="warn">${to - from > 190 && store.facts.machine?.limited ? "more cache, slower: memory is full" : "more cache, slower"}</text>`;
  }
  if (points.length) s += `<path d="M${points.map(([v, c]) => `${x(c)} ${y(v)}`).join("L")}" fill="none" stroke="var(--ink)" stroke-width="2"/>`;
  for (const run of measuredRuns(view)) s += `<path d="M${x(run.capacity) - 4} ${y(run.speed) - 4}l8 8m0 -8l-8 8" stroke="var(--ink)" stroke-width="2"/>`;
  const at = TOP + MISSES + GAP;
  return s + (narrow ? "" : `<text class="k" x="${end + 14}" y="${at + 20}">tokens/s</text>${points.length ? `<text x="${end + 14}" y="${at + 40}">— predicted</text>` : ""}${measuredRuns(view).length ? `<text x="${end + 14}" y="${at + 56}">× measured</text>` : ""}`);
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((f) => f * power).find((step) => step >= rough);
}

// The index from which on the predicted speed only falls, by more than 1 % in all; null where it does not.
export function slower(curve) {
  const speed = curve?.speed ?? [];
  if (speed.length < 2 || speed.some((v) => v === null)) return null;
  let i = speed.length - 1;
  while (i > 0 && speed[i] < speed[i - 1]) i -= 1;
  return i < speed.length - 1 && speed.at(-1) < 0.99 * speed[i] ? i : null;
}

// ---- axis and working point ----

function axis(view, { x, capacities, bottom, end }) {
  const { store, setting } = view;
  const gap = (end - LEFT) / Math.max(1, capacities.length - 1);
  const bytes = (c) => store.bytes(setting, c);
  const every = Math.ceil(54 / gap);
  const here = capacities.indexOf(setting.capacity);
  let s = `<text x="${LEFT - 14}" y="${bottom + 20}" text-anchor="end">experts</text>`;
  capacities.forEach((c, i) => {
    const near = i !== here && Math.abs(x(c) - x(setting.capacity)) < 50;
    if (i !== here && (near || i % every)) return;
    s += `<text class="${i === here ? "b" : ""}" x="${x(c)}" y="${bottom + 20}" text-anchor="middle">${count(c)}</text>`;
    if (bytes(c) !== null) s += `<text x="${x(c)}" y="${bottom + 34}" text-anchor="middle">${sizeText(bytes(c))}</text>`;
  });
  return s;
}

function handle(view, { x, bottom, speed, end }, y) {
  const { store, setting } = view;
  const counts = store.counts(store.curve(setting), setting.capacity);
  const at = x(setting.capacity);
  const left = at > end - 90; // words stand where there is room
  const words = (text, py) => `<text class="b halo" x="${at + (left ? -11 : 11)}" y="${py}"${left ? ' text-anchor="end"' : ""}>${text}</text>`;
  let s = `<path d="M${at} 8V${bottom + 6}" stroke="var(--halo)" stroke-width="5"/><path d="M${at} 8V${bottom + 6}" stroke="var(--sel)" stroke-width="2"/>`;
  if (counts) {
    const share = missShare(mainPart(counts));
    if (Number.isFinite(share)) s += ring(at - 5, y(share) - 5, 10, 10) + words(`${shareText(share)} miss`, Math.max(TOP + 12, y(share) - 9));
    if (speed && counts.speed !== null) {
      const line = speedY(view)(counts.speed);
      s += words(`${speedText(counts.speed)} tokens/s`, line + 16 > bottom - 4 ? line - 8 : line + 16); // below the line where there is room
    }
  }
  return `${s}<rect x="${at - 12}" y="0" width="24" height="14" rx="7" fill="var(--sel)"/><path d="M${at - 5} 4l-3 3l3 3M${at + 5} 4l3 3l-3 3" fill="none" stroke="var(--halo)" stroke-width="1.6"/>`;
}

// What the slider says.
export function capacityText({ store, setting }) {
  const counts = store.counts(store.curve(setting), setting.capacity);
  const bytes = store.bytes(setting);
  const miss = counts ? `, ${shareText(missShare(mainPart(counts)))} miss` : "";
  return `${experts(setting.capacity)}${bytes === null ? "" : `, ${sizeText(bytes)}`}${miss}`;
}
