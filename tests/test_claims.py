"""The measurement of the description's claims: what is chosen, counted, judged and printed. No time is asserted."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import numpy as np
import programs
import pytest
from claims import catalogue, claim, engine, gates, layout, load, page, selection, speed
from claims.claim import Plan, Result
from harness import Cell, Ratio, Sample

import colibri_lab as lab

RUNNER = Path(page.__file__).with_name("run.py")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return Plan(tmp_path_factory.mktemp("cache"), rounds=2, seconds=0.0005, quick=True)


def by_hand(scores: list[float]) -> list[int]:
    """The published steps on a list of pairs: neighbours, then slots 0 and 1."""
    slots = [(-s, i) for i, s in enumerate(scores)]
    for i in (*range(0, len(slots) - 1, 2), 0):
        slots[i : i + 2] = sorted(slots[i : i + 2])
    return [i for _, i in slots[:2]]


# ---- selection ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["network", "qsort", "walk"])
@pytest.mark.parametrize("n", [2, 3, 8, 64])
def test_what_is_compared_chooses_rightly(plan: Plan, method: str, n: int) -> None:
    """Each way gives the ids of NumPy's stable sort, ties included."""
    scores = np.random.default_rng(n).integers(0, 2 * n, (500, n)).astype(np.float32)
    assert np.array_equal(selection.choose(plan, method, scores), selection.best_two(scores))


def test_the_published_selection_is_wrong_where_its_steps_say_so(plan: Plan) -> None:
    """The C function does the published steps, which find the best two in 2! (n-2)! of n! orders alone."""
    scores = selection.orders(5)
    assert selection.choose(plan, "published", scores).tolist() == [by_hand(row) for row in scores.tolist()]
    for n in (3, 4, 8):
        share = selection.wrong(plan, "published", selection.orders(n))
        assert share == pytest.approx(1 - 2 * math.factorial(n - 2) / math.factorial(n))
    assert selection.wrong(plan, "published", selection.orders(2)) == 0
    assert selection.wrong(plan, "network", selection.orders(7)) == 0


# ---- gates -------------------------------------------------------------------------------------------------------


def test_divergence_is_that_of_the_definition() -> None:
    """Against a loop over tokens and vocabulary in Python's own floats."""
    model, text = lab.open(), "def add(a, b):"
    found = gates.divergence(model, (text,))
    rows = []
    for mode in (None, "raw_logits"):
        session = model.session(capture="logits", gate_mode=mode)
        session.feed(text)
        rows.append(session.tape["logits"].tolist())
    nats = []
    for p_row, q_row in zip(*rows, strict=True):
        p_sum, q_sum = (math.fsum(map(math.exp, row)) for row in (p_row, q_row))
        ratios = ((math.exp(p) / p_sum, p - q - math.log(p_sum / q_sum)) for p, q in zip(p_row, q_row, strict=True))
        nats.append(math.fsum(share * difference for share, difference in ratios))
    changed = [np.argmax(p) != np.argmax(q) for p, q in zip(*rows, strict=True)]
    assert found["tokens"] == len(nats)
    assert found["KL, mean (nats)"] == pytest.approx(np.mean(nats), rel=1e-6)
    assert found["first choice changed"] == np.mean(changed)
    assert found["KL, mean (nats)"] > 0 and found["perplexity, raw logits"] > found["perplexity, model's rule"]


# ---- memory that is laid out -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", layout.SHAPES)
def test_two_layouts_hold_the_same_matrices_in_other_places(name: str) -> None:
    """Every matrix of every expert has a place of its own in both; an expert's three are neighbours in one alone."""
    shape = layout.SHAPES[name]
    every = [(e, m) for e in range(shape.experts) for m in range(3)]
    for place in layout.PLACES.values():
        assert sorted(place(shape, *one) for one in every) == list(range(3 * shape.experts))
    assert [layout.interleaved(shape, 5, m) for m in range(3)] == [15, 16, 17]
    assert [layout.by_matrix(shape, 5, m) for m in range(3)] == [5, 5 + shape.experts, 5 + 2 * shape.experts]


def test_a_layout_is_judged_by_the_hits_it_adds() -> None:
    """68 to 94 % were said; a smaller step fails, and hits of one layout alone say nothing."""
    assert layout.verdict({"interleaved": 0.95, "by matrix": 0.60}) == claim.HOLDS
    assert layout.verdict({"interleaved": 0.95, "by matrix": 0.94}) == claim.FAILS
    assert layout.verdict({"interleaved": 0.95}) == layout.verdict({}) == claim.UNMEASURABLE


def test_pages_begin_at_a_huge_page_and_hold_numbers_near_one() -> None:
    """Alignment cannot favour one kind of pages, and products stay finite in both dtypes."""
    for huge in (False, True):
        pages = engine.Pages(4 << 20, huge)
        assert pages.address % (2 << 20) == 0 and len(pages.bytes) == 4 << 20
        assert np.abs(pages.bytes.view(np.float32) - 1).max() < 0.1
        assert huge or pages.huge_bytes() == 0


def test_one_row_meets_matrices_of_other_lengths(plan: Plan) -> None:
    """Down after gate, as a token does it: the last product is NumPy's."""
    drawn = np.random.default_rng(0)
    gate, down = (drawn.standard_normal(shape, np.float32) for shape in ((96, 64), (64, 96)))
    x, out = drawn.standard_normal(96, np.float32), np.empty(96, np.float32)
    matrices = (engine.Matrix * 2)(*(engine.Matrix(w.ctypes.data, engine.F32, *w.shape) for w in (gate, down)))
    assert engine.stages(plan).matmul_seconds(matrices, 2, x.ctypes.data, 1, out.ctypes.data) > 0
    assert np.allclose(out[:64], down @ x, rtol=1e-4, atol=1e-4)


# ---- limits ------------------------------------------------------------------------------------------------------


def test_the_most_tokens_a_second_are_bandwidth_over_bytes() -> None:
    """28 GB/s over 12.9 or 1.3 billion weights of 16 bits."""
    most = speed.ceiling(28)
    assert most["Mixtral-8x7B, bf16"] == pytest.approx(28 / 25.8)
    assert most["OLMoE-1B-7B, bf16"] == pytest.approx(28 / 2.6)
    assert speed.active_parameters(28, most["OLMoE-1B-7B, int4"], 0.5625) == pytest.approx(1.3e9)


def test_a_model_in_the_cache_proves_no_speed(plan: Plan) -> None:
    """Whatever the bundled model reaches, the claim about 128 tokens/s stays open; vLLM is never measured."""
    results = {r.claim: r for r in speed.run(plan)}
    assert results["tokens per second"].verdict == claim.UNMEASURABLE
    assert "lives in a cache" in results["tokens per second"].why
    assert results["vLLM"].verdict == claim.UNMEASURABLE


# ---- verdicts ----------------------------------------------------------------------------------------------------


def test_only_an_interval_on_one_side_decides() -> None:
    assert claim.judged(Ratio(5.0, 4.8, 5.2, 5), 4.7) == claim.HOLDS
    assert claim.judged(Ratio(3.0, 2.8, 4.6, 5), 4.7) == claim.FAILS
    assert claim.judged(Ratio(5.0, 4.0, 6.0, 5), 4.7) == claim.UNDECIDED


def test_what_is_missing_is_a_result_and_a_sentence(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Without the engine's sources every script still answers."""
    monkeypatch.setattr(engine, "CSRC", Path("nowhere"))
    monkeypatch.setattr(engine, "ROOT", Path("nowhere"))
    monkeypatch.setattr(programs, "ROOT", Path("nowhere"))
    engine.selection.cache_clear()
    engine.stages.cache_clear()
    for name in ("selection", "alignment", "huge_pages", "layout", "size"):
        for result in catalogue.measure(name, plan):
            assert result.verdict == claim.UNMEASURABLE and result.why, name
    (found,) = catalogue.measure("gates", plan)
    assert found.verdict == claim.FAILS and "sources" in found.facts["router's time"]


def test_a_library_that_is_not_built_is_one_command_away(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    """A quick run names the command, in words that the Makefile knows; it does not call the machine unfit."""
    monkeypatch.setattr(engine, "FOLDER", "nowhere")
    found = catalogue.measure("size", plan)
    assert [result.verdict for result in found] == [claim.NOT_YET] * 2
    assert all(result.why.startswith("run `make engine` first") for result in found)
    assert "\nengine:" in (engine.ROOT / "Makefile").read_text(encoding="utf-8")


def test_missing_torch_is_said_aloud(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, capfd: pytest.CaptureFixture[str]
) -> None:
    """A pickle stands in, and the verdict stays open."""
    spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else spec(name, *rest))
    monkeypatch.setattr(models, "COARSE", models.TINY)
    (result,) = load.run(Plan(plan.cache, rounds=2))
    assert "torch is not installed" in capfd.readouterr().err
    assert result.verdict == claim.UNMEASURABLE and set(result.cells[0].samples) == {"colibri", "pickle"}
    assert result.cells[1].samples["pickle"][0].value >= result.cells[0].samples["pickle"][0].value


# ---- pages -------------------------------------------------------------------------------------------------------


def a_run(load_average: float = 0.1, quick: bool = False) -> dict[str, Any]:
    cell = Cell("speed", "GB/s", {"rows": 1}, {"new": [Sample(3.0)], "old": [Sample(4.0)]})
    results = [Result("thing", "twice", "0.75×", claim.FAILS, "since", [cell], {"share": 0.5})]
    about = {"cpu": "Abacus", "cpus": 1, "system": "X", "date": "2000-01-01"}
    return {
        "machine": {**about, "load_at_start": load_average, "load_at_end": 0.1},
        "arguments": {"rounds": 1, "quick": quick},
        "results": [r.as_json() for r in results],
    }


def test_a_page_is_that_of_its_file(tmp_path: Path) -> None:
    """Figures and verdicts survive the JSON; a busy machine and a quick run are named."""
    text = page.save(a_run(), tmp_path).read_text(encoding="utf-8")
    assert "| thing | twice | 0.75× | **does not hold** | since |" in text
    assert "| speed: old | rows 1 | 4 (4–4) GB/s |" in text and "| share |  | 0.5 |" in text
    assert "Provisional" not in text and "quick run" not in text
    whole = json.loads(next(tmp_path.glob("*.json")).read_text(encoding="utf-8"))
    assert page.save(whole, tmp_path).read_text(encoding="utf-8") == text
    assert "**Provisional**" in page.save(a_run(load_average=3.0), tmp_path).read_text(encoding="utf-8")
    assert "**Provisional, a quick run**" in page.save(a_run(quick=True), tmp_path).read_text(encoding="utf-8")


def test_a_quick_run_stands_beside_the_recorded_one(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, tmp_path: Path
) -> None:
    """Same lines, two columns; what one of them lacks is a dash."""
    page.save(a_run(), tmp_path)
    cell = Cell("speed", "GB/s", {"rows": 1}, {"new": [Sample(8.0)]})
    now = Result("thing", "twice", "2×", claim.HOLDS, "here", [cell])
    monkeypatch.setitem(catalogue.CLAIMS, "thing", lambda _: [now])
    text = repr(page.beside("thing", plan, tmp_path))
    assert "| now, quick: provisional | 2× | holds | here |" in text
    assert "| recorded | 0.75× | **does not hold** | since |" in text
    assert "| speed: new | rows 1 | 8 (8–8) GB/s | 3 (3–3) GB/s |" in text
    assert "| speed: old | rows 1 | – | 4 (4–4) GB/s |" in text


def test_the_recorded_run_is_whole_and_its_page_is_that_of_its_figures() -> None:
    """Every claim has a verdict, from a full run, and the page beside the JSON says the same."""
    run = page.recorded()
    said = [r["said"] for r in run["results"]]
    assert not run["arguments"]["quick"] and run["arguments"]["claims"] == list(catalogue.CLAIMS) and len(said) == 12
    results = [Result.from_json(r) for r in run["results"]]
    pages = [path.read_text(encoding="utf-8") for path in page.RESULTS.glob("claims-*.md")]
    assert page.page(run["machine"], run["arguments"], results) in pages


# ---- the runner --------------------------------------------------------------------------------------------------


def runner(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(RUNNER), *arguments], capture_output=True, text=True, env=os.environ)


def test_one_command_measures_and_leaves_two_files(plan: Plan, tmp_path: Path) -> None:
    done = runner("--quick", "--claims", "gates,memory,load", "--samples", "2", "--seconds", "0.0005",
                  "--cache", str(plan.cache), "--results", str(tmp_path))  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {path.suffix: path for path in tmp_path.iterdir()}
    assert set(found) == {".json", ".md"}
    whole = json.loads(found[".json"].read_text(encoding="utf-8"))
    assert [r["claim"] for r in whole["results"]] == ["gates", "memory", "load"]
    for result in whole["results"]:
        assert result["said"] in done.stdout and result["cells"]
        for cell in result["cells"]:
            assert all(len(taken) == 2 and all(s["value"] > 0 for s in taken) for taken in cell["samples"].values())


def test_a_wrong_name_is_answered_with_the_valid_ones() -> None:
    done = runner("--claims", "magic")
    assert done.returncode == 2 and "'magic' is none of selection, gates" in done.stderr
