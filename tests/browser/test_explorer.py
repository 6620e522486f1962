"""The routing explorer in a real JupyterLab: mouse, keyboard, running, themes, reload, restart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

TEXT = "The fox counts the eggs in her nest. She writes a function:\\ndef total(eggs):\\n    n = 0\\n    return n\\n"
CELLS = [
    f"import colibri_lab as lab\nsession = lab.open().session()\nsession.feed('{TEXT}', progress=False);",
    "explorer = lab.RoutingExplorer(session)\nexplorer",
]

SLOW = """
import time
fast = type(session).generate
def slow(n, **options):
    for token in fast(session, 400, stop_ids=(), **options):
        time.sleep(0.05)
        yield token
session.reset(); session.feed('Once upon a time', progress=False)
session.generate = slow"""


@pytest.fixture(scope="module")
def view(lab: Any) -> Any:
    """The explorer of a short prompt, run from a notebook by the menu."""
    lab.open("explorer.ipynb", CELLS)
    lab.run_all()
    root = lab.drawn()
    lab.idle()
    return root


@pytest.fixture(autouse=True)
def no_errors(lab: Any) -> Iterator[None]:
    """No test may leave an error in the browser's console."""
    lab.errors.clear()
    yield
    assert lab.errors == []


def selection(lab: Any) -> dict[str, int]:
    """explorer.selection as Python has it, once both sides say the same."""
    shown = lab.page.locator(".clb .code").last
    for _ in range(100):
        where, code = lab.python("import json; print(json.dumps(explorer.selection)); print(explorer.code)").split("\n")
        if shown.text_content() == code:
            break
        lab.page.wait_for_timeout(50)
    return json.loads(where)


def place(lab: Any, layer: int, token: int, expert: int | None = None) -> None:
    """Sets the selection from Python and waits until the view shows it."""
    lab.python(f"explorer.selection = dict(layer={layer}, token={token}, expert={expert})")
    expect(lab.page.locator(".clb .code").last).to_contain_text(f"layer={layer}, token={token}")


def tokens(view: Any) -> Any:
    return view.get_by_role("listbox", name="Tokens")


def test_running_all_cells_draws_the_view(lab: Any, view: Any) -> None:
    """Title, sentence, tokens, both cards; Python and the view agree on the selection."""
    expect(view.locator(".facts")).to_have_text(re.compile(r"bundled model · 6 layers × 8 experts, top-2 · \d+ tokens"))
    expect(view.locator(".say")).to_contain_text("sends token")
    expect(view.locator(".say")).to_contain_text(re.compile(r"left out is [\d.]+ behind in logits"))
    where = selection(lab)
    expect(view.locator("code.code").last).to_have_text(
        f"explorer.selection = dict(layer={where['layer']}, token={where['token']}, expert={where['expert']})"
    )
    lab.shot("explorer-light")


def test_a_click_on_a_token_selects_it_in_python(lab: Any, view: Any) -> None:
    """With its first choice as expert."""
    view.locator(".tok[data-t='5']").click()
    where = selection(lab)
    first = int(lab.python("print(explorer.trace[f'layers.{explorer.selection[\"layer\"]}.moe.expert_ids'][5, 0])"))
    assert (where["token"], where["expert"]) == (5, first)


def test_a_click_on_the_maps_selects_token_layer_and_expert(lab: Any, view: Any) -> None:
    """A cell of the token map gives token and expert; a cell of the load map gives layer and expert."""
    place(lab, 3, 7)
    canvas = view.locator("canvas.top")
    canvas.click(position={"x": 34 + 34 * 1 + 17, "y": 26 + 22 * 6 + 11})
    where = selection(lab)
    assert (where["layer"], where["token"], where["expert"]) == (1, 7, 6)
    canvas.click(position={"x": 34 + 34 * 6 + 34 + 4, "y": 26 + 22 * 2 + 11})
    where = selection(lab)
    assert (where["layer"], where["token"], where["expert"]) == (1, 0, 2)


def test_keys_move_the_selection(lab: Any, view: Any) -> None:
    """Arrows, Home, End, PageUp, PageDown, digits, X, Enter: each does what the list of keys says."""
    place(lab, 3, 7)
    tokens(view).focus()
    last = int(lab.python("print(len(explorer.trace.ids) - 1)"))
    steps = [
        ("ArrowRight", 3, 8), ("ArrowLeft", 3, 7), ("ArrowDown", 4, 7), ("ArrowUp", 3, 7), ("PageDown", 3, 17),
        ("PageUp", 3, 7), ("End", 3, last), ("ArrowRight", 3, last), ("Home", 3, 0), ("ArrowLeft", 3, 0),
    ]  # fmt: skip
    for key, layer, token in steps:
        lab.page.keyboard.press(key)
        where = selection(lab)
        assert (where["layer"], where["token"]) == (layer, token), key
    lab.page.keyboard.press("6")
    assert selection(lab)["expert"] == 6
    for key in ("x", "2", "Enter"):
        lab.page.keyboard.press(key)
    assert selection(lab)["expert"] == 2
    lab.page.keyboard.press("Enter")
    where = selection(lab)
    gates = "t['layers.3.moe.gates'][t['layers.3.moe.expert_ids'] == 2]"
    rows = "__import__('numpy').argwhere(t['layers.3.moe.expert_ids'] == 2)[:, 0]"
    assert where["token"] == int(lab.python(f"t = explorer.trace; print({rows}[{gates}.argmax()])"))
    assert where["expert"] == 2


def test_c_changes_the_colouring_and_python_knows(lab: Any, view: Any) -> None:
    """expert → entropy → margin → expert; setting it in Python presses the button."""
    tokens(view).focus()
    for colour in ("entropy", "margin", "expert"):
        lab.page.keyboard.press("c")
        expect(view.locator("[data-by][aria-pressed=true]")).to_have_text(colour)
        lab.idle()
        assert lab.python("print(explorer.colour_by)") == colour
        lab.shot(f"explorer-by-{colour}")
    lab.python("explorer.colour_by = 'margin'")
    expect(view.locator("[data-by][aria-pressed=true]")).to_have_text("margin")
    lab.python("explorer.colour_by = 'expert'")


def test_notebook_commands_do_not_fire_inside_the_view(lab: Any, view: Any) -> None:
    """`d d`, `x`, `a`, `b`, `m` with the view focused delete, cut, add and change no cell."""
    count = "document.querySelectorAll('.jp-Notebook .jp-Cell').length"
    before = lab.page.evaluate(count)
    for target in (tokens(view), view.locator("canvas.top"), view.locator(".path button").first):
        target.focus()
        for key in ("d", "d", "a", "b", "m", "z", "x", "Escape"):
            lab.page.keyboard.press(key)
        assert lab.page.evaluate(count) == before
    assert lab.page.locator(".jp-CodeCell").count() == before


def test_m_finds_the_next_near_tie_and_question_mark_lists_the_keys(lab: Any, view: Any) -> None:
    """M lands where Python finds a margin under one bfloat16 step, or says that there is none; Esc closes the list."""
    place(lab, 0, 0)
    tokens(view).focus()
    lab.page.keyboard.press("m")
    code = """
import numpy as np
t = explorer.trace; found = None
for l in t.moe_layers:
    z = -np.sort(-t[f'layers.{l}.moe.router_logits'], axis=1)
    size = np.maximum(abs(z[:, 1]), abs(z[:, 2]))
    tie = (z[:, 1] - z[:, 2]) < 2.0 ** (np.floor(np.log2(size)) - 7)
    for token in np.flatnonzero(tie):
        if found is None and (l, token) > (0, 0): found = (l, int(token))
print(found)"""
    found = lab.python(code)
    where = selection(lab)
    if found == "None":
        expect(view.locator(".said")).to_contain_text("No near-tie")
    else:
        assert f"({where['layer']}, {where['token']})" == found
    tokens(view).focus()
    lab.page.keyboard.press("?")
    expect(view.get_by_role("dialog", name="Keys")).to_be_visible()
    lab.shot("explorer-keys")
    lab.page.keyboard.press("Escape")
    expect(view.get_by_role("dialog", name="Keys")).to_be_hidden()


def test_hovering_previews_without_selecting(lab: Any, view: Any) -> None:
    """The sentence speaks of the token under the mouse; the selection stays; leaving brings it back."""
    place(lab, 2, 4)
    view.locator(".tok[data-t='9']").hover()
    expect(view.locator(".say")).to_contain_text("token 9")
    assert selection(lab)["token"] == 4
    view.locator(".head").hover()
    expect(view.locator(".say")).to_contain_text("token 4")


def test_dragging_the_layer_slider_selects_the_layer(lab: Any, view: Any) -> None:
    """By mouse, from one end to the other; the maps' title follows."""
    place(lab, 0, 3)
    slider = view.get_by_role("slider", name="Layer")
    box = slider.bounding_box()
    lab.page.mouse.move(box["x"] + 8, box["y"] + box["height"] / 2)
    lab.page.mouse.down()
    lab.page.mouse.move(box["x"] + box["width"] - 8, box["y"] + box["height"] / 2, steps=12)
    lab.page.mouse.up()
    assert selection(lab)["layer"] == 5
    expect(view.locator(".layername")).to_have_text("5")


def test_a_prompt_is_typed_run_and_continued(lab: Any, view: Any) -> None:
    """Shift+Enter runs the box; Generate adds up to 32 tokens; Python's session holds the same text."""
    prompt = view.get_by_role("textbox", name="Prompt")
    prompt.fill("Two foxes and an egg.")
    prompt.press("Shift+Enter")
    count = int(lab.python("print(len(lab.open().tokenizer.encode('Two foxes and an egg.')))"))
    expect(view.locator(".tok")).to_have_count(count)
    expect(view.get_by_role("button", name="Run")).to_be_enabled()
    lab.idle()
    assert lab.python("print(''.join(session.texts))").endswith("Two foxes and an egg.")
    before = int(lab.python("print(len(session.ids))"))
    view.get_by_role("button", name="Generate 32").click()
    lab.page.wait_for_function("(n) => document.querySelectorAll('.clb .tok').length > n", arg=before)
    expect(view.get_by_role("button", name="Generate 32")).to_be_enabled()
    lab.idle()
    after = int(lab.python("print(len(session.ids))"))
    assert before < after <= before + 32
    expect(view.locator(".tok")).to_have_count(after)
    expect(prompt).to_have_value("Two foxes and an egg.")
    lab.shot("explorer-generated")


def test_generate_runs_a_changed_prompt_first(lab: Any, view: Any) -> None:
    """What was typed is what is continued, and it stays in the box."""
    prompt = view.get_by_role("textbox", name="Prompt")
    prompt.fill("An egg and a fox.")
    view.get_by_role("button", name="Generate 32").click()
    expect(view.locator(".tx").nth(1)).to_have_text("A")
    count = int(lab.python("print(len(lab.open().tokenizer.encode('An egg and a fox.')))"))
    lab.page.wait_for_function("(n) => document.querySelectorAll('.clb .tok').length > n", arg=count)
    expect(view.get_by_role("button", name="Generate 32")).to_be_enabled()
    assert "An egg and a fox." in lab.python("print(''.join(session.texts))")
    assert int(lab.python("print(len(session.ids))")) > count
    expect(prompt).to_have_value("An egg and a fox.")


def test_an_empty_prompt_is_asked_for_in_a_few_words(lab: Any, view: Any) -> None:
    """Neither an error nor a run; the cursor stands in the box."""
    prompt = view.get_by_role("textbox", name="Prompt")
    prompt.fill("")
    view.get_by_role("button", name="Run").click()
    expect(view.locator(".said")).to_have_text("Type a prompt first.")
    expect(prompt).to_be_focused()
    expect(view.get_by_role("alert")).to_be_hidden()


def test_a_prompt_of_two_lines_covers_nothing(lab: Any, view: Any) -> None:
    """The box grows up to four lines and pushes the next row down."""
    prompt = view.get_by_role("textbox", name="Prompt")
    low = view.locator(".ctl")
    for text in ("one line", "two\nlines", "\n".join("many lines")):
        prompt.fill(text)
        box, below = prompt.bounding_box(), low.bounding_box()
        assert box["y"] + box["height"] <= below["y"]
        assert box["height"] <= 82
    prompt.fill("def total(eggs):\n    return n")
    lab.shot("explorer-two-lines")


def test_a_part_of_a_character_is_explained(lab: Any, view: Any) -> None:
    """Hovering over an id in angle brackets tells which bytes it stands for."""
    prompt = view.get_by_role("textbox", name="Prompt")
    prompt.fill("1 — 2")
    prompt.press("Shift+Enter")
    part = view.locator(".tok", has_text="‹").first
    part.hover()
    expect(view.locator(".say")).to_contain_text("(a part of a character: byte E2)")
    lab.shot("explorer-part")


def test_p_with_eight_experts_says_why_nothing_changes(lab: Any, view: Any) -> None:
    """Every expert has a colour already."""
    tokens(view).focus()
    lab.page.keyboard.press("p")
    expect(view.locator(".said")).to_have_text("Nothing to pin: each of the 8 experts has a colour of its own.")


def test_stop_ends_a_long_generation(lab: Any, view: Any) -> None:
    """Slowed to 50 ms a token, 400 tokens end within a second or two of Stop, and what was made is kept."""
    lab.python(SLOW)
    view.get_by_role("button", name="Generate 32").click()
    stop = view.get_by_role("button", name="Stop")
    expect(stop).to_be_enabled()
    expect(view.locator(".work")).to_contain_text("of 32 tokens", timeout=20_000)
    lab.shot("explorer-working")
    stop.click()
    expect(view.locator(".work")).to_have_text(re.compile(r"Stopped\. \d+ new tokens are kept\."))
    lab.shot("explorer-stopped")
    expect(stop).to_be_disabled()
    lab.python("del session.generate")
    assert int(lab.python("print(len(session.ids))")) < 300
    expect(view.locator(".tok")).to_have_count(int(lab.python("print(len(session.ids))")))


def test_stop_ends_a_generation_that_a_cell_runs(lab: Any, view: Any) -> None:
    """The kernel hears no message then, so Stop interrupts it; what was made is kept, shown, and no error."""
    lab.python(SLOW)
    before = int(lab.python("print(len(session.ids))"))
    lab.page.evaluate(
        """() => { const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
                   kernel.requestExecute({code: 'explorer.generate(400)', store_history: false}); }"""
    )
    expect(view.locator(".work")).to_contain_text("of 400 tokens")
    view.get_by_role("button", name="Stop").click()
    expect(view.locator(".work")).to_have_text(re.compile(r"Stopped\. \d+ new tokens are kept\."))
    expect(view.get_by_role("alert")).to_be_hidden()
    lab.idle()
    after = int(lab.python("del session.generate; print(len(session.ids))"))
    assert before < after < before + 300
    expect(view.locator(".tok")).to_have_count(after)
    lab.shot("explorer-cell-stopped")


def test_work_that_the_view_cannot_stop_says_what_can(lab: Any, view: Any) -> None:
    """Where the host lends no interrupt, a cell's work names the kernel's own, and Stop is off."""
    kernel = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"
    stop = view.get_by_role("button", name="Stop")
    lab.page.evaluate(f"() => {{ {kernel}.interrupt = undefined; }}")
    lab.python("explorer._in_cell = True; explorer._status = {'state': 'working', 'text': 'Generating'}")
    expect(view.locator(".work")).to_contain_text("stop it with the kernel’s own interrupt (■, or I I)")
    expect(stop).to_be_disabled()
    lab.page.evaluate(f"() => {{ delete {kernel}.interrupt; }}")
    lab.python("explorer._status = {'state': 'working', 'text': 'Generating 2'}")
    expect(view.locator(".work")).to_contain_text("Stop ends it within a second.")
    expect(stop).to_be_enabled()
    lab.python("explorer._in_cell = False; explorer._status = {'state': 'idle'}")


def test_a_busy_session_is_said_and_waited_for(lab: Any, view: Any) -> None:
    """While another thread is inside the session the view says so; then the run goes on."""
    lab.python("lock = session._lock; lock.acquire();")
    prompt = view.get_by_role("textbox", name="Prompt")
    prompt.fill("An egg.")
    view.get_by_role("button", name="Run").click()
    expect(view.locator(".work")).to_contain_text("A cell is running on this session")
    lab.shot("explorer-busy")
    lab.python("lock.release()")
    expect(view.get_by_role("button", name="Run")).to_be_enabled()
    lab.idle()
    assert lab.python("print(''.join(session.texts))").endswith("An egg.")


def test_a_click_after_a_cell_moved_the_view_waits_for_no_other_cell(lab: Any, view: Any) -> None:
    """A cell selects, the next one runs long; Generate and Stop are heard meanwhile."""
    lab.python(SLOW)
    lab.python("explorer.selection = dict(layer=2, token=0); explorer.selection = dict(layer=3, token=0)")
    lab.page.wait_for_timeout(500)
    lab.page.evaluate(
        """() => { window.long = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel
                     .requestExecute({code: 'import time; time.sleep(8)', store_history: false}).done;
                   window.ended = false; window.long.then(() => { window.ended = true; }); }"""
    )
    lab.page.wait_for_timeout(300)
    view.get_by_role("button", name="Generate 32").click()
    expect(view.locator(".work")).to_contain_text("of 32 tokens", timeout=6000)
    assert lab.page.evaluate("() => window.ended") is False
    view.get_by_role("button", name="Stop").click()
    expect(view.locator(".work")).to_have_text(re.compile(r"Stopped\."))
    lab.page.evaluate("() => window.long")
    lab.idle()
    lab.python("del session.generate")


def test_an_error_is_shown_in_place_and_the_picture_stays(lab: Any, view: Any) -> None:
    """A prompt beyond the session's room: the sentence with both numbers, the traceback on demand, nothing changed."""
    shown = view.locator(".tok").count()
    prompt = view.get_by_role("textbox", name="Prompt")
    prompt.fill("egg " * 3000)
    prompt.press("Shift+Enter")
    fault = view.get_by_role("alert")
    expect(fault).to_contain_text(re.compile(r"has [\d,]+ tokens and the session holds \d+\. Nothing was changed\."))
    view.get_by_role("button", name="Show traceback").click()
    expect(fault.locator("pre")).to_contain_text("CapacityError")
    assert view.locator(".tok").count() == shown
    lab.shot("explorer-error")
    view.get_by_role("button", name="Dismiss").click()
    expect(fault).to_be_hidden()
    prompt.fill("An egg.")


def test_copy_gives_code_that_runs(lab: Any, view: Any) -> None:
    """The last line's Copy, pasted into Python, sets the same selection."""
    place(lab, 1, 2)
    view.get_by_role("button", name="Copy", exact=True).last.click()
    code = lab.page.evaluate("navigator.clipboard.readText()")
    lab.python("explorer.selection = dict(layer=5, token=0)")
    lab.python(code)
    where = selection(lab)
    assert (where["layer"], where["token"]) == (1, 2)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_in_the_view(lab: Any, view: Any, dark: bool) -> None:
    """Names, roles and contrast, in both themes and by every colouring."""
    from axe_playwright_python.sync_playwright import Axe

    lab.theme(dark)
    for colour in ("entropy", "margin", "expert"):
        lab.python(f"explorer.colour_by = '{colour}'")
        expect(view.locator("[data-by][aria-pressed=true]")).to_have_text(colour)
        lab.page.wait_for_timeout(400)
        found = Axe().run(lab.page, context=".clb").response["violations"]
        assert [(v["id"], [n["html"][:160] for n in v["nodes"][:3]]) for v in found] == []
    lab.shot("explorer-dark" if dark else "explorer-light-after")


def test_narrow_pages_become_one_column(lab: Any, view: Any) -> None:
    """At 760 and 660 pixels nothing is wider than the view."""
    lab.theme(False)
    for width in (760, 660):
        lab.page.evaluate("(w) => { document.querySelector('.clb').style.width = w + 'px'; }", width)
        lab.page.wait_for_timeout(400)
        wide = "(() => { const c = document.querySelector('.clb'); return c.scrollWidth - c.clientWidth; })()"
        assert lab.page.evaluate(wide) <= 0
        lab.shot(f"explorer-{width}")
    lab.page.evaluate("() => { document.querySelector('.clb').style.width = ''; }")


def test_G2_a_cell_run_thirty_times_leaves_one_view(lab: Any, view: Any) -> None:
    """Earlier explorers are closed and gone from the kernel, one view stands in the page, a click is told once."""
    lab.page.evaluate(
        """async () => {
             const notebook = window.jupyterapp.shell.currentWidget.content;
             notebook.activeCellIndex = 1;
             for (let i = 0; i < 30; i++) await window.jupyterapp.commands.execute('notebook:run-cell');
           }"""
    )
    lab.drawn()
    lab.idle()
    assert lab.page.locator(".clb").count() == 1
    alive = """
import gc, colibri_lab.widgets.explorer as module
gc.collect()
print(sum(isinstance(o, module.RoutingExplorer) and o._data is not None for o in gc.get_objects()))"""
    assert lab.python(alive) == "1"
    lab.python("told = []; explorer.observe(lambda change: told.append(change['new']['token']), 'selection')")
    lab.page.locator(".clb .tok[data-t='2']").click()
    selection(lab)
    assert lab.python("print(told)") == "[2]"
    # anywidget complains, two seconds late, of a model that was closed while the page still loaded it.
    lab.page.wait_for_timeout(2100)
    lab.errors[:] = [error for error in lab.errors if "[anywidget] Failed to initialize model." not in error]


def test_reload_keeps_the_view_alive(lab: Any, view: Any) -> None:
    """After a page reload with a live kernel the view comes back with its selection and still talks to Python."""
    place(lab, 4, 2)
    lab.page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
    lab.page.wait_for_timeout(500)
    lab.page.reload()
    lab.page.wait_for_selector(".jp-Notebook")
    lab.idle()
    root = lab.drawn()
    expect(root.locator(".code").last).to_contain_text("layer=4, token=2")
    root.locator(".tok[data-t='1']").click()
    assert selection(lab)["token"] == 1


def test_after_a_kernel_restart_looking_goes_on(lab: Any, view: Any) -> None:
    """The view says that there is no kernel, disables what needs one, and still selects, colours and slides."""
    lab.page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()",
    )
    root = lab.page.locator(".clb").first
    expect(root.locator(".live")).to_have_text("no kernel")
    expect(root.get_by_role("button", name="Run")).to_be_disabled()
    expect(root.locator(".work")).to_contain_text("No kernel.")
    root.locator(".tok[data-t='3']").click()
    tokens(root).press("ArrowDown")
    expect(root.locator(".code").last).to_contain_text("token=3")
    expect(root.locator(".tcard")).to_contain_text("chosen above")
    root.locator("[data-by=margin]").click()
    expect(root.locator("[data-by=margin]")).to_have_attribute("aria-pressed", "true")
    lab.shot("explorer-no-kernel")
    lab.errors[:] = [e for e in lab.errors if "Comm" not in e and "comm" not in e]


def test_a_notebook_from_elsewhere_shows_the_picture(lab: Any, view: Any) -> None:
    """Opened without trust, as a file that came by mail is, the saved PNG stands where the view was."""
    book = json.loads((lab.root / "explorer.ipynb").read_text(encoding="utf-8"))
    book["cells"][0]["source"] = "# changed, so that the signature no longer fits"
    (lab.root / "received.ipynb").write_text(json.dumps(book), encoding="utf-8")
    lab.open("received.ipynb")
    picture = lab.page.locator(".jp-OutputArea img")
    expect(picture.first).to_be_visible()
    assert picture.first.evaluate("(img) => img.naturalWidth") == 1200
    lab.shot("received", lab.page)
