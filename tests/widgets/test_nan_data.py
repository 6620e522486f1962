"""What the tracer sends of a search: facts, map, the way as boxes and arrows, cells, the selection."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from founds import CURED, EXPERT, LAYER, NOT_CURED, OVERFLOW, TOKEN, UNKNOWN, WEIGHT, many, overflow, run, steps, table

import colibri_lab as lab
from colibri_lab.errors import ArgumentError, TapError
from colibri_lab.nan.result import Found, Operand, Propagation, Step
from colibri_lab.widgets.nan_data import STATES, NanData, cure_facts, number_text, operand_facts
from colibri_lab.widgets.nan_offers import offers
from colibri_lab.widgets.nan_tree import tap_name, token_words, tree

HIDDEN = f"layers.{LAYER}.moe.experts.*.hidden"


def strict(value: Any) -> Any:
    """Through JSON as a browser reads it: NaN and Infinity are refused."""
    return json.loads(json.dumps(value, allow_nan=False))


def test_G1_facts_pass_through_strict_json() -> None:
    """NaN in values, operands, weights and cures: words in their places, no bare NaN."""
    data = NanData.of(overflow(WEIGHT, UNKNOWN))
    facts = strict(data.facts())
    assert [origin["kind"] for origin in facts["origins"]] == ["overflow", "weight value", "unknown"]
    assert facts["origins"][1]["weight"]["value"] == "NaN" and facts["origins"][1]["weight"]["signalling"]
    assert strict(data.origin(0))["boxes"]
    assert strict(cure_facts(NOT_CURED))["kl"] == "nan"
    assert strict(cure_facts(CURED))["where"] == "expert 5 output, layer 3"


def test_the_map_goes_as_arrays() -> None:
    """One value per tap, the states as their codes."""
    found = overflow()
    arrays = NanData.of(found).overview()
    assert [STATES[code] for code in arrays["state"]] == [str(state) for state in found.map["state"]]
    assert arrays["n_nan"].tolist() == found.map["n_nan"].tolist()
    assert arrays["absmax"].dtype == np.float32


def test_it_starts_at_the_first_origin_and_a_clean_run_at_what_is_nearest_to_overflow() -> None:
    assert NanData.of(overflow(WEIGHT)).start() == {"path": HIDDEN, "layer": LAYER, "token": TOKEN, "expert": EXPERT}
    clean = NanData.clean(run(), table(born=None), "float16")
    assert clean.start()["path"] == "layers.2.moe.experts.*.hidden"
    closest = clean.facts()["closest"]
    assert (closest["layer"], closest["name"], round(closest["bits"], 1)) == (2, "expert hidden", 0.9)


def test_a_clean_run_without_a_map_has_nothing_to_select() -> None:
    data = NanData.clean(None)
    assert data.start() == {"path": None, "layer": None, "token": None, "expert": None}
    assert strict(data.facts())["closest"] is None


def test_a_selection_keeps_what_is_left_out() -> None:
    """A layer alone goes to the same tap there; a path with an expert's number selects that expert."""
    data = NanData.of(overflow())
    here = data.start()
    assert data.check({"layer": 1}, here)["path"] == "layers.1.moe.experts.*.hidden"
    assert data.check({"layer": 1}, here)["expert"] is None
    assert data.check({"path": f"layers.{LAYER}.moe.experts.2.output"}, here)["expert"] == 2
    assert data.check({"token": 0}, here) == {**here, "token": 0}
    assert data.check({"path": "logits"}, here)["layer"] is None


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"path": "layers.1.attn.z"}, "no tap"),
        ({"token": 40}, "tokens are 0 to 39"),
        ({"expert": 8}, "experts are 0 to 7"),
        ({"layer": 6}, "layers are 0 to 5"),
        ({"layer": "3"}, "no layer '3'"),
        ({"layer": True}, "no layer True"),
        ({"path": f"layers.{LAYER}.moe.experts.-1.hidden"}, "no tap"),
        ({"path": f"layers.{LAYER}.moe.experts.².hidden"}, "no tap"),
        ({"row": 3}, "not row"),
        ({"path": "logits", "layer": 2}, "the path or the layer"),
    ],
)
def test_a_wrong_selection_is_refused_with_the_valid_choice(wish: dict[str, Any], words: str) -> None:
    data = NanData.of(overflow())
    with pytest.raises((ArgumentError, TapError), match=words):
        data.check(wish, data.start())


def test_the_way_has_three_columns_from_the_origin_to_the_logits() -> None:
    """Each box says where it comes from; what stayed clean is a box without an arrow."""
    way = tree(overflow(), 0)
    assert way["columns"] == ["layer 3", "layer 4", "layer 5 to logits"]
    boxes = way["boxes"]
    assert [box["title"] for box in boxes if box["column"] == 0] == [
        "expert 5 hidden[117]", "expert 5 output", "sum of the experts", "residual stream",
    ]  # fmt: skip
    assert [box["source"] for box in boxes[:5]] == [None, 0, 1, 2, 3]
    assert boxes[4]["label"] == "Inf × 0 = NaN" and boxes[4]["mark"] == "nan"
    ends = [(box["title"], box["sub"], box["source"]) for box in boxes if box["column"] == 2]
    stream = max(i for i, box in enumerate(boxes) if box["title"] == "residual stream")
    assert boxes[stream]["column"] == 1
    assert ends == [
        ("token 35", "logits: not finite", stream), ("tokens 36–39", "logits: not finite", stream),
        ("tokens 0–34", "clean: they come before", None),
    ]  # fmt: skip


def test_the_sizes_of_a_replay_go_to_the_rows_of_the_map() -> None:
    """By tap; NaN where the other run recorded none."""
    found = overflow()
    data = NanData.of(found)
    again = table(born=None, sizes=[*range(100, 106)])
    data.replay_with(again[1:])
    at = data.paths.index("layers.4.moe.experts.*.hidden")
    assert data.replayed[at] == 104 and np.isnan(data.replayed[0]) and len(data.replayed) == len(found.map)


def test_each_origin_has_a_way_of_its_own() -> None:
    """Steps that come from another origin are not its steps, and what that ruined is not its doing."""
    way = tree(overflow(WEIGHT), 1)
    assert [box["title"] for box in way["boxes"]] == ["queries[2, 7]", "tokens 35–39", "tokens 0–34"]
    assert [box["sub"] for box in way["boxes"][1:]] == ["ruined by another origin", "clean"]
    assert all(box["column"] != 1 for box in way["boxes"])


def test_two_origins_of_a_run_ruin_their_own_tokens() -> None:
    """Patient 4: an expert's product spoils two rows and all that read them, a weight of the head every token. The
    logits come from the residual stream.
    """
    session = lab.exercises.patient(4).session(capture="all")
    session.feed(lab.exercises.TEXT)
    found = lab.nan.find(session)
    assert found is not None and len(found.origins) == 2
    ways = [tree(found, number)["boxes"] for number in (0, 1)]
    ends = [[(box["title"], box["sub"]) for box in boxes if box["column"] == 2] for boxes in ways]
    assert ends == [
        [("tokens 5, 20", "logits: not finite"), ("tokens 6–19, 21–27", "logits: not finite"),
         ("tokens 0–4", "ruined by another origin")],
        [("tokens 0–27", "logits: not finite")],
    ]  # fmt: skip
    sources = {ways[0][box["source"]]["path"] for box in ways[0] if box["column"] == 2 and box["mark"]}
    assert sources == {"layers.4.output"}


def test_rows_of_two_origins_that_meet_in_a_tap_are_told_apart() -> None:
    """The stream of layer 4 has rows of both, and the logits come from it in one step: each origin keeps its own."""
    first = replace(OVERFLOW, path="layers.2.moe.routed", layer=2, token=9, tokens=(9,))
    second = replace(OVERFLOW, path="layers.4.moe.routed", layer=4, token=3, tokens=(3,))

    def step(path: str, source: str, rows: tuple[int, ...], how: Any) -> Step:
        return Step(path, source, None, "residual", rows, 3, 3, float("nan"), how, "")

    way = (
        step("layers.2.output", first.path, (9,), "residual"),
        step("layers.3.attn.out", "layers.2.output", (10, 11), "attention"),
        step("layers.4.output", "layers.2.output", (9,), "residual"),
        step("layers.4.output", "layers.3.attn.out", (10, 11), "residual"),
        step("layers.4.output", second.path, (3,), "residual"),
        step("logits", "layers.4.output", (3, 9, 10, 11), "product"),
    )
    found = Found(run(), (first, second), Propagation(way, (3, 9, 10, 11), (0,), "logits"), table(), "float16")
    ends = [
        {box["title"] for box in tree(found, number)["boxes"] if box["column"] == 2 and box["mark"]}
        for number in (0, 1)
    ]  # fmt: skip
    assert ends == [{"token 9", "tokens 10–11"}, {"token 3"}]


def test_many_steps_of_one_layer_are_counted() -> None:
    """Six boxes at most; what is left out is named and counted, and the way goes on behind it."""
    taps = {
        "attention": "attn.out", "router": "moe.router_logits", "expert": "moe.experts.1.up",
        "shared": "moe.shared.output", "aggregator": "moe.routed", "mlp": "mlp.output", "residual": "output",
    }  # fmt: skip
    way: list[Step] = []
    for stage, tap in taps.items():
        source = way[-1].path if way else OVERFLOW.path
        way.append(Step(f"layers.4.{tap}", source, 4, stage, (35,), 3, 3, float("nan"), "product", "times a weight"))
    found = replace(overflow(), propagation=Propagation(tuple(way), (35,), (), "logits"))
    boxes = tree(found, 0)["boxes"]
    middle = [box for box in boxes if box["column"] == 1]
    assert len(middle) == 6
    assert middle[-2]["title"] == "⋯ 2 more steps" and middle[-2]["sub"] == "aggregator, mlp"
    assert middle[-1]["title"] == "residual stream" and boxes[middle[-1]["source"]] is middle[-2]


def test_a_swallowed_origin_ruins_nothing() -> None:
    found = replace(overflow(), propagation=Propagation((), (), tuple(range(40)), "logits", swallowed=("gate was 0",)))
    assert [box["sub"] for box in tree(found, 0)["boxes"] if box["column"] == 2] == ["clean"]
    assert NanData.of(found).facts()["way"]["swallowed"] == ["gate was 0"]


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([7], "token 7"), (range(35), "tokens 0–34"), ([1, 4, 5, 6, 9], "tokens 1, 4–6, 9"),
        (range(0, 40, 2), "tokens 0, 2, 4, 6 and 16 more"),
    ],
)  # fmt: skip
def test_tokens_in_words(tokens: Any, words: str) -> None:
    assert token_words(tokens) == words


def test_taps_in_words() -> None:
    assert tap_name("layers.2.moe.experts.*.hidden") == "expert hidden"
    assert tap_name("layers.2.moe.experts.11.up") == "expert 11 up"
    assert tap_name("layers.2.output") == "residual stream"


def test_a_cell_counts_what_is_not_finite() -> None:
    """Of the selected token, and in which tokens of the run; NumPy is the oracle."""
    found = overflow()
    data = NanData.of(found)
    cell = strict(data.cell("layers.4.output", TOKEN, None))
    bad = ~np.isfinite(found.trace["layers.4.output"])
    assert cell["bad"] == bad.any(axis=1).sum() and cell["bad_words"] == "tokens 35–39"
    assert (cell["n"], cell["n_nan"], cell["absmax"]) == (16, bad[TOKEN].sum(), None)
    clean = strict(data.cell("layers.4.output", 3, None))
    assert clean["absmax"] == float(np.abs(found.trace["layers.4.output"][3]).max())
    assert data.cell("layers.4.attn.weights", 3, None)["recorded"] is False


def test_a_cell_of_an_expert_has_the_rows_of_its_tokens() -> None:
    trace = run()
    path = f"layers.{LAYER}.moe.dispatch.output"
    assert path in trace
    data = NanData(None, trace, np.concatenate([table(born=None)]), "float16")
    rows = trace.expert_rows(LAYER, EXPERT)
    token = int(rows["tokens"][0])
    cell = data.cell(f"layers.{LAYER}.moe.experts.*.output", token, EXPERT)
    assert cell["absmax"] == float(np.abs(rows["output"][0]).max())
    absent = next(t for t in range(40) if t not in rows["tokens"])
    assert data.cell(f"layers.{LAYER}.moe.experts.*.output", absent, EXPERT)["n"] == 0


def test_a_cell_of_an_expert_without_a_token_is_empty() -> None:
    """Selecting it is no error: nothing is there, and nothing is not finite."""
    session = lab.open().session(capture="all")
    session.feed([1])
    trace = session.trace()
    idle = next(e for e in range(trace.num_experts) if not len(trace.expert_rows(LAYER, e)["tokens"]))
    cell = strict(NanData(None, trace, lab.nan.scan(trace)).cell(f"layers.{LAYER}.moe.experts.*.hidden", 0, idle))
    assert (cell["recorded"], cell["bad"], cell["n"], cell["absmax"]) == (True, 0, 0, None)


def test_operands_show_their_bits() -> None:
    """As stored: the payload of a signalling NaN stays, a float16 is written in full."""
    shown = operand_facts(Operand("w", float("nan"), "float32", 0x7FA00001))
    assert (shown["text"], shown["hex"], shown["mark"]) == ("NaN", "0x7FA00001", "nan")
    assert [len(field) for field in shown["fields"]] == [1, 8, 23]
    assert operand_facts(Operand("a", 412.25, "float16"))["text"] == "412.25"
    assert [number_text(v) for v in (0.1, float("-inf"), -2.0, 3e38)] == ["0.1", "−Inf", "−2", "3e38"]


def test_offers_say_why_a_change_is_not_tried() -> None:
    """Without the model nothing can be; with it the expert of this origin, but no weight that is finite."""
    found = overflow(WEIGHT)
    assert all("no model is open" in offer.row.note for offer in offers(found, 0))
    assert not any("no model is open" in offer.row.note for offer in offers(found, 0, model=object()))
    found.trace.model = object()
    assert {offer.name: offer.row.note for offer in offers(found, 0)} == {
        "precision": "", "clamp": "", "whole model": "", "ablate": "", "weight": "no weight is the cause",
    }  # fmt: skip
    second = {offer.name: offer.row.note for offer in offers(found, 1)}
    assert second["ablate"] == "no expert is in it" and second["weight"] == ""
    assert offers(found, 0)[3].row.change == "Switch off expert 5 in layer 3"
    assert [offer.options for offer in offers(found, 0)] == [{}, {}, {"whole": True}, {}, {}]
    assert "whole model" not in [offer.name for offer in offers(many(1, 8, 16, 40), 0)]


def test_hundreds_of_origins_are_bounded() -> None:
    """200 are sent, all are counted."""
    facts = NanData.of(many(300, 8, 16, 40)).facts()
    assert len(facts["origins"]) == 200 and facts["all_origins"] == 300
    assert len(json.dumps(facts)) < 400_000


def test_the_headroom_is_counted_in_the_format_that_overflowed() -> None:
    """float32 has room, so a float32 run is measured for float16, unless it overflowed itself."""
    assert NanData.of(overflow()).facts()["format"] == "float16"
    assert NanData.clean(run(), table(born=None), "float32").facts()["format"] == "float16"
    wide = Found(run(), (replace(OVERFLOW, dtype="float32"),), steps(), table(), "float32")
    assert NanData.of(wide).facts()["format"] == "float32"
    assert NanData.clean(run(), table(born=None), "bfloat16").facts()["format"] == "bfloat16"
