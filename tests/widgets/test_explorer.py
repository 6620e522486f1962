"""The explorer's Python half: traits, messages, runs, errors and what it leaves behind; no browser."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import ipywidgets
import numpy as np
import pytest
import traitlets
from fake_session import FakeSession

import colibri_lab
from colibri_lab.errors import ArgumentError, CapacityError, ColibriError, NotCapturedError
from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace
from colibri_lab.widgets import _cell
from colibri_lab.widgets.explorer import RoutingExplorer


@pytest.fixture
def explorer() -> Iterator[RoutingExplorer]:
    made = RoutingExplorer(synthetic_trace(6, 8, 2, 40, seed=0))
    yield made
    made.close()


def sent(explorer: RoutingExplorer, request: dict) -> list[tuple[dict, list[bytes]]]:
    """What the explorer answers to a request of the browser."""
    answers: list[tuple[dict, list[bytes]]] = []
    explorer.send = lambda content, buffers=None: answers.append((content, buffers or []))
    explorer.handle(request)
    return answers


class TestSelection:
    def test_it_starts_in_the_middle_layer_at_the_last_token(self, explorer: RoutingExplorer) -> None:
        """With the first choice there as expert."""
        first = int(explorer.trace["layers.3.moe.expert_ids"][39, 0])
        assert explorer.selection == {"layer": 3, "token": 39, "expert": first}

    def test_it_can_be_set_in_part(self, explorer: RoutingExplorer) -> None:
        """Keys left out keep their value; an expert left out at a new place is the first choice there."""
        explorer.selection = {"token": 7}
        first = int(explorer.trace["layers.3.moe.expert_ids"][7, 0])
        assert explorer.selection == {"layer": 3, "token": 7, "expert": first}
        explorer.selection = {"expert": 6}
        assert explorer.selection == {"layer": 3, "token": 7, "expert": 6}

    @pytest.mark.parametrize(
        ("wish", "words"),
        [
            ({"layer": 6}, "Layer 6 has no experts to show: layers with experts are 0 to 5"),
            ({"token": -1}, "Token -1 does not exist: tokens are 0 to 39"),
            ({"expert": 9}, "Expert 9 does not exist: layer 3 has experts 0 to 7"),
            ({"expert": True}, "must be a whole number"),
            ({"tokn": 3}, "layer, token and expert, not tokn"),
        ],
    )
    def test_a_wrong_one_is_refused_and_nothing_changes(
        self, explorer: RoutingExplorer, wish: dict, words: str
    ) -> None:
        """The error names what does not exist and what does."""
        before = dict(explorer.selection)
        with pytest.raises(ArgumentError, match=words):
            explorer.selection = wish
        assert explorer.selection == before

    def test_its_code_runs_and_brings_it_back(self, explorer: RoutingExplorer) -> None:
        """`code` is Python that sets the same selection."""
        explorer.selection = {"layer": 1, "token": 3, "expert": 5}
        code = explorer.code
        explorer.selection = {"layer": 2, "token": 9}
        exec(code, {"explorer": explorer})
        assert explorer.selection == {"layer": 1, "token": 3, "expert": 5}

    def test_colour_by_takes_three_words(self, explorer: RoutingExplorer) -> None:
        """Anything else is refused with the list."""
        explorer.colour_by = "margin"
        with pytest.raises(traitlets.TraitError, match="'expert', 'entropy', 'margin'"):
            explorer.colour_by = "rainbow"


class TestWhatItTakes:
    def test_a_model_is_refused_with_the_call_that_helps(self) -> None:
        """The commonest slip."""

        class Model:
            def session(self) -> None: ...

        with pytest.raises(ArgumentError, match=r"not Model; make a session of it: model\.session\(\)"):
            RoutingExplorer(Model())
        with pytest.raises(ArgumentError, match="takes a session or a trace, not str"):
            RoutingExplorer("run.safetensors")

    def test_a_trace_without_expert_ids_is_refused_with_the_capture_to_ask_for(self) -> None:
        """Nothing could be drawn."""
        trace = synthetic_trace(2, 4, 1, 3)
        bare = {path: trace[path] for path in trace if "expert_ids" not in path}
        with pytest.raises(NotCapturedError, match='capture="routing"'):
            RoutingExplorer(Trace(bare, ids=trace.ids, texts=trace.texts, meta=trace.meta))

    def test_an_empty_session_is_fine(self) -> None:
        """The view asks for a prompt; the selection has no token."""
        explorer = RoutingExplorer(FakeSession())
        assert explorer.selection["token"] is None
        assert [c["kind"] for c, _ in sent(explorer, {"kind": "ready"})] == ["head"]


class TestMessages:
    def test_ready_is_answered_with_what_the_first_picture_needs(self, explorer: RoutingExplorer) -> None:
        """Head, the selected token, the selected layer."""
        answers = sent(explorer, {"kind": "ready"})
        assert [c["kind"] for c, _ in answers] == ["head", "column", "block"]
        assert answers[1][0]["token"] == 39 and answers[2][0]["layer"] == 3

    def test_arrays_arrive_as_the_trace_has_them(self, explorer: RoutingExplorer) -> None:
        """Gates of a block, read back from its buffer, are the trace's."""
        content, buffers = sent(explorer, {"kind": "blocks", "version": 1, "layers": [2]})[0]
        names = [a["name"] for a in content["arrays"]]
        gates = np.frombuffer(buffers[names.index("gates")], "<f4").reshape(40, 2)
        assert np.array_equal(gates, explorer.trace["layers.2.moe.gates"])
        assert content["last"] is True

    def test_requests_about_an_older_trace_are_not_answered(self, explorer: RoutingExplorer) -> None:
        """A slow browser asks for what is no longer shown."""
        assert sent(explorer, {"kind": "column", "version": 0, "token": 3}) == []

    def test_a_failing_request_is_shown_in_the_view_and_raised_by_handle(self, explorer: RoutingExplorer) -> None:
        """The status carries the sentence and the traceback."""
        with pytest.raises(ArgumentError, match="not known: 'dance'"):
            explorer.handle({"kind": "dance", "version": 1})
        explorer._on_message(explorer, {"kind": "dance", "version": 1}, [])
        assert explorer._status["state"] == "error"
        assert explorer._status["text"].endswith("'dance'. Nothing was changed.")
        assert "ArgumentError" in explorer._status["traceback"]

    def test_the_synced_state_stays_small(self) -> None:
        """Apart from the view's own text, a few hundred bytes, whatever the trace's size."""
        explorer = RoutingExplorer(synthetic_trace(24, 64, 4, 500))
        state = {k: v for k, v in explorer.get_state().items() if k not in ("_esm", "_css", "layout")}
        assert len(repr(state)) < 1500

    def test_G1_a_trace_full_of_nan_can_be_sent(self) -> None:
        """State is JSON, numbers are bytes: no exception, no null."""
        trace = synthetic_trace(6, 8, 2, 40, nonfinite=True)
        explorer = RoutingExplorer(trace)
        answers = sent(explorer, {"kind": "blocks", "version": 1, "layers": list(range(6))})
        import json

        for content, _ in answers:
            json.dumps(content, allow_nan=False)
        json.dumps({k: v for k, v in explorer.get_state().items() if k != "layout"}, allow_nan=False)


class TestRunning:
    def test_run_shows_the_new_trace(self) -> None:
        """The version goes up, so that answers to older requests are dropped."""
        session = FakeSession()
        explorer = RoutingExplorer(session)
        explorer.run("hello")
        assert len(explorer.trace.ids) == 5 and explorer.selection["token"] == 4
        assert explorer._version == 2 and explorer._status == {"state": "idle"}

    def test_generate_continues(self) -> None:
        """And keeps what a failure leaves behind."""
        session = FakeSession()
        explorer = RoutingExplorer(session)
        explorer.run("hello")
        explorer.generate(4)
        assert len(explorer.trace.ids) == 9
        session.fail = ColibriError("the logits hold 3 NaN")
        with pytest.raises(ColibriError):
            explorer.generate(4)
        assert len(explorer.trace.ids) == 11
        assert explorer._status["text"] == "The logits hold 3 NaN. 2 new tokens are kept."

    @pytest.mark.parametrize(
        ("text", "error", "words"),
        [
            ("", ArgumentError, "no prompt to run"),
            (None, ArgumentError, "A prompt is a text, not NoneType"),
            ("x" * 51, CapacityError, "51 tokens and the session holds 50"),
        ],
    )
    def test_what_cannot_run_changes_nothing(self, text: str, error: type[Exception], words: str) -> None:
        """Checked before the session is emptied. A caller in Python gets the error alone, the buttons show it once."""
        session = FakeSession()
        explorer = RoutingExplorer(session)
        explorer.run("hello")
        with pytest.raises(error, match=words):
            explorer.run(text)
        assert session.tokens == 5 and len(explorer.trace.ids) == 5
        assert explorer._status == {"state": "idle"}
        explorer._guarded({"kind": "run", "text": text})
        assert explorer._status["state"] == "error" and explorer._status["text"].endswith("Nothing was changed.")

    def test_generating_keeps_the_prompt_and_runs_a_changed_one_first(self) -> None:
        """What was typed stays in the box; Generate again continues further; Run starts afresh from it."""
        session = FakeSession()
        explorer = RoutingExplorer(session)
        explorer.handle({"kind": "generate", "text": "hello", "count": 3})
        assert session.tokens == 5 + 3 and explorer._facts()["prompt"] == "hello"
        explorer.handle({"kind": "generate", "count": 3})
        assert session.tokens == 5 + 6 and explorer._facts()["prompt"] == "hello"
        explorer.handle({"kind": "run", "text": "hello"})
        assert session.tokens == 5

    def test_stop_in_the_prompt_generates_nothing(self) -> None:
        """Generate with a changed prompt, stopped while that runs; the next Generate is not stopped."""
        session = FakeSession()
        explorer = RoutingExplorer(session)
        session.on_step = lambda i: explorer.stop() if i == 2 else None
        explorer.handle({"kind": "generate", "text": "hello", "count": 9})
        assert session.tokens == 0
        session.on_step = lambda i: None
        explorer.handle({"kind": "generate", "count": 9})
        assert session.tokens == 9

    def test_a_trace_cannot_run(self, explorer: RoutingExplorer) -> None:
        """The error says what can."""
        with pytest.raises(ArgumentError, match="shows a trace; running needs a model"):
            explorer.run("hello")

    def test_stop_ends_a_run_from_another_thread(self) -> None:
        """The status says what is left; the former picture stays."""
        session = FakeSession()
        explorer = RoutingExplorer(session)
        explorer.run("hello")
        session.on_step = lambda i: explorer.stop() if i == 2 else None
        explorer.run("a longer prompt")
        assert len(explorer.trace.ids) == 5, "the former picture"
        assert explorer._status["text"].startswith("Stopped. The session is empty now")

    def test_a_first_run_that_is_stopped_speaks_of_no_picture(self) -> None:
        """There was none."""
        session = FakeSession()
        explorer = RoutingExplorer(session)
        session.on_step = lambda i: explorer.stop() if i == 2 else None
        explorer.run("a prompt")
        assert explorer._status["text"] == "Stopped. The session is empty now."

    def test_stop_keeps_generated_tokens(self) -> None:
        """As many as were made."""
        session = FakeSession()
        explorer = RoutingExplorer(session)
        explorer.run("hello")
        session.on_step = lambda i: explorer.stop() if i == 2 else None
        explorer.generate(30)
        assert len(explorer.trace.ids) == 8
        assert explorer._status == {"state": "idle", "text": "Stopped. 3 new tokens are kept."}

    def test_an_interrupt_is_a_stop_and_goes_on_to_the_cell(self) -> None:
        """What was made is kept and shown, the view speaks of no error, and the caller gets the interrupt."""
        session = FakeSession()
        explorer = RoutingExplorer(session)
        explorer.run("hello")

        def interrupt(step: int) -> None:
            if step == 3:
                raise KeyboardInterrupt

        session.on_step = interrupt
        with pytest.raises(KeyboardInterrupt):
            explorer.generate(30)
        assert len(explorer.trace.ids) == 8
        assert explorer._status == {"state": "idle", "text": "Stopped. 3 new tokens are kept."}

    def test_the_view_is_told_whether_a_cell_holds_the_work(self) -> None:
        """A call in the main thread keeps the kernel from hearing Stop; one in another thread does not."""
        session = FakeSession()
        explorer = RoutingExplorer(session)
        seen: list[bool] = []
        session.on_step = lambda _: seen.append(explorer._in_cell)
        explorer.run("a")
        thread = threading.Thread(target=explorer.run, args=("b",))
        thread.start()
        thread.join()
        assert seen == [True, False]

    def test_the_button_runs_in_a_thread_of_its_own(self) -> None:
        """So that Stop can arrive; an error there lands in the view."""
        session = FakeSession()
        explorer = RoutingExplorer(session)
        where: list[str] = []
        done = threading.Event()
        explorer.observe(lambda change: change["new"]["state"] in ("idle", "error") and done.set(), "_status")
        session.on_step = lambda i: where.append(threading.current_thread().name)
        explorer._on_message(explorer, {"kind": "run", "text": "hello"}, [])
        assert done.wait(10) and set(where) == {"colibri-explorer"}
        done.clear()
        explorer._on_message(explorer, {"kind": "run", "text": "x" * 99}, [])
        assert done.wait(10) and explorer._status["state"] == "error"

    def test_progress_is_told_at_most_ten_times_a_second(self) -> None:
        """A thousand fast steps make a handful of reports."""
        session = FakeSession(max_tokens=2000)
        explorer = RoutingExplorer(session)
        seen: list[dict] = []
        explorer.observe(lambda change: seen.append(change["new"]), "_status")
        explorer.run("x" * 1000)
        assert len(seen) < 50

    def test_the_bundled_model_runs_and_generates(self) -> None:
        """The real engine behind it: the text is the session's, and routing agrees with the session's tape."""
        session = colibri_lab.open().session()
        explorer = RoutingExplorer(session)
        explorer.run("The fox counts the eggs.")
        before = len(explorer.trace.ids)
        explorer.generate(5)
        assert before < len(explorer.trace.ids) <= before + 5
        assert explorer.trace.ids == session.ids
        content, buffers = sent(explorer, {"kind": "blocks", "version": explorer._version, "layers": [0]})[0]
        ids = np.frombuffer(buffers[[a["name"] for a in content["arrays"]].index("ids")], np.uint8)
        assert np.array_equal(ids.reshape(-1, 2), session.tape.expert_ids(0))
        assert explorer._text() == "The fox counts the eggs." + "".join(explorer.trace.texts[before:])
        assert explorer._facts()["prompt"] == "The fox counts the eggs."

    def test_parts_of_a_character_are_given_by_their_bytes(self) -> None:
        """Tokens without a text of their own; together with the token that ends the character they are its UTF-8."""
        explorer = RoutingExplorer(colibri_lab.open().session())
        explorer.run("1 — 2")
        ids, texts = explorer.trace.ids, explorer.trace.texts
        bare = [id for id, text in zip(ids, texts, strict=True) if not text]
        assert " ".join(explorer._facts()["parts"][id] for id in bare) == "E2 80"
        assert texts[ids.index(bare[-1]) + 1] == "—"

    def test_the_recipe_makes_the_same_routing_again(self) -> None:
        """What Copy as code copies, run in an empty namespace."""
        explorer = RoutingExplorer(colibri_lab.open().session())
        explorer.run("Two foxes.\n")
        explorer.generate(3)
        explorer.selection = {"layer": 2, "token": 1, "expert": 4}
        names: dict[str, Any] = {}
        exec(explorer._facts()["recipe"] + explorer.code, names)
        again = names["explorer"]
        assert again.selection == explorer.selection and again.trace.ids == explorer.trace.ids
        path = "layers.2.moe.gates"
        assert np.asarray(again.trace[path]).tobytes() == np.asarray(explorer.trace[path]).tobytes()


class TestLeavingNothingBehind:
    def test_G2_closed_widgets_are_gone_with_their_traces(self) -> None:
        """Twenty made and closed: none alive, nor their traces."""
        before = len(ipywidgets.Widget._instances if hasattr(ipywidgets.Widget, "_instances") else [])
        references = []
        for seed in range(20):
            explorer = RoutingExplorer(synthetic_trace(3, 8, 2, 20, seed=seed))
            references += [weakref.ref(explorer), weakref.ref(explorer.trace)]
            explorer.handle({"kind": "ready"})
            explorer.close()
        del explorer
        gc.collect()
        assert [r for r in references if r() is not None] == []
        after = len(ipywidgets.Widget._instances if hasattr(ipywidgets.Widget, "_instances") else [])
        assert after == before

    def test_a_closed_explorer_says_so(self) -> None:
        """No traceback from deep inside; late messages are ignored."""
        explorer = RoutingExplorer(synthetic_trace(2, 4, 1, 3))
        explorer.close()
        explorer.close()
        explorer.handle({"kind": "ready"})
        assert repr(explorer) == "<RoutingExplorer, closed>"
        with pytest.raises(ColibriError, match="closed; make a new one"):
            _ = explorer.trace

    def test_G2_closing_under_a_run_lets_go_of_what_the_run_brings(self) -> None:
        """The run's last step ends after close; its trace is not shown, nor kept."""
        session = FakeSession()
        explorer = RoutingExplorer(session)
        session.trace = lambda: explorer.close() or synthetic_trace(4, 8, 2, 3)
        explorer.run("abc")
        assert repr(explorer) == "<RoutingExplorer, closed>"

    def test_G2_a_cell_that_runs_thirty_times_keeps_one_widget(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each run closes what earlier runs of the same cell made; other cells and outside code are left alone."""
        running = ("cell-a", 0)
        monkeypatch.setattr(_cell, "_running_cell", lambda: running)
        monkeypatch.setattr(_cell, "_made", {})
        trace = synthetic_trace(2, 4, 1, 3)
        running = ("cell-b", 1)
        other = RoutingExplorer(trace)
        made = []
        for run in range(2, 32):
            running = ("cell-a", run)
            made += [RoutingExplorer(trace), RoutingExplorer(trace)]
        assert [e._data is not None for e in made] == [False] * 58 + [True] * 2
        running = (None, 0)
        free = [RoutingExplorer(trace) for _ in range(3)]
        assert all(e._data is not None for e in [other, *free])
        for e in [other, *made, *free]:
            e.close()
