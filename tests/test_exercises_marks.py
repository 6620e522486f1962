"""How exercises of notebooks 03 to 05 mark: right answers in every spelling, wrong ones with a hint, and nonsense."""

from __future__ import annotations

import numpy as np
import pytest

import colibri_lab as lab

RIGHT = {
    "diff_1": [(3, 6), [3, 6], np.array([3, 6]), "layers.3.moe.experts.6", "layers.3.moe.experts.6.gate", "3, 6"],
    "diff_2": [0.5, "0.5", np.float32(0.5), [0.501], 1 / 2],
    "diff_3": [[1, 2], (2, 1), {1, 2}, np.array([1, 2]), ["1", "2"]],
    "diff_4": [73, "73", np.int64(73), [73]],
    "nan_1": ["layers.1.attn.v", "layers.1.attn.v[3, 7]", ("layers.1.attn.v", (3, 7)), ["layers.1.attn.v"]],
    "nan_2": [(3, 5), [3, 5], np.array([3, 5]), "layers.3.moe.experts.5", "layers.3.moe.experts.5.up", "3, 5"],
    "nan_3": [10, "10", np.int64(10), [10], 10.0],
    "cache_1": [1, "1", np.int64(1), [1], 1.0],
    "cache_2": [377, "377", np.array([377]), 377.0],
    "cache_3": [5, "5", 5.0, [5]],
    "cache_4": [6, "6", np.int32(6)],
}
WRONG = {
    "diff_1": [(3, 5), (4, 6), (0, 0), (99, 99), (-1, 2)],
    "diff_2": [2, 1, 0, -0.5, float("nan"), float("inf"), 1e300],
    "diff_3": [[0, 3], [1, 1], [0, 1], [-1, 9]],
    "diff_4": [83, 0, -1, 10**9],
    "nan_1": ["layers.1.attn.k", "layers.1.attn.out", "layers.0.attn.v", "norm", "rubbish"],
    "nan_2": [(5, 2), (3, 4), (0, 0), (99, 99), (-1, 2)],
    "nan_3": [1, 28, 0, -1, 10**9],
    "nan_4": [0, -3, 16, float("nan"), float("inf"), 1e300],
    "cache_1": [2, 3, 0, 4, -1],
    "cache_2": [376, 384, 8, 0, 6144, 10**9],
    "cache_3": [2, 4, 6, 8, 1, 9, 48],
    "cache_4": [2, 4, 5, 7, 8, 1, 36, -1],
}
NO_ANSWERS = {
    "diff": ["what", ["x", None]],
    "nan": [],
    "cache": ["lru", float("nan"), 1.5],
}
FOR_NONE = [None, object(), [], {}, [[1, 2], [3, 4]], 3 + 4j, b"73", ...]


@pytest.mark.parametrize(("name", "number"), [(name, n) for name in RIGHT for n in range(len(RIGHT[name]))])
def test_every_spelling_of_a_right_answer_passes(name: str, number: int) -> None:
    verdict = getattr(lab.exercises, name)(RIGHT[name][number])
    assert verdict, verdict


@pytest.mark.parametrize(("name", "number"), [(name, n) for name in WRONG for n in range(len(WRONG[name]))])
def test_a_wrong_answer_gets_a_hint_that_does_not_tell(name: str, number: int) -> None:
    verdict = getattr(lab.exercises, name)(WRONG[name][number])
    assert not verdict and len(verdict.message) > 10, verdict


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_an_answer_is_told_what_one_looks_like(name: str) -> None:
    for thing in [*FOR_NONE, *NO_ANSWERS[name.split("_")[0]]]:
        verdict = getattr(lab.exercises, name)(thing)
        assert not verdict and "answer is" in verdict.message, (thing, verdict)
