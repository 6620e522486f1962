"""What stays in the notebook file when no kernel runs."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest

import colibri_lab
from colibri_lab.testing import synthetic_trace
from colibri_lab.widgets._sheet import visible
from colibri_lab.widgets.explorer import RoutingExplorer
from colibri_lab.widgets.picture import explorer_text

SOURCE = Path(colibri_lab.__file__).parents[1]


def pixels(png: bytes) -> np.ndarray:
    """Width and height of a PNG, after checking that its data inflates."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    size = np.array(struct.unpack(">II", png[16:24]))
    data, place = b"", 8
    while place < len(png):
        length, kind = struct.unpack(">I4s", png[place : place + 8])
        data += png[place + 8 : place + 8 + length] if kind == b"IDAT" else b""
        place += length + 12
    zlib.decompress(data)
    return size


@pytest.mark.parametrize("shape", [(6, 8, 2, 40), (6, 8, 2, 1), (48, 128, 8, 400), (2, 4, 4, 5), (1, 1, 1, 3)])
def test_the_bundle_has_a_picture_three_lines_and_the_live_view(shape: tuple[int, int, int, int]) -> None:
    """At any size: a PNG 1200 pixels wide, a text of three lines, and the widget itself."""
    bundle = RoutingExplorer(synthetic_trace(*shape))._repr_mimebundle_()
    assert pixels(bundle["image/png"])[0] == 1200
    assert bundle["text/plain"].count("\n") == 2
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_the_picture_does_not_wait_for_matplotlib() -> None:
    """Loading it would take longer than the whole first view."""
    code = """import sys, colibri_lab as lab
lab.RoutingExplorer(lab.testing.synthetic_trace(6, 8, 2, 40))._repr_mimebundle_()
assert "matplotlib" not in sys.modules"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(SOURCE)})


def test_the_text_says_where_what_and_the_busiest() -> None:
    """Numbers are those of the trace."""
    trace = synthetic_trace(6, 8, 2, 40, seed=0)
    explorer = RoutingExplorer(trace)
    first, second, third = explorer._repr_mimebundle_()["text/plain"].split("\n")
    assert first.endswith("6 layers × 8 experts, top-2 · 40 tokens, layer 3")
    ids, gates = trace["layers.3.moe.expert_ids"][39], trace["layers.3.moe.gates"][39]
    logits = -np.sort(-trace["layers.3.moe.router_logits"][39])
    assert (
        f"experts {ids[0]} ({gates[0]:.2f}), {ids[1]} ({gates[1]:.2f})   margin {logits[1] - logits[2]:.2f} in logits"
        in second
    )
    load = np.bincount(trace["layers.3.moe.expert_ids"].ravel(), minlength=8)
    assert f"{load.argmax()} ({100 * load.max() / 40:.0f} %)" in third and third.endswith("chance 25 %")


def test_G1_a_token_without_a_ranking_is_said_and_drawn() -> None:
    """NaN logits: no experts are named, and the picture is made all the same."""
    trace = synthetic_trace(6, 8, 2, 40, nonfinite=True)
    explorer = RoutingExplorer(trace)
    for layer in range(6):
        for token in np.flatnonzero(np.isnan(trace[f"layers.{layer}.moe.router_logits"]).any(axis=1)):
            explorer.selection = {"layer": layer, "token": int(token)}
            text = explorer_text(explorer._data, explorer.selection, "t")
            assert "no ranking" in text
            assert pixels(explorer._repr_mimebundle_()["image/png"])[0] == 1200
            return
    raise AssertionError("the synthetic trace held no NaN")


def test_without_tokens_there_is_still_a_picture() -> None:
    """It says that nothing has run."""
    bundle = RoutingExplorer(synthetic_trace(2, 4, 1, 0))._repr_mimebundle_()
    assert "nothing has run" in bundle["text/plain"]
    assert pixels(bundle["image/png"])[0] == 1200


def test_the_plain_repr_is_cheap() -> None:
    """It draws nothing and fits a line or two."""
    assert len(repr(RoutingExplorer(synthetic_trace(6, 8, 2, 40)))) < 160


def test_nbconvert_shows_the_picture_without_any_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook that was run and saved, as HTML: the PNG stands where the view was."""
    import nbformat
    from nbclient import NotebookClient
    from nbconvert import HTMLExporter

    code = "import colibri_lab as lab\nlab.RoutingExplorer(lab.testing.synthetic_trace(6, 8, 2, 40))"
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tools that run it, not ours
        NotebookClient(book, resources={"metadata": {"path": str(tmp_path)}}, store_widget_state=False).execute()
        page, _ = HTMLExporter().from_notebook_node(book)
    assert "data:image/png;base64," in page
    assert len(nbformat.writes(book)) < 400_000


@pytest.mark.parametrize(
    ("text", "word"),
    [(" +=", "·+="), ("\n    ", "↵····"), ("   ", "···"), ("", "‹7›"), ("a\tb", "a→b"), ("\x00", "␣"), ("x ", "x·")],
)
def test_invisible_characters_are_made_visible(text: str, word: str) -> None:
    """Spaces are dots, line ends are arrows, an absent text is its id."""
    assert visible(text, 7) == word
