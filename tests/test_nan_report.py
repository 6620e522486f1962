"""The words of what was found, from finds made by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab.nan.report import before_origin, report
from colibri_lab.nan.result import MAP, Found, Operand, Origin, Propagation, Step, WeightPlace
from colibri_lab.testing import synthetic_trace

HIDDEN = Origin(
    "layers.3.moe.experts.5.hidden", 3, "expert", 35, 117, "overflow",
    "overflow: 412.25 × 181.625 = 74,875, and float16 ends at 65,504", expert=5, point="layers.3.moe.experts.5.hidden",
    operation="hidden = act(gate) · up", value=math.inf, dtype="float16", exact=74874.90625,
    operands=(Operand("act(gate)", 412.25, "float16"), Operand("up", 181.625, "float16"),
              Operand("largest float16", 65504.0, "float16")),
    tokens=(35,),
)  # fmt: skip
WEIGHT = Origin(
    "layers.4.attn.q", 4, "attention", 2, (1, 3), "weight value", "weight value: layers.4.attn.q[11, 0] is NaN",
    point="layers.4.attn.q.product", operation="q = input · weight layers.4.attn.q", tokens=(2, 3, 4),
    weight=WeightPlace("layers.4.attn.q", (11, 0), math.nan, "float32", 0x7FC00000, "model.safetensors", 123456),
)  # fmt: skip
STEPS = (
    Step("layers.3.moe.experts.5.output", HIDDEN.path, 3, "expert", (35,), 8, 0, math.inf, "product",
         "Inf × column 117 of down, any weight"),
    Step("layers.3.output", "layers.3.moe.experts.5.output", 3, "residual", (35,), 8, 0, math.inf, "residual",
         "Inf + anything = Inf"),
    Step("layers.4.attn.norm", "layers.3.output", 4, "attention", (35,), 8, 8, math.nan, "norm", "Inf ÷ Inf = NaN"),
    Step("logits", "norm", None, "logits", (35, 36, 37, 38, 39), 9, 9, math.nan, "product", "NaN × any weight = NaN"),
)  # fmt: skip
WAY = Propagation(
    STEPS, ruined=(35, 36, 37, 38, 39), clean=tuple(range(35)), last="logits", cache=((4, (35,)),),
    routing=((4, (35, 36, 37, 38, 39)),), swallowed=("Layer 3, token 35: act(−Inf) is 0.",),
)  # fmt: skip


def row(layer: int, bits: float, n_inf: int = 0, path: str = "moe.experts.*.hidden") -> tuple[Any, ...]:
    return (f"layers.{layer}.{path}", layer, "expert", 8, 0, n_inf, 0, 0, 1.0, bits, "finite")


def found(
    *origins: Origin, rows: list[Any] | None = None, notes: tuple[str, ...] = (), way: Propagation = WAY
) -> Found:
    trace = synthetic_trace(6, 8, 2, 40)
    texts = [" +=" if token == 35 else text for token, text in enumerate(trace.texts)]
    told = lab.Trace(dict(trace), ids=trace.ids, texts=texts, meta=trace.meta)
    table = np.array([row(2, 0.91), row(3, -0.2, 1)] if rows is None else rows, MAP)
    return Found(told, origins or (HIDDEN,), way, table, "float16", notes)


def test_the_summary_tells_cause_place_damage_and_headroom() -> None:
    assert found().summary == (
        "Overflow: 412.25 × 181.625 = 74,875, and float16 ends at 65,504. Born in layer 3, expert 5, hidden = "
        "act(gate) · up, token 35 '·+=', neuron 117. It ruined the logits of 5 of 40 tokens. "
        "Headroom had fallen to 0.9 bit one layer earlier."
    )


def test_independent_origins_are_counted() -> None:
    assert "It is the first of 2 independent origins." in found(HIDDEN, WEIGHT).summary


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row(2, 1.6), row(3, -0.2, 1)], "Headroom had fallen to 1.6 bits one layer earlier."),
        ([row(1, 1.0), row(3, -0.2, 1)], "Headroom had fallen to 1.0 bit 2 layers earlier."),
        ([row(1, 0.5), row(2, 2.5)], ""),  # there was room
        ([row(2, 0.5, n_inf=3)], ""),  # it was broken there already
        ([row(2, 0.5, path="moe.output")], ""),  # another tap
        ([row(3, 0.5), row(4, 0.5)], ""),
        ([], ""),
    ],
)
def test_headroom_is_told_of_the_layer_before(rows: list[Any], words: str) -> None:
    assert before_origin(found(rows=rows), HIDDEN) == words


def test_headroom_says_nothing_of_a_bad_weight() -> None:
    assert before_origin(found(WEIGHT, rows=[row(3, 0.5, path="attn.q")]), WEIGHT) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "layer 4, product behind attention q, q = input · weight layers.4.attn.q, token 2"),
        ({"path": "embed", "point": "embed", "layer": None, "operation": ""}, "embedding, token 2"),
        ({"path": "layers.4.attn.weights", "point": "layers.4.attn.scores"}, "head 1, key 3"),
        ({"path": "layers.4.attn.q", "index": (1, 3)}, "head 1, channel 3"),
        ({"path": "logits", "point": "logits", "index": 9}, "id 9"),
        ({"path": "layers.4.moe.router_logits", "point": "", "index": 6}, "router logits"),
    ],
)
def test_a_place_is_told_in_words(changes: dict[str, Any], words: str) -> None:
    assert words in found(replace(WEIGHT, **changes)).summary


def test_the_report_holds_operands_way_clean_part_notes_and_the_next_step_in_100_columns() -> None:
    text = found(HIDDEN, WEIGHT, notes=("A note that is " + "very " * 30 + "long.",)).report()
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith("OVERFLOW: 412.25 × 181.625 = 74,875")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "act(gate) 412.25 0x5E71 0 10111 1001110001" in lines
    assert "result +Inf 0x7C00 0 11111 0000000000" in lines
    for part in ("Origin 1 of 2: layer 3, expert 5", "Origin 2 of 2: layer 4", "model.safetensors, byte 123,456",
                 "layers.4.attn.norm, token 35: Inf ÷ Inf = NaN", "Tokens 0–34 stay clean.", "act(−Inf) is 0",
                 "expert ids of tokens 35–39 mean nothing", "lab.nan.cures(found)"):  # fmt: skip
        assert part in text, part


def test_steps_that_tell_nothing_new_are_left_out_and_counted() -> None:
    many = replace(WAY, steps=tuple(replace(STEPS[2], path=f"layers.4.x{i}") for i in range(30)))
    assert "… 29 more steps in found.propagation.steps" in found(way=many).report()
    assert "… 29 more steps: --json OUT writes them" in report(found(way=many), terminal=True)


def test_a_find_without_a_way_has_a_report_too() -> None:
    """From a trace with few taps nothing more may be known."""
    bare = found(replace(WEIGHT, operation="", weight=None, needs=("layers.4.attn.norm",)), way=Propagation())
    assert "what would decide: layers.4.attn.norm" in bare.report() and bare.summary.endswith("channel 3.")


def test_G1_json_holds_everything_and_no_nan() -> None:
    told = json.loads(found(HIDDEN, WEIGHT).to_json(), parse_constant=pytest.fail)
    assert told["summary"] == found(HIDDEN, WEIGHT).summary
    first, second = told["origins"]
    assert first["value"] == "inf" and first["operands"][0]["hex"] == "0x5E71" and second["weight"]["value"] == "nan"
    assert told["propagation"]["ruined"] == [35, 36, 37, 38, 39] and told["map"][0]["bits_left"] == 0.91


def test_the_views_of_a_find_escape_what_a_token_says() -> None:
    trace = found().trace
    evil = lab.Trace(dict(trace), ids=trace.ids, texts=["<img>"] * len(trace.ids), meta=trace.meta)
    assert "<img>" not in replace(found(), trace=evil)._repr_html_()


@pytest.mark.parametrize(
    ("dtype", "value", "told", "fields"),
    [
        ("float8_e5m2", 57344.0, "0x7B", ("0", "11110", "11")),
        ("float8_e5m2", -math.inf, "0xFC", ("1", "11111", "00")),
        ("float8_e4m3fn", 448.0, "0x7E", ("0", "1111", "110")),
        ("float8_e4m3fn", math.nan, "0x7F", ("0", "1111", "111")),
        ("bfloat16", -1.0, "0xBF80", ("1", "01111111", "0000000")),
        ("float64", 1.0, "0x3FF0000000000000", ("0", "01111111111", "0" * 52)),
    ],
)
def test_an_operand_of_any_format_has_its_bits(dtype: str, value: float, told: str, fields: tuple[str, ...]) -> None:
    """Emulated eight-bit formats and recorded doubles too."""
    operand = Operand("x", value, dtype)
    assert (operand.hex, operand.fields) == (told, fields)


def test_an_overflow_of_an_eight_bit_format_is_reported() -> None:
    """The numbers of the sentence stand in the table with two hexadecimal digits."""
    eight = replace(HIDDEN, dtype="float8_e5m2", operands=(Operand("largest float8_e5m2", 57344.0, "float8_e5m2"),))
    assert "0x7B" in found(eight).report()


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn", "bfloat16", "float16"])
def test_the_bits_of_every_number_of_a_narrow_format_are_those_of_ml_dtypes(dtype: str) -> None:
    """All patterns of eight bits, every 97th of sixteen, subnormals and infinities too; any NaN stays one."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    words = np.arange(0, 1 << 8 * kind.itemsize, 1 if kind.itemsize == 1 else 97).astype(f"u{kind.itemsize}")
    with np.errstate(invalid="ignore"):  # signalling NaN
        values = words.view(kind).astype(np.float64).tolist()
    for word, value in zip(words.tolist(), values, strict=True):
        made = Operand("x", value, dtype).pattern
        if math.isnan(value):
            assert np.isnan(np.array([made]).astype(words.dtype).view(kind)[0])
        else:
            assert made == word
