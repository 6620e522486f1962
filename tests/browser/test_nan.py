"""A planted Inf in a real JupyterLab: named, and removed by a cure; keys, two-way selection, a dead kernel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

LAYER, EXPERT, ROW = 2, 3, 9
NAME = f"layers.{LAYER}.moe.experts.{EXPERT}.up"
CELLS = [
    f"""import colibri_lab as lab
import numpy as np
model = lab.open()
weight = np.array(model.weights['{NAME}'])
weight[{ROW}, 3] = np.inf
session = model.with_weights({{'{NAME}': weight}}).session(capture='all')
session.feed('The engine counts its gates and writes each of them down.')""",
    "view = lab.NanTracer(session)\nview",
]
BORN = f"layers.{LAYER}.moe.experts.*.up"


@pytest.fixture(scope="module")
def view(lab: Any) -> Any:
    """A run with one infinite weight, traced from a notebook by the menu."""
    lab.open("nan.ipynb", CELLS)
    lab.run_all()
    lab.page.wait_for_function("() => document.querySelector('.clb.nan')?.dataset.drawn > 0")
    lab.idle()
    return lab.page.locator(".clb.nan").first


@pytest.fixture(autouse=True)
def no_errors(lab: Any) -> Iterator[None]:
    """No test may leave an error in the browser's console."""
    lab.errors.clear()
    yield
    assert lab.errors == []


def selection(lab: Any) -> dict[str, Any]:
    """view.selection as Python has it, once the browser has told."""
    lab.page.wait_for_timeout(200)
    lab.idle()
    found: dict[str, Any] = json.loads(lab.python("import json; print(json.dumps(view.selection))"))
    return found


def test_the_tracer_names_the_planted_inf(lab: Any, view: Any) -> None:
    """Kind, place, weight, damage: as Python has them and as they were planted."""
    origin = json.loads(
        lab.python("import json; o = view.found.origin; print(json.dumps([o.kind, o.layer, o.expert, o.token]))")
    )
    assert origin[:3] == ["weight value", LAYER, EXPERT]
    say = view.locator(".say")
    expect(say).to_contain_text("WEIGHT VALUE")
    expect(say).to_contain_text(f"layer {LAYER}, expert {EXPERT}")
    expect(say).to_contain_text(f"token {origin[3]} ")
    ruined = int(lab.python("print(len(view.found.propagation.ruined))"))
    tokens = int(lab.python("print(len(session.ids))"))
    expect(say).to_contain_text(f"ruined the logits of {ruined} of {tokens} tokens")
    expect(view.locator(".opbody")).to_contain_text(f"[{ROW}, 3]")
    where = selection(lab)
    assert (where["path"], where["expert"]) == (BORN, EXPERT)


def test_a_cure_removes_it(lab: Any, view: Any) -> None:
    """By the keyboard: Enter on the button of the expert's row; the sentence recommends it then."""
    lab.python("view.cures")
    button = view.get_by_role("button", name=f"Run: Switch off expert {EXPERT} in layer {LAYER}")
    button.focus()
    lab.page.keyboard.press("Enter")
    row = view.locator(".curetable tbody tr").filter(has_text=f"xpert {EXPERT}").filter(has_text="✓ gone")
    expect(row).to_have_count(1)
    expect(view.locator(".say")).to_contain_text("Cure: ")
    assert lab.python("print([c.gone for c in view.cures])") == "[True]"
    expect(row.get_by_role("button")).to_have_text("Run again")
    expect(row.get_by_role("button")).to_be_enabled()
    lab.idle()


def test_the_selection_goes_both_ways(lab: Any, view: Any) -> None:
    """A click reaches Python, Python reaches the view; copied code runs."""
    view.locator(".cell[data-path='layers.4.attn.q']").click()
    assert selection(lab)["path"] == "layers.4.attn.q"
    bad = lab.python("import numpy as np; q = view.found.trace['layers.4.attn.q']; "
                     "print((~np.isfinite(q.reshape(len(q), -1))).any(axis=1).sum())")  # fmt: skip
    assert lab.python("print(view._shown.cell('layers.4.attn.q', 3, None)['bad'])") == bad
    lab.python("view.selection = dict(path='layers.1.output', token=4)")
    expect(view).to_have_attribute("data-place", "layers.1.output 4")
    expect(view.locator(".tapsay")).to_contain_text("In token 4")
    view.locator(".foot [data-act=copy]").click()
    expect(view.locator(".copied")).to_have_text("Copied.")
    line = lab.page.evaluate("navigator.clipboard.readText()")
    lab.python("view.selection = {'path': 'logits'}")
    lab.python(line)
    assert selection(lab)["path"] == "layers.1.output"


def test_keys_alone_are_enough(lab: Any, view: Any) -> None:
    """0, arrows in map and tree, token, ?, Esc; no key reaches the notebook."""
    cells = lab.page.locator(".jp-CodeCell").count()
    view.locator(".map").focus()
    lab.page.keyboard.press("0")
    token = selection(lab)["token"]
    for key, path in (("ArrowLeft", BORN.replace(str(LAYER), "1", 1)), ("ArrowRight", BORN)):
        lab.page.keyboard.press(key)
        assert selection(lab)["path"] == path
    lab.page.keyboard.press("PageUp")
    assert selection(lab)["token"] == token - 1
    view.locator(".tree").focus()
    lab.page.keyboard.press("0")
    lab.page.keyboard.press("ArrowRight")
    first = lab.python("print(view._shown.origin(0)['boxes'][1]['title'])")
    assert first in view.locator(".tree").get_attribute("aria-label")
    lab.page.keyboard.press("ArrowLeft")
    assert selection(lab)["path"] == BORN
    lab.page.keyboard.press("?")
    expect(view.get_by_role("dialog", name="Keys")).to_be_visible()
    lab.page.keyboard.press("Escape")
    expect(view.get_by_role("dialog", name="Keys")).to_be_hidden()
    view.locator(".map").focus()
    for key in ("d", "d", "a", "b", "x", "m"):
        lab.page.keyboard.press(key)
    assert lab.page.locator(".jp-CodeCell").count() == cells


def test_an_error_is_shown_in_place(lab: Any, view: Any) -> None:
    """A request that is not known: a sentence, the traceback on demand, and the picture stays."""
    lab.python("view._on_message(view, {'kind': 'dance'}, [])")
    expect(view.locator(".fault")).to_contain_text("dance")
    view.locator("[data-act=dismiss]").click()
    expect(view.locator(".fault")).to_be_hidden()


def test_axe_finds_nothing_in_the_view_and_pictures_are_taken(lab: Any, view: Any) -> None:
    """Light and dark, with the list of keys open in one; nothing scrolls sideways."""
    from axe_playwright_python.sync_playwright import Axe

    view.locator(".map").focus()
    lab.page.keyboard.press("0")
    view.locator(".map").blur()
    lab.page.set_viewport_size({"width": 1600, "height": 1900})
    lab.page.evaluate("document.querySelector('.clb.nan').scrollIntoView()")
    for dark in (True, False):
        lab.theme(dark)
        lab.shot(f"nan-{'dark' if dark else 'light'}", view)
        found = Axe().run(lab.page, context=".clb.nan")
        assert not found.response["violations"], json.dumps(found.response["violations"], indent=1)[:3000]
    wide = "(() => { const r = document.querySelector('.clb.nan'); return r.scrollWidth - r.clientWidth; })()"
    assert lab.page.evaluate(wide) <= 0, "the view scrolls sideways"
    lab.page.set_viewport_size({"width": 1600, "height": 1400})


def test_after_a_restart_what_was_fetched_can_be_looked_at(lab: Any, view: Any) -> None:
    """The state is said; cures and saving are off, the map and the tree go on."""
    lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    expect(view.locator(".live")).to_have_text("no kernel")
    expect(view.locator(".worktext")).to_contain_text("No kernel.")
    expect(view.get_by_role("button", name="Save HTML")).to_be_disabled()
    expect(view.locator(".curetable button:enabled")).to_have_count(0)
    view.locator(".cell[data-path='layers.0.attn.v']").click()
    expect(view.locator(".tapsay")).to_contain_text("needs Python")
    view.locator(".tree .box").nth(1).click()
    expect(view.locator(".say")).to_contain_text("WEIGHT VALUE")
    lab.page.wait_for_timeout(500)
    lab.errors[:] = [words for words in lab.errors if "debugger state" not in words]  # JupyterLab's own, of a restart
