"""Headroom: bits left by tap, layer and format, growth, warnings, and the census of small values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab.errors import ArgumentError
from colibri_lab.testing import synthetic_trace, tiny_model

DTYPES: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
                          "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}  # fmt: skip


def with_arrays(arrays: dict[str, np.ndarray]) -> lab.Trace:
    """A synthetic trace of 3 layers and 12 tokens with some arrays exchanged."""
    trace = synthetic_trace(3, 4, 2, 12, hidden=4, passes=[5, 7])
    return lab.Trace({**trace, **arrays}, ids=trace.ids, texts=trace.texts, meta=trace.meta)


def test_bits_place_and_growth_are_those_of_the_arrays() -> None:
    """Against plain NumPy; the place is the token row, and the expert where rows are of experts."""
    trace = with_arrays({})
    found = lab.nan.headroom(trace)
    for row in found.table:
        array = trace[str(row["path"]).replace("experts.*", "dispatch")]
        absmax = float(np.abs(array).max())
        assert row["absmax"] == absmax and row["n"] == array.size and row["n_nonfinite"] == 0
        assert row["float16"] == pytest.approx(math.log2(65504 / absmax))
        assert row["float8_e4m3fn"] == pytest.approx(math.log2(448 / absmax))
        if row["expert"] >= 0:
            rows = trace.expert_rows(int(row["layer"]), int(row["expert"]))
            place = list(rows["tokens"]).index(row["token"])
            assert abs(rows[str(row["path"]).rpartition(".")[2]][place].flat[row["index"]]) == absmax
        else:
            assert abs(array[row["token"]].flat[row["index"]]) == absmax
    one = found.growth[(found.growth["tap"] == "moe.output") & (found.growth["layer"] == 2)][0]
    sizes = [np.abs(trace[f"layers.{layer}.moe.output"]).max() for layer in (1, 2)]
    assert one["before"] == 1 and one["bits"] == pytest.approx(math.log2(sizes[1] / sizes[0]))


def test_what_has_under_two_bits_left_is_warned_of_in_a_sentence() -> None:
    big = np.ones((12, 4), np.float32)
    big[7, 2] = -36000.0
    found = lab.nan.headroom(with_arrays({"layers.1.moe.output": big}), ["float16", "bf16"])
    text = found.texts[7].replace(" ", "·")
    assert found.warnings == (
        f"Layer 1, output of the block: 0.9 bit left in float16, 36,000 at token 7 '{text}' of 65,504.",
    )
    closest = found.closest("float16")
    assert closest is not None and str(closest) == "layer 1, output of the block, 0.9 bit in float16"
    assert closest.token == 7 and closest.layer == 1 and found.closest() == closest
    assert "0.9 bit" in repr(found) and "1 tap under 2 bits" in repr(found) and "0.9 bit" in found._repr_html_()


def test_what_is_beyond_a_format_is_said_to_overflow() -> None:
    trace = with_arrays({"layers.0.moe.output": np.full((12, 4), 131008.0, np.float32)})
    (sentence,) = lab.nan.headroom(trace, "float16").warnings
    assert sentence.startswith("Layer 0, output of the block: overflows float16, 131,008 at token 0")
    assert sentence.endswith("is beyond 65,504 by 1.0 bit.")


def test_nan_and_inf_are_left_out_and_the_note_says_so() -> None:
    bad = np.ones((12, 4), np.float32)
    bad[3] = [np.nan, np.inf, -5, 1]
    found = lab.nan.headroom(with_arrays({"layers.1.moe.output": bad}))
    (row,) = found.table[found.table["path"] == "layers.1.moe.output"]
    assert (row["absmax"], row["token"], row["n_nonfinite"]) == (5, 3, 2)
    assert found.notes == (
        "1 tap holds NaN or Inf, first layers.1.moe.output: bits left there are those of the finite values.",
    )


@pytest.mark.parametrize("name", list(DTYPES))
def test_small_values_are_counted_as_the_format_rounds_them(name: str) -> None:
    """Oracle: ml_dtypes' and NumPy's own rounding, with every tie and both ends among the values."""
    kind = lab.numerics.format_of(name)
    random = np.random.default_rng(0)
    spread = 2.0 ** random.uniform(kind.lowest - kind.fraction - 3, kind.lowest + 2, 400)
    tiny = 2.0 ** (kind.lowest - kind.fraction)
    steps = np.arange(0, 2 ** (kind.fraction + 1), 0.5 if kind.fraction < 9 else 16.5) * tiny
    values = np.concatenate([spread, steps, [0, 0, 1]]).astype(np.float32)
    values = np.resize(values, (12, len(values) // 12 + 1)) * np.float32(-1)
    found = lab.nan.headroom(with_arrays({"layers.1.moe.output": values}), [name])
    (row,) = found.subnormals[found.subnormals["path"] == "layers.1.moe.output"]
    size = np.abs(values[values != 0].astype(np.float64))
    rounded = size.astype(np.float32).astype(DTYPES[name]).astype(np.float64)
    subnormal = (rounded > 0) & (rounded < 2.0**kind.lowest)
    assert row["n"] == size.size and row["n_subnormal"] == subnormal.sum() and row["n_zero"] == (rounded == 0).sum()
    assert row["largest"] == size[subnormal].max()
    assert row["share"] == (row["n_subnormal"] + row["n_zero"]) / size.size


def test_a_session_that_captured_little_is_replayed_and_a_note_says_so(tmp_path: Path) -> None:
    model = lab.open(tiny_model(tmp_path))
    few, full = model.session(capture="routing"), model.session(capture="all")
    for session in (few, full):
        session.feed([3, 1, 4])
    a, b = lab.nan.headroom(few), lab.nan.headroom(full)
    assert "replayed in a session of its own" in a.notes[0] and not b.notes
    both = [name for name in a.table["path"] if name in b.table["path"]]
    assert len(both) == len(b.table)
    for path in both:
        (x,), (y,) = a.table[a.table["path"] == path], b.table[b.table["path"] == path]
        assert x.tobytes() == y.tobytes()


def test_a_watched_session_knows_points_between_the_taps(tmp_path: Path) -> None:
    """Attention scores are no tap; their bits come from the watch table, which can also be read alone."""
    session = lab.open(tiny_model(tmp_path)).session(capture="all", watch="watch")
    session.feed([3, 1, 4])
    found = lab.nan.headroom(session)
    (scores,) = found.table[found.table["path"] == "layers.1.attn.scores"]
    q, k = (session.tape[f"layers.1.attn.{name}"].reshape(3, -1) for name in "qk")
    heads, width = session.model.config.num_attention_heads, session.model.config.head_dim
    group = heads // session.model.config.num_key_value_heads
    q, k = q.reshape(3, heads, width), np.repeat(k.reshape(3, -1, width), group, axis=1)
    seen = np.abs(np.tril(np.einsum("thd,shd->hts", q, k))).max() / math.sqrt(width)
    assert scores["absmax"] == pytest.approx(seen, rel=1e-5) and scores["stage"] == "attention"
    alone = lab.nan.headroom(session.watch)
    taps = set(alone.table["path"]) & set(found.table["path"])
    assert "layers.1.output" in taps
    for path in taps:
        assert alone.table[alone.table["path"] == path]["absmax"] == found.table[found.table["path"] == path]["absmax"]


def test_what_is_no_format_or_no_run_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no number format is called"):
        lab.nan.headroom(with_arrays({}), ["float17"])
    with pytest.raises(ArgumentError, match="at least one number format"):
        lab.nan.headroom(with_arrays({}), [])
    with pytest.raises(ArgumentError, match="a trace or a session is needed"):
        lab.nan.headroom(5)
    with pytest.raises(ArgumentError, match="was not asked for"):
        lab.nan.headroom(with_arrays({}), ["float16"]).closest("bfloat16")


@pytest.mark.parametrize("formats", [None, 3, np.float16])
def test_headroom_refuses_formats_that_are_no_list(formats: Any) -> None:
    """With a sentence."""
    with pytest.raises(lab.ArgumentError, match="formats takes names"):
        lab.nan.headroom(lab.open().session(max_tokens=4), formats=formats)


@pytest.mark.parametrize("capture", ["none", "routing", "all"])
def test_headroom_of_an_empty_session_is_empty(capture: str) -> None:
    """There is nothing to replay."""
    measured = lab.nan.headroom(lab.open().session(capture=capture, max_tokens=4))
    assert not measured.warnings and not (measured.table["absmax"] > 0).any()
