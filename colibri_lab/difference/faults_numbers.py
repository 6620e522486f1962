"""Faults of numbers anywhere: a constant factor, a transposed weight, rounding to bfloat16 or float16, a lost bias."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from colibri_lab.difference import changes as c
from colibri_lab.difference import variants as v
from colibri_lab.difference.changes import Fault, Is, Rounded, Through, Times, Use, Weight
from colibri_lab.difference.faults_experts import grouped, where
from colibri_lab.difference.maths import Change
from colibri_lab.difference.scene import Scene, fitted

__all__ = ["bias_faults", "embedding_faults", "rounding_faults", "scale_faults", "transposed_faults"]

_INSIDE = ("gate.weight", "up.weight", "down.weight", "input", "gate.input", "down.input", "hidden", "output",
           "gate.value", "up.value")  # fmt: skip
_SKIPPED = (".eps", ".rule", ".rotate", ".positions", ".frequencies", ".seen", ".scale", ".kv_head", ".act", ".factors",
            "gate_rule", "score_rule", ".expert_ids", ".bias")  # fmt: skip


def _values(scene: Scene) -> list[str]:
    """Points that are arrays of activations, experts left out."""
    return [p for p in scene.points if not p.endswith(_SKIPPED) and ".experts." not in p and not is_weight(p)]


def is_weight(point: str) -> bool:
    """Whether a point is a weight of the model."""
    return point.endswith(".weight")


def _weights(scene: Scene) -> list[str]:
    """Names of matrices that are multiplied with, experts left out."""
    names = [p.removesuffix(".weight") for p in scene.points if is_weight(p) and ".experts." not in p]
    return [name for name in names if not name.endswith("norm")]


def scale_faults(scene: Scene, good: float) -> Iterator[Fault]:
    """A constant factor on the divergent tap itself, then on what it is made of."""
    found, wanted = scene.plain_value, scene.wanted
    at = scene.path
    if at.endswith(".expert_ids"):
        return  # numbers of experts have no size
    size = float(np.square(found).sum())
    if found.shape == wanted.shape and size and not scene.expert_tap:
        factor = _short(float((found * wanted).sum()) / size)
        yield Fault("scale_factor", f"{at} is {_times(factor, scene)}", {at: Times(factor)})
    if scene.expert_tap:
        yield from _expert_scale(scene)
    for point in scene.ending(".factors"):
        yield from _branch_faults(scene, point, good)
    yield Fault("scale_factor", f"{at} is left out (all 0)", {at: Times(0.0)})
    hidden = float(scene.given.settings.hidden or 1)
    width = float(scene.given.settings.head_dim or 1)
    grid = [2.0, 0.5, 4.0, 0.25, width**0.5, width**-0.5, hidden**0.5, hidden**-0.5, 0.1, 10.0, -1.0, 0.75, 1.5]
    groups = [({point: None}, point) for point in _values(scene) if point != at]
    for names, place in grouped(scene):
        if len(names) > 1 or not scene.expert_tap:
            groups += [({f"{n}.{part}": None for n in names}, f"{part.removesuffix('.value')} of {place}")
                       for part in ("output", "hidden", "gate.value", "up.value")]  # fmt: skip
    groups += [({point: None}, point) for point in scene.ending(".bias") if ".experts." not in point]
    for points, words in groups:
        made = [point for point in points if scene.has(point)]
        if not made:
            continue

        def error(factor: float, made: list[str] = made) -> float:
            return scene.left_over({point: Times(factor) for point in made})

        factor, _ = fitted(error, grid, good, logarithmic=True)
        changes: dict[str, Change] = {point: Times(factor) for point in made}
        yield Fault("scale_factor", f"{words} is {_times(factor, scene)}", changes)


def _expert_scale(scene: Scene) -> Iterator[Fault]:
    """One factor for each expert that differs."""
    changes: dict[str, Change] = {}
    factors = {}
    for expert in scene.experts:
        found, wanted = scene.expert_value(expert, {})
        if found.shape != wanted.shape:
            return
        factors[expert] = _short(float((found * wanted).sum() / max(float(np.square(found).sum()), 1e-300)))
        end = ".value" if scene.expert_tap in ("gate", "up") else ""
        changes[f"layers.{scene.layer}.moe.experts.{expert}.{scene.expert_tap}{end}"] = Times(factors[expert])
    names = [f"layers.{scene.layer}.moe.experts.{e}" for e in scene.experts]
    told = sorted(set(factors.values()))
    words = _times(told[0], scene) if len(told) == 1 else f"{', '.join(f'{f:g}' for f in told)} times as large"
    yield Fault("scale_factor", f"{scene.expert_tap} of {where(scene, names)} is {words}", changes)


def _branch_faults(scene: Scene, point: str, good: float) -> Iterator[Fault]:
    """Two factors, on the residual stream and on the branch that is added."""
    path = point.removesuffix(".factors")
    layer = path.split(".")[1]
    block = "attention" if path.endswith(".middle") else "the experts or MLP"
    if path == scene.path:
        parts = [scene.value({point: Is(pair)}) for pair in ((1.0, 0.0), (0.0, 1.0))]
        table = np.stack([part.ravel() for part in parts], axis=1)
        kept, added = (_short(float(f)) for f in np.linalg.lstsq(table, scene.wanted.ravel(), rcond=None)[0])
        words = f"layer {layer} adds {kept:g} · residual stream + {added:g} · {block}"
        yield Fault("scale_factor", words, {point: Is((kept, added))})
        return
    for pair, words in (
        ((0.0, 1.0), f"the residual stream is left out after {block} of layer {layer}"),
        ((1.0, 0.0), f"{block} of layer {layer} is left out"),
        ((2.0, 1.0), f"the residual stream is added twice after {block} of layer {layer}"),
    ):
        yield Fault("scale_factor", words, {point: Is(pair)})

    def error(factor: float) -> float:
        return scene.left_over({point: Is((1.0, factor))})

    added, _ = fitted(error, [2.0, 0.5, 0.25, 4.0, 0.1, 10.0], good)
    yield Fault("scale_factor", f"{block} of layer {layer} is added {added:g} times", {point: Is((1.0, added))})


def _times(factor: float, scene: Scene) -> str:
    """A factor, and where it may come from."""
    width, hidden = scene.given.settings.head_dim, scene.given.settings.hidden
    names = {"√head_dim": (width or 0) ** 0.5, "√hidden_size": (hidden or 0) ** 0.5, "head_dim": float(width or 0)}
    for name, value in names.items():
        if value > 1 and abs(factor / value - 1) < 1e-4:
            return f"{name} ({factor:g}) times as large"
        if value > 1 and abs(factor * value - 1) < 1e-4:
            return f"1/{name} ({factor:g}) times as large"
    return f"{factor:g} times as large"


def _short(value: float) -> float:
    for digits in (1, 2, 3, 4):
        short = float(f"{value:.{digits}g}")
        if abs(short - value) <= 2e-6 * abs(value):
            return short
    return value


# ---- weights ----


def transposed_faults(scene: Scene, good: float) -> Iterator[Fault]:
    """Each weight on the way, and the same matrix of all experts."""
    for name in _weights(scene):
        for how in (v.transposed, v.reshaped):
            yield Fault("transposed_weight", f"{name} is transposed", {f"{name}.weight": Through(how)})
    whole = [n for n in _weights(scene) if ".attn." in n]
    if len(whole) > 1:
        yield Fault("transposed_weight", f"{', '.join(whole)} are transposed",
                    {f"{n}.weight": Through(v.transposed) for n in whole})  # fmt: skip
    for names, place in grouped(scene):
        for parts in (("gate",), ("up",), ("down",), ("gate", "up"), ("gate", "up", "down")):
            points = [p for n in names for part in parts if scene.has(p := f"{n}.{part}.weight")]
            if len({p.split(".")[-2] for p in points}) == len(parts):
                for how in (v.transposed, v.reshaped):
                    yield Fault("transposed_weight", f"{' and '.join(parts)} of {place} transposed",
                                {point: Through(how) for point in points})  # fmt: skip
    if scene.layer is not None:  # a projection that stands where another should
        for name in _weights(scene):
            yield from _exchanged(scene, name)


def _exchanged(scene: Scene, name: str) -> Iterator[Fault]:
    """The weight of another layer, k for v, or the embedding for the output matrix."""
    head, _, last = name.rpartition(".")
    others = {"q": "ko", "k": "vq", "v": "kq", "o": "q"}.get(last, "") if ".attn." in name else ""
    twins = [f"{head}.{other}" for other in others]
    if name.startswith("layers."):
        number, rest = name.split(".", 2)[1:]
        twins += [f"layers.{n}.{rest}" for n in (int(number) - 1, int(number) + 1) if n in scene.suspect.layers]
    for twin in twins:
        if scene.model is not None and twin in scene.model.weights:
            yield Fault("other_weight", f"{twin} stands where {name} should", {f"{name}.weight": Weight(twin)})


def bias_faults(scene: Scene, good: float) -> Iterator[Fault]:
    """A bias that is left out."""
    for point in scene.ending(".bias"):
        yield Fault("missing_bias", f"{point} is left out", {point: Times(0.0)})
    if scene.has("lm_head.weight"):
        words = "logits are made with the embedding instead of lm_head"
        yield Fault("other_weight", words, {"lm_head.weight": Weight("embed")})


# ---- rounding ----


def rounding_faults(scene: Scene, good: float) -> Iterator[Fault]:
    """All weights, all values, and each alone, in bfloat16 and in float16."""
    weights = [p for p in scene.points if is_weight(p)]
    values = _values(scene)
    inside = [p for p in scene.points if ".experts." in p and not p.endswith((".act", ".weight", ".bias"))]
    for dtype in ("bfloat16", "float16"):
        change = Rounded(dtype)
        for points, words in (
            (weights, "weights"),
            ([*values, *inside], "activations"),
            ([*weights, *values, *inside], "weights and activations"),
        ):
            if points:
                yield Fault("bf16_rounding", f"{words} are rounded to {dtype} before {scene.path}",
                            dict.fromkeys(points, change), rounding=True)  # fmt: skip
        for point in [*weights, *values]:
            if ".experts." not in point:
                yield Fault("bf16_rounding", f"{point} is rounded to {dtype}", {point: change}, rounding=True)
        for names, place in grouped(scene):
            for part in _INSIDE:
                points = [f"{n}.{part}" for n in names if scene.has(f"{n}.{part}")]
                if points:
                    yield Fault("bf16_rounding", f"{part} of {place} rounded to {dtype}", dict.fromkeys(points, change),
                                rounding=True)  # fmt: skip
            for parts in (("gate.weight", "up.weight", "down.weight"), ("gate.weight", "up.weight"),
                          ("gate.input", "up.input"), ("gate.value", "up.value"),
                          ("gate.value", "up.value", "hidden")):  # fmt: skip
                points = [f"{n}.{part}" for n in names for part in parts if scene.has(f"{n}.{part}")]
                if points:
                    yield Fault("bf16_rounding", f"{', '.join(parts)} of {place} rounded to {dtype}",
                                dict.fromkeys(points, change), rounding=True)  # fmt: skip
    for point in scene.ending(".rule"):
        yield Fault("bf16_rounding", f"every step of {point.removesuffix('.rule')} is made in bfloat16",
                    {point: Use(v.bf16_norm)}, rounding=True)  # fmt: skip


# ---- embedding ----


def embedding_faults(scene: Scene, good: float) -> Iterator[Fault]:
    """Rows of the embedding one token late or early."""
    if scene.path == "embed":
        for step in (1, -1):
            yield Fault("position_off_by_one", f"embeddings stand one token too {'late' if step > 0 else 'early'}",
                        {"embed": c.Rolled(step)})  # fmt: skip



