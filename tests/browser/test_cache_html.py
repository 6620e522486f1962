"""Saved pages of the cache lab, opened in Chromium without a network: drag, keys, themes, sizes, what is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from diffs import copied
from playwright.sync_api import expect

import colibri_lab as lab
from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace

Show = Callable[..., Any]


@pytest.fixture
def show(offline: Any, tmp_path: Path) -> Show:
    """show(view, name): the page of a view, opened offline; nothing stands out of its card."""

    def opened(view: Any, name: str, dark: bool = False, width: int = 1200, axe: bool = False) -> Any:
        page = offline(view.to_html(tmp_path / f"{name}.html"), ".cache", f"page-cache-{name}", dark, width)
        wide = "(parts) => parts.filter((p) => p.scrollWidth > p.clientWidth + 1).map((p) => p.className)"
        assert page.locator(".cache, .cache .card, .cache .say, .cache .ctl").evaluate_all(wide) == []
        found = Axe().run(page, context=".cache").response["violations"] if axe else []
        assert not found, json.dumps(found, indent=1)[:3000]
        return page

    return opened


def run() -> Trace:
    return synthetic_trace(layers=6, experts=8, top_k=2, tokens=40)


def fast_then_full() -> Any:
    """A machine whose memory is full from 6 experts per layer on."""
    machine = lab.cache.Machine(read_bytes_per_s=2e9, seconds_per_token=0.02, memory_bytes=6 * 6 * 1_500_000)
    return lab.CacheLab(run(), capacity=4, expert_bytes=1_500_000, machine=machine)


@pytest.mark.parametrize(("name", "dark", "width"), [("light", False, 1200), ("dark", True, 1200), ("660", False, 660)])
def test_the_page_works_offline(show: Show, name: str, dark: bool, width: int) -> None:
    """Sentence, counters, timeline and keys on what the page holds; every capacity counts as Python does."""
    view = fast_then_full()
    page = show(view, name, dark=dark, width=width, axe=width > 1000)
    expect(page.locator(".live")).to_have_text("saved page")
    say = page.locator(".say")
    expect(say).to_contain_text("LRU with 4 experts per layer (36 MB):")
    expect(page.locator(".curves svg")).to_contain_text("more cache, slower")
    page.locator(".curves").focus()
    for key, capacity in [("ArrowRight", 5), ("End", 8), ("Home", 2)]:
        page.keyboard.press(key)
        once = lab.cache.simulate(view.trace, "lru", capacity)
        misses, requests = int(once.misses.sum()), int(once.requests.sum())
        row = page.locator(".countertable tr", has_text="misses").first
        expect(row.locator("td").nth(1)).to_have_text(f"{misses:,}")
        share = 100 * misses / requests
        expect(say).to_contain_text(f"{share:.0f} % of requests miss" if share >= 9.5 else f"{share:.1f} %")
    expect(page.locator(".misssay")).to_contain_text("asked for")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("s")
    expect(page.locator(".cache")).to_have_attribute("data-setting", "lru 12 global")
    expect(page.locator(".findings")).to_contain_text("global LRU of 10 or fewer")


def test_what_the_trace_does_not_tell_is_said(show: Show) -> None:
    """No logits: no runner-up. No tokens: what to do. One token: nothing but first uses."""
    trace = run()
    arrays = {path: values for path, values in copied(trace).items() if not re.search("scores|router_logits", path)}
    bare = Trace(arrays, ids=trace.ids, texts=trace.texts, meta=trace.meta)
    page = show(lab.CacheLab(bare), "bare")
    expect(page.locator(".misssay")).to_contain_text("Runner-up not recorded")
    page = show(lab.CacheLab(lab.open().session(capture="routing")), "empty")
    expect(page.locator(".say")).to_contain_text("Nothing has run yet")
    expect(page.locator(".body")).to_be_hidden()
    page = show(lab.CacheLab(synthetic_trace(layers=6, experts=8, top_k=2, tokens=1)), "one")
    expect(page.locator(".say")).to_contain_text("100 % of requests miss")
    expect(page.locator(".findings")).to_contain_text("Each expert is asked for once and no more")
    nobody = {path: np.full_like(values, -1) for path, values in arrays.items() if path.endswith("expert_ids")}
    page = show(lab.CacheLab(Trace(nobody, ids=trace.ids, texts=trace.texts, meta=trace.meta)), "nobody")
    expect(page.locator(".say")).to_contain_text("nothing is asked for")
    assert "NaN" not in page.locator(".cache").inner_html()


def test_a_recording_from_elsewhere_is_shown_by_numbers(show: Show) -> None:
    """Tokens without text or id carry their number; passes that nobody told cannot be chosen, and it says why."""
    trace = run()
    arrays = {path: trace[path] for path in trace if path.endswith("expert_ids")}
    meta = {**trace.meta, "source": "routes.csv", "passes": [[0, 40]]}
    page = show(lab.CacheLab(Trace(arrays, ids=[-1] * 40, texts=[], meta=meta)), "elsewhere")
    assert page.locator(".time svg text.m").all_text_contents() == [str(token) for token in range(40)]
    expect(page.get_by_role("button", name="as recorded")).to_be_disabled()
    expect(page.locator(".passes")).to_contain_text("this recording names no passes")
    expect(page.locator(".misssay")).not_to_contain_text("‹?›")


def test_tokens_without_finite_logits_and_what_a_speed_rests_on_are_told(show: Show) -> None:
    """The count above the findings; the machine, and what is assumed of a prefetch."""
    session = lab.exercises.patient(1).session(capture="routing")
    session.feed("The fox counts the eggs in her nest. She writes a function: def total(eggs): return sum(eggs)")
    machine = lab.cache.Machine(2e9, 2e-4, source="measured: 12 tokens")
    view = lab.CacheLab(session, capacity=4, machine=machine, prefetch="previous")
    page = show(view, "sick")
    count = view._shown.places.not_finite
    expect(page.locator(".findings")).to_contain_text(f"{count} of {len(session.ids)} tokens have router logits")
    expect(page.locator(".speednote")).to_contain_text("(measured: 12 tokens): reading and computing in turn")
    expect(page.locator(".speednote")).to_contain_text("steps the model stage by stage")
    expect(page.locator(".speednote")).to_contain_text("fetched ahead counts as read")
    expect(page.locator(".say")).to_contain_text("predicted if what is fetched ahead comes in time")


def test_a_huge_trace_is_drawn_in_a_window(show: Show) -> None:
    """128 experts, 512 tokens: a window with zigzag edges, thin rows, labels of every 16th; End leads to its end."""
    view = lab.CacheLab(synthetic_trace(layers=8, experts=128, top_k=8, tokens=512), capacity=40)
    page = show(view, "huge")
    expect(page.locator(".timeremark")).to_contain_text("of 512")
    page.locator(".time").focus()
    page.keyboard.press("End")
    expect(page.locator(".cache")).to_have_attribute("data-place", re.compile(" 511 "))
    page.locator(".curves").focus()
    before = page.locator(".say").inner_text()
    page.keyboard.press("PageDown")
    expect(page.locator(".say")).not_to_have_text(before)


def test_what_the_numbers_say_is_true(show: Show) -> None:
    """Each sentence is held against simulations, in cases where a shorter rule would mislead."""

    def says(name: str, trace: Trace, **setting: Any) -> str:
        page = show(lab.CacheLab(trace, **setting), name)
        found = " ".join(page.locator(".findings li").all_inner_texts())
        page.goto("about:blank")
        return found

    def only(ids: list[list[int]], experts: int) -> Trace:
        """One layer that asks for these."""
        trace = synthetic_trace(1, experts, len(ids[0]), len(ids))
        path = next(path for path in trace if path.endswith("expert_ids"))
        return Trace({path: np.array(ids, np.int32)}, ids=trace.ids, texts=trace.texts, meta=trace.meta)

    # Two experts in turn, 14 of 16 kept: both LRU and blind traffic miss little, and recent use tells everything.
    assert "recent use tells" not in says("turns", only([[t % 2] for t in range(40)], 16), capacity=14)
    # A set that is there from the start misses less than the best that starts empty.
    found = says("short", only([[t] for t in range(8)], 8), capacity=8)
    assert "neither the size nor the policy of a cache that starts empty matters" in found
    assert "misses 0 %, for it is there from the start; the best that starts empty misses 100 %" in found
    # Steady needs, and a profile of other ones.
    other = says("other", only([[0]] * 40, 8), capacity=1, profile=only([[5]] * 40, 8))
    assert "changes along" not in other and "this text needs others than the profile does" in other
    # Who misses least is said of all that can be built and start empty, all of them at a tie.
    trace = synthetic_trace(5, 2, 1, 30, seed=9)
    found = says("tie", trace, capacity=7, scope="global")
    built = [name for name in lab.cache.POLICIES if name not in ("static", "belady")]
    misses = {name: int(lab.cache.simulate(trace, name, 7, "global").misses.sum()) for name in built}
    share = min(misses.values()) / int(lab.cache.simulate(trace, "lru", 7, "global").requests.sum())
    titles = [name for name, count in misses.items() if count == min(misses.values())]
    least = re.search(r"Of all policies .* the fewest misses come with (.*?), ([\d.]+) %", found)
    assert least is not None and least[1].lower().split(" and ") == titles
    assert abs(float(least[2]) - 100 * share) <= 0.5
