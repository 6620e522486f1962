"""The points inside a pass, each as an operation over some token rows, made from what was recorded.

`Points.rows` gives what a point holds: as recorded where a tap keeps it, else computed by the engine's arithmetic from
what lies before it in the same layer. `Points.chain` lists the unrecorded points that lead to a tap.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.difference.formulas import Missing, frequencies_of
from colibri_lab.nan.causes_attention import Context, Heads, Scores, Softmax
from colibri_lab.nan.causes_base import Operation, Weight
from colibri_lab.nan.causes_products import Embed, Product
from colibri_lab.nan.causes_rows import Add, AddScaled, Copy, Gated, Gates, Norm, Routed, RouterScores, Sigmoid
from colibri_lab.nan.elementary import F32, softmax
from colibri_lab.nan.source import Source

__all__ = ["POINT_TAPS", "Points", "tap_of"]

Array = NDArray[Any]
Ints = NDArray[np.int64]

_POINT = re.compile(r"layers\.(\d+)\.(.+)")
_SHORT = re.compile(r"layers\.\d+\.(attn\.|mlp\.inner\.|mlp\.|moe\.shared\.inner\.|moe\.experts\.\d+\.|moe\.)?")
_EXPERT = re.compile(r"moe\.experts\.(\d+)\.(\w+)")

POINT_TAPS = {
    "attn.q.product": "attn.q", "attn.k.product": "attn.k", "attn.v.product": "attn.v",
    "attn.scores": "attn.weights", "attn.context": "attn.out",
    "moe.shared.inner.gate": "moe.shared.output", "moe.shared.inner.up": "moe.shared.output",
    "moe.shared.inner.hidden": "moe.shared.output", "moe.shared.gate.product": "moe.shared.gate",
    "mlp.inner.gate": "mlp.output", "mlp.inner.up": "mlp.output", "mlp.inner.hidden": "mlp.output",
}  # fmt: skip
"""The first tap behind a point of a layer that is no tap; `middle` lies before moe.input or mlp.input."""

_BY_LOGITS = ("softmax_of_chosen", "raw_logits")  # gate rules that read logits; models that have one choose by them too

NEED_WEIGHTS = "the weights: find(trace, model=path)"


def tap_of(point: str, moe_layers: Any) -> str:
    """The tap in which a point lies, or the first one behind it."""
    match = _POINT.fullmatch(point)
    if match is None:
        return point
    layer, name = match[1], match[2]
    if name == "middle":
        return f"layers.{layer}.{'moe' if int(layer) in moe_layers else 'mlp'}.input"
    return f"layers.{layer}.{POINT_TAPS.get(name, name)}"


class Points:
    """The points of one run. Raises `formulas.Missing`, whose message names what is needed, for what cannot be made."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._made: dict[tuple[str, bytes], Operation] = {}
        self._weights: dict[str, Weight] = {}

    # ---- values ----

    def rows(self, point: str, tokens: Ints) -> F32:
        """What a point holds for these token rows (ascending)."""
        stored = self._stored(point, tokens)
        return self.operation(point, tokens).value if stored is None else stored

    def _stored(self, point: str, tokens: Ints) -> F32 | None:
        expert = _expert_of(point)
        if expert is None:
            value = self.source.rows(point, tokens)
            return None if value is None else np.asarray(value, np.float32)
        kept = self.source.expert_rows(*expert)
        if kept is None or not np.isin(tokens, kept[0]).all():
            return None
        return np.asarray(kept[1][np.searchsorted(kept[0], tokens)], np.float32)

    def operation(self, point: str, tokens: Ints) -> Operation:
        """The operation that makes a point, over these rows."""
        key = point, tokens.tobytes()
        if key not in self._made:
            operation = self._build(point, tokens)
            operation.flush, operation.saturate = self.source.flushes, self.source.saturates(point)
            self._made[key] = operation
        return self._made[key]

    def weight(self, name: str) -> Weight:
        """A weight of the model."""
        if name not in self._weights:
            array = self.source.weight(name)
            if array is None:
                raise Missing(NEED_WEIGHTS if self.source.model is None else f"the weight {name}")
            self._weights[name] = Weight(name, array)
        return self._weights[name]

    def _bias(self, name: str) -> Weight | None:
        array = self.source.weight(name + ".bias")
        return None if array is None else Weight(name + ".bias", array)

    # ---- the way to a tap ----

    def chain(self, path: str) -> list[str]:
        """The points without a recorded tap that lead to `path`, in the order of the data's way, and `path` itself.

        The residual stream between attention and experts counts to the input of the experts, when that is recorded.
        """
        found: dict[str, None] = {}

        def visit(point: str) -> None:
            for before in self._before(point):
                if not self.source.has(before) and before not in found:
                    visit(before)
                    found[before] = None

        visit(path)
        middle = path.removesuffix(".output") + ".middle"
        taps = [path.removesuffix(".output") + tail for tail in (".moe.input", ".mlp.input")]
        if any(self.source.has(tap) for tap in taps):
            found.pop(middle, None)
        return [*found, path]

    def _before(self, point: str) -> Iterator[str]:
        """What the operation of a point reads in its own layer, as far as it can be computed there."""
        match = _POINT.fullmatch(point)
        if match is None:
            return
        prefix, name = f"layers.{match[1]}.", match[2]
        expert = _EXPERT.fullmatch(name)
        block = prefix + ("moe" if int(match[1]) in self.source.trace.moe_layers else "mlp")
        network = {
            "moe.shared.output": "moe.shared.inner.", "mlp.output": "mlp.inner.",
            "moe.shared.inner.hidden": "moe.shared.inner.", "mlp.inner.hidden": "mlp.inner.",
        }  # fmt: skip
        reads: tuple[str, ...] = ()
        if expert is not None:
            base = f"{prefix}moe.experts.{expert[1]}."
            inside = {"output": ("hidden",), "hidden": ("gate", "up"), "gate": ("input",), "up": ("input",)}
            yield from (base + tap for tap in inside.get(expert[2], ()))
            if expert[2] == "input":
                yield prefix + "moe.input"
        elif name in network:
            parts = ("hidden",) if name.endswith("output") else ("gate", "up")
            reads = tuple(network[name] + part for part in parts)
        elif name in ("attn.q", "attn.k", "attn.v"):
            reads = (name + ".product",)
        elif name in ("attn.q.product", "attn.k.product", "attn.v.product"):
            reads = ("attn.norm",)
        elif name == "output":
            yield prefix + "middle"
            yield block + ".output"
        else:
            reads = {
                "attn.weights": ("attn.scores",), "attn.context": ("attn.weights",), "attn.out": ("attn.context",),
                "middle": ("attn.out",), "moe.input": ("middle",), "mlp.input": ("middle",),
                "moe.router_logits": ("moe.input",), "moe.scores": ("moe.router_logits",), "moe.gates": ("moe.scores",),
                "moe.shared.gate": ("moe.shared.gate.product",), "moe.shared.gate.product": ("moe.input",),
                "moe.shared.inner.gate": ("moe.input",), "moe.shared.inner.up": ("moe.input",),
                "mlp.inner.gate": ("mlp.input",), "mlp.inner.up": ("mlp.input",),
                "moe.output": ("moe.routed",) + (("moe.shared.output", "moe.shared.gate") if self.has_shared(prefix)
                                                 else ()),
            }.get(name, ())  # fmt: skip
        yield from (prefix + each for each in reads)

    def has_shared(self, prefix: str) -> bool:
        """Whether a layer has a shared expert: from the model, else from what was recorded."""
        if self.source.model is not None:
            return self.source.weight(prefix + "moe.shared.gate") is not None
        return self.source.has(prefix + "moe.shared.output")

    # ---- operations ----

    def _build(self, point: str, tokens: Ints) -> Operation:
        match = _POINT.fullmatch(point)
        dtype = self.source.format(point)
        if point == "embed":
            ids, table = np.asarray(self.source.trace.ids, np.int64)[tokens], self.weight("embed")
            if ids.min() < 0 or ids.max() >= len(table.array):
                raise Missing("the token ids")
            return Embed(point, dtype, ids, table)
        if point == "norm":
            last = f"layers.{len(self.source.trace.layers) - 1}.output"
            return self._norm(point, "norm", self._need(last, tokens))
        if point == "logits":
            return self._product(point, "lm_head", "norm", self.rows("norm", tokens))
        if match is None:
            raise Missing(f"no operation makes '{point}'")
        layer, name = int(match[1]), match[2]
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            return self._of_expert(layer, int(expert[1]), expert[2], tokens)
        if name.startswith("attn."):
            return self._of_attention(layer, name.removeprefix("attn."), tokens)
        return self._of_block(layer, name, tokens)

    def _need(self, path: str, tokens: Ints) -> F32:
        """A recorded tap; the embedding can be looked up again."""
        stored = self._stored(path, tokens)
        if stored is None and path != "embed":
            raise Missing(path)
        return self.rows(path, tokens) if stored is None else stored

    def _residual(self, layer: int, tokens: Ints) -> F32:
        return self._need(f"layers.{layer - 1}.output" if layer else "embed", tokens)

    def _norm(self, point: str, weight: str, x: F32) -> Norm:
        if not self.source.known_config:
            raise Missing("the configuration (eps): find(trace, model=path)")
        words = f"{point.rpartition('.')[2]} = weight · x / sqrt(mean of x² + eps)"
        vector = self._fitting(weight, x)
        return Norm(point, words, self.source.format(point), x, vector, self.source.settings.eps)

    def _fitting(self, name: str, x: F32) -> Weight:
        """A weight whose rows are as long as those of x."""
        weight = self.weight(name)
        if weight.array.shape[-1] != x.shape[-1]:
            raise Missing(f"the weights of this run: {name} has rows of {weight.array.shape[-1]}, not {x.shape[-1]}")
        return weight

    def _product(self, point: str, weight: str, x_name: str, x: F32) -> Product:
        words = f"{_SHORT.sub('', point)} = {x_name} · weight {weight}"
        bias = self._bias(weight)
        words += "" if bias is None else " + bias"
        return Product(point, words, self.source.format(point), x, self._fitting(weight, x), bias, x_name,
                       self.source.accumulation(point))  # fmt: skip

    def _network(self, point: str, base: str, inner: str, part: str, x: Callable[[], F32], tokens: Ints) -> Operation:
        """A part of a gated network: weights under `base`, points under `inner`."""
        if part in ("gate", "up"):
            return self._product(point, f"{base}.{part}", "input", x())
        if part == "hidden":
            gate, up = (self.rows(f"{inner}.{each}", tokens) for each in ("gate", "up"))
            return Gated(point, self.source.format(point), gate, up)
        return self._product(point, f"{base}.down", "hidden", self.rows(f"{inner}.hidden", tokens))

    def _of_expert(self, layer: int, expert: int, part: str, tokens: Ints) -> Operation:
        base = f"layers.{layer}.moe.experts.{expert}"
        if part == "input":
            x = self.rows(f"layers.{layer}.moe.input", tokens)
            return Copy(f"{base}.input", "input = the token's row of moe.input", self.source.format(f"{base}.input"), x)
        return self._network(f"{base}.{part}", base, base, part, lambda: self.rows(base + ".input", tokens), tokens)

    def _of_attention(self, layer: int, name: str, tokens: Ints) -> Operation:
        path, source = f"layers.{layer}.attn.", self.source
        point, dtype = path + name, source.format(path + name)
        if name == "norm":
            return self._norm(point, f"layers.{layer}.attn_norm", self._residual(layer, tokens))
        if name.endswith(".product"):
            return self._product(point, path + name[0], "norm", self.rows(path + "norm", tokens))
        if name in ("q", "k", "v"):
            return self._heads(layer, name, dtype, tokens)
        if name == "out":
            context = self.rows(path + "context", tokens)
            return self._product(point, path + "o", "context", context.reshape(len(context), -1))
        seen = [source.visible(layer, int(token)) for token in tokens]
        every = np.arange(max(keys.stop for keys in seen))
        if name == "scores":
            q, k = self._need(path + "q", tokens), self._need(path + "k", every)
            return Scores(point, dtype, q, k, seen, source.accumulation(point))
        if name == "weights":
            return Softmax(point, dtype, self.rows(path + "scores", tokens), seen)
        if name == "context":
            weights = self.rows(path + "weights", tokens)[..., : len(every)]
            return Context(point, dtype, weights, self._need(path + "v", every), seen, source.accumulation(point))
        raise Missing(f"no operation makes '{point}'")

    def _heads(self, layer: int, which: str, dtype: str, tokens: Ints) -> Operation:
        point, settings = f"layers.{layer}.attn.{which}", self.source.settings
        made = self.rows(point + ".product", tokens)
        if settings.head_dim is None or not self.source.known_config:
            raise Missing("the configuration (head_dim, rope): find(trace, model=path)")
        norm = None
        if which != "v" and settings.qk_norm != "none":
            norm = self.weight(point + "_norm"), settings.eps, settings.qk_norm == "head"
        angles, grown = None, 1.0
        if which != "v":
            frequencies, grown = frequencies_of(settings.rope, settings.head_dim)
            with np.errstate(all="ignore"):
                angles = tokens.astype(np.float32)[:, None] * frequencies.astype(np.float32)
        return Heads(point, dtype, made, settings.head_dim, norm, settings.clip, angles, grown)

    def _of_block(self, layer: int, name: str, tokens: Ints) -> Operation:
        prefix, source = f"layers.{layer}.", self.source
        point, dtype = prefix + name, source.format(prefix + name)

        def get(tap: str) -> F32:
            return self.rows(prefix + tap, tokens)

        if name == "middle":
            return Add(point, "middle = stream + attn.out", dtype, self._residual(layer, tokens), get("attn.out"),
                       ("stream", "attn.out"))  # fmt: skip
        if name in ("moe.input", "mlp.input"):
            return self._norm(point, prefix + "moe_norm", get("middle"))
        if name == "output":
            block = "moe.output" if layer in source.trace.moe_layers else "mlp.output"
            return Add(point, f"output = middle + {block}", dtype, get("middle"), get(block), ("middle", block))
        network = "mlp" if name.startswith("mlp.") else "moe.shared"
        inner = f"{network}.inner"
        if name == f"{network}.output" or name.startswith(inner):
            x = "mlp.input" if network == "mlp" else "moe.input"
            part = name.rpartition(".")[2]
            return self._network(point, prefix + network, prefix + inner, part, lambda: get(x), tokens)
        return self._of_router(layer, name, dtype, tokens)

    def _of_router(self, layer: int, name: str, dtype: str, tokens: Ints) -> Operation:
        prefix, source = f"layers.{layer}.", self.source
        point = prefix + name

        def get(tap: str) -> F32:
            return self.rows(prefix + tap, tokens)

        by_logits = str(source.config.get("gate_rule") or source.settings.gate_rule) in _BY_LOGITS
        if name == "moe.router_logits":
            return self._product(point, prefix + "moe.router", "moe.input", get("moe.input"))
        if name == "moe.scores":
            logits = get("moe.router_logits")
            return Copy(point, "scores = logits", dtype, logits) if by_logits else RouterScores(
                point, "scores = softmax of the logits", dtype, logits)  # fmt: skip
        if name == "moe.gates":
            rule, ids = source.settings.gate_rule, self._ids(layer, tokens)
            if rule in _BY_LOGITS:
                table = get("moe.router_logits")
            else:
                table = softmax(get("moe.router_logits")) if by_logits else get("moe.scores")
            return Gates(point, dtype, table, ids, rule)
        if name == "moe.shared.gate.product":
            return self._product(point, prefix + "moe.shared_gate", "moe.input", get("moe.input"))
        if name == "moe.shared.gate":
            return Sigmoid(point, "shared gate = 1 / (1 + exp(−product))", dtype, get("moe.shared.gate.product"))
        if name == "moe.routed":
            ids = self._ids(layer, tokens)
            outputs = self._outputs(layer, ids, tokens)
            return Routed(point, dtype, get("moe.gates"), outputs, ids, source.accumulation(point))
        if name == "moe.output":
            if not self.has_shared(prefix):
                return Copy(point, "output = routed", dtype, get("moe.routed"))
            return AddScaled(point, dtype, get("moe.routed"), get("moe.shared.gate"), get("moe.shared.output"),
                             source.accumulation(point))  # fmt: skip
        raise Missing(f"no operation makes '{point}'")

    def _ids(self, layer: int, tokens: Ints) -> Ints:
        path = f"layers.{layer}.moe.expert_ids"
        ids = self.source.rows(path, tokens)
        if ids is None:
            raise Missing(path)
        return np.asarray(ids, np.int64)

    def _outputs(self, layer: int, ids: Ints, tokens: Ints) -> F32:
        """(rows, k, H): the output of each chosen expert, 0 where a slot is empty."""
        out: F32 | None = None
        for expert in np.unique(ids[ids >= 0]).tolist():
            row, slot = np.nonzero(ids == expert)
            order = np.argsort(row, kind="stable")
            row, slot = row[order], slot[order]
            made = self.rows(f"layers.{layer}.moe.experts.{expert}.output", tokens[row])
            if out is None:
                out = np.zeros((*ids.shape, made.shape[1]), np.float32)
            out[row, slot] = made
        if out is None:
            raise Missing(f"an expert in layers.{layer}.moe.expert_ids")
        return out


def _expert_of(point: str) -> tuple[int, int, str] | None:
    """(layer, expert, tap) of a point inside an expert."""
    match = _POINT.fullmatch(point)
    expert = _EXPERT.fullmatch(match[2]) if match is not None else None
    return None if match is None or expert is None else (int(match[1]), int(expert[1]), expert[2])
