"""Accumulators: parts equal the whole, the order does not matter, memory does not grow with tokens."""

from __future__ import annotations

import gc
import math
import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import slow_routing as slow

import colibri_lab as lab
from colibri_lab import routing
from colibri_lab.errors import ArgumentError, NotCapturedError
from colibri_lab.routing.measured import Total
from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace

WEIGHTS = {
    f"layers.{layer}.moe.experts.{e}.{part}": np.random.default_rng((layer, e, n)).standard_normal(shape, np.float32)
    for layer in range(2)
    for e in range(6)
    for n, (part, shape) in enumerate((("gate", (5, 4)), ("up", (5, 4)), ("down", (4, 5))))
}

# name -> (a new accumulator, how it takes a trace)
Taker = tuple[Callable[[], Any], Callable[[Any, Trace], Any]]


def plain(make: Callable[[], Any]) -> Taker:
    return make, lambda taken, trace: taken.add(trace)


def labels(trace: Trace) -> list[int]:
    return [n % 3 for n in range(len(trace.ids))]


KINDS: dict[str, Taker] = {
    "MeanEntropy": plain(routing.MeanEntropy),
    "MeanEntropy of gates": plain(lambda: routing.MeanEntropy("gates")),
    "Ties": plain(lambda: routing.Ties("bfloat16")),
    "Usage": plain(routing.Usage),
    "BatchViolation": plain(lambda: routing.BatchViolation(16)),
    "BalanceLoss": plain(routing.BalanceLoss),
    "BalanceLoss of transformers": plain(lambda: routing.BalanceLoss("transformers")),
    "ZLoss": plain(routing.ZLoss),
    "Coactivation": plain(routing.Coactivation),
    "Coactivation of neighbours": plain(lambda: routing.Coactivation("adjacent")),
    "CrossLayer": plain(routing.CrossLayer),
    "Repetition": plain(lambda: routing.Repetition("set")),
    "Vocabulary": plain(lambda: routing.Vocabulary("next", least=2)),
    "OutputSimilarity": plain(lambda: routing.OutputSimilarity(WEIGHTS)),
    "NormGate": plain(routing.NormGate),
    "NormGate of all": plain(lambda: routing.NormGate(WEIGHTS)),
    "Specialisation": (routing.Specialisation, lambda taken, trace: taken.add(trace, labels(trace))),
    "Contrast": (routing.Contrast, lambda taken, trace: taken.add(trace, labels(trace), 0, 2)),
    "Agreement": (routing.Agreement, lambda taken, trace: taken.add(trace, trace)),
}
EVERY = pytest.mark.parametrize("kind", list(KINDS))


def text(seed: int, tokens: int = 70) -> Trace:
    """One text; gaps only where no dispatch rows have to follow them."""
    return synthetic_trace(2, 6, 3, tokens, seed=seed, hidden=4)


def numbers(result: Any) -> Iterator[Any]:
    """All arrays of a result."""
    for value in vars(result).values():
        if isinstance(value, routing.Measured):
            yield from numbers(value)
        elif isinstance(value, np.ndarray):
            yield value


def same(one: Any, other: Any, tolerance: float = 1e-12) -> None:
    for a, b in zip(numbers(one.result()), numbers(other.result()), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@EVERY
def test_merged_parts_equal_one_after_another(kind: str) -> None:
    """Four texts in sequence; in two parts that are merged; in another order; through pickles, as from processes."""
    make, take = KINDS[kind]
    texts = [text(seed, 40 + 11 * seed) for seed in range(4)]
    whole, left, right, turned = make(), make(), make(), make()
    for trace in texts:
        take(whole, trace)
    for trace in texts[:2]:
        take(left, trace)
    for trace in texts[2:]:
        take(right, trace)
    for trace in reversed(texts):
        take(turned, trace)
    before = pickle.dumps(right)
    merged = pickle.loads(pickle.dumps(left)).merge(pickle.loads(before))
    same(merged, whole)
    same(turned, whole)
    assert pickle.dumps(right) == before and merged.tokens == whole.tokens == sum(len(t.ids) for t in texts)


@EVERY
def test_many_texts_weigh_as_their_tokens(kind: str) -> None:
    """The value of equal texts is that of one; the interval is not wider."""
    make, take = KINDS[kind]
    once, thrice = take(make(), text(1)), make()
    for _ in range(3):
        take(thrice, text(1))
    if kind == "Vocabulary":
        assert (thrice.result().counts.sum(), once.tokens * 3 - 3) == (thrice.sums["ids"].counts.sum(), 207)
        return
    one, three = once.result(), thrice.result()
    np.testing.assert_allclose(three.value, one.value, rtol=1e-12, atol=1e-12)
    known = np.isfinite(one.low) & np.isfinite(three.low) & (one.high - one.low > 1e-9)
    assert ((three.high - three.low)[known] <= (one.high - one.low)[known] + 1e-12).all()


@EVERY
def test_steps_of_another_size_give_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is worked on in steps; their size is no part of the answer."""
    make, take = KINDS[kind]
    trace = text(3, 150)
    whole = take(make(), trace)
    monkeypatch.setattr("colibri_lab.routing.streaming._TILE", 1)
    monkeypatch.setattr("colibri_lab.routing.similarity._NUMBERS", 1)
    same(take(make(), trace), whole)


def test_a_text_is_an_observation_of_its_own() -> None:
    """No pair of neighbours and no block reaches from one text into the next."""
    a, b = synthetic_trace(1, 4, 1, 1, seed=0), synthetic_trace(1, 4, 1, 1, seed=1)
    assert np.isnan(routing.Repetition().add(a).add(b).result().value).all()
    taken = routing.Vocabulary("next", least=1).add(a).add(b)
    assert taken.result().ids.tolist() == []
    blocks = routing.Usage().add(synthetic_trace(1, 4, 1, 33)).add(synthetic_trace(1, 4, 1, 31)).sums["share"].blocks
    assert blocks.tolist() == [[3]]


def test_labels_may_differ_from_trace_to_trace() -> None:
    taken = routing.Specialisation().add(text(0), "prose").add(text(1), "code").add(text(2), "prose")
    assert taken.labels == ["code", "prose"]
    code = routing.usage(text(1)).value
    np.testing.assert_allclose(taken.result().value[:, :, 0], code, rtol=1e-12)
    swapped = routing.Contrast().add(text(0), "second").add(text(1), "first").result()
    np.testing.assert_allclose(swapped.value, code - routing.usage(text(0)).value, rtol=1e-12, atol=1e-15)


def test_the_block_length_changes_the_interval_and_nothing_else() -> None:
    one, other = (routing.Usage(block).add(text(0, 300)).result() for block in (8, 64))
    np.testing.assert_array_equal(one.value, other.value)
    assert (one.low != other.low).any()


def test_other_models_and_options_are_refused() -> None:
    taken = routing.Usage().add(text(0))
    with pytest.raises(ArgumentError, match="8 experts, 2 chosen; those before had"):
        taken.add(synthetic_trace(2, 8, 2, 5))
    with pytest.raises(ArgumentError, match="same options"):
        taken.merge(routing.Usage(block=16))
    with pytest.raises(ArgumentError, match="same options"):
        taken.merge(routing.ZLoss())
    assert taken.tokens == 70


def test_a_call_that_fails_has_counted_nothing() -> None:
    """The second layer's ids are missing: the first layer's are not counted either."""
    taken = routing.Usage().add(text(0))
    before = taken.counts
    broken = text(1)
    arrays = {path: array for path, array in broken.items() if path != "layers.1.moe.expert_ids"}
    with pytest.raises(NotCapturedError, match=r"layers\.1\.moe\.expert_ids"):
        taken.add(Trace(arrays, ids=broken.ids, texts=[], meta=broken.meta))
    np.testing.assert_array_equal(taken.counts, before)
    assert taken.tokens == 70


def test_feeding_reports_progress_and_can_be_interrupted() -> None:
    """Two accumulators, three texts from a list: fractions up to 1. Ctrl-C in between keeps what was counted."""
    done: list[float] = []
    usage, loss = routing.Usage(), routing.ZLoss()
    assert routing.feed([usage, loss], [text(n) for n in range(3)], progress=done.append) == 3
    assert done == [1 / 3, 2 / 3, 1] and usage.tokens == loss.tokens == 210

    def until_interrupted() -> Iterator[Trace]:
        yield text(0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        routing.feed(usage, until_interrupted())
    assert usage.tokens == 280
    assert routing.feed(usage, (text(n) for n in range(2))) == 2


def test_a_session_can_be_fed() -> None:
    session = lab.open().session(max_tokens=8)
    session.feed([1, 2, 3])
    assert routing.Usage().add(session).tokens == 3


def test_rounding_does_not_pile_up() -> None:
    """A hundred thousand values of very different size: the sum is the exactly rounded one to 1e-15."""
    values = np.random.default_rng(0).lognormal(0, 12, 20_000)
    total = Total((1,))
    for value in values:
        total.add(value)
    assert float(total.value[0]) == pytest.approx(math.fsum(values), rel=1e-15)


def peak(work: Callable[[], Any]) -> int:
    """Most bytes that Python and NumPy held at once during `work`, above those at its start."""
    gc.collect()
    tracemalloc.start()
    work()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


@EVERY
def test_memory_does_not_grow_with_the_number_of_texts(kind: str) -> None:
    """Three texts and eighteen, each made when it is fed."""
    make, take = KINDS[kind]

    def feed(count: int) -> None:
        taken = make()
        for seed in range(count):
            take(taken, text(seed % 3, 100))
        taken.result()

    feed(18)  # what is loaded and cached once
    few, many = peak(lambda: feed(3)), peak(lambda: feed(18))
    assert many < 1.15 * few + 20_000


@pytest.mark.parametrize("kind", ["MeanEntropy", "Usage", "BalanceLoss", "Coactivation", "CrossLayer", "Repetition"])
def test_memory_does_not_grow_with_the_length_of_a_text(kind: str) -> None:
    """A text three times as long, beyond the arrays that it brings: the steps are of one size."""
    make, take = KINDS[kind]
    short, long = (slow.blind(32, 4, tokens, layers=2) for tokens in (80_000, 240_000))
    take(make(), slow.blind(32, 4, 100, layers=2))
    few, many = peak(lambda: take(make(), short)), peak(lambda: take(make(), long))
    assert many < 1.3 * few + 100_000, (few, many)
