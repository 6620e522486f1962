"""The numbers behind the explorer's pictures, against plain NumPy and the routing analyses."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from colibri_lab import routing
from colibri_lab.errors import ArgumentError
from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace
from colibri_lab.widgets import explorer_data as ed


def altered(trace: Trace, **arrays: np.ndarray) -> Trace:
    """`trace` with some taps of layer 0 replaced, or dropped where None is given."""
    stored = {path: trace[path] for path in trace}
    for tap, array in arrays.items():
        path = f"layers.0.moe.{tap}"
        stored.pop(path)
        if array is not None:
            stored[path] = array
    return Trace(stored, ids=trace.ids, texts=trace.texts, meta=trace.meta)


@pytest.mark.parametrize("shape", [(6, 8, 2, 40), (3, 17, 4, 70), (2, 300, 6, 9), (1, 1, 1, 5), (2, 4, 4, 6)])
def test_a_block_holds_what_the_trace_and_the_analyses_say(shape: tuple[int, int, int, int]) -> None:
    """ids and gates are the trace's own; entropy is routing.entropy; the margin is taken on the logits."""
    layers, experts, k, tokens = shape
    trace = synthetic_trace(layers, experts, k, tokens, seed=3)
    data = ed.ExplorerData(trace)
    entropy = routing.entropy(trace, normalised=True)
    for layer in range(layers):
        block = data.block(layer)
        logits = trace[f"layers.{layer}.moe.router_logits"]
        assert np.array_equal(block["ids"], trace[f"layers.{layer}.moe.expert_ids"])
        assert block["ids"].dtype == (np.uint8 if experts < 255 else np.uint16)
        assert np.array_equal(block["gates"], trace[f"layers.{layer}.moe.gates"])
        np.testing.assert_allclose(block["entropy"], entropy[layer], rtol=1e-5, atol=1e-6)
        ordered = -np.sort(-logits, axis=1)
        if k < experts:
            assert np.array_equal(block["margin"], ordered[:, k - 1] - ordered[:, k])
        else:
            assert np.isnan(block["margin"]).all(), "where every expert is chosen nobody is left out"


def test_a_column_is_the_same_token_of_every_block() -> None:
    """What a column says of a token equals row t of the blocks, and it carries every logit."""
    trace = synthetic_trace(5, 12, 3, 30, seed=1)
    data = ed.ExplorerData(trace)
    column = data.column(17)
    for layer in range(5):
        block = data.block(layer)
        for name in ("ids", "gates", "margin", "entropy", "flags"):
            assert np.array_equal(column[name][layer], block[name][17])
        assert np.array_equal(column["values"][layer], trace[f"layers.{layer}.moe.router_logits"][17])


def test_the_load_is_that_of_the_analysis_and_its_band_is_chance() -> None:
    """load equals routing.load; band equals routing.chance_band in tokens."""
    trace = synthetic_trace(4, 8, 2, 100, seed=2)
    overview = ed.ExplorerData(trace).overview()
    assert np.array_equal(overview["load"], routing.load(trace))
    low, high = routing.chance_band(100, 2, 8)
    assert overview["band"].tolist() == [[round(100 * low), round(100 * high)]] * 4
    assert overview["counted"].tolist() == [100] * 4


def test_slots_without_an_expert_are_left_out_as_the_analysis_does() -> None:
    """Of a token with one expert of two, that one counts and is the first choice; a token with none is not recorded."""
    trace = synthetic_trace(1, 4, 2, 3, seed=0)
    trace = altered(trace, expert_ids=np.array([[0, 1], [-1, 2], [-1, -1]]))
    data = ed.ExplorerData(trace)
    overview = data.overview()
    assert np.array_equal(overview["load"], routing.load(trace)) and overview["load"].tolist() == [[1, 1, 1, 0]]
    assert overview["counted"].tolist() == [2] and data.first_choice(0, 1) == 2
    assert (data.block(0)["flags"] & ed.UNRECORDED).tolist() == [0, 0, ed.UNRECORDED]
    assert data.block(0)["ids"].tolist() == [[0, 1], [255, 2], [255, 255]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int8", "uint8", "int64"])
def test_numbers_of_any_stored_type_are_those_of_the_analyses(dtype: str) -> None:
    """Worked out in float64 from what is stored, never in the stored type."""
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    z = np.random.default_rng(0).normal(size=(50, 8)) * 3
    logits = (np.abs(z) * 25 if dtype == "uint8" else z * 14 if kind.kind == "i" else z).astype(kind)
    ids = np.argsort(-logits.astype(np.float64), axis=1, kind="stable")[:, :2]
    arrays = {"router_logits": logits, "scores": logits, "expert_ids": ids, "gates": np.ones((50, 2), kind)}
    trace = altered(synthetic_trace(1, 8, 2, 50, seed=0), **arrays)
    data = ed.ExplorerData(trace)
    assert not data.by_score[0] and data.gate_top == 1.0
    block = data.block(0)
    assert np.array_equal(block["entropy"], routing.entropy(trace, normalised=True)[0].astype(np.float32))
    assert np.array_equal(block["margin"], routing.margin(trace, of="logits")[0].astype(np.float32))


def test_a_masked_choice_is_shown_by_its_scores() -> None:
    """Scores of −Inf exclude experts: the largest logits are then not the chosen ones."""
    logits = np.array([[3, 2, 1, 0]] * 3, np.float32)
    scores = np.array([[-np.inf, 2, 1, 0]] * 3, np.float32)
    trace = synthetic_trace(1, 4, 1, 3, seed=0)
    data = ed.ExplorerData(altered(trace, router_logits=logits, scores=scores, expert_ids=np.full((3, 1), 1, np.int32)))
    assert data.by_score[0] and data.block(0)["margin"].tolist() == [1, 1, 1]


def test_equal_logits_whose_scores_differ_are_no_other_order() -> None:
    """Logits stored more coarsely than scores have ties; the scores of a tie may come in either order."""
    logits = np.array([[1, 1, 0, 0]] * 3, np.float32)
    scores = np.array([[0.4, 0.3, 0.1, 0.2]] * 3, np.float32)
    trace = synthetic_trace(1, 4, 1, 3, seed=0)
    assert not ed.ExplorerData(altered(trace, router_logits=logits, scores=scores)).by_score[0]


def test_G1_nan_and_infinite_logits_are_flagged_not_ranked() -> None:
    """NaN, +Inf and −Inf each set their bit; NaN and +Inf leave no ranking, so margin and entropy are NaN; −Inf is a
    mask.
    """
    trace = synthetic_trace(2, 8, 2, 6, seed=0)
    logits = np.array(trace["layers.0.moe.router_logits"])
    loser = int(np.argmin(logits[3]))
    logits[1, 4], logits[2, 5], logits[3, loser] = np.nan, np.inf, -np.inf
    data = ed.ExplorerData(altered(trace, router_logits=logits))
    block = data.block(0)
    kinds = block["flags"] & (ed.HAS_NAN | ed.HAS_PLUS_INF | ed.HAS_MINUS_INF | ed.UNRANKED)
    expected = [0, ed.HAS_NAN | ed.UNRANKED, ed.HAS_PLUS_INF | ed.UNRANKED, ed.HAS_MINUS_INF, 0, 0]
    assert kinds.tolist() == expected
    assert np.isnan(block["margin"]).tolist() == [False, True, True, False, False, False]
    assert np.isnan(block["entropy"]).tolist() == [False, True, True, False, False, False]


def test_a_margin_under_one_bfloat16_step_is_a_near_tie() -> None:
    """Between 8 and 16 a bfloat16 step is 1/16: 0.0624 below is a tie, 0.0626 is not."""
    trace = synthetic_trace(1, 4, 1, 2, seed=0)
    logits = np.array([[10.0, 10.0 - 0.0624, 0, 0], [10.0, 10.0 - 0.0626, 0, 0]], np.float32)
    scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    arrays = {"router_logits": logits, "scores": scores.astype(np.float32), "expert_ids": np.zeros((2, 1), np.int32)}
    flags = ed.ExplorerData(altered(trace, **arrays)).block(0)["flags"]
    assert (flags & ed.NEAR_TIE).tolist() == [ed.NEAR_TIE, 0]


def test_a_biased_choice_is_shown_by_its_scores() -> None:
    """Where a bias reorders the experts, values and margin are the scores', since the choice was made on them."""
    trace = synthetic_trace(1, 4, 1, 3, seed=0)
    logits = np.array([[3, 2, 1, 0]] * 3, np.float32)
    scores = np.array([[0.1, 0.2, 0.9, 0.3]] * 3, np.float32)
    data = ed.ExplorerData(altered(trace, router_logits=logits, scores=scores, expert_ids=np.full((3, 1), 2, np.int32)))
    assert data.by_score[0]
    block = data.block(0)
    assert np.array_equal(block["values"], scores)
    np.testing.assert_allclose(block["margin"], 0.6, rtol=1e-6)
    assert not ed.ExplorerData(trace).by_score[0], "softmax keeps the order of the logits"


def test_what_was_not_recorded_is_said_not_invented() -> None:
    """Ids of −1 are flagged and counted nowhere; a trace without logits has no values, margins or entropies."""
    trace = synthetic_trace(1, 8, 2, 5, seed=0)
    ids = np.array(trace["layers.0.moe.expert_ids"])
    ids[2] = -1
    data = ed.ExplorerData(altered(trace, expert_ids=ids))
    assert data.block(0)["flags"][2] & ed.UNRECORDED
    assert data.overview()["load"].sum() == 2 * 4
    bare = ed.ExplorerData(altered(trace, router_logits=None, scores=None, gates=None))
    block = bare.block(0)
    assert "values" not in block
    assert np.isnan(block["margin"]).all() and np.isnan(block["entropy"]).all() and np.isnan(block["gates"]).all()


def test_a_selection_is_completed_and_checked() -> None:
    """A missing expert is the first choice; what does not exist is refused by name with what does."""
    trace = synthetic_trace(6, 8, 2, 40, seed=0, dense_layers=[0])
    data = ed.ExplorerData(trace)
    first = int(trace["layers.3.moe.expert_ids"][7, 0])
    assert data.check(3, 7, None) == {"layer": 3, "token": 7, "expert": first}
    assert data.check(np.int64(3), 7, 0) == {"layer": 3, "token": 7, "expert": 0}
    with pytest.raises(ArgumentError, match="Layer 0 has no experts to show: layers with experts are 1 to 5"):
        data.check(0, 7, None)
    with pytest.raises(ArgumentError, match="Token 40 does not exist: tokens are 0 to 39"):
        data.check(3, 40, None)
    with pytest.raises(ArgumentError, match="Expert 9 does not exist: layer 3 has experts 0 to 7"):
        data.check(3, 7, 9)
    with pytest.raises(ArgumentError, match=r"token must be a whole number, not 1\.5"):
        data.check(3, 1.5, None)
    with pytest.raises(ArgumentError, match="no token to select"):
        ed.ExplorerData(synthetic_trace(2, 4, 1, 0)).check(0, 0, None)
