"""The view as one file."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from colibri_lab.errors import FileError
from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace
from colibri_lab.widgets.explorer import RoutingExplorer


def saved(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="saved">(.*?)</script>', page, flags=re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_makes_no_request(tmp_path: Path) -> None:
    """No address anywhere in the file, and nothing loaded: no src, no link, no import."""
    explorer = RoutingExplorer(synthetic_trace(6, 8, 2, 40))
    page = explorer.to_html(tmp_path / "view.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|<link|\bsrc=|@import|url\(|\bfetch\(", page)
    assert [p.name for p in tmp_path.iterdir()] == ["view.html"], "no temporary file is left"


def test_the_page_holds_head_and_all_layers() -> None:
    """A small trace is complete: the head, one block for each layer, all with values; running is off."""
    page = saved(RoutingExplorer(synthetic_trace(6, 8, 2, 40))._page())
    kinds = [m["content"]["kind"] for m in page["messages"]]
    assert kinds == ["head", *["block"] * 6]
    assert all("values" in [a["name"] for a in m["content"]["arrays"]] for m in page["messages"][1:])
    assert page["messages"][0]["content"]["facts"]["runs"] is False
    assert page["state"]["selection"] == {"layer": 3, "token": 39, "expert": page["state"]["selection"]["expert"]}


def test_G1_a_trace_with_nan_makes_a_valid_page() -> None:
    """No NaN reaches the page's JSON; the numbers are in the binary part."""
    page = RoutingExplorer(synthetic_trace(6, 8, 2, 40, nonfinite=True))._page()
    assert saved(page)["messages"]


def test_texts_cannot_break_out_of_the_page() -> None:
    """A token that closes a script or opens a tag stays a token."""
    trace = synthetic_trace(2, 4, 1, 3)
    evil = Trace(
        dict(trace), ids=trace.ids, texts=["</script><script>alert(1)</script>", "<!--", "&amp;"], meta=trace.meta
    )
    page = RoutingExplorer(evil)._page()
    assert "alert(1)</script>" not in page
    assert saved(page)["messages"][0]["content"]["facts"]["texts"] == evil.texts


def test_a_large_trace_leaves_its_logits_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit only the selected token's values are kept, with a sentence in their place."""
    monkeypatch.setattr("colibri_lab.widgets.explorer_data._EVERY_VALUE_BELOW", 0)
    monkeypatch.setattr("colibri_lab.widgets.explorer._PAGE_VALUES_BELOW", 0)
    page = saved(RoutingExplorer(synthetic_trace(3, 8, 2, 20))._page())
    assert [m["content"]["kind"] for m in page["messages"]] == ["head", "block", "block", "block", "column"]
    assert "not in this page" in page["messages"][0]["content"]["facts"]["no_values"]


def test_an_empty_trace_makes_a_page(tmp_path: Path) -> None:
    """Nothing to draw is no error."""
    trace = synthetic_trace(2, 4, 1, 0)
    assert RoutingExplorer(trace).to_html(tmp_path / "empty.html").stat().st_size > 1000
    assert np.size(trace.ids) == 0


def test_a_path_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    """The folder must exist; a directory in the way stays."""
    explorer = RoutingExplorer(synthetic_trace(2, 4, 1, 3))
    with pytest.raises(OSError, match=r"cannot write the page to .*/missing/view\.html: No such file"):
        explorer.to_html(tmp_path / "missing" / "view.html")
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        explorer.to_html(tmp_path / "taken")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A missing folder by the name that was asked for; a pipe stays a pipe."""
    explorer = RoutingExplorer(synthetic_trace(2, 4, 1, 3))
    with pytest.raises(FileError, match=r"no/view\.html: No such file"):
        explorer.to_html(tmp_path / "no" / "view.html")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="no regular file"):
        explorer.to_html(tmp_path / "pipe")
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"] and (tmp_path / "pipe").is_fifo()
