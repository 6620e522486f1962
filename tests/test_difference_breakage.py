"""What unlucky users hand to `lab.diff`: empty, cut runs, sets of other sizes, partial recordings, arguments."""

from __future__ import annotations

import numpy as np
import pytest
from diffs import TIE, copied, full_trace, of

import colibri_lab as lab
from colibri_lab.difference.result import Tolerance
from colibri_lab.trace import Trace


@pytest.fixture(scope="module")
def whole() -> Trace:
    return full_trace(3, 8, 2, 20, 8)


def with_ids(trace: Trace, ids: list[int]) -> Trace:
    return Trace(copied(trace), ids=ids, texts=[], meta=trace.meta)


def with_array(trace: Trace, path: str, array: np.ndarray) -> Trace:
    return of(trace, {**copied(trace), path: array})


def test_a_summary_says_that_only_a_common_beginning_was_compared(whole):
    """Two texts that share their first token are no evidence of much."""
    other = [*whole.ids[:1], *(i + 1 for i in whole.ids[1:])]
    d = lab.diff(whole, with_ids(whole, other))
    assert d.n_tokens == 1
    assert d.summary.endswith("Only their common beginning was compared: 1 of 20 tokens of A and 20 of B.")
    assert "common beginning" not in lab.diff(whole, whole).summary


def test_runs_of_no_token_are_refused():
    session = lab.open().session(capture="all")
    with pytest.raises(lab.ArgumentError, match="A and B hold no token"):
        lab.diff(session, session)


@pytest.mark.parametrize("k", [1, 3])
def test_another_number_of_experts_per_token_is_found_at_the_choice(whole, k):
    """A config with a wrong k: sets of another size, not arrays that cannot be compared."""
    b = with_ids(full_trace(3, 8, k, 20, 8), whole.ids)
    for x, y in ((whole, b), (b, whole)):
        d = lab.diff(x, y)
        first = d.first_divergence
        assert d.verdict == "defect" and (first.path, first.token) == ("layers.0.moe.expert_ids", 0)
        assert f"A chose {x.top_k}, B {y.top_k}" in first.cause and "100 % of the tokens" in d.summary
        assert d.values(first.path).a.shape == d.values(first.path).b.shape == (20, max(k, 2))


def test_tokens_whose_experts_one_run_did_not_record_are_counted_in_a_note(whole):
    path = "layers.1.moe.expert_ids"
    ids = np.array(whole[path])
    ids[[3, 5]] = -1
    d = lab.diff(whole, with_array(whole, path, ids))
    assert d.notes == ("One run did not record the experts of 2 tokens in layer 1; these were not compared.",)


def test_a_slot_that_one_run_left_empty_is_said_as_such(whole):
    path = "layers.1.moe.expert_ids"
    ids = np.array(whole[path])
    ids[3, 1] = -1
    d = lab.diff(whole, with_array(whole, path, ids))
    assert d.verdict == "defect" and "1 expert for 2" in d.first_divergence.cause


def test_gates_beside_ids_that_the_other_run_lacks_stay_in_their_slots(whole):
    gates = {path: array for path, array in copied(whole).items() if path.endswith("moe.gates")}
    a = Trace(gates, ids=whole.ids, texts=[], meta=whole.meta)
    assert lab.diff(a, whole).verdict == lab.diff(whole, a).verdict == "identical"


def test_positions_without_a_distribution_are_not_counted_as_agreement(whole):
    logits = np.array(whole["logits"])
    logits[[2, 7]] = np.nan
    b = with_array(whole, "logits", logits)
    text = lab.diff(b, b).report()
    assert "agrees at 18 of 18 positions" in text and "2 positions hold NaN" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tolerance": 10**400}, "a tolerance is a number"),
        ({"tolerance": Tolerance(-1.0, {}, "")}, "allows -1.0 in general"),
        ({"tolerance": Tolerance(0.1, {"embed": np.nan}, "")}, "allows nan of embed"),
        ({"names": 5}, "names are two texts"),
        ({"names": "ab"}, "names are two texts"),
        ({"model": 3}, "model is an open model"),
        ({"model": object()}, "model is an open model"),
    ],
)
def test_arguments_that_are_none_are_refused_by_name(whole, arguments, words):
    with pytest.raises(lab.ArgumentError, match=words):
        lab.diff(whole, whole, **arguments)


@pytest.mark.parametrize("path", [3, None, "layers.0.moe.experts.99.output", "layers.9.output"])
def test_values_of_what_is_not_there_are_a_tap_error(whole, path):
    with pytest.raises(lab.TapError):
        lab.diff(whole, whole).values(path)


def test_a_tie_says_how_much_it_leaves_unjudged():
    """What can follow from a tie may differ by any amount; that a fault could hide there is said."""
    a = full_trace(6, 8, 2, 40, 16)
    arrays = {path: array for path, array in copied(a).items() if "dispatch" not in path}
    layer, token = TIE
    ids = f"layers.{layer}.moe.expert_ids"
    ranked = np.argsort(-arrays[f"layers.{layer}.moe.scores"][token], kind="stable")
    other = {**arrays, ids: np.array(arrays[ids]), "layers.4.moe.output": np.array(arrays["layers.4.moe.output"])}
    other[ids][token] = ranked[[0, 2]]
    other["layers.4.moe.output"][token + 1] *= 2
    d = lab.diff(of(a, arrays), of(a, other))
    assert d.verdict == "tie"
    assert any("were not judged" in note for note in d.notes), d.notes
    other["layers.4.moe.output"][token - 1] *= 2
    d = lab.diff(of(a, arrays), of(a, other))
    assert d.verdict == "defect" and (d.first_divergence.path, d.first_divergence.token) == ("layers.4.moe.output", 11)
    assert not any("were not judged" in note for note in d.notes)
