"""The numbers of the stepper's picture: equal to what NumPy makes of the taps, at every place of a walk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab.errors import ArgumentError
from colibri_lab.testing import tiny_model
from colibri_lab.widgets import stepper_data as data

TEXT = "The fox counts the eggs in her nest."


@pytest.fixture
def walk() -> Any:
    return lab.open().session(capture="moe", threads=1).stepper(TEXT, chunk=None)


def look(layer: int = 3, token: int = 5, expert: int = 0) -> dict[str, int]:
    return {"layer": layer, "token": token, "expert": expert}


def test_a_frame_holds_the_taps_of_the_moment(walk: Any) -> None:
    """Logits, ids, gates, the experts' outputs with their lengths, and the sum, as a plain run has them."""
    plain = lab.open().session(capture="moe", threads=1)
    plain.feed(TEXT, progress=False)
    trace = plain.trace()
    walk.run_to("layer == 3 and stage == 'aggregator'")
    _, arrays = data.frame(walk, look())
    base = "layers.3.moe."
    for name, tap in (("logits", "router_logits"), ("gates", "gates"), ("ids", "expert_ids")):
        assert np.array_equal(arrays[name], trace[base + tap]), name
    assert np.array_equal(arrays["total"], trace[base + "output"][:, : data.FIRST])
    assert np.allclose(arrays["total_length"], np.linalg.norm(trace[base + "output"], axis=1), rtol=1e-6)
    assert arrays["there"].all()
    for row in range(len(plain.ids)):
        for slot, expert in enumerate(trace[base + "expert_ids"][row].tolist()):
            rows = trace.expert_rows(3, expert)
            output = rows["output"][rows["tokens"].tolist().index(row)]
            assert np.array_equal(arrays["outputs"][row, slot], output[: data.FIRST])
            assert np.isclose(arrays["lengths"][row, slot], np.linalg.norm(output), rtol=1e-6)
    counts = np.bincount(trace[base + "expert_ids"].ravel(), minlength=8)
    assert np.array_equal(arrays["load"][3], counts)
    assert (arrays["load"][4] == 0xFFFFFFFF).all()


def test_what_has_not_run_is_left_out(walk: Any) -> None:
    """Stage by stage the picture grows; outputs come expert by expert."""
    assert set(data.frame(walk, look(0))[1]) == {"load"}
    had: list[set[str]] = []
    while walk.where.layer in (None, 0):
        walk.step()
        _, arrays = data.frame(walk, look(0))
        had.append(set(arrays) & {"logits", "ids", "gates", "outputs", "total"})
        if walk.where.stage == "expert":
            ids, there = arrays["ids"], arrays.get("there")
            assert there is not None
            assert np.array_equal(there.astype(bool), ids <= walk.where.expert)
    assert had[0] == had[1] == set() and had[2] == had[3] == {"logits", "ids", "gates"}
    assert had[-2] == {"logits", "ids", "gates", "outputs", "total"}


def test_buffers_are_those_of_locals_with_their_numbers(walk: Any) -> None:
    """Shape, dtype, largest magnitude, non-finite count, histogram, first values, and who will still read them."""
    walk.run_to("layer == 2 and stage == 'dispatcher'")
    walk.patch("layers.2.moe.output", np.full((1, 128), np.nan), tokens=[5])
    walk.run_to("layer == 2 and stage == 'aggregator'")
    facts, arrays = data.frame(walk, look(2))
    there = walk.locals()
    shown = {b["path"]: (i, b) for i, b in enumerate(facts["buffers"])}
    ids = there["moe.expert_ids"][5].tolist()
    for path, array in there.items():
        if ".dispatch." in path or (".experts." in path and int(path.split(".")[4]) not in [*ids, 0]):
            assert path not in shown
            continue
        number, b = shown[path]
        finite = array[np.isfinite(array)]
        assert (b["shape"], b["dtype"]) == (list(array.shape), array.dtype.name)
        assert b["absmax"] == np.abs(finite).max() and b["nonfinite"] == array.size - finite.size
        assert b["readers"] == walk.readers(path)
        assert arrays["histograms"][number].sum() == finite.size
        if b["row"] is not None:
            row = array[b["row"]].ravel()[:8].astype(np.float32)
            assert np.array_equal(arrays["values"][number][: len(row)], row, equal_nan=True)
    assert shown["layers.2.moe.output"][1]["nonfinite"] == 128
    assert shown["layers.2.moe.output"][1]["readers"] and not shown["layers.2.moe.gates"][1]["readers"]


def test_a_histogram_is_numpys() -> None:
    """Counts of equal bins over the scale that it names, zero in the middle or at its foot."""
    rng = np.random.default_rng(3)
    for array in (rng.normal(size=1000), rng.uniform(0, 5, 1000), np.zeros(7), np.array([np.nan, np.inf, 2.0])):
        size, odd, counts, (low, high) = data._numbers(array.astype(np.float32))
        finite = array.astype(np.float32)[np.isfinite(array)].astype(np.float64)
        assert size == np.abs(finite).max() and odd == array.size - finite.size
        assert np.array_equal(counts, np.histogram(finite, bins=24, range=(low, high))[0])
    assert data._numbers(np.array([np.nan]))[0] is None


def test_a_long_pass_sends_a_window(tmp_path: Path) -> None:
    """128 rows around the token, at the ends those there are; ids of all rows."""
    assert data.window(0, 50, 20) == (0, 50)
    assert data.window(0, 1000, 500) == (436, 564)
    assert data.window(0, 1000, 999) == (872, 1000) and data.window(10, 1000, 12) == (10, 138)
    model = lab.open(tiny_model(tmp_path / "m", layers=2))
    walk = model.session(capture="moe", threads=1).stepper(list(range(60)) * 5, chunk=None)
    walk.run_to("layer == 1 and stage == 'router'")
    facts, arrays = data.frame(walk, look(1, 200))
    assert facts["window"] == [136, 264] and arrays["logits"].shape == (128, 4) and arrays["ids"].shape == (300, 2)
    assert np.array_equal(arrays["gates"], walk.peek("layers.1.moe.gates")[136:264])


def test_dense_layers_and_shared_experts(tmp_path: Path) -> None:
    """A dense layer has buffers and no experts; a shared expert's output and gate are there."""
    model = lab.open(tiny_model(tmp_path / "m", family="qwen2_moe", layers=3, dense_layers=[1], experts=32, top_k=4))
    walk = model.session(capture="moe", threads=1).stepper([1, 2, 3, 4, 5], chunk=None)
    head = data.head(walk)
    assert head["moe"] == [0, 2] and head["shared"] == [0, 2]
    walk.run_to("layer == 0 and stage == 'aggregator'")
    _, arrays = data.frame(walk, look(0, 2))
    assert np.array_equal(arrays["shared_gate"], walk.peek("layers.0.moe.shared.gate")[:, 0])
    assert np.array_equal(arrays["shared"], walk.peek("layers.0.moe.shared.output")[:, : data.FIRST])
    walk.run_to("layer == 1 and stage == 'mlp'")
    facts, arrays = data.frame(walk, look(1, 2))
    assert "ids" not in arrays and facts["buffers"][0]["path"] == "layers.1.mlp.output"


def test_capture_none_shows_what_working_memory_holds() -> None:
    """Without kept taps the present layer is there, earlier ones are not; nothing fails."""
    walk = lab.open().session(capture="none", threads=1).stepper(TEXT, chunk=None)
    while not walk.at_end:
        walk.step()
        data.frame(walk, look(walk.where.layer or 0))
    walk.back("layer")
    walk.back("layer")
    walk.run_to("layer == 5 and stage == 'router'")
    assert "ids" in data.frame(walk, look(5))[1] and "ids" not in data.frame(walk, look(4))[1]


@pytest.mark.parametrize(
    ("condition", "place"),
    [
        ("layer == 3 and stage == 'router'", [3, "router"]),
        ("stage == 'router' and margin < 1 and layer == 3", [3, "router"]),
        ("stage == 'norm'", [None, "norm"]),
        ("layer == 3", None),
        ("layer == 3 or stage == 'router'", None),
        ("nonfinite > 0", None),
        ("((", None),
        ("(" * 5000, None),
    ],
)
def test_a_breakpoint_of_one_cell_stands_on_the_map(condition: str, place: Any) -> None:
    assert data.breakpoint_place(condition) == place


def test_places_sort_as_they_are_run(walk: Any) -> None:
    """The rank grows with every stage of a walk, from pass to pass."""
    walk = lab.open().session(capture="moe", threads=1).stepper("eggs", chunk=1)
    ranks = [data.rank(walk.where)]
    while not walk.at_end:
        ranks.append(data.rank(walk.step()))
    assert ranks == sorted(ranks) and len(set(ranks)) == len(ranks)


def test_numbers_as_typed() -> None:
    assert data.parse_numbers(["1", " −2.5", "0,5", "1e-3"]) == [1.0, -2.5, 0.5, 1e-3]
    assert np.isnan(data.parse_numbers(["nan"])[0])
    with pytest.raises(ArgumentError, match="'x' is no number"):
        data.parse_numbers(["1", "x"])


def test_a_comparison_keeps_nan_out_of_its_facts(walk: Any) -> None:
    """What is not a number travels in the binary part."""
    import json

    fork = walk.fork()
    walk.step()
    fork.step()
    fork.patch("embed", np.full((1, 128), np.nan), tokens=[3])
    facts, arrays = data.comparison(walk.compare(fork), 0)
    json.dumps(facts, allow_nan=False)
    assert np.isnan(arrays["kl"]).all() and arrays["residual"].shape == (6, len(walk.ids))


def test_at_the_end_of_a_pass_the_likeliest_next_tokens_are_listed() -> None:
    session = lab.open().session(max_tokens=16)
    walk = session.stepper("3 * 7 = 2", chunk=None)
    look = {"layer": 0, "token": 0, "expert": 0}
    walk.step("layer")
    assert data.frame(walk, look)[0]["likely"] == []
    walk.finish()
    likely = data.frame(walk, look)[0]["likely"]
    z = session.logits.astype(np.float64)
    p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    assert likely[0] == (session.model.tokenizer.texts([int(p.argmax())])[0], pytest.approx(p.max()))
    assert [chance for _, chance in likely] == sorted((chance for _, chance in likely), reverse=True)
