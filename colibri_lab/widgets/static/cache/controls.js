// What can be set: policy, capacity, scope, prefetch, passes. Disabled where that needs Python and there is none.
import { SUPPRESS } from "../common/frame.js";
import { escape } from "../common/format.js";
import { SHOWN, fits, title } from "./store.js";

// What each policy does, in plain words; POLICIES of lab.cache says it so that it can be written again.
const TIPS = {
  lru: "Lets go of the expert that was used longest ago.",
  lfu: "Lets go of the expert that was used least often so far.",
  fifo: "Lets go of the expert that came in first, used or not.",
  clock: "First in, first out, but who was used since gets a second chance.",
  slru: "A new expert is on probation; one that is used again is protected, up to half the room.",
  lfru: "Half the room for those used last; of the others the one used least often goes.",
  "lru-k": "Lets go of the expert whose last use but one is longest ago; one used only once goes first.",
  arc: "Divides the room between experts used once and experts used again, and learns from its own misses which of them need more.",
  "least-stale": "Lets go of experts that this pass has not used, those first whose layer comes again last.",
  static: "Holds a fixed set from the start, the busiest experts, and never changes it.",
  belady: "Lets go of the expert whose next use lies farthest ahead. It needs the future: a bound, not a choice.",
};
const choice = (name, value, words, on, able, tip = "") => `<button type="button" data-set="${name}" data-value="${value}" aria-pressed="${on}" ${able || on ? "" : "disabled"} title="${escape(tip)}" ${SUPPRESS}>${escape(words)}</button>`;
const segment = (label, buttons) => `<span class="name">${label}</span> <span class="seg" role="group" aria-label="${label}">${buttons.join("")}</span>`;

export function policyButtons({ store, setting, live }) {
  const { policies } = store.facts;
  const able = (policy) => fits(policy, setting.prefetch) && (live || store.curve(setting, policy) !== null);
  const others = Object.keys(policies).filter((policy) => !SHOWN.includes(policy));
  const buttons = SHOWN.filter((policy) => policy in policies).map((policy) => choice("policy", policy, title(policy), policy === setting.policy, able(policy), TIPS[policy] ?? policies[policy]));
  const options = others.map((policy) => `<option value="${policy}"${policy === setting.policy ? " selected" : ""}${able(policy) ? "" : " disabled"} title="${escape(TIPS[policy] ?? policies[policy])}">${escape(title(policy))}</option>`);
  const menu = others.length ? ` <select class="more" aria-label="More policies" ${SUPPRESS}><option value=""${SHOWN.includes(setting.policy) ? " selected" : ""}>more …</option>${options.join("")}</select>` : "";
  return segment("Policy", buttons) + menu;
}

export function scopeButtons({ store, setting, live }) {
  const able = (scope) => live || store.curve({ ...setting, scope }) !== null;
  return segment("Scope", [["layer", "per layer"], ["global", "global"]].map(([scope, words]) => choice("scope", scope, words, scope === setting.scope, able(scope))));
}

export function prefetchButtons({ store, setting, live }) {
  const able = (prefetch) => fits(setting.policy, prefetch) && (live || store.curve({ ...setting, prefetch }) !== null);
  const offered = store.facts.prefetches.filter((kind) => ["none", "previous", "look-ahead"].includes(kind) || kind === setting.prefetch);
  return segment("Prefetch", offered.map((kind) => choice("prefetch", kind, kind, kind === setting.prefetch, able(kind))));
}

const NO_PASSES = "This recording does not tell in which passes its tokens were fed.";

// Only where some pass has more than one token.
export function passButtons({ store, setting, live }) {
  if (store.facts.longest_pass < 2) return "";
  const { imported } = store.facts;
  const able = (passes) => (live || store.curve({ ...setting, passes }) !== null) && !(imported && passes === "trace");
  const tip = (passes) => (imported && passes === "trace" ? NO_PASSES : "");
  return segment("Passes", [["each", "token by token"], ["trace", "as recorded"]].map(([passes, words]) => choice("passes", passes, words, passes === setting.passes, able(passes), tip(passes)))) + (imported ? ' <span class="q small">(this recording names no passes)</span>' : "");
}
