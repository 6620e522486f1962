"""Runs with a budget of experts, held against plain runs, the simulator, and what the kernel says of the pages."""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cache_live
import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab import cache
from colibri_lab.cache import expert_pages
from colibri_lab.cache.budget import Budget
from colibri_lab.errors import ArgumentError, UnsupportedError
from colibri_lab.testing import synthetic_trace, tiny_model

E, K, LAYERS = 8, 2, 2
PROMPT = [5, 41, 17, 3, 60, 22, 9, 30, 14, 51]
NEW = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lab.Model]:
    """Experts of 96 KiB in three tensors each, some twenty pages."""
    folder = tiny_model(tmp_path_factory.mktemp("live"), experts=E, top_k=K, layers=LAYERS, hidden=128, expert_width=64)
    with lab.open(folder) as opened:
        yield opened


def live(model: lab.Model, *options: Any, **more: Any) -> cache.LiveRun:
    more = {"new_tokens": NEW, "progress": False, **more}
    if "static" in options:
        more["profile"] = profile(model)
    return cache.live(model, PROMPT, *options, **more)


def profile(model: lab.Model) -> lab.Trace:
    session = model.session(max_tokens=20)
    session.feed([7, 7, 33, 50, 2, 19, 44])
    return session.trace()


def plain(model: lab.Model, count: int = NEW) -> lab.Session:
    session = model.session(max_tokens=len(PROMPT) + NEW)
    session.feed(PROMPT)
    list(session.generate(count, stop_ids=()))
    return session


def resident(model: lab.Model) -> np.ndarray:
    """(Lm, E) share of the whole pages between the first and the last byte of each tensor of an expert, by mincore."""
    libc = ctypes.CDLL(None, use_errno=True)
    out = np.zeros((LAYERS, E))
    for layer, expert in np.ndindex(LAYERS, E):
        flags: list[int] = []
        for part in ("gate", "up", "down"):
            weight = model.weights[f"layers.{layer}.moe.experts.{expert}.{part}"]
            start = -(-weight.ctypes.data // 4096) * 4096
            count = (weight.ctypes.data + weight.nbytes - start) // 4096
            found = (ctypes.c_ubyte * count)()
            assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(count * 4096), found) == 0
            flags += [flag & 1 for flag in found]
        out[layer, expert] = np.mean(flags)
    return out


def held(run: cache.LiveRun, capacity: int) -> list[set[int]]:
    """Who a budget by layer of an LRU holds at the end, from the trace alone."""
    out = []
    for layer in run.trace.moe_layers:
        order: list[int] = []
        for start, stop in run.trace.passes:
            members = list(dict.fromkeys(run.trace[f"layers.{layer}.moe.expert_ids"][start:stop].ravel().tolist()))
            for expert in members:
                if expert in order:
                    order.remove(expert)
                elif len(order) == capacity:
                    others = [e for e in order if e not in members]
                    if not others:
                        continue
                    order.remove(others[0])
                order.append(expert)
        out.append(set(order))
    return out


def cache_all(model: lab.Model) -> None:
    """Reads every weight."""
    for name in model.weights:
        model.weights.float32(name)


def locked_bytes() -> str:
    return next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmLck"))


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="not available here: pages are dropped on Linux alone")

# ---- the simulator, and a run without a budget ---------------------------------------------------------------------


@on_linux
@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "static"])
def test_the_simulator_replays_a_live_run_exactly(model: lab.Model, policy: str, scope: str) -> None:
    """Hits, misses and bytes of every layer, prefill and decode apart, at capacities from k to more than there are."""
    for capacity in (2, 3, 5, 8) if scope == "layer" else (2, 4, 7, 11, 16):
        run = live(model, capacity, policy, scope)
        for mine, theirs in ((run.prefill, run.simulation.prefill), (run.decode, run.simulation.decode)):
            for name in ("requests", "hits", "misses", "bytes_read"):
                assert getattr(mine, name).tolist() == getattr(theirs, name).tolist(), (capacity, name)
        assert run.agrees and "replays this run exactly" in run.report()
        assert run.requests.sum() == run.hits.sum() + run.misses.sum() > 0


@on_linux
@pytest.mark.parametrize(
    ("capacity", "policy", "scope"), [(2, "lru", "layer"), (5, "lfu", "global"), (8, "fifo", "layer")]
)
def test_L1_logits_and_tokens_are_those_of_a_run_without_a_budget(
    model: lab.Model, capacity: int, policy: str, scope: str
) -> None:
    """Byte for byte, also where one prefill needs more experts than fit."""
    run, other = live(model, capacity, policy, scope), plain(model)
    assert run.ids == other.ids
    assert run.logits.tobytes() == other.logits.tobytes()
    assert all(np.asarray(run.trace[path]).tobytes() == np.asarray(other.tape[path]).tobytes() for path in run.trace)


@on_linux
def test_prefill_members_without_room_are_read_and_not_kept(model: lab.Model) -> None:
    """With room for two, ten tokens that use more experts read each of them once."""
    run = live(model, 2, new_tokens=0)
    used = [len(np.unique(run.trace[f"layers.{layer}.moe.expert_ids"])) for layer in run.trace.moe_layers]
    assert min(used) > 2
    assert run.prefill.misses.tolist() == run.prefill.requests.tolist() == used
    assert run.passes["kind"].tolist() == ["prefill"] and not run.decode.requests.any()


@on_linux
def test_a_prompt_in_passes_of_one_token_is_decoded(model: lab.Model) -> None:
    """chunk=1 makes every pass a decode pass, with k requests in each layer."""
    run = live(model, 4, chunk=1, new_tokens=2)
    assert run.passes["kind"].tolist() == ["decode"] * (len(PROMPT) + 2)
    assert run.requests.tolist() == [K * (len(PROMPT) + 2)] * LAYERS and run.agrees
    assert live(model, 4, chunk=4, new_tokens=0).passes["stop"].tolist() == [4, 8, 10]


@on_linux
def test_with_room_for_all_only_first_uses_miss(model: lab.Model) -> None:
    """Each expert is read once, and nothing is dropped."""
    run = live(model, E + 3)
    used = [len(np.unique(run.trace[f"layers.{layer}.moe.expert_ids"])) for layer in run.trace.moe_layers]
    assert run.misses.tolist() == used
    assert not run.passes["drop_seconds"].any()


# ---- pages ---------------------------------------------------------------------------------------------------------


@on_linux
def test_every_expert_is_cold_at_the_start_and_the_budget_alone_is_in_memory_at_the_end(model: lab.Model) -> None:
    """By mincore, asked here: what the budget holds is in, every whole page of the others is out."""
    cache_all(model)
    run = live(model, 3)
    if not run.cold:  # a file system that keeps its pages: the run must say so
        assert "cold" in run.cold_sentence or "memory" in run.cold_sentence
        return
    share = resident(model)
    for row, experts in enumerate(held(run, 3)):
        assert set(np.flatnonzero(share[row] == 1)) == experts
        assert set(np.flatnonzero(share[row] == 0)) == set(range(E)) - experts
    assert run.cold_sentence in run.report()


@on_linux
def test_a_file_that_another_mapping_holds_is_said_to_be_warm(model: lab.Model) -> None:
    """Pages that somebody else has mapped do not go; the run says so and its counts are the same."""
    with lab.open(model.path) as other:
        cache_all(other)
        run = live(model, 3)
        assert not run.cold and "did not let go of 16 of 16 experts" in run.cold_sentence
        assert run.cold_sentence in run.report() and "use a copy of the checkpoint" in run.cold_sentence
        assert "tokens/s decoding (not of cold reads" in run.report()
    assert run.agrees


@on_linux
def test_bytes_are_those_of_the_experts_read(model: lab.Model) -> None:
    """Three float32 matrices of 64 · 128 values for each miss, in one request."""
    run = live(model, 3)
    assert run.bytes_read.tolist() == (run.misses * 3 * 64 * 128 * 4).tolist()
    assert run.passes["bytes_read"].sum() == run.bytes_read.sum()
    assert run.request_bytes == 3 * 64 * 128 * 4
    assert (run.expert_bytes == 3 * 64 * 128 * 4).all() and run.expert_bytes.shape == (LAYERS, E)


@on_linux
def test_an_expert_in_several_files_is_read_from_each(tmp_path: Path) -> None:
    """Its matrices lie apart, so a request is one matrix."""
    folder = tiny_model(tmp_path, experts=4, top_k=2, hidden=128, expert_width=64, sharded=True)
    with lab.open(folder) as opened:
        run = cache.live(opened, [1, 2, 3], 2, new_tokens=3, progress=False)
        assert run.request_bytes == 64 * 128 * 4 and (run.expert_bytes == 3 * run.request_bytes).all()
        assert run.agrees


@on_linux
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mixtral", {"fused": True}),
        ("qwen2_moe", {"dtype": "BF16"}),
        ("qwen3_moe", {"dense_layers": (0, 2), "layers": 4, "sharded": True, "dtype": "F16"}),
        ("olmoe", {"tied": True, "fused": True, "dtype": "BF16"}),
    ],
)
def test_every_family_and_layout_runs_in_a_budget(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    """Stacked experts, shared experts, dense layers between, several files: replayed, and the bytes of a plain run."""
    with lab.open(tiny_model(tmp_path, family, experts=E, hidden=128, expert_width=64, **options)) as opened:
        run, other = live(opened, 3), plain(opened)
        assert run.agrees and run.ids == other.ids and run.logits.tobytes() == other.logits.tobytes()


@on_linux
def test_large_experts_are_read_and_dropped_in_parts(model: lab.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut where pages are whole on both sides, so that nothing stays behind at a cut."""
    monkeypatch.setattr(expert_pages, "_LARGEST", 1 << 16)
    cache_all(model)
    run = live(model, 3)
    assert run.request_bytes <= 1 << 16 and run.agrees
    if not run.cold:  # a file system that keeps its pages: the run must say so
        assert "cold" in run.cold_sentence or "memory" in run.cold_sentence
        return
    share = resident(model)
    for row, experts in enumerate(held(run, 3)):
        assert set(np.flatnonzero(share[row] > 0)) == experts


@on_linux
def test_experts_smaller_than_a_page_are_counted_and_not_called_cold(tmp_path: Path) -> None:
    """They share their pages and cannot be dropped: no run calls them cold, and no rate is made up from them."""
    with lab.open(tiny_model(tmp_path, hidden=16, expert_width=8)) as small:
        run = cache.live(small, [1, 2, 3], 2, new_tokens=3, progress=False)
        assert run.agrees and not run.cold and "No expert fills a page of its own" in run.report()
        with pytest.raises(UnsupportedError, match="no cold reads to measure"):
            cache.measure_machine(small, progress=False)


@on_linux
def test_a_text_is_run_through_the_models_tokenizer() -> None:
    """The bundled model has one: ids and texts are those of a session."""
    with lab.open() as bundled:
        run = cache.live(bundled, "A lonely", bundled.config.top_k, new_tokens=3, progress=False)
        session = bundled.session(max_tokens=20)
        session.feed("A lonely")
        list(session.generate(3, stop_ids=()))
        assert run.ids == session.ids and run.texts == session.texts and run.agrees


# ---- interrupts ----------------------------------------------------------------------------------------------------


@on_linux
def test_an_interrupt_leaves_model_and_pages_usable(model: lab.Model) -> None:
    """No more than the budget is in memory, nothing is locked, and the next run has its bytes."""

    def stop(done: float) -> None:
        if done > 0.8:
            raise KeyboardInterrupt

    locked = locked_bytes()
    with pytest.raises(KeyboardInterrupt):
        live(model, 3, progress=stop)
    assert locked_bytes() == locked
    if (resident(model) < 1).any():  # else this file system keeps all in memory
        assert ((resident(model) > 0).sum(axis=1) <= 3).all()
    assert live(model, 3).logits.tobytes() == plain(model).logits.tobytes()


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capacity": 1}, "this model chooses 2"),
        ({"capacity": 2.5}, "capacity is a whole number of experts, from 2 (top_k) to 8"),
        ({"policy": "belady"}, "follows 'lru', 'fifo', 'lfu', 'static', not 'belady'"),
        ({"policy": "clock"}, "lab.cache.simulate knows more"),
        ({"policy": "static"}, "give it as profile="),
        ({"scope": "all"}, "per 'layer' or 'global'"),
        ({"new_tokens": -1}, "new_tokens is a whole number"),
        ({"chunk": 0}, "chunk is the number of tokens"),
        ({"x": "text"}, "has no tokenizer.json"),
        ({"x": []}, "at least one token"),
        ({"x": ""}, "this text is empty"),
        ({"x": [64]}, "outside 0 .. 63"),
    ],
)
def test_what_cannot_run_is_refused_in_a_sentence(model: lab.Model, options: dict[str, Any], words: str) -> None:
    """Before anything is dropped; the sentence names the nearest valid choice."""
    with pytest.raises(ArgumentError, match=re.escape(words)):
        cache.live(model, **{"x": PROMPT, "progress": False, **options})


def test_a_profile_is_for_the_static_policy_and_of_the_same_model(model: lab.Model) -> None:
    """Another policy would not look at it; another shape would name other experts."""
    with pytest.raises(ArgumentError, match="does not look at it"):
        live(model, 4, "lru", profile=profile(model))
    with pytest.raises(ArgumentError, match="the profile has 3 MoE layers of 6 experts, the model 2 of 8"):
        cache.live(model, PROMPT, 4, "static", profile=synthetic_trace(3, 6, 2, 9))


def test_replaced_experts_are_refused_by_name(model: lab.Model) -> None:
    """They lie in memory and in no file; other replaced weights are no matter."""
    name = "layers.1.moe.experts.3.up"
    with pytest.raises(ArgumentError, match=re.escape(name)):
        live(model.with_weights({name: np.zeros_like(model.weights[name])}), 4)


def test_a_dense_model_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    """It has no experts to keep or to drop."""
    with pytest.raises(UnsupportedError, match="no mixture-of-experts layer"):
        cache.live(lab.open(tiny_model(tmp_path, "qwen3_moe", dense_layers=(0, 1))), [1, 2])


# ---- measuring -----------------------------------------------------------------------------------------------------


@on_linux
def test_a_machine_is_measured_with_the_models_own_experts(model: lab.Model) -> None:
    """Its figures are positive, it says how they were come by, and it predicts a run of the same model."""
    if not live(model, 3, new_tokens=0).cold:  # a file system that keeps its pages: there is nothing to measure
        with pytest.raises(lab.errors.UnsupportedError, match="no cold reads"):
            cache.measure_machine(model, threads=1, progress=False)
        return
    machine = cache.measure_machine(model, threads=1, progress=False)
    assert machine.read_bytes_per_s > 0 and machine.seconds_per_token > 0 and machine.seconds_per_read > 0
    assert "16 experts of 98,304 bytes read cold" in machine.source and "1 thread" in machine.source
    speed = cache.predict(live(model, 3).simulation, machine)
    assert speed.seconds_compute == machine.seconds_per_token and speed.tokens_per_s > 0


@on_linux
def test_the_benchmark_of_budgets_leaves_figures_a_page_and_a_picture(tmp_path: Path) -> None:
    """One round of a small model, from its arguments to its files."""
    given = ["--model", "tiny", "--budgets", "2,3", "--tokens", "3", "--rounds", "1", "--cache", str(tmp_path)]
    page = cache_live.record(cache_live.measured(cache_live.parser().parse_args(given)), tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "| 2 of 4 |" in text and "| 3 of 4 |" in text and "with reads of" in text
    assert page.with_suffix(".png").stat().st_size > 1000


def test_the_recorded_runs_were_replayed_exactly_and_predicted_within_a_quarter() -> None:
    """Three budgets, seven runs each, cold at the start; the page beside the figures says the same."""
    recorded = list((Path(cache_live.__file__).parent / "results").glob("cache-live-*.json"))
    assert recorded
    for path in recorded:
        whole = json.loads(path.read_text(encoding="utf-8"))
        assert path.with_suffix(".md").read_text(encoding="utf-8") == cache_live.page(whole)
        assert len(whole["budgets"]) >= 3
        for entry in whole["budgets"]:
            assert len(entry["runs"]) >= 7 and all(run["replayed"] and run["cold"] for run in entry["runs"])
            median = np.median([run["tokens_per_s"] for run in entry["runs"]])
            assert abs(entry["predicted"]["tokens_per_s"] / median - 1) <= 0.25


# ---- the budget itself ---------------------------------------------------------------------------------------------


def test_a_budget_keeps_the_members_of_a_set_and_lets_go_by_rank() -> None:
    """Worked out by hand: LRU of 2, sets (0, 1), (1, 2), (0, 1, 2)."""
    budget = Budget("lru", 2)
    sets = [[(0, 0), (0, 1)], [(0, 1), (0, 2)], [(0, 0), (0, 1), (0, 2)]]
    served = [budget.serve(members) for members in sets]
    assert [[one.hit for one in each] for each in served] == [[False, False], [True, False], [False, True, True]]
    assert served[1][1].evicted == (0, 0)
    assert not served[2][0].kept and served[2][0].evicted is None
    assert budget.held == {(0, 1), (0, 2)}
