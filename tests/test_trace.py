"""Trace: resolving paths, joining expert rows, and refusing what contradicts itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from colibri_lab import routing
from colibri_lab.errors import ArgumentError, FormatError, NotCapturedError, TapError
from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace, check_values


def meta(**changes: Any) -> dict[str, Any]:
    """A sound meta of 3 tokens in 2 passes, 2 layers (the second with 4 experts, 2 chosen)."""
    return {
        "producer": "test",
        "producer_version": "0",
        "model_type": "mixtral",
        "num_hidden_layers": 2,
        "moe_layers": [1],
        "num_experts": 4,
        "top_k": 2,
        "gate_rule": "softmax",
        "passes": [[0, 2], [2, 3]],
        "edits": [],
    } | changes


def make(arrays: dict[str, Any] | None = None, **changes: Any) -> Trace:
    return Trace(arrays or {}, ids=[7, 8, 9], texts=["a", "b", "c"], meta=meta(**changes))


PREFIX = "layers.1.moe.dispatch"
# Pass 0 sends token 0 to 3, 1 and token 1 to 1, 2; pass 1 sends token 2 to 0, 3.
PACKED = {
    f"{PREFIX}.tokens": np.array([0, 1, 1, 0, 2, 2], np.int32),
    f"{PREFIX}.offsets": np.array([[0, 0, 2, 3, 4], [4, 5, 5, 5, 6]]),
    f"{PREFIX}.input": np.arange(12, dtype=np.float32).reshape(6, 2),
}


class TestExpertRows:
    def test_a_path_of_an_expert_is_a_slice_of_the_last_pass(self) -> None:
        trace = make(PACKED)
        assert trace["layers.1.moe.experts.3.tokens"].tolist() == [2]
        assert trace["layers.1.moe.experts.3.input"].tolist() == [[10.0, 11.0]]
        assert np.shares_memory(trace["layers.1.moe.experts.3.input"], PACKED[f"{PREFIX}.input"])

    def test_an_expert_without_a_token_has_no_rows_but_its_width(self) -> None:
        assert make(PACKED)["layers.1.moe.experts.1.input"].shape == (0, 2)

    def test_joined_rows_come_in_token_order(self) -> None:
        rows = make(PACKED).expert_rows(1, 3)
        assert rows["tokens"].tolist() == [0, 2] and rows["input"].tolist() == [[6.0, 7.0], [10.0, 11.0]]
        assert set(rows) == {"tokens", "input"}

    def test_every_expert_gets_exactly_the_tokens_that_chose_it(self) -> None:
        trace = synthetic_trace(3, 9, 3, 50, hidden=2, passes=[20, 1, 29], dense_layers=[1])
        for layer in trace.moe_layers:
            ids = trace[f"layers.{layer}.moe.expert_ids"]
            for expert in range(9):
                rows = trace.expert_rows(layer, expert)
                assert rows["tokens"].tolist() == np.flatnonzero((ids == expert).any(axis=1)).tolist()
                np.testing.assert_array_equal(rows["input"], trace[f"layers.{layer}.moe.input"][rows["tokens"]])


class TestPaths:
    def test_a_wrong_name_gets_the_nearest_right_ones(self) -> None:
        with pytest.raises(TapError, match=r"'layers\.0\.moe\.gate'; did you mean 'layers\.0\.moe\.gates'"):
            synthetic_trace(2)["layers.0.moe.gate"]

    @pytest.mark.parametrize(
        ("path", "words"),
        [
            ("layers.0.moe.gates", "layer 0 is dense and has no experts; the nearest layer with experts is 1"),
            ("layers.9.moe.gates", "there is no layer 9; layers are 0 to 1"),
            ("layers.9.output", "there is no layer 9; layers are 0 to 1"),
            ("layers.1.moe.experts.4.input", "there is no expert 4; experts are 0 to 3"),
            ("layers.0.moe.experts.0.input", "layer 0 is dense"),
            ("layers.1.moe.experts.0.outputs", "an expert has no tap 'outputs'; it has tokens, input"),
        ],
    )
    def test_a_place_that_does_not_exist_is_named(self, path: str, words: str) -> None:
        with pytest.raises(TapError, match=words):
            make(PACKED)[path]

    @pytest.mark.parametrize(
        ("path", "capture"),
        [
            ("layers.1.moe.gates", "routing"),
            ("layers.1.moe.input", "moe"),
            ("norm", "all"),
            ("layers.1.moe.experts.0.output", "moe"),
            ("layers.1.moe.experts.0.hidden", "all"),
            ("layers.1.attn.weights", "layers.1.attn.weights"),
        ],
    )
    def test_what_was_not_recorded_says_what_to_ask_for(self, path: str, capture: str) -> None:
        with pytest.raises(NotCapturedError, match=f"'{path}' was not recorded.*capture=\"{capture}\""):
            make(PACKED)[path]

    def test_mapping_methods_agree(self) -> None:
        trace = make(PACKED)
        assert (
            "layers.1.moe.experts.3.input" in trace
            and "norm" not in trace
            and "nonsense" not in trace
            and 3 not in trace
        )
        assert trace.get("norm") is None and trace.get("nonsense", 1) == 1
        assert list(trace) == list(PACKED) and len(trace) == 3

    def test_arrays_are_read_only_and_not_copied(self) -> None:
        source = np.zeros((3, 4), np.float32)
        trace = make({"layers.1.moe.scores": source})
        array = trace["layers.1.moe.scores"]
        assert np.shares_memory(array, source) and not array.flags.writeable and source.flags.writeable


class TestRefused:
    @pytest.mark.parametrize(
        ("arrays", "words"),
        [
            ({"layers.1.moe.scores": np.zeros((3, 5))}, r"3 tokens need \(3, 4\)"),
            ({"layers.1.moe.gates": np.zeros((2, 2))}, "3 tokens need"),
            ({"norm": np.zeros((4, 8))}, "the trace has 3 tokens"),
            ({"layers.1.attn.weights": np.zeros((2, 4, 4))}, "the trace has 3 tokens"),
            ({"layers.0.moe.scores": np.zeros((3, 4))}, "belongs to no MoE layer"),
            ({"layers.2.output": np.zeros((3, 4))}, "belongs to no layer"),
            ({f"{PREFIX}.input": np.zeros((6, 2))}, "not both dispatch.tokens and dispatch.offsets"),
            (PACKED | {f"{PREFIX}.input": np.zeros((5, 2))}, r"expected \(6, …\)"),
            (PACKED | {f"{PREFIX}.offsets": np.zeros((2, 4), int)}, r"expected \(2, 5\)"),
        ],
    )
    def test_a_shape_that_contradicts_the_tokens(self, arrays: dict[str, Any], words: str) -> None:
        with pytest.raises(FormatError, match=words):
            make(arrays)

    @pytest.mark.parametrize(
        ("path", "array", "words"),
        [
            ("expert_ids", [[0, 1], [4, 0], [0, 1]], r"token 1: expert ids \[4, 0\] have one outside 0 to 3"),
            ("expert_ids", [[0, 1], [1, -2], [0, 1]], "token 1.*outside 0 to 3"),
            ("expert_ids", [[0.0, 1.0]] * 3, "float64; whole numbers are needed"),
            ("expert_ids", [[False, True]] * 3, "bool; whole numbers are needed"),
            ("expert_ids", [["0", "1"]] * 3, "whole numbers are needed"),
            ("expert_ids", [[0, 1, 2]] * 3, r"3 tokens need \(3, 2\)"),
            ("gates", [["a", "b"]] * 3, "numbers are needed"),
            ("router_logits", np.zeros((3, 4), complex), "complex128; numbers are needed"),
        ],
    )
    def test_a_hand_made_array_that_no_analysis_can_read(self, path: str, array: Any, words: str) -> None:
        with pytest.raises(FormatError, match=f"'layers.1.moe.{path}'.*{words}"):
            make({f"layers.1.moe.{path}": np.array(array)})

    def test_a_slot_without_an_expert_is_marked_by_minus_one(self) -> None:
        ids = np.array([[0, 1], [1, -1], [-1, -1]])
        trace = make({"layers.1.moe.expert_ids": ids})
        check_values(trace)
        assert trace["layers.1.moe.expert_ids"].tolist() == ids.tolist()

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"ids": ["7", "8", "9"]}, "whole numbers as ids"),
            ({"ids": [7.5, 8, 9]}, "whole numbers as ids"),
            ({"ids": np.array([7.0, 8, 9])}, "whole numbers as ids"),
            ({"ids": np.array([[7, 8, 9]])}, "whole numbers as ids"),
            ({"texts": [1, 2, 3]}, "strings as texts"),
            ({"arrays": {3: np.zeros(3)}}, "tap paths"),
            ({"arrays": {"norm": [[1.0], [1.0, 2.0]]}}, "'norm' is no array"),
        ],
    )
    def test_what_is_no_id_no_text_or_no_array_at_all(self, changes: dict[str, Any], words: str) -> None:
        arguments: dict[str, Any] = {"arrays": {}, "ids": [7, 8, 9], "texts": [], "meta": meta()} | changes
        with pytest.raises(ArgumentError, match=words):
            Trace(arguments.pop("arrays"), **arguments)

    @pytest.mark.parametrize(
        "changes",
        [
            {"passes": [[0, 3], [3, 3]]},
            {"passes": [[0, 2]]},
            {"passes": [[1, 3]]},
            {"passes": [[0, 2], [1, 3]]},
            {"passes": [0, 3]},
            {"moe_layers": [2]},
            {"moe_layers": [1, 1]},
            {"moe_layers": ["1"]},
            {"top_k": 5},
            {"top_k": 0},
            {"num_experts": True},
            {"num_hidden_layers": -1},
            {"num_hidden_layers": 10**30},
            {"num_experts": 10**30},
            {"model_type": None},
            {"edits": {}},
        ],
    )
    def test_a_meta_that_contradicts_itself(self, changes: dict[str, Any]) -> None:
        with pytest.raises(FormatError):
            make(**changes)

    def test_a_missing_meta_entry_is_named(self) -> None:
        with pytest.raises(ArgumentError, match="'gate_rule'"):
            Trace(
                {}, ids=[], texts=[], meta={key: value for key, value in meta(passes=[]).items() if key != "gate_rule"}
            )

    @pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
    def test_ids_may_come_as_an_array_of_whole_numbers(self, dtype: Any) -> None:
        trace = Trace({}, ids=np.array([7, 8, 9], dtype), texts=[], meta=meta())
        assert trace.n_tokens == 3 and trace.token_ids(1).tolist() == [8, 9]
        assert trace.token_ids().dtype == np.int64
        assert trace.ids == [7, 8, 9] and all(type(i) is int for i in trace.ids) and trace.ids is trace.ids
        assert trace.token_ids(1, 9).tolist() == [8, 9]

    def test_one_text_per_token_or_none(self) -> None:
        assert Trace({}, ids=[1, 2, 3], texts=[], meta=meta()).texts == ["", "", ""]
        with pytest.raises(FormatError, match="3 tokens has 1 texts"):
            Trace({}, ids=[1, 2, 3], texts=["a"], meta=meta())


class TestValues:
    @pytest.mark.parametrize(
        ("ids", "words"),
        [
            ([[0, 1], [0, 1], [2, 2]], "layer 1, token 2.*named twice"),
            ([[-1, -1], [0, 0], [2, 1]], "layer 1, token 1.*named twice"),
        ],
    )
    def test_expert_ids_of_a_token_differ(self, ids: list[list[Any]], words: str) -> None:
        with pytest.raises(FormatError, match=words):
            check_values(make({"layers.1.moe.expert_ids": np.array(ids)}))

    @pytest.mark.parametrize(
        "offsets",
        [
            [[0, 0, 3, 2, 4], [4, 5, 5, 5, 6]],
            [[1, 1, 2, 3, 4], [4, 5, 5, 5, 6]],
            [[0, 0, 2, 3, 4], [3, 5, 5, 5, 6]],
            [[0, 0, 2, 3, 4], [4, 5, 5, 5, 7]],
            [[0, 0, 2, 3, 5], [5, 5, 5, 5, 6]],
        ],
    )
    def test_offsets_rise_without_a_gap_and_stay_in_their_pass(self, offsets: list[list[int]]) -> None:
        check_values(make(PACKED))
        with pytest.raises(FormatError, match="dispatch"):
            check_values(make(PACKED | {f"{PREFIX}.offsets": np.array(offsets)}))

    def test_rows_of_slots_without_an_expert_lie_between_the_passes(self) -> None:
        """Pass 0 with one slot of token 0 unused, pass 1 with one of token 2: their rows name token −1."""
        tokens = np.array([0, 1, 1, -1, 2, -1], np.int32)
        offsets = np.array([[0, 0, 2, 3, 3], [4, 5, 5, 5, 5]])
        trace = make(PACKED | {f"{PREFIX}.tokens": tokens, f"{PREFIX}.offsets": offsets})
        check_values(trace)
        assert trace.expert_rows(1, 3)["tokens"].tolist() == []
        assert trace.expert_rows(1, 0)["tokens"].tolist() == [2]
        assert trace["layers.1.moe.experts.1.tokens"].tolist() == []


def test_an_empty_trace_is_a_trace() -> None:
    """No tokens, or no layer with experts: everything answers, nothing crashes."""
    trace = Trace({}, ids=[], texts=[], meta=meta(passes=[], moe_layers=[]))
    check_values(trace)
    assert len(trace) == 0 and trace.passes == [] and "0 tokens" in repr(trace)
    empty = synthetic_trace(2, 4, 2, 0, hidden=3)
    check_values(empty)
    assert empty["layers.0.moe.experts.1.input"].shape == (0, 3)


def test_many_layers_are_looked_up_and_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a few kilobytes may claim a million layers; the list of them is made a fixed number of times."""
    made = []
    listed = Trace.moe_layers.fget
    assert listed is not None
    monkeypatch.setattr(Trace, "moe_layers", property(lambda self: made.append(1) or listed(self)))
    for layers in (10, 500):
        made.clear()
        check_values(make(num_hidden_layers=layers, moe_layers=list(range(layers))))
        assert len(made) < 5


def test_counts_without_tokens_are_a_trace_and_have_a_load() -> None:
    """A recording that only counted holds `moe.load`; lab.routing.load gives it, other analyses say what is missing."""
    about = {**synthetic_trace(2, 4, 2, 1).meta, "passes": []}
    counts = np.array([5, 0, 2, 1], np.int64)
    trace = Trace({f"layers.{n}.moe.load": counts + n for n in range(2)}, ids=[], texts=[], meta=about)
    assert routing.load(trace).tolist() == [[5, 0, 2, 1], [6, 1, 3, 2]]
    with pytest.raises(NotCapturedError):
        routing.coactivation(trace)
    for wrong in (counts[:3], -counts, counts[None], counts.astype(np.float32)):
        with pytest.raises(FormatError, match=r"moe\.load"):
            Trace({"layers.0.moe.load": wrong}, ids=[], texts=[], meta=about)


def test_a_trace_without_expert_layers_needs_no_number_of_experts() -> None:
    """Logits alone are a trace too: no layer, no expert, none chosen; with MoE layers there must be some."""
    about = {**synthetic_trace(1, 4, 2, 1).meta, "num_hidden_layers": 0, "moe_layers": [], "num_experts": 0, "top_k": 0}
    trace = Trace({"logits": np.zeros((1, 3), np.float32)}, ids=[-1], texts=[], meta=about)
    assert trace.num_experts == 0 and trace.ids == [-1]
    with pytest.raises(FormatError, match="0 experts chosen of 0"):
        Trace({}, ids=[0], texts=[], meta={**about, "num_hidden_layers": 1, "moe_layers": [0]})
