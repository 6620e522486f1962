"""The shipped notebooks as a reader meets them: copied by the command line, opened and only looked at."""

from __future__ import annotations

from typing import Any

import pytest

from colibri_lab._cli import copy_notebooks, shipped_notebooks


@pytest.mark.parametrize("name", [path.name for path in shipped_notebooks()])
def test_a_notebook_that_was_only_opened_is_not_modified(lab: Any, name: str) -> None:
    """The kernel is up and has told what it is, and JupyterLab has nothing to save."""
    copy_notebooks(lab.root)
    lab.open(name)
    lab.page.wait_for_timeout(1500)
    assert lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.model.dirty") is False
