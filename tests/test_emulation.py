"""Sessions that emulate a number format: every value and every partial sum is the one NumPy and ml_dtypes give."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import read_checkpoint, write_checkpoint
from digest import canonical
from digest import taps as rows_of
from emulated import Again, rounded
from goldens import REFERENCE

import colibri_lab as lab
from colibri_lab._engine import core
from colibri_lab.emulation import FORMATS, POINTS

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


def digest(session) -> dict[str, bytes]:
    """The bytes of all taps, NaN as one value and packed rows in token order."""
    return {path: canonical(np.ascontiguousarray(values)) for path, values in rows_of(session).items()}


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
    taps = taps_of(run(model, emulation, IDS[:4] if model.path == BUNDLED else IDS))
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


# ---- the same bytes however it is run --------------------------------------------------------------------------------

NARROW = lab.Emulation("float16", "bfloat16", flush_subnormals=True, saturate="layers.*.middle")


@pytest.mark.parametrize("name", ["bundled", "qwen2_moe_step"])
def test_threads_and_chunks_leave_no_mark(name):
    """One thread and two, at once and token by token, captured whole or not, and stage by stage."""
    model = lab.open(MODELS[name])
    session = run(model, NARROW, threads=1)
    whole, logits = digest(session), canonical(session.logits)
    assert digest(run(model, NARROW, threads=2)) == whole
    assert digest(run(model, NARROW, chunk=1, threads=2)) == whole
    assert digest(run(model, NARROW, chunk=3)) == whole
    stepped = model.session(capture=EVERYTHING, max_tokens=32, emulate=NARROW)
    stepped.stepper(IDS, chunk=None).finish()
    assert digest(stepped) == whole
    for capture in ("none", "routing", "moe"):
        session = run(model, NARROW, capture=capture)
        assert {path: whole[path] for path in digest(session)} == digest(session)
        assert canonical(session.logits) == logits


def test_every_code_path_gives_the_same_bytes():
    """Whatever this CPU can run, in a process of its own each: the rounding is integer work, the sums are fused."""
    plan = {"path": str(BUNDLED), "capture": EVERYTHING, "threads": 2, "stepped": False, "emulate": NARROW.record()}
    plan["sessions"] = [{"ids": [IDS[:4], IDS[4:5]], "generate": 0, "seed": 0}]
    results = {}
    for isa in lab.open().info["isa_available"]:
        environment = {**os.environ, "COLIBRI_ISA": isa}
        script = Path(__file__).parent / "support" / "digest.py"
        done = subprocess.run(
            [sys.executable, script], input=json.dumps(plan), env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result["isa"] == isa
        results[isa] = result["sessions"]
    assert len(results) >= 2
    assert all(result == results["scalar"] for result in results.values())


def test_I1_the_rounding_leaves_the_floating_point_mode_alone(bundled):
    """A subnormal product has the same value before and after a run that flushes subnormals."""
    small = np.float32(2.0**-126)
    before = (small * np.float32(0.25)).tobytes()
    run(bundled, lab.Emulation("float16", "float16", flush_subnormals=True), threads=2)
    assert (small * np.float32(0.25)).tobytes() == before and small * np.float32(0.25) > 0


# ---- flags and patterns ----------------------------------------------------------------------------------------------


def test_flushing_makes_subnormal_results_zero_of_their_sign(bundled):
    """Of the embeddings, and of everything behind them: no value below the smallest normal number but zero."""
    tiny = np.finfo(np.float16).smallest_normal
    kept = taps_of(run(bundled, "float16"))
    flushed = taps_of(run(bundled, lab.Emulation("float16", flush_subnormals=True)))
    embed = kept["embed"]
    small = (np.abs(embed) < tiny) & (embed != 0)
    scores = [values for path, values in kept.items() if path.endswith(".attn.weights")]
    assert small.any() or any(((np.abs(values) < tiny) & (values != 0)).any() for values in scores)
    expected = np.where(np.abs(embed) < tiny, np.copysign(np.float32(0), embed), embed)
    assert canonical(expected) == canonical(flushed["embed"])
    for path, values in flushed.items():
        if values.dtype == np.float32:
            assert not ((np.abs(values) < tiny) & (values != 0)).any(), path


@pytest.fixture(scope="module")
def loud(tmp_path_factory):
    """The mixtral of the fixtures with experts in its last layer so loud that float16 overflows."""
    config, tensors = read_checkpoint(REFERENCE / "mixtral")
    last = config["num_hidden_layers"] - 1
    for name, values in tensors.items():
        if f"layers.{last}." in name and ".experts." in name and name.endswith("w2.weight"):
            tensors[name] = (values.astype(np.float32) * 2e6).astype(np.float32)
    return lab.open(write_checkpoint(tmp_path_factory.mktemp("loud"), config, tensors))


@pytest.mark.parametrize("emulate", ["float16", "float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_overflow_is_where_numpy_says(loud, emulate):
    """Inf in the outputs of the loud experts (NaN in float8_e4m3fn), NaN behind them: each tap bit for bit."""
    emulation, last = lab.Emulation(emulate), loud.config.num_hidden_layers - 1
    taps = taps_of(run(loud, emulation))
    with np.errstate(invalid="ignore", over="ignore"):
        for path, expected, recorded in Again(loud, taps, emulation).points():
            assert canonical(np.ascontiguousarray(expected)) == canonical(np.ascontiguousarray(recorded)), path
    loud_rows = taps[f"layers.{last}.moe.dispatch.output"]
    assert np.isinf(loud_rows).any() == (emulate in ("float16", "float8_e5m2"))
    assert np.isnan(loud_rows).any() == (emulate == "float8_e4m3fn")
    assert np.isnan(taps["logits"]).any() == (emulate != "bfloat16")
    assert np.isfinite(run(loud, None).logits).all()


def test_the_watch_counts_what_was_rounded(loud):
    """An overflow of float16 alone is seen at its point, and "stop" ends the pass there; the plain run goes through."""
    last = loud.config.num_hidden_layers - 1
    session = run(loud, "float16", watch="watch")
    rows = session.tape[f"layers.{last}.moe.dispatch.output"]
    found = next(row for row in session.watch.table if row["point"] == f"layers.{last}.moe.experts.*.output")
    assert found["n_inf"] == np.isinf(rows).sum() > 0 and found["n_nan"] == 0
    assert found["absmax"] == np.abs(rows[np.isfinite(rows)]).max() <= 65504
    assert session.watch.first["point"] == found["point"]
    with pytest.raises(lab.NonFiniteError, match=rf"layers\.{last}\.moe\.experts\.\d\.output"):
        run(loud, "float16", watch="stop")
    assert run(loud, None, watch="stop").ids == IDS


def test_saturation_takes_the_largest_number_instead(loud):
    """At the points that are named alone: the same run then has finite logits."""
    last = loud.config.num_hidden_layers - 1
    output = f"layers.{last}.moe.dispatch.output"
    saturating = lab.Emulation(
        "float16", saturate=("layers.*.moe.experts.*.output", "layers.*.moe.*", "layers.*.output")
    )
    wild, tame = (taps_of(run(loud, emulate)) for emulate in ("float16", saturating))
    assert np.isinf(wild[output]).any() and np.isnan(wild["logits"]).any()
    expected = np.clip(wild[output], np.float32(-65504), np.float32(65504))
    assert canonical(expected) == canonical(np.ascontiguousarray(tame[output]))
    assert np.isfinite(tame["logits"]).all()


def test_a_pattern_changes_only_what_lies_behind_it(bundled):
    """One point of one layer: every tap before it has the plain bytes, itself and what reads it has others."""
    plain = digest(run(bundled, None))
    changed = digest(run(bundled, lab.Emulation({"layers.2.moe.router_logits": "bfloat16"})))
    different = [path for path in plain if plain[path] != changed[path]]
    assert different[0] == "layers.2.moe.router_logits"
    assert not [path for path in different if path.startswith(("embed", "layers.0.", "layers.1.", "layers.2.attn."))]
    assert "layers.3.attn.norm" in different and "logits" in different
    sums = digest(run(bundled, lab.Emulation(accumulation={"layers.4.attn.context": "float16"})))
    different = [path for path in plain if plain[path] != sums[path]]
    assert different[0] == "layers.4.attn.out"


def test_the_points_are_those_of_the_engine():
    """Names and order of the table that patterns are laid over."""
    assert tuple(kind.path.replace("{l}", "*").replace("{e}", "*") for kind in core.point_kinds) == POINTS


# ---- told and kept ---------------------------------------------------------------------------------------------------


def test_the_trace_tells_the_emulation(bundled, tmp_path):
    """meta["emulation"] gives it back, also from a file and a recording; meta["arithmetic"] names the storage."""
    session = run(bundled, NARROW, capture="routing", to=tmp_path / "run.safetensors")
    assert session.emulation == NARROW and "emulating float16, sums in bfloat16" in repr(session)
    session.trace().save(tmp_path / "saved.safetensors")
    for trace in (
        session.trace(),
        *map(lab.load_trace, (tmp_path / "run.safetensors", tmp_path / "saved.safetensors")),
    ):
        assert lab.Emulation.from_record(trace.meta["emulation"]) == NARROW
        assert trace.meta["arithmetic"] == "float16"
    plain = run(bundled, None, capture="routing")
    assert "emulation" not in plain.trace().meta and plain.trace().meta["arithmetic"] == "float32"
    assert "emulating" not in repr(plain)


def test_a_recording_and_a_fork_go_on_in_the_same_format(bundled, tmp_path):
    """Both have the bytes of a session that ran through."""
    whole = digest(run(bundled, NARROW))
    recorded = run(bundled, NARROW, to=tmp_path / "run.safetensors")
    assert digest(recorded) == whole
    stepper = run(bundled, NARROW, IDS[:4]).stepper(IDS[4:], chunk=None)
    stepper.step("layer")
    fork = stepper.fork()
    fork.finish()
    assert digest(fork.session) == whole


def test_forced_experts_weigh_as_those_that_were_chosen(bundled):
    """Forcing the very experts that the router chose changes no bit: gates come from the rounded scores."""
    plain = run(bundled, "bfloat16", IDS[:1])
    stepper = bundled.session(capture=EVERYTHING, max_tokens=32, emulate="bfloat16").stepper(IDS[:1])
    stepper.force(0, plain.tape["layers.0.moe.expert_ids"][0].tolist())
    stepper.finish()
    assert digest(stepper.session) == digest(plain)


@pytest.mark.parametrize(
    "emulate, sentence",
    [
        ("float12", "float12.*did you mean .*'float16'"),
        (32, "emulate takes a format"),
        (lab.Emulation({"layers.17.middle": "float16"}), r"'layers\.17\.middle' names no point"),
        (lab.Emulation({"layers.*.moe.shared.gate": "float16"}), "names no point"),
    ],
)
def test_what_cannot_be_emulated_is_refused_before_memory_is_taken(bundled, emulate, sentence):
    """By name, with the nearest choice."""
    with pytest.raises(lab.ArgumentError, match=sentence):
        bundled.session(emulate=emulate, max_tokens=8)


def test_the_engine_refuses_a_table_that_does_not_fit(bundled):
    """One entry for each point of each layer, and formats that exist."""
    table = lab.Emulation("float16").table(bundled.config)
    with pytest.raises(lab.ArgumentError, match="the emulation has 185 entries; this model has 222, 37 points"):
        core.Session(bundled._engine, ["none"], 8, 1, None, emulation=table[1:])
    table[2, POINTS.index("layers.*.middle"), 3] = 9
    with pytest.raises(lab.ArgumentError, match=r'"layers\.\{l\}\.middle" of layer 2: format 9 does not exist.*0 to 4'):
        core.Session(bundled._engine, ["none"], 8, 1, None, emulation=table)


def test_a_slow_run_can_be_stopped(bundled):
    """The loop of rounded sums asks between outputs; the session stays as it was."""
    session = bundled.session(capture="none", max_tokens=64, emulate=lab.Emulation(accumulation="float16"))

    class Stop(Exception):
        pass

    def stop(done: float) -> None:
        raise Stop

    with pytest.raises(Stop):
        session.feed(IDS, progress=stop)
    assert session.ids == []
    session.feed(IDS[:2])
