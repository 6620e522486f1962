// The counters of the chosen policy, of a fixed set, and of the bound, at one capacity; and what the numbers say.
import { count, escape } from "../common/format.js";
import { slower } from "./curves.js";
import { fits, title } from "./store.js";
import { experts, isBound, mainPart, missShare, shareText, sizeText, speedText } from "./words.js";

const ROWS = [["requests", "requests"], ["hits", "hits"], ["pin_hits", "of them held for good", "some"], ["prefetch_hits", "of them fetched ahead", "some"], ["late_hits", "of them fetched late", "some"], ["misses", "misses"], ["first_uses", "of them first uses"], ["not_kept", "of them not kept", "some"], ["prefetched", "fetched ahead", "some"], ["wasted", "of them not needed", "some"]];

export function counterTable(view) {
  const { store, setting } = view;
  const policies = [...new Set([setting.policy, "static", "belady"])].filter((policy) => fits(policy, setting.prefetch));
  const found = policies.map((policy) => store.counts(store.curve(setting, policy), setting.capacity));
  const mine = found[0];
  if (!mine) return '<p class="q">Being simulated …</p>';
  const head = `<tr><th>count</th>${policies.map((policy) => `<th class="num">${escape(title(policy).replace(" pin", ""))} ${count(setting.capacity)}</th>`).join("")}</tr>`;
  const row = (words, cell) => `<tr><td>${words}</td>${found.map((counts) => `<td class="num">${counts ? cell(counts) : "…"}</td>`).join("")}</tr>`;
  const of = (counts) => mainPart(counts);
  const some = (name) => found.some((counts) => counts && counts.policy !== "static" && of(counts)[name]);
  const rows = ROWS.filter(([name, , when]) => !when || some(name)).map(([name, words]) => row(words, (counts) => count(of(counts)[name])));
  if (of(mine).bytes_read !== null) rows.push(row("read", (counts) => sizeText(of(counts).bytes_read)));
  if (mine.speed !== null) rows.push(row("tokens/s", (counts) => `<b>${counts.speed === null ? "–" : speedText(counts.speed)}</b>`));
  const both = mine.decode.requests && mine.prefill.requests;
  const prefill = both ? row("prefill: misses of requests", (counts) => `${count(counts.prefill.misses)} of ${count(counts.prefill.requests)}`) : "";
  return `<table class="t"><thead>${head}</thead><tbody>${rows.join("")}${prefill}</tbody></table>`;
}

export function countersRemark({ store, setting }) {
  const counts = store.counts(store.curve(setting), setting.capacity);
  if (!counts) return "";
  if (!counts.decode.requests) return "prefill";
  return counts.prefill.requests ? "decode; prefill is counted apart" : setting.passes === "each" ? "every token served on its own, as in decode" : "decode";
}

// At most three sentences, each true of these curves.
export function findings(view) {
  const { store, setting } = view;
  const at = (policy) => store.counts(store.curve(setting, policy), setting.capacity);
  const mine = at(setting.policy);
  if (!mine || !mainPart(mine).requests) return "";
  const ruined = notFinite(store);
  const out = [firsts(setting, mainPart(mine)), falling(store, setting), fixedSet(view, at("static"), at("belady"), at("lru")), blind(store, setting, at("lru")), never(store, setting), rises(store, setting, store.curve(setting)), choice(store, setting)];
  return ruined + out.filter(Boolean).slice(0, 3).map((words) => `<li>${words}</li>`).join("");
}

// Above all others, for it makes them doubtful; with the mark that stands for NaN in every view.
function notFinite({ facts, n }) {
  return facts.not_finite ? `<li class="ruined"><span class="nanmark" aria-hidden="true">×</span> ${count(facts.not_finite)} of ${count(n)} tokens have router logits that are not finite: where they are NaN, the rule for ties chose the experts, and what is requested means nothing. lab.NanTracer says why.</li>` : "";
}

// Most misses are first uses: no cache that waits for requests avoids them.
function firsts({ policy, prefetch }, { requests, misses, first_uses: first }) {
  if (policy !== "static" && prefetch === "none" && first === requests) return "Each expert is asked for once and no more, so neither the size nor the policy of a cache that starts empty matters.";
  return policy !== "static" && prefetch === "none" && misses && first / misses > 0.5 ? `${count(first)} of ${count(misses)} misses are first uses, which no cache that starts empty avoids, however large.` : "";
}

function falling(store, setting) {
  const curve = store.curve(setting);
  const from = slower(curve);
  if (from === null || !store.facts.machine?.limited) return "";
  const misses = (i) => mainPart(store.counts(curve, curve.capacities[i])).misses;
  if (misses(curve.capacities.length - 1) > misses(from)) return ""; // then it is the misses that slow it down
  const still = misses(curve.capacities.length - 1) < misses(from) ? "misses still fall, but predicted speed falls too" : "predicted speed falls";
  return `Beyond ${experts(curve.capacities[from])}, ${still}, to ${speedText(curve.speed.at(-1))} tokens/s: cache and other weights no longer fit in memory together.`;
}

// A set chosen once against the bound and against LRU.
function fixedSet({ store }, fixed, bound, lru) {
  if (!fixed || !bound || !lru) return "";
  const [f, b, l] = [fixed, bound, lru].map((counts) => missShare(mainPart(counts)));
  const own = store.facts.own_profile;
  const best = isBound({ prefetch: "none" }, bound) ? "the best that starts empty" : "Belady’s rule, which starts empty,";
  const name = own ? "A fixed set, chosen from this very text," : "A fixed set, chosen by profile,";
  const caution = own ? " Choose it from another text before you trust it." : "";
  if (f < l && f < b - 0.03) return `${name} misses ${shareText(f)}, for it is there from the start; ${best} misses ${shareText(b)}.${caution}`;
  if (f < l && f <= b + 0.03) return `${name} misses about as little as ${best.replace(/,$/, "")} (${shareText(f)} against ${shareText(b)}).${caution}`;
  if (f > l + 0.03) return `${name} misses ${shareText(f)}, LRU ${shareText(l)}: ${own ? "what is needed changes along the text" : "this text needs others than the profile does, or others as it goes on"}.`;
  return "";
}

// LRU does what blind traffic gets: neither in a cache of nearly all experts, where both miss little, nor while most are new, nor in one cache for
// all layers, where the layer asked next is the one used longest ago.
function blind(store, { scope, prefetch, capacity }, lru) {
  const { misses, first_uses: first } = lru ? mainPart(lru) : {};
  const expected = 1 - capacity / store.E;
  const plain = lru && scope === "layer" && prefetch === "none" && expected > 0.1 && first < 0.1 * misses;
  return plain && Math.abs(missShare(mainPart(lru)) - expected) < Math.min(0.02, 0.1 * expected) ? `LRU misses what blind traffic would miss, 1 − C/E = ${shareText(expected)}: recent use tells nothing here.` : "";
}

// Between two uses of an expert stand the k experts of every other layer.
function never(store, setting) {
  const dead = store.facts.top_k * (store.L - 1);
  return store.L > 1 && !store.facts.holes && setting.passes === "each" && setting.prefetch === "none" && dead >= store.facts.top_k ? `A global LRU of ${count(dead)} or fewer experts would never hit (k · (L − 1) = ${count(dead)}).` : "";
}

// A policy that misses more with more cache. With sets of a prefill, or what is fetched ahead, a stack policy may do that too.
function rises(store, { policy, passes, prefetch }, curve) {
  const misses = curve.capacities.map((c) => mainPart(store.counts(curve, c)).misses);
  const i = misses.findIndex((n, j) => j > 0 && n > misses[j - 1]);
  const why = passes === "each" && prefetch === "none" ? ": it is no stack policy" : "";
  return i > 0 ? `${escape(title(policy))} misses more with ${count(curve.capacities[i])} experts than with ${count(curve.capacities[i - 1])}${why}.` : "";
}

// Whether the policy matters at this size, among those that can be built: all of them where each has a curve, else those that are drawn.
function choice(store, setting) {
  const can = (policy) => policy !== "belady" && (policy !== "static" || !store.facts.own_profile) && fits(policy, setting.prefetch);
  const counted = (policies) => policies.filter(can).map((policy) => store.counts(store.curve(setting, policy), setting.capacity)).filter(Boolean);
  const every = Object.keys(store.facts.policies).filter(can);
  const all = counted(every);
  const whole = all.length === every.length;
  const found = whole ? all : counted(store.drawn(setting).map(({ policy }) => policy));
  if (found.length < 3 || !found.every((counts) => mainPart(counts).requests)) return "";
  const misses = found.map((counts) => mainPart(counts).misses);
  const [best, worst] = [Math.min(...misses), Math.max(...misses)];
  const share = (n) => shareText(n / mainPart(found[0]).requests);
  const which = `${whole ? "all policies" : "the policies drawn here"} that can be built${store.facts.own_profile ? " and start empty" : ""}`;
  const apart = (worst - best) / mainPart(found[0]).requests;
  if (best === mainPart(found[0]).requests) return ""; // the first sentence says why
  if (share(best) === share(worst)) return `At this size ${which} miss ${share(best)}: it does not matter which.`;
  if (apart < 0.02) return `At this size ${which} miss ${share(best)} to ${share(worst)}: it matters little which.`;
  const names = (n) => found.filter((_, i) => misses[i] === n).map(({ policy }) => escape(title(policy))).join(" and ");
  return `Of ${which}, the fewest misses come with ${names(best)}, ${share(best)}; most with ${names(worst)}, ${share(worst)}.`;
}
