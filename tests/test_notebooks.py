"""Every shipped notebook is stripped, needs no network, and runs from top to bottom."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))

Run = Callable[[Path], tuple[nbformat.NotebookNode, Path]]

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def test_the_notebooks_of_a_first_visit_are_there() -> None:
    """A visitor finds the introduction, the workbench and the stepper."""
    assert {"00_first_look", "01_routing_explorer", "02_token_stepper"} <= {path.stem for path in NOTEBOOKS}


@every_notebook
def test_a_committed_notebook_is_stripped(path: Path) -> None:
    """No outputs, no counters, no state of widgets, and the kernel that every machine has."""
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None
    assert path.stat().st_size < 100_000


@every_notebook
def test_a_notebook_needs_no_network(path: Path) -> None:
    """No cell installs, downloads or links to anything outside."""
    for cell in read(path).cells:
        for word in ("http://", "https://", "pip install", "%pip", "hf_hub", "from_pretrained"):
            assert word not in cell.source, (word, cell.source)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """run(path): the notebook with its outputs, and the folder of its own in which it ran (once)."""

    @cache
    def once(path: Path) -> tuple[nbformat.NotebookNode, Path]:
        folder = tmp_path_factory.mktemp(path.stem)
        notebook = read(path)
        where = {"metadata": {"path": str(folder)}}
        NotebookClient(notebook, timeout=60, kernel_name="python3", resources=where, store_widget_state=False).execute()
        return notebook, folder

    return once


@every_notebook
def test_a_notebook_runs_from_top_to_bottom(path: Path, run: Run) -> None:
    """Each cell ends without an error or a warning, and under a minute."""
    notebook, _ = run(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [output for cell in code for output in cell.outputs if output.get("name") == "stderr"]


def test_the_workbench_leaves_a_trace_and_a_page_behind(run: Run) -> None:
    """The explorer notebook's last cells write files that other programs can open."""
    _, folder = run(next(path for path in NOTEBOOKS if path.stem == "01_routing_explorer"))
    assert "<html" in (folder / "explorer.html").read_text(encoding="utf-8").lower()
    assert (folder / "run.safetensors").stat().st_size > 1000
