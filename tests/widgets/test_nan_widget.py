"""The tracer without a browser: selection, messages, cures, pictures, the saved page."""

from __future__ import annotations

import gc
import json
import re
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import read_checkpoint, write_checkpoint
from diffs import copied, of
from founds import CURED, EXPERT, LAYER, OVERFLOW, TOKEN, UNKNOWN, WEIGHT, many, overflow, run, table

import colibri_lab as lab
from colibri_lab.errors import ArgumentError, BusyError, ColibriError, TapError
from colibri_lab.testing import tiny_model
from colibri_lab.widgets.nan import NanTracer

HIDDEN = f"layers.{LAYER}.moe.experts.*.hidden"


@pytest.fixture
def view() -> NanTracer:
    return lab.NanTracer(overflow(WEIGHT, UNKNOWN))


@pytest.fixture
def curable(view: NanTracer, monkeypatch: pytest.MonkeyPatch) -> NanTracer:
    """A view whose run has a model; the cure itself is a stand-in."""
    assert view.found is not None
    view.found.trace.model = object()

    def cure(found: Any, kind: str, *, origin: int, model: Any, progress: Any, whole: bool = False) -> Any:
        progress(0.5)
        return CURED

    monkeypatch.setattr("colibri_lab.nan.cure", cure, raising=False)
    return view


def sent(view: NanTracer) -> list[dict[str, Any]]:
    """Everything the view sends from now on."""
    out: list[dict[str, Any]] = []
    view.send = lambda content, buffers=None: out.append(content)
    return out


def test_it_takes_what_was_found(view: NanTracer) -> None:
    """And starts at the first origin; code and repr say where and what."""
    assert view.selection == {"path": HIDDEN, "layer": LAYER, "token": TOKEN, "expert": EXPERT}
    assert repr(view) == "<NanTracer of bundled model · emulated float16 · 40 tokens: overflow>"
    other = lab.NanTracer(view.found)
    other.selection = {"path": "logits", "token": 2}
    exec(view.code, {"view": other})
    assert other.selection == view.selection


def test_a_clean_run_is_shown_as_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a search of a trace does not find; None alone, what it returns then, is a clean run without a map."""
    monkeypatch.setattr("colibri_lab.nan.find", lambda x, model=None, progress=None: None, raising=False)
    monkeypatch.setattr("colibri_lab.nan.scan", lambda x: table(born=None), raising=False)
    view = lab.NanTracer(run())
    assert view._shown.room.formats == ("float16",)
    assert view.found is None and view.selection["path"] == "layers.2.moe.experts.*.hidden"
    text = view._repr_mimebundle_()["text/plain"]
    assert "✓ CLEAN  closest to overflow: layer 2, expert hidden, 0.9 bit in float16" in text
    with pytest.raises(ArgumentError, match="nothing needs a cure"):
        view.cure("ablate")
    assert repr(lab.NanTracer(None)) == "<NanTracer of a clean run: clean>"


def test_a_clean_run_says_what_is_foretold_and_what_is_too_small() -> None:
    """A ramp of the stream that passes the end of float16 in layer 3; shares as `headroom` has them."""
    trace = run()
    arrays = copied(trace)
    for layer in trace.layers:
        arrays[f"layers.{layer}.output"] = np.full((40, 16), 16.0 ** (layer + 1), np.float32)
        arrays[f"layers.{layer}.attn.out"] = np.full((40, 16), 1e-6, np.float32)
    arrays["logits"] = np.ones((40, 50), np.float32)
    view = lab.NanTracer(of(trace, arrays, arithmetic="float32", emulation=None))
    facts = view._shown.facts()
    room = lab.nan.headroom(of(trace, arrays), ["float16"])
    assert facts["foretold"] == [forecast.words for forecast in room.forecast() if forecast.came][:3]
    assert "residual stream, will overflow float16" in facts["foretold"][0]
    assert facts["small"][0] == ["layer 0, attention", 640, 640]


def test_a_session_that_has_not_run_says_what_to_do() -> None:
    view = lab.NanTracer(lab.open().session())
    messages = sent(view)
    view.handle({"kind": "ready"})
    assert messages[0]["facts"]["empty"] and messages[0]["facts"]["closest"] is None
    assert "nothing is NaN or Inf" in view._repr_mimebundle_()["text/plain"]


def test_an_overflow_of_a_real_run_is_cured_and_replayed(tmp_path: Path) -> None:
    """Emulated float16: precision removes it, and the layers behind it have their float32 sizes then."""
    model = lab.open()
    names = {name: np.array(model.weights[f"layers.2.moe.experts.3.{name}"]) for name in ("gate", "up")}
    large = {
        f"layers.2.moe.experts.3.{name}": (w.astype(np.float32) * 200).astype(w.dtype) for name, w in names.items()
    }
    session = model.with_weights(large).session(capture="all", emulate="float16")
    session.feed("The engine counts its gates.")
    view = lab.NanTracer(session)
    assert view.found.origin.kind == "overflow" and view.found.origin.expert == 3
    assert view.cure("precision").gone in (True, False)
    assert view.cure("whole model").gone
    plain = model.with_weights(large).session(capture="all")
    plain.feed("The engine counts its gates.")
    expected = {str(row["path"]): row["absmax"] for row in lab.nan.scan(plain)}
    last = view._shown.paths.index("layers.5.output")
    assert view._shown.replayed[last] == np.float32(expected["layers.5.output"])
    assert view.to_html(tmp_path / "real.html").exists()


def test_an_origin_in_a_tap_that_was_not_recorded_is_shown_at_the_tap_behind_it(tmp_path: Path) -> None:
    """A watched run knows of scores that overflowed to −Inf; its softmax took them for 0 and is no tap here."""
    model = lab.open()
    large = {}
    for name, factor in (("layers.0.attn.q", -90), ("layers.0.attn.k", 90)):
        weight = np.array(model.weights[name])
        large[name] = (weight.astype(np.float32) * factor).astype(weight.dtype)
    session = model.with_weights(large).session(capture="all", emulate="float16", watch="watch")
    session.feed("The engine counts its gates")
    view = lab.NanTracer(session)
    assert view.found is not None and view.found.origin.point == "layers.0.attn.scores"
    assert view.found.origin.path == "layers.0.attn.weights" and view.found.propagation.ruined == ()
    assert view.selection["path"] == "layers.0.attn.out" == view._head()[0]["facts"]["origins"][0]["at"]
    assert view.found.propagation.swallowed == (
        "layers.0.attn.out, token 6: −Inf came in from layers.0.attn.scores, only finite values came out",
    )
    assert set(view._repr_mimebundle_()) > {"image/png"} and view.to_html(tmp_path / "run.html").exists()
    data = view._shown
    assert [data.shown_at(path) for path in ("layers.0.moe.experts.7.up", "layers.9.output", "embed", "logits")] == [
        "layers.0.moe.experts.*.up", "norm", "embed", "logits",
    ]  # fmt: skip


def test_a_path_is_loaded_and_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []
    monkeypatch.setattr("colibri_lab.nan.find", lambda x, model=None, progress=None: seen.append(x), raising=False)
    monkeypatch.setattr("colibri_lab.nan.scan", lambda x: table(born=None), raising=False)
    run().save(tmp_path / "run.safetensors")
    lab.NanTracer(tmp_path / "run.safetensors")
    assert isinstance(seen[0], lab.Trace) and len(seen[0].ids) == 40


@pytest.mark.parametrize(("wrong", "words"), [(3, "not int"), ({}, "not dict"), (np.zeros(3), "not ndarray")])
def test_anything_else_is_refused_in_a_sentence(wrong: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        lab.NanTracer(wrong)


def test_a_model_may_be_a_path_and_nothing_else(tmp_path: Path) -> None:
    """It is opened once, for the search and for the cures; that of another run is refused."""
    config, tensors = read_checkpoint(tiny_model(tmp_path / "clean"))
    tensors["model.norm.weight"] = tensors["model.norm.weight"].copy()
    tensors["model.norm.weight"][3] = np.inf
    folder = write_checkpoint(tmp_path / "broken", config, tensors)
    session = lab.open(folder).session(capture="all", max_tokens=2)
    session.feed([1, 2])
    session.trace().save(tmp_path / "run.safetensors")
    view = lab.NanTracer(tmp_path / "run.safetensors", model=str(folder))
    cure = view.cure("weight")
    assert cure is not None and cure.gone is True
    with pytest.raises(ArgumentError, match="made by another model"):
        lab.NanTracer(tmp_path / "run.safetensors", model=str(tmp_path / "clean"))
    with pytest.raises(ArgumentError, match="Model or its path; this is a int"):
        lab.NanTracer(view.found, model=3)
    with pytest.raises(ArgumentError, match="Model or its path; this is a int"):
        lab.nan.cure(view.found, "clamp", model=3)


def test_a_clean_run_has_no_other_origin() -> None:
    view = lab.NanTracer(None)
    with pytest.raises(ArgumentError, match="origins are 0 to 0"):
        view.chosen = 1


def test_selecting_in_python_sends_the_cell(view: NanTracer) -> None:
    messages = sent(view)
    view.selection = {"path": "layers.4.output"}
    assert [(m["kind"], m["cell"]["path"], m["cell"]["bad"]) for m in messages] == [("cell", "layers.4.output", 5)]
    with pytest.raises(TapError):
        view.selection = {"path": "layers.4.attn.z"}
    assert view.selection["path"] == "layers.4.output"


def test_choosing_an_origin_sends_its_way_and_its_cures(view: NanTracer) -> None:
    messages = sent(view)
    view.chosen = 1
    assert [m["kind"] for m in messages] == ["origin", "cures"]
    assert messages[0]["boxes"][0]["title"] == "queries[2, 7]"
    for wrong in (3, -1, 10**40):
        with pytest.raises(ArgumentError, match="origins are 0 to 2"):
            view.chosen = wrong


def test_requests_are_answered(view: NanTracer) -> None:
    """ready: everything; seen: a word; html: the page; anything else is shown as an error."""
    messages = sent(view)
    view._on_message(view, {"kind": "ready"}, [])
    assert [m["kind"] for m in messages] == ["head", "cures", "origin", "cures", "cell"]
    view._on_message(view, {"kind": "seen"}, [])
    view._on_message(view, {"kind": "html"}, [])
    assert [m["kind"] for m in messages[5:]] == ["heard", "html"]
    view._on_message(view, {"kind": "dance"}, [])
    assert view._status["state"] == "error" and "dance" in view._status["text"]


def test_a_cure_is_run_and_shown(curable: NanTracer) -> None:
    """Running, then its result in its row; the button says again."""
    messages = sent(curable)
    assert curable.cure("ablate") is CURED
    rows = [m for m in messages if m["kind"] == "cures"]
    assert [m["running"] for m in rows] == [3, None]
    assert [row["gone"] for row in rows[-1]["rows"]] == [None, None, None, True, None]
    assert curable.cures == [CURED] and curable._status["state"] == "idle"
    curable.chosen = 1
    assert curable.cures == []


def test_a_cure_that_is_not_offered_names_the_reason(view: NanTracer, curable: NanTracer) -> None:
    with pytest.raises(ArgumentError, match="no weight is the cause"):
        curable.cure("weight")
    with pytest.raises(ArgumentError, match="did you mean 'ablate'"):
        curable.cure("ablat")


def test_a_cure_that_fails_or_is_stopped_is_said(curable: NanTracer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error as a sentence and nothing running; Stop between two reports ends it calmly; no second at once."""

    def fails(*_: Any, **__: Any) -> Any:
        raise ArgumentError("the file changed")

    monkeypatch.setattr("colibri_lab.nan.cure", fails, raising=False)
    curable._guarded({"kind": "cure", "name": "ablate"})
    assert curable._status["text"] == "The file changed. Nothing was changed."
    assert curable._cures_message()["running"] is None

    def stopped(*_: Any, progress: Any, **__: Any) -> Any:
        curable.stop()
        with pytest.raises(BusyError):
            curable.cure("clamp")
        progress(0.5)

    monkeypatch.setattr("colibri_lab.nan.cure", stopped, raising=False)
    assert curable.cure("ablate") is None
    assert curable._status == {"state": "idle", "text": "Stopped. Nothing was changed."}


def test_G1_the_page_and_the_state_hold_no_bare_nan(view: NanTracer, tmp_path: Path) -> None:
    """NaN in every table and label, written as words; the state round-trips."""
    view.chosen = 1
    page = view.to_html(tmp_path / "nan.html").read_text(encoding="utf-8")
    saved = re.search(r'id="saved">(.*?)</script>', page, re.DOTALL)[1]
    json.loads(saved, parse_constant=lambda name: pytest.fail(f"{name} in the page"))
    assert not re.search(r"(src|href)=|https?:|@import", page)
    state = view.get_state()
    text = json.dumps({k: v for k, v in state.items() if k in ("selection", "chosen", "_status")}, allow_nan=False)
    other = lab.NanTracer(view.found)
    other.set_state(json.loads(text))
    assert (other.selection, other.chosen) == (view.selection, 1)


def test_the_page_holds_the_way_of_each_origin(view: NanTracer, tmp_path: Path) -> None:
    page = view.to_html(tmp_path / "nan.html").read_text(encoding="utf-8")
    saved = json.loads(re.search(r'id="saved">(.*?)</script>', page, re.DOTALL)[1])
    ways = [m["content"]["number"] for m in saved["messages"] if m["content"]["kind"] == "origin"]
    assert ways == [0, 1, 2]
    big = lab.NanTracer(many(300, 8, 16, 40)).to_html(tmp_path / "many.html")
    assert big.stat().st_size < 1_000_000


def test_text_and_picture_stay_in_the_file(view: NanTracer) -> None:
    """Kind, place, cause and damage in words; a PNG."""
    bundle = view._repr_mimebundle_()
    text = bundle["text/plain"]
    assert "OVERFLOW  layer 3, expert 5 hidden, token 35" in text and OVERFLOW.cause in text
    assert "ruined: logits of 5 of 40 tokens (tokens 35–39)" in text and "independent origins: 3" in text
    assert bundle["image/png"].startswith(b"\x89PNG") and len(bundle["image/png"]) < 100_000


def test_G2_a_closed_view_lets_go_of_the_run(view: NanTracer) -> None:
    """And says so."""
    trace = weakref.ref(view.found.trace)
    view.close()
    gc.collect()
    assert trace() is None
    assert repr(view) == "<NanTracer, closed>"
    with pytest.raises(ColibriError, match="closed"):
        _ = view.found
