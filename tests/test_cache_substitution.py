"""Substitution of missing experts: the rule by brute force on the scores that the run met, the cost by a second way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab import cache, testing
from colibri_lab.cache.substitution import spared
from colibri_lab.errors import ArgumentError

TEXT = "The engine counts its gates, and the old clockmaker counts them again before the night."
FAMILIES = {
    "mixtral": {"family": "mixtral", "layers": 3, "experts": 6},
    "qwen2_moe": {"family": "qwen2_moe", "layers": 3, "experts": 5, "dense_layers": (0,)},
}


def model_of(name: str, folder: Path) -> lab.Model:
    return lab.open() if name == "bundled" else lab.open(testing.tiny_model(folder / "model", **FAMILIES[name]))


def ids_for(model: lab.Model, count: int) -> list[int]:
    return np.random.default_rng(7).integers(3, model.config.vocab_size - 8, count).tolist()


def by_hand(trace: lab.Trace, capacity: int, margin: float, scope: str) -> tuple[list[list[list[int]]], list[int]]:
    """Ids [layer][token] and misses by layer that the rule gives on the scores of a run, with lists for caches."""
    layers = trace.moe_layers
    kept: dict[int, list[tuple[int, int]]] = {layer: [] for layer in layers}
    if scope == "global":
        kept = dict.fromkeys(layers, kept[layers[0]])
    out: list[list[list[int]]] = [[] for _ in layers]
    misses = [0] * len(layers)
    for token in range(len(trace.ids)):
        for row, layer in enumerate(layers):
            scores = trace[f"layers.{layer}.moe.scores"][token].astype(float)
            order = sorted(range(len(scores)), key=lambda e, s=scores: (-s[e], e))
            mine, here = order[: trace.top_k], [e for owner, e in kept[layer] if owner == layer]
            for slot in range(trace.top_k):
                others = [e for e in order if e in here and e not in order[: trace.top_k] and e not in mine]
                if mine[slot] not in here and others and scores[mine[slot]] - scores[others[0]] < margin:
                    mine[slot] = others[0]
            mine = [e for e in order if e in mine]
            for expert in mine:
                if (layer, expert) in kept[layer]:
                    kept[layer].remove((layer, expert))
                else:
                    misses[row] += 1
                    if len(kept[layer]) == capacity:
                        kept[layer].remove(next(k for k in kept[layer] if k[0] != layer or k[1] not in mine))
                kept[layer].append((layer, expert))
            out[row].append(mine)
    return out, misses


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("name", ["bundled", *FAMILIES])
def test_every_token_goes_where_the_rule_sends_it(name: str, scope: str, tmp_path: Path) -> None:
    """Ids, misses and replaced slots of the run are those of a brute-force manager on the scores it met."""
    model = model_of(name, tmp_path)
    ids = ids_for(model, 24)
    seen, caches = 0, len(model.config.moe_layers) if scope == "global" else 1
    for extra, margin in ((1, 0.05), (2, 0.3), (4, np.inf)):
        capacity = (model.config.top_k + extra) * caches
        found = cache.substitute(model, ids, capacity, margin, scope=scope)
        expected, misses = by_hand(found.trace, capacity, margin, scope)
        for row, layer in enumerate(found.trace.moe_layers):
            assert found.trace[f"layers.{layer}.moe.expert_ids"].tolist() == expected[row]
            scores = found.trace[f"layers.{layer}.moe.scores"]
            chosen = np.argsort(-scores, axis=1, kind="stable")[:, : model.config.top_k]
            strangers = (np.array(expected[row])[:, :, None] != chosen[:, None, :]).all(axis=2).sum(axis=1)
            np.testing.assert_array_equal(found.replaced[row], strangers)
        assert found.misses.tolist() == misses
        seen += int(found.replaced.sum())
    assert seen > 0


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu"])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_misses_are_those_of_the_simulator(policy: str, scope: str) -> None:
    """Of both runs, each from its own trace, cold and with a cache that holds some experts at the start."""
    model = lab.open()
    for capacity, warm in ((3, {}), (5, {}), (12, {}), (5, {0: [3, 1], 4: [7]})):
        found = cache.substitute(model, TEXT[:40], capacity, 0.05, policy, scope, warm=warm)
        for misses, trace in ((found.misses_plain, found.plain), (found.misses, found.trace)):
            simulated = cache.simulate(trace, policy, capacity, scope, warm=warm)
            np.testing.assert_array_equal(misses, simulated.misses)
            np.testing.assert_array_equal(found.requests, simulated.requests)
        np.testing.assert_array_equal(found.saved, found.misses_plain - found.misses)


def test_a_static_cache_never_changes_and_lends_what_it_holds() -> None:
    """Two experts of layer 0 that stay: with no bound on the margin every slot of layer 0 goes to them."""
    found = cache.substitute(lab.open(), TEXT, 2, np.inf, "static", warm={0: [5, 2]})
    assert found.misses[0] == 0 < found.misses_plain[0]
    assert set(found.trace["layers.0.moe.expert_ids"].ravel().tolist()) == {2, 5}
    assert (found.misses[1:] == found.requests[1:]).all() and not found.replaced[1:].any()


@pytest.mark.parametrize("name", ["bundled", *FAMILIES])
def test_nothing_changes_at_margin_0_or_when_all_experts_are_there(name: str, tmp_path: Path) -> None:
    """Byte for byte the plain run: same routing, same logits, KL 0."""
    model = model_of(name, tmp_path)
    everything = {layer: range(model.config.num_experts) for layer in model.config.moe_layers}
    still = cache.substitute(model, ids_for(model, 16), model.config.top_k, 0)
    full = cache.substitute(model, ids_for(model, 16), model.config.num_experts, np.inf, warm=everything)
    for found in (still, full):
        assert not found.replaced.any() and not found.kl.any() and found.agrees.all() and not found.trace.edits
        assert {path: testing.canonical(array) for path, array in found.trace.items()} == {
            path: testing.canonical(array) for path, array in found.plain.items()
        }
    assert full.misses.sum() == full.misses_plain.sum() == 0 < still.misses.sum()
    np.testing.assert_array_equal(still.misses, still.misses_plain)


@pytest.mark.parametrize("name", ["bundled", *FAMILIES])
def test_the_cost_is_that_of_a_run_whose_experts_were_forced_beforehand(name: str, tmp_path: Path) -> None:
    """The same sets, forced before the first stage of one pass over all tokens: the same gates, KL and answers."""
    model = model_of(name, tmp_path)
    ids = ids_for(model, 20)
    found = cache.substitute(model, ids, model.config.top_k + 1, 0.3)
    plain, forced = (model.session(capture="all", max_tokens=20) for _ in range(2))
    plain.feed(ids)
    stepper = forced.stepper(ids, chunk=None)
    for row, layer in enumerate(model.config.moe_layers):
        for token in np.flatnonzero(found.replaced[row]).tolist():
            experts = found.trace[f"layers.{layer}.moe.expert_ids"][token].tolist()
            stepper.force(layer, experts, tokens=token)
    stepper.finish()
    for layer in model.config.moe_layers:
        path = f"layers.{layer}.moe.gates"
        assert testing.canonical(found.trace[path]) == testing.canonical(forced.tape[path])
    p, q = (np.exp(s.tape["logits"].astype(float)) for s in (plain, forced))
    p, q = p / p.sum(axis=1, keepdims=True), q / q.sum(axis=1, keepdims=True)
    kl = (p * np.log(p / q)).sum(axis=1)
    np.testing.assert_allclose(found.kl, kl, rtol=1e-6, atol=1e-12)
    assert found.mean_kl == pytest.approx(kl.mean()) and found.mean_kl > 0
    assert found.agrees.tolist() == (p.argmax(axis=1) == q.argmax(axis=1)).tolist()


def test_a_slot_takes_the_best_resident_within_the_margin_and_none_twice() -> None:
    scores = np.array([0.4, 0.3, 0.2, 0.06, 0.04], np.float32)
    resident = np.array([False, False, False, True, True])
    assert spared([0, 1], scores, resident, 1.0) == ([3, 4], 2)
    assert spared([0, 1], scores, resident, 0.25) == ([0, 3], 1)
    assert spared([0, 1], scores, resident, 0.1) == ([0, 1], 0)
    assert spared([0, 1], scores, np.array([True, False, True, False, False]), 0.2) == ([0, 2], 1)
    tie = np.array([0.5, 0.25, 0.25], np.float32)
    assert spared([0, 1], tie, np.array([True, False, True]), 0.0) == ([0, 1], 0)
    masked = np.array([0.9, 0.1, -np.inf, np.nan], np.float32)
    assert spared([0, 1], masked, np.array([True, False, True, True]), np.inf) == ([0, 1], 0)


def test_the_report_counts_what_the_result_holds() -> None:
    found = cache.substitute(lab.open(), TEXT, 4, 0.1)
    lines = found.report().splitlines()
    assert lines[0] == "lru, 4 experts per layer, margin 0.1" and len(lines) == 3 + 6 + 1
    total = [int(word) for word in lines[-2].split()[1:]]
    assert total == [int(c.sum()) for c in (found.requests, found.misses_plain, found.misses, found.replaced)]
    assert f"mean KL {found.mean_kl:.4g} nats" in lines[-1] and repr(found).startswith("<Substitution: ")


def test_substitutions_that_make_no_sense_are_refused_by_name(tmp_path: Path) -> None:
    model = lab.open()
    with pytest.raises(ArgumentError, match="at least the 2 experts of one token and layer; capacity is 1"):
        cache.substitute(model, [5], 1, 0.1)
    with pytest.raises(ArgumentError, match=r"a margin is a number from 0 on .*; this is -1"):
        cache.substitute(model, [5], 4, -1)
    with pytest.raises(ArgumentError, match="follows 'lru', 'fifo', 'lfu', 'static', not 'belady'"):
        cache.substitute(model, [5], 4, 0.1, "belady")
    with pytest.raises(ArgumentError, match="'layer' or 'global', not 'all'"):
        cache.substitute(model, [5], 4, 0.1, scope="all")
    with pytest.raises(ArgumentError, match=r"warm names MoE layers, .*; not 99"):
        cache.substitute(model, [5], 4, 0.1, warm={99: [0]})
    for nobody in (99, -1, 1.5, "a"):
        with pytest.raises(ArgumentError, match="warm names experts 0 to "):
            cache.substitute(model, [5], 4, 0.1, warm={0: [nobody]})
    with pytest.raises(ArgumentError, match=r"warm names more experts than the cache holds \(2\)"):
        cache.substitute(model, [5], 2, 0.1, warm={0: [0, 1, 2]})
    with pytest.raises(ArgumentError, match="takes a text or a row of token ids"):
        cache.substitute(model, [], 4, 0.1)
    with pytest.raises(ArgumentError, match="has no tokenizer"):
        cache.substitute(model_of("mixtral", tmp_path), "text", 4, 0.1)


def test_a_divergence_that_is_not_finite_points_to_its_cause() -> None:
    """The report says that logits are not finite and who tells why; a finite one says nothing of it."""
    with lab.open() as bundled:
        result = lab.cache.substitute(bundled, [1, 2, 3], 4, 0.1, progress=False)
        assert "lab.nan" not in result.report()
        broken = replace(result, kl=np.full(3, np.nan))
        assert "not finite, lab.nan.find(session) tells why" in broken.report()
