// What can be set: policy, capacity, scope, prefetch, passes. Disabled where that needs Python and there is none.
import { SUPPRESS } from "../common/frame.js";
import { escape } from "../common/format.js";
import { SHOWN, fits, title } from "./store.js";

const choice = (name, value, words, on, able, tip = "") => `<button type="button" data-set="${name}" data-value="${value}" aria-pressed="${on}" ${able || on ? "" : "disabled"} title="${escape(tip)}" ${SUPPRESS}>${escape(words)}</button>`;
const segment = (label, buttons) => `<span class="name">${label}</span> <span class="seg" role="group" aria-label="${label}">${buttons.join("")}</span>`;

export function policyButtons({ store, setting, live }) {
  const { policies } = store.facts;
  const able = (policy) => fits(policy, setting.prefetch) && (live || store.curve(setting, policy) !== null);
  const others = Object.keys(policies).filter((policy) => !SHOWN.includes(policy));
  const buttons = SHOWN.filter((policy) => policy in policies).map((policy) => choice("policy", policy, title(policy), policy === setting.policy, able(policy), policies[policy]));
  const options = others.map((policy) => `<option value="${policy}"${policy === setting.policy ? " selected" : ""}${able(policy) ? "" : " disabled"} title="${escape(policies[policy])}">${escape(title(policy))}</option>`);
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

// Only where some pass has more than one token.
export function passButtons({ store, setting, live }) {
  if (store.facts.longest_pass < 2) return "";
  const able = (passes) => live || store.curve({ ...setting, passes }) !== null;
  return segment("Passes", [["each", "token by token"], ["trace", "as recorded"]].map(([passes, words]) => choice("passes", passes, words, passes === setting.passes, able(passes))));
}
