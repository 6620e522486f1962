"""What importing does to a process: little, and nothing to its numbers."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab._engine import core

ROOT = Path(__file__).parents[1]


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_loads_no_heavy_library() -> None:
    """Neither torch, matplotlib, a widget library nor even the engine; running a model adds none of them."""
    code = """
import sys, time
start = time.perf_counter()
import colibri_lab as lab
print(f"import {time.perf_counter() - start:.3f} s", file=sys.stderr)
never = {"torch", "transformers", "matplotlib", "ipywidgets", "anywidget", "IPython", "traitlets"}
heavy = never | {"tqdm", "tokenizers", "jinja2"}
assert not [name for name in heavy if name in sys.modules]
assert "colibri_lab._core" not in sys.modules
session = lab.open().session(max_tokens=8)
session.feed([1, 2])
list(session.generate(2))
session.trace()
print([name for name in never if name in sys.modules])
"""
    assert run(code).strip() == "[]"


def test_every_public_name_is_there() -> None:
    """`__all__` is explicit, sorted, and all that dir() lists, dunders apart; an unknown name is an AttributeError."""
    assert lab.__all__ == sorted(lab.__all__, key=str)
    assert [name for name in dir(lab) if not name.startswith("__")] == lab.__all__ and "__version__" in dir(lab)
    for name in ("open", "Model", "Session", "Pass", "Tape", "Token", "Trace", "load_trace", "routing", "testing"):
        assert getattr(lab, name) is getattr(lab, name)
    with pytest.raises(AttributeError, match="no attribute 'opne'"):
        lab.opne  # noqa: B018


def test_a_missing_engine_says_how_to_build_it_and_traces_work_without() -> None:
    """Blocking the compiled module: lab.open raises ImportError with the command; an analysis still runs."""
    code = """
import sys
sys.modules["colibri_lab._core"] = None
import colibri_lab as lab
trace = lab.testing.synthetic_trace(layers=2, experts=4, top_k=1, tokens=5)
print(lab.routing.load(trace).shape)
try:
    lab.open
except ImportError as error:
    print(error)
"""
    out = run(code)
    assert "(2, 4)" in out and "pip install" in out and "make lab" in out


def test_versions_agree() -> None:
    """pyproject, package and engine tell one version."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert lab.__version__ == core.__version__ == declared


def test_I1_the_floating_point_mode_stays_as_it_is() -> None:
    """A subnormal product has the same value before the import, after it, after a run, and in a new thread."""
    code = """
import sys, threading
small = 2.2250738585072014e-308
def product():
    return (small * float("0.25")).hex()
out = [product()]
import colibri_lab as lab
lab.open
import colibri_lab._core
out.append(product())
session = lab.open().session(capture="all", max_tokens=16, threads=2)
session.feed([1, 2, 3])
out.append(product())
thread = threading.Thread(target=lambda: out.append(product()))
thread.start(); thread.join()
import numpy as np
out.append((np.float64(small) * np.float64(0.25)).hex())
print(*out)
"""
    values = run(code).split()
    assert len(values) == 5 and set(values) == {(2.2250738585072014e-308 * 0.25).hex()} and float.fromhex(values[0]) > 0


BITS = np.array(
    [0x7FC00000, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00000, 0x00000001, 0x807FFFFF, 0, 0x3F800000], np.uint32
)


def test_I2_non_finite_values_are_counted_by_their_bits() -> None:
    """The built library's own counter: exact on quiet and signalling NaN, both infinities and subnormals."""
    assert core.census(BITS.view(np.float32)) == (3, 2, 2, 0)
    assert core.census(BITS.view(np.float32)[5:]) == (0, 0, 2, -1)
    assert core.census(BITS.view(np.float32)[::-1]) == (3, 2, 2, 4)
    assert core.census(np.zeros((0, 3), np.float32)) == (0, 0, 0, -1)
    half = np.array([0x7E00, 0x7C00, 0xFC01, 0x0001, 0x3C00], np.uint16)
    assert core.census(half.view(np.float16)) == (2, 1, 1, 0)
    brain = np.array([0x3F80, 0x7FC0, 0xFF80, 0x0001, 0x7F81], np.uint16)
    assert core.census(brain.view(ml_dtypes.bfloat16)) == (2, 1, 1, 1)
    with pytest.raises(TypeError, match="int64"):
        core.census(np.arange(3))


def test_I2_census_agrees_with_numpy_on_any_layout() -> None:
    """Transposed, strided and large arrays, against a count by bit tests in NumPy."""
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, (37, 53, 8), np.uint64).astype(np.uint32)
    bits[rng.random(bits.shape) < 0.2] |= 0x7F800000
    for array in (bits, bits.transpose(2, 0, 1), bits[::3, 1::2, ::-1]):
        magnitude = np.ascontiguousarray(array) & 0x7FFFFFFF
        nan, inf = magnitude > 0x7F800000, magnitude == 0x7F800000
        subnormal = (magnitude > 0) & (magnitude < 0x00800000)
        bad = np.flatnonzero((nan | inf).ravel())
        assert core.census(array.view(np.float32)) == (
            nan.sum(),
            inf.sum(),
            subnormal.sum(),
            bad[0] if len(bad) else -1,
        )
