// For screen readers: what the pictures show, as tables. Filled when the setting has come to rest.
import { count, escape } from "../common/format.js";
import { title } from "./store.js";
import { isNamed, mainPart, missShare, shareText, speedText, tokenName } from "./words.js";

const AROUND = 10; // tokens of the timeline on either side

const table = (caption, heads, rows) => `<table><caption>${escape(caption)}</caption><thead><tr>${heads.map((h) => `<th>${escape(h)}</th>`).join("")}</tr></thead><tbody>${rows.map((cells) => `<tr>${cells.map((c) => `<td>${escape(c)}</td>`).join("")}</tr>`).join("")}</tbody></table>`;

export const twinTables = (view) => curveTable(view) + requestTable(view);

function curveTable({ store, setting }) {
  const curves = store.drawn(setting);
  if (!curves.length) return "";
  const speed = curves[0].speed.some((v) => v !== null);
  const rows = curves[0].capacities.map((c, i) => [count(c), ...curves.map((curve) => (curve.capacities.includes(c) ? shareText(missShare(mainPart(store.counts(curve, c)))) : "")), ...(speed ? [curves[0].speed[i] === null ? "" : speedText(curves[0].speed[i])] : [])]);
  return table("Share of requests that miss, by experts kept", ["experts", ...curves.map((curve) => title(curve.policy)), ...(speed ? [`tokens/s, ${title(curves[0].policy)}`] : [])], rows);
}

function requestTable({ store, setting, layer, token }) {
  const block = layer === null || token === null ? null : store.timeline(setting, layer, token);
  if (!block) return "";
  const near = block.requests.filter((r) => Math.abs(r.token - token) <= AROUND);
  return table(`Requests of layer ${layer} around token ${token}`, ["token", "text", "expert", "outcome", "pushed out"], near.map((r) => [String(r.token), isNamed(block, r.token) ? tokenName(block, r.token) : "", String(r.expert), r.outcome, r.evicted < 0 ? "" : String(r.evicted)]));
}
