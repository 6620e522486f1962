"""Colours: equal in Python, JavaScript and matplotlib, and far enough from their ground to be read."""

from __future__ import annotations

import re

import numpy as np
import pytest

from colibri_lab.widgets import palette
from colibri_lab.widgets._modules import static_text

JS = static_text("common", "palette.js")


def js_list(theme: str) -> list[str]:
    found = re.search(rf"{theme}: \[([^\]]*)\]", JS)
    assert found
    return re.findall(r"#[0-9a-f]{6}", found[1])


def luminance(colour: str) -> float:
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.03928, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_cividis_table_is_matplotlibs() -> None:
    """All 256 colours of the browser's table equal matplotlib's, rounded to bytes."""
    from matplotlib import colormaps

    assert np.array_equal(palette.cividis(), np.round(colormaps["cividis"](np.arange(256))[:, :3] * 255))


def test_the_signed_table_is_matplotlibs() -> None:
    """65 colours of PuOr_r: negative is purple, zero is near white."""
    from matplotlib import colormaps

    table = "".join(re.findall(r'^  "([0-9a-f]+)"', static_text("stepper", "signed.js"), flags=re.MULTILINE))
    ours = np.frombuffer(bytes.fromhex(table), np.uint8).reshape(65, 3)
    assert np.array_equal(ours, np.round(colormaps["PuOr_r"](np.linspace(0, 1, 65))[:, :3] * 255))


def test_python_and_the_browser_use_the_same_expert_colours() -> None:
    """The light theme's eight colours and the grey of the rest."""
    assert js_list("light") == list(palette.EXPERTS)
    assert f'light: "{palette.NO_SLOT}"' in JS


@pytest.mark.parametrize(("theme", "card"), [("light", "#ffffff"), ("dark", "#212121")])
def test_expert_colours_stand_out_from_the_card_and_carry_a_number(theme: str, card: str) -> None:
    """3 : 1 against the card, and 4.5 : 1 for the number printed on it."""
    for colour in js_list(theme):
        assert contrast(colour, card) >= 3
        assert contrast(colour, palette.ink_on(colour)) >= 4.5


def test_more_than_eight_experts_share_no_colour() -> None:
    """The busiest eight get one each, ties to the lower number; all others are grey."""
    load = np.array([5, 9, 1, 9, 0, 2, 3, 4, 6, 7, 8], np.uint32)
    colours = palette.expert_colours(load)
    assert [colours[e] for e in (1, 3, 10, 9, 8, 0, 7, 6)] == list(palette.EXPERTS)
    assert {colours[e] for e in (2, 4, 5)} == {palette.NO_SLOT}
    assert palette.expert_colours(load[:8]) == list(palette.EXPERTS)
