// The answer first: where the walk stands, why it stopped, what comes next. And places in words.
import { chip, escape, gate, plural, word } from "../common/format.js";

const DOES = {
  embed: "look up the tokens' vectors",
  attention: "let each token read those before it",
  router: "choose experts for each token",
  dispatcher: "sort the token rows by expert",
  shared: "run the expert that all tokens share",
  aggregator: "weight the experts' outputs by the gates and add them up",
  mlp: "run the dense block",
  residual: "add the result to the residual stream",
  norm: "normalise the residual stream",
  logits: "turn the last rows into scores of the next token",
};

export const stageName = (stage) => (stage === "expert" ? "experts" : stage);

export function placeName({ stage, layer, expert }) {
  if (stage === null) return "the start";
  if (stage === "expert" && expert !== null && expert >= 0) return `expert <b>${expert}</b> of layer <b>${layer}</b>`;
  return `the <b>${stage}</b>${layer === null || layer < 0 ? "" : ` of layer <b>${layer}</b>`}`;
}

export const tokenName = (head, token) => `<b class="m">${escape(word(head.texts[token], head.ids[token]))}</b>`;

export function nextWords(moment) {
  const { next } = moment.facts;
  if (!next) return "This is the end; Back goes back.";
  const what = next.stage === "expert" ? `run expert ${next.expert} on its rows` : DOES[next.stage];
  return `Next: ${what}${next.stage === "attention" ? `, layer ${next.layer}` : ""}.`;
}

export function stopSentence(view) {
  const { moment } = view;
  const { place, reason } = moment.facts;
  const token = view.token;
  if (place.stage === null) return `Before the first stage of ${plural(moment.facts.rows[1] - moment.facts.rows[0], "token")}. <span class="sub">${nextWords(moment)} Press <b>.</b> to step.</span>`;
  const met = plural(moment.facts.hits.length, "token");
  const why = reason === "condition" ? `: the condition holds for ${met}` : reason.startsWith("breakpoint") ? `, ${escape(reason)} (${met})` : "";
  const whose = moment.facts.run.look === "fork" ? "The fork stands" : "Stopped";
  return `${whose} after ${placeName(place)}${why}. ${about(view, token)} <span class="sub">${nextWords(moment)}</span>`;
}

// What happens to the selected token at this place.
function about(view, token) {
  const { moment } = view;
  const { stage, layer, expert } = moment.place;
  const name = `Token ${token} ${tokenName(moment.head, token)}`;
  if (stage === "logits" || stage === "norm" || stage === "embed") return `${plural(moment.facts.rows[1] - moment.facts.rows[0], "token")} in this pass.`;
  if (layer !== moment.layer) return `Looking at layer <b>${moment.layer}</b>.`;
  const ids = moment.ids(token);
  if (!ids) return "";
  const gates = moment.gates(token);
  if (stage === "expert") {
    const n = moment.load(layer, expert);
    return `It got ${plural(n ?? 0, "row")}${ids.includes(expert) ? `, token ${token} ${tokenName(moment.head, token)} among them` : ""}.`;
  }
  const held = ids.flatMap((e, slot) => (e < 0 ? [] : [`${gates ? `<b>${gate(gates[slot])}</b> × ` : ""}${chip(view, e)}`]));
  if (!held.length) return `${name} goes to no expert.`;
  const more = held.length > 4 ? ` and ${held.length - 3} more` : "";
  return `${name} ${stage === "router" || stage === "dispatcher" ? "goes to" : "got"} ${(more ? held.slice(0, 3) : held).join(" + ")}${more}.`;
}
