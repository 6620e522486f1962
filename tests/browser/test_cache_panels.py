"""The panels of CacheLab about the machine, in a real JupyterLab: pages dropped, stages measured, keys read."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

import colibri_lab

CELLS = [
    """import colibri_lab as lab
model = lab.open("copy")
session = model.session(capture="routing")
session.feed("The Queen of Hearts, she counts her gates")""",
    "view = lab.CacheLab(session, capacity=4)\nview",
]
LAYER, EXPERT = 2, 5


@pytest.fixture(scope="module")
def view(lab: Any) -> Any:
    """A view of a session whose model is a copy, so that no other process keeps its pages."""
    shutil.copytree(colibri_lab.open().path, lab.root / "copy")
    lab.open("cache-panels.ipynb", CELLS)
    lab.run_all()
    lab.page.wait_for_function("() => document.querySelector('.clb.cache')?.dataset.drawn > 0")
    lab.idle()
    lab.python(f"view.selection = dict(layer={LAYER}, token=6, expert={EXPERT})")
    expect(lab.page.locator(".clb.cache")).to_have_attribute("data-place", f"{LAYER} 6 {EXPERT}")
    return lab.page.locator(".clb.cache").first


@pytest.fixture(autouse=True)
def no_errors(lab: Any) -> Iterator[None]:
    """No test may leave an error in the browser's console."""
    lab.errors.clear()
    yield
    assert lab.errors == []


def test_warm_drop_and_the_arrows_follow_the_system(lab: Any, view: Any) -> None:
    """What the map says is what the system says: of the expert that was dropped, warmed, and of its neighbour."""
    say = view.locator("[data-place=residencysay]")
    row = view.locator("[data-place=residency] .sr tbody tr").nth(EXPERT).locator("td").nth(LAYER)
    for act in ("Drop", "Warm"):
        view.get_by_role("button", name=act, exact=True).click()
        expect(say).to_contain_text(f"{act}: ")
        share = float(lab.python(f"print(lab.cache.residency(model).share[{LAYER}, {EXPERT}])"))
        expect(row).to_have_text("100" if share == 1 else str(max(1, min(99, round(100 * share)))) if share else "0")
        expect(say).to_contain_text(f"{round(100 * share)} % now")
    for act, then in (("Lock", "Unlock"), ("Unlock", "Lock")):
        view.get_by_role("button", name=act, exact=True).press("Enter")
        expect(view.get_by_role("button", name=then, exact=True)).to_be_focused()
    view.locator("[data-map=residency]").focus()
    lab.page.keyboard.press("ArrowRight")
    expect(view).to_have_attribute("data-place", f"{LAYER + 1} 6 {EXPERT}")
    expect(say).to_contain_text(f"Layer {LAYER + 1}, expert {EXPERT}")
    expect(say).not_to_contain_text("Warm")
    view.locator("[data-map=residency] svg").click(position={"x": 60, "y": 30})
    place = view.get_attribute("data-place")
    assert json.loads(lab.python("print([view.selection['layer'], view.selection['expert']])")) == [
        int(place.split()[0]),
        int(place.split()[2]),
    ]


def test_stages_are_measured_when_asked(lab: Any, view: Any) -> None:
    """Nothing before the button; then each stage with arithmetic has a letter and a row, and Python's words."""
    assert view.locator("g.stage").count() == 0
    view.get_by_role("button", name="Measure", exact=True).click()
    expect(view.get_by_role("button", name="Measure again")).to_be_enabled()
    lab.idle()
    facts = json.loads(lab.python("import json; print(json.dumps(view._panels.shown(view.selection)[1][1][0]))"))
    expect(view.locator("g.stage")).to_have_count(len(facts["points"]))
    expect(view.locator(".rooftwin tbody tr")).to_have_count(len(facts["points"]) + len(facts["unplaced"]))
    assert {"A", "R", "E", "L"} <= set(view.locator("g.stage text").all_text_contents())
    words = view.locator("[data-place=stagewords]")
    expect(words).to_contain_text(re.sub(r"\*\*", "", facts["words"][0]))
    for dark in (True, False):
        lab.theme(dark)
        lab.shot(f"cache-panels-{'dark' if dark else 'light'}", view)
        assert not Axe().run(lab.page, context=".cache .body").response["violations"]
    missing = [row for row in facts["counters"] if row["reason"]]
    expect(words.get_by_text("not available here", exact=True)).to_have_count(len(missing))


def test_the_keys_are_those_of_the_selected_query(lab: Any, view: Any) -> None:
    """An arrow goes to another query; how many keys hold its attention is what the attention itself says."""
    view.locator("[data-map=keys]").focus()
    lab.page.keyboard.press("ArrowRight")
    layer, token, _ = (int(number) for number in view.get_attribute("data-place").split())
    count = lab.python(
        f"""import numpy as np
mean = np.sort(lab.cache.keys(session).weights({layer}, {token}).mean(axis=0))[::-1]
print(next(n for n in range(1, len(mean) + 1) if mean[:n].sum() >= 0.9 * mean.sum()))"""
    )
    said = f"({token}) reads layer {layer}: {count} of {token + 1} keys"
    expect(view.locator("[data-place=keyssay]")).to_contain_text(said)
