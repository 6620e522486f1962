"""The browser side as text: modules that join, stay small, and ask nothing of the network."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from colibri_lab.widgets._modules import join_modules, style_sheet

STATIC = Path(str(files("colibri_lab.widgets") / "static"))
MODULES = sorted(STATIC.glob("*/*.js"))
VIEWS = sorted(folder.name for folder in STATIC.iterdir() if folder.name != "common")


@pytest.mark.parametrize("view", VIEWS)
def test_every_module_is_part_of_the_joined_text_once(view: str) -> None:
    """No module is forgotten or doubled, no name stands for two, and no import is left."""
    joined = join_modules(view, view)
    own = [module for module in MODULES if module.parent.name == view]
    assert not {m.stem for m in own} & {m.stem for m in MODULES if m.parent.name == "common"}
    for module in own:
        if module.stem != view:
            assert joined.count(f'modules["{module.stem}"] = (') == 1, module.name
    assert not re.search(r"^import ", joined, flags=re.MULTILINE)
    assert joined.count("export default") == 1


def test_modules_are_small_and_reach_for_nothing_outside() -> None:
    """Under 400 lines each; no address, no fetch, no import from elsewhere."""
    assert len(MODULES) > 10
    for module in MODULES:
        text = module.read_text(encoding="utf-8")
        assert text.count("\n") < 400, module.name
        assert not re.search(r"https?:|\bfetch\(|XMLHttpRequest|import\(|WebSocket", text), module.name
    for view in VIEWS:
        assert not re.search(r"https?:|@import|url\(", style_sheet(view)), view


def test_modules_that_import_each_other_in_a_circle_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the circle."""
    texts = {"a.js": 'import { b } from "./b.js";', "b.js": 'import { a } from "./a.js";'}
    monkeypatch.setattr("colibri_lab.widgets._modules.static_text", lambda view, name: texts[name])
    with pytest.raises(ValueError, match="a → b → a"):
        join_modules("explorer", "a")


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_every_module_parses() -> None:
    """node reads each module alone and the joined text."""
    for text in [*(m.read_text(encoding="utf-8") for m in MODULES), *(join_modules(v, v) for v in VIEWS)]:
        done = subprocess.run(["node", "--check", "--input-type=module"], input=text, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
