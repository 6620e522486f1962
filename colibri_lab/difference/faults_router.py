"""Faults of the router: logits of other experts, another score function, gates by another rule."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.difference import changes as c
from colibri_lab.difference import variants as v
from colibri_lab.difference.changes import Fault, Is, Plus, Tap, Through, Times, Use
from colibri_lab.difference.formulas import GATE_RULES, SCORE_RULES, GateRule, relative
from colibri_lab.difference.scene import Scene

__all__ = ["router_faults"]

Array = NDArray[Any]


def router_faults(scene: Scene, good: float) -> Iterator[Fault]:
    """By the tap of the divergence; where it lies further on, the gate rules are tried through what follows."""
    tap = scene.path.rpartition(".")[2]
    if scene.path.endswith(".moe.router_logits"):
        yield from _logit_faults(scene)
    elif scene.path.endswith(".moe.scores"):
        yield from _score_faults(scene)
    elif scene.path.endswith(".moe.expert_ids"):
        yield from _choice_faults(scene)
    elif scene.path.endswith(".moe.gates"):
        yield from _gate_faults(scene, good)
    for point in scene.ending(".moe.gate_rule", ".moe.applied_gates"):
        if tap != "gates":
            yield from _gates_on_the_way(scene, point)
    for point in scene.ending(".moe.router.input"):
        path = point.removesuffix(".moe.router.input") + ".middle"
        layer = point.split(".")[1]
        yield Fault("norm_missing", f"the router of layer {layer} reads the residual stream, not the normed one",
                    {point: Tap(path)})  # fmt: skip
    for point in scene.ending(".shared.gate_rule", ".shared.applied"):
        yield from _shared_gate_faults(point)


# ---- logits and scores ----


def _logit_faults(scene: Scene) -> Iterator[Fault]:
    found, wanted, layer = scene.plain_value, scene.wanted, scene.layer
    if found.shape != wanted.shape:
        return
    order = matched(wanted, found)
    if order is not None and (order != np.arange(len(order))).any():
        yield Fault("expert_order", f"the rows of the router of layer {layer} are in another order: {told(order)}",
                    {scene.path: c.Columns(tuple(order.tolist()))})  # fmt: skip
    offset = (wanted - found).mean(0)
    words = f"a bias per expert is added to the logits of layer {layer}"
    yield Fault("biased_gates", words, {scene.path: Plus(tuple(offset.tolist()))})
    for name, rule in SCORE_RULES.items():
        if name != "logits":
            yield Fault("probabilities_as_logits", f"the logits of layer {layer} are {name} probabilities",
                        {scene.path: Through(rule)})  # fmt: skip
    yield Fault("probabilities_as_logits", f"the logits of layer {layer} are logarithms of probabilities",
                {scene.path: Through(v.log_softmax)})  # fmt: skip


def _score_faults(scene: Scene) -> Iterator[Fault]:
    path = f"layers.{scene.layer}.moe."
    logits, wanted, layer = scene.given.known(path + "router_logits", scene.rows), scene.wanted, scene.layer
    if logits is None:
        return
    mine = _score_rule(scene, logits, scene.twin)
    for name, rule in SCORE_RULES.items():
        bias = (wanted - rule(logits)).mean(0)
        plain, leaning = relative(rule(logits), wanted), relative(rule(logits) + bias, wanted)
        kind = "raw_logit_gates" if name == "logits" else "score_rule"
        words = f"scores of layer {layer} are {'the raw logits' if name == 'logits' else name + ' of the logits'}"
        if mine != name:
            yield Fault(kind, words, {scene.path: c.Scores(name)})
        elif plain < 1e-5:
            yield Fault("biased_gates", f"scores of layer {layer} lack the correction bias",
                        {scene.path: c.Scores(name)})  # fmt: skip
        if leaning < plain and np.abs(bias).max() > 0:
            yield Fault("biased_gates", f"scores of layer {layer} are {name} plus another bias per expert",
                        {scene.path: c.Scores(name, tuple(bias.tolist()))})  # fmt: skip
    yield from _warm_scores(scene, logits)
    order = matched(wanted, scene.twin) if scene.twin.shape == wanted.shape else None
    if order is not None and (order != np.arange(len(order))).any():
        yield Fault("expert_order", f"scores of layer {layer} are in another order: {told(order)}",
                    {scene.path: c.Columns(tuple(order.tolist()))})  # fmt: skip


def _warm_scores(scene: Scene, logits: Array) -> Iterator[Fault]:
    """A constant factor on the logits, from centred ln p against centred z."""
    if (scene.wanted <= 0).any():
        return
    z, p = (x - x.mean(-1, keepdims=True) for x in (logits, np.log(scene.wanted)))
    factor = float((z * p).sum() / max(float(np.square(z).sum()), 1e-300))
    short = float(f"{factor:.4g}")
    factor = short if abs(short - factor) < 1e-5 * abs(factor) else factor
    words = f"logits of layer {scene.layer} are multiplied by {factor:g} before the softmax"
    yield Fault("scale_factor", words, {scene.path: c.Warmer(factor)})


def _score_rule(scene: Scene, logits: Array, scores: Array) -> str:
    """The function whose values, up to a bias per expert, the other run holds."""
    if scores.shape != logits.shape:
        return ""
    errors = {name: _spread(scores - rule(logits)) for name, rule in SCORE_RULES.items()}
    best = min(errors, key=lambda name: errors[name])
    return best if errors[best] < 1e-3 * max(float(np.abs(scores).max()), 1e-30) else ""


def _spread(offset: Array) -> float:
    return float((offset.max(0) - offset.min(0)).max())


def _choice_faults(scene: Scene) -> Iterator[Fault]:
    """Scores agree and the choice does not."""
    path, layer, k = f"layers.{scene.layer}.moe.", scene.layer, scene.suspect.top_k
    scores = scene.given.known(path + "scores", scene.rows)
    mine, theirs = scene.wanted.astype(int), scene.twin.astype(int)
    if mine.shape != theirs.shape:
        return
    table = np.zeros((scene.suspect.num_experts,) * 2, int)
    np.add.at(table, (theirs, mine), 1)
    order = table.argmax(1)
    used = table.any(1)
    if (order[used] != np.flatnonzero(used)).any() and (order[theirs] == mine).all():
        yield Fault("expert_order", f"expert numbers of layer {layer} are exchanged: {told(order)}",
                    {scene.path: c.Renumbered(tuple(order.tolist()))})  # fmt: skip
    if scores is None:
        return
    for dtype in ("bfloat16", "float16"):
        yield Fault("bf16_rounding", f"scores of layer {layer} are rounded to {dtype} before the choice",
                    {scene.path: c.Choice(k, dtype)}, rounding=True)  # fmt: skip
    bias = leaning(scores, mine)
    if bias is not None:
        yield Fault("biased_gates", f"experts of layer {layer} are chosen with another bias per expert",
                    {scene.path: c.Leaning(k, tuple(bias.tolist()))})  # fmt: skip
    logits = scene.given.known(path + "router_logits", scene.rows)
    for name, rule in SCORE_RULES.items():
        if logits is None:
            return
        best = np.argsort(-rule(logits), axis=-1, kind="stable")[:, :k]
        if (np.sort(best) == np.sort(mine)).all():
            yield Fault("biased_gates", f"experts of layer {layer} are chosen by {name} without the correction bias",
                        {scene.path: c.Chosen(name, k)})  # fmt: skip


def leaning(scores: Array, ids: Array) -> Array | None:
    """A bias per expert with which the k best of `scores` are `ids`, by the perceptron rule; None if none is found."""
    tokens, n = scores.shape
    chosen = np.zeros((tokens, n), bool)
    np.put_along_axis(chosen, ids, True, -1)
    bias, step = np.zeros(n), float(np.abs(scores).max()) / 8
    for _ in range(400):
        leaned = scores + bias
        worst = np.where(chosen, leaned, np.inf).argmin(-1)
        best = np.where(chosen, -np.inf, leaned).argmax(-1)
        rows = np.arange(tokens)
        wrong = leaned[rows, worst] <= leaned[rows, best]
        if not wrong.any():
            return bias
        move = np.bincount(worst[wrong], minlength=n) - np.bincount(best[wrong], minlength=n)
        bias = bias + step * move / max(1, np.abs(move).max())
        step *= 0.99
    return None


# ---- gates ----


def _gate_faults(scene: Scene, good: float) -> Iterator[Fault]:
    path, layer = f"layers.{scene.layer}.moe.", scene.layer
    other = scene.other
    own = _inputs(scene, path, scene.suspect)
    theirs = _inputs(scene, path, other) or own
    if own is None or theirs is None:
        yield from _gates_alone(scene)
        return
    reference = rule_of(theirs, scene.twin, good) or GATE_RULES.get(scene.given.settings.gate_rule)
    for rule in _rules(own, scene.wanted):
        if reference is not None and rule == reference:
            continue
        biased = _differ(own[1], softmax_like(own)) if rule.base == "scores" else False
        kind, words = named(reference, rule, biased)
        yield Fault(kind, f"gates of layer {layer}: {words}", {path + "gate_rule": Is(rule)} if
                    scene.has(path + "gate_rule") else {scene.path: c.Gates(rule)})  # fmt: skip
    yield Fault("softmax_of_chosen", f"gates of layer {layer}: softmax over the chosen probabilities, not logits",
                {scene.path: c.SoftmaxOfScores()})  # fmt: skip
    yield from _gates_alone(scene)
    yield from _fitted_bias(scene, own)
    yield from _warm(scene, path, own, reference, good)


def _inputs(scene: Scene, path: str, trace: Any) -> tuple[Array, Array, Array] | None:
    """(logits, scores, ids) of a run; scores may be missing and are then the softmax."""
    logits, ids = trace.get(path + "router_logits"), trace.get(path + "expert_ids")
    if logits is None:
        logits = scene.given.known(path + "router_logits", scene.rows)
    else:
        logits = np.asarray(logits[scene.rows], np.float64)
    if logits is None or ids is None:
        return None
    scores = trace.get(path + "scores")
    scores = SCORE_RULES["softmax"](logits) if scores is None else np.asarray(scores[scene.rows], np.float64)
    return logits, scores, np.asarray(ids[scene.rows]).astype(int).clip(0)


def _rules(inputs: tuple[Array, Array, Array], wanted: Array) -> Iterator[GateRule]:
    """All rules, those with factor 1 first; else with the factor that fits best, written with few digits."""
    bases, norms = ("softmax", "logits", "sigmoid", "scores"), ("none", "sum", "root")
    rules = [GateRule(base, norm) for base in bases for norm in norms]
    yield from rules
    for rule in rules:
        with np.errstate(all="ignore"):
            made = rule(*inputs)
        if not np.isfinite(made).all() or not np.square(made).sum():
            continue
        exact = float((made * wanted).sum() / np.square(made).sum())
        short = float(f"{exact:.3g}")
        factor = short if abs(short - exact) < 1e-5 * abs(exact) else exact
        if abs(factor - 1) > 1e-6 and factor:
            yield GateRule(rule.base, rule.norm, factor)


def rule_of(inputs: tuple[Array, Array, Array], gates: Array, good: float) -> GateRule | None:
    """The simplest rule that gives these gates."""
    for rule in _rules(inputs, gates):
        with np.errstate(all="ignore"):
            if relative(rule(*inputs), gates) <= max(good, 1e-5):
                return rule
    return None


def softmax_like(inputs: tuple[Array, Array, Array]) -> Array:
    """The nearest un-biased scores to the recorded ones."""
    every = [SCORE_RULES["softmax"](inputs[0]), SCORE_RULES["sigmoid"](inputs[0])]
    return min(every, key=lambda table: _spread(inputs[1] - table))


def _differ(a: Array, b: Array) -> bool:
    return relative(a, b) > 1e-4


def named(mine: GateRule | None, found: GateRule, biased: bool) -> tuple[str, str]:
    """(kind, words) of gates made by `found` where they are made by `mine`."""
    words = told_rule(found) + (f" instead of {told_rule(mine)}" if mine else "")
    if found.base == "logits" and (mine is None or mine.base != "logits"):
        return "raw_logit_gates", words
    if biased and (mine is None or mine.base != "scores"):
        return "biased_gates", words.replace("scores", "scores with the correction bias in them", 1)
    if mine is None:
        return "unknown", words
    if {found.base, mine.base} == {"softmax", "sigmoid"}:
        return "score_rule", words
    if found.norm != mine.norm:
        return "missing_renormalisation", words
    if found.factor != mine.factor:
        return "scale_factor", f"{found.factor / mine.factor:.4g} times as large ({words})"
    return "score_rule", words


def told_rule(rule: GateRule) -> str:
    """A rule in words."""
    base = {"softmax": "softmax over all", "logits": "raw logits", "sigmoid": "sigmoid", "scores": "scores"}[rule.base]
    norm = {"none": "not renormalised", "sum": "renormalised over the chosen", "root": "over the root of their squares"}
    return f"{base}, {norm[rule.norm]}" + (f", times {rule.factor:g}" if rule.factor != 1 else "")


def _gates_alone(scene: Scene) -> Iterator[Fault]:
    """What the gates of both runs tell without any logits; compared in the order of the suspect's ids."""
    path, layer = f"layers.{scene.layer}.moe.", scene.layer
    ids = [trace.get(path + "expert_ids") for trace in (scene.suspect, scene.other)]
    if ids[0] is None or ids[1] is None or (np.asarray(ids[0])[scene.rows] != np.asarray(ids[1])[scene.rows]).any():
        return
    theirs, wanted = scene.twin, scene.wanted
    total = theirs.sum(-1, keepdims=True)
    for norm, kind in (("sum", "missing_renormalisation"), ("root", "missing_renormalisation")):
        by = total if norm == "sum" else np.sqrt(np.square(theirs).sum(-1, keepdims=True))
        if relative(theirs / by, theirs) > 1e-4:
            yield Fault(kind, f"gates of layer {layer} are {told_rule(GateRule('scores', norm))[8:]}",
                        {scene.path: c.OtherGates(norm)})  # fmt: skip
    if np.allclose(total, total.mean(), rtol=1e-4) and not np.allclose(w := wanted.sum(-1), w.mean(), rtol=1e-4):
        yield Fault("missing_renormalisation", f"gates of layer {layer} are not renormalised over the chosen",
                    {scene.path: c.OtherGates("loosened", tuple(wanted.sum(-1).tolist()))})  # fmt: skip
    k = wanted.shape[-1]
    yield Fault("gate_order", f"gates of layer {layer} stand in the reverse order of their experts",
                {scene.path: c.OtherGates("reversed")})  # fmt: skip
    yield Fault("gates_left_out", f"gates of layer {layer} are all 1", {scene.path: Through(v.ones)})
    yield Fault("gates_left_out", f"gates of layer {layer} are all 1/{k}", {scene.path: c.OtherGates("even")})


def _fitted_bias(scene: Scene, inputs: tuple[Array, Array, Array]) -> Iterator[Fault]:
    """A bias per expert in the gates, solved from them: g_i (s_j + b_j) = g_j (s_i + b_i), or g_i = s_i + b_i."""
    logits, _, ids = inputs
    n = logits.shape[-1]
    for base in ("sigmoid", "softmax", "logits"):
        chosen = np.take_along_axis(SCORE_RULES[base](logits), ids, -1)
        count = np.bincount(ids.ravel(), minlength=n)
        offset = np.bincount(ids.ravel(), weights=(scene.wanted - chosen).ravel(), minlength=n) / np.maximum(count, 1)
        yield Fault("biased_gates", f"gates of layer {scene.layer} are {base} with a bias per expert in them",
                    {scene.path: c.Gates(GateRule(base), tuple(offset.tolist()))})  # fmt: skip
        if ids.shape[1] < 2 or len(ids) * (ids.shape[1] - 1) < 2 * n:
            continue
        rows, right = [], []
        for slot in range(1, ids.shape[1]):
            row = np.zeros((len(ids), n))
            np.add.at(row, (np.arange(len(ids)), ids[:, slot]), scene.wanted[:, 0])
            np.add.at(row, (np.arange(len(ids)), ids[:, 0]), -scene.wanted[:, slot])
            rows.append(row)
            right.append(scene.wanted[:, slot] * chosen[:, 0] - scene.wanted[:, 0] * chosen[:, slot])
        bias = np.linalg.lstsq(np.concatenate(rows), np.concatenate(right), rcond=None)[0]
        if np.abs(bias).max() > 1e-6:
            yield Fault("biased_gates", f"gates of layer {scene.layer} are {base} with a bias per expert, renormalised",
                        {scene.path: c.Gates(GateRule(base, "sum"), tuple(bias.tolist()))})  # fmt: skip


def _warm(
    scene: Scene, path: str, inputs: tuple[Array, Array, Array], reference: GateRule | None, good: float
) -> Iterator[Fault]:
    """A constant factor on the logits before the softmax, found from ln(g_i / g_j) = c (z_i - z_j)."""
    logits, _, ids = inputs
    if ids.shape[1] < 2 or (scene.wanted <= 0).any():
        return
    z = np.take_along_axis(logits, ids, -1)
    gaps, logs = z[:, :1] - z[:, 1:], np.log(scene.wanted[:, :1] / scene.wanted[:, 1:])
    factor = float((gaps * logs).sum() / max(np.square(gaps).sum(), 1e-300))
    short = float(f"{factor:.4g}")
    factor = short if abs(short - factor) < 1e-4 * abs(factor) else factor
    if abs(factor - 1) < 1e-4 or relative(factor * gaps, logs) > 1e-2:
        return
    norm = reference.norm if reference is not None and reference.norm != "root" else "sum"
    for each in (norm, "sum", "none"):
        yield Fault("scale_factor", f"logits of layer {scene.layer} are multiplied by {factor:g} before the softmax",
                    {scene.path: c.Gates(GateRule("softmax", each), None, factor)})  # fmt: skip


def _gates_on_the_way(scene: Scene, point: str) -> Iterator[Fault]:
    """Gates were not recorded, or are not the ones that were applied."""
    layer = point.split(".")[1]
    path = f"layers.{layer}.moe."
    mine = GATE_RULES.get(scene.given.settings.gate_rule)
    for rule in (GateRule(base, norm) for base in ("softmax", "logits", "sigmoid") for norm in ("none", "sum")):
        if rule == mine:
            continue
        kind, words = named(mine, rule, False)
        made: Any = Is(rule) if point.endswith("gate_rule") else c.Applied(path, rule)
        yield Fault(kind, f"gates as applied in layer {layer}: {words}", {point: made})
    if point.endswith("applied_gates"):
        for norm in ("sum", "reversed", "even"):
            kind = {"sum": "missing_renormalisation", "reversed": "gate_order"}.get(norm, "gates_left_out")
            words = f"gates as applied in layer {layer} are {norm}"
            yield Fault(kind, words, {point: c.OtherGates(norm, on_value=True)})
        yield Fault("gates_left_out", f"outputs of experts of layer {layer} are added without gates",
                    {point: Through(v.ones)})  # fmt: skip


def _shared_gate_faults(point: str) -> Iterator[Fault]:
    layer = point.split(".")[1]
    if point.endswith("gate_rule"):
        yield Fault("shared_gate", f"the gate of the shared expert of layer {layer} lacks its sigmoid",
                    {point: Use(v.as_it_is)})  # fmt: skip
        yield Fault("shared_gate", f"the shared expert of layer {layer} has no gate", {point: Use(v.ones)})
        return
    words = f"the shared expert of layer {layer} is added without its gate"
    yield Fault("shared_gate", words, {point: Through(v.ones)})
    yield Fault("shared_gate", f"the shared expert of layer {layer} is left out", {point: Times(0.0)})
    words = f"the shared expert of layer {layer} is added by 1 - gate"
    yield Fault("shared_gate", words, {point: Through(v.one_minus)})
    raw = point.removesuffix("applied") + "gate"
    yield Fault("shared_gate", f"the gate of the shared expert of layer {layer} is applied twice",
                {point: c.Squared(raw)})  # fmt: skip


# ---- orders ----


def matched(wanted: Array, found: Array) -> Array | None:
    """For each column of `wanted` the column of `found` that it equals; None when some column equals none."""
    a, b = wanted.T, found.T
    distance = np.square(a[:, None, :] - b[None]).sum(-1) if a.size * len(b) < 2e7 else None
    if distance is None:
        distance = np.square(a).sum(1)[:, None] - 2 * a @ b.T + np.square(b).sum(1)[None]
    order = distance.argmin(1)
    least = np.sqrt(np.abs(np.take_along_axis(distance, order[:, None], 1)[:, 0]))
    size = np.sqrt(np.square(a).sum(1)).clip(1e-30)
    return order if (least / size).max() < 1e-3 else None


def told(order: Array, known: Collection[int] | None = None) -> str:
    """A permutation in words, shortly; `known`: the numbers of which it is known, None for all."""
    at = sorted(range(len(order)) if known is None else known)
    moved = np.flatnonzero(order != np.arange(len(order)))
    if len(moved) == 2 and order[moved[0]] == moved[1]:
        return f"{moved[0]} and {moved[1]} exchanged"
    text = sorted(range(len(order)), key=str)
    if len(order) > 10 and all(order[e] == text[e] for e in at):
        return "that of their numbers as text (0, 1, 10, 11 …)"
    if len(order) > 10 and all(order[e] == back for e, back in enumerate(np.argsort(text)) if e in at):
        return "that of their numbers as text, inverted"
    shown = ", ".join(f"{e}←{order[e]}" for e in moved[:6])
    return shown + (f" and {len(moved) - 6} more" if len(moved) > 6 else "")

