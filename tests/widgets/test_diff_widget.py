"""The view of a comparison without a browser: selection, messages, pictures, the saved page."""

from __future__ import annotations

import gc
import json
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffs import SWAPPED, copied, full_trace, of, planted

import colibri_lab as lab
from colibri_lab.errors import ArgumentError, ColibriError, TapError
from colibri_lab.widgets.diff import DiffView

A = full_trace()
EXPERTS = "layers.2.moe.experts.*.output"


@pytest.fixture
def view() -> DiffView:
    return lab.DiffView(replace(lab.diff(A, planted(A)), diagnosis=SWAPPED))


def sent(view: DiffView) -> list[dict[str, Any]]:
    """Everything the view sends from now on."""
    out: list[dict[str, Any]] = []
    view.send = lambda content, buffers=None: out.append(content)
    return out


def test_it_takes_a_diff(view: DiffView) -> None:
    """And starts at the first divergence; code and repr say where and what."""
    first = view.diff.first_divergence
    assert (view.selection["path"], view.selection["expert"]) == (EXPERTS, first.expert)
    assert repr(view).endswith(": defect>")
    other = lab.DiffView(view.diff)
    other.selection = {"path": "logits"}
    exec(view.code, {"view": other})
    assert other.selection == view.selection


@pytest.mark.parametrize(
    ("wrong", "words"), [((3,), "a Diff or two runs"), ((A,), "two runs to compare, not one Trace")]
)
def test_anything_else_is_refused_in_a_sentence(wrong: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        lab.DiffView(*wrong)


def test_a_finished_comparison_takes_no_further_options(view: DiffView) -> None:
    with pytest.raises(ArgumentError, match=r"give the rest to lab\.diff"):
        lab.DiffView(view.diff, tolerance=1e-3)


def test_two_runs_are_compared_by_lab_diff(view: DiffView) -> None:
    """With the options as given."""
    made = lab.DiffView(A, view.diff.b, tolerance=1.0, names=("one", "other"))
    assert made.diff.tolerance.relative == 1.0 and made.diff.names == ("one", "other")
    assert made.diff.n_tokens == view.diff.n_tokens


def test_selecting_in_python_sends_the_tap_and_the_next_tokens(view: DiffView) -> None:
    """Values of the tap always, next tokens when the token moved."""
    messages = sent(view)
    view.selection = {"path": "layers.4.attn.q"}
    assert [(m["kind"], m["facts"]["path"]) for m in messages if m["kind"] == "values"] == [
        ("values", "layers.4.attn.q")
    ]
    assert not [m for m in messages if m["kind"] == "next"]
    messages.clear()
    view.selection = {"token": 7}
    assert [m["kind"] for m in messages] == ["values", "next"]
    with pytest.raises(TapError):
        view.selection = {"path": "layers.4.attn.z"}
    assert view.selection["path"] == "layers.4.attn.q"


def test_requests_are_answered(view: DiffView) -> None:
    """ready: everything; seen: a word; html: the page; anything else is shown as an error."""
    messages = sent(view)
    view._on_message(view, {"kind": "ready"}, [])
    assert [m["kind"] for m in messages] == ["head", "values", "next"]
    view._on_message(view, {"kind": "seen"}, [])
    view._on_message(view, {"kind": "html"}, [])
    assert [m["kind"] for m in messages[3:]] == ["heard", "html"]
    view._on_message(view, {"kind": "dance"}, [])
    assert view._status["state"] == "error" and "dance" in view._status["text"]


def test_G1_nan_on_one_side_and_runs_of_other_lengths(tmp_path: Path) -> None:
    """Everything is made and written; the page's data hold no bare NaN."""
    arrays = copied(A)
    arrays["layers.4.attn.out"][7, 2] = np.nan
    arrays["logits"][9] = np.nan
    view = lab.DiffView(lab.diff(A, of(A, arrays)))
    page = view.to_html(tmp_path / "nan.html").read_text(encoding="utf-8")
    saved = re.search(r'id="saved">(.*?)</script>', page, re.DOTALL)[1]
    json.loads(saved, parse_constant=lambda name: pytest.fail(f"{name} in the page"))
    assert view._repr_mimebundle_()["image/png"].startswith(b"\x89PNG")


def test_the_page_makes_no_request_and_holds_every_tap(view: DiffView, tmp_path: Path) -> None:
    """Each tap of the table, the selected one in full, the next tokens of all positions."""
    page = view.to_html(tmp_path / "diff.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=|https?:|@import", page)
    saved = json.loads(re.search(r'id="saved">(.*?)</script>', page, re.DOTALL)[1])
    values = [m["content"]["facts"]["path"] for m in saved["messages"] if m["content"]["kind"] == "values"]
    assert set(values) == {str(path) for path in view.diff.table["path"]}
    assert sum(m["content"]["kind"] == "next" for m in saved["messages"]) == 40
    assert len(page) < 1_000_000


def test_text_and_picture_stay_in_the_file(view: DiffView) -> None:
    """Verdict, place, fault and flips in words; a PNG."""
    bundle = view._repr_mimebundle_()
    text = bundle["text/plain"]
    assert "✗ DEFECT" in text and EXPERTS in text and "swapped" in text and "downstream" in text
    assert bundle["image/png"].startswith(b"\x89PNG") and len(bundle["image/png"]) < 100_000
    calm = lab.DiffView(lab.diff(A, A))
    assert re.search(r"all \d+ compared taps hold the same bits", calm._repr_mimebundle_()["text/plain"])


def test_G2_a_closed_view_lets_go_of_both_traces(view: DiffView) -> None:
    """And says so."""
    trace = weakref.ref(view.diff.b)
    view.close()
    gc.collect()
    assert trace() is None
    assert repr(view) == "<DiffView, closed>"
    with pytest.raises(ColibriError, match="closed"):
        _ = view.diff
