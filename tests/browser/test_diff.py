"""Two traces compared in a real JupyterLab: the first divergence, the explanation, flips, keys, themes, states."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect
from ports import EXPERT, LAYER, recorded, swapped

import colibri_lab as colibri

CELLS = [
    "import colibri_lab as lab\na = lab.load_trace('a.safetensors')\nb = lab.load_trace('b.safetensors')",
    "view = lab.DiffView(a, b, model=lab.open(), names=('reference', 'port under test'))\nview",
]
FIRST = f"layers.{LAYER}.moe.experts.*.gate"
ABSENT = f"layers.{LAYER}.attn.q"


@pytest.fixture(scope="module")
def view(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The comparison of two recorded traces, run from a notebook by the menu."""
    recorded(colibri.open(), lab.root / "a.safetensors")
    recorded(colibri.open(swapped(tmp_path_factory.mktemp("port") / "m")), lab.root / "b.safetensors")
    lab.open("diff.ipynb", CELLS)
    lab.run_all()
    root = drawn(lab)
    lab.idle()
    return root


def drawn(lab: Any) -> Any:
    lab.page.wait_for_function("() => document.querySelector('.clb.diff')?.dataset.drawn > 0")
    return lab.page.locator(".clb.diff").first


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


def place(lab: Any, view: Any, path: str, token: int = 1) -> None:
    """Sets the selection from Python and waits until the view shows it."""
    lab.python(f"view.selection = dict(path={path!r}, token={token}, expert=None)")
    expect(view).to_have_attribute("data-place", f"{path} {token}")


def test_the_verdict_stands_first_and_names_the_place(lab: Any, view: Any) -> None:
    """Header, verdict, place, and the experts that differ, as Python has them."""
    expect(view.locator(".facts")).to_contain_text("A reference")
    expect(view.locator(".facts")).to_contain_text("same 59 tokens")
    expect(view.locator(".say")).to_contain_text("✗ DEFECT")
    expect(view.locator(".say")).to_contain_text(f"layer {LAYER}, gate projection of expert {EXPERT}")
    lab.python("import json; f = view.diff.first_divergence")
    first = json.loads(lab.python("print(json.dumps([f.path, f.token, f.expert, f.cause]))"))
    assert first[0] == FIRST and first[2] == EXPERT
    expect(view.locator(".say")).to_contain_text(first[3].rstrip("."))
    assert selection(lab) == {"path": FIRST, "layer": LAYER, "token": first[1], "expert": EXPERT}
    expect(view.locator(".say")).to_contain_text("Likely fault")
    expect(view.locator(".tried tr").first).to_contain_text("swapped")
    few = view.locator(".tried tr").count()
    view.get_by_role("button", name="with their reasons").click()
    every = int(lab.python("print(len(view.diff.diagnosis.attempts))"))
    expect(view.locator(".tried tr")).to_have_count(every)
    view.get_by_role("button", name="Show few").click()
    expect(view.locator(".tried tr")).to_have_count(few)
    bad = view.locator(".ex .differ")
    expect(bad).to_have_count(1)
    expect(view.locator(f".ex[data-expert='{EXPERT}']")).to_have_attribute("aria-pressed", "true")


def test_a_click_on_the_map_opens_the_tap(lab: Any, view: Any) -> None:
    """Its sentence, its values, its code; the click on the first divergence leads back there with its expert."""
    view.locator(".cell[data-path='layers.4.attn.q']").click()
    assert selection(lab)["path"] == "layers.4.attn.q"
    lab.python("row = view.diff.table[view.diff.table['path'] == 'layers.4.attn.q'][0]")
    row = json.loads(lab.python("print([*map(float, [row['max_rel'], row['token']])])"))
    shown = view.locator(".tapsay")
    expect(shown).to_contain_text(f"differs by up to {float(f'{row[0]:.3g}')}")
    expect(shown).to_contain_text(f"first at token {int(row[1])} ")
    expect(view.locator(".valuesremark")).to_have_text("layers.4.attn.q, 59 rows × 4×32")
    expect(view.locator(".foot code")).to_have_text(lab.python("print(view.code)").replace("'", '"'))
    view.locator(f".cell[data-path='{FIRST}']").click()
    where = selection(lab)
    assert (where["path"], where["expert"]) == (FIRST, EXPERT)
    expect(view.locator(".tapsay")).to_contain_text("B leaves A here")
    expect(view.locator(".valuesremark")).to_contain_text(f"layers.{LAYER}.moe.experts.{EXPERT}.gate, 8 rows")


def test_an_expert_is_chosen_by_its_count_and_let_go_again(lab: Any, view: Any) -> None:
    """The counts stay; the values are those of the expert, then of all."""
    place(lab, view, FIRST)
    view.locator(".ex[data-expert='0']").click()
    expect(view.locator(".valuesremark")).to_contain_text("experts.0.gate")
    assert selection(lab)["expert"] == 0
    expect(view.locator(".tapsay")).to_contain_text("0 differ beyond tolerance")
    view.locator(".ex[data-expert='0']").click()
    assert selection(lab)["expert"] is None


def test_flips_come_with_their_explanation(lab: Any, view: Any) -> None:
    """In the order of Python; a click selects layer and token, N goes to the next and round."""
    flips = json.loads(lab.python("print(json.dumps([[f.layer, f.token, f.cause] for f in view.diff.flips]))"))
    rows = view.locator(".fliplist tr[data-flip]:not(.below)")
    expect(rows).to_have_count(len(flips))
    for i, (layer, token, cause) in enumerate(flips):
        expect(rows.nth(i)).to_contain_text(cause)
        rows.nth(i).click()
        where = selection(lab)
        assert (where["path"], where["token"]) == (f"layers.{layer}.moe.expert_ids", token)
        expect(rows.nth(i)).to_have_class("on")
        expect(view.locator(".tapsay")).to_contain_text("to other experts")
    lab.page.keyboard.press("n")
    assert selection(lab)["token"] == flips[0][1]
    lab.page.keyboard.press("p")
    assert selection(lab)["token"] == flips[-1][1]


def test_the_prediction_follows_the_token(lab: Any, view: Any) -> None:
    """A click on a bar: KL and the likeliest next tokens of both runs as NumPy has them."""
    worst = int(lab.python("p = view.diff.prediction; print(p.positions[p.kl.argmax()])"))
    view.locator(f".kl .hit[data-token='{worst}']").click()
    assert selection(lab)["token"] == worst
    kl = float(lab.python("print(p.kl.max())"))
    expect(view.locator(".nextwords")).to_contain_text(f"KL {float(f'{kl:.3g}')} nats")
    lab.python(f"import numpy as np\nz = a['logits'][{worst}].astype(float)\nq = np.exp(z - z.max())")
    best = lab.python("print(f'{q.max() / q.sum():.2f}')")
    expect(view.locator(".next svg")).to_contain_text(best)


def test_keys_alone_are_enough(lab: Any, view: Any) -> None:
    """Arrows, Home, End, 0, N, Page keys, ?, Esc; and no key reaches the notebook."""
    place(lab, view, "layers.2.attn.q")
    cells = lab.page.locator(".jp-CodeCell").count()
    view.locator(".map").focus()
    steps = [
        ("ArrowRight", "layers.3.attn.q", 1), ("ArrowDown", "layers.3.attn.k", 1), ("ArrowUp", "layers.3.attn.q", 1),
        ("ArrowLeft", "layers.2.attn.q", 1), ("Home", "layers.0.attn.q", 1), ("ArrowLeft", "embed", 1),
        ("ArrowRight", "layers.0.attn.norm", 1), ("End", "layers.5.attn.norm", 1), ("ArrowRight", "norm", 1),
        ("ArrowDown", "logits", 1), ("PageDown", "logits", 2), ("PageUp", "logits", 1),
    ]  # fmt: skip
    for key, path, token in steps:
        lab.page.keyboard.press(key)
        where = selection(lab)
        assert (where["path"], where["token"]) == (path, token), key
    lab.page.keyboard.press("0")
    assert selection(lab)["expert"] == EXPERT
    lab.page.keyboard.press("?")
    expect(view.get_by_role("dialog", name="Keys")).to_be_visible()
    lab.page.keyboard.press("Escape")
    expect(view.get_by_role("dialog", name="Keys")).to_be_hidden()
    view.locator(".prediction").focus()
    before = selection(lab)["token"]
    lab.page.keyboard.press("ArrowRight")
    assert selection(lab)["token"] == before + 1
    for key in ("d", "d", "a", "b", "x", "m"):
        lab.page.keyboard.press(key)
    assert lab.page.locator(".jp-CodeCell").count() == cells


def test_a_click_after_a_cell_moved_the_view_waits_for_no_other_cell(lab: Any, view: Any) -> None:
    """A cell selects, the next one runs long; the click is heard meanwhile and its values come."""
    place(lab, view, "layers.1.attn.v")
    lab.page.evaluate(
        """() => { window.long = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel
                     .requestExecute({code: 'import time; time.sleep(8); print(time.time())'}).done;
                   window.ended = false; window.long.then(() => { window.ended = true; }); }"""
    )
    lab.page.wait_for_timeout(300)
    view.locator(".cell[data-path='layers.3.moe.scores']").click()
    expect(view.locator(".plots")).to_be_visible(timeout=6000)
    expect(view.locator(".valuesbody .scatter")).to_be_visible(timeout=6000)
    assert lab.page.evaluate("() => window.ended") is False
    lab.page.evaluate("() => window.long")
    lab.idle()


def test_copy_gives_code_that_runs(lab: Any, view: Any) -> None:
    """The last line sets this selection; Copy as code makes the view again from two runs."""
    place(lab, view, "layers.3.attn.k", 4)
    view.locator(".foot [data-act=copy]").click()
    expect(view.locator(".copied")).to_have_text("Copied.")
    line = lab.page.evaluate("navigator.clipboard.readText()")
    lab.python("view.selection = {'path': 'logits'}")
    lab.python(line)
    assert selection(lab)["path"] == "layers.3.attn.k"
    view.locator("[data-act=recipe]").click()
    expect(view.locator(".copied")).to_have_text("Copied.")
    recipe = lab.page.evaluate("navigator.clipboard.readText()")
    assert lab.python(f"kept = view\n{recipe}\nprint(view.selection['path']); view = kept") == "layers.3.attn.k"


def test_an_error_is_shown_in_place(lab: Any, view: Any) -> None:
    """A request that is not known: a sentence, the traceback on demand, and the picture stays."""
    lab.python("view._on_message(view, {'kind': 'dance'}, [])")
    expect(view.locator(".fault")).to_contain_text("dance")
    view.locator("[data-act=traceback]").click()
    expect(view.locator(".trace")).to_contain_text("ArgumentError")
    view.locator("[data-act=dismiss]").click()
    expect(view.locator(".fault")).to_be_hidden()


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_in_the_view(lab: Any, view: Any, dark: bool) -> None:
    """At the first divergence, at a flip, and with the list of keys open."""
    from axe_playwright_python.sync_playwright import Axe

    lab.theme(dark)
    for act in ("0", "n", "?"):
        view.locator(".map").focus()
        lab.page.keyboard.press(act)
        lab.page.wait_for_timeout(500)
        found = Axe().run(lab.page, context=".clb.diff")
        assert not found.response["violations"], json.dumps(found.response["violations"], indent=1)[:3000]
    lab.page.keyboard.press("Escape")
    lab.theme(False)


def test_pictures_for_people_to_look_at(lab: Any, view: Any) -> None:
    """Light, dark, and narrow: nothing scrolls sideways."""
    view.locator(".map").focus()
    lab.page.keyboard.press("0")
    lab.page.set_viewport_size({"width": 1600, "height": 1900})
    lab.page.evaluate("document.querySelector('.clb.diff').scrollIntoView()")
    view.locator(".map").blur()
    lab.idle()
    for dark in (False, True):
        lab.theme(dark)
        lab.shot(f"diff-{'dark' if dark else 'light'}", view)
    lab.theme(False)
    lab.page.set_viewport_size({"width": 1010, "height": 2400})
    lab.page.wait_for_timeout(500)
    lab.shot("diff-narrow", view)
    wide = lab.page.evaluate(
        "(() => { const r = document.querySelector('.clb.diff'); return r.scrollWidth - r.clientWidth; })()"
    )
    assert wide <= 0, "the view scrolls sideways"
    lab.page.set_viewport_size({"width": 1600, "height": 1400})


def test_after_a_restart_what_was_fetched_can_be_looked_at(lab: Any, view: Any) -> None:
    """The state is said; a tap seen before shows its values, another says that it needs Python."""
    place(lab, view, "layers.3.attn.k", 4)
    expect(view.locator(".scatter")).to_be_visible()
    lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    expect(view.locator(".live")).to_have_text("no kernel")
    expect(view.locator(".worktext")).to_contain_text("No kernel.")
    expect(view.get_by_role("button", name="Save HTML")).to_be_disabled()
    view.locator(".cell[data-path='layers.0.attn.v']").click()
    expect(view.locator(".valuesbody")).to_contain_text("need Python")
    expect(view.locator(".tapsay")).to_contain_text("the same bits")
    view.locator(".cell[data-path='layers.3.attn.k']").click()
    expect(view.locator(".scatter")).to_be_visible()
    lab.shot("diff-no-kernel", view)
    lab.page.wait_for_timeout(500)
    lab.errors[:] = [words for words in lab.errors if "debugger state" not in words]  # JupyterLab's own, of a restart
