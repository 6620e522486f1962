// The answer first: what the setting does. And bytes, shares, misses in words.
import { chip, count, escape, fixed, percent, plural, word } from "../common/format.js";
import { title } from "./store.js";

const UNITS = ["bytes", "kB", "MB", "GB", "TB"];

// Bytes in powers of 1,000, with two or three figures.
export function sizeText(bytes) {
  let [value, unit] = [bytes, 0];
  while (value >= 999.5 && unit < UNITS.length - 1) [value, unit] = [value / 1000, unit + 1];
  return `${value < 9.95 && unit ? value.toFixed(1) : count(Math.round(value))} ${UNITS[unit]}`;
}

// A share in percent, with a decimal where it is small; a dash where nobody asked.
export const shareText = (share) => Number.isNaN(share) ? "–" : percent(share, share > 0 && share < 0.095 ? 1 : 0);
export const speedText = (speed) => (speed < 9.95 ? fixed(speed, 2) : speed < 999.5 ? fixed(speed, 1) : count(Math.round(speed)));
export const missShare = ({ requests, misses }) => (requests ? misses / requests : NaN);
export const experts = (n) => plural(n, "expert");

// Bytes read per token: of decode, or of all passes where there is no decode.
export function bytesPerToken({ store, setting }, counts) {
  const { n, facts } = store;
  const part = counts.decode.requests ? counts.decode : counts.prefill;
  const tokens = setting.passes === "each" ? n : counts.decode.requests ? facts.decode_tokens : n - facts.decode_tokens;
  return part.bytes_read === null || !tokens ? null : part.bytes_read / tokens;
}

// The part that the answer is about: decode, or prefill where there is nothing else.
export const mainPart = (counts) => (counts.decode.requests ? counts.decode : counts.prefill);

// Real runs of the same policy and scope that decoded something.
export const measuredRuns = ({ store, setting }) => store.facts.measured.filter((run) => run.policy === setting.policy && run.scope === setting.scope && run.speed !== null);

// The median of those with as many experts; null without one.
function measuredSpeed(view) {
  const speeds = measuredRuns(view).filter((run) => run.capacity === view.setting.capacity).map((run) => run.speed).sort((a, b) => a - b);
  return speeds.length ? speeds[speeds.length >> 1] : null;
}

export function sentence(view) {
  const { store, setting } = view;
  if (!store.L) return "No layer of this model has experts: there is nothing to keep.";
  if (!store.n) return 'Nothing has run yet. Feed the session, then open the lab: <code class="code">session.feed("…"); view = lab.CacheLab(session)</code>';
  const counts = store.counts(store.curve(setting), setting.capacity);
  const bytes = store.bytes(setting);
  const where = setting.scope === "layer" ? "per layer" : "for all layers";
  const name = `${escape(title(setting.policy))} with <b>${count(setting.capacity)}</b> ${setting.capacity === 1 ? "expert" : "experts"} ${where}${bytes === null ? "" : ` (${sizeText(bytes)})`}`;
  if (!counts) return `${name} <span class="q">is being simulated …</span>`;
  const part = mainPart(counts);
  if (!part.requests) return `${name}: nothing is asked for, every slot of the trace is without an expert.`;
  const read = bytesPerToken(view, counts);
  const measured = measuredSpeed(view);
  const said = [`<b>${shareText(missShare(part))}</b> of requests miss`];
  if (read !== null) said.push(`${sizeText(read)} are read per token`);
  if (counts.speed !== null) said.push(`<b>${speedText(counts.speed)} tokens/s</b> predicted${setting.prefetch === "none" ? "" : " if what is fetched ahead comes in time"}`);
  if (measured !== null) said.push(`${speedText(measured)} measured`);
  return `${name}: ${said.join(", ")}. <span class="sub">${asides(view, part)}</span>`;
}

// Whether Belady's counts are the fewest of all that fetch on demand: not with a prefetch, nor of decode alone, for it spares misses of all passes together.
export const isBound = ({ prefetch }, { decode, prefill }) => prefetch === "none" && !(decode.requests && prefill.requests);

// The fastest size, the bound, prefill.
function asides(view, part) {
  const { store, setting } = view;
  const out = [];
  const best = fastest(store.curve(setting));
  if (best) out.push(best.capacity === setting.capacity ? "No size is faster." : `Fastest here is ${count(best.capacity)} (${speedText(best.speed)}).`);
  const bound = store.counts(store.curve(setting, "belady"), setting.capacity);
  if (bound && setting.policy !== "belady") out.push(`${isBound(setting, bound) ? "The best that fetches on demand would miss" : setting.prefetch === "none" ? "Belady’s rule would miss" : "Belady’s rule with the same prefetch misses"} ${shareText(missShare(mainPart(bound)))}.`);
  if (setting.policy === "belady") out.push(bound && isBound(setting, bound) ? "It needs the future: the bound of all that fetch on demand, not a choice." : "It needs the future, so it cannot be built.");
  const counts = store.counts(store.curve(setting), setting.capacity);
  if (part === counts.decode && counts.prefill.requests) out.push(`Prefill apart: ${shareText(missShare(counts.prefill))} of its ${count(counts.prefill.requests)} requests miss.`);
  if (part === counts.prefill) out.push("All of it is prefill.");
  return out.join(" ");
}

// The capacity with the highest predicted speed, the smaller one at a tie.
export function fastest(curve) {
  let best = null;
  curve?.speed.forEach((speed, i) => {
    if (speed !== null && (best === null || speed > best.speed * (1 + 1e-9))) best = { speed, capacity: curve.capacities[i], at: i };
  });
  return best;
}

// Where the tokens/s come from, and what they assume; nothing where none are shown.
export function speedNote({ store, setting }) {
  const { source, overlap, limited } = store.facts.machine ?? {};
  if (!source || !store.curve(setting)?.speed.some((speed) => speed !== null)) return "";
  const how = !/^(measured|what a live run)/.test(source) ? "" : " It steps the model stage by stage, as a live run with a budget does; a plain session, which the profile below times, is faster.";
  const hidden = overlap ? `${percent(overlap)} of the shorter of reading and computing is hidden` : "reading and computing in turn";
  const ahead = setting.prefetch === "none" ? "" : " What is fetched ahead counts as read, needed or not, and as there in time.";
  return escape(`Predicted tokens/s rest on a machine (${source}): ${hidden}${limited ? "" : ", memory enough for all"}.${how}${ahead}`);
}

// ---- one request ----

// A token by its text or vocabulary id; by its number where the trace has neither.
export const isNamed = (block, token) => Boolean(block.texts[token - block.start]) || (block.ids[token - block.start] ?? -1) >= 0;
export const tokenName = (block, token, longest) => (isNamed(block, token) ? word(block.texts[token - block.start] ?? "", block.ids[token - block.start], longest) : String(token));

// The outcome of the selected request, else what the expert does at that token.
export function requestSentence(view) {
  const { store, setting, layer, token, expert } = view;
  if (token === null) return '<span class="q">No token is selected.</span>';
  const block = store.timeline(setting, layer, token);
  if (!block) return `<span class="q">${view.live ? "The timeline is being simulated …" : "The timeline of this setting is not here; that needs Python."}</span>`;
  const name = `Token ${count(token)}${isNamed(block, token) ? ` <span class="tt">${escape(tokenName(block, token))}</span>` : ""}`;
  if (expert === null) return name;
  const it = chip(view, expert);
  const one = block.requests.find((r) => r.token === token && r.expert === expert);
  if (!one) return `${name} did not ask for ${it}, which was ${store.inside(block, token, expert) ? "in the cache" : "not in the cache"}.`;
  if (one.outcome !== "miss") return `${name} asked for ${it}: <b>hit</b>${HOW[one.outcome]}.`;
  const read = block.bytes ? `, ${sizeText(block.bytes[expert])} read` : "";
  const pushed = one.evicted >= 0 ? ` It pushed out ${one.of === layer ? chip(view, one.evicted) : `expert ${one.evicted} of layer ${one.of}`}.` : one.kept ? " It found a free place." : " It was not kept: its set is larger than the cache.";
  return `${name} asked for ${it}: <b>miss</b>${read}.${pushed} ${runnerUp(view, block)}`;
}

const HOW = { hit: "", pin: ", it is held for good", prefetch: ", fetched ahead in time", late: ", fetched ahead but late: the token waited" };

function runnerUp(view, block) {
  const { store, token } = view;
  const runner = block.runner[token - block.start];
  if (runner < 0) return store.facts.margins ? '<span class="q">This token has no runner-up that can be ranked.</span>' : '<span class="unknown">Runner-up not recorded</span> <span class="q">(the trace holds no router logits).</span>';
  const behind = block.behind[token - block.start];
  const inside = block.ready[token - block.start];
  const near = block.near[token - block.start];
  const verdict = inside ? (near ? "A near-tie: a substitute would change little here." : "Too far behind to be a substitute.") : "No substitute at hand.";
  return `The runner-up ${chip(view, runner, true)} was ${inside ? "<b>in the cache</b>" : "not in the cache"}, ${behind > 0 && behind < 0.005 ? "less than 0.01" : fixed(behind)} behind${block.unit ? ` in ${block.unit}` : ""}. ${verdict}`;
}
