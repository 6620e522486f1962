"""Widgets and analyses take what the importers return: routes alone, counts alone, logits alone."""

from __future__ import annotations

from pathlib import Path

import format_goldens as goldens
import numpy as np
import pytest
from format_goldens import GOLDENS

import colibri_lab as lab
from colibri_lab.trace import Trace


def imported(name: str, folder: Path) -> Trace:
    golden = next(golden for golden in GOLDENS if golden.name == name)
    return lab.load_trace(golden.write(folder), **golden.say)


def test_the_explorer_opens_routes_without_logits_gates_and_token_ids(tmp_path: Path) -> None:
    """An import of vLLM: chosen experts are drawn, nothing is said of gates and margins, ids are a question mark."""
    path = tmp_path / "routes.npy"
    path.write_bytes(goldens.npy_bytes(goldens.all_layers()))
    trace = lab.load_trace(path, config=goldens.CONFIG)
    explorer = lab.RoutingExplorer(trace)
    explorer.selection = {"layer": 2, "token": 3}
    first, second = goldens.ROUTES[3, 1].tolist()
    assert explorer.selection == {"layer": 2, "token": 3, "expert": first}
    bundle = explorer._repr_mimebundle_()
    shown = (bundle[0] if isinstance(bundle, tuple) else bundle)["text/plain"].splitlines()
    assert shown[1] == f"token 3 ‹?›   experts {first}, {second}"
    explorer.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "The trace holds no router logits" in page


def test_routes_alone_are_drawn_in_the_static_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gates are missing every chosen cell is drawn in one colour, and no other."""
    from colibri_lab.widgets._sheet import Sheet
    from colibri_lab.widgets.explorer_data import ExplorerData
    from colibri_lab.widgets.picture import explorer_png

    grids: list[np.ndarray] = []
    drawn = Sheet.image

    def image(self: Sheet, x: float, y: float, width: float, height: float, grid: np.ndarray, *scale: float) -> None:
        grids.append(grid)
        drawn(self, x, y, width, height, grid, *scale)

    monkeypatch.setattr(Sheet, "image", image)
    explorer_png(ExplorerData(imported("vllm-npy", tmp_path)), {"layer": 1, "token": 0, "expert": 0}, "routes")
    tokens = grids[-1]  # experts × tokens, the map of the layer
    chosen = np.zeros(tokens.shape, bool)
    chosen[goldens.ROUTES[:, 0].T, np.arange(goldens.TOKENS)] = True
    assert np.array_equal(np.isfinite(tokens), chosen) and len(np.unique(tokens[chosen])) == 1
    assert not ExplorerData(imported("vllm-npy", tmp_path)).facts()["gates"]
    assert ExplorerData(imported("route-trace", tmp_path)).facts()["gates"]


@pytest.mark.parametrize(
    ("name", "why"),
    [("imatrix", r"counted experts and kept no token: lab\.routing\.load"), ("kl-base", "no layer with experts")],
)
def test_what_the_explorer_cannot_show_is_said(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(lab.NotCapturedError, match=why):
        lab.RoutingExplorer(imported(name, tmp_path))


def test_analyses_of_routes_alone_work_or_name_what_is_missing(tmp_path: Path) -> None:
    trace = imported("vllm-json", tmp_path)
    assert lab.routing.load(trace).sum() == 5 * 3 * 2  # one of six tokens came from the cache
    assert lab.routing.coactivation(trace).shape == (3, 5, 5)
    for needs in (lab.routing.entropy, lab.routing.margin):
        with pytest.raises(lab.NotCapturedError, match="was not recorded"):
            needs(trace)
    assert np.isfinite(lab.routing.coactivation(imported("olmoe", tmp_path)).diagonal(axis1=1, axis2=2)).any()
