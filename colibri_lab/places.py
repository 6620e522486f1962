"""Places of a walk through a pass: the stages in their order, which tap each one writes, and which stages still read
it. Pure functions of the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from colibri_lab.config import Config

__all__ = ["ENDS", "STAGES", "Place", "Where", "in_layer", "readers", "writer"]

STAGES = (
    "embed", "attention", "router", "dispatcher", "expert", "shared", "aggregator", "mlp", "residual", "norm", "logits",
)  # fmt: skip
"""The stages of a pass in their order; embed, norm and logits stand outside the layers."""

ENDS = {
    "stage": frozenset(STAGES),
    "expert": frozenset({"expert"}),
    "layer": frozenset({"residual", "logits"}),
    "token": frozenset({"logits"}),
}
"""The stages that complete a unit of walking."""


class Place(NamedTuple):
    """A stage that was or will be run; layer and expert are −1 where there is none."""

    stage: str
    layer: int = -1
    expert: int = -1

    @property
    def rank(self) -> tuple[float, int, int]:
        """Sorts the places of a pass in the order in which they are run."""
        before_layers, after_layers = self.stage == "embed", self.stage in ("norm", "logits")
        layer = -1.0 if before_layers else float("inf") if after_layers else float(self.layer)
        return layer, STAGES.index(self.stage), self.expert

    def __str__(self) -> str:
        if self.expert >= 0:
            return f"expert {self.expert} of layer {self.layer}"
        return f"the {self.stage} of layer {self.layer}" if self.layer >= 0 else f"the stage {self.stage}"


@dataclass(frozen=True)
class Where:
    """Where a stepper stands: after which stage, and which token rows it is about.

    `tokens` are rows of the session: those that satisfied the condition which stopped the walk, else all of the pass
    (at an expert: those sent to it). `layer`, `stage` and `expert` are None where there is none. `reason` is empty,
    "condition", "breakpoint NAME" or "end".
    """

    pass_index: int
    tokens: tuple[int, ...]
    layer: int | None
    stage: str | None
    expert: int | None
    text: str
    reason: str = ""

    def __str__(self) -> str:
        if self.stage is None:
            return "before the first stage"
        place = Place(self.stage, -1 if self.layer is None else self.layer, -1 if self.expert is None else self.expert)
        some = f"token {self.tokens[0]}" if len(self.tokens) == 1 else f"{len(self.tokens)} tokens"
        why = f" ({self.reason})" if self.reason else ""
        return f"after {place}, pass {self.pass_index}, {some} {self.text!r:.60}{why}"


# What each stage of a layer leaves behind, and which later stages of the same layer read it. `block` is what follows
# attention: the router of a mixture of experts, the mlp of a dense layer.
_IN_LAYER: dict[str, tuple[str, tuple[str, ...]]] = {
    "attn.norm": ("attention", ()),
    "attn.q": ("attention", ()),
    "attn.k": ("attention", ()),  # and the attention of later passes: see readers()
    "attn.v": ("attention", ()),
    "attn.weights": ("attention", ()),
    "attn.out": ("attention", ("router", "mlp")),
    "moe.input": ("router", ("dispatcher", "shared")),
    "moe.router_logits": ("router", ()),
    "moe.scores": ("router", ()),
    "moe.expert_ids": ("router", ("dispatcher",)),
    "moe.gates": ("router", ("aggregator",)),
    "moe.dispatch.tokens": ("dispatcher", ()),
    "moe.dispatch.offsets": ("dispatcher", ()),
    "moe.dispatch.input": ("dispatcher", ()),
    "moe.dispatch.gate": ("aggregator", ()),  # complete when the last expert has run
    "moe.dispatch.up": ("aggregator", ()),
    "moe.dispatch.hidden": ("aggregator", ()),
    "moe.dispatch.output": ("aggregator", ()),
    "moe.experts.tokens": ("dispatcher", ()),
    "moe.experts.input": ("dispatcher", ("expert",)),
    "moe.experts.gate": ("expert", ()),
    "moe.experts.up": ("expert", ()),
    "moe.experts.hidden": ("expert", ()),
    "moe.experts.output": ("expert", ("aggregator",)),
    "moe.shared.output": ("shared", ("aggregator",)),
    "moe.shared.gate": ("shared", ("aggregator",)),
    "moe.routed": ("aggregator", ()),
    "moe.output": ("aggregator", ("residual",)),
    "mlp.input": ("mlp", ()),
    "mlp.output": ("mlp", ("residual",)),
}
_OF_ONE_EXPERT = "moe.experts."
_STREAM = ("attention", "router", "mlp")  # what a layer does with the residual stream that enters it


def in_layer(kind: str) -> str:
    """The name of a tap kind ("layers.{l}.moe.experts.{e}.input") without its numbers: "moe.experts.input"."""
    return kind.removeprefix("layers.{l}.").replace(".{e}", "")


def writer(name: str, layer: int, expert: int) -> Place:
    """The stage that writes a tap; `name` as `in_layer` gives it."""
    if name in ("embed", "norm", "logits"):
        return Place(name)
    if name == "output":
        return Place("residual", layer)
    stage, _ = _IN_LAYER[name]
    return Place(stage, layer, expert if stage == "expert" else -1)


def readers(name: str, layer: int, expert: int, config: Config) -> Iterator[Place]:
    """The stages of the same pass that read a tap once it is written, in order."""
    if name == "norm":
        yield Place("logits")
    elif name in ("embed", "output"):
        following = layer + 1 if name == "output" else 0
        if following == config.num_hidden_layers:
            yield Place("norm")
        else:
            yield from (Place(stage, following) for stage in _STREAM if _exists(stage, following, config))
    elif name == "moe.routed" and layer not in config.shared_layers:
        yield Place("residual", layer)  # what the block returns is the gated sum itself
    elif name in _IN_LAYER:
        for stage in _IN_LAYER[name][1]:
            if _exists(stage, layer, config):
                yield Place(stage, layer, expert if stage == "expert" else -1)


# For taps that only the stage that writes them reads: where to edit instead.
INSTEAD = {
    "attn.norm": "layers.{l}.attn.out", "attn.q": "layers.{l}.attn.out", "attn.weights": "layers.{l}.attn.out",
    "moe.router_logits": "layers.{l}.moe.expert_ids or layers.{l}.moe.gates, or use bias_router(), patch() or scale()",
    "moe.scores": "layers.{l}.moe.expert_ids, or use force() or bias_router()",
    "moe.dispatch.tokens": "layers.{l}.moe.expert_ids after the router, or use force()",
    "moe.dispatch.offsets": "layers.{l}.moe.expert_ids after the router, or use force()",
    "moe.dispatch.input": "layers.{l}.moe.experts.{e}.input of one expert",
    "moe.dispatch.gate": "layers.{l}.moe.experts.{e}.output of one expert",
    "moe.dispatch.up": "layers.{l}.moe.experts.{e}.output of one expert",
    "moe.dispatch.hidden": "layers.{l}.moe.experts.{e}.output of one expert",
    "moe.dispatch.output": "layers.{l}.moe.experts.{e}.output of one expert",
    "moe.experts.tokens": "layers.{l}.moe.expert_ids after the router, or use force()",
    "moe.experts.gate": "layers.{l}.moe.experts.{e}.output", "moe.experts.up": "layers.{l}.moe.experts.{e}.output",
    "moe.experts.hidden": "layers.{l}.moe.experts.{e}.output", "moe.routed": "layers.{l}.moe.output",
    "mlp.input": "layers.{l}.mlp.output", "logits": "norm",
}  # fmt: skip


def _exists(stage: str, layer: int, config: Config) -> bool:
    if stage == "shared":
        return layer in config.shared_layers
    if stage == "mlp":
        return layer not in config.moe_layers
    return stage != "router" or layer in config.moe_layers
