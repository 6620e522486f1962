"""The panels of CacheLab about the machine: what they show, what their buttons do, why something cannot be shown."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab.widgets.cache_panels import Panels, keys_facts, residency_facts

HERE = {"layer": 1, "token": 5, "expert": 3}


def panels(trace: Any, session: Any = None) -> Panels:
    data: Any = SimpleNamespace(trace=trace, session=session)
    return Panels(data)


class Pages:
    """Stands for `lab.cache.residency`: two layers of four experts, and a note of what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.available, self.reason = True, ""
        self.share = np.array([[0, 0.25, 1, np.nan], [1, 1, 0, 0.5]])
        self.bytes = np.full((2, 4), 1000, np.int64)
        self.locked = np.zeros((2, 4), bool)

    def refresh(self) -> None:
        self.asked.append(("refresh",))

    def __getattr__(self, name: str) -> Any:
        def change(layer: int, expert: int) -> Any:
            self.asked.append((name, layer, expert))
            return SimpleNamespace(before=0.5, after=1.0, sentence="1 expert: all is there; 3% is shared")

        return change


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Pages:
    """A session's panels find these pages."""
    made = Pages()
    monkeypatch.setattr("colibri_lab.cache.residency", lambda model: made)
    return made


@pytest.fixture
def opened(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> Panels:
    """Panels of a session that has run; its keys are busy."""

    def busy(session: Any) -> Any:
        raise lab.BusyError("session busy")

    monkeypatch.setattr("colibri_lab.cache.keys", busy)
    trace = lab.testing.synthetic_trace(layers=2, experts=4, tokens=100)
    return panels(trace, SimpleNamespace(model=object(), ids=trace.ids))


def of(found: Panels, name: str, selection: Any = None) -> dict[str, Any]:
    return dict(found.shown(selection or HERE))[name][0]


def test_an_open_model_without_a_session_is_not_called_a_recording() -> None:
    """As after a real run: what is said leads to a view that shows the keys."""
    session = lab.open().session(capture="routing")
    session.feed("The engine counts.")
    facts = dict(panels(session.trace()).shown({"layer": 1, "token": 2, "expert": 3}))["keys"][0]
    assert facts["reason"].startswith("The model is open") and "lab.CacheLab(session)" in facts["reason"]
    again = session.trace().model.session()
    again.feed(session.trace().ids)
    assert not dict(panels(again.trace(), again).shown({"layer": 1, "token": 2, "expert": 3}))["keys"][0]["reason"]


def test_a_recording_says_why_there_is_nothing_to_show() -> None:
    """Every panel has a sentence, and none has numbers."""
    shown = dict(panels(lab.testing.synthetic_trace()).shown(HERE))
    assert set(shown) == {"residency", "roofline", "keys"}
    for facts, arrays in shown.values():
        assert facts["reason"].startswith("This is a recording") and not arrays


def test_a_session_that_has_not_run_measures_nothing(opened: Panels) -> None:
    empty = panels(lab.testing.synthetic_trace(tokens=0), opened.data.session)
    nowhere = {"layer": 1, "token": None, "expert": None}
    assert of(empty, "roofline", nowhere)["reason"] == "Nothing has run: feed the session first."
    assert of(empty, "keys", nowhere)["reason"] == "Nothing has run yet: no key is cached."
    with pytest.raises(lab.ArgumentError, match="feed the session"):
        empty.act("roofline", "measure", nowhere, None)


@pytest.mark.parametrize("act", ["warm", "drop", "lock", "unlock"])
def test_a_button_acts_on_the_selected_expert_alone(opened: Panels, pages: Pages, act: str) -> None:
    opened.act("residency", act, HERE, None)
    assert pages.asked == [(act, 1, 3), ("refresh",)]
    state = "locked" if "lock" in act else "in memory"
    said = f"{act.capitalize()}: 50 % {state} before, 100 % now; 3% is shared."
    assert of(opened, "residency")["change"] == said
    assert "expert 3 of layer 1" in opened.doing("residency", act, HERE)


def test_what_a_button_did_is_said_of_its_expert_alone(opened: Panels) -> None:
    opened.act("residency", "warm", HERE, None)
    assert not of(opened, "residency", HERE | {"expert": 2})["change"]
    assert of(opened, "residency")["change"]
    opened.act("residency", "refresh", HERE, None)
    assert not of(opened, "residency")["change"]


@pytest.mark.parametrize(("name", "act"), [("residency", "burn"), ("roofline", "warm"), ("nothing", "measure")])
def test_a_button_that_does_not_exist_is_refused(opened: Panels, name: str, act: str) -> None:
    with pytest.raises(lab.ArgumentError, match="no button"):
        opened.act(name, act, HERE, None)


def test_without_an_expert_nothing_is_changed(opened: Panels, pages: Pages) -> None:
    with pytest.raises(lab.ArgumentError, match="Select an expert"):
        opened.act("residency", "drop", HERE | {"expert": None}, None)
    assert not pages.asked


def test_shares_reach_the_browser_with_what_is_not_known(pages: Pages) -> None:
    facts, arrays = residency_facts(pages, [0, 1])
    assert facts["layers"] == [0, 1] and facts["experts"] == 4
    np.testing.assert_array_equal(arrays["share"], pages.share.astype(np.float32))
    assert arrays["locked"].dtype == np.uint8 and arrays["size"].tolist() == pages.bytes.tolist()


def test_looking_measures_nothing_and_measuring_runs_the_first_tokens(
    opened: Panels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 ids at most, with the listener that can stop it; the picture stays afterwards."""
    heard: list[Any] = []

    def profile(model: Any, ids: list[int], *, progress: Any) -> Any:
        heard.append((model, ids, progress))
        return "a profile"

    monkeypatch.setattr(lab, "profile", profile, raising=False)
    monkeypatch.setattr("colibri_lab.widgets.cache_panels.profile_facts", lambda found: {"reason": "", "of": found})
    assert of(opened, "roofline") == {"reason": ""} and not heard
    opened.act("roofline", "measure", HERE, print)
    assert heard == [(opened.data.session.model, list(opened.data.trace.ids[:64]), print)]
    assert of(opened, "roofline")["of"] == "a profile"


def test_keys_that_cannot_be_read_now_are_a_sentence(opened: Panels) -> None:
    assert of(opened, "keys")["reason"] == "session busy"


def test_keys_of_other_tokens_are_not_shown_as_those_of_the_view() -> None:
    """A session that went on has them still; one that was reset does not."""
    run = lab.open().session(capture="routing")
    run.feed("She counts the eggs in her nest")
    found = panels(run.trace(), run)
    run.feed(" again")
    assert "position" in of(found, "keys", {**HERE, "expert": None})["query"]
    run.reset()
    run.feed("One fox writes a function of two eggs")
    assert "other tokens now" in of(found, "keys")["reason"]
    assert of(found, "keys", {**HERE, "token": None})["reason"] == "No token is selected."


@pytest.fixture(scope="module")
def session() -> Any:
    """A run of the bundled model that captured its attention."""
    made = lab.open().session(capture=["layers.*.attn.weights", "layers.*.moe.expert_ids"])
    made.feed(lab.exercises.TEXT)
    return made


@pytest.mark.parametrize(("layer", "token"), [(0, 0), (3, 9), (5, 27)])
def test_a_query_is_shown_with_the_fewest_keys_that_hold_its_attention(session: Any, layer: int, token: int) -> None:
    """By NumPy from the tape: mean of the heads, the largest until nine tenths are held."""
    facts, arrays = keys_facts(lab.cache.keys(session), session.trace(), layer, token)
    mean = session.tape[f"layers.{layer}.attn.weights"][:, token, : token + 1].mean(axis=0)
    np.testing.assert_array_equal(arrays["weights"], mean)
    used = np.flatnonzero(arrays["mask"])
    assert len(used) == facts["count"] and mean[used].sum() >= 0.9 * mean.sum()
    assert mean[used].sum() - mean[used].min() < 0.9 * mean.sum()  # none of them can be spared
    assert mean[used].min() >= np.delete(mean, used).max(initial=0)
    assert facts["held"] == pytest.approx(mean[used].sum() / mean.sum())
    assert [key["position"] for key in facts["used"]] == sorted(used, key=lambda p: -mean[p])
    assert facts["used"][0]["text"] == session.texts[facts["used"][0]["position"]]
    assert (facts["reached"], facts["tokens"], facts["windows"]) == (token + 1, 28, [None] * 6)


def test_what_a_window_hides_is_told_apart(tmp_path: Path) -> None:
    """The bundled model with a window of 5: the query of token 9 reaches keys 5 to 9."""
    folder = Path(shutil.copytree(lab.open().path, tmp_path / "windowed"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 5}), encoding="utf-8")
    windowed = lab.open(folder).session(capture="routing")
    windowed.feed(lab.exercises.TEXT)
    facts, arrays = keys_facts(lab.cache.keys(windowed), windowed.trace(), 2, 9)
    assert (facts["first"], facts["reached"], facts["windows"]) == (5, 5, [5] * 6)
    assert not arrays["weights"][:5].any() and (arrays["weights"][5:] > 0).all()


def test_a_long_run_is_not_repeated_without_being_asked(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above a size there is a button; what it does is heard by the listener, and afterwards the keys are there."""
    plain = session.model.session(capture="routing")
    plain.feed(lab.exercises.TEXT)
    monkeypatch.setattr("colibri_lab.widgets.cache_panels._QUICK", 1)
    found = panels(plain.trace(), plain)
    asked = of(found, "keys")
    assert asked["can"] and asked["reason"] and "used" not in asked and asked["total"] > 0
    heard: list[float] = []
    found.act("keys", "read", HERE, heard.append)
    assert heard and not of(found, "keys")["reason"]
