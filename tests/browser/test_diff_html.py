"""The saved comparison, opened from disk with the network off; and the states a comparison can be in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffs import SWAPPED, TIE, busiest, copied, full_trace, of, planted, swap
from playwright.sync_api import expect

import colibri_lab as lab
from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace

A = full_trace()
FIRST = "layers.2.moe.experts.*.output"
Show = Callable[..., Any]


@pytest.fixture
def show(offline: Show, tmp_path: Path) -> Show:
    """Writes a comparison's page and opens it; nothing in it is wider than its place."""

    def opened(diff: Any, name: str, dark: bool = False, width: int = 1200) -> Any:
        path = lab.DiffView(diff).to_html(tmp_path / f"{name}.html")
        page = offline(path, ".diff", f"page-diff-{name}", dark, width)
        wide = "(parts) => parts.filter((p) => p.scrollWidth > p.clientWidth + 1).map((p) => p.className)"
        parts = ".diff, .diff .card, .diff .say, .diff .tapsay, .diff .fliplist, .diff .valuesbody"
        assert page.locator(parts).evaluate_all(wide) == []
        return page

    return opened


def compared(b: Trace, a: Trace = A, **changes: Any) -> Any:
    return replace(lab.diff(a, b, names=("reference", "port.safetensors"), progress=False), **changes)


def place(page: Any) -> str:
    return page.locator(".diff").get_attribute("data-place")


@pytest.mark.parametrize(("name", "dark", "width"), [("whole", False, 1200), ("dark", True, 1200), ("760", False, 760)])
def test_the_page_works_offline(show: Show, name: str, dark: bool, width: int) -> None:
    """Map, experts, flips, positions and keys work on what the page holds."""
    page = show(compared(planted(A), diagnosis=SWAPPED), name, dark=dark, width=width)
    expert = busiest(A, 2)
    expect(page.locator(".live")).to_have_text("saved page")
    expect(page.locator(".say")).to_contain_text("the gate and up weights of this one expert are swapped")
    assert place(page) == f"{FIRST} {page.locator('.foot code').inner_text().split('token=')[1].split(',')[0]} {expert}"
    expect(page.locator(".tried .sign").first).to_contain_text("✓")
    lines = page.locator(".tried tr")
    expect(lines.nth(1)).to_contain_text("activation: gelu for silu")  # what leaves least over comes first
    expect(lines.nth(1)).to_contain_text("left over 0.3")
    expect(lines.last).to_contain_text("attention equal")
    expect(page.locator(".confirm")).to_contain_text("lab.diff(fixed, b).verdict")
    page.locator(".cell[data-path='layers.4.attn.q']").click()
    expect(page.locator(".scatter")).to_be_visible()
    expect(page.locator(".histogram")).to_be_visible()
    page.keyboard.press("0")
    expect(page.locator(".tapsay")).to_contain_text("B leaves A here")
    page.locator(".ex").first.click()
    shown = page.locator(".fliplist tr[data-flip]:not(.below)")
    expect(shown).to_have_count(5)
    page.get_by_role("button", name="Show all 7").click()
    expect(shown).to_have_count(7)
    page.keyboard.press("n")
    assert place(page).split()[0].endswith("expert_ids")
    page.locator(".kl .hit[data-token='30']").click()
    expect(page.locator(".nextwords")).to_contain_text("After token 30")
    expect(page.locator(".next svg")).to_be_visible()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".nextwords")).to_contain_text("After token 31")


def test_equal_runs_are_said_calmly(show: Show) -> None:
    """No fault word; the same bits, or the tap nearest to its tolerance."""
    page = show(compared(A), "same")
    expect(page.locator(".say")).to_contain_text("= SAME Both runs say the same.")
    expect(page.locator(".say")).to_contain_text("hold the same bits")
    expect(page.locator(".say .bad")).to_have_count(0)
    expect(page.locator(".flipsremark")).to_contain_text("none")
    arrays = copied(A)
    arrays["layers.4.attn.v"] += np.float32(1e-7) * np.abs(arrays["layers.4.attn.v"]).max()
    page = show(compared(of(A, arrays)), "near", dark=True)
    expect(page.locator(".say .sub")).to_contain_text("The nearest to its tolerance is layer 4, attention values")
    page.keyboard.press("0")


def test_a_tie_alone_is_no_fault(show: Show) -> None:
    """Both choices are right; the flip is selected and explained."""
    arrays = copied(A)
    swap(arrays, *TIE)
    page = show(compared(of(A, arrays)), "tie")
    expect(page.locator(".say")).to_contain_text("≈ TIE")
    expect(page.locator(".say")).to_contain_text("Either choice is right")
    expect(page.locator(".fliplist tr.on").first).to_contain_text("≈ tie")
    expect(page.locator(f".cell[data-path='layers.{TIE[0]}.moe.expert_ids']")).to_contain_text("≈ 1 tie")


def test_traces_of_ids_alone_show_their_choices(show: Show) -> None:
    """Imported routes: a map of one row, the tokens that differ, words where values would be."""
    whole = synthetic_trace(6, 8, 2, 40, seed=0)
    ids = {path: np.array(whole[path]) for path in whole if path.endswith("expert_ids")}
    other = {path: array.copy() for path, array in ids.items()}
    row = other["layers.2.moe.expert_ids"][4]
    row[:] = [e for e in range(8) if e not in row][:2]
    a, b = (Trace(arrays, ids=whole.ids, texts=[], meta=whole.meta) for arrays in (ids, other))
    page = show(compared(b, a), "ids")
    expect(page.locator(".tapsay")).to_contain_text("1 token of 40 goes to other experts")
    expect(page.locator(".rows tbody tr")).to_have_count(1)
    expect(page.locator(".kl")).to_contain_text("No logits in both runs")


def test_G1_nan_on_one_side_is_marked_and_counted(show: Show) -> None:
    """A boxed × in the map and in the key; the sentence and the values count them."""
    arrays = copied(A)
    arrays["layers.3.attn.out"][7, 2] = np.nan
    arrays["logits"][9] = np.nan
    page = show(compared(of(A, arrays)), "nan")
    cell = page.locator(".cell[data-path='layers.3.attn.out']")
    expect(cell.locator("path")).to_have_count(1)
    expect(page.locator(".map svg")).to_contain_text("NaN or Inf on one side")
    expect(page.locator(".tapsay")).to_contain_text("0 in A, 1 in B")
    expect(page.locator(".valuesbody .lg")).to_contain_text("NaN or Inf in B (1)")
    page.locator(".kl .hit[data-token='9']").click()
    expect(page.locator(".nextwords")).to_contain_text("NaN in the logits")


def test_runs_that_part_show_where(show: Show) -> None:
    """B has another token 30: the tokens before it are compared, the cut is drawn and said."""
    b = planted(A)
    ids = [*b.ids[:30], b.ids[30] + 1, *b.ids[31:]]
    page = show(compared(Trace(copied(b), ids=ids, texts=b.texts, meta=b.meta), diagnosis=None), "cut")
    expect(page.locator(".facts")).to_contain_text("the first 30 tokens of 40 and 40")
    expect(page.locator(".kl svg")).to_contain_text("cut")


def test_a_huge_comparison_is_drawn(show: Show) -> None:
    """48 layers, 128 experts, 2,000 tokens, 14,000 flips: thin labels, shared bars, numbers in the sentence."""
    whole = synthetic_trace(48, 128, 8, 2000, seed=0)
    arrays = {path: np.array(whole[path]) for path in whole if path.endswith(("expert_ids", "gates"))}
    rng = np.random.default_rng(1)
    arrays["logits"] = rng.standard_normal((2000, 50), np.float32)
    a = Trace(arrays, ids=whole.ids, texts=whole.texts, meta=whole.meta)
    other = {path: array.copy() for path, array in arrays.items()}
    for layer in range(20, 48):
        ids = other[f"layers.{layer}.moe.expert_ids"]
        ids[::4, -1] = [next(e for e in range(128) if e not in row) for row in ids[::4]]
    other["logits"] += rng.standard_normal((2000, 50)).astype(np.float32) * 0.1
    diff = compared(Trace(other, ids=whole.ids, texts=whole.texts, meta=whole.meta), a)
    for width in (760, 1200):
        page = show(diff, f"huge-{width}", width=width)
        page.locator(".map").focus()
        page.keyboard.press("End")
        expect(page.locator(".tapsay")).to_contain_text("500 tokens of 2,000")
        expect(page.locator(".more")).to_contain_text("view.diff.flips")
        assert page.locator(".kl .hit").count() < 300
