"""Traces of the engine: the same names, slices and bytes live, as a Trace, and from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab._core import tap_kinds
from colibri_lab.testing import canonical, tiny_model
from colibri_lab.trace import CAPTURE_LEVELS, EXPERT_TAPS, check_values


@pytest.fixture(params=[("mixtral", {}), ("qwen2_moe", {"dense_layers": [0]})], ids=["mixtral", "qwen2_moe"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> lab.Session:
    """Three passes of 17, 1 and 12 tokens, everything captured."""
    family, options = request.param
    session = lab.open(tiny_model(tmp_path / "m", family, **options)).session(capture=["all", "layers.*.attn.weights"])
    for start, stop in ((3, 20), (20, 21), (21, 33)):
        session.feed(list(range(start, stop)))
    return session


def same(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and canonical(a) == canonical(b)


def test_a_trace_shares_the_engines_memory_and_is_sound(session: lab.Session) -> None:
    trace = session.trace()
    check_values(trace)
    assert trace.passes == [(0, 17), (17, 18), (18, 30)] and trace.edits == []
    assert all(np.shares_memory(trace[path], session.tape[path]) for path in trace if trace[path].size)


def test_every_path_of_the_tape_resolves_in_a_file_to_the_same_bytes(session: lab.Session, tmp_path: Path) -> None:
    session.trace().save(tmp_path / "run.safetensors")
    back = lab.load_trace(tmp_path / "run.safetensors")
    paths = list(session.tape)
    assert any(".experts." in path for path in paths)
    for path in paths:
        assert same(back[path], session.tape[path]), path
    assert back.ids == session.ids and back.meta == session.trace().meta
    assert back.meta["model_identity"].startswith("sampled-sha256:")


def test_joined_expert_rows_are_those_of_the_tape(session: lab.Session) -> None:
    trace = session.trace()
    for layer in trace.moe_layers:
        for expert in range(trace.num_experts):
            ours, theirs = trace.expert_rows(layer, expert), session.tape.expert_rows(layer, expert)
            assert ours.keys() == theirs.keys() == set(EXPERT_TAPS)
            assert all(same(ours[tap], theirs[tap]) for tap in ours)


def test_what_a_trace_says_to_capture_is_what_the_engine_says() -> None:
    """The levels in trace.py, which must work without the engine, are those of the engine's own table."""
    engine = {kind.path: kind.level for kind in tap_kinds if kind.scope != "expert"}
    named = {path: path if level == "named" else level for path, level in engine.items()}
    known = CAPTURE_LEVELS.items()
    recorded = {path: level for path, level in known if path in engine or not path.endswith("moe.load")}
    assert named == recorded  # counts without tokens come from other programs alone
    experts = {kind.path.rpartition(".")[2] for kind in tap_kinds if kind.scope == "expert"}
    assert experts == set(EXPERT_TAPS)
