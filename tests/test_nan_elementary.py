"""The engine's arithmetic in NumPy: every operation of a run by bytes, and its parts against exact numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab.nan import elementary
from colibri_lab.nan.inner import Points
from colibri_lab.nan.source import Source
from colibri_lab.testing import canonical

REFERENCE = Path(__file__).parent / "fixtures" / "reference"


def emulations() -> list[tuple[str, Any]]:
    """(family, what is emulated): every family as it is, and formats of storage and sums on some."""
    plain = ["mixtral", "mixtral_swa", "olmoe", "qwen2_moe", "qwen2_moe_step", "qwen3_moe"]
    return [
        *((family, None) for family in plain),
        ("mixtral", "float16"), ("qwen2_moe", "bfloat16"), ("olmoe", "float8_e4m3fn"),
        ("qwen2_moe", lab.Emulation("bfloat16", accumulation="bfloat16")),
        ("mixtral_swa", lab.Emulation({"layers.*.middle": "float16"}, accumulation={"*.attn.*": "float16"})),
        ("qwen3_moe", lab.Emulation("float8_e5m2", saturate="*", flush_subnormals=True)),
    ]  # fmt: skip


@pytest.mark.parametrize(("family", "emulated"), emulations(), ids=str)
def test_every_operation_gives_the_bytes_of_the_engine(family: str, emulated: Any) -> None:
    """Each tap of a whole run, made from the taps before it."""
    model = lab.open(REFERENCE / family)
    session = model.session(capture=["*", "layers.*.attn.weights"], emulate=emulated)
    session.feed(list(range(3, 19)))
    trace = session.trace()
    source = Source(trace, model)
    points, every = Points(source), np.arange(16)
    for path in trace:
        if "dispatch" not in path and not path.endswith("expert_ids"):
            held = points.operation(path, every).value
            assert canonical(held) == canonical(np.asarray(source.rows(path)).reshape(held.shape)), path
    for layer in trace.moe_layers:
        for expert in range(trace.num_experts):
            for tap in ("input", "gate", "up", "hidden", "output"):
                kept = source.expert_rows(layer, expert, tap)
                assert kept is not None
                if len(kept[0]):
                    held = points.operation(f"layers.{layer}.moe.experts.{expert}.{tap}", kept[0]).value
                    assert canonical(held) == canonical(kept[1]), (layer, expert, tap)


def test_fma_rounds_once() -> None:
    """Against exact rational arithmetic, where the sum of a product and a number lies next to a tie."""
    from fractions import Fraction

    random = np.random.default_rng(3)
    a, b = (random.standard_normal(2000).astype(np.float32) for _ in range(2))
    c = (random.standard_normal(2000) * 2.0 ** random.integers(-30, 30, 2000)).astype(np.float32)
    found = elementary.fma(a, b, c)
    for x, y, z, got in zip(a, b, c, found, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        near = np.float32(float(exact))
        around = [np.nextafter(near, np.float32(s), dtype=np.float32) for s in (-np.inf, np.inf)]
        best = min(abs(Fraction(float(n)) - exact) for n in (near, *around))
        assert abs(Fraction(float(got)) - exact) == best


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_rounding_to_a_format_is_that_of_numpy_and_ml_dtypes(name: str) -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    x = bits.view(np.float32)
    edges = np.float32([65504, 65519.99, 65520, 448, 464, 465, 57344, 61440, 3.3895e38, 3.4e38, 2**-25, 2**-24, 0])
    x = np.concatenate([x[np.isfinite(x)], edges, -edges, np.float32([np.inf, -np.inf, np.nan])])
    dtype = np.float16 if name == "float16" else getattr(ml_dtypes, name)
    with np.errstate(all="ignore"):
        wanted = x.astype(dtype).astype(np.float32)
    assert canonical(elementary.rounded(x, name)) == canonical(wanted)


def test_exp_meets_its_limits() -> None:
    x = np.float32([0, -np.inf, np.inf, np.nan, 88.72283, 88.72284, -103.9, -150, 1])
    assert canonical(elementary.exp(x)[:4]) == canonical(np.float32([1, 0, np.inf, np.nan]))
    assert np.isfinite(elementary.exp(x)[4]) and np.isinf(elementary.exp(x)[5])
    assert elementary.exp(x)[6] > 0 and elementary.exp(x)[7] == 0
    assert elementary.exp(x)[8] == np.float32(np.e)
