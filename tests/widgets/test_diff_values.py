"""One tap side by side: what the view shows against plain NumPy, at any size."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from diffs import busiest, copied, full_trace, of, planted

from colibri_lab.difference.pair import Pair
from colibri_lab.trace import Trace
from colibri_lab.widgets import diff_values
from colibri_lab.widgets.diff_values import BINS, Figures, rerouted

A = full_trace()
PAIR = Pair(A, planted(A))
EXPERTS = "layers.2.moe.experts.*.output"


def figures(pair: Pair, path: str, expert: int | None, token: int | None, points: int) -> Figures:
    return diff_values.figures(pair, path, expert, token, points, 5e-5, [0])


def by_token_and_expert(trace: Trace, layer: int) -> dict[tuple[int, int], np.ndarray]:
    """Expert rows by (token, expert), the slow way."""
    found = {}
    for expert in range(trace.num_experts):
        rows = trace.expert_rows(layer, expert)
        for token, row in zip(rows["tokens"], rows["output"], strict=True):
            found[int(token), expert] = row
    return found


def test_a_tap_is_summed_up_as_numpy_sums_it_up() -> None:
    """Worst rows in order with their places, rows beyond tolerance, every difference counted in one bin."""
    path = "layers.3.attn.q"
    facts, arrays = figures(PAIR, path, None, 7, 10_000)
    a, b = PAIR.a[path].astype(float), PAIR.b[path].astype(float)
    worst = np.abs(b - a).max(axis=1)
    order = np.argsort(-worst, kind="stable")
    assert arrays["row_token"][:5].tolist() == order[:5].tolist() and arrays["row_token"][-1] == 7
    assert np.allclose(arrays["worst"][:5, 0], worst[order[:5]] / np.abs(a).max(), rtol=1e-6)
    at = arrays["worst"][0, 3].astype(int)
    assert arrays["worst"][0, 1:3].tolist() == [a[order[0], at], b[order[0], at]]
    assert facts["beyond"] == int((worst > 5e-5 * np.abs(a).max()).sum())
    assert facts["shape"] == [16] and facts["rows"] == facts["looked"] == 40
    assert arrays["bins"].sum() == a.size and len(arrays["bins"]) == BINS
    inside = np.abs(b - a) < facts["range"] / BINS
    assert arrays["bins"][BINS // 2] == inside.sum()
    assert facts["clipped"] == [int((b - a < -facts["range"]).sum()), int((b - a > facts["range"]).sum())]
    assert sorted(zip(arrays["a"], arrays["b"], strict=True)) == sorted(zip(a.ravel(), b.ravel(), strict=True))


def test_expert_rows_are_paired_by_token_and_expert_in_any_order() -> None:
    """B dispatched in two passes: the rows lie elsewhere and are paired all the same; counts by expert agree."""
    b = PAIR.b
    arrays = copied(b)
    for layer in b.moe_layers:
        prefix = f"layers.{layer}.moe.dispatch."
        tokens, offsets = arrays[prefix + "tokens"], arrays[prefix + "offsets"][0]
        expert = np.repeat(np.arange(8), np.diff(offsets))
        order = np.concatenate([np.flatnonzero(tokens < 20), np.flatnonzero(tokens >= 20)])
        for tap in ("tokens", "input", "output"):
            arrays[prefix + tap] = arrays[prefix + tap][order]
        first = np.bincount(expert[tokens < 20], minlength=8)
        second = np.bincount(expert[tokens >= 20], minlength=8)
        ends = np.concatenate([[0], np.cumsum(first)]), first.sum() + np.concatenate([[0], np.cumsum(second)])
        arrays[prefix + "offsets"] = np.stack(ends)
    split = Pair(A, of(b, arrays, passes=[[0, 20], [20, 40]]))
    one, other = figures(PAIR, EXPERTS, None, None, 400), figures(split, EXPERTS, None, None, 400)
    assert one[0] == other[0]
    assert all(np.array_equal(one[1][name], other[1][name]) for name in one[1])
    rows_a, rows_b = by_token_and_expert(A, 2), by_token_and_expert(split.b, 2)
    scale = max(np.abs(row).max() for row in rows_a.values())
    bad = [e for (t, e) in rows_a if (t, e) in rows_b and np.abs(rows_a[t, e] - rows_b[t, e]).max() > 5e-5 * scale]
    assert one[1]["expert_beyond"].tolist() == np.bincount(bad, minlength=8).tolist()
    assert one[1]["expert_rows"].sum() == len(set(rows_a) & set(rows_b))


def test_one_expert_alone_has_its_own_rows() -> None:
    """The figures of the faulty expert: all its rows differ; of another: none does."""
    faulty = busiest(A, 2)
    facts, arrays = figures(PAIR, EXPERTS, faulty, None, 400)
    assert facts["rows"] == facts["beyond"] == len(A.expert_rows(2, faulty)["tokens"])
    assert set(arrays["row_expert"].tolist()) == {faulty}
    other = next(e for e in range(8) if e != faulty and len(A.expert_rows(2, e)["tokens"]))
    assert figures(PAIR, EXPERTS, other, None, 400)[0]["beyond"] == 0


def test_gates_are_paired_by_expert() -> None:
    """The same gates in another order of the slots differ in nothing."""
    arrays = copied(A)
    for name in ("expert_ids", "gates"):
        arrays[f"layers.0.moe.{name}"] = arrays[f"layers.0.moe.{name}"][:, ::-1]
    turned = Pair(A, of(A, arrays))
    facts, found = figures(turned, "layers.0.moe.gates", None, None, 400)
    assert facts["rows"] == 40 and facts["shape"] == [2] and facts["range"] == 0.0 and len(found["worst"]) == 0


def test_G1_nan_on_one_side_is_counted_and_left_out_of_the_pictures() -> None:
    """NaN in both is no difference; NaN in B alone is the largest there is."""
    arrays_a, arrays_b = (copied(A) for _ in range(2))
    arrays_a["layers.4.attn.out"][3, 1] = arrays_b["layers.4.attn.out"][3, 1] = np.nan
    arrays_b["layers.4.attn.out"][7, 2] = np.nan
    arrays_b["layers.4.attn.out"][8, 2] = -np.inf
    diff = Pair(of(A, arrays_a), of(A, arrays_b))
    facts, arrays = figures(diff, "layers.4.attn.out", None, None, 10_000)
    assert facts["nonfinite"] == [1, 3] and facts["beyond"] == 2
    assert arrays["row_token"][:2].tolist() == [7, 8] and np.isinf(arrays["worst"][:2, 0]).all()
    assert len(arrays["a"]) == 40 * 16 - 3 and arrays["bins"].sum() == 40 * 16 - 3


def test_attention_weights_are_rows_of_tokens() -> None:
    """(heads, T, context): a token's row is its weights in all heads."""
    arrays = copied(A)
    arrays["layers.1.attn.weights"] = np.zeros((4, 40, 40), np.float32)
    b = {**arrays, "layers.1.attn.weights": arrays["layers.1.attn.weights"].copy()}
    b["layers.1.attn.weights"][2, 11, 5] = 0.25
    facts, found = figures(Pair(of(A, arrays), of(A, b)), "layers.1.attn.weights", None, None, 400)
    assert facts["shape"] == [4, 40] and found["row_token"][0] == 11 and found["worst"][0, 2] == 0.25


def test_rerouted_tokens_are_listed_with_both_choices() -> None:
    """Order within a token's slots does not matter."""
    path = "layers.3.moe.expert_ids"
    facts, arrays = rerouted(PAIR, path)
    moved = [t for t in range(40) if set(A[path][t]) != set(PAIR.b[path][t])]
    assert arrays["moved_tokens"].tolist() == moved and facts["moved"] == len(moved) > 0
    assert np.array_equal(arrays["ids_b"], PAIR.b[path][moved])


def test_a_large_tap_is_bounded_and_keeps_the_worst_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at a part of the rows, it keeps the token of the first divergence and the selected one."""
    monkeypatch.setattr(diff_values, "_LARGEST", 64)
    monkeypatch.setattr(diff_values, "_SAMPLE", 50)
    facts, arrays = figures(PAIR, "layers.3.attn.q", None, 23, 40)
    assert facts["rows"] == 40 and facts["looked"] <= 7
    assert 23 in arrays["row_token"] and len(arrays["a"]) <= 40 and facts["sampled"] <= 50
    assert sum(sys.getsizeof(array) for array in arrays.values()) < 4000
