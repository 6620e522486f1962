"""Faults planted in weights, ids and configurations; what the search must say of each.

The expectations come from the place of the fault, a clean run and NumPy (tests/faults), never from the search.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from fault_case import Case, Expected, Tally, judge
from fault_draw import draw
from fault_models import NAMES, patient
from fault_weights import poke
from goldens import REFERENCE

import colibri_lab as lab

SEED = int(os.environ.get("COLIBRI_FAULT_SEED", "6"))
COUNT = 5  # cases of each fault in each stage


def outcome(case: Case) -> tuple[object, object]:
    session = (case.patient or patient(case.model)).run(case.changes, case.emulate, **case.options)
    return judge(case, lab.nan.find(session))


def tally(cases: Iterable[Case]) -> Tally:
    out = Tally()
    for case in cases:
        out.add(case.fault, case.what, case.name, *outcome(case))
    return out


def test_faults_of_weights_ids_and_configurations_are_found_where_they_were_planted(tmp_path: Path) -> None:
    """Path, layer, stage, expert, token and index of every case, the kind of 99 in 100."""
    tally(draw(SEED, COUNT, tmp_path)).check(1000)


def test_B4_a_bad_expert_that_only_a_later_token_uses_leaves_earlier_prompts_clean() -> None:
    """Nothing is found in a prompt that never meets the expert; in one that does, expert, row and token in one call."""
    for name in NAMES:
        p = patient(name)
        layer, ids = p.clean().moe_layers[-1], p.clean()[f"layers.{p.clean().moe_layers[-1]}.moe.expert_ids"]
        late = [(int(e), int(np.flatnonzero((ids == e).any(1))[0])) for e in np.unique(ids)]
        expert, token = max(late, key=lambda pair: pair[1])
        weight = f"layers.{layer}.moe.experts.{expert}.gate"
        array = p.weight(weight)
        poke(array, (3, 2), "weight Inf")
        model = p.model.with_weights({weight: array})
        if token > 0:
            early = model.session(capture="all", max_tokens=8, threads=1)
            early.feed(p.ids[:token])
            assert lab.nan.find(early) is None
        found = lab.nan.find(p.run({weight: array}))
        origin = found.origin
        assert (origin.layer, origin.expert, origin.token, origin.index) == (layer, expert, token, 3)
        assert origin.kind == "weight value" and origin.weight.name == weight and origin.weight.index == (3, 2)


def test_faults_that_are_never_met_are_no_alarm() -> None:
    """Experts that no token uses, embeddings of ids that are not there."""
    for name in NAMES:
        p, changes = patient(name), {}
        trace = p.clean()
        for layer in trace.moe_layers:
            used = set(np.unique(trace[f"layers.{layer}.moe.expert_ids"]).tolist())
            for e in set(range(trace.num_experts)) - used:
                changes[f"layers.{layer}.moe.experts.{e}.down"] = array = p.weight(
                    f"layers.{layer}.moe.experts.{e}.down"
                )
                array[:] = np.nan
        if not p.tied:
            changes["embed"] = array = p.weight("embed")
            array[[i for i in range(len(array)) if i not in p.ids]] = np.nan
        assert changes and lab.nan.find(p.run(changes)) is None, name


def test_two_faults_at_once_are_listed_apart() -> None:
    """Two experts of one layer, and one of a layer with a row of the head: two independent origins, in order."""
    for name in NAMES:
        p, trace = patient(name), patient(name).clean()
        layer = trace.moe_layers[-1]
        ids = trace[f"layers.{layer}.moe.expert_ids"]
        first, second = sorted({int(e) for e in ids.ravel()})[:2]
        changes, expected = {}, []
        for e, row in ((first, 1), (second, 2)):
            weight = f"layers.{layer}.moe.experts.{e}.up"
            changes[weight] = p.weight(weight)
            poke(changes[weight], (row, 0), "weight NaN")
            tokens = np.flatnonzero((ids == e).any(1))
            expected.append(
                Expected(
                    weight, layer, "expert", int(tokens[0]), (row,), frozenset({"weight value"}), e, (weight, (row, 0))
                )
            )
        case = Case("two faults", "experts.up", name, f"layer {layer}", changes, tuple(expected))
        assert outcome(case) == ({}, {}), case.name
        found = lab.nan.find(p.run(changes))
        assert [(o.expert, o.kind) for o in found.origins] == [(first, "weight value"), (second, "weight value")]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("mixtral", "rms_norm_eps", float("nan")), ("mixtral", "rms_norm_eps", -1e-5),
        ("mixtral", "rms_norm_eps", 0.0), ("mixtral", "rms_norm_eps", 1e400),
        ("olmoe", "clip_qkv", float("nan")), ("mixtral", "rope_theta", 0.0), ("mixtral", "rope_theta", float("nan")),
        ("mixtral", "rope_theta", -1.0), ("mixtral", "rope_theta", 1e400),
    ],
)  # fmt: skip
def test_a_configuration_that_makes_no_sense_is_refused_and_never_computed(
    tmp_path: Path, name: str, key: str, value: float
) -> None:
    """NaN, infinite, zero and negative scales in config.json: what open() refuses needs no search."""
    config = json.loads((REFERENCE / name / "config.json").read_text())
    if key.startswith("rope"):
        config["rope_parameters"][key] = value
    else:
        config[key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((REFERENCE / name / "model.safetensors").read_bytes())
    with pytest.raises(lab.ColibriError):
        lab.open(tmp_path)


def test_B3_memory_full_of_NaN_changes_nothing() -> None:
    """A session whose every buffer held NaN gives, once it is reset, the bytes of a fresh one."""
    for name in NAMES:
        p = patient(name)
        embed = p.weight("embed")
        bad = next(i for i in range(len(embed)) if i not in p.ids)
        embed[bad] = np.nan
        model = p.model.with_weights({"embed": embed})
        runs = []
        for dirty in (True, False):
            session = model.session(capture=["all", "layers.*.attn.weights"], max_tokens=8, threads=1)
            if dirty:
                session.feed([bad] * 8)
                assert np.isnan(session.logits).all()
                session.reset()
            session.feed(p.ids)
            trace = session.trace()
            runs.append({path: np.array(trace[path]).tobytes() for path in trace})
            assert (lab.nan.find(session) is None) or p.tied  # tied: the head's own row is bad too
        assert runs[0] == runs[1], name


def test_500_clean_runs_raise_no_alarm() -> None:
    """Models, random ids, captures, emulated formats in which nothing overflows."""
    random = np.random.default_rng(SEED)
    captures = (["all", "layers.*.attn.weights"], "all", "moe", "routing", "none")
    alarms = []
    for number in range(500):
        p = patient(NAMES[number % len(NAMES)])
        ids = random.integers(0, int(p.config.vocab_size), int(random.integers(1, 9))).tolist()
        options = {"emulate": "bfloat16"} if number % 7 == 3 else {}
        session = p.model.session(capture=captures[number % len(captures)], max_tokens=8, threads=1, **options)
        session.feed(ids)
        if lab.nan.find(session) is not None:
            alarms.append((p.name, ids, captures[number % len(captures)], options))
    assert not alarms, alarms[:5]


@pytest.mark.soak
def test_a_larger_draw_of_faults(tmp_path: Path) -> None:
    """Another seed and many more cases (make soak)."""
    tally(draw(SEED + 1, 10 * COUNT, tmp_path)).check(5000)
