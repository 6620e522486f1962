"""What would cure a run: each change is replayed, and what a cure says holds in a run that the test makes itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import random_tensors, small_config, write_checkpoint

import colibri_lab as lab
from colibri_lab.nan import Cure, Found

CONFIG = small_config("mixtral", num_hidden_layers=3)
IDS = list(range(20))
EXPERTS = "model.layers.1.block_sparse_moe.experts."
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return random_tensors(CONFIG, 3)


@pytest.fixture(scope="module")
def healthy(tensors: Tensors, tmp_path_factory: pytest.TempPathFactory) -> lab.Session:
    session = lab.open(write_checkpoint(tmp_path_factory.mktemp("healthy"), CONFIG, tensors)).session("all")
    session.feed(IDS)
    return session


@pytest.fixture(scope="module")
def expert(healthy: lab.Session) -> int:
    """One of layer 1 that gets few tokens, but some."""
    ids = healthy.tape["layers.1.moe.expert_ids"]
    return min((e for e in range(8) if (ids == e).any()), key=lambda e: int((ids == e).sum()))


@pytest.fixture
def ill(tensors: Tensors, tmp_path: Path) -> Callable[..., Found]:
    """find() on a run of the checkpoint with these changes: hub name -> (place, value)."""

    def make(changes: dict[str, tuple[Any, Any]], emulate: Any = None, capture: str = "all") -> Found:
        changed = dict(tensors)
        for name, (place, value) in changes.items():
            changed[name] = changed[name].copy()
            changed[name][place] = value
        model = lab.open(write_checkpoint(tmp_path / "m", CONFIG, changed))
        session = model.session(capture) if emulate is None else model.session(capture, emulate=emulate)
        session.feed(IDS)
        found = lab.nan.find(session)
        assert found is not None
        return found

    return make


def done_by_code(row: Cure, found: Found, capsys: pytest.CaptureFixture[str]) -> lab.Session:
    """The session that the code of a cure makes; what it prints says the same as the cure."""
    names = {"lab": lab, "found": found}
    exec(compile(row.code, "cure", "exec"), names)
    session, left = names["session"], names["left"]
    assert isinstance(session, lab.Session) and (left is None) == row.gone
    assert capsys.readouterr().out.strip() == repr(left)
    assert row.left is None or (row.left.path, row.left.kind) == (left.origin.path, left.origin.kind)
    return session


def all_one_sign(healthy: lab.Session, expert: int) -> np.ndarray:
    """A row of down with which every product of the expert's first token is large and positive."""
    return np.where(healthy.tape.expert_rows(1, expert)["hidden"][0] >= 0, 3e38, -3e38)


def kl(reference: lab.Session, other: lab.Session) -> float:
    p, q = (np.exp(x.astype(np.float64)) for x in (reference.logits, other.logits))
    p, q = p / p.sum(), q / q.sum()
    return float((p * np.log(p / q)).sum())


def test_an_expert_with_a_bad_weight_is_switched_off(
    ill: Callable[..., Found], healthy: lab.Session, expert: int, tensors: Tensors, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    name = f"{EXPERTS}{expert}.w1.weight"
    found = ill({name: ((7, 3), np.inf)})
    row = lab.nan.cure(found, "ablate")
    assert (row.change, row.gone, row.left) == (f"Switch off expert {expert} in layer 1", True, None)
    mine = found.trace.model.session("all")
    stepper = mine.stepper(IDS, chunk=None)
    stepper.ablate(1, expert)
    stepper.finish()
    assert lab.nan.find(mine) is None
    assert done_by_code(row, found, capsys).logits.tobytes() == mine.logits.tobytes()
    zeroed = tensors[name].copy()
    zeroed[7, 3] = 0
    reference = lab.open(write_checkpoint(tmp_path / "zero", CONFIG, {**tensors, name: zeroed})).session("all")
    reference.feed(IDS)
    assert row.kl == pytest.approx(kl(reference, mine), abs=1e-9)
    moved = 0
    for layer in range(3):
        for before, after in zip(*(s.tape[f"layers.{layer}.moe.expert_ids"].tolist() for s in (reference, mine)),
                                 strict=True):  # fmt: skip
            wanted = [-1 if (layer, e) == (1, expert) else e for e in before]
            moved += sorted(wanted) != sorted(after)
    assert row.rerouted == moved
    taps = {path: mine.tape[path] for path in mine.tape.stored() if mine.tape[path].dtype == np.float32}
    largest = max(float(np.abs(value).max()) for value in taps.values())
    assert row.headroom is not None
    assert row.headroom[0] == pytest.approx(np.log2(np.finfo(np.float32).max / largest), abs=1e-6)


@pytest.mark.parametrize("value", [0.0, -0.25])
def test_the_element_of_a_weight_is_replaced_and_the_files_stay_as_they_are(
    ill: Callable[..., Found], expert: int, tensors: Tensors, tmp_path: Path, value: float,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    name = f"{EXPERTS}{expert}.w2.weight"
    found = ill({name: ((5, 2), np.nan)})
    before = (tmp_path / "m" / "model.safetensors").read_bytes()
    row = lab.nan.cure(found, "weight", value=value)
    assert (row.gone, row.kl, row.note) == (True, None, "other cures are compared with this run")
    assert row.change.startswith(f"Replace layers.1.moe.experts.{expert}.down[5, 2] by ")
    mended = tensors[name].copy()
    mended[5, 2] = value
    mine = lab.open(write_checkpoint(tmp_path / "mended", CONFIG, {**tensors, name: mended})).session("all")
    mine.feed(IDS)
    assert lab.nan.find(mine) is None
    assert done_by_code(row, found, capsys).logits.tobytes() == mine.logits.tobytes()
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == before


def test_another_origin_is_left_when_the_first_is_cured(
    ill: Callable[..., Found], healthy: lab.Session, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two experts of one layer that no token shares: each is an origin of its own."""
    ids = healthy.tape["layers.1.moe.expert_ids"]
    tokens = {e: set(np.flatnonzero((ids == e).any(axis=1)).tolist()) for e in range(8)}
    a, b = next((a, b) for a in range(8) for b in range(a + 1, 8) if tokens[a] and tokens[b] - tokens[a])
    found = ill({f"{EXPERTS}{e}.w2.weight": ((0, 0), np.nan) for e in (a, b)})
    assert {origin.expert for origin in found.origins} == {a, b}
    row = lab.nan.cure(found, "ablate")
    assert row.gone is False and row.left is not None and row.left.expert == b and row.kl is None
    assert row.note.startswith(f"now born in layers.1.moe.experts.{b}.output, token ")
    done_by_code(row, found, capsys)
    second = lab.nan.cure(found, "ablate", origin=1)
    assert second.change == f"Switch off expert {b} in layer 1" and second.left is not None and second.left.expert == a


def test_what_makes_no_sense_is_not_tried_and_says_why(
    ill: Callable[..., Found], healthy: lab.Session, expert: int
) -> None:
    norm = ill({"model.layers.1.input_layernorm.weight": (0, np.nan)})
    row = lab.nan.cure(norm, "ablate")
    assert (row.gone, row.note, row.code) == (None, "not tried: layers.1.attn.norm lies in no expert", "")
    row = lab.nan.cure(norm, "precision")
    assert row.note == "not tried: the run is float32, and weight value is no question of precision"
    overflow = ill({f"{EXPERTS}{expert}.w2.weight": (5, all_one_sign(healthy, expert))})
    assert overflow.origin.kind == "overflow"
    row = lab.nan.cure(overflow, "precision")
    assert row.gone is None and row.note.endswith(" × the largest float32: no precision of the sum helps")
    assert lab.nan.cure(overflow, "weight").note == "not tried: weights are finite"
    row = lab.nan.cure(overflow, "ablate")
    assert (row.gone, row.kl, row.note) == (True, None, "no run without the disease to compare with")


def test_a_run_that_cannot_be_replayed_has_rows_that_say_so(tmp_path: Path, expert: int) -> None:
    edited = lab.open().session("all")
    stepper = edited.stepper([1, 2, 3], chunk=None)
    stepper.scale("layers.1.moe.output", float("inf"))
    stepper.finish()
    found = lab.nan.find(edited)
    assert found is not None
    rows = lab.nan.cures(found)
    assert {row.note for row in rows} == {"not tried: the run cannot be replayed: it has edits"}
    assert all(row.gone is None for row in rows)
    with pytest.raises(lab.ArgumentError, match="there is no cure 'clmp'"):
        lab.nan.cure(found, "clmp")
    with pytest.raises(lab.ArgumentError, match="there is no origin 7"):
        lab.nan.cure(found, "clamp", origin=7)


def test_a_sum_that_fits_float32_is_put_in_from_float64(
    ill: Callable[..., Found], healthy: lab.Session, expert: int, tensors: Tensors, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two products of one lane overflow together; a third one in another lane would have brought them back."""
    up = f"{EXPERTS}{expert}.w3.weight"
    rows = healthy.tape.expert_rows(1, expert)
    hidden = 256 * rows["hidden"][0].astype(np.float64)  # linear in up
    low = max(range(7), key=lambda i: min(abs(hidden[[i, i + 16]])))
    other = int(np.abs(hidden[7:16]).argmax()) + 7
    assert min(abs(hidden[[low, low + 16, other]])) > 1, "large enough for products of 2.5e38"
    down = np.zeros(23)
    down[[low, low + 16, other]] = np.array([2.5e38, 2.5e38, -2.5e38]) / hidden[[low, low + 16, other]]
    found = ill({f"{EXPERTS}{expert}.w2.weight": (5, down), up: (slice(None), 256 * tensors[up])})
    origin = found.origin
    assert origin.kind == "overflow" and origin.exact is not None and abs(origin.exact) < 3.4e38
    row = lab.nan.cure(found, "precision")
    assert row.change == "Output of the experts in layer 1 summed in float64"
    session = done_by_code(row, found, capsys)
    put = session.tape.expert_rows(1, expert)["output"][:, 5]
    assert np.isfinite(put[rows["tokens"].tolist().index(origin.token)])


def overflowing(tensors: Tensors, healthy: lab.Session, expert: int) -> dict[str, tuple[Any, Any]]:
    """The expert's largest output becomes 70,000, which float16 does not hold and its gate would bring back."""
    name = f"{EXPERTS}{expert}.w2.weight"
    factor = np.float32(70000 / np.abs(healthy.tape.expert_rows(1, expert)["output"]).max())
    return {name: (slice(None), tensors[name] * factor)}


def test_an_overflow_in_float16_is_cured_by_a_wider_format_a_clamp_or_without_its_expert(
    ill: Callable[..., Found], tensors: Tensors, healthy: lab.Session, expert: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """B2: the output of an expert overflows before its gate would have brought it back."""
    found = ill(overflowing(tensors, healthy, expert), "float16")
    point, model = "layers.1.moe.experts.*.output", found.trace.model
    assert (found.origin.path, found.origin.kind) == (f"layers.1.moe.experts.{expert}.output", "overflow")
    rows = lab.nan.cures(found)
    assert [(row.kind, row.change, row.gone) for row in rows] == [
        ("precision", "Output of the experts in layer 1 in float32", True),
        ("clamp", "Clamp output of the experts in layer 1 to ±65,504", True),
        ("precision", "Whole model in bfloat16", True),
        ("ablate", f"Switch off expert {expert} in layer 1", True),
        ("weight", "Replace the weight", None),
    ]
    reference = model.session("all")
    reference.feed(IDS)
    lifted, clamped = lab.Emulation({"*": "float16", point: "float32"}), lab.Emulation("float16", saturate=point)
    emulations = [lifted, clamped, "bfloat16"]
    for row, emulation in zip(rows[:3], emulations, strict=True):
        mine = model.session("all", emulate=emulation)
        mine.feed(IDS)
        assert lab.nan.find(mine) is None
        assert done_by_code(row, found, capsys).logits.tobytes() == mine.logits.tobytes()
        assert row.kl == pytest.approx(kl(reference, mine), abs=1e-9)
        moved = [np.sort(reference.tape[p], axis=1) != np.sort(mine.tape[p], axis=1)
                 for p in (f"layers.{layer}.moe.expert_ids" for layer in range(3))]  # fmt: skip
        assert row.rerouted == sum(int(each.any(axis=1).sum()) for each in moved)
    done_by_code(rows[3], found, capsys)
    assert rows[1].headroom == (0.0, f"layers.1.moe.experts.{expert}.output")
    assert rows[2].headroom is not None and rows[2].headroom[0] > 100
    whole = lab.nan.cure(found, "precision", to="float32", whole=True)
    assert (whole.change, whole.gone, whole.kl, whole.rerouted) == ("Whole model in float32", True, 0.0, 0)


def test_a_sum_that_overflows_in_float16_is_made_in_float32(
    ill: Callable[..., Found], tensors: Tensors, healthy: lab.Session, expert: int, capsys: pytest.CaptureFixture[str]
) -> None:
    point = "layers.1.moe.experts.*.output"
    emulation = lab.Emulation(accumulation={"*": "float16", "layers.0.*": "float32"})
    found = ill(overflowing(tensors, healthy, expert), emulation)
    assert found.origin.point == f"layers.1.moe.experts.{expert}.output"
    row = lab.nan.cure(found, "precision")
    assert row.gone is True and f"'{point}': 'float32'" in row.code
    mine = found.trace.model.session(
        "all", emulate=lab.Emulation(accumulation={"*": "float16", "layers.0.*": "float32", point: "float32"})
    )
    mine.feed(IDS)
    assert lab.nan.find(mine) is None
    assert done_by_code(row, found, capsys).logits.tobytes() == mine.logits.tobytes()


def test_cures_are_rows_in_order_and_an_interrupt_keeps_those_that_were_made(
    ill: Callable[..., Found], expert: int
) -> None:
    found = ill({f"{EXPERTS}{expert}.w1.weight": ((7, 3), np.nan)})
    seen: list[float] = []
    rows = lab.nan.cures(found, seen.append)
    assert [row.kind for row in rows] == ["precision", "clamp", "ablate", "weight"]
    assert [row.gone for row in rows] == [None, False, True, True]
    assert rows[1].note == "NaN stays NaN when it is clamped"
    assert seen == sorted(seen) and seen[-1] == pytest.approx(1.0)

    def stop(done: float) -> None:
        if done > 0.55:
            raise KeyboardInterrupt

    kept = lab.nan.cures(found, stop)
    assert [row.kind for row in kept] == [row.kind for row in rows]
    assert [(row.gone, row.note) for row in kept[:2]] == [(row.gone, row.note) for row in rows[:2]]
    assert [(row.gone, row.note) for row in kept[2:]] == [(None, "not tried: it was stopped before its turn")] * 2
    with pytest.raises(KeyboardInterrupt):
        lab.nan.cure(found, "ablate", progress=stop)


@pytest.mark.parametrize("nothing", [None, 3, "run.safetensors", object()])
def test_only_what_find_returned_can_be_cured(nothing: Any) -> None:
    """None of a clean run too: a sentence instead of a missing attribute."""
    words = "returned None" if nothing is None else "what lab.nan.find returned"
    for call in (lambda: lab.nan.cure(nothing, "clamp"), lambda: lab.nan.cures(nothing)):
        with pytest.raises(lab.ArgumentError, match=words):
            call()


def test_a_cure_refuses_origins_values_and_formats_that_are_none(ill: Callable[..., Found]) -> None:
    """A format that does not exist is an error, also where precision would not be tried."""
    found = ill({"model.norm.weight": (3, np.nan)})
    for options, words in (
        [({"origin": origin}, "no origin") for origin in (0.5, "a", None, 10**30, True)]
        + [({"value": value}, "value takes a number") for value in ("x", None, [1, 2], 1j)]
        + [({"to": to}, "number format") for to in ("float99", 3, [], "float64", {"*": "float16"})]
    ):
        for kind in ("weight", "precision"):
            with pytest.raises(lab.ArgumentError, match=words):
                lab.nan.cure(found, kind, **options)
    assert lab.nan.cure(found, "weight", value=np.float32(1)).gone
    assert lab.nan.cure(found, "weight", value=10**400).gone is False  # Inf
