"""The order of the taps in the data's way, and the stage each belongs to.

A comparison goes by one row per tap; the experts of a layer share one: "layers.2.moe.experts.*.output".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["AFTER", "BEFORE", "IN_LAYER", "Tap", "parse"]

BEFORE = {"embed": "embed"}
"""Taps before the layers, with their stages."""

IN_LAYER = {
    "attn.norm": "attention", "attn.q": "attention", "attn.k": "attention", "attn.v": "attention",
    "attn.weights": "attention", "attn.out": "attention",
    "moe.input": "router", "moe.router_logits": "router", "moe.scores": "router", "moe.expert_ids": "router",
    "moe.gates": "router",
    "moe.experts.*.input": "dispatcher", "moe.experts.*.gate": "expert", "moe.experts.*.up": "expert",
    "moe.experts.*.hidden": "expert", "moe.experts.*.output": "expert",
    "moe.shared.gate": "shared", "moe.shared.output": "shared",
    "moe.routed": "aggregator", "moe.output": "aggregator",
    "mlp.input": "mlp", "mlp.output": "mlp",
    "output": "residual",
}  # fmt: skip
"""Taps of a layer in the order in which they are computed, with their stages."""

AFTER = {"norm": "norm", "logits": "logits"}
"""Taps after the layers, with their stages."""

_PATH = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"moe\.(?:experts\.(?:\*|\d+)|dispatch)\.(input|gate|up|hidden|output)")
_ORDER = {kind: rank for rank, kind in enumerate((*BEFORE, *IN_LAYER, *AFTER))}


@dataclass(frozen=True)
class Tap:
    """A tap that can be compared. `layer` is −1 outside the layers; `kind` is the path without its layer."""

    path: str
    layer: int
    kind: str
    stage: str

    @property
    def rank(self) -> tuple[float, int]:
        """Sorts taps in the order in which their values are computed."""
        layer = float("inf") if self.kind in AFTER else float(self.layer)
        return layer, _ORDER[self.kind]

    @property
    def of_experts(self) -> bool:
        """Whether it has a row per (token, expert) and not one per token."""
        return self.kind.startswith("moe.experts.")

    @property
    def by_expert(self) -> bool:
        """Whether it is about experts by their numbers."""
        return self.of_experts or self.kind in ("moe.expert_ids", "moe.gates")

    @property
    def scaled(self) -> bool:
        """Whether a norm has just scaled it, or has in some family: its size is not an accident of its input."""
        return self.kind in ("attn.norm", "attn.q", "attn.k", "moe.input", "mlp.input", "norm")

    @property
    def stored(self) -> str:
        """The path under which a trace stores it: rows of experts are packed."""
        return self.path.replace(".experts.*.", ".dispatch.")


def parse(path: str) -> Tap | None:
    """The tap of a path as a trace stores it, or as a table names it; None for one that is not compared."""
    if path in BEFORE or path in AFTER:
        return Tap(path, -1, path, path)
    match = _PATH.fullmatch(path)
    if match is None:
        return None
    expert = _EXPERT.fullmatch(match[2])
    kind = f"moe.experts.*.{expert[1]}" if expert else match[2]
    if kind not in IN_LAYER:
        return None
    return Tap(f"layers.{int(match[1])}.{kind}", int(match[1]), kind, IN_LAYER[kind])
