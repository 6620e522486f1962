"""The benchmark suite's own logic: what is compared with what, what counts, what is counted. No time is asserted."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import bench
import contenders
import goals
import harness
import limits
import machine
import ml_dtypes
import models
import numpy as np
import plot
import programs
import pytest
import report
import serve
from harness import Cell, Probe, Sample
from matplotlib.figure import Figure
from measures import decode, instructions, prefill, steady, threads
from suite import Plan

import colibri_lab as lab

SUITE = Path(bench.__file__)


def samples(*values: float, void: tuple[int, ...] = ()) -> list[Sample]:
    return [Sample(value, void=number in void) for number, value in enumerate(values)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


# ---- samples -----------------------------------------------------------------------------------------------------


def recorder(log: list[str], name: str) -> Callable[[], Sample]:
    def take() -> Sample:
        log.append(name)
        return Sample(float(len(log)))

    return take


def test_rounds_run_forwards_and_backwards() -> None:
    """One sample of each per round, every second round in reverse, so that a steady drift cancels."""
    log: list[str] = []
    taken = harness.interleave({name: recorder(log, name) for name in "abc"}, rounds=3)
    assert "".join(log) == "abccbaabc"
    assert [s.value for s in taken["b"]] == [2, 5, 8]


def test_every_sample_lies_between_two_probes() -> None:
    """The probe after one sample is the probe before the next; the limit comes from their mean."""
    figures = iter([10.0, 11.0, 12.0, 13.0, 14.0])
    taken = harness.interleave(
        {"a": lambda: Sample(1.0), "b": lambda: Sample(1.0)},
        2,
        Probe(lambda: next(figures)),
        lambda _, probed: 2 * probed,
    )
    assert [s.probes for s in taken["a"]] == [(10.0, 11.0), (13.0, 14.0)]
    assert [s.limit for s in taken["b"]] == [23.0, 25.0]
    assert not any(s.void for s in taken["a"])  # without a bound no sample is void


def test_a_sample_between_two_different_ceilings_is_taken_again() -> None:
    """More than 10 % apart: void and repeated; the repetition counts."""
    figures = iter([100.0, 115.0, 114.0])
    values = iter([1.0, 2.0])
    taken = harness.interleave({"a": lambda: Sample(next(values))}, 1, Probe(lambda: next(figures), void_above=0.10))
    assert [(s.value, s.void, s.attempts) for s in taken["a"]] == [(2.0, False, 2)]


def test_repetitions_are_bounded_and_the_last_stays_void() -> None:
    """A restless machine gives void samples, not an endless run."""
    figures = iter([100.0 if n % 2 else 200.0 for n in range(100)])
    taken = harness.interleave({"a": lambda: Sample(1.0)}, 2, Probe(lambda: next(figures), void_above=0.10, retries=3))
    assert [(s.void, s.attempts) for s in taken["a"]] == [(True, 4), (True, 4)]


@pytest.mark.parametrize(("before", "after", "void"), [(100, 109.9, False), (100, 110.1, True), (110.1, 100, True)])
def test_the_void_rule_has_no_direction(before: float, after: float, void: bool) -> None:
    """A ceiling that falls is as suspect as one that rises."""
    figures = iter([before, after])
    taken = harness.interleave({"a": lambda: Sample(1.0)}, 1, Probe(lambda: next(figures), void_above=0.10, retries=0))
    assert taken["a"][0].void is void


def test_void_samples_enter_no_figure() -> None:
    """Neither the median nor a ratio nor a share of the limit; they are counted."""
    a = samples(1, 100, 3, void=(1,))
    b = samples(2, 2, 50, void=(2,))
    assert harness.summary(a) == harness.Summary(2, 1, 3, 2, 1)
    assert harness.paired_ratio(a, b).pairs == 1 and harness.paired_ratio(a, b).median == 0.5
    assert math.isnan(harness.summary(samples(1, void=(0,))).median)


def test_a_ratio_is_taken_within_rounds() -> None:
    """A machine that slows down tenfold between rounds leaves the ratio as it is."""
    speed = [1.0, 0.1, 5.0, 0.7]
    ratio = harness.paired_ratio(samples(*(3 * s for s in speed)), samples(*(2 * s for s in speed)))
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((1.5, 1.5, 1.5))


def test_the_interval_of_a_ratio_is_that_of_its_median() -> None:
    """Against plain resampling in Python: same median, both ends close, same answer each time."""
    import random

    values = [0.8, 0.9, 1.0, 1.1, 1.5, 1.7, 0.7]
    ratio = harness.bootstrap(values)
    draw = random.Random(7)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(20_000))
    assert ratio.median == statistics.median(values)
    assert ratio.low == pytest.approx(medians[500], abs=0.05) and ratio.high == pytest.approx(medians[-500], abs=0.05)
    assert harness.bootstrap(values) == ratio


# ---- models ------------------------------------------------------------------------------------------------------


def test_a_random_model_opens_and_has_the_sizes_it_says(cache: Path) -> None:
    """The engine reads what the suite writes."""
    model = lab.open(models.checkpoint(models.TINY, "f32", cache))
    assert model.info["parameters"] == models.TINY.parameters
    assert (model.config.num_experts, model.config.top_k) == (models.TINY.experts, models.TINY.top_k)
    assert np.isfinite(model.session().feed([1, 2, 3]).logits).all()


def test_bf16_is_the_rounding_of_the_same_values(cache: Path) -> None:
    """Two dtypes of one model are one network."""
    f32 = lab.open(models.checkpoint(models.TINY, "f32", cache)).weights
    bf16 = lab.open(models.checkpoint(models.TINY, "bf16", cache)).weights
    name = "layers.1.moe.experts.2.down"
    assert f32[name].std() > 0
    assert np.array_equal(f32[name].astype(ml_dtypes.bfloat16), bf16[name])


def test_shards_hold_every_tensor_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model larger than a shard is split, and its index names all of it."""
    monkeypatch.setattr(models, "SHARD_BYTES", 100_000)
    models.write_checkpoint(models.TINY, "f32", tmp_path / "m")
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert len(set(index["weight_map"].values())) > 3
    assert list(index["weight_map"]) == [name for name, _ in models.tensors(models.TINY)]
    assert lab.open(tmp_path / "m").info["parameters"] == models.TINY.parameters


def test_a_model_that_is_there_is_used_again(tmp_path: Path) -> None:
    """The second call makes nothing; a broken first one leaves nothing behind."""
    made = []

    def make(partial: Path) -> None:
        made.append(partial)
        partial.write_text("whole", encoding="utf-8")
        if len(made) == 1:
            raise OSError("the disk is full")

    target = tmp_path / "thing"
    with pytest.raises(OSError, match="disk is full"):
        models.made(target, make)
    assert list(tmp_path.iterdir()) == []
    assert models.made(target, make) == models.made(target, make) == target
    assert len(made) == 2 and [p.name for p in tmp_path.iterdir()] == ["thing"]


def test_the_large_model_exceeds_four_gigabytes() -> None:
    assert models.LARGE.parameters * 2 >= 4e9


# ---- what a token costs ------------------------------------------------------------------------------------------


@pytest.fixture
def ours(cache: Path) -> Iterator[contenders.Contender]:
    with contenders.Contender("colibri", cache) as engine:
        engine.ask("open", path=str(models.checkpoint(models.TINY, "f32", cache)), threads=1, max_tokens=200)
        yield engine


def test_bytes_of_a_token_are_its_weights_and_its_context(ours: contenders.Contender, cache: Path) -> None:
    """Every matrix and norm of the layers, the chosen experts alone, the logits; K and V of each earlier position."""
    t = models.TINY
    elements = sum(
        int(np.prod(shape)) * (t.top_k / t.experts if ".experts." in name else 1)
        for name, shape in models.tensors(t)
        if "embed" not in name
    )
    with contenders.Contender("limits", cache) as machine:
        machine.ask("map", steps=ours.ask("call", method="layout"))
        assert machine.ask("token_bytes") == 4 * elements
        assert machine.ask("read_gbs", threads=2, seconds=0.0) > 0
    kv_bytes = ours.ask("configure", threads=1, max_tokens=200)["kv_bytes"]
    assert kv_bytes == t.layers * 2 * t.kv_heads * (t.hidden // t.heads) * 4
    assert decode.token_bytes(1000, 8, 512) - decode.token_bytes(1000, 8, 0) == 8 * 512


def test_operations_of_a_prompt_are_counted_one_by_one(ours: contenders.Contender) -> None:
    """Against a loop over tensors, tokens and keys."""
    t, tokens = models.TINY, 5
    matrices = {name: shape for name, shape in models.tensors(t) if len(shape) == 2}
    count = 2 * t.vocabulary * t.hidden
    for token in range(tokens):
        for name, (rows, columns) in matrices.items():
            if name.startswith("model.layers."):
                count += 2 * rows * columns * (t.top_k / t.experts if ".experts." in name else 1)
        for _ in range(token + 1):
            count += t.layers * t.heads * (t.hidden // t.heads) * 2 * 2  # a product with k, a sum with v
    assert prefill.operations(ours.ask("call", method="arithmetic"), tokens) == count


class CountingPeer:
    """An engine that only counts."""

    vocabulary, kv_bytes = 100, 1

    def __init__(self, cache: Path) -> None:
        self.fed: list[int] = []

    def open(self, path: Path, threads: int, max_tokens: int) -> None:
        pass

    def configure(self, threads: int, max_tokens: int, capture: str) -> None:
        pass

    def clear(self) -> None:
        self.fed.append(0)

    def feed(self, ids: list[int]) -> None:
        self.fed.append(len(ids))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> serve.Server:
    module: Any = ModuleType("peers.counting")
    module.Peer = CountingPeer
    monkeypatch.setitem(sys.modules, "peers.counting", module)
    made = serve.Server("counting", tmp_path)
    made.open("nowhere", threads=1, max_tokens=1000)
    return made


def contexts(fed: list[int]) -> list[int]:
    """The length of the context before each decoded token."""
    length, found = 0, []
    for n in fed:
        if n == 1:
            found.append(length)
        length = 0 if n == 0 else length + n
    return found


def test_a_decode_sample_stays_near_its_context(server: serve.Server) -> None:
    """Samples go on where the last one ended, and the context is made anew before it has drifted too far."""
    answers = [server.decode(context=512, seconds=0.0) for _ in range(60)]
    fed = server._peer.fed
    assert fed[:3] == [0, 512, 1]
    assert fed.count(512) > 1
    assert all(512 <= length < 512 + 64 for length in contexts(fed))
    assert all(512 <= a["mean_context"] < 512 + 64 for a in answers)


def test_a_prompt_in_chunks_feeds_the_same_tokens(server: serve.Server) -> None:
    """One by one or at once, from nothing each time."""
    server.prefill(tokens=5, seconds=0.0)
    server.prefill(tokens=5, seconds=0.0, chunk=2)
    assert server._peer.fed == [0, 5, 0, 2, 2, 1]


# ---- engines -----------------------------------------------------------------------------------------------------


def test_a_missing_peer_is_named_and_left_out(cache: Path) -> None:
    """What is not installed is a sentence, not an error of the run."""
    versions, missing = contenders.available(["colibri", "imaginary"], cache)
    assert list(versions) == ["colibri"] and list(missing) == ["imaginary"]
    assert "ModuleNotFoundError" in missing["imaginary"]


def test_a_failing_engine_says_why_and_can_be_asked_again(ours: contenders.Contender) -> None:
    """An error is an answer; the process lives on."""
    with pytest.raises(contenders.ContenderError, match="CapacityError") as caught:
        ours.ask("prefill", tokens=500, seconds=0.0)
    assert caught.value.name == "colibri"
    assert ours.ask("prefill", tokens=3, seconds=0.0)["prompts"] == 1


# ---- threads, instructions, a long run ---------------------------------------------------------------------------


@pytest.fixture
def small_plan(cache: Path) -> Plan:
    return Plan(
        cache, threads=(1,), rounds=2, seconds=0.001, prompts=(8,), contexts=(0,), peers=(), limits=False,
        scaling_base=(models.TINY, models.TINY), steady_seconds=0.0,
    )  # fmt: skip


def test_an_empty_task_of_threads_takes_its_median_batch(small_plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample per round, in microseconds, between the fastest and the slowest batch of that round (a difference of
    two times, so the fastest may lie below 0).
    """
    needed = [
        programs.ROOT / "csrc" / "utils" / f"{name}.c" for name in ("threads", "status", "cpu_quota", "system_file")
    ]

    def with_threads_alone(name: str, cache: Path) -> Path:
        include = f"-I{programs.ROOT / 'csrc' / 'include'}"
        return limits.compile_c(limits.SOURCES / f"{name}.c", cache, *programs.DEFINES, include, *map(str, needed))

    monkeypatch.setattr(threads, "on_engine", with_threads_alone)
    (cell,) = threads.alone(small_plan)
    assert len(cell.samples["colibri"]) == 2
    assert all(s.extra["fastest"] <= s.value <= s.extra["slowest"] for s in cell.samples["colibri"])


def test_two_threads_are_compared_with_one_beside_a_busy_process(small_plan: Plan) -> None:
    """Both speeds of each round, for a prompt and for written tokens."""
    cells = list(threads.loaded(small_plan))
    assert [cell.point["work"] for cell in cells] == ["prefill", "decode"]
    for cell in cells:
        assert list(cell.samples) == ["2 threads", "1 thread"]
        assert all(len(taken) == 2 and all(s.value > 0 for s in taken) for taken in cell.samples.values())


def test_the_busy_process_outlives_neither_the_measure_nor_the_suite() -> None:
    """It runs inside the block alone, and ends by itself when its parent is another."""
    with threads.busy_process() as process:
        assert process.poll() is None
    assert process.returncode is not None
    subprocess.run([sys.executable, "-c", threads.BUSY, "-1"], timeout=60, check=True)


@pytest.mark.parametrize(("flags", "asks"), [("-O2", True), ("-O2 -DCOLIBRI_WITHOUT_CAPTURE", False)])
def test_stages_without_capture_never_ask_for_it(flags: str, asks: bool, request: pytest.FixtureRequest) -> None:
    """The object that the count of instructions is compared with has no call of session_keeps; the engine's has."""
    folder = f"{programs.FOLDER}/tests-{'with' if asks else 'without'}-capture"
    stages = programs.engine_file("core/stages.o", folder, f"CFLAGS={flags}")
    request.addfinalizer(lambda: shutil.rmtree(programs.ROOT / folder))
    assert (b"session_keeps" in stages.read_bytes()) is asks


def test_instructions_are_those_that_valgrind_collected(cache: Path, tmp_path: Path) -> None:
    """The number comes from its report, the code path from the program; without a report its words are the reason."""
    tool = tmp_path / "valgrind"
    tool.write_text("#!/bin/sh\necho avx2\necho '==1== Collected : 6667376' >&2\n", encoding="utf-8")
    tool.chmod(0o755)
    assert instructions.counted(str(tool), tool, cache, 1) == (6667376, "avx2")
    tool.write_text("#!/bin/sh\necho 'unhandled instruction' >&2\n", encoding="utf-8")
    with pytest.raises(OSError, match="unhandled instruction"):
        instructions.counted(str(tool), tool, cache, 1)


def test_no_valgrind_is_a_reason_to_leave_it_out(small_plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is built for it then."""
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="valgrind is not installed"):
        next(instructions.run(small_plan))


def test_a_long_run_is_cut_into_tenths(small_plan: Plan) -> None:
    """Ten speeds, and the memory at the start and after each."""
    speed, memory = steady.run(small_plan)
    assert len(speed.samples["colibri"]) == 10 and all(s.value > 0 for s in speed.samples["colibri"])
    assert len(memory.samples["colibri"]) == 11
    assert all(s.value > 1 for s in memory.samples["colibri"]) or sys.platform != "linux"


# ---- report ------------------------------------------------------------------------------------------------------


def a_run(*cells: Cell) -> report.Run:
    machine = {"cpu": "Abacus", "cpus": 1, "memory_bytes": 2**30, "system": "X", "python": "3", "date": "2000-01-01"}
    arguments = {"rounds": 3, "seconds": 1.0}
    return report.Run(
        {**machine, "load_at_start": 0.0}, arguments, {"colibri": {"a": "1"}}, {"llama": "no wheel"}, [], list(cells)
    )


def decode_cell(ours: list[Sample], peer: list[Sample]) -> Cell:
    point = {"model": "coarse", "dtype": "f32", "threads": 1, "context": 0}
    for sample in (*ours, *peer):
        sample.limit, sample.probes = 10.0, (19.0, 21.0)
    return Cell("decode", "tokens/s", point, {"colibri": ours, "llama": peer})


def test_a_lost_cell_is_printed_like_a_won_one() -> None:
    """Ratios below one and goals not met stand in the same places."""
    page = report.markdown(a_run(decode_cell(samples(4, 4, 4), samples(8, 8, 8))))
    assert "| coarse | f32 | 1 | 0 | 4 (4–4) | 8 (8–8) | 0.50 [0.50, 0.50] | 0.4 | 0.8 | 20 (20–20) |" in page
    assert (
        "| decode ≥ 1.0× llama.cpp | 0.500 | model coarse, dtype f32, threads 1, context 0 | not met (0 of 1 cells) |"
        in page
    )
    assert "Left out: llama.cpp (no wheel)" in page


def test_a_void_cell_says_void() -> None:
    """No figure stands where no sample counts."""
    page = report.markdown(a_run(decode_cell(samples(4, 4, void=(0, 1)), samples(8, 8, void=(1,)))))
    assert "| void | 8 (8–8), 1 void | – | – | 0.8 |" in page
    assert "| decode ≥ 0.80 of the read ceiling | – | – | void |" in page


def test_a_run_is_the_same_after_its_file(tmp_path: Path) -> None:
    """The JSON holds every sample: the report of the file is the report of the run."""
    run = a_run(decode_cell(samples(4, 5, 6), samples(8, 9, 7, void=(1,))))
    run.write_json(tmp_path / "run.json")
    assert report.markdown(report.Run.read_json(tmp_path / "run.json")) == report.markdown(run)
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_a_goal_is_met_when_its_worst_cell_is() -> None:
    """Every cell counts; a model that fits into a cache does not."""
    goal = next(g for g in goals.GOALS if g.sentence.startswith("decode ≥ 1.0×"))
    won, lost = decode_cell(samples(9, 9), samples(8, 8)), decode_cell(samples(7, 7), samples(8, 8))
    small = decode_cell(samples(1, 1), samples(8, 8))
    small.point = {**small.point, "model": "tiny"}
    assert goals.judge(goal, [won, small]).word == "met"
    assert goals.judge(goal, [won, lost]).word == "not met (1 of 2 cells)"
    assert goals.judge(goal, []).word == "not measured"


@pytest.mark.parametrize(
    ("measure", "taken", "figure", "word"),
    [
        ("steady", {"colibri": (10.0, 5.0, 9.5)}, 0.95, "met"),
        ("steady", {"colibri": (10.0, 12.0, 8.5)}, 0.85, "not met (0 of 1 cells)"),
        ("steady memory", {"colibri": (100.0, 150.0, 160.0, 155.0)}, 10.0, "met"),
        ("steady memory", {"colibri": (100.0, 100.0, 120.0)}, 20.0, "not met (0 of 1 cells)"),
        ("loaded", {"2 threads": (9.0, 8.0), "1 thread": (10.0, 8.0)}, 0.95, "met"),
        ("barrier", {"colibri": (0.8, 0.9)}, 0.85, "not met (0 of 1 cells)"),
        ("instructions", {"none": (1004.0,), "without capture": (1000.0,)}, 0.004, "met"),
    ],
)
def test_goals_of_threads_instructions_and_a_long_run(
    measure: str, taken: dict[str, tuple[float, ...]], figure: float, word: str
) -> None:
    """What grows before the first tenth is over is free; counts of the smallest model count."""
    point: dict[str, Any] = {"model": "coarse", "threads": 2}
    if measure == "instructions":
        point = {"model": models.TINY.name}
    cell = Cell(measure, "", point, {name: samples(*values) for name, values in taken.items()})
    (verdict,) = [found for goal in goals.GOALS if (found := goals.judge(goal, [cell])).cells]
    assert verdict.worst == pytest.approx(figure) and verdict.word == word


def test_a_checkpoint_that_fits_in_a_cache_meets_no_goal() -> None:
    """Its speeds are shown under a warning and judged by none."""
    run = a_run(decode_cell(samples(9, 9), samples(8, 8)))
    assert "Not from memory" not in report.markdown(run) and "| decode ≥ 1.0× llama.cpp | 1.125 |" in report.goals(run)
    run.in_cache = [{"model": "coarse", "dtype": "f32", "weight_bytes": 8 << 20, "least_bytes": 128 << 20}]
    assert "coarse f32 has 8 MiB of weights, less than 128 MiB" in report.markdown(run)
    assert "| decode ≥ 1.0× llama.cpp | – | – | not measured |" in report.goals(run)


def test_the_last_cache_is_the_largest_that_the_system_names(tmp_path: Path) -> None:
    """A cache above 128 MiB raises the least size of a model; an unknown one does not lower it."""
    for number, size in enumerate(("32K", "512K", "256M")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(f"{size}\n")
    assert machine.last_cache_bytes(tmp_path) == 256 << 20
    assert machine.last_cache_bytes(tmp_path / "nowhere") == 0 and machine.least_weights() >= 128 << 20


def test_pairs_counts_and_tenths_have_their_tables() -> None:
    """One row for each cell, with what it comes to."""
    point = {"model": "coarse", "dtype": "bf16", "threads": 2, "seconds": 60, "work": "decode", "tokens": 64}
    taken = samples(9, 8, 7)
    for sample in taken:
        sample.limit = 10.0
    page = report.markdown(
        a_run(
            Cell("loaded", "tokens/s", point, {"2 threads": samples(9, 8), "1 thread": samples(10, 8)}),
            Cell("instructions", "", {**point, "isa": "x"}, {"none": samples(1002), "without capture": samples(1000)}),
            Cell("barrier", "µs", point, {"colibri": samples(0.5, 0.6)}, higher_is_better=False),
            Cell("steady", "tokens/s", point, {"colibri": taken}),
            Cell("steady memory", "MiB", point, {"colibri": samples(20, 22, 21)}, higher_is_better=False),
        )
    )
    assert "| coarse | bf16 | decode | 8.5 (8–9) | 9 (8–10) | 0.95 [0.90, 1.00] |" in page
    assert "| coarse | bf16 | decode | 64 | x | 1002 | 1000 | +0.200 % |" in page
    assert "| barrier, µs | 2 | 0.55 (0.5–0.6) |" in page
    assert "| steady, tokens/s | coarse | bf16 | 2 | 60 | 9 | 8 | 7 | 9, 8, 7 | 0.9, 0.8, 0.7 |" in page
    assert "| steady memory, MiB | coarse | bf16 | 2 | 60 | 20 | 22 | 21 | 20, 22, 21 | – |" in page


def test_the_legend_of_the_capture_levels_covers_no_interval() -> None:
    """It lies above the highest of them, wherever that one stands."""
    levels = {"none": samples(4, 4, 4), "routing": samples(4, 3, 4), "moe": samples(3, 5, 4), "all": samples(3, 2, 4)}
    works = ("prefill", "decode")
    cells = [Cell("capture", "s", {"model": "coarse", "dtype": "f32", "work": work}, levels) for work in works]
    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    plot.looking(axes, cells)
    figure.draw_without_rendering()
    legend = axes.get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()] == ["routing", "moe", "all"]
    highest = max(path[:, 1].max() for bars in axes.collections for path in bars.get_segments())
    assert legend.get_window_extent().y0 > axes.transData.transform((0, highest))[1]


def test_a_straight_line_is_found() -> None:
    """The fit of a curve against numbers made from a line."""
    curve = Cell("scaling", "ms", {}, {str(x): samples(3 + 2 * x) for x in (1, 2, 4, 8)})
    assert report.line_fit(curve) == pytest.approx((3, 2, 1))


# ---- the whole ---------------------------------------------------------------------------------------------------


def suite(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SUITE), *arguments], capture_output=True, text=True, env=os.environ)


def test_a_small_run_from_models_to_pages(cache: Path, tmp_path: Path) -> None:
    """One command makes its model, measures, and leaves three files that agree."""
    small = [
        "--models",
        "tiny",
        "--dtypes",
        "bf16",
        "--threads",
        "1",
        "--peers",
        "",
        "--prompts",
        "8",
        "--contexts",
        "0",
    ]
    done = suite(*small, "--samples", "2", "--seconds", "0.001", "--measures", "load,prefill,decode,batching,capture",
                 "--cache", str(cache), "--results", str(tmp_path))  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {path.suffix: path for path in tmp_path.iterdir()}
    assert set(found) == {".json", ".md", ".png"}
    whole = json.loads(found[".json"].read_text(encoding="utf-8"))
    assert {"load", "memory peak", "prefill", "decode", "batching", "capture"} <= {c["measure"] for c in whole["cells"]}
    for cell in whole["cells"]:
        assert all(len(taken) == 2 and all(s["value"] > 0 for s in taken) for taken in cell["samples"].values())
    page = found[".md"].read_text(encoding="utf-8")
    assert whole["machine"]["cpu"] in page
    (small_one,) = whole["in_cache"]
    assert small_one["model"] == "tiny" and 0 < small_one["weight_bytes"] < 128 << 20 <= small_one["least_bytes"]
    assert "warning: tiny bf16 has" in done.stderr and "say nothing about memory speed" in done.stderr
    assert "**Not from memory**: tiny bf16 has" in page


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--models", "huge"], "'huge' is none of coarse, fine"),
        (["--measures", "speed"], "'speed' is none of load, prefill"),
        (["--threads", "0"], "must be positive"),
        (["--contexts", "-1"], "a context has 0 tokens or more"),
    ],
)
def test_a_wrong_argument_is_answered_with_the_valid_ones(arguments: list[str], sentence: str) -> None:
    done = suite(*arguments)
    assert done.returncode == 2 and sentence in done.stderr


def test_the_readme_shows_the_newest_recorded_run() -> None:
    """Its table is made from the samples that are recorded beside it, and its picture is theirs."""
    root = SUITE.parent.parent
    results = (root / "benchmarks" / "results").glob("*.json")
    recorded = max(path for path in results if not path.name.startswith(("claims-", "cache-")))
    page = (root / "README.md").read_text(encoding="utf-8")
    shown = page.split("<!-- benchmarks: in short -->")[1].split("<!-- end -->")[0]
    assert shown.strip() == report.in_short(report.Run.read_json(recorded)).strip()
    picture = recorded.with_suffix(".png").relative_to(root).as_posix()
    assert f"]({picture})" in page
    assert (root / picture).is_file()
