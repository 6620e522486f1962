"""Overflow ramps are foretold from the layers before them; models that do not ramp raise no alarm."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from handmade import router_model
from ramps import KINDS, growing_model

import colibri_lab as lab
from colibri_lab.nan.forecast import next_overflow
from colibri_lab.nan.margins import headroom
from colibri_lab.nan.words import tap_kind
from colibri_lab.testing import tiny_model

IDS = [3, 1, 4, 1, 5]
LARGEST = 65504.0
LIMIT = math.log2(LARGEST)


def run(folder: Path, ids: list[int] = IDS, emulate: str | None = None) -> lab.Session:
    model = lab.open(folder)
    session = model.session(capture="all", max_tokens=len(ids), threads=1, watch="watch", emulate=emulate)
    session.feed(ids)
    return session


def first_beyond(session: lab.Session, tap: str) -> int | None:
    """The first layer in which a tap, or the scores, have a value that float16 can not hold, by plain NumPy."""
    for layer in session.model.config.moe_layers:
        if tap == "attn.scores":
            q, k = session.tape[f"layers.{layer}.attn.q"], session.tape[f"layers.{layer}.attn.k"]
            k, width = k.reshape(len(k), -1), session.model.config.head_dim
            size = np.abs(np.tril(np.einsum("thd,sd->hts", q.reshape(len(q), -1, width), k))).max() / math.sqrt(width)
        else:
            size = np.abs(session.tape[f"layers.{layer}.{tap.replace('experts.*', 'dispatch')}"]).max()
        if size > LARGEST:
            return int(layer)
    return None


def test_ramps_are_foretold_in_at_least_nine_of_ten_cases(tmp_path: Path) -> None:
    """Seeded: nine kinds of value, scores by the watch table, factors of 2.5 to 11 a layer, noise to half a doubling.

    Foretold: an alarm for the tap, from layers before the one that overflows, that names that layer or a neighbour.
    """
    random = np.random.default_rng(6)
    ramps = foretold = 0
    missed = []
    for case in range(72):
        kind = KINDS[case % len(KINDS)]
        bits, noise, start = random.uniform(1.3, 3.5), random.uniform(0, 0.5), random.uniform(0, 5)
        folder, tap = growing_model(tmp_path / str(case), kind, case, bits, noise, start)
        session = run(folder)
        layer = first_beyond(session, tap)
        if layer is None:
            continue
        ramps += 1
        alarms = [alarm for alarm in headroom(session, ["float16"]).forecast() if alarm.tap == tap]
        if any(alarm.known < layer and abs(alarm.layer - layer) <= 1 and alarm.came for alarm in alarms):
            foretold += 1
        else:
            missed.append((case, kind, layer, round(bits, 1), alarms))
    assert ramps >= 60
    assert foretold >= 0.9 * ramps, missed


def test_an_overflow_in_emulated_float16_was_foretold_for_the_place_where_it_was_born(tmp_path: Path) -> None:
    """The run breaks, and the layers before its origin had said so; the find tells how little was left."""
    foretold = told = 0
    for case in range(6):
        folder, _ = growing_model(tmp_path / str(case), ("output", "hidden")[case % 2], 100 + case, 2.5, 0.2, 2.0)
        session = run(folder, emulate="float16")
        found = lab.nan.find(session)
        assert found is not None and found.origin.kind == "overflow" and found.origin.layer is not None
        tap = tap_kind(found.origin.path)
        alarms = headroom(session, ["float16"]).forecast()
        foretold += any(
            alarm.tap == tap and alarm.known < found.origin.layer and abs(alarm.layer - found.origin.layer) <= 1
            for alarm in alarms
        )
        told += "Headroom had fallen to" in found.summary
    assert foretold == 6 and told > 0


def test_only_layers_before_the_overflow_are_asked(tmp_path: Path) -> None:
    """What later layers hold changes no alarm."""
    folder, tap = growing_model(tmp_path / "ramp", "residual", 3, 2.5, 0.1)
    trace = run(folder).trace()
    (alarm,) = [alarm for alarm in headroom(trace, ["float16"]).forecast() if alarm.tap == tap]
    later = {path: np.zeros_like(array) if path.startswith("layers.") and int(path.split(".")[1]) > alarm.known
             and path.endswith(".output") else array for path, array in trace.items()}  # fmt: skip
    other = lab.Trace(later, ids=trace.ids, texts=trace.texts, meta=trace.meta)
    (again,) = [found for found in headroom(other, ["float16"]).forecast() if found.tap == tap]
    assert (again.known, again.layer, again.bits, again.slope) == (alarm.known, alarm.layer, alarm.bits, alarm.slope)
    assert again.came is False and alarm.came is True
    assert f"From layers up to {alarm.known}: layer {alarm.layer}, residual stream, will overflow float16" in str(alarm)


def test_flat_models_raise_no_alarm(tmp_path: Path) -> None:
    """Values of any size below the limit that wander by up to half a doubling from layer to layer."""
    random = np.random.default_rng(7)
    for case in range(32):
        kind = KINDS[case % len(KINDS)]
        start = random.uniform(0, 11)
        folder, tap = growing_model(tmp_path / str(case), kind, case, 0.0, random.uniform(0, 0.5), start)
        session = run(folder)
        alarms = headroom(session, ["float16"]).forecast()
        assert first_beyond(session, tap) is not None or not alarms, (case, kind, start, alarms)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_ordinary_models_raise_no_alarm_in_any_format(family: str, tmp_path: Path) -> None:
    session = run(tiny_model(tmp_path, family=family))
    found = headroom(session)
    assert not any(found.forecast(name) for name in found.formats)


def test_the_bundled_model_and_hand_made_routers_raise_no_alarm(tmp_path: Path) -> None:
    session = lab.open().session(capture="all", max_tokens=64)
    session.feed("The Queen of Hearts, she made some tarts")
    logits = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    for held in (session, run(router_model(tmp_path, logits, 2), list(range(8)))):
        assert not any(headroom(held).forecast(name) for name in headroom(held).formats)


@pytest.mark.parametrize(
    ("sizes", "ahead"),
    [
        ([2, 5, 8, 11], 2),  # 14, then 17
        ([4, 7, 10, 13], 1),
        ([1, 1, 1, 12, 12, 12, 12], None),  # one jump, as of massive activations
        ([1, 1, 12], None),
        ([2, 10, 12.5], None),  # flattens
        ([15, 15.2, 15, 15.3, 15.1], None),  # near the end, and going nowhere
        ([2, 4], None),  # one step is no trend
        ([14.0, 14.4, 14.8, 15.2, 15.6], 1),  # slow and steady
        ([14.0, 13.0, 12.0, 11.0], None),
        ([4, 7, -math.inf, 13], None),
    ],
)
def test_a_row_of_sizes_foretells(sizes: list[float], ahead: int | None) -> None:
    """log2 absmax by layer; float16 ends just under 16."""
    found = next_overflow(np.array(sizes, float), LIMIT)
    assert (found and found[0]) == ahead
