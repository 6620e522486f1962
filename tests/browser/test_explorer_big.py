"""The explorer on a large trace: what it costs, and that every number shown is NumPy's."""

from __future__ import annotations

import json
import re
import statistics
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import expect

from colibri_lab import routing
from colibri_lab.testing import synthetic_trace

SHAPE = {"layers": 94, "experts": 128, "top_k": 8, "tokens": 2000, "seed": 5}
CELLS = [
    f"""import time
import colibri_lab as lab
from colibri_lab.testing import synthetic_trace
from colibri_lab.widgets.explorer import RoutingExplorer
trace = synthetic_trace(**{SHAPE}, hidden=1)
sent = 0
original = RoutingExplorer.send
def counted(self, content, buffers=None):
    global sent
    sent += len(str(content)) + sum(len(b) for b in buffers or [])
    original(self, content, buffers)
RoutingExplorer.send = counted""",
    "started = time.time()\nexplorer = lab.RoutingExplorer(trace)\nexplorer",
]
LIMITS = {"first picture": 2.0, "megabytes": 16.0, "layer change": 16.0}


@pytest.fixture(scope="module")
def big(lab: Any) -> Any:
    """The large trace, shown; notes when the first picture stood in the page (milliseconds since 1970)."""
    lab.open("big.ipynb", CELLS)
    lab.page.evaluate(
        """() => { const look = () => {
                    const canvas = document.querySelector('.clb canvas.top');
                    const body = document.querySelector('.clb .body');
                    if (canvas && Number(canvas.dataset.drawn) > 0 && !body.hidden)
                      requestAnimationFrame(() => { window.firstPicture = Date.now(); });
                    else requestAnimationFrame(look);
}
;
look();
}"""
    )
    lab.run_all()
    root = lab.drawn()
    lab.idle()
    return root


def everything_here(lab: Any) -> None:
    """Waits until the browser asks for nothing more."""
    lab.page.wait_for_function(
        "() => document.querySelector('.clb canvas.top').dataset.missing === '0'", timeout=120_000
    )


def test_the_first_picture_and_what_is_sent(lab: Any, big: Any) -> None:
    """Prints both; the bytes are exact and bounded, the time is the machine's."""
    lab.page.wait_for_function("() => window.firstPicture")
    seconds = lab.page.evaluate("window.firstPicture") / 1000 - float(lab.python("print(started)"))
    everything_here(lab)
    megabytes = int(lab.python("print(sent)")) / 1e6
    print(f"\nfirst picture {seconds:.2f} s (limit {LIMITS['first picture']} s), sent in all {megabytes:.1f} MB")
    lab.shot("big-light")
    assert megabytes <= LIMITS["megabytes"]


def test_a_layer_change_needs_no_kernel_and_little_time(lab: Any, big: Any) -> None:
    """Median of 100 changes by the slider, measured in the page around the handler and to the next frame; printed."""
    everything_here(lab)
    before = int(lab.python("print(sent)"))
    times = lab.page.evaluate(
        """async () => {
             const slider = document.querySelector('.clb input.layer');
             const result = {handler: [], frame: []};
             const frame = () => new Promise(requestAnimationFrame);
             for (let i = 0; i < 100; i++) {
               await frame();
               const start = performance.now();
               slider.value = (i * 37 + 1) % 94;
               slider.dispatchEvent(new Event('input', {bubbles: true}));
               result.handler.push(performance.now() - start);
               await frame();
               result.frame.push(performance.now() - start);
             }
             return result;
           }"""
    )
    middle = {name: statistics.median(values) for name, values in times.items()}
    most = {name: max(values) for name, values in times.items()}
    print(
        f"\nlayer change: median {middle['handler']:.1f} ms in the handler (limit {LIMITS['layer change']} ms), "
        f"{middle['frame']:.1f} ms to the next frame; worst {most['handler']:.1f} and {most['frame']:.1f} ms"
    )
    lab.idle()
    assert int(lab.python("print(sent)")) == before, "a layer change asked the kernel for data"


def test_the_cards_show_what_numpy_computes(lab: Any, big: Any) -> None:
    """Twenty random selections: experts, gates, logits, margin, entropy, load, share, strongest gates and partners."""
    trace = synthetic_trace(**SHAPE, hidden=1)
    load, entropy = routing.load(trace), routing.entropy(trace, normalised=True)
    together = routing.coactivation(trace)
    rng = np.random.default_rng(7)
    for _ in range(20):
        layer, token = int(rng.integers(94)), int(rng.integers(2000))
        ids, gates = trace[f"layers.{layer}.moe.expert_ids"], trace[f"layers.{layer}.moe.gates"]
        logits = trace[f"layers.{layer}.moe.router_logits"]
        expert = int(ids[token, rng.integers(8)])
        lab.python(f"explorer.selection = dict(layer={layer}, token={token}, expert={expert})")
        expect(big.locator("code.code").last).to_have_text(
            f"explorer.selection = dict(layer={layer}, token={token}, expert={expert})"
        )
        expect(big.locator(".tcard")).to_contain_text("chosen above")
        card = json.loads(lab.page.evaluate("() => JSON.stringify(window.readCards())"))
        order = [*ids[token], *[e for e in np.argsort(-logits[token], kind="stable") if e not in ids[token]][:3]]
        assert card["experts"] == [int(e) for e in order]
        assert card["logits"] == [two(logits[token, e]) for e in order]
        assert card["gates"] == [gate(g) for g in gates[token]]
        margin = np.sort(logits[token])[-8] - np.sort(logits[token])[-9]
        assert card["margin"] == two(margin)
        assert f"router entropy {two(entropy[layer, token])} of 1" in card["say"]
        assert card["came"] == f"{load[layer, expert]:,} of 2,000 tokens come here"
        rows, slots = np.nonzero(ids == expert)
        strong = np.lexsort((rows, -gates[rows, slots]))[:5]
        assert card["strongest"] == [f"{gate(gates[rows[i], slots[i]])} #{rows[i]}" for i in strong]
        pairs = np.where(np.arange(128) == expert, -1, together[layer, expert])
        best = np.lexsort((np.arange(128), -pairs))[:5]
        assert card["partners"] == [[int(e), f"{rounded(100 * pairs[e], 0)} %"] for e in best]


def rounded(value: float, digits: int) -> str:
    """As JavaScript rounds: the exact value, ties away from zero."""
    text = str(Decimal(float(value)).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_HALF_UP))
    return text.removeprefix("-") if float(text) == 0 else text


def two(value: float) -> str:
    """A float32 as the view writes it: two digits, U+2212 for minus."""
    return rounded(np.float32(value), 2).replace("-", "−")


def gate(value: float) -> str:
    return "<0.01" if 0 < value < 0.005 else two(value)


@pytest.fixture(autouse=True)
def reader(lab: Any, big: Any) -> None:
    """A function in the page that reads the cards as a person would."""
    lab.page.evaluate(
        """() => { window.readCards = () => {
             const view = document.querySelector('.clb');
             const all = (selector, root = view) => Array.from(root.querySelectorAll(selector));
             const rows = all('.lb tbody tr[data-expert]');
             const cell = (row, i) => row.children[i].innerText.trim();
             const [strongest] = all('.ecard .places');
             return {
               experts: rows.map((row) => Number(cell(row, 0))),
               logits: rows.map((row) => cell(row, 2)),
               gates: rows.map((row) => cell(row, 3)).filter((text) => text !== '–'),
               margin: view.querySelector('.cut').innerText.match(/margin (\\S+)/)[1],
               say: view.querySelector('.say').innerText,
               came: view.querySelector('.ecard .big').innerText.replace(/\\s+/g, ' ').trim(),
               strongest: all('.place', strongest).map(
                 (p) => p.innerText.replace(p.querySelector('.tt').innerText, '').trim()),
               partners: all('.hb tbody tr').map((row) => [Number(cell(row, 0)), cell(row, 2)]),
             }; }; }"""
    )


def test_the_frame_of_the_overview_can_be_dragged(lab: Any, big: Any) -> None:
    """Dragging moves the token map without moving the selection; a selection outside brings the map along."""
    lab.python("explorer.selection = dict(layer=40, token=100)")
    expect(big.locator("code.code").last).to_contain_text("layer=40, token=100")
    canvas = big.locator("canvas.top")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    left = 34 + 94 * max(2, int(box["width"] * 0.24 / 94)) + 34
    lab.page.mouse.move(box["x"] + left + 40, box["y"] + 22)
    lab.page.mouse.down()
    lab.page.mouse.move(box["x"] + left + 300, box["y"] + 22, steps=8)
    lab.page.mouse.up()
    start = lab.page.evaluate("() => Number(document.querySelector('.clb canvas.top').dataset.from)")
    assert start > 300
    assert "token=100" in big.locator("code.code").last.inner_text()
    lab.shot("big-dragged")
    lab.python("explorer.selection = dict(layer=40, token=1500)")
    expect(big.locator("canvas.top")).to_have_attribute("data-from", re.compile(r"1[34]\d\d"))


def test_p_pins_a_colour(lab: Any, big: Any) -> None:
    """A grey expert gets one of the eight colours of its layer, and gives it back."""
    lab.python("import numpy as np; quiet = int(np.argsort(lab.routing.load(trace)[40])[3])")
    lab.python("explorer.selection = dict(layer=40, token=1500, expert=quiet)")
    quiet = lab.python("print(quiet)")
    expect(big.locator("code.code").last).to_contain_text(f"expert={quiet})")
    legend = big.locator(".legend .chip")
    assert quiet not in legend.all_inner_texts()
    big.locator(".tokens").focus()
    lab.page.keyboard.press("p")
    expect(big.locator(".legend")).to_contain_text("busiest or pinned")
    assert quiet in legend.all_inner_texts()
    lab.page.keyboard.press("p")
    assert quiet not in legend.all_inner_texts()


def test_dark_and_other_colourings_for_people_to_look_at(lab: Any, big: Any) -> None:
    """Pictures only, and still no error in the console."""
    lab.python("explorer.selection = dict(layer=17, token=1200)")
    lab.theme(True)
    lab.shot("big-dark")
    lab.python("explorer.colour_by = 'entropy'")
    lab.page.wait_for_timeout(300)
    lab.shot("big-dark-entropy")
    lab.theme(False)
    assert [e for e in lab.errors if "favicon" not in e] == []


def test_without_a_kernel_layers_still_change_and_unfetched_logits_are_said(lab: Any, big: Any) -> None:
    """All layers are in the browser; of a token never selected before the chosen experts are shown, with the reason."""
    lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    expect(big.locator(".live")).to_have_text("no kernel")
    big.locator(".tok[aria-selected=false]").nth(3).click()
    expect(big.locator(".tcard")).to_contain_text("were not fetched before")
    expect(big.locator(".tcard tbody tr[data-expert]")).to_have_count(8)
    big.get_by_role("slider", name="Layer").fill("33")
    expect(big.locator("code.code").last).to_contain_text("layer=33")
    expect(big.locator(".ecard")).to_contain_text("of 2,000 tokens come here")
    lab.shot("big-no-kernel")
