"""Why two runs part: faults tried at the first divergence, one after the other, by computing what they would give.

A fault explains when a replay with it, from inputs on which both runs agree, gives the suspect's values down to the
noise of a replay without any fault against the other run, while the plain replay does not. Of all that explain, the
first in the order below is named that leaves no more than three times the least over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from colibri_lab.difference import changes, formulas, variants
from colibri_lab.difference.changes import Fault
from colibri_lab.difference.faults_attention import attention_faults
from colibri_lab.difference.faults_experts import expert_faults
from colibri_lab.difference.faults_norm import norm_faults
from colibri_lab.difference.faults_numbers import (
    bias_faults,
    embedding_faults,
    rounding_faults,
    scale_faults,
    transposed_faults,
)
from colibri_lab.difference.faults_router import router_faults
from colibri_lab.difference.formulas import Missing, expert_of, relative
from colibri_lab.difference.pair import Pair, widened
from colibri_lab.difference.result import Attempt, Diagnosis, Diff, Divergence
from colibri_lab.difference.scene import Scene
from colibri_lab.errors import ArgumentError

__all__ = ["KINDS", "diagnose", "scene_of"]

KINDS = (
    "norm_epsilon", "missing_renormalisation", "raw_logit_gates", "biased_gates", "swapped_gate_up", "rope_style",
    "rope_theta", "window_off_by_one", "position_off_by_one", "expert_order", "transposed_weight", "interleaved_halves",
    "bf16_rounding", "scale_factor", "activation", "softmax_of_chosen", "norm_missing", "unknown", "score_rule",
    "probabilities_as_logits", "gate_order", "gates_left_out", "shared_gate", "head_order", "missing_bias",
    "other_weight",
)  # fmt: skip
"""Every word that `Diagnosis.fault` can be, "unknown" aside: then it is None."""

_TABLE: tuple[tuple[Callable[[Scene, float], Iterator[Fault]], str], ...] = (
    (router_faults, "router and gates"),
    (expert_faults, "order, halves and activation of experts"),
    (norm_faults, "norms"),
    (attention_faults, "rotation, mask and scale of attention"),
    (transposed_faults, "transposed weights"),
    (bias_faults, "biases"),
    (embedding_faults, "embedding"),
    (scale_faults, "constant factors"),
    (rounding_faults, "rounding"),
)
"""Families of faults, the simplest explanations first. Each looks which of its points a replay passes."""

_STAGES = {
    "norms": (".eps", "the norms"),
    "rotation, mask and scale of attention": (".raw", "attention"),
    "router and gates": (".moe.", "the router"),
    "order, halves and activation of experts": (".experts.", "the experts"),
}

_NOISE = 5e-6  # of float32 products one after another, relative; a clean replay that errs more raises it
_CLEARLY = 0.1  # what explains leaves at most this share of the plain replay's error
_SURE, _MORE = 1e-6, 12  # what explains down to here ends the search; so many of each family are tried all the same
_ROUNDED = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def diagnose(
    pair: Pair, divergence: Divergence, model: Any = None, progress: Callable[[float], object] | None = None
) -> Diagnosis:
    """The likely fault behind the first divergence of B from A.

    `model`: a lab.Model (anything with `weights`, `config` and perhaps `session`) whose weights are tried, or None:
    then what needs no weights. `progress` is called with the share done.
    """
    path = starred(divergence.path)
    if math.isinf(divergence.error):
        words = "No known fault of a port makes NaN or infinity out of ordinary numbers: look at what this stage read."
        return Diagnosis(None, words, (), "")
    try:
        scene, clean, side = _sides(pair, divergence, model)
    except Missing as missing:
        return Diagnosis(None, f"No fault could be tried: {missing}.", (), "")
    except (KeyError, ValueError):
        return Diagnosis(None, "No fault could be tried: the taps of these runs do not fit the formulas.", (), "")
    same_shape = scene.twin.shape == scene.wanted.shape
    if scene.computed and same_shape and scene.plain < _CLEARLY * relative(scene.twin, scene.wanted):
        return Diagnosis(None, _before(pair, path, divergence, side), (), "")
    good = max(_NOISE, 4 * clean, 2 * _ROUNDED.get(scene.arithmetic, 0.0))
    attempts, faults = [], []
    rough = scene.coarse()
    if rough and scene.plain < 4 * _ROUNDED[rough]:
        faults.append(Fault("bf16_rounding", f"values of {path} are rounded to {rough} in {side}",
                            {path: changes.Rounded(rough)}, rounding=True))  # fmt: skip
        attempts.append(Attempt("bf16_rounding", faults[0].words, "explains", _after(scene, faults[0]),
                                f"every value of {side} there is one of {rough}"))  # fmt: skip
    if rough:
        good = max(good, 2 * _ROUNDED[rough])
    for number, (family, words) in enumerate(_TABLE):
        if progress is not None:
            progress(number / len(_TABLE))
        before = len(attempts)
        if not faults or rough is None:
            with np.errstate(all="ignore"):
                found = any(attempt.state == "explains" for attempt in attempts)
                for fault in family(scene, math.inf if found else good):  # inf: constants are no longer refined
                    attempts.append(_attempt(scene, fault, good))
                    faults.append(fault)
                    if _settled(attempts) and len(attempts) - before > _MORE:
                        break
        if len(attempts) == before and words in _STAGES:
            note = f"the runs part elsewhere than at {_STAGES[words][1]}"
            attempts.append(Attempt("", words, "excluded", None, note))
    return _named(scene, attempts, faults, side)


def starred(path: str) -> str:
    """The path with its expert as "*": all experts of a layer are one row."""
    inside = expert_of(path)
    return f"layers.{inside[0]}.moe.experts.*.{inside[2]}" if inside else path


def scene_of(d: Diff, model: Any = None) -> Scene:
    """The scene of a Diff's first divergence, as the confirming Python looks at it."""
    if d.first_divergence is None:
        raise ArgumentError("the two runs do not part, so there is nothing to explain")
    return _sides(Pair(d.a, d.b), d.first_divergence, model)[0]


def _sides(pair: Pair, first: Divergence, model: Any) -> tuple[Scene, float, str]:
    """(scene of the suspect, error of a clean replay of the other run, "B" or "A").

    B is the suspect unless a plain replay gives B and not A.
    """
    a, b, path, token, n = pair.a, pair.b, starred(first.path), first.token, pair.n
    taps = [tap.path for tap in pair.taps()]
    common = tuple(taps[: taps.index(path)]) if path in taps else ()
    of_b = Scene(b, a, path, token, n, model, common, a)
    of_a = Scene(a, b, path, token, n, model, common, a)
    clean = of_a.plain if of_a.computed else 0.0
    if of_a.computed and of_b.computed and of_b.plain < 0.2 * of_a.plain:
        return of_a, of_b.plain, "A"
    return of_b, clean if clean < 0.5 * of_b.plain else 0.0, "B"


def _before(pair: Pair, path: str, first: Divergence, side: str) -> str:
    """What to say where the stage does what it should with what it was given: which of the taps before it differs."""
    for tap in pair.taps():
        if tap.path == path or (tap.layer != first.layer and tap.layer != -1):
            continue
        values = pair.rows(tap.path)
        error = relative(widened(values.b), widened(values.a)) if len(values.a) else 0.0
        if error > 0.3 * first.error:
            return (
                f"From what {side} had before it, {path} is computed as it should be: the difference comes from "
                f"{tap.path}, which differs by {error:.2g} and is within tolerance. Measure a tighter one "
                "(lab.tolerance) to see where it begins."
            )
    return f"From what {side} had before it, {path} is computed as it should be: the difference comes from further up."


def _settled(attempts: list[Attempt]) -> bool:
    """Whether one explains so well that no other can do it better."""
    return any(t.state == "explains" and (t.left_over or 0.0) <= _SURE for t in attempts)


def _after(scene: Scene, fault: Fault) -> float:
    return scene.left_over(fault.changes)


def _attempt(scene: Scene, fault: Fault, good: float) -> Attempt:
    left = _after(scene, fault)
    if math.isinf(left):
        reason = scene.given.lacking or _shape_reason(scene, fault)
        return Attempt(fault.kind, fault.words, "excluded", None, f"excluded: {reason}")
    plain = scene.plain
    if fault.rounding and scene.arithmetic in _ROUNDED:
        return Attempt(fault.kind, fault.words, "excluded", left, f"both runs are computed in {scene.arithmetic}")
    explains = left <= good and left <= _CLEARLY * plain
    if fault.rounding and not explains:  # values near a boundary fall to either side, so no noise level is reached
        explains = left <= 0.25 * plain and plain < 0.03
    note = "" if explains else f"explains {max(0.0, 1 - left / plain):.0%} of it" if plain else ""
    return Attempt(fault.kind, fault.words, "explains" if explains else "tried", left, note)


def _shape_reason(scene: Scene, fault: Fault) -> str:
    """Why it cannot be computed: most often a shape."""
    for point, change in fault.changes.items():
        if change == changes.Through(variants.transposed) and scene.model is not None:
            weight = scene.given.weight(point.removesuffix(".weight"))
            if weight is not None:
                return f"the shape {'×'.join(map(str, weight.shape))} forbids it"
    return "makes no sense here"


def _named(
    scene: Scene, attempts: list[Attempt], faults: list[Fault], side: str
) -> Diagnosis:
    """The simplest of those that explain best."""
    path = scene.path
    tried = [attempt for attempt in attempts if attempt.fault]
    pairs = [(attempt, fault) for attempt, fault in zip(tried, faults, strict=True) if attempt.state == "explains"]
    shown = tuple(sorted(_shortened(attempts), key=lambda t: (t.state != "explains", t.left_over is None,
                                                             t.left_over or 0.0)))  # fmt: skip
    if not pairs:
        closest = min((t for t in tried if t.left_over is not None), key=lambda t: t.left_over or 0.0, default=None)
        near = f"; the nearest, {closest.words}, leaves {closest.left_over:.2g}" if closest else ""
        ask = f" ({scene.given.lacking})" if scene.given.lacking else ""
        return Diagnosis(None, f"None of the faults tried explains {path}{near}{ask}.", shown, "")
    least = min(_score(attempt, fault, scene) for attempt, fault in pairs)
    attempt, fault = next(pair for pair in pairs if _score(*pair, scene) <= max(3 * least, 1e-6))
    if not attempt.words:
        return Diagnosis(None, f"None of the faults tried explains {path}.", shown, "")
    words = fault.words if fault.words.startswith("layers.") else fault.words[0].upper() + fault.words[1:]
    who = f" This is so in {side}, while the other run follows the model." if side == "A" else ""
    evidence = _configs(scene, fault.kind)
    ordered = (attempt, *(t for t in shown if t.words != attempt.words))
    return Diagnosis(attempt.fault, f"{words}.{who}{evidence}", ordered, _confirm(scene, fault, side))


def _score(attempt: Attempt, fault: Fault, scene: Scene) -> float:
    """What is left over; with a rounding the best possible counts as noise."""
    left = attempt.left_over if attempt.left_over is not None else math.inf
    return max(left, 0.02 * scene.plain) if fault.rounding else left


def _shortened(attempts: list[Attempt]) -> list[Attempt]:
    """Of each kind the best few attempts; a reader wants to see what was tried, not two hundred lines. What two
    computations call by the same words is one.
    """
    kept: dict[tuple[str, str], list[Attempt]] = {}
    said = set()
    for attempt in sorted(attempts, key=lambda t: t.left_over if t.left_over is not None else math.inf):
        if attempt.words in said:
            continue
        said.add(attempt.words)
        group = kept.setdefault((attempt.fault, "" if attempt.fault else attempt.words), [])
        if attempt.state == "explains" or len(group) < 2:
            group.append(attempt)
    return [attempt for group in kept.values() for attempt in group]


_FIELDS = {
    "norm_epsilon": ("rms_norm_eps",), "rope_theta": ("rope_theta", "rope_parameters", "rope_scaling"),
    "window_off_by_one": ("sliding_window", "use_sliding_window", "windows"), "activation": ("hidden_act",),
    "missing_renormalisation": ("norm_topk_prob", "gate_rule"), "scale_factor": ("routed_scaling_factor", "head_dim"),
}  # fmt: skip


def _configs(scene: Scene, kind: str) -> str:
    """What the two runs' configurations say about it, when they differ."""
    a, b = (trace.meta.get("config") or {} for trace in (scene.other, scene.suspect))
    for name in _FIELDS.get(kind, ()):
        if name in a and name in b and a[name] != b[name]:
            return f" The configurations say so: {name} is {b[name]} there and {a[name]} in the other run."
    return ""


def _confirm(scene: Scene, fault: Fault, side: str) -> str:
    """Python that computes the tap with the fault and holds it against the run, given d, a, b and model."""
    lines = [f"    {point!r}: {change!r}," for point, change in fault.changes.items()]
    names = set(re.findall(r"[A-Za-z_]\w*", re.sub(r"'[^']*'", "", " ".join(lines))))
    imports = ["import numpy as np"] if "array" in names else []
    for module in (changes, formulas, variants):
        used = [n for n in sorted(names) if getattr(getattr(module, n, None), "__module__", "") == module.__name__]
        imports += [f"from {module.__name__} import {', '.join(used)}"] if used else []
    text = "\n".join(lines).replace(": Is(value=array(", ": Is(value=np.array(")
    left = _after(scene, fault)
    limit = math.sqrt(max(left, 1e-4 * scene.plain) * scene.plain)  # between the two
    told = f"left < {limit:.2g} < without" if left < 0.5 * scene.plain else f"left < {3 * left:.2g}"
    return "\n".join([
        "# d: this comparison; model: the open checkpoint whose weights were tried, or None",
        *imports,
        "from colibri_lab.difference.diagnosis import scene_of",
        "scene = scene_of(d, model)",
        f"fault = {{\n{text}\n}}",
        "left, without = scene.left_over(fault), scene.left_over({})",
        f"print(left, without)  # {side} against a replay with this fault, and against one without it",
        f"assert {told}",
    ])  # fmt: skip
