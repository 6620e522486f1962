"""Sessions that emulate a number format: every value and every partial sum is the one NumPy and ml_dtypes give."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from digest import canonical
from emulated import Again, rounded
from goldens import REFERENCE

import colibri_lab as lab
from colibri_lab._engine import core
from colibri_lab.emulation import FORMATS

EVERYTHING = ["all", "layers.*.attn.weights"]
BUNDLED = Path(lab.__file__).parent / "bundled" / "tiny-colibri"
MODELS = {"bundled": BUNDLED} | {name: REFERENCE / name for name in ("qwen2_moe_step", "olmoe", "qwen3_moe")}
IDS = [5, 17, 3, 200, 31, 9, 77]


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return lab.open(MODELS[request.param])


@pytest.fixture(scope="module")
def bundled():
    return lab.open()


def run(model, emulate, ids=IDS, chunk=None, capture=EVERYTHING, **options):
    session = model.session(capture=capture, max_tokens=32, emulate=emulate, **options)
    for start in range(0, len(ids), chunk or len(ids)):
        session.feed(ids[start : start + (chunk or len(ids))])
    return session


def taps_of(session) -> dict[str, np.ndarray]:
    return {"ids": np.array(session.ids)} | {path: session.tape[path] for path in session.tape}


def digest(session) -> dict[str, str]:
    """Hashes of all taps, those of packed rows apart, whose order follows the passes."""
    paths = [path for path in session.tape if ".dispatch." not in path and ".experts." not in path]
    return {path: hashlib.sha256(canonical(np.ascontiguousarray(session.tape[path]))).hexdigest() for path in paths}


# ---- the kernel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
def test_rounding_is_that_of_numpy_and_ml_dtypes(kind):
    """All 65,536 upper halves of float32 with lower halves around every halfway point, bit for bit but for NaN."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (upper | lower).view(np.float32)
        found = core.rounded(values, FORMATS.index(kind), False, False)
        assert canonical(found) == canonical(rounded(values, kind))


def test_e4m3fn_has_no_infinity():
    """From 464 (a tie, to the even 448) on NaN takes its place, as in ml_dtypes; float16 overflows from 65520 on."""
    e4m3 = core.rounded(
        np.array([448, 464, 464.1, np.inf, -480], np.float32), FORMATS.index("float8_e4m3fn"), False, False
    )
    assert e4m3[:2].tolist() == [448, 448] and np.isnan(e4m3[2:]).all()
    f16 = core.rounded(np.array([65519, 65520, -65520], np.float32), FORMATS.index("float16"), False, False)
    assert f16.tolist() == [65504, np.inf, -np.inf]


# ---- a forward pass, point by point ----------------------------------------------------------------------------------

CASES = {
    "float16": lab.Emulation("float16"),
    "bfloat16": lab.Emulation("bfloat16"),
    "sums in float16": lab.Emulation("float16", "float16"),
    "sums in bfloat16": lab.Emulation("bfloat16", "bfloat16"),
    "mixed": lab.Emulation(
        {
            "*": "bfloat16",
            "layers.*.moe.scores": "float16",
            "layers.*.mi*": "float32",
            "layers.1.*.output": "float8_e5m2",
        },
        {"layers.*.attn.scores": "float16", "layers.*.moe.routed": "bfloat16"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_tap_is_what_numpy_computes_from_the_recorded_inputs(model, case):
    """Bit for bit: each operation redone in the engine's order of sums, then rounded by astype."""
    emulation = CASES[case]
    taps = taps_of(run(model, emulation))
    seen = 0
    for path, expected, recorded in Again(model, taps, emulation).points():
        assert expected.shape == recorded.shape, path
        assert canonical(expected) == canonical(recorded), (path, np.abs(expected - recorded).max())
        seen += 1
    assert seen > 15 * model.config.num_hidden_layers


def test_every_recorded_value_is_a_number_of_the_format(model):
    """Rounding once more changes nothing, in the KV cache too; it did change something."""
    taps, plain = taps_of(run(model, "bfloat16")), taps_of(run(model, None))
    for path, values in taps.items():
        if values.dtype == np.float32:
            assert canonical(rounded(values, "bfloat16")) == canonical(np.ascontiguousarray(values)), path
    assert (taps["layers.0.attn.k"] != plain["layers.0.attn.k"]).any()


def test_float32_without_flags_gives_the_plain_bytes(model):
    """Emulating what is there anyway, also as sums, changes no bit."""
    plain = digest(run(model, None))
    assert digest(run(model, "float32")) == plain
    assert digest(run(model, lab.Emulation(accumulation="float32"))) == plain
