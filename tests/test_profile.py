"""lab.profile: where the time of a pass goes, what is counted, and what cannot be."""

from __future__ import annotations

import errno
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import colibri_lab as lab
from colibri_lab import _cachelab
from colibri_lab.profiling import Limits, Profile, limits, run
from colibri_lab.profiling.counters import COUNTERS
from colibri_lab.profiling.roofline import roofline_of
from colibri_lab.profiling.work import STAGES, WorkOf
from colibri_lab.testing import canonical, tiny_model

TEXT = "The engine counts its gates."
KINDS: dict[str, dict[str, Any]] = {
    "bundled": {},
    "dense layers": {"family": "qwen3_moe", "layers": 4, "dense_layers": (0, 2), "bias": True},
    "shared expert": {"family": "qwen2_moe", "dtype": "BF16"},
    "sliding window": {"family": "mixtral", "window": 5, "dtype": "F16", "kv_heads": 1},
}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> lab.Model:
    """One model of each kind of stage."""
    options = KINDS[request.param]
    return lab.open(tiny_model(tmp_path_factory.mktemp("model"), **options)) if options else lab.open()


@pytest.fixture(autouse=True)
def quick_limits(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The machine is measured where a test is about that; elsewhere a made-up one stands in."""
    if "measure" not in request.node.name:
        monkeypatch.setattr(run, "measure_limits", lambda threads, isa: Limits(2e10, 1e11, threads, isa))


def ids_of(model: lab.Model, n: int = 12) -> list[int]:
    return [7 * i % model.config.vocab_size for i in range(n)]


# ---- the observer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", ["none", "routing", "moe", "all"])
@pytest.mark.parametrize("threads", [1, 2])
def test_watching_the_stages_changes_no_byte(capture: str, threads: int) -> None:
    """At every capture and thread count the tape and the logits of a watched session are those of another."""
    tapes = []
    for watched in (False, True):
        session = lab.open().session(capture=capture, threads=threads)
        counters = _cachelab.Counters()
        stages = _cachelab.Stages(session.model.config.num_hidden_layers, True, counters)
        session._engine.observe(stages if watched else None)
        session.feed(TEXT)
        list(session.generate(3, stop_ids=()))
        assert bool(stages.take()[..., 0].any()) is watched
        tapes.append(
            {path: canonical(session.tape[path]) for path in session.tape.stored()} | {"": canonical(session.logits)}
        )
    assert tapes[0] == tapes[1]


def stages_of(model: lab.Model, layer: int) -> set[str]:
    c = model.config
    if layer < 0:
        return {"embed", "norm", "logits"}
    mixture = {"router", "dispatcher", "expert", "aggregator"} | ({"shared"} if layer in c.shared_layers else set())
    return {"attention", "residual"} | (mixture if layer in c.moe_layers else {"mlp"})


def test_every_stage_of_every_layer_is_told_once(model: lab.Model) -> None:
    """A pass that runs through calls the observer for each stage that the layer has, and for no other."""
    session = model.session(capture="none")
    stages = _cachelab.Stages(model.config.num_hidden_layers, False, None)
    session._engine.observe(stages)
    session.feed(ids_of(model), progress=False)
    calls = stages.take()[..., 0]
    for layer in range(-1, model.config.num_hidden_layers):
        assert calls[layer].tolist() == [stage in stages_of(model, layer) for stage in STAGES]
    assert stages.tile_tokens == 12


def test_a_long_pass_reads_its_weights_once_for_each_tile(tmp_path: Path) -> None:
    """700 tokens run in two tiles of at most 512: operations are those of one, weights count twice."""
    model = lab.open(tiny_model(tmp_path, config={"max_position_embeddings": 2048}))
    session = model.session(capture="none")
    stages = _cachelab.Stages(model.config.num_hidden_layers, False, None)
    session._engine.observe(stages)
    session.feed(ids_of(model, 700), progress=False)
    assert (stages.take()[0, STAGES.index("router"), 0], stages.tile_tokens) == (2, 512)
    f = lab.profile(model, ids_of(model, 700), repeats=1, progress=False)
    row = f.table[(f.table["layer"] == 0) & (f.table["phase"] == "prefill")]
    once = WorkOf(model).tile(0, 700, True, {layer: np.zeros((700, 2), np.int32) for layer in (0, 1)})[0]
    weights = model.weights["layers.0.moe.router"].nbytes + model.weights["layers.0.moe_norm"].nbytes
    router, attention = row[row["stage"] == "router"][0], row[row["stage"] == "attention"][0]
    assert (router["flops"], router["bytes"]) == tuple(once[STAGES.index("router")] + [0, weights])
    assert attention["flops"] == once[STAGES.index("attention"), 0]


def test_a_stepped_pass_is_told_expert_by_expert_and_a_fork_is_not() -> None:
    """The observer sees each expert of a stepper on its own, and stays with the session that it was given to."""
    session = lab.open().session()
    stages = _cachelab.Stages(session.model.config.num_hidden_layers, False, None)
    session._engine.observe(stages)
    stepper = session.stepper([1, 2, 3], chunk=None)
    stepper.finish()
    calls = stages.take()[..., 0]
    for layer in session.model.config.moe_layers:
        assert calls[layer, STAGES.index("expert")] == np.unique(session.tape.expert_ids(layer)).size
    fork = stepper.fork()
    fork.session.feed([4], progress=False)
    assert not stages.take()[..., 0].any()


def test_an_observer_of_the_wrong_kind_is_refused() -> None:
    """What has no observer(), or whose capsule is another, never reaches the engine."""
    engine = lab.open().session()._engine
    with pytest.raises(AttributeError):
        engine.observe(3)


# ---- the table ---------------------------------------------------------------------------------------------------


def test_the_table_has_every_stage_and_its_seconds_lie_within_the_calls(model: lab.Model) -> None:
    """Both phases have each stage of each layer; the stages of a run take no longer than the call around them."""
    f = lab.profile(model, ids_of(model), repeats=3, progress=False)
    c = model.config
    layers = range(-1, c.num_hidden_layers)
    expected = {(layer, stage) for layer in layers for stage in stages_of(model, layer)}
    for i, phase in enumerate(("prefill", "decode")):
        rows = f.table["phase"] == phase
        found = list(zip(f.table["layer"][rows].tolist(), f.table["stage"][rows].tolist(), strict=True))
        assert set(found) == expected and len(found) == len(expected)
        assert (f.repeat_seconds[:, rows].sum(axis=1) <= f.wall_seconds[:, i]).all()
    assert f.repeat_seconds.shape == (3, len(f.table)) and (f.repeat_seconds >= 0).all()
    assert np.array_equal(f.table["seconds"], np.median(f.repeat_seconds, axis=0))
    assert (f.table["fastest"] <= f.table["seconds"]).all() and (f.table["seconds"] <= f.table["slowest"]).all()


def test_a_session_lends_its_options_and_stays_as_it_is() -> None:
    """Threads, gate mode and formats are those of the session; its tokens and bytes do not change."""
    session = lab.open().session(threads=1, gate_mode="softmax", emulate="bfloat16")
    session.feed(TEXT)
    before = canonical(session.logits), session.ids
    f = lab.profile(session, TEXT, repeats=1, progress=False)
    assert f.threads == 1 and f.tokens == len(session.ids)
    assert (canonical(session.logits), session.ids) == before
    assert lab.profile(session, TEXT, threads=2, repeats=1, progress=False).threads == min(
        2, lab.open().session().threads
    )


# ---- operations and bytes ----------------------------------------------------------------------------------------


def counted(model: lab.Model, trace: lab.Trace, layer: int, stage: str) -> tuple[float, float]:
    """Operations and bytes of a stage for all tokens of a trace that kept everything: from the shapes of the weights
    that were used and of the arrays that went in and out, and from a mask of the keys.
    """
    n = len(trace.ids)
    arrays: list[NDArray[Any]] = []
    flops = 0.0

    def weight(name: str, rows: float) -> None:
        nonlocal flops
        array = model.weights[name]
        arrays.append(array)
        flops += 2 * rows * array.size if array.ndim == 2 else 0.0
        if f"{name}.bias" in model.weights:
            arrays.append(model.weights[f"{name}.bias"])
            flops += rows * arrays[-1].size

    def taps(*names: str) -> list[NDArray[Any]]:
        arrays.extend(trace[f"layers.{layer}.{name}" if layer >= 0 else name] for name in names)
        return arrays[-len(names) :]

    stream = trace["embed"]
    if stage == "attention":
        norm, q, k, _, out = taps("attn.norm", "attn.q", "attn.k", "attn.v", "attn.out")
        arrays.extend([stream, q])  # what comes in; the context, which is as large as q
        for part in "qkvo":
            weight(f"layers.{layer}.attn.{part}", n)
        arrays.append(model.weights[f"layers.{layer}.attn_norm"])
        flops += 4 * norm.size + 3 * (q.size + k.size)
        for part, rows in (("q_norm", q), ("k_norm", k)):
            if f"layers.{layer}.attn.{part}" in model.weights:
                arrays.append(model.weights[f"layers.{layer}.attn.{part}"])
                flops += 4 * rows.size
        window = model.config.windows[layer] or n
        sees = np.tri(n, dtype=bool) & ~np.tri(n, k=-window, dtype=bool)
        heads, dim = q.shape[1:]
        flops += sees.sum() * heads * (2 * dim + 1 + 4 + 2 * dim)
        arrays.append(np.zeros((2, n, dim // 2), np.float32))
        assert out.shape == stream.shape
    elif stage == "residual":
        flops = float(stream.size)
        arrays = [stream] * 3
    elif stage in ("router", "mlp"):
        arrays += [stream] * 3  # the stream, attn.out, their sum
        arrays.append(model.weights[f"layers.{layer}.moe_norm"])
        flops += 5 * stream.size
        if stage == "router":
            logits, *_ = taps("moe.router_logits", "moe.scores", "moe.expert_ids", "moe.gates", "moe.input")
            weight(f"layers.{layer}.moe.router", n)
            flops += 4 * logits.size
        else:
            taps("mlp.input", "mlp.output")
            for part in ("gate", "up", "down"):
                weight(f"layers.{layer}.mlp.{part}", n)
            hidden = np.zeros((n, model.weights[f"layers.{layer}.mlp.gate"].shape[0]), np.float32)
            arrays += [hidden] * 3
            flops += 4 * hidden.size
    elif stage == "expert":
        for expert in range(model.config.num_experts):
            name = f"layers.{layer}.moe.experts.{expert}"
            rows = trace[f"{name}.input"].shape[0]
            if rows:
                for part in ("gate", "up", "down"):
                    weight(f"{name}.{part}", rows)
                hidden = np.zeros((rows, model.weights[f"{name}.gate"].shape[0]), np.float32)
                arrays += [trace[f"{name}.input"], trace[f"{name}.output"], hidden, hidden, hidden]
                flops += 4 * hidden.size
    elif stage == "shared":
        taps("moe.input", "moe.shared.output", "moe.shared.gate")
        for part in ("shared.gate", "shared.up", "shared.down", "shared_gate"):
            weight(f"layers.{layer}.moe.{part}", n)
        hidden = np.zeros((n, model.weights[f"layers.{layer}.moe.shared.gate"].shape[0]), np.float32)
        arrays += [hidden] * 3
        flops += 4 * hidden.size + 3 * n
    elif stage == "dispatcher":
        ids, _ = taps("moe.expert_ids", "moe.input")
        offsets = np.zeros(model.config.num_experts + 1, np.int64)
        arrays += [ids, ids.astype(np.int64), offsets, np.repeat(stream, ids.shape[1], axis=0)]  # tokens, places
    elif stage == "aggregator":
        gates, routed = taps("moe.gates", "moe.routed")
        arrays += [gates.astype(np.int64), np.repeat(routed, gates.shape[1], axis=0)]
        flops = 2.0 * gates.shape[1] * routed.size
        if layer in model.config.shared_layers:
            taps("moe.shared.output", "moe.shared.gate", "moe.output")
            flops += 2 * routed.size
    elif stage == "embed":
        arrays = [stream, model.weights["embed"][:n]]
        arrays.append(np.zeros((n, model.config.head_dim), np.float32))
    elif stage == "norm":
        arrays, flops = [stream, trace["norm"], model.weights["norm"]], 4.0 * stream.size
    elif stage == "logits":
        weight("lm_head", 1)
        arrays += [stream[:1], trace["logits"][:1]]
    return flops, float(sum(array.nbytes for array in arrays))


def test_operations_and_bytes_are_those_of_an_independent_count(model: lab.Model) -> None:
    """Every stage of a prefill, from the shapes of what was used and kept, with the experts that were really chosen."""
    session = model.session(capture="all")
    session.feed(ids_of(model), progress=False)
    trace = session.trace()
    f = lab.profile(model, ids_of(model), repeats=1, progress=False)
    for row in f.table[f.table["phase"] == "prefill"]:
        expected = counted(model, trace, int(row["layer"]), str(row["stage"]))
        assert (row["flops"], row["bytes"]) == expected, (row["layer"], row["stage"])
    experts = f.table[(f.table["stage"] == "expert") & (f.table["phase"] == "prefill")]
    for row in experts:
        assert row["experts"] == np.unique(trace[f"layers.{row['layer']}.moe.expert_ids"]).size


def test_a_decoded_token_reads_the_window_behind_it_and_its_own_experts(model: lab.Model) -> None:
    """Bytes of one token at the end of many: its keys are at most the window's, its weights those of k experts."""
    c, count = model.config, WorkOf(model)

    def one(start: int, ids: list[list[int]]) -> NDArray[np.float64]:
        return count.tile(start, len(ids), True, dict.fromkeys(c.moe_layers, np.array(ids, np.int32)))

    few, many, twice = one(0, [[0, 1]]), one(40, [[0, 1]]), one(0, [[0, 1], [1, 0]])
    for layer in range(c.num_hidden_layers):
        keys = min(c.windows[layer] or 41, 41) - 1
        flops, n_bytes = (many - few)[layer, STAGES.index("attention")]
        assert n_bytes == keys * c.num_key_value_heads * c.head_dim * 4 * 2
        assert flops == keys * c.num_attention_heads * (4 * c.head_dim + 5)
    flops, n_bytes = (twice - few)[c.moe_layers[0], STAGES.index("expert")]
    assert flops == few[c.moe_layers[0], STAGES.index("expert"), 0]
    assert n_bytes == 2 * 4 * (2 * c.hidden_size + 3 * c.moe_intermediate_size)
    nobody = one(0, [[-1, -1]])[c.moe_layers[0], STAGES.index("expert")]
    assert nobody.tolist() == [0, 0]


def test_ids_of_another_model_are_refused() -> None:
    """Neither an expert that is not there nor another number of choices reaches the count."""
    model = lab.open()
    for wrong in ([[0, model.config.num_experts]], [[0, -2]], [[0]], [[0, 1], [0, 1]]):
        with pytest.raises(ValueError, match="id"):
            WorkOf(model).tile(0, 1, True, dict.fromkeys(model.config.moe_layers, np.array(wrong)))


# ---- limits and roofline -----------------------------------------------------------------------------------------


def test_the_limits_are_measured_for_the_code_path_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate of reading and one of operations; a name that is no code path is refused in a sentence."""
    monkeypatch.setattr(limits, "STREAM_BYTES", 1 << 22)
    monkeypatch.setattr(limits, "MOST_BYTES", 0)
    found = limits.measure_limits(2, lab.open().info["isa"])
    assert found.threads == 2 and found.read_bytes_per_s > 1e8 and found.flops_per_s > 1e8
    with pytest.raises(lab.ColibriError, match="cannot be measured"):
        limits.measure_limits(1, "abacus")


def test_at_least_128_mib_are_streamed_and_four_times_the_last_cache_to_measure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A larger cache asks for more, up to 1 GiB; a system that does not tell gets the least."""
    for cache, expected in ((0, 128), (-1, 128), (96 << 20, 384), (1 << 30, 1024)):
        monkeypatch.setattr(limits.os, "sysconf", lambda name, cache=cache: cache)
        assert limits._stream_bytes() == expected << 20


def test_a_share_is_the_least_time_over_the_time_taken() -> None:
    """By hand: 2 Gflop on 1 GB in half a second, where 1 GB/s and 10 Gflop/s are possible, and the other way round."""
    f = profile_of([("prefill", 0, "expert", 0.5, 2e9, 1e9), ("prefill", 0, "attention", 4.0, 2e10, 1e9)])
    read, compute = roofline_of(f.table, Limits(1e9, 1e10, 1, "scalar"))
    assert read["bound"] == "read" and read["share_of_limit"] == 2.0 and read["note"] == "served from cache"
    assert read["intensity"] == 2 and read["flops_per_s"] == 4e9 and read["limit_flops_per_s"] == 2e9
    assert compute["bound"] == "compute" and compute["share_of_limit"] == 0.5 and compute["note"] == ""
    assert compute["share_of_limit"] == compute["flops_per_s"] / compute["limit_flops_per_s"]


def profile_of(rows: list[tuple[Any, ...]], **changes: Any) -> Profile:
    """A profile of made-up rows: phase, layer, stage, seconds, operations, bytes."""
    table = np.zeros(len(rows), run.TABLE)
    for row, (phase, layer, stage, seconds, flops, n_bytes) in zip(table, rows, strict=True):
        row["phase"], row["layer"], row["stage"], row["seconds"] = phase, layer, stage, seconds
        row["flops"], row["bytes"] = flops, n_bytes
    given: dict[str, Any] = {
        "table": table,
        "limits": Limits(1e9, 1e10, 1, "scalar"),
        "counters": dict.fromkeys(COUNTERS, "not available here: a reason"),
        "faults": {"prefill": {"minor": 3.0, "major": 1.0}, "decode": {"minor": 0.0, "major": 0.0}},
        "repeat_seconds": table["seconds"][None],
        "wall_seconds": np.full((1, 2), 9.0),
        "tokens": 4,
        "decode_tokens": 8,
        "threads": 1,
        "counted_share": float("nan"),
    }
    return Profile(**(given | changes))


# ---- counters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "paranoid", "words"),
    [
        (errno.EACCES, 3, "perf_event_paranoid is 3"),
        (errno.EPERM, 4, "perf_event_paranoid is 4"),
        (errno.EPERM, 2, "forbids perf_event_open to this process"),
        (errno.ENOENT, 2, "has no such event"),
        (errno.EOPNOTSUPP, -100, "has no such event"),
        (errno.ENOSYS, -100, "this system has no perf_event_open"),
        (errno.EMFILE, 2, "too many files"),
        (errno.E2BIG, 2, "Argument list too long"),
    ],
)
def test_a_refused_counter_says_why(number: int, paranoid: int, words: str) -> None:
    """Each errno of perf_event_open in words, and the setting of the kernel where that is what refuses."""
    reason = _cachelab.counter_reason(number, paranoid)
    assert reason.startswith("not available here: ") and words in reason


def test_the_page_names_the_reasons_as_they_are_given() -> None:
    """The table of docs/profile.md has the sentences of the code."""
    page = (Path(__file__).resolve().parent.parent / "docs" / "profile.md").read_text("utf-8")
    for number, paranoid in ((errno.EACCES, 3), (errno.EPERM, 2), (errno.ENOENT, 2), (errno.ENOSYS, -100)):
        assert _cachelab.counter_reason(number, paranoid).split(" (")[0] in page


def test_a_counter_is_a_number_or_a_reason_and_never_a_made_up_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by a system that counts nothing: reasons in the dict, NaN in the table, words in the report."""

    class Refused:
        def errors(self) -> dict[str, int]:
            return dict.fromkeys(COUNTERS, errno.EACCES)

    real = _cachelab.Stages
    monkeypatch.setattr(_cachelab, "Counters", Refused)
    monkeypatch.setattr(_cachelab, "perf_event_paranoid", lambda: 3)
    monkeypatch.setattr(_cachelab, "Stages", lambda n_layers, faults, counters: real(n_layers, faults, None))
    f = lab.profile(lab.open(), TEXT, repeats=1, progress=False)
    for name in COUNTERS:
        assert f.counters[name] == "not available here: perf_event_paranoid is 3; 2 or less lets a user count"
        assert np.isnan(f.table[name]).all()
    assert "perf_event_paranoid is 3" in f.report()
    assert np.isnan(f.counted_share)


class Counting:
    """Counters that all open."""

    def errors(self) -> dict[str, int]:
        return dict.fromkeys(COUNTERS, 0)


def test_counters_are_medians_of_runs_of_their_own_and_unknown_where_they_had_no_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Events of three runs after the timed ones: 100, 200 and 900 a stage. One counter has a turn in none of them in
    one stage: NaN there, and a reason instead of a sum.
    """
    real = _cachelab.Stages

    class Stages:
        made = 0

        def __init__(self, n_layers: int, faults: bool, counters: object) -> None:
            self.real, self.counted = real(n_layers, faults, None), counters is not None
            Stages.made += self.counted  # the first run counts too, for its page faults
            self.events = (7, 100, 200, 900)[max(0, Stages.made - 1)]

        def observer(self) -> object:
            return self.real.observer()

        @property
        def tile_tokens(self) -> int:
            return self.real.tile_tokens

        def take(self) -> NDArray[Any]:
            out = self.real.take()
            if self.counted:
                out[..., 4], out[..., 5:] = 0.5, self.events
                out[0, STAGES.index("expert"), 6] = np.nan
            return out

    monkeypatch.setattr(_cachelab, "Counters", Counting)
    monkeypatch.setattr(_cachelab, "Stages", Stages)
    f = lab.profile(lab.open(), TEXT, repeats=3, progress=False)
    prefill = f.table[f.table["phase"] == "prefill"]
    assert (prefill["cycles"] == 200).all() and f.counters["cycles"] == 200 * len(prefill)
    assert (f.table["cycles"][f.table["phase"] == "decode"] == 200 / 8).all()
    unknown = np.isnan(prefill["instructions"])
    assert prefill[unknown][["layer", "stage"]].tolist() == [(0, "expert")]
    assert "had no turn" in str(f.counters["instructions"])
    assert f.counted_share == 0.5 and "scaled up" in f.report()


def test_what_this_machine_counts_is_counted_in_every_stage() -> None:
    """Where a counter opens, each row of the table has a figure of it; where not, there is a reason."""
    f = lab.profile(lab.open(), TEXT, repeats=1, progress=False)
    for name, found in f.counters.items():
        if isinstance(found, str):
            assert found.startswith("not available here: ") and np.isnan(f.table[name]).any()
        else:
            assert found > 0 and f.table[name][f.table["stage"] == "expert"].min() >= 0


# ---- report, interruption, bad input -----------------------------------------------------------------------------


def test_the_report_has_every_stage_limit_and_reason() -> None:
    """Times, shares and what binds; what a share above the limit means; counters shared by one reason on one line."""
    rows = [("prefill", 0, "expert", 0.5, 2e9, 1e9), ("decode", 0, "expert", 2e-3, 1e6, 1e6)]
    text = profile_of(rows).report()
    assert "prefill, the whole prompt: 9 s (9 s to 9 s), of it 500 ms in stages" in text
    assert "1.0 GB/s read, 10.0 GFLOP/s" in text and "4 tokens of prefill" in text
    assert "expert" in text and "200.0%  read, served from cache" in text and "50.0%  read" in text
    assert "come faster than memory could give them" in text
    assert f"{', '.join(COUNTERS)}: not available here: a reason" in text
    assert "page faults of the first prefill: 4, 1 of a disk" in text
    assert repr(profile_of(rows)) == text


def test_turns_of_the_counters_are_told() -> None:
    """Scaled figures say that they are, and how much of the time was counted."""
    rows = [("prefill", 0, "expert", 0.5, 2e9, 1e9), ("decode", 0, "expert", 2e-3, 1e6, 1e6)]
    found = {**dict.fromkeys(COUNTERS, 1e6), "llc_misses": "not available here: this CPU has none"}
    text = profile_of(rows, counters=found, counted_share=0.6).report()
    assert "cycles: 1,000,000 in prefill" in text and "60% of the time or more and is scaled up" in text
    assert "scaled up" not in profile_of(rows, counters=found, counted_share=1.0).report()


def test_ctrl_c_ends_a_profile_and_leaves_the_model_free() -> None:
    """KeyboardInterrupt comes out within the pass; the model has no users left and can be closed."""
    model = lab.open()

    def stop(done: float) -> None:
        if done > 0.3:
            signal.raise_signal(signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            lab.profile(model, TEXT, repeats=50, progress=stop)
    finally:
        signal.signal(signal.SIGINT, handler)
    model.close()


def test_progress_grows_to_its_end() -> None:
    """A function is called with fractions that never fall."""
    seen: list[float] = []
    lab.profile(lab.open(), TEXT, repeats=2, progress=seen.append)
    assert seen and seen == sorted(seen) and seen[0] >= 0 and seen[-1] <= 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"x": []}, "one or more token ids"),
        ({"x": [0.5]}, "one or more token ids"),
        ({"x": [10**6]}, "token id 1000000"),
        ({"x": TEXT, "repeats": 0}, "repeats"),
        ({"x": TEXT, "repeats": True}, "repeats"),
        ({"x": TEXT, "threads": -1}, "threads"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(given: dict[str, Any], words: str) -> None:
    """Nothing to run, ids outside the vocabulary, no repeats."""
    with pytest.raises(lab.ArgumentError, match=words):
        lab.profile(lab.open(), **given, progress=False)


def test_what_is_no_model_is_refused_in_a_sentence() -> None:
    """The nearest valid choice is named."""
    wrong: Any = Path("model")
    with pytest.raises(lab.ArgumentError, match="session or a model"):
        lab.profile(wrong, TEXT)


def test_a_session_that_another_thread_uses_is_not_disturbed() -> None:
    """The observer of a busy session cannot be changed."""
    session = lab.open().session()
    refused: list[BaseException] = []

    def change(done: float) -> None:
        def from_outside() -> None:
            try:
                session._engine.observe(None)
            except lab.BusyError as error:
                refused.append(error)

        outside = threading.Thread(target=from_outside)
        outside.start()
        outside.join()

    session.feed(TEXT, progress=change)
    assert refused
