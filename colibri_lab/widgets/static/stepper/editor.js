// The line in which gates and experts of one token are edited.
import { chip } from "../common/format.js";
import { SUPPRESS } from "../common/frame.js";
import { plain } from "./buffers.js";

export function routingEditor(view) {
  const { moment, token } = view;
  const ids = moment.ids(token);
  const gates = moment.gates(token) ?? ids.map(() => 0);
  const slots = ids.map((e, i) => `<span class="slot"><label>expert <input class="num m" data-slot="${i}" value="${e}" size="3" ${SUPPRESS}></label><label>gate <input class="num m" data-gate="${i}" value="${plain(gates[i])}" size="9" ${SUPPRESS}></label></span>`).join("");
  const off = ids.filter((e) => e >= 0).map((e) => `<button type="button" class="btn low" data-act="off" data-of="${e}" aria-label="Switch off expert ${e} for all tokens" ${SUPPRESS}>Switch off ${chip(view, e)}</button>`).join(" ");
  return `<b>Token ${token}</b> in layer ${moment.layer}: ${slots}<button type="button" class="btn low pri" data-act="apply" ${SUPPRESS}>Apply in fork</button><button type="button" class="btn low" data-act="cancel" ${SUPPRESS}>Cancel</button><span class="sp"></span>${off}`;
}
