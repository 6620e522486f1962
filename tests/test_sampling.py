"""Sampling: the right distribution, reproducible, and never a token from numbers that are not numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from colibri_lab.errors import ArgumentError, NonFiniteError
from colibri_lab.sampling import sample


def draws(logits: list[float], n: int = 4000, **options: Any) -> np.ndarray:
    rng = np.random.default_rng(0)
    ids = [sample(np.array(logits, np.float32), rng=rng, **({"temperature": 1.0} | options))[0] for _ in range(n)]
    return np.bincount(ids, minlength=len(logits)) / n


def greedy(logits: list[float]) -> tuple[int, float]:
    return sample(np.array(logits, np.float32), rng=np.random.default_rng(0))


class TestGreedy:
    def test_the_largest_wins_and_a_tie_goes_to_the_lower_id(self) -> None:
        assert greedy([1, 3, 2])[0] == 1 and greedy([2, 3, 3, 3])[0] == 1 and greedy([0.0] * 5)[0] == 0

    def test_an_excluded_token_is_no_obstacle(self) -> None:
        assert greedy([-np.inf, -5, -np.inf]) == (1, 0.0)

    def test_the_logprob_is_that_of_the_model_at_temperature_one(self) -> None:
        z = [1.0, 2.5, -3.0, 0.25]
        expected = {i: v - math.log(math.fsum(map(math.exp, z))) for i, v in enumerate(z)}
        assert greedy(z)[1] == pytest.approx(expected[1], rel=1e-14)
        rng = np.random.default_rng(1)
        for _ in range(20):
            token, logprob = sample(np.array(z), temperature=3.0, top_k=2, top_p=0.9, rng=rng)
            assert logprob == pytest.approx(expected[token], rel=1e-14)

    def test_huge_logits_do_not_overflow(self) -> None:
        assert greedy([3e38, -3e38, 3e38]) == (0, pytest.approx(-math.log(2)))


class TestDistribution:
    Z = (math.log(0.5), math.log(0.3), math.log(0.15), math.log(0.05))

    def test_plain_sampling_follows_the_softmax(self) -> None:
        np.testing.assert_allclose(draws(list(self.Z)), [0.5, 0.3, 0.15, 0.05], atol=0.03)

    def test_temperature_sharpens_and_flattens(self) -> None:
        squares = np.array([0.25, 0.09, 0.0225, 0.0025])
        np.testing.assert_allclose(draws(list(self.Z), temperature=0.5), squares / squares.sum(), atol=0.03)
        np.testing.assert_allclose(draws(list(self.Z), temperature=1e6), [0.25] * 4, atol=0.03)
        assert draws(list(self.Z), n=50, temperature=1e-300)[0] == 1

    def test_top_k_keeps_the_likeliest(self) -> None:
        np.testing.assert_allclose(draws(list(self.Z), top_k=2), [0.625, 0.375, 0, 0], atol=0.03)
        assert draws([1.0, 1.0, 1.0], n=200, top_k=2)[2] == 0  # a tie at the cut goes to the lower id

    @pytest.mark.parametrize(("top_p", "kept"), [(0.4, 1), (0.6, 2), (0.81, 3), (0.96, 4), (1.0, 4), (1e-9, 1)])
    def test_top_p_keeps_the_smallest_set_that_reaches_it(self, top_p: float, kept: int) -> None:
        assert (draws(list(self.Z), n=1000, top_p=top_p) > 0).sum() == kept

    def test_top_p_counts_what_top_k_left(self) -> None:
        assert (draws(list(self.Z), n=500, top_k=2, top_p=0.6) > 0).tolist() == [True, False, False, False]

    def test_excluded_tokens_are_never_drawn(self) -> None:
        assert draws([0.0, -np.inf, 0.0, -np.inf], n=500)[[1, 3]].sum() == 0

    def test_the_same_seed_gives_the_same_tokens(self) -> None:
        runs = [
            [sample(np.array(self.Z), temperature=1.0, rng=rng)[0] for _ in range(50)]
            for rng in map(np.random.default_rng, (7, 7, 8))
        ]
        assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("places", [[0], [15], [31], range(32)])
def test_B1_nan_or_inf_gives_no_token_but_an_error(places: Any, value: float, temperature: float) -> None:
    logits = np.linspace(-1, 1, 32, dtype=np.float32)
    logits[list(places)] = value
    with pytest.raises(
        NonFiniteError,
        match=rf"{len(places)} of 32 logits are NaN or \+Inf, the first is {value} at id {places[0]}; lab",
    ):
        sample(logits, temperature=temperature, top_k=20, rng=np.random.default_rng(0))


def test_B1_no_token_at_all_is_an_error_too() -> None:
    with pytest.raises(NonFiniteError, match="all 4 logits are -Inf"):
        greedy([-np.inf] * 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": math.nan}, "top_p is nan"),
    ],
)
def test_an_option_out_of_range_says_the_range(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        sample(np.zeros(3), rng=np.random.default_rng(0), **options)


def test_one_row_of_logits_is_needed() -> None:
    for shape in ((0,), (2, 3), ()):
        with pytest.raises(ArgumentError, match="one row"):
            sample(np.zeros(shape), rng=np.random.default_rng(0))
