"""The cache lab without a browser: setting, selection, messages, pictures, the saved page."""

from __future__ import annotations

import gc
import json
import re
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab.errors import ArgumentError, ColibriError, FileError
from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace
from colibri_lab.widgets.cache import CacheLab


@pytest.fixture(scope="module")
def trace() -> Trace:
    return synthetic_trace(layers=3, experts=8, top_k=2, tokens=40)


@pytest.fixture
def view(trace: Trace) -> CacheLab:
    return lab.CacheLab(trace, capacity=4)


def sent(view: CacheLab) -> list[dict[str, Any]]:
    """Everything the view sends from now on."""
    out: list[dict[str, Any]] = []
    view.send = lambda content, buffers=None: out.append(json.loads(json.dumps(content, allow_nan=False)))
    return out


def test_it_takes_a_session_a_trace_or_a_path(trace: Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "run.safetensors")
    assert lab.CacheLab(tmp_path / "run.safetensors").trace.ids == trace.ids
    session = lab.open().session(capture="routing")
    session.feed("The engine counts its gates.")
    view = lab.CacheLab(session, policy="fifo", scope="global", capacity=20)
    assert view.trace.ids == session.ids and view.simulation.policy == "fifo" and view.simulation.capacity == 20
    assert "look-ahead" in view._shown.prefetches
    with pytest.raises(ArgumentError, match=r"not Model; make a session of it: model\.session"):
        lab.CacheLab(session.model)
    with pytest.raises(ArgumentError, match="not int"):
        lab.CacheLab(3)


@pytest.mark.parametrize(
    "change",
    [{}, {"policy": "belady", "capacity": 3}, {"scope": "global"}, {"passes": "trace"}, {"prefetch": "previous"}],
)
def test_the_code_makes_the_same_simulation(view: CacheLab, change: dict[str, Any]) -> None:
    """As it is printed, beside a view of that name."""
    view.setting = change
    again = eval(view.code, {"lab": lab, "view": view})
    assert again.hits.tolist() == view.simulation.hits.tolist()
    assert again.misses.tolist() == view.simulation.misses.tolist()


def test_what_is_copied_as_code_runs_beside_the_view(trace: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    """Report and predicted speed are those of the view, with sizes, profile and machine."""
    machine = lab.cache.Machine(2e9, 0.001, overlap=0.5, memory_bytes=10**9, source="a \"quoted\" one")
    profile = synthetic_trace(layers=3, experts=8, top_k=2, tokens=9, seed=5)
    view = lab.CacheLab(trace, policy="static", capacity=4, machine=machine, expert_bytes=1000, profile=profile)
    before, after = sent_head(view)["recipe"]
    exec(f"{before}{view.code}{after}", {"view": view})
    speed = lab.cache.predict(view.simulation, machine)
    assert capsys.readouterr().out == f"{view.simulation.report()}\n{speed}\n"


def sent_head(view: CacheLab) -> dict[str, Any]:
    """The facts that the browser is told first."""
    out = sent(view)
    view.handle({"kind": "ready"})
    facts: dict[str, Any] = out[0]["facts"]
    return facts


def test_replaced_weights_and_logits_that_are_not_finite_are_told() -> None:
    """The title of a sick copy says so; tokens are counted whose router logits are no numbers in some layer."""
    session = lab.exercises.patient(1).session(capture="routing")
    session.feed("The fox counts the eggs in her nest. She writes a function: def total(eggs): return sum(eggs)")
    view = lab.CacheLab(session)
    facts, found = sent_head(view), np.zeros(len(session.ids), bool)
    for layer in view.trace.moe_layers:
        found |= ~np.isfinite(view.trace[f"layers.{layer}.moe.router_logits"]).all(axis=1)
    assert facts["title"].startswith("bundled model, some weights replaced · ")
    assert found.any() and facts["not_finite"] == int(found.sum())
    assert "router logits that are not finite" in view._repr_mimebundle_()["text/plain"]


def test_a_recording_from_elsewhere_is_not_said_to_have_passes(trace: Trace) -> None:
    """Its tokens are served one by one, and the browser hears that no passes are known."""
    meta = {**trace.meta, "source": "routes.csv", "passes": [[0, 40]]}
    arrays = {path: trace[path] for path in trace if path.endswith("expert_ids")}
    view = lab.CacheLab(Trace(arrays, ids=[-1] * 40, texts=[], meta=meta))
    assert sent_head(view)["imported"] and view.setting["passes"] == "each"
    assert view._repr_mimebundle_()["text/plain"]


def test_a_view_that_was_refused_is_forgotten_quietly(tmp_path: Path) -> None:
    """In one sentence that names what to do, and nothing is raised when the half-made widget goes away."""
    model = lab.open()
    session = model.session(capture="routing")
    for given, options, words in (
        (model, {}, r"make a session of it: model\.session"),
        (session, {"machine": "fast"}, r"measure_machine\(model\) makes one"),
        (tmp_path, {}, r"a checkpoint is opened first: lab\.CacheLab\(lab\.open"),
        (session, {"cap": 3}, "unexpected keyword"),
    ):
        with pytest.raises((ArgumentError, FileError, TypeError), match=words):
            lab.CacheLab(given, **options)
        gc.collect()  # what is raised in __del__ fails the test, as every warning does


def test_setting_and_selection_are_readable_and_settable(view: CacheLab) -> None:
    view.setting = {"capacity": 6}
    assert (view.setting["policy"], view.setting["capacity"]) == ("lru", 6)
    view.selection = {"token": 7, "expert": None}
    assert view.selection["token"] == 7 and view.selection["layer"] in view.trace.moe_layers
    for wish in ({"token": 40}, {"expert": 8}, {"layer": 9}, {"place": 1}):
        with pytest.raises(ArgumentError):
            view.selection = wish
    assert view.selection["token"] == 7


def test_the_browser_is_told_step_by_step(view: CacheLab) -> None:
    """At the start the facts, the chosen curve and its timeline; other curves when they are asked for."""
    out = sent(view)
    view.handle({"kind": "ready"})
    assert [message["kind"] for message in out if message["kind"] != "panel"] == ["head", "curve", "timeline"]
    assert out[1]["policy"] == "lru" and out[1]["capacities"] == [2, 3, 4, 5, 6, 7, 8]
    del out[:]
    view.handle({"kind": "curve", "policy": "belady"})
    assert [message["policy"] for message in out] == ["belady"]
    del out[:]
    view.setting = {"capacity": 7}
    assert [message["facts"]["setting"]["capacity"] for message in out if message["kind"] == "timeline"] == [7]
    before = view.selection
    view.handle({"kind": "miss", "by": 1})
    assert (view.selection != before) == all(message["kind"] != "nomiss" for message in out)
    with pytest.raises(ArgumentError, match="not known"):
        view.handle({"kind": "what"})


@pytest.mark.parametrize("stopped", [False, True])
def test_a_look_ahead_is_shown_and_can_be_stopped(monkeypatch: pytest.MonkeyPatch, stopped: bool) -> None:
    """Setting it computes nothing; the first curve does. Stopped, the view goes on without prefetch."""
    session = lab.open().session(capture="routing")
    session.feed("The engine counts its gates.")
    view = lab.CacheLab(session)
    told: list[str] = []
    view.observe(lambda change: told.append(change["new"]["state"]), "_status")

    def looked(trace: Trace, *, progress: Any) -> Any:
        if stopped:
            view.stop()
        progress(0.5)
        return lab.cache.plan(trace, "previous")

    monkeypatch.setattr("colibri_lab.cache.look_ahead", looked)
    out = sent(view)
    view.setting = {"prefetch": "look-ahead"}
    assert [message["kind"] for message in out] == []
    view.handle({"kind": "curve", "policy": "lru"})
    assert told[0] == "working" and told[-1] == "idle"
    assert {message["prefetch"] for message in out if message["kind"] == "curve"} == {view.setting["prefetch"]}
    assert view.setting["prefetch"] == ("none" if stopped else "look-ahead")
    assert any(message["kind"] == "timeline" for message in out)


def test_a_stopped_look_ahead_is_not_begun_by_who_waited_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another curve that was asked for while it ran: Stop ends the prefetch for both."""
    session = lab.open().session(capture="routing")
    session.feed("The engine counts its gates.")
    view = lab.CacheLab(session)
    waiting = threading.Thread(target=view.handle, args=({"kind": "curve", "policy": "lfu"},))
    begun: list[str] = []

    class Lock:
        """Who waits for it goes on before who lets go of it does."""

        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __enter__(self) -> None:
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()
            if threading.current_thread() is not waiting:
                waiting.join()

    def looked(trace: Trace, *, progress: Any) -> Any:
        begun.append("look-ahead")
        if len(begun) == 1:
            waiting.start()
        view.stop()
        progress(0.5)

    view._work = Lock()
    monkeypatch.setattr("colibri_lab.cache.look_ahead", looked)
    sent(view)
    view.setting = {"prefetch": "look-ahead"}
    view.handle({"kind": "curve", "policy": "lru"})
    assert len(begun) == 1 and view.setting["prefetch"] == "none"


def test_a_real_run_stands_beside_the_simulation(trace: Trace) -> None:
    """The setting is that of the run, its speed is among the facts, its machine predicts."""
    machine = lab.cache.Machine(read_bytes_per_s=1e6, seconds_per_token=1e-3)
    run = SimpleNamespace(
        trace=trace, machine=machine, policy="lru", capacity=3, scope="layer", tokens_per_s=12.5,
        requests=np.full(3, 10), misses=np.full(3, 4), expert_bytes=np.full((3, 8), 1000), simulation=None,
    )  # fmt: skip
    view = lab.CacheLab(run)
    assert (view.setting["capacity"], view.setting["passes"]) == (3, "trace")
    facts = view._shown.facts()
    assert facts["measured"] == [
        {"policy": "lru", "capacity": 3, "scope": "layer", "speed": 12.5, "misses": 12, "requests": 30}
    ]
    assert facts["machine"]["source"] == "given by hand"
    assert view._shown.curve(view.setting, "lru")["capacities"][0] == 2


def test_a_saved_page_holds_curves_and_timelines(view: CacheLab, tmp_path: Path) -> None:
    """All capacities of the chosen policy, so that dragging goes on; numbers only, no address."""
    page = view.to_html(tmp_path / "cache.html").read_text(encoding="utf-8")
    saved = json.loads(re.findall(r'id="saved">(.*?)</script>', page, flags=re.DOTALL)[0])
    contents = [message["content"] for message in saved["messages"]]
    curves = {(c["policy"], c["scope"]) for c in contents if c["kind"] == "curve"}
    assert {("lru", "layer"), ("belady", "layer"), ("lru", "global")} <= curves
    here = [c["facts"] for c in contents if c["kind"] == "timeline"]
    assert {f["setting"]["capacity"] for f in here if f["layer"] == view.selection["layer"]} == set(range(2, 9))
    assert {f["layer"] for f in here} == set(view.trace.moe_layers)
    assert not re.search(r"https?://(?!www\.w3\.org)", page)


def test_a_reopened_notebook_shows_text_and_picture(view: CacheLab) -> None:
    bundle = view._repr_mimebundle_()
    assert bundle["image/png"].startswith(b"\x89PNG")
    share = view.simulation.misses.sum() / view.simulation.requests.sum()
    assert f"LRU with 4 experts per layer: {100 * share:.0f} % of requests miss" in bundle["text/plain"]
    assert "runner-up" in bundle["text/plain"]


@pytest.mark.parametrize("tokens", [0, 1])
def test_little_or_nothing_is_shown_as_such(tokens: int) -> None:
    session = lab.open().session(capture="routing")
    if tokens:
        session.feed([5] * tokens)
    view = lab.CacheLab(session)
    out = sent(view)
    view.handle({"kind": "ready"})
    assert out[0]["facts"]["tokens"] == tokens
    assert any(message["kind"] == "curve" for message in out) == bool(tokens)
    assert ("nothing has run" in view._repr_mimebundle_()["text/plain"]) == (tokens == 0)
    assert view._page()


@pytest.mark.parametrize("empty", ["no layer", "no expert"])
def test_where_nobody_asks_for_an_expert_nothing_fails(tmp_path: Path, empty: str) -> None:
    """A model without experts, and a recording whose every slot is empty."""
    found = synthetic_trace(layers=2, experts=8, top_k=2, tokens=9, dense_layers=[0, 1] if empty == "no layer" else [])
    arrays = {path: np.full_like(found[path], -1) if "expert_ids" in path else found[path] for path in found}
    found = Trace(arrays, ids=found.ids, texts=found.texts, meta=found.meta)
    machine = lab.cache.Machine(1e9, 0.001, memory_bytes=100)
    view = lab.CacheLab(found, expert_bytes=1000, machine=machine)
    out = sent(view)
    view.handle({"kind": "ready"})
    view.handle({"kind": "miss", "by": 1})
    assert out[-1]["kind"] == "nomiss"
    assert view._repr_mimebundle_()["image/png"] and view.to_html(tmp_path / "page.html").stat().st_size
    view.setting = {"scope": "global"}
    assert int(view.simulation.requests.sum()) == 0


@pytest.mark.parametrize("given", [{"machine": 3}, {"runs": 3}, {"runs": [3]}, {"profile": 3}])
def test_what_is_no_machine_run_or_profile_is_refused_at_once(trace: Trace, given: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"lab\.cache\.(Machine|live)|a trace or a session"):
        lab.CacheLab(trace, **given)


def test_a_closed_view_lets_go(trace: Trace) -> None:
    view = lab.CacheLab(trace)
    data = weakref.ref(view._shown)
    view.close()
    gc.collect()
    assert data() is None and repr(view) == "<CacheLab, closed>"
    view.handle({"kind": "ready"})
    with pytest.raises(ColibriError, match="closed"):
        print(view.trace)
