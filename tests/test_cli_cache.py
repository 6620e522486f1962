"""`colibri-lab cache`: reports for a reader, tables for a program, a sentence for what cannot be."""

from __future__ import annotations

import csv
import sys
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab import _cli
from colibri_lab.testing import synthetic_trace

LAYERS, EXPERTS, K, PASSES = 4, 8, 2, (12, 1, 1, 6)
IDS = "3,1,4,1,5,9,2,6"


@pytest.fixture(scope="module")
def trace() -> lab.Trace:
    """Three layers with experts, numbered 1, 2 and 3, behind a dense one."""
    return synthetic_trace(LAYERS, EXPERTS, K, sum(PASSES), seed=3, passes=PASSES, dense_layers=[0])


@pytest.fixture(scope="module")
def path(trace: lab.Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cache") / "run.safetensors"
    trace.save(made)
    return made


def run(*arguments: object) -> int:
    return _cli.main(["cache", *map(str, arguments)])


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def least_recently_used(ids: np.ndarray, capacity: int) -> int:
    """Hits of (tokens, k) requests, by hand: who is wanted now is not pushed out."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for wanted in ids.tolist():
        for expert in wanted:
            hits += expert in cache
            cache[expert] = None
            cache.move_to_end(expert)
            if len(cache) > capacity:
                del cache[next(old for old in cache if old not in wanted)]
    return hits


def test_the_report_of_every_policy_and_capacity_is_printed(trace: lab.Trace, path: Path, capsys: Any) -> None:
    """In the order asked for; those of the library, word for word."""
    assert run(path, "--policy", "lru,lfu", "--policy", "fifo", "--capacity", "4,3") == 0
    said = capsys.readouterr().out
    places = [
        said.index(lab.cache.simulate(trace, policy, capacity).report())
        for policy in ("lru", "lfu", "fifo")
        for capacity in (3, 4)
    ]
    assert places == sorted(places) and len(set(places)) == 6


def test_the_counters_are_those_of_a_cache_kept_by_hand(trace: lab.Trace, path: Path, tmp_path: Path) -> None:
    """One row for each layer, by its number; requests are hits and misses; every request is one of a token's k."""
    out = tmp_path / "out.csv"
    assert run(path, "--capacity", "2,3,5,8", "--csv", out) == 0
    found = rows(out)
    assert [(int(row["capacity"]), int(row["layer"])) for row in found] == [
        (c, n) for c in (2, 3, 5, 8) for n in (1, 2, 3)
    ]
    for row in found:
        ids = trace[f"layers.{row['layer']}.moe.expert_ids"]
        hits = least_recently_used(ids, int(row["capacity"]))
        assert (row["policy"], row["scope"], row["passes"], row["phase"]) == ("lru", "layer", "decode", "decode")
        assert (int(row["hits"]), int(row["requests"])) == (hits, ids.size)
        assert int(row["misses"]) == ids.size - hits and row["bytes_read"] == ""


def test_recorded_passes_tell_prefill_from_decode(trace: lab.Trace, path: Path, tmp_path: Path) -> None:
    """A pass of several tokens asks for each of its experts once."""
    out = tmp_path / "out.csv"
    assert run(path, "--capacity", EXPERTS, "--passes", "trace", "--csv", out) == 0
    found = {(row["layer"], row["phase"]): int(row["requests"]) for row in rows(out)}
    for layer in (1, 2, 3):
        ids = trace[f"layers.{layer}.moe.expert_ids"]
        assert found[str(layer), "decode"] == 2 * K
        assert found[str(layer), "prefill"] == len(np.unique(ids[:12])) + len(np.unique(ids[14:]))


def test_parquet_holds_what_csv_holds(path: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    a, b = tmp_path / "out.csv", tmp_path / "out.parquet"
    assert run(path, "--policy", "lru,belady", "--scope", "global", "--csv", a, "--parquet", b) == 0
    typed = parquet.read_table(b).to_pylist()
    told = [{name: "" if value is None else str(value) for name, value in row.items()} for row in typed]
    assert told == rows(a) and len(told) == 2 * 3
    assert typed[0]["bytes_read"] is None and isinstance(typed[0]["hits"], int)


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("passes", ["decode", "trace"])
@pytest.mark.parametrize("policy", ["lru", "arc", "static"])
def test_the_table_of_misses_and_the_way_to_belady_are_those_of_simulations(
    trace: lab.Trace, path: Path, capsys: Any, scope: Any, passes: str, policy: Any
) -> None:
    """Policies whose curve is one pass, and those that need one for each capacity; one that starts full."""
    assert run(path, "--policy", policy, "--capacity", 6, "--scope", scope, "--passes", passes) == 0
    said = capsys.readouterr().out
    served = None if passes == "decode" else "trace"
    hits = {
        name: 100 * lab.cache.simulate(trace, name, 6, scope, passes=served).hit_rate for name in (policy, "belady")
    }
    line = next(line for line in said.splitlines() if line.startswith("*"))
    assert line.split() == ["*", "6", f"{100 - hits[policy]:.1f}", "%", f"{100 - hits['belady']:.1f}", "%"]
    assert f"would hit {hits['belady']:.1f} %" in said
    if policy == "static":  # chosen from this trace, which nobody who builds it has
        assert f"Apart: static hits {hits[policy]:.1f} %" in said and "comes nearest" not in said
        return
    apart = hits["belady"] - hits[policy]
    way = f"{abs(apart):.1f} points {'below' if apart >= 0 else 'above'}."
    assert f"would hit {hits['belady']:.1f} %; {policy} comes nearest: {hits[policy]:.1f} %, {way}" in said


def test_a_checkpoint_is_run_and_says_the_size_of_its_experts(tmp_path: Path, capsys: Any) -> None:
    """Bytes read are misses times the weights of an expert; the speed is that of the library."""
    out = tmp_path / "out.csv"
    assert run("--ids", IDS, "--capacity", 3, "--csv", out, "--read-gbps", 1.5, "--compute-ms", 20) == 0
    said = capsys.readouterr().out
    session = lab.open().session(capture="routing", max_tokens=8)
    session.feed([int(part) for part in IDS.split(",")])
    weights = session.model.weights
    size = sum(weights[f"layers.0.moe.experts.0.{name}"].nbytes for name in ("gate", "up", "down"))
    for row in rows(out):
        assert int(row["bytes_read"]) == int(row["misses"]) * size > 0
    machine = lab.cache.Machine(1.5e9, 0.02, source="given on the command line")
    simulation = lab.cache.simulate(session.trace(), "lru", 3, expert_bytes=size)
    assert f"lru, 3 experts: {lab.cache.predict(simulation, machine).sentence}\n" in said


@pytest.mark.parametrize(("name", "format"), [("run.npz", "vllm"), ("routes.txt", "route_trace")])
def test_a_recording_of_another_program_opens_once_its_sizes_are_said(
    trace: lab.Trace, tmp_path: Path, capsys: Any, name: str, format: str
) -> None:
    """What is missing is asked for in words of the command line."""
    trace.export(tmp_path / name, format)
    assert run(tmp_path / name) == 2
    said = capsys.readouterr().err
    assert "--experts or --config" in said and "=" not in said
    layers = ["--layers", "1,2,3"] if format == "vllm" else []
    assert run(tmp_path / name, "--experts", EXPERTS, "--capacity", 4, *layers) == 0
    assert lab.cache.simulate(trace, "lru", 4).report() in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_a_picture_of_the_curves_is_written_whole(path: Path, tmp_path: Path, capsys: Any, kind: str) -> None:
    """Its path is the last line, and no other file stays behind."""
    out = tmp_path / f"curves.{kind}"
    assert run(path, "--policy", "lru,fifo", "--plot", out) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out) and list(tmp_path.iterdir()) == [out]
    data = out.read_bytes()
    assert data.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind])


def test_the_view_is_of_the_first_policy_and_capacity(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """And of the scope, the passes and the machine that were given."""
    views: list[Any] = []
    monkeypatch.setattr(lab.CacheLab, "to_html", lambda view, path: views.append(view))
    how = ["--policy", "fifo,lru", "--capacity", "5,4", "--scope", "global", "--passes", "trace"]
    cost = ["--expert-bytes", 1000, "--read-gbps", 2, "--compute-ms", 1]
    assert run(path, *how, *cost, "--html", tmp_path / "out.html") == 0
    wanted = {"policy": "fifo", "capacity": 4, "scope": "global", "passes": "trace"}
    assert {name: views[0].setting[name] for name in wanted} == wanted
    assert views[0].simulation.report() in capsys.readouterr().out


def test_the_view_is_written_as_one_file(tmp_path: Path) -> None:
    assert run("--ids", IDS, "--html", tmp_path / "out.html") == 0
    assert "<html" in (tmp_path / "out.html").read_text(encoding="utf-8").lower()


def test_half_of_the_experts_fit_when_nothing_is_said(path: Path, tmp_path: Path) -> None:
    for scope, capacity in (("layer", EXPERTS // 2), ("global", 3 * EXPERTS // 2)):
        assert run(path, "--scope", scope, "--csv", tmp_path / "out.csv") == 0
        assert {row["capacity"] for row in rows(tmp_path / "out.csv")} == {str(capacity)}


def test_where_nobody_asks_for_an_expert_no_share_is_made_up(tmp_path: Path, capsys: Any) -> None:
    synthetic_trace(2, EXPERTS, K, 0).save(tmp_path / "run.safetensors")
    assert run(tmp_path / "run.safetensors", "--html", tmp_path / "page.html", "--plot", tmp_path / "out.svg") == 0
    said = capsys.readouterr().out
    assert "No token asks for an expert" in said and "%" not in said


def sick(trace: lab.Trace, tokens: list[int], masked: int) -> lab.Trace:
    """The trace with NaN in these rows of a router, and −inf for one expert (masked, not chosen) of another token."""
    arrays = {path: trace[path] for path in trace}
    logits = np.array(arrays["layers.2.moe.router_logits"])
    logits[tokens, 0] = np.nan
    logits[masked, int(logits[masked].argmin())] = -np.inf
    arrays["layers.2.moe.router_logits"] = logits
    return lab.Trace(arrays, ids=trace.ids, texts=trace.texts, meta=trace.meta)


def test_tokens_whose_router_gave_no_number_are_counted(trace: lab.Trace, tmp_path: Path, capsys: Any) -> None:
    """Their experts are nobody's choice. A mask is one, and a healthy trace has no note."""
    ill = sick(trace, [3, 4, 11], masked=6)
    said = "3 of 20 tokens have router logits that are not finite"
    simulation = lab.cache.simulate(ill, "lru", 4)
    assert said in simulation.report() and [said in note for note in simulation.notes] == [True]
    assert lab.cache.simulate(trace, "lru", 4).notes == ()
    bare = {path: ill[path] for path in ill if path.endswith("expert_ids")}
    told_less = lab.Trace(bare, ids=trace.ids, texts=trace.texts, meta=trace.meta)
    assert lab.cache.simulate(told_less, "lru", 4).notes == ()
    ill.save(tmp_path / "ill.safetensors")
    assert run(tmp_path / "ill.safetensors", "--policy", "lru,lfu") == 0
    out = capsys.readouterr().out
    assert out.count(said) == 1 and "colibri-lab nan" in out


def test_a_slot_without_an_expert_asks_no_router(trace: lab.Trace) -> None:
    """Rows that were not recorded are no rows that went wrong."""
    ill = sick(trace, [5], masked=6)
    arrays = {path: np.array(ill[path]) for path in ill}
    arrays["layers.2.moe.expert_ids"][5] = -1
    quiet = lab.Trace(arrays, ids=trace.ids, texts=trace.texts, meta=trace.meta)
    assert lab.cache.simulate(quiet, "lru", 4).notes == ()


def test_passes_that_nobody_recorded_are_counted_token_by_token(trace: lab.Trace, tmp_path: Path, capsys: Any) -> None:
    np.save(tmp_path / "routes.npy", trace.stack("expert_ids").transpose(1, 0, 2))
    how = ["--experts", EXPERTS, "--layers", 3, "--capacity", 4]
    assert run(tmp_path / "routes.npy", *how, "--passes", "trace", "--csv", tmp_path / "a.csv") == 0
    asked = capsys.readouterr().out
    assert run(tmp_path / "routes.npy", *how, "--csv", tmp_path / "b.csv") == 0
    plain = capsys.readouterr().out
    assert "passes of this recording are not known" in asked and "not known" not in plain
    assert rows(tmp_path / "a.csv") == rows(tmp_path / "b.csv")
    back = lab.load_trace(tmp_path / "routes.npy", experts=EXPERTS, layers=3)
    back.save(tmp_path / "again.safetensors")
    again = lab.cache.simulate(lab.load_trace(tmp_path / "again.safetensors"), "lru", 4, passes="trace")
    assert again.notes and not again.prefill.requests.any()


def test_many_policies_end_in_a_ranking_and_few_in_reports(trace: lab.Trace, path: Path, capsys: Any) -> None:
    """The least misses first, at each capacity; what cannot be built is marked; --full prints all."""
    assert run(path, "--policy", "all", "--capacity", "4,5") == 0
    said = capsys.readouterr().out
    lines = said[said.index("Misses, the least first") :].splitlines()[3:14]
    for column, capacity in enumerate((4, 5)):
        cells = [line.split()[1 + 3 * column :][:2] for line in lines]
        misses = {
            name: f"{100 - 100 * lab.cache.simulate(trace, name, capacity).hit_rate:.1f}" for name in lab.cache.POLICIES
        }
        assert {name.rstrip("*"): share for name, share in cells} == misses
        assert [float(share) for _, share in cells] == sorted(float(share) for _, share in cells)
        assert {name for name, _ in cells if name.endswith("*")} == {"static*", "belady*"}
    assert "requests" not in said
    nearest = [line for line in said.splitlines() if "comes nearest" in line]
    assert len(nearest) == 2 and not any("static comes" in line for line in nearest)
    assert run(path, "--policy", "all", "--capacity", "4,5", "--full") == 0
    full = capsys.readouterr().out
    assert full.count("requests") == 22 and full.endswith(said)


def test_static_can_be_chosen_by_another_trace(trace: lab.Trace, path: Path, tmp_path: Path, capsys: Any) -> None:
    """Then it can be built, and is ranked with the others."""
    other = synthetic_trace(LAYERS, EXPERTS, K, 30, seed=8, dense_layers=[0])
    other.save(tmp_path / "other.safetensors")
    how = ["--policy", "static", "--capacity", 4]
    assert run(path, *how, "--profile", tmp_path / "other.safetensors") == 0
    said = capsys.readouterr().out
    simulation = lab.cache.simulate(trace, "static", 4, profile=other)
    assert simulation.report() in said and f"static comes nearest: {100 * simulation.hit_rate:.1f} %" in said
    for profile, words in [(path, "the trace itself"), ("missing", "missing")]:
        assert run(path, *how, "--profile", profile) == 2
        assert words in capsys.readouterr().err
    assert run(path, "--profile", tmp_path / "other.safetensors") == 2
    assert "--policy static" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "scope", "capacity"),
    [
        ("60%", "layer", 4),
        ("60%", "global", 14),
        ("12.5 kB", "layer", 4),
        ("12.5kB", "global", 12),
        ("12KiB", "layer", 4),
        ("1MB", "layer", 8),
        ("100%", "global", 24),
    ],
)
def test_a_capacity_can_be_a_share_or_bytes(
    path: Path, tmp_path: Path, capsys: Any, said: str, scope: str, capacity: int
) -> None:
    """Of all experts; bytes of all caches together, of experts of 1,000."""
    out = tmp_path / "out.csv"
    how = ["--scope", scope, "--expert-bytes", 1000, "--csv", out]
    assert run(path, "--capacity", said, *how) == 0
    assert {row["capacity"] for row in rows(out)} == {str(capacity)}
    assert f"{said}: {capacity} experts in" in capsys.readouterr().out


def test_where_everything_misses_nobody_is_ranked(tmp_path: Path, capsys: Any) -> None:
    """Two tokens without an expert in common; static, which is there before them, stands apart."""
    ids = np.array([[[0, 1]], [[2, 3]]])
    np.save(tmp_path / "routes.npy", ids)
    assert run(tmp_path / "routes.npy", "--experts", 4, "--layers", 1, "--capacity", 2, "--policy", "lru,lfu") == 0
    said = capsys.readouterr().out
    assert "every request misses, whatever the policy" in said and "nearest" not in said


def test_a_size_that_is_not_the_checkpoints_is_told(capsys: Any) -> None:
    session = lab.open().session(capture="routing", max_tokens=8)
    own = int(lab.cache.expert_bytes(session.model)[0, 0])
    assert run("--ids", IDS, "--expert-bytes", 5) == 0
    assert (
        f"counts as 5 bytes, as --expert-bytes says; those of the checkpoint have {own:,}." in capsys.readouterr().out
    )
    assert run("--ids", IDS, "--expert-bytes", own) == 0
    assert "counts as" not in capsys.readouterr().out


def test_a_warning_is_one_plain_line(capsys: Any) -> None:
    """More tokens than the model was made for."""
    limit = lab.open().config.max_position_embeddings
    assert limit is not None
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run("--ids", ",".join(["3"] * (limit + 1))) == 0
    said = capsys.readouterr().err
    assert said.startswith(f"colibri-lab: warning: max_tokens={limit + 1} is more") and said.count("\n") == 1


def test_trouble_exits_with_2_and_one_sentence(path: Path, tmp_path: Path, capsys: Any) -> None:
    """Never a traceback, and nothing is written. Each names what would do."""
    for arguments, words in [
        ([], "--text or --ids"),
        (["no-such-file"], "no-such-file"),
        ([path, "--text", "a"], "is a trace"),
        ([path, "--policy", "lruu"], "did you mean 'lru'"),
        ([path, "--policy", "lru,,fifo"], "there are lru, "),
        ([path, "--capacity", "1"], "give --capacity 2"),
        ([path, "--capacity", "9"], "give --capacity 8"),
        ([path, "--capacity", "25", "--scope", "global"], "give --capacity 24"),
        ([path, "--capacity", "a few"], "whole numbers with commas"),
        ([path, "--capacity", "2.5"], "whole numbers with commas"),
        ([path, "--capacity", "10%"], "too small"),
        ([path, "--capacity", "120%"], "more than there is to keep"),
        ([path, "--capacity", "36MB"], "--expert-bytes"),
        (["--ids", IDS, "--config", path], "--config is for recordings"),
        ([path, "--expert-bytes", "-5"], "-5"),
        ([path, "--read-gbps", "3"], "--compute-ms"),
        ([path, "--read-gbps", "3", "--compute-ms", "9"], "--expert-bytes"),
        ([path, "--read-gbps", "-3", "--compute-ms", "9", "--expert-bytes", "5"], "-3"),
        ([path, "--plot", tmp_path / "out.pgn"], ".png"),
        ([path, "--plot", tmp_path / "out"], ".svg"),
        ([path, "--csv", tmp_path / "missing" / "out.csv"], "missing"),
        ([path, "--csv", tmp_path / "out", "--html", tmp_path / "." / "x" / ".." / "out"], "replace another"),
        ([path, "--plot", tmp_path / "a\0.png"], "NUL"),
        *(([path, option, path], "replace what is read") for option in ("--csv", "--parquet", "--html")),
    ]:
        assert run(*arguments) == 2, arguments
        said = capsys.readouterr()
        assert said.err.startswith("colibri-lab: ") and words in said.err and said.err.count("\n") == 1, said.err
    assert list(tmp_path.iterdir()) == []
    assert lab.load_trace(path).ids


def test_without_pyarrow_parquet_is_refused_before_the_work(
    path: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert run(path, "--parquet", tmp_path / "out.parquet") == 2
    said = capsys.readouterr()
    assert "pip install 'colibri-lab[parquet]'" in said.err and said.out == ""
