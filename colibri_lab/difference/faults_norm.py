"""Faults of the norms: another epsilon, in another place, the weight left out, the norm over another width."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from colibri_lab.difference import changes as c
from colibri_lab.difference import variants as v
from colibri_lab.difference.changes import Fault, Is, Use, Weight
from colibri_lab.difference.maths import Change
from colibri_lab.difference.scene import Scene, fitted

__all__ = ["norm_faults"]

_EPSILONS = (0.0, 1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0)


def norm_faults(scene: Scene, good: float) -> Iterator[Fault]:
    """Every norm that a replay passes, the nearest to the divergence last."""
    changes: dict[str, Change]
    every = scene.ending(".eps")
    if len(every) > 1:
        yield from _all_at_once(scene, every, good)
    if scene.given.lacking and scene.path.endswith((".attn.norm", ".moe.input", ".mlp.input", "norm")):
        yield from _rows_alone(scene)
    for point in every:
        name = point.removesuffix(".eps")
        plain = scene.given.settings.eps
        where = place(name)

        def error(eps: float, point: str = point) -> float:
            return scene.left_over({point: Is(eps)})

        eps, _ = fitted(error, [e for e in (*_EPSILONS, plain / 10, plain * 10) if e != plain], good)
        yield Fault("norm_epsilon", f"epsilon {eps:g} instead of {plain:g} in {where}", {point: Is(eps)})
        for rule, words in (
            (v.eps_outside, "added outside the square root"),
            (v.eps_outside_mean, "divided by the width with the sum"),
            (v.largest_of_eps, "as a least mean square instead of added"),
        ):
            yield Fault("norm_epsilon", f"epsilon {plain:g} {words} in {where}", {f"{name}.rule": Use(rule)})
            for other in (1e-6, 1e-5, 1e-3):
                if other != plain:
                    changes = {f"{name}.rule": Use(rule), point: Is(other)}
                    yield Fault("norm_epsilon", f"epsilon {other:g} {words} in {where}", changes)
        for rule, words in (
            (v.no_norm, f"{where} is left out"),
            (v.without_weight, f"the weight of {where} is left out"),
            (v.weight_only, f"{where} multiplies by its weight and divides by nothing"),
            (v.weight_plus_one, f"{where} multiplies by 1 + weight"),
            (v.layer_norm, f"{where} takes the mean off first (LayerNorm for RMSNorm)"),
            (v.over_all_heads, f"{where} is taken over all heads instead of each"),
        ):
            yield Fault("norm_missing", words, {f"{name}.rule": Use(rule)})
        yield Fault("scale_factor", f"{where} divides by the root of the sum, not of the mean", {
            f"{name}.rule": Use(v.l2_norm)
        })  # fmt: skip
        for twin in _others(scene, name):
            yield Fault("other_weight", f"{where} has the weight of {place(twin)}", {f"{name}.weight": Weight(twin)})
        if scene.given.settings.qk_norm == "full" and name.endswith(("q_norm", "k_norm")):
            yield Fault("norm_missing", f"{where} is taken over each head instead of all", {
                f"{name}.rule": c.PerHead(scene.given.settings.head_dim or 1)
            })  # fmt: skip


def _all_at_once(scene: Scene, points: list[str], good: float) -> Iterator[Fault]:
    """The same other epsilon in every norm on the way."""
    plain = scene.given.settings.eps

    def error(eps: float) -> float:
        return scene.left_over({point: Is(eps) for point in points})

    eps, _ = fitted(error, [e for e in (*_EPSILONS, plain / 10, plain * 10) if e != plain], good)
    where = ", ".join(place(point.removesuffix(".eps")) for point in points)
    changes: dict[str, Change] = {point: Is(eps) for point in points}
    yield Fault("norm_epsilon", f"epsilon {eps:g} instead of {plain:g} in {where}", changes)


def _rows_alone(scene: Scene) -> Iterator[Fault]:
    """Neither weights nor what was normed: each row is a multiple of the other run's, each another one."""
    theirs = scene.twin
    factors = (scene.wanted * theirs).sum(-1) / np.square(theirs).sum(-1).clip(1e-300)
    if np.ptp(factors) > 1e-6 * np.abs(factors).max():
        words = f"every row of {scene.path} has a factor of its own ({factors.min():.4g} to {factors.max():.4g})"
        yield Fault("norm_epsilon", words, {scene.path: c.RowFactors(tuple(factors.tolist()))})


def _others(scene: Scene, name: str) -> list[str]:
    """Norm weights that could stand here by mistake."""
    twin = {"attn_norm": "moe_norm", "moe_norm": "attn_norm", "q_norm": "k_norm", "k_norm": "q_norm"}
    head, _, last = name.rpartition(".")
    found = [f"{head}.{twin[last]}"] if last in twin else []
    if scene.layer is not None:
        found += [f"layers.{n}.{name.split('.', 2)[2]}" for n in (scene.layer - 1, scene.layer + 1)
                  if name.startswith("layers.") and n in scene.suspect.layers]  # fmt: skip
    return found


def place(name: str) -> str:
    """A norm in words."""
    if name == "norm":
        return "the final norm"
    _, layer, rest = name.split(".", 2)
    words = {
        "attn_norm": "the norm before attention",
        "moe_norm": "the norm before the experts",
        "attn.q_norm": "the norm of q",
        "attn.k_norm": "the norm of k",
    }
    return f"{words.get(rest, rest)} of layer {layer}"
