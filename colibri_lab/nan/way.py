"""What each tap is made of, and which of it was recorded: the roads on which a value that is not finite can travel.

A tap that was not recorded is looked through: what it was made of stands in its place.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from colibri_lab.nan.source import Source

__all__ = ["NAMED_EXPERTS", "Edge", "edges", "layer_paths", "own_experts", "stage_of", "stream"]

NAMED_EXPERTS = 8
"""Of a layer that are told apart; when more of them spoilt something, they are one."""

_PRODUCTS = ("attn.q", "attn.k", "attn.v")


@dataclass(frozen=True)
class Edge:
    """`path` is read. `element`: each value reads the value at its own place, else the whole row. `reach`: how many
    token rows back from its own it reads, its own included: 1 is its own alone, None all of them.
    """

    path: str
    element: bool = False
    reach: int | None = 1


def stream(layer: int) -> str:
    """The residual stream that enters a layer; of the layer after the last one: what the final norm reads."""
    return f"layers.{layer - 1}.output" if layer else "embed"


def layer_paths(source: Source, layer: int) -> Iterator[str]:
    """The taps of a layer in the order of the data's way; those of all its experts are `layers.{l}.moe.experts.*`."""
    prefix = f"layers.{layer}."
    yield from (prefix + name for name in ("attn.norm", *_PRODUCTS, "attn.weights", "attn.out"))
    if layer in source.trace.moe_layers:
        names: tuple[str, ...] = ("input", "router_logits", "scores", "gates", "experts.*", "shared.gate",
                                  "shared.output", "routed", "output")  # fmt: skip
        yield from (f"{prefix}moe.{name}" for name in names)
    else:
        yield from (prefix + "mlp.input", prefix + "mlp.output")
    yield prefix + "output"


def edges(source: Source, path: str, born: Collection[str] = ()) -> list[Edge]:
    """What a tap is made of, as far as it was recorded: each path once, with the widest way in which it is read. Taps
    in `born` count, recorded or not: something is known about them.
    """
    found: dict[str, Edge] = {}
    for made_of in _made_of(source, path, born):
        for edge in _recorded(source, made_of, born):
            old = found.get(edge.path)
            found[edge.path] = edge if old is None else _widest(old, edge)
    return list(found.values())


def _recorded(source: Source, edge: Edge, born: Collection[str]) -> Iterator[Edge]:
    if source.has(edge.path) or edge.path in born:
        yield edge
    if source.has(edge.path):
        return
    for behind in _made_of(source, edge.path, born):
        reach = None if edge.reach is None or behind.reach is None else edge.reach + behind.reach - 1
        yield from _recorded(source, Edge(behind.path, edge.element and behind.element, reach), born)


def _widest(a: Edge, b: Edge) -> Edge:
    reach = None if a.reach is None or b.reach is None else max(a.reach, b.reach)
    return Edge(a.path, a.element and b.element, reach)


def _made_of(source: Source, path: str, born: Collection[str]) -> list[Edge]:
    """What a tap is made of, recorded or not."""
    if path == "embed":
        return []
    if path in ("norm", "logits"):
        return [Edge(stream(len(source.trace.layers)) if path == "norm" else "norm")]
    number, name = path.removeprefix("layers.").split(".", 1)
    layer, here = int(number), f"layers.{number}."
    if name == "output":
        moe = layer in source.trace.moe_layers
        block = here + ("moe.output" if moe else "mlp.output")
        return [Edge(part, element=True) for part in (stream(layer), here + "attn.out", block)]
    if name in ("moe.input", "mlp.input"):
        return [Edge(stream(layer)), Edge(here + "attn.out")]
    if name == "attn.out":
        seen = source.window(layer)
        own = [Edge(here + "attn.q")]
        if source.has(here + "attn.weights") or here + "attn.weights" in born:
            own.append(Edge(here + "attn.weights"))
        return [Edge(here + "attn.v", reach=seen), Edge(here + "attn.k", reach=seen), *own]
    if name == "attn.weights":
        return [Edge(here + "attn.q"), Edge(here + "attn.k", reach=source.window(layer))]
    if name == "moe.routed":
        lasts = list(own_experts(source, layer, born).values())
        named = lasts if len(lasts) <= NAMED_EXPERTS else []
        single = [Edge(last, element=last.endswith(".output")) for last in named]
        return [*single, Edge(here + "moe.experts.*.output", element=True), Edge(here + "moe.gates")]
    if name == "moe.output":
        if not _has_shared(source, here):
            return [Edge(here + "moe.routed", element=True)]
        return [
            Edge(here + "moe.routed", element=True), Edge(here + "moe.shared.output", element=True),
            Edge(here + "moe.shared.gate"),
        ]  # fmt: skip
    row = {
        "attn.norm": stream(layer), **{product: here + "attn.norm" for product in _PRODUCTS},
        "moe.router_logits": here + "moe.input", "moe.scores": here + "moe.router_logits",
        "moe.gates": here + "moe.scores", "moe.experts.*.output": here + "moe.input",
        "moe.shared.gate": here + "moe.input", "moe.shared.output": here + "moe.input",
        "mlp.output": here + "mlp.input",
    }  # fmt: skip
    return [Edge(row[name])]


def own_experts(source: Source, layer: int, born: Collection[str]) -> dict[int, str]:
    """The experts of a layer in which something was born, each with its last tap of which anything is known."""
    start = f"layers.{layer}.moe.experts."
    experts = sorted({int(path.split(".")[4]) for path in born if re.match(re.escape(start) + r"\d", path)})
    taps = ("output", "hidden", "up", "gate", "input")
    return {
        e: next(path for tap in taps if source.has(path := f"{start}{e}.{tap}") or path in born) for e in experts
    }  # fmt: skip


def _has_shared(source: Source, here: str) -> bool:
    return source.has(here + "moe.shared.output")


_STAGES = {
    "attn": "attention", "moe.shared": "shared", "moe.experts": "expert", "moe.routed": "aggregator",
    "moe.output": "aggregator", "moe": "router", "mlp": "mlp", "output": "residual",
}  # fmt: skip


def stage_of(path: str) -> str:
    """The stage that writes a tap."""
    if not path.startswith("layers."):
        return path
    name = path.split(".", 2)[2]
    return next(stage for start, stage in _STAGES.items() if name.startswith(start))
