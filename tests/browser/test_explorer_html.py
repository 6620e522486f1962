"""The saved page, opened from disk with the network off: the same view, with no Python behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import expect

from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace
from colibri_lab.widgets.explorer import RoutingExplorer

HERE = Path(__file__).parent
# Keeps, per canvas, the words drawn since it was cleared, each with its box [left, top, right, bottom] in CSS pixels.
WORDS = """
const { fillText, clearRect } = CanvasRenderingContext2D.prototype;
CanvasRenderingContext2D.prototype.clearRect = function (...box) {
  this.canvas.words = null;
  clearRect.apply(this, box);
};
CanvasRenderingContext2D.prototype.fillText = function (words, x, y) {
  fillText.call(this, words, x, y);
  const size = `${this.canvas.width}x${this.canvas.height}`;
  if (!this.canvas.words || this.canvas.ofSize !== size) Object.assign(this.canvas, { words: {}, ofSize: size });
  const wide = this.measureText(words).width;
  const left = x - (this.textAlign === "center" ? wide / 2 : this.textAlign === "right" ? wide : 0);
  const m = this.getTransform().scale(1 / devicePixelRatio);
  const ends = [[left, y - 8], [left + wide, y]].map(([a, b]) => m.transformPoint({ x: a, y: b }));
  const box = [Math.min, Math.max].flatMap((pick) => [pick(ends[0].x, ends[1].x), pick(ends[0].y, ends[1].y)]);
  this.canvas.words[`${words} at ${box}`] = box;
};
"""
Show = Callable[..., Any]


@pytest.fixture
def show(chromium: Any, tmp_path: Path) -> Iterator[Show]:
    """Writes a trace's page, opens it offline and gives the page; afterwards: no request but the file, no error."""
    context = chromium.new_context(viewport={"width": 1200, "height": 1000}, offline=True)
    context.add_init_script(WORDS)
    page = context.new_page()
    requests: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)

    def opened(trace: Trace, name: str, dark: bool = False, width: int = 1200, **selection: int) -> Any:
        explorer = RoutingExplorer(trace)
        if selection:
            explorer.selection = selection
        path = explorer.to_html(tmp_path / f"{name}.html")
        page.emulate_media(color_scheme="dark" if dark else "light")
        page.set_viewport_size({"width": width, "height": 1000})
        requests.clear()
        page.goto(path.as_uri())
        page.wait_for_function("() => Number(document.querySelector('.clb canvas.top')?.dataset.drawn) > 0")
        page.wait_for_timeout(700)
        (HERE / "screenshots").mkdir(exist_ok=True)
        page.screenshot(path=HERE / "screenshots" / f"page-{name}.png", full_page=True)
        assert requests == [path.as_uri()]
        return page

    yield opened
    context.close()
    assert errors == []
    assert len(requests) <= 1, "the page asked for something"


def test_the_page_works_offline(show: Show) -> None:
    """Click, keys, slider and colouring work; running is off with its reason."""
    trace = synthetic_trace(6, 8, 2, 40, seed=0)
    page = show(trace, "small", layer=3, token=35)
    expect(page.locator(".live")).to_have_text("saved page")
    expect(page.get_by_role("button", name="Run")).to_be_disabled()
    prompt = page.get_by_role("textbox", name="Prompt")
    expect(prompt).to_have_attribute("placeholder", "(a saved page; running needs Python)")
    page.locator(".tok[data-t='12']").click()
    page.keyboard.press("ArrowDown")
    first = int(trace["layers.4.moe.expert_ids"][12, 0])
    code = page.locator("code.code").last
    expect(code).to_have_text(f"explorer.selection = dict(layer=4, token=12, expert={first})")
    page.keyboard.press("c")
    expect(page.locator("[data-by=entropy]")).to_have_attribute("aria-pressed", "true")
    page.get_by_role("slider", name="Layer").fill("1")
    expect(code).to_contain_text("layer=1, token=12")


def test_a_larger_page_holds_every_logit(show: Show) -> None:
    """48 layers × 128 experts × 200 tokens: any token's card is complete without Python."""
    trace = synthetic_trace(48, 128, 8, 200, seed=1)
    page = show(trace, "large", dark=True, layer=17, token=150)
    page.locator(".tok[data-t='145']").click()
    logits = np.sort(trace["layers.17.moe.router_logits"][145])[::-1]
    expect(page.locator(".tcard .cut")).to_contain_text(f"margin {logits[7] - logits[8]:.2f}")
    expect(page.locator(".tcard tbody tr[data-expert]")).to_have_count(11)


def test_G1_nan_and_infinities_are_drawn_and_counted(show: Show) -> None:
    """Marks in the text and in the key, with counts; the sentence says that there is no ranking; the card has marks."""
    trace = synthetic_trace(6, 8, 2, 40, seed=3)
    arrays = {path: np.array(trace[path]) for path in trace}
    logits, scores = arrays["layers.3.moe.router_logits"], arrays["layers.3.moe.scores"]
    logits[10] = np.nan
    logits[11, 2], logits[11, 5] = np.inf, -np.inf
    scores[10:12] = np.nan
    logits[12, int(np.argmin(logits[12]))] = -np.inf
    odd = Trace(arrays, ids=trace.ids, texts=trace.texts, meta=trace.meta)
    page = show(odd, "nan", layer=3, token=11)
    expect(page.locator(".legend")).to_contain_text("NaN (1)")
    expect(page.locator(".legend")).to_contain_text("+Inf (1)")
    expect(page.locator(".legend")).to_contain_text("−Inf (2)")
    expect(page.locator(".say")).to_contain_text("+Inf, −Inf in its router logits. Such a token has no ranking")
    expect(page.locator(".tcard")).to_contain_text("no ranking, ids here mean nothing")
    values = page.locator(".tcard tbody tr[data-expert] td:nth-child(3)").all_inner_texts()
    assert values[0] == "+Inf" and values[-1] == "−Inf"
    assert page.locator(".tok[data-t='10'] [data-mark=nan]").count() == 1
    page.locator(".tok[data-t='12']").click()
    expect(page.locator(".say")).to_contain_text("Some of its logits are −Inf: switched off.")


@pytest.mark.parametrize(
    ("shape", "name", "width"),
    [
        ((6, 8, 2, 1), "one-token", 1200),
        ((12, 32, 4, 100), "medium", 1200),
        ((6, 8, 2, 40), "narrow", 760),
        ((2, 300, 4, 30), "experts-300", 1200),
    ],
)
def test_other_sizes_draw_without_errors(show: Show, shape: tuple[int, int, int, int], name: str, width: int) -> None:
    """One token, many experts, a narrow page: nothing overlaps sideways, nothing fails."""
    page = show(synthetic_trace(*shape, seed=4), name, width=width)
    expect(page.locator(".say")).to_contain_text("sends token")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize("shape", [(6, 8, 2, 40), (2, 8, 2, 9), (12, 32, 4, 100), (48, 128, 8, 300)], ids=str)
@pytest.mark.parametrize("width", [1200, 900, 760, 560, 420])
def test_no_words_are_drawn_over_others(show: Show, shape: tuple[int, int, int, int], width: int) -> None:
    """At every width the maps' words stand apart, and no part of the page is wider than its place."""
    page = show(synthetic_trace(*shape, seed=4), f"{shape[0]}x{shape[1]}-{width}", dark=width == 420, width=width)
    boxes: dict[str, list[float]] = {}
    for canvas in page.locator(".maps canvas:not(.top)").all():
        boxes |= canvas.evaluate("(canvas) => canvas.words")
    across = [
        (one, other)
        for one, a in boxes.items()
        for other, b in boxes.items()
        if one < other and a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
    ]
    assert across == []
    room = page.locator(".maps").bounding_box()["width"]
    assert [words for words, box in boxes.items() if box[0] < -0.5 or box[2] > room + 0.5] == []
    wide = "(parts) => parts.filter((p) => p.scrollWidth > p.clientWidth + 1).map((p) => p.className + p.textContent)"
    assert (
        page.locator(".clb, .clb .head, .clb .promptrow, .clb .tcard, .clb .ex, .clb .ex > div").evaluate_all(wide)
        == []
    )


def test_logit_bars_start_at_zero(show: Show) -> None:
    """Each bar reaches from one zero line, to the left below zero, as long as its value; the largest fills the rest."""
    trace = synthetic_trace(6, 8, 2, 40, seed=0)
    page = show(trace, "bars", layer=3, token=35)
    logits = trace["layers.3.moe.router_logits"][35]
    assert logits.min() < 0 < logits.max()
    for row in page.locator(".tcard tbody tr[data-expert]").all():
        value = float(logits[int(row.get_attribute("data-expert"))])
        axis, bar = row.locator(".axis").bounding_box(), row.locator(".bar").bounding_box()
        pixels = axis["width"] / float(logits.max() - logits.min())
        zero = axis["x"] - float(logits.min()) * pixels
        ends = sorted([zero, zero + value * pixels])
        assert abs(bar["x"] - ends[0]) < 2.5 and abs(bar["x"] + bar["width"] - ends[1]) < 2.5


def test_signs_without_a_look_have_names_and_legends_have_ends(show: Show) -> None:
    """A joiner or variation selector alone is named, an emoji is left whole; both ramps carry their end numbers."""
    trace = synthetic_trace(6, 8, 2, 5, seed=0)
    arrays = {path: np.array(trace[path]) for path in trace}
    texts = ["\u200d", "\ufe0f", "\U000e0100", "\U0001f469\u200d\U0001f4bb", "a"]
    page = show(Trace(arrays, ids=trace.ids, texts=texts, meta=trace.meta), "signs", layer=3, token=4)
    assert page.locator(".tx").all_inner_texts() == ["ZWJ", "VS16", "VS17", texts[3], "a"]
    for colour, ends in (("entropy", ["0", "1"]), ("margin", ["≥", "2", "0"])):
        page.locator(f"[data-by={colour}]").click()
        assert page.locator(".ends").inner_text().split() == ends


def test_an_empty_trace_says_so(show: Show) -> None:
    """No picture, one sentence."""
    page = show(synthetic_trace(6, 8, 2, 0), "empty")
    expect(page.locator(".empty")).to_have_text("This trace holds no tokens.")


def test_a_trace_of_ids_alone_is_shown_for_what_it_holds(show: Show) -> None:
    """Without logits, scores and gates there are experts and loads, and words in place of the rest."""
    trace = synthetic_trace(6, 8, 2, 40, seed=0)
    ids = {path: trace[path] for path in trace if path.endswith("expert_ids")}
    page = show(Trace(ids, ids=trace.ids, texts=trace.texts, meta=trace.meta), "ids-alone", layer=2, token=5)
    expect(page.locator(".say")).to_contain_text("Router logits were not recorded")
    expect(page.locator(".tcard")).to_contain_text('capture="routing" keeps them')
