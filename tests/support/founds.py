"""What a search for NaN and Inf would find, made by hand, for tests of what shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from diffs import copied, full_trace, of

from colibri_lab.difference.taps import parse
from colibri_lab.nan.result import MAP, Cure, Found, Operand, Origin, Propagation, Step, WeightPlace
from colibri_lab.trace import Trace

KINDS = (
    "attn.norm", "attn.q", "attn.k", "attn.v", "attn.out", "moe.router_logits", "moe.experts.*.hidden",
    "moe.experts.*.output", "moe.routed", "output",
)  # fmt: skip
"""Taps of a layer in the map."""

BORN, TOKEN, LAYER, EXPERT = 6, 35, 3, 5  # the origin: the tap's place in KINDS, the token, the layer, the expert


def table(layers: int = 6, born: tuple[int, int] | None = (LAYER, BORN), sizes: Sequence[float] = ()) -> Any:
    """A map: everything behind `born` (layer, place in KINDS) is passed on, first as Inf, then as NaN. `sizes` are the
    largest magnitudes of the expert's hidden values by layer.
    """
    sizes = sizes or [*(2047.0, 5400.0, 35000.0), *[9000.0] * layers]
    rows = [_row("embed", -1, "embed", "finite", 2.0)]
    for layer in range(layers):
        for i, kind in enumerate(KINDS):
            absmax = sizes[layer] if kind.endswith("hidden") else 12.0 + i
            state = "near" if np.log2(65504 / absmax) < 2 else "finite"
            state = "subnormal" if (layer, i) == (0, 5) and born else state
            if born and (layer, i) >= born:
                state = "origin" if (layer, i) == born else "passed"
            rows.append(_row(f"layers.{layer}.{kind}", layer, _stage(kind), state, absmax, inf=layer == LAYER))
    for name in ("norm", "logits"):
        rows.append(_row(name, -1, name, "passed" if born else "finite", 9.0))
    return np.array(rows, MAP)


def _stage(kind: str) -> str:
    tap = parse(f"layers.0.{kind}")
    assert tap is not None
    return tap.stage


def _row(path: str, layer: int, stage: str, state: str, absmax: float, inf: bool = False) -> tuple[Any, ...]:
    odd = state in ("origin", "passed")
    n_inf, n_nan = (16, 0) if odd and inf else (0, 80 if odd else 0)
    subnormal = 300 if state == "subnormal" else 0
    return path, layer, stage, 640, n_nan, n_inf, 0, subnormal, absmax, np.log2(65504 / absmax), state


OVERFLOW = Origin(
    f"layers.{LAYER}.moe.experts.{EXPERT}.hidden", LAYER, "expert", TOKEN, 117, "overflow",
    "overflow: 412.25 × 181.625 = 74,875, and float16 ends at 65,504", EXPERT,
    f"layers.{LAYER}.moe.experts.{EXPERT}.hidden", "hidden = act(gate) · up", float("inf"), "float16", 74874.9,
    (
        Operand("act(gate)", 412.25, "float16"), Operand("up", 181.625, "float16"),
        Operand("product", float("inf"), "float16"), Operand("largest", 65504.0, "float16"),
    ),
    None, (TOKEN,), 1,
)  # fmt: skip

WEIGHT = Origin(
    "layers.1.attn.q", 1, "attention", 3, (2, 7), "weight value",
    "weight value: model.layers.1.self_attn.q_proj.weight[23, 5] is NaN, a signalling one", None,
    "layers.1.attn.q.product", "q = norm · Wq", float("nan"), "float32", None,
    (Operand("norm[5]", 0.0375, "float32"), Operand("weight[23, 5]", float("nan"), "float32", 0x7FA00001)),
    WeightPlace("model.layers.1.self_attn.q_proj.weight", (23, 5), float("nan"), "float32", 0x7FA00001, "a.safetensors",
                18_345_672),
    tuple(range(3, 40)), 37,
)  # fmt: skip

UNKNOWN = Origin(
    "layers.4.moe.router_logits", 4, "router", 7, 3, "unknown", "unknown: the input of the router was not recorded",
    tokens=(7,), needs=("layers.4.moe.input", "layers.3.output"),
)  # fmt: skip


def steps(tokens: int = 40) -> Propagation:
    """The way of OVERFLOW to the logits of the tokens from 35 on."""
    at, nxt, inf, nan = f"layers.{LAYER}", f"layers.{LAYER + 1}", float("inf"), float("nan")
    later = tuple(range(TOKEN + 1, tokens))
    ruined = (TOKEN, *later)
    expert = f"{at}.moe.experts.{EXPERT}"

    def step(path: str, source: str, stage: str, rows: tuple[int, ...], value: float, how: Any, words: str) -> Step:
        layer = int(path.split(".")[1]) if path.startswith("layers.") else None
        return Step(path, source, layer, stage, rows, 16 * len(rows), 0 if value == inf else 16, value, how, words)

    way = (
        step(f"{expert}.output", f"{expert}.hidden", "expert", (TOKEN,), inf, "product", "× row 117 of down"),
        step(f"{at}.moe.routed", f"{expert}.output", "aggregator", (TOKEN,), inf, "gate", "× gate 0.71, + expert 4"),
        step(f"{at}.output", f"{at}.moe.routed", "residual", (TOKEN,), inf, "residual", "added to the stream"),
        step(f"{nxt}.attn.norm", f"{at}.output", "attention", (TOKEN,), nan, "norm", "Inf × 0 = NaN"),
        step(f"{nxt}.attn.k", f"{nxt}.attn.norm", "attention", (TOKEN,), nan, "product", "k and v rows are kept"),
        step(f"{nxt}.attn.out", f"{nxt}.attn.k", "attention", later, nan, "attention", "all read row 35 of k and v"),
        step(f"{nxt}.moe.router_logits", f"{nxt}.attn.out", "router", ruined, nan, "router", "ids there mean nothing"),
        step(f"{nxt}.output", f"{nxt}.attn.out", "residual", ruined, nan, "residual", "added to the stream"),
        step(f"layers.{LAYER + 2}.output", f"{nxt}.output", "residual", ruined, nan, "residual", "added to the stream"),
        step("logits", f"layers.{LAYER + 2}.output", "logits", ruined, nan, "product", "product with the head"),
    )
    return Propagation(way, ruined, tuple(range(TOKEN)), "logits", ((4, (TOKEN,)),), ((4, ruined), (5, ruined)), ())


def run(trace: Trace | None = None) -> Trace:
    """The run in which OVERFLOW happened: emulated float16, 40 tokens."""
    trace = full_trace() if trace is None else trace
    arrays = copied(trace)
    for layer in trace.layers:
        if layer > LAYER:
            arrays[f"layers.{layer}.output"][TOKEN:] = np.nan
    arrays[f"layers.{LAYER}.output"][TOKEN] = np.inf
    arrays["logits"][TOKEN:] = np.nan
    return of(trace, arrays, model_name="tiny-colibri", arithmetic="float16", emulation={"storage": "float16"})


def overflow(*more: Origin) -> Found:
    """OVERFLOW found, and further independent origins."""
    return Found(run(), (OVERFLOW, *more), steps(), table(), "float16")


def many(count: int, layers: int = 48, experts: int = 128, tokens: int = 200) -> Found:
    """A large run with `count` origins."""
    trace = of(base := full_trace(layers, experts, 8, tokens), copied(base))
    origins = [
        Origin(
            f"layers.{LAYER}.moe.experts.{i % experts}.hidden", LAYER, "expert", i % tokens, i, "weight value",
            f"weight value: w1[{i}, 0] is NaN", i % experts, tokens=(i % tokens,),
        )
        for i in range(count)
    ]  # fmt: skip
    ruined = tuple(range(0, tokens, 2))
    way = Propagation((), ruined, tuple(range(1, tokens, 2)), "logits")
    return Found(trace, tuple(origins), way, table(layers), "float32", ("the taps of attention were not recorded",))


CURED = Cure("precision", "This product in float32", True, "", None, (0.1, "layers.3.moe.experts.5.output"), 0.0, 0)
NOT_CURED = Cure("clamp", "Clamp it", False, "", UNKNOWN, (-0.2, "layers.4.output"), float("nan"), 3)
