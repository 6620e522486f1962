"""Faults of the engine's own arithmetic, on a build that has them; what the search must say of each."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fault_case import Tally
from fault_engine import build

from colibri_lab import _core

SEED = int(os.environ.get("COLIBRI_FAULT_SEED", "7"))


@pytest.fixture(scope="module")
def faulty_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("engine"))


def hooked(engine: Path, count: int) -> Tally:
    """`count` cases of each fault at each point, run on the faulty engine in a process of its own."""
    script = Path(__file__).parent / "faults" / "fault_hooked.py"
    paths = os.pathsep.join([str(script.parents[2]), str(script.parent), str(script.parents[1] / "support")])
    done = subprocess.run(
        [sys.executable, str(script), str(engine), str(SEED), str(count)],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    out = Tally()
    for line in map(json.loads, done.stdout.splitlines()):
        out.add(line["fault"], line["what"], line["name"], line["place"], line["kind"])
    return out


def test_faults_of_the_arithmetic_are_found_where_they_happen(faulty_engine: Path) -> None:
    """NaN and Inf that no definition gives, rows that were not written, masked rows, scales: at every point."""
    hooked(faulty_engine, 5).check(390)


@pytest.mark.soak
def test_faults_of_the_arithmetic_in_a_larger_draw(faulty_engine: Path) -> None:
    """Twenty of each at every point (make soak)."""
    hooked(faulty_engine, 20).check(1500)


def test_the_engine_in_use_knows_no_faults() -> None:
    """The hook exists in the build of these tests alone."""
    assert not hasattr(ctypes.CDLL(_core.__file__), "colibri_fault_set")
