"""The saved tracer, opened from disk with the network off; and the states a run can be in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from founds import CURED, EXPERT, LAYER, NOT_CURED, TOKEN, UNKNOWN, WEIGHT, many, overflow, run, table
from playwright.sync_api import expect

import colibri_lab as lab
from colibri_lab.nan.result import Propagation
from colibri_lab.widgets.nan_data import NanData

HIDDEN = f"layers.{LAYER}.moe.experts.*.hidden"
Show = Callable[..., Any]


@pytest.fixture
def show(offline: Show, tmp_path: Path) -> Show:
    """Writes a view's page and opens it; nothing in it is wider than its place, and axe, when asked, finds nothing."""
    from axe_playwright_python.sync_playwright import Axe

    def opened(view: Any, name: str, dark: bool = False, width: int = 1200, axe: bool = False) -> Any:
        page = offline(view.to_html(tmp_path / f"{name}.html"), ".nan", f"page-nan-{name}", dark, width)
        wide = "(parts) => parts.filter((p) => p.scrollWidth > p.clientWidth + 1).map((p) => p.className)"
        assert page.locator(".nan, .nan .card, .nan .say, .nan .tapsay").evaluate_all(wide) == []
        found = Axe().run(page, context=".nan").response["violations"] if axe else []
        assert not found, json.dumps(found, indent=1)[:3000]
        return page

    return opened


def clean() -> Any:
    """A view of a run in which everything is finite."""
    view = lab.NanTracer(None)
    view._data = NanData.clean(run(), table(born=None), "float16")
    view.selection = view._data.start()
    return view


def tried() -> Any:
    """A view in which two changes were tried."""
    view = lab.NanTracer(overflow())
    view._cures = {(0, "precision"): CURED, (0, "clamp"): NOT_CURED}
    return view


def place(page: Any) -> str:
    return page.locator(".nan").get_attribute("data-place")


@pytest.mark.parametrize(
    ("name", "dark", "width"), [("whole", False, 1200), ("dark", True, 1200), ("660", False, 660), ("480", False, 480)]
)
def test_the_page_works_offline(show: Show, name: str, dark: bool, width: int) -> None:
    """Sentence, map, tree, bits, curve, cures and keys work on what the page holds."""
    page = show(tried(), name, dark=dark, width=width, axe=width > 1000)
    expect(page.locator(".live")).to_have_text("saved page")
    say = page.locator(".say")
    expect(say).to_contain_text("OVERFLOW Born in layer 3, expert 5, hidden = act(gate) · up, token 35")
    expect(say).to_contain_text("neuron 117: 412.25 × 181.625 = 74,875, and float16 ends at 65,504.")
    expect(say).to_contain_text("It ruined the logits of 5 of 40 tokens. Cure: this product in float32.")
    expect(say).to_contain_text("Headroom had fallen to 0.9 bit one layer earlier.")
    assert place(page) == f"{HIDDEN} {TOKEN} {EXPERT}"
    expect(page.locator(".mapkey")).to_contain_text("+Inf (4)")
    expect(page.locator(".mapkey")).to_contain_text("NaN (22)")
    expect(page.locator(".tree .box")).to_have_count(11)
    assert page.locator(".ops .bits").first.inner_text() == "0"
    assert page.locator(".ops tbody tr").nth(0).locator(".bits").nth(1).inner_text().replace("\n", "") == "10111"
    expect(page.locator(".opsay")).to_contain_text("1.14 × the largest float16")
    expect(page.locator(".curve svg")).to_contain_text("−0.2")
    rows = page.locator(".curetable tbody tr")
    expect(rows.nth(0)).to_contain_text("✓ gone")
    expect(rows.nth(1)).to_contain_text("✗ still there unknown in router, layer 4")
    expect(rows.nth(1)).to_contain_text("NaN; 3 routes changed")
    expect(rows.nth(2)).to_contain_text("not tried: no model is open")
    assert page.locator(".curetable button:enabled").count() == 0
    page.locator(".cell[data-path='layers.4.output']").click()
    expect(page.locator(".tapsay")).to_contain_text("80 NaN of 640 values. Passed on.")
    page.keyboard.press("0")
    assert place(page) == f"{HIDDEN} {TOKEN} {EXPERT}"


def test_keys_walk_map_and_tree(show: Show) -> None:
    """Arrows along the map when it has the focus, along the tree elsewhere; ? lists the keys, Esc closes them."""
    page = show(tried(), "keys")
    page.locator(".tree").focus()
    steps = [("ArrowRight", "expert 5 output"), ("ArrowRight", "sum of the experts"), ("ArrowLeft", "expert 5 output")]
    for key, title in steps:
        page.keyboard.press(key)
        expect(page.locator(".tree")).to_have_attribute("aria-label", re.compile(re.escape(title)))
    page.locator(".map").focus()
    page.keyboard.press("0")
    moves = [
        ("ArrowLeft", "layers.2.moe.experts.*.hidden"), ("ArrowUp", "layers.2.moe.router_logits"),
        ("End", "layers.5.moe.router_logits"), ("ArrowRight", "norm"), ("ArrowDown", "logits"),
    ]  # fmt: skip
    for key, path in moves:
        page.keyboard.press(key)
        assert place(page).split()[0] == path
    page.keyboard.press("PageUp")
    assert place(page) == "logits 34"
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keys")).to_be_hidden()


def test_a_clean_run_says_so_and_what_comes_nearest(show: Show) -> None:
    """In the same places, without a fault word; and a clean run without a map."""
    page = show(clean(), "clean", axe=True)
    expect(page.locator(".say")).to_have_text(
        "✓ CLEAN Clean. Closest to overflow: layer 2, expert hidden, 0.9 bit in float16."
    )
    expect(page.locator(".say .bad")).to_have_count(0)
    expect(page.locator(".wayends tbody tr").first).to_contain_text("layer 2, expert hidden")
    expect(page.locator(".cures")).to_have_text("Nothing needs a cure.")
    page = show(lab.NanTracer(None), "clean-bare")
    expect(page.locator(".say")).to_contain_text("nothing is NaN or Inf")


def test_several_origins_are_chosen_from_a_list(show: Show) -> None:
    """Each has its sentence, its way, its operands; a signalling NaN is named; what is unknown says what would tell."""
    page = show(lab.NanTracer(overflow(WEIGHT, UNKNOWN)), "several", dark=True, axe=True)
    expect(page.locator(".say")).to_contain_text("3 independent origins; the first: born in")
    page.locator("[data-origin='1']").click()
    assert place(page).split()[0] == "layers.1.attn.q"
    expect(page.locator(".say")).to_contain_text("WEIGHT VALUE")
    expect(page.locator(".say")).to_contain_text("head 2, channel 7")
    expect(page.locator(".opbody")).to_contain_text("a signalling NaN. In a.safetensors, byte 18,345,672.")
    expect(page.locator(".opbody thead")).to_contain_text("exponent (8) · fraction (23)")
    page.screenshot(path=Path(__file__).parent / "screenshots/page-nan-weight.png", full_page=True)
    page.keyboard.press("n")
    expect(page.locator(".say")).to_contain_text("UNKNOWN")
    expect(page.locator(".opbody")).to_contain_text("What would tell: layers.4.moe.input, layers.3.output.")
    page.keyboard.press("n")
    expect(page.locator("[data-origin='0']")).to_have_attribute("aria-pressed", "true")


@pytest.mark.parametrize("dark", [False, True])
def test_words_on_a_filled_cell_can_be_read(show: Show, dark: bool) -> None:
    """The logits are an origin: their name and the number of tokens stand on ink; 4.5 to 1 at least (WCAG)."""
    found = overflow(replace(UNKNOWN, path="logits", layer=None, stage="logits"))
    found.map["state"][found.map["path"] == "logits"] = "origin"
    page = show(lab.NanTracer(found), f"filled-{dark}", dark=dark, axe=True)
    cell = page.locator(".cell[data-path='logits']")
    fill = "(parts) => parts.map((part) => getComputedStyle(part).fill.match(/[0-9.]+/g).slice(0, 3).map(Number))"
    ground, *words = (_light(c) for part in ("rect", "text") for c in cell.locator(part).evaluate_all(fill))
    assert len(words) >= 2
    assert all((max(ground, ink) + 0.05) / (min(ground, ink) + 0.05) >= 4.5 for ink in words)


def _light(colour: list[float]) -> float:
    """Relative luminance of sRGB (WCAG 2)."""
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_what_is_swallowed_ruins_no_token(show: Show) -> None:
    found = overflow()
    way = Propagation((), (), tuple(range(40)), "logits", swallowed=("the gate of expert 5 was 0 for token 35",))
    page = show(lab.NanTracer(replace(found, propagation=way)), "swallowed")
    expect(page.locator(".say")).to_contain_text("No token is ruined by it.")
    expect(page.locator(".wayends")).to_contain_text("Swallowed: the gate of expert 5 was 0 for token 35")


def test_words_in_the_headroom_stand_where_no_mark_is(show: Show) -> None:
    """From layer 2 on nothing is finite: the last layers have marks in the band of overflow, its name stands before."""
    view = lab.NanTracer(overflow())
    table = view._shown.table
    table["absmax"][np.char.endswith(table["path"], "routed") & (table["layer"] >= 2)] = np.nan
    view.selection = {"path": "layers.2.moe.routed"}
    page = show(view, "headroom")
    word = page.locator(".curve text.bad").bounding_box()
    marks = page.locator(".curve svg rect[width='13']").evaluate_all(
        "(marks) => marks.map((mark) => mark.getBoundingClientRect()).map(({left, right}) => [left, right])"
    )
    assert len(marks) > 2 and all(right < word["x"] or left > word["x"] + word["width"] for left, right in marks)


def test_a_huge_run_is_drawn(show: Show) -> None:
    """48 layers, 128 experts, 300 origins: thin labels, a few origins, the rest in words."""
    for width in (760, 1200):
        page = show(lab.NanTracer(many(300)), f"huge-{width}", width=width)
        expect(page.locator(".say")).to_contain_text("300 independent origins")
        expect(page.locator(".origins li")).to_have_count(4)
        page.get_by_role("button", name="Show the first 200").click()
        expect(page.locator(".origins li")).to_have_count(200)
        expect(page.locator(".origins")).to_contain_text("the others are in view.found.origins")
        page.locator(".map").focus()
        page.keyboard.press("End")
        assert place(page).startswith("layers.47.")


def test_more_layers_than_fit_are_a_window_with_zigzag_edges(show: Show) -> None:
    """200 layers: what is cut is counted, and the window follows the selection."""
    found = replace(overflow(), map=table(200))
    page = show(lab.NanTracer(found), "layers")
    expect(page.locator(".mapkey")).to_contain_text("more layers")
    page.locator(".map").focus()
    page.keyboard.press("End")
    expect(page.locator(".cell[data-path='layers.199.output']")).to_have_count(1)
    expect(page.locator(".cell[data-path='layers.0.output']")).to_have_count(0)
