"""Student's t, Wilson's score, Holm's correction and block variances against independent computations."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
import slow_routing as slow

from colibri_lab import routing
from colibri_lab.routing.intervals import holm, score_interval, student_quantile, student_tail
from colibri_lab.routing.measured import Moments, Ratios
from colibri_lab.routing.streaming import in_blocks


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 30, 500])
def test_the_tail_of_students_t_is_the_integral_of_its_density(freedom: int) -> None:
    """Against Simpson's rule on the density, substituted so that it is smooth and ends."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    for t in (0.0, 0.3, 1.0, 2.5, 6.0):
        # x = √ν tan u: the density becomes scale √ν cos(u)^(ν − 1)
        edge, n = math.atan(t / math.sqrt(freedom)), 4000
        u = [edge * i / n for i in range(n + 1)]
        y = [scale * math.sqrt(freedom) * math.cos(v) ** (freedom - 1) for v in u]
        inside = edge / n / 3 * math.fsum((y[0], y[-1], *(4 * v for v in y[1:-1:2]), *(2 * v for v in y[2:-1:2])))
        assert float(student_tail(t, freedom)) == pytest.approx(1 - 2 * inside, abs=1e-11)


def test_quantiles_turn_tails_around() -> None:
    """Known ones (level 0.95: 12.706, 4.303, 2.228, 1.960), and the tail at the quantile is what was asked for."""
    found = student_quantile(np.array([1, 2, 10, 10**9, 0, -1]), 0.95)
    np.testing.assert_allclose(found[:4], [12.7062047, 4.3026527, 2.2281389, 1.9599640], rtol=1e-7)
    assert np.isnan(found[4:]).all()
    for level in (0.5, 0.9, 0.999):
        for freedom in (1, 5, 99):
            quantile = student_quantile(np.array(freedom), level)
            assert float(student_tail(quantile, freedom)) == pytest.approx(1 - level, rel=1e-9)
    assert float(student_tail(math.inf, 3)) == 0 and math.isnan(student_tail(math.nan, 3))
    assert float(student_tail(2.0, 10**6)) == pytest.approx(2 * (1 - statistics.NormalDist().cdf(2.0)), rel=1e-12)


def test_wilsons_interval_holds_the_shares_that_the_score_test_does_not_reject() -> None:
    """Its ends solve (p̂ − p)² = z² p (1 − p) / n."""
    z = 1.959963984540054
    for hits, n in ((0, 10), (3, 10), (10, 10), (500, 2000)):
        low, high = score_interval(np.array(hits / n), n, z)
        for p in (float(low), float(high)):
            if 0 < p < 1:
                assert (hits / n - p) ** 2 == pytest.approx(z * z * p * (1 - p) / n, rel=1e-9)
        assert 0 <= low <= hits / n <= high <= 1 and high - low > 0


def test_holms_correction_step_by_step() -> None:
    """0.01, 0.04, 0.03 of three: 0.03, then max(0.06, …), then not below; NaN is no test."""
    np.testing.assert_allclose(holm(np.array([[0.01, 0.04], [np.nan, 0.03]])), [[0.03, 0.06], [np.nan, 0.06]])
    assert holm(np.array([0.9, 0.8])).tolist() == [1, 1] and holm(np.zeros(0)).shape == (0,)


def test_a_block_variance_is_that_of_the_residuals() -> None:
    """Sums of squares against two passes over the blocks."""
    rng = np.random.default_rng(2)
    b = (rng.random(333) < 0.7).astype(float)
    a = b * rng.lognormal(size=333)
    cells = Ratios((1,), (1,))
    cells.add(in_blocks(a[:, None], 32), in_blocks(b[:, None], 32))
    assert float(cells.value[0]) == pytest.approx(math.fsum(a) / math.fsum(b), rel=1e-13)
    expected = slow.block_variance(a.tolist(), b.tolist(), 32)
    assert float(cells.variance()[0]) == pytest.approx(expected, rel=1e-10)
    mean = cells.mean(0.9, 0.0, "")
    reach = float(student_quantile(np.array(10), 0.9)) * math.sqrt(expected)
    assert float(mean.high[0] - mean.value[0]) == pytest.approx(reach, rel=1e-9)


def test_a_variance_by_gradient_is_that_of_the_same_ratio() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.random(200), rng.random(200)
    sums = Moments((1,), 2)
    sums.add(in_blocks(np.stack([a, b], axis=-1)[:, None], 10))
    (x, y) = sums.sums[0]
    gradient = np.array([[1 / y, -x / y / y]])
    expected = slow.block_variance(a.tolist(), b.tolist(), 10)
    assert float(sums.variance(gradient)[0]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["usage_entropy", "balancedness", "max_violation", "load_balance_loss"])
def test_intervals_of_functions_of_sums_follow_their_gradient(name: str) -> None:
    """Against a gradient by finite differences: one block's tokens weigh a little more."""
    from colibri_lab.testing import synthetic_trace
    from colibri_lab.trace import Trace

    trace = synthetic_trace(1, 6, 2, 96)
    metric = getattr(routing, name)
    found = metric(trace)
    parts = []
    for block in range(3):
        rows = slice(block * 32, block * 32 + 32)
        # the block once more among 200 copies of everything: 1/200 of its weight on top
        many = {p: np.concatenate([np.tile(x, (200, *[1] * (x.ndim - 1))), x[rows]]) for p, x in trace.items()}
        meta = {**trace.meta, "passes": [[0, 96 * 200 + 32]]}
        heavier = Trace(many, ids=[0] * (96 * 200 + 32), texts=[], meta=meta)
        parts.append(200 * float(metric(heavier).value[0] - found.value[0]))
    error = math.sqrt(3 / 2 * math.fsum(p * p for p in parts))
    expected = float(student_quantile(np.array(2), 0.95)) * error
    assert float(found.high[0] - found.value[0]) == pytest.approx(expected, rel=0.03)


def test_a_single_block_has_an_interval_for_shares_and_none_for_means() -> None:
    trace = slow.blind(8, 2, 20)
    usage = routing.usage(trace)
    low, high = score_interval(usage.value, 20, statistics.NormalDist().inv_cdf(0.975))
    np.testing.assert_allclose(usage.low, low, rtol=1e-7)
    np.testing.assert_allclose(usage.high, high, rtol=1e-7)
    assert np.isnan(routing.z_loss(trace).low).all() and np.isfinite(routing.z_loss(trace).value).all()


def test_chance_values_are_exact_fractions() -> None:
    """Overlap of blind sets against counting all pairs of sets."""
    import itertools

    from colibri_lab.routing import nulls

    for experts, k in ((5, 2), (6, 3), (4, 4), (1, 1)):
        sets = [set(s) for s in itertools.combinations(range(experts), k)]
        share = Fraction(sum(bool(a & b) for a in sets for b in sets), len(sets) ** 2)
        assert nulls.overlap_chance(k, experts) == pytest.approx(float(share), rel=1e-14)
