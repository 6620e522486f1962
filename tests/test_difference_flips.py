"""Tokens sent to other experts: a tie, a defect or a consequence, by a tolerance that was declared beforehand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import oracle
import pytest
from checkpoints import random_tensors, read_checkpoint, small_config, write_checkpoint
from handmade import router_model
from oracle import Oracle
from traced import traced

import colibri_lab as lab
from colibri_lab.difference.pair import Pair
from colibri_lab.difference.reach import errors_apart_from_flips
from colibri_lab.trace import Trace

IDS = np.random.default_rng(2).integers(0, 64, 32).tolist()


def engine(folder, ids) -> Trace:
    session = lab.open(folder).session(capture="all", max_tokens=64)
    session.feed(ids)
    return session.trace()


def by_oracle(folder, ids, **replace) -> Trace:
    """The same checkpoint by the NumPy forward pass; `replace` are other tensors."""
    config, tensors = read_checkpoint(folder)
    return traced(Oracle(config, tensors | replace).forward(ids), config, ids)


def higher_id_first(scores, k):
    """A top-k that gives ties to the higher id, as torch.topk may."""
    return scores.shape[1] - 1 - np.argsort(-scores[:, ::-1], axis=-1, kind="stable")[:, :k]


def in_bfloat16(scores, k):
    """A top-k on scores that were rounded to bfloat16 before."""
    rounded = scores.astype(ml_dtypes.bfloat16).astype(np.float64)
    return np.argsort(-rounded, axis=-1, kind="stable")[:, :k]


# ---- ties ----


def test_A4_a_router_row_of_zeros_is_a_tie_whatever_was_chosen(tmp_path, monkeypatch):
    """E=8, k=2: ours takes 0 and 1, another implementation may take 7 and 6; nothing is wrong with either."""
    folder = router_model(tmp_path, np.zeros((1, 8)), 2)
    a = engine(folder, [0])
    monkeypatch.setattr(oracle, "top_k", higher_id_first)
    d = lab.diff(a, by_oracle(folder, [0]))
    assert d.verdict == "tie" and d.first_divergence is None and d.exit_code == 0
    (flip,) = d.flips
    assert (flip.ids_a, set(flip.ids_b), flip.margin, flip.moved) == ((0, 1), {6, 7}, 0.0, 0.0)
    assert flip.verdict == "tie" and "either choice is right" in flip.cause
    row = d.table[d.table["path"] == "layers.0.moe.expert_ids"][0]
    assert (row["state"], row["flips"]) == ("tie", 1)
    assert "near-tie" in d.summary and "TIE" in d.report()


def test_A4_scores_rounded_before_the_choice_are_a_defect_of_the_choice(tmp_path, monkeypatch):
    """Two scores that are one number in bfloat16: those that are kept agree, yet B takes the lower one."""
    logits = np.zeros((1, 8))
    logits[0, :2] = 1.0, 1.0005
    folder = router_model(tmp_path, logits, 1)
    a = engine(folder, [0])
    assert a["layers.0.moe.expert_ids"].tolist() == [[1]]
    monkeypatch.setattr(oracle, "top_k", in_bfloat16)
    d = lab.diff(a, by_oracle(folder, [0]))
    assert (d.verdict, d.first_divergence.path) == ("defect", "layers.0.moe.expert_ids")
    assert d.flips[0].verdict == "defect" and "the choice itself differs" in d.flips[0].cause


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """A checkpoint in which two experts of layer 1 have one and the same router row: they tie at every token."""
    config = small_config("mixtral", num_hidden_layers=4, vocab_size=64)
    tensors = random_tensors(config, 3)
    name = "model.layers.1.block_sparse_moe.gate.weight"
    tensors[name][5] = tensors[name][2]
    return write_checkpoint(tmp_path_factory.mktemp("twins"), config, tensors)


def test_all_that_follows_from_a_tie_is_explained_by_it(twins, monkeypatch):
    """Another expert computes another output, and later layers and tokens depend on it: still nobody is wrong."""
    a = engine(twins, IDS)
    monkeypatch.setattr(oracle, "top_k", higher_id_first)
    d = lab.diff(a, by_oracle(twins, IDS))
    ties = [flip for flip in d.flips if flip.verdict == "tie"]
    assert ties and all(flip.layer == 1 and {2, 5} <= {*flip.ids_a, *flip.ids_b} for flip in ties)
    assert d.verdict == "tie", d.report()
    assert "beyond" in d.table["state"]
    assert all(flip.verdict == "downstream" and flip.layer > 1 for flip in d.flips if flip not in ties)


def test_a_near_tie_decided_by_the_last_bits_is_a_tie(twins):
    """The router row of one twin is one rounding larger in B."""
    name = "model.layers.1.block_sparse_moe.gate.weight"
    _, tensors = read_checkpoint(twins)
    other = tensors[name].copy()
    other[5] = np.nextafter(other[5], other[5] * 2)  # away from zero: larger where the score is positive
    a, b = engine(twins, IDS), by_oracle(twins, IDS, **{name: other})
    d = lab.diff(a, b)
    assert any(flip.verdict == "tie" for flip in d.flips)
    assert d.verdict == "tie", d.report()


def test_a_fault_is_not_hidden_by_a_tie_before_it(twins, monkeypatch):
    """Rows that no tie can have touched still show a fault in a later layer."""
    name = "model.layers.3.block_sparse_moe.experts.{}.w2.weight"
    _, tensors = read_checkpoint(twins)
    scaled = {name.format(e): tensors[name.format(e)] * np.float32(1.01) for e in range(8) if name.format(e) in tensors}
    a = engine(twins, IDS)
    monkeypatch.setattr(oracle, "top_k", higher_id_first)
    d = lab.diff(a, by_oracle(twins, IDS, **scaled))
    first_tie = min(flip.token for flip in d.flips if flip.verdict == "tie")
    assert first_tie > 0
    assert (d.verdict, d.first_divergence.path) == ("defect", "layers.3.moe.experts.*.output"), d.report()
    assert d.first_divergence.token < first_tie
    assert "times 1.01" in d.first_divergence.cause


# ---- defects ----


def test_a_margin_below_the_observed_change_does_not_make_a_tie(tmp_path):
    """Every flip has a margin below twice the change of its scores; only the declared tolerance can excuse one."""
    logits = np.zeros((1, 8))
    logits[0, :3] = 2.0, 1.0, 0.9
    folder = router_model(tmp_path / "a", logits, 2)
    a = engine(folder, [0])
    logits[0, 2] = 1.1
    d = lab.diff(a, engine(router_model(tmp_path / "b", logits, 2), [0]))
    (flip,) = d.flips
    assert flip.margin < 2 * flip.moved
    assert flip.verdict == "defect" and "moved though its input is equal" in flip.cause
    assert (d.verdict, d.first_divergence.path) == ("defect", "layers.0.moe.router_logits")


def test_flips_behind_a_fault_name_the_stage_that_moved_the_scores(twins):
    name = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
    _, tensors = read_checkpoint(twins)
    d = lab.diff(engine(twins, IDS), by_oracle(twins, IDS, **{name: -tensors[name]}))
    assert d.first_divergence.path == "layers.0.moe.experts.*.output" and d.first_divergence.expert == 3
    assert "Only expert 3" in d.first_divergence.cause and "times -1" in d.first_divergence.cause
    assert d.flips and all(flip.verdict == "downstream" for flip in d.flips)
    assert all("the router's input had already moved by" in flip.cause for flip in d.flips)
    assert any("first left A at layers.0.moe.experts.*.output" in flip.cause for flip in d.flips)
    sizes = [flip.consequence for flip in d.flips]
    assert sizes == sorted(sizes, reverse=True) and min(sizes) > 0


def test_A2_a_bias_that_leaks_into_the_gates_is_found_at_the_gates():
    """Scores choose, gates weigh: ids and scores are equal, the gates are those of the biased scores."""
    logits, bias = np.array([[0, 0.4, -0.2, 0.1]]), np.array([0, 0, 0.5, 0])
    p = 1 / (1 + np.exp(-logits))
    scores = p + bias
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :2]
    right, leaked = (np.take_along_axis(x, ids, 1) for x in (p, scores))
    traces = [routes(logits, scores, ids, g / g.sum(axis=1, keepdims=True)) for g in (right, leaked)]
    np.testing.assert_allclose(traces[1]["layers.0.moe.gates"], [[0.61346, 0.38654]], atol=5e-6)
    d = lab.diff(*traces)
    assert (d.verdict, d.first_divergence.path) == ("defect", "layers.0.moe.gates") and not d.flips
    assert "Ids are equal, gates differ" in d.first_divergence.cause
    scaled = routes(logits, scores, ids, 2.5 * right / right.sum(axis=1, keepdims=True))
    assert "by the factor 2.5" in lab.diff(traces[0], scaled).first_divergence.cause


@pytest.mark.parametrize("where", ["all", "one"])
def test_A3_scores_that_are_NaN_in_both_runs_decide_nothing(where):
    """A token whose scores hold NaN has no ranking: other ids are no fault, and the values count as equal."""
    logits = np.random.default_rng(0).standard_normal((3, 8))
    logits[1, slice(None) if where == "all" else 0] = np.nan
    ids = np.array([[0, 1], [2, 3], [4, 5]])
    other = np.array([[0, 1], [6, 7], [4, 5]])
    gates = np.full((3, 2), 0.5)
    d = lab.diff(routes(logits, logits, ids, gates), routes(logits, logits, other, gates))
    assert d.verdict == "tie" and "NaN in both" in d.flips[0].cause and np.isnan(d.flips[0].margin)


def test_a_NaN_on_one_side_only_is_an_infinite_error():
    logits = np.random.default_rng(0).standard_normal((3, 8))
    bad = logits.copy()
    bad[1, 4] = np.nan
    ids, gates = np.array([[0, 1]] * 3), np.full((3, 2), 0.5)
    d = lab.diff(routes(logits, logits, ids, gates), routes(bad, logits, ids, gates))
    assert d.first_divergence.path == "layers.0.moe.router_logits" and d.first_divergence.token == 1
    assert d.first_divergence.error == np.inf and "B holds NaN" in d.first_divergence.cause
    assert lab.diff(routes(bad, bad, ids, gates), routes(bad, bad, ids, gates)).verdict == "identical"


# ---- what was not recorded ----


def routes(logits=None, scores=None, ids=None, gates=None, **meta) -> Trace:
    """One layer with the given router taps."""
    given = {"router_logits": logits, "scores": scores, "expert_ids": ids, "gates": gates}
    arrays = {
        f"layers.0.moe.{name}": np.asarray(value, np.int32 if name == "expert_ids" else np.float32)
        for name, value in given.items()
        if value is not None
    }
    tokens, k = ids.shape
    experts = 8 if logits is None else logits.shape[1]
    whole = {
        "producer": "made by hand", "producer_version": "1", "model_type": "any", "num_hidden_layers": 1,
        "moe_layers": [0], "num_experts": experts, "top_k": k, "gate_rule": "sigmoid", "passes": [[0, tokens]],
        "edits": [],
    }  # fmt: skip
    return Trace(arrays, ids=list(range(tokens)), texts=[], meta=whole | meta)


def test_the_order_of_the_slots_does_not_matter():
    """Ids are sets; gates go by expert."""
    ids, gates = np.array([[3, 1], [2, 5]]), np.array([[0.7, 0.3], [0.6, 0.4]])
    d = lab.diff(routes(ids=ids, gates=gates), routes(ids=ids[:, ::-1], gates=gates[:, ::-1]))
    assert d.verdict == "identical" and set(d.table["state"]) == {"same", "same bits"}


def test_routes_alone_are_compared_as_sets_and_a_flip_says_that_scores_are_missing():
    ids = np.array([[0, 1], [2, 3]])
    other = np.array([[1, 0], [2, 4]])
    d = lab.diff(routes(ids=ids), routes(ids=other))
    assert [(flip.token, flip.ids_a, flip.ids_b) for flip in d.flips] == [(1, (2, 3), (2, 4))]
    assert d.verdict == "defect" and "neither run kept scores" in d.flips[0].cause and np.isnan(d.flips[0].moved)
    assert lab.diff(routes(ids=ids), routes(ids=ids[:, ::-1])).verdict == "identical"


@pytest.mark.parametrize(("gap", "verdict"), [(1e-9, "tie"), (0.3, "defect")])
def test_routes_alone_against_a_run_with_scores_are_judged_by_its_scores(gap, verdict):
    scores = np.array([[4.0, 3.0, 3.0 - gap, 0, 0, 0, 0, 0]])
    a = routes(scores, scores, np.array([[0, 1]]), np.array([[0.6, 0.4]]))
    d = lab.diff(a, routes(ids=np.array([[0, 2]])))
    assert (d.verdict, d.flips[0].verdict) == (verdict, verdict)
    assert any(note.startswith("B does not hold moe.router_logits") for note in d.notes)


def test_slots_that_were_not_recorded_are_no_flips():
    ids = np.array([[0, 1], [2, 3], [4, 5]])
    lost = np.array([[0, 1], [-1, -1], [4, 5]])
    assert lab.diff(routes(ids=ids), routes(ids=lost)).verdict == "identical"


# ---- 16 bits ----


def test_clean_runs_in_bfloat16_take_a_part_of_their_tolerance_and_scores_not_a_small_one():
    """The engine beside transformers in bfloat16: granted at least twice what they differ by, on scores at most 30
    times, and never a share of a probability that could not be told from any other choice."""
    b = lab.exercises.recording("bfloat16-eager")
    session = lab.open().session(capture="all")
    session.feed(b.ids)
    a = session.trace()
    d = lab.diff(a, b)
    assert d.verdict == "tie", d.report()
    for tap, error, untouched in errors_apart_from_flips(Pair(a, b)):
        found, allowed = error.relative_by_row[untouched].max(), d.tolerance.of(tap.path)
        assert allowed > 2 * found, (tap.path, found, allowed)
        if tap.kind in ("moe.scores", "moe.gates"):
            assert allowed < 30 * found and allowed < 0.25, (tap.path, found, allowed)
    assert any("coarse in layers" in note and "a tie says little" in note for note in d.notes)


def test_in_bfloat16_too_a_choice_against_clearly_higher_scores_is_a_defect():
    """Scores equal on both sides, and B takes the third expert for the second, a fifth of all weight behind it."""
    a = lab.exercises.recording("bfloat16-eager")
    path = "layers.0.moe.expert_ids"
    scores, ids = a["layers.0.moe.scores"], np.array(a[path])
    order = np.argsort(-scores, axis=1)
    ranked = np.take_along_axis(scores, order, axis=1)
    token = int((ranked[:, 1] - ranked[:, 2]).argmax())
    assert ranked[token, 1] - ranked[token, 2] > 0.2
    ids[token] = order[token, [0, 2]]
    d = lab.diff(a, Trace({**a, path: ids}, ids=a.ids, texts=a.texts, meta=a.meta))
    assert d.verdict == "defect" and (d.first_divergence.path, d.first_divergence.token) == (path, token)
    assert "takes an expert that scores" in d.flips[0].cause
