"""The cache lab in a real JupyterLab: drag the capacity by mouse and by keys, read a miss, run the printed code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

TEXT = "The fox counts the eggs in her nest. She writes a function: def total(eggs): return sum(eggs)"
CELLS = [
    f"""import colibri_lab as lab
session = lab.open().session(capture='routing')
session.feed({TEXT!r})""",
    "view = lab.CacheLab(session, capacity=4)\nview",
]


@pytest.fixture(scope="module")
def view(lab: Any) -> Any:
    """A short text in the bundled model, looked at from a notebook by the menu."""
    lab.open("cache.ipynb", CELLS)
    lab.run_all()
    lab.page.wait_for_function("() => document.querySelector('.clb.cache')?.dataset.drawn > 0")
    lab.idle()
    shown = lab.page.locator(".clb.cache").first
    expect(shown.locator(".countertable")).not_to_contain_text("…")
    return shown


@pytest.fixture(autouse=True)
def no_errors(lab: Any) -> Iterator[None]:
    """No test may leave an error in the browser's console."""
    lab.errors.clear()
    yield
    assert lab.errors == []


def counters(view: Any) -> dict[str, int]:
    """The first column of the table: counts of the chosen policy."""
    rows = view.locator(".countertable tbody tr")
    cells = rows.evaluate_all("(rows) => rows.map((r) => [r.cells[0].textContent, r.cells[1].textContent])")
    return {name: int(n.replace(",", "")) for name, n in cells if re.fullmatch(r"[\d,]+", n)}


def in_python(lab: Any) -> dict[str, Any]:
    """Setting, counts and report of the simulation that the view stands for, once both sides say the same."""
    shown = lab.page.locator(".clb .code.here").last
    for _ in range(100):
        if shown.text_content() == lab.python("print(view.code)"):
            break
        lab.page.wait_for_timeout(50)
    code = """import json
s = view.simulation
print(json.dumps([view.setting['policy'], s.capacity, int(s.requests.sum()), int(s.hits.sum()), int(s.misses.sum()),
                  s.report()]))"""
    names = ("policy", "capacity", "requests", "hits", "misses", "report")
    return dict(zip(names, json.loads(lab.python(code)), strict=True))


def check(lab: Any, view: Any, capacity: int) -> dict[str, int]:
    """What the table shows is what Python counts and what the text report prints."""
    expect(view).to_have_attribute("data-setting", re.compile(f"^[a-z]+ {capacity} "))
    shown, found = counters(view), in_python(lab)
    assert found["capacity"] == capacity
    assert {name: shown[name] for name in ("requests", "hits", "misses")} == {
        name: found[name] for name in ("requests", "hits", "misses")
    }
    numbers = set(re.findall(r"\d+", found["report"].replace(",", "")))
    assert {str(shown[name]) for name in ("requests", "hits", "misses")} <= numbers
    return shown


def test_the_capacity_is_dragged_by_mouse_and_by_keys(lab: Any, view: Any) -> None:
    """The counts follow at once and are those of the text report."""
    at_four = check(lab, view, 4)
    slider = view.locator(".curves")
    box = slider.bounding_box()
    handle = slider.locator("svg rect[height='14']").bounding_box()
    lab.page.mouse.move(handle["x"] + 12, handle["y"] + 7)
    lab.page.mouse.down()
    lab.page.mouse.move(box["x"] + box["width"] * 0.78, box["y"] + 60, steps=6)
    expect(slider).to_have_attribute("aria-valuenow", "8")
    lab.page.mouse.up()
    at_eight = check(lab, view, 8)
    assert at_eight["misses"] < at_four["misses"]
    slider.focus()
    for key, capacity in [("ArrowLeft", 7), ("ArrowDown", 6), ("Home", 2), ("ArrowRight", 3), ("End", 8)]:
        lab.page.keyboard.press(key)
        expect(slider).to_have_attribute("aria-valuenow", str(capacity))
    lab.page.keyboard.press("p")
    expect(view).to_have_attribute("data-setting", "lfu 8 layer")
    for key, capacity in [("PageDown", 2), ("PageUp", 8), ("PageDown", 2)]:
        lab.page.keyboard.press(key)
        expect(slider).to_have_attribute("aria-valuenow", str(capacity))
    check(lab, view, 2)
    lab.python("view.setting = dict(policy='lru', capacity=4)")
    check(lab, view, 4)


def test_a_miss_is_clicked_and_read(lab: Any, view: Any) -> None:
    """Token, what it pushed out, the runner-up and whether it was there: as the simulation has it."""
    code = """import json
layer = view.selection['layer']
events = view.simulation.events(layer)
one = [e for e in events if e['outcome'] == 'miss' and e['evicted'] >= 0][2]
token, expert = int(one['token']), int(one['expert'])
runner, behind, *_ = view._shown.places.runners_up(layer, token, token + 1)
inside = int(runner[0]) in view.simulation.resident(layer, token - 1)
print(json.dumps([token, expert, int(one['evicted']), int(runner[0]), float(behind[0]), bool(inside)]))"""
    token, expert, evicted, runner, behind, inside = json.loads(lab.python(code))
    where = view.locator(".time svg").evaluate(
        """(svg, [token, expert]) => { const misses = Array.from(svg.querySelectorAll("path[d$='l6 6l-6 6l-6 -6Z']"));
             const boxes = misses.map((m) => m.getBoundingClientRect());
             const rows = [...new Set(boxes.map((b) => b.y))];
             return boxes.map((b) => [b.x + b.width / 2, b.y + b.height / 2]); }""",
        [token, expert],
    )
    labels = view.locator(".time svg text.m")
    column = labels.nth(token).bounding_box()
    row = view.locator(".time svg text.b").nth(expert).bounding_box()
    near = min(where, key=lambda p: abs(p[0] - column["x"] - column["width"] / 2) + abs(p[1] - row["y"] - 7))
    lab.page.mouse.click(*near)
    expect(view).to_have_attribute("data-place", re.compile(f" {token} {expert}$"))
    say = view.locator(".misssay")
    expect(say).to_contain_text(f"Token {token} ")
    expect(say).to_contain_text(f"asked for {expert}: miss")
    expect(say).to_contain_text(f"It pushed out {evicted}.")
    was = "in the cache" if inside else "not in the cache"
    distance = "less than 0.01" if 0 < behind < 0.005 else f"{behind:.2f}"
    expect(say).to_contain_text(f"The runner-up {runner} was {was}, {distance} behind")
    lab.page.keyboard.press("m")
    place = view.get_attribute("data-place").split()
    after = json.loads(lab.python(
        "print(json.dumps([[int(e['token']), int(e['expert'])] for e in events if e['outcome'] == 'miss']))"
    ))  # fmt: skip
    assert [int(place[1]), int(place[2])] == after[after.index([token, expert]) + 1]
    assert in_python(lab) and lab.python("print(view.selection['token'])") == place[1]


def test_the_printed_code_runs(lab: Any, view: Any) -> None:
    """Copied by its button; it counts what the view counts."""
    view.locator(".foot [data-act=copy]").click()
    expect(view.locator(".copied")).to_have_text("Copied.")
    code = lab.page.evaluate("() => navigator.clipboard.readText()")
    misses = lab.python(f"print({code}.misses.sum())")
    assert int(misses) == counters(view)["misses"]
    view.get_by_role("button", name="Copy as code").click()
    expect(view.locator(".copied")).to_have_text("Copied.")
    program = lab.page.evaluate("() => navigator.clipboard.readText()")
    assert lab.python(program) == lab.python("print(view.simulation.report())")


def test_prefetch_and_scope_are_simulated_too(lab: Any, view: Any) -> None:
    """A look-ahead comes from the open model; a global cache of as many bytes holds as many experts."""
    view.get_by_role("button", name="look-ahead").click()
    expect(view.locator(".countertable")).to_contain_text("fetched ahead")
    expect(view.locator(".code.here")).to_contain_text("look_ahead(view.trace)")
    view.get_by_role("button", name="global").click()
    expect(view).to_have_attribute("data-setting", "lru 24 global")
    expect(view.locator(".countertable")).not_to_contain_text("…")
    check(lab, view, 24)
    lab.python("view.setting = dict(scope='layer', capacity=4, prefetch='none')")
    expect(view).to_have_attribute("data-setting", "lru 4 layer")


def test_menus_and_the_slider_set_what_they_say(lab: Any, view: Any) -> None:
    """A policy of the menu gets a curve too; another layer, another timeline; the slider steps by keys of its own."""
    view.get_by_label("More policies").select_option("clock")
    expect(view).to_have_attribute("data-setting", "clock 4 layer")
    expect(view.locator(".curves svg")).to_contain_text("CLOCK")
    view.locator(".range").focus()
    lab.page.keyboard.press("ArrowRight")
    check(lab, view, 5)
    view.locator("select.layer").select_option("5")
    expect(view.locator(".timetitle")).to_have_text("Cache of layer 5, token by token")
    assert in_python(lab) and lab.python("print(view.selection['layer'])") == "5"


def test_without_a_kernel_the_curves_go_on(lab: Any, view: Any) -> None:
    """The state is said; what was counted can still be dragged through, what was not is refused in words."""
    lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    expect(view.locator(".live")).to_have_text("no kernel")
    expect(view.get_by_role("button", name="Save HTML")).to_be_disabled()
    view.locator(".curves").focus()
    lab.page.keyboard.press("Home")
    expect(view).to_have_attribute("data-setting", "clock 2 layer")
    expect(view.locator(".say")).to_contain_text("with 2 experts per layer")
    expect(view.locator(".misssay")).to_contain_text("needs Python")
    lab.page.keyboard.press("End")
    expect(view).to_have_attribute("data-setting", "clock 8 layer")
    lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.shutdown()")
    lab.page.keyboard.press("Home")  # nothing is sent to a kernel that is not there: it would be an error
    expect(view).to_have_attribute("data-setting", "clock 2 layer")
    view.locator(".time").focus()
    lab.page.keyboard.press("ArrowRight")
    lab.page.keyboard.press("m")
    expect(view.locator(".said")).to_contain_text("needs Python")
    lab.page.wait_for_timeout(500)
    own = re.compile("debugger state|create_subshell_request")  # JupyterLab's, of a restart and of an end
    lab.errors[:] = [words for words in lab.errors if not own.search(words)]
