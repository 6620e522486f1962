"""How places, numbers and formats are spelled in sentences about NaN, Inf and headroom."""

from __future__ import annotations

import math
import re

from colibri_lab.difference.taps import parse

__all__ = ["bits_left", "place", "shown", "stage_of", "tap_kind", "tap_words"]

_WORDS = {
    "embed": "embedding", "attn.norm": "attention norm", "attn.q": "attention q", "attn.k": "attention k",
    "attn.v": "attention v", "attn.scores": "attention scores", "attn.weights": "attention weights",
    "attn.context": "attention context", "attn.out": "attention output", "middle": "residual stream after attention",
    "moe.input": "norm before the experts", "moe.router_logits": "router logits", "moe.scores": "router scores",
    "moe.gates": "gates", "moe.experts.*.input": "expert input", "moe.experts.*.gate": "expert gate",
    "moe.experts.*.up": "expert up", "moe.experts.*.hidden": "expert hidden", "moe.experts.*.output": "expert output",
    "moe.shared.inner.gate": "shared expert gate", "moe.shared.inner.up": "shared expert up",
    "moe.shared.inner.hidden": "shared expert hidden", "moe.shared.output": "shared expert output",
    "moe.shared.gate.product": "product behind the gate of the shared expert",
    "moe.shared.gate": "gate of the shared expert", "moe.routed": "gated sum of the experts",
    "moe.output": "output of the block", "mlp.input": "norm before the dense network",
    "mlp.inner.gate": "dense gate", "mlp.inner.up": "dense up", "mlp.inner.hidden": "dense hidden",
    "mlp.output": "dense output", "output": "residual stream", "norm": "final norm", "logits": "logits",
}  # fmt: skip
_STAGES = {"attn": "attention", "middle": "router", "mlp": "mlp"}
_INSIDE = {"experts": "expert", "shared": "shared"}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\bexperts\.(\d+)\.")


def tap_kind(path: str) -> str:
    """A path without its layer and expert number: "moe.experts.*.hidden"."""
    match = _LAYER.fullmatch(path)
    return _EXPERT.sub("experts.*.", match[2] if match else path)


def stage_of(path: str) -> str:
    """The stage that makes a tap, or a point inside one; "" for a path that is neither."""
    tap = parse(path)
    if tap is not None:
        return tap.stage
    part = tap_kind(path).split(".")
    return _INSIDE.get(part[1], "") if part[0] == "moe" and len(part) > 1 else _STAGES.get(part[0], "")


def tap_words(path: str) -> str:
    """What a tap or point is called: "expert hidden"; a path that is not known stays as it is."""
    kind = tap_kind(path)
    name = kind.removesuffix(".product")
    known = _WORDS.get(kind) or (f"product behind {_WORDS[name]}" if name in _WORDS else kind)
    return known


def place(path: str) -> str:
    """The layer and the name: "layer 2, expert hidden"; with the number of an expert "layer 2, expert 5, hidden"."""
    match, expert = _LAYER.fullmatch(path), _EXPERT.search(path)
    words = tap_words(path)
    if expert is not None:
        words = f"expert {expert[1]}, {words.removeprefix('expert ')}"
    return f"layer {match[1]}, {words}" if match else words


def bits_left(bits: float) -> str:
    """ "0.9 bit", "1.6 bits", "−0.2 bits"."""
    if not math.isfinite(bits):
        return "all bits" if bits > 0 else "no bits"
    text = f"{bits:.1f}".replace("-", "−")
    return f"{text} bit{'' if 0 < bits < 1.05 else 's'}"


def shown(text: str) -> str:
    """A token's text between quotes as the views show it: a dot for a space at its ends, ↵ for a line break."""
    if not text:
        return ""
    front, back = len(text) - len(text.lstrip(" ")), len(text) - len(text.rstrip(" "))
    body = text.strip(" ")
    dotted = "·" * front + body + ("·" * back if body else "")
    return f"'{dotted.replace(chr(10), '↵')[:24]}'"
