"""The saved walk, opened from disk with the network off: it steps through its moments with no Python behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import expect

import colibri_lab as lab
from colibri_lab.testing import tiny_model

TEXT = "The fox counts the eggs in her nest. She writes a function:\ndef total(eggs):\n    return"
Show = Callable[..., Any]


@pytest.fixture
def show(offline: Show, tmp_path: Path) -> Show:
    """Writes a view's page and opens it; it does not scroll sideways."""

    def opened(view: Any, name: str, dark: bool = False, width: int = 1200) -> Any:
        path = view.to_html(tmp_path / f"{name}.html")
        page = offline(path, ".stepper", f"page-stepper-{name}", dark, width)
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, "the page scrolls sideways"
        return page

    return opened


def walked() -> Any:
    """A view that went to an aggregator, changed a gate in a fork, and went on."""
    view = lab.TokenStepper(lab.open().session(capture="moe"), TEXT)
    for _ in range(4):
        view.step()
    view.run_to("layer == 3 and stage == 'router'")
    token = view.selection["token"]
    ids = view.stepper.peek("layers.3.moe.expert_ids")[token].tolist()
    view.edit_routing(3, token, ids, [0.0, 2.0])
    view.step("layer")
    return view


def test_the_page_steps_through_what_was_kept(show: Show) -> None:
    """Back, Step, the map and the keys move between the moments; how many there are is said; running is off."""
    page = show(walked(), "walk")
    root = page.locator(".stepper")
    expect(page.locator(".live")).to_have_text("saved page")
    kept = page.locator(".count")
    expect(kept).to_contain_text("moment 7 of 7 kept")
    expect(root).to_have_attribute("data-place", "3 residual")
    expect(page.get_by_role("button", name="Step ▶")).to_be_disabled()
    expect(page.get_by_role("button", name="Run to")).to_be_disabled()
    page.get_by_role("button", name="Back").click()
    expect(root).to_have_attribute("data-place", "3 router")
    expect(page.locator(".verdict")).to_contain_text("KL")
    page.locator(".flow").focus()
    for _ in range(3):
        page.keyboard.press(",")
    expect(root).to_have_attribute("data-place", "0 router")
    page.keyboard.press(".")
    expect(root).to_have_attribute("data-place", "0 dispatcher")
    page.locator(".cell[data-stage=router][data-layer='3']").click()
    expect(root).to_have_attribute("data-place", "3 router")
    page.locator(".cell[data-stage=router][data-layer='2']").click()
    expect(page.locator(".said")).to_contain_text("was not kept")
    before = int(page.locator(".tokrow").first.get_attribute("data-token"))
    page.locator(".flow").focus()
    page.keyboard.press("Home")
    assert int(page.locator(".tokrow").first.get_attribute("data-token")) < before


@pytest.mark.parametrize(("name", "dark", "width"), [("dark", True, 1200), ("narrow", False, 760)])
def test_dark_and_narrow(show: Show, name: str, dark: bool, width: int) -> None:
    """For people to look at; nothing scrolls sideways."""
    show(walked(), name, dark=dark, width=width)


def test_G1_nan_and_inf_are_marked_and_counted(show: Show) -> None:
    """A NaN gate and an infinite one: marks in the picture, counts in the table, words in the sentence."""
    view = lab.TokenStepper(lab.open().session(capture="moe"), "The fox counts the eggs in her nest.")
    view.run_to("layer == 2 and stage == 'router'")
    gates = view.stepper.edit("layers.2.moe.gates")
    gates[5, 0], gates[6, 1] = np.nan, np.inf
    view.run_to("layer == 3 and stage == 'aggregator'")
    view.selection = {"token": 5}
    page = show(view, "nan")
    expect(page.locator(".say")).to_contain_text("NaN")
    count = int(np.sum(~np.isfinite(view.stepper.peek("layers.3.moe.output"))))
    expect(page.locator(".table tr", has_text="moe.output").first).to_contain_text(str(count))
    expect(page.locator(".picture")).to_contain_text("NaN")


def test_many_experts_dense_and_shared(show: Show, tmp_path: Path) -> None:
    """128 experts: those that the shown tokens use; a shared expert in the sum; a dense layer without experts."""
    made = tiny_model(tmp_path / "m", "qwen2_moe", layers=24, experts=128, top_k=8, hidden=64, dense_layers=[0], seed=3)
    model = lab.open(made)
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, 300).tolist()
    view = lab.TokenStepper(model.session(capture="moe").stepper(ids, chunk=None))
    view.run_to("layer == 20 and stage == 'aggregator'")
    view.selection = {"token": 150}
    page = show(view, "many")
    mine = view.stepper.peek("layers.20.moe.expert_ids")[150].tolist()
    shown = [int(box.get_attribute("data-expert")) for box in page.locator(".exbox").all()]
    assert len(shown) == 16 and set(mine) <= set(shown)
    expect(page.locator(".picture")).to_contain_text("the shared expert")
    expect(page.locator(".picture")).to_contain_text("112 more experts")
    view.go_to("mlp", 0)
    page = show(view, "dense")
    expect(page.locator(".exbox")).to_have_count(0)
    expect(page.locator(".picture")).to_contain_text("a dense layer")
