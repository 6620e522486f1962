"""One forward pass in float64 NumPy, tap by tap, in which every number on the way can be changed.

`Replay` computes a tap from what a trace holds before it, by the formulas of the architecture, and only as far back as
it must. Each weight, constant, function and value passes through `use(point, value)`; a fault is a change of some of
these points, and `passed` lists the points that a replay went through. A value is named like its tap, a weight
`{name}.weight` or `{name}.bias`, and then there are

    {norm}.eps .rule                   added to the mean square · rule(x, weight, eps)
    {product}.input                    what a product reads
    layers.{l}.attn.{q,k,v}.raw        product, bias, norm and clip done, not yet rotated [T, heads, head_dim]
    ….{q,k}.positions .frequencies .rotate      of the rotation: (T,) · (head_dim / 2,) · rotate(x, angles)
    layers.{l}.attn.{q,k,v}.read       as attention reads them, which are the taps
    layers.{l}.moe.outputs             outputs of an expert as they are added up
    layers.{l}.attn.scale .seen .kv_head .mixed     scale · seen(queries, keys) · kv head of each head · before o
    layers.{l}.middle                  residual stream between attention and experts (T, H)
    layers.{l}.{middle,output}.factors (on the stream, on the branch), 1 and 1
    layers.{l}.moe.score_rule .gate_rule            rule(logits) · rule(logits, scores, ids)
    {expert, shared, mlp}.act .gate.value .up.value .hidden     act(gate, up) becomes `hidden`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from colibri_lab.difference.formulas import (
    GATE_RULES,
    Missing,
    Seen,
    expert_of,
    frequencies_of,
    gated,
    rms_norm,
    rotate_halves,
    settings_of,
    sigmoid,
    softmax,
)
from colibri_lab.trace import Trace

__all__ = ["Change", "Given", "Replay", "rows_of"]

Array = NDArray[Any]
F64 = NDArray[np.float64]


class Given:
    """What a replay may start from: the taps of a trace before `target`, and the weights of a model, read as needed.

    `trace` is the run whose `target` is to be explained; `other` gives what it did not record; `model` (a lab.Model or
    None) gives weights; without it the configuration of `believed` (None: `trace`) counts. `common`: the tap paths that
    were compared before the target, the last one last.
    """

    def __init__(
        self, trace: Trace, other: Trace, target: str, model: Any = None, common: tuple[str, ...] = (),
        believed: Trace | None = None,
    ) -> None:  # fmt: skip
        self.trace, self.other, self.target, self.model = trace, other, target, model
        believed = trace if believed is None else believed
        config = believed.meta.get("config") or trace.meta.get("config") or other.meta.get("config") or {}
        config = config if model is None else model.config
        self.known_config = bool(config)
        self.settings = settings_of(config, believed)
        last = next((p for p in reversed(common) if p.startswith("layers.")), "layers.-1.")
        self._settled = int(last.split(".")[1]) - 1  # the residual stream after this layer is known to agree
        self._stored = [(each, frozenset(each)) for each in (trace, other)]
        self.lacking = ""  # why the target is the other run's value and not computed
        self._reference: Trace | None = None
        self._wide: dict[str, F64] = {}

    def known(self, path: str, rows: Array) -> F64 | None:
        """The tap at these token rows, or None when it is the target or nobody has it."""
        if path == self.target:
            return None
        for trace, paths in self._stored:
            if trace is not self.trace and not self._agreed(path):
                continue
            if path in paths and rows[-1] < trace[path].shape[0]:
                value = np.asarray(trace[path][rows], np.float64)
                if value.ndim == 2 and path.endswith((".attn.q", ".attn.k", ".attn.v")) and self.settings.head_dim:
                    value = value.reshape(len(value), -1, self.settings.head_dim)
                return value
        return self._residual(path, rows)

    def expert_rows(self, layer: int, expert: int, tap: str, tokens: Array) -> F64 | None:
        """Rows of an expert's tap for these tokens, when recorded for all of them."""
        if expert_of(self.target) == (layer, str(expert), tap) or expert_of(self.target) == (layer, "*", tap):
            return None
        path = f"layers.{layer}.moe.experts"
        for trace in (self.trace, self.other) if self._agreed(path) else (self.trace,):
            rows = rows_of(trace, layer, expert, tap)
            if rows is not None and np.isin(tokens, rows[0]).all():
                return rows[1][np.searchsorted(rows[0], tokens)].astype(np.float64)
        return None

    def weight(self, name: str) -> F64 | None:
        """A weight widened to float64; None for one that the model does not have (a bias).

        Raises Missing without a model.
        """
        if self.model is None:
            if name.endswith(".bias"):
                return None
            raise Missing(f"needs the weights ({name}): pass model=")
        if name not in self._wide:
            if name not in self.model.weights:
                if name == "lm_head":
                    return self.weight("embed")
                if name.endswith(".bias"):
                    return None
                raise Missing(f"the model has no weight '{name}'")
            if len(self._wide) > 96:  # of the largest models a few experts, not a layer
                self._wide.clear()
            self._wide[name] = np.asarray(self.model.weights[name]).astype(np.float64)
        return self._wide[name]

    def _agreed(self, path: str) -> bool:
        """Whether the other run's value may stand in: in layers that are behind, and where nothing can be computed."""
        return self.model is None or (path.startswith("layers.") and int(path.split(".")[1]) <= self._settled)

    def _residual(self, path: str, rows: Array) -> F64 | None:
        """The residual stream of a run of the model itself, where the two traces are known to agree with it."""
        if self._settled < 0 or path != f"layers.{self._settled}.output" or not hasattr(self.model, "session"):
            return None
        if self._reference is None:
            tokens = max(int(rows[-1]) + 1, 1)
            session = self.model.session(capture=["layers.*.output"], max_tokens=tokens)
            session.feed(self.trace.ids[:tokens], progress=False)
            self._reference = session.trace()
        array = self._reference.get(path)
        return None if array is None or rows[-1] >= len(array) else np.asarray(array[rows], np.float64)


def rows_of(trace: Trace, layer: int, expert: int, tap: str) -> tuple[Array, Array] | None:
    """(tokens ascending, rows) of an expert's tap over all passes, or None when it was not recorded."""
    prefix = f"layers.{layer}.moe.dispatch."
    if any(prefix + part not in trace for part in ("tokens", "offsets", tap)):
        return None
    spans = trace[prefix + "offsets"]
    where = np.concatenate([np.arange(row[expert], row[expert + 1]) for row in spans] or [np.empty(0, np.int64)])
    tokens = trace[prefix + "tokens"][where.astype(np.intp)]
    order = np.argsort(tokens, kind="stable")
    return tokens[order], trace[prefix + tap][where.astype(np.intp)[order]]


Change = Callable[[Any, "Replay"], Any]


class Replay:
    """Taps at the token rows `rows` (ascending), computed from `given` with some points changed."""

    def __init__(
        self, given: Given, rows: Array, changes: Mapping[str, Change] | None = None,
        passed: dict[str, None] | None = None, base: Replay | None = None,
    ) -> None:  # fmt: skip
        """`base`: a replay at the same rows without changes; its taps serve again where no change lies before them."""
        self.given, self.rows, self.changes = given, np.asarray(rows, np.intp), dict(changes or {})
        self.passed: dict[str, None] = {} if passed is None else passed
        self._base = base
        self._taps: dict[str, F64] = {}
        self._before: dict[str, frozenset[str]] = {}  # the points that each computed tap went through
        self._open: list[set[str]] = [set()]
        self._whole: Replay | None = None

    def use(self, point: str, value: Any) -> Any:
        """Every number goes through here: changed when a fault says so."""
        self.passed[point] = None
        self._open[-1].add(point)
        change = self.changes.get(point)
        return value if change is None else change(value, self)

    def get(self, path: str) -> F64:
        """A tap, from the trace when it holds it and it is not the target, else computed."""
        if path not in self._before:
            again = self._again(path)
            if again is None:
                self._open.append(set())
                value = self.given.known(path, self.rows)
                self._taps[path] = self.use(path, self._made(path)) if value is None else value
                self._before[path] = frozenset(self._open.pop())
            else:
                self._taps[path], self._before[path] = again
        self._open[-1] |= self._before[path]
        return self._taps[path]

    def _again(self, path: str) -> tuple[F64, frozenset[str]] | None:
        """The base's value, when none of the changes lies before it."""
        base = self._base
        if base is None or path not in base._before or not base._before[path].isdisjoint(self.changes):
            return None
        return base._taps[path], base._before[path]

    def _made(self, path: str) -> F64:
        """By the formula; the target of which the weights are missing is what the other run has."""
        try:
            return self._compute(path)
        except Missing as missing:
            twin = self.given.other.get(path) if path == self.given.target else None
            if twin is None or self.rows[-1] >= twin.shape[0]:
                raise
            self.given.lacking = str(missing)
            return np.asarray(twin[self.rows], np.float64)

    def weight(self, name: str) -> F64 | None:
        """A weight as the changed pass uses it."""
        plain = self.given.weight(name)
        return None if plain is None else self.use(name if name.endswith(".bias") else name + ".weight", plain)

    @property
    def whole(self) -> Replay:
        """The same pass at all rows up to the last of these: keys and values of attention."""
        every = np.arange(self.rows[-1] + 1)
        if len(every) == len(self.rows):
            return self
        if self._whole is None:
            base = self._base._whole if self._base is not None else None
            self._whole = Replay(self.given, every, self.changes, self.passed, base)
        return self._whole

    def _whole_get(self, path: str) -> F64:
        value = self.whole.get(path)
        self._open[-1] |= self.whole._before[path]
        return value

    def _compute(self, path: str) -> F64:
        if path == "embed":
            return cast(F64, self._need("embed")[np.asarray(self.given.trace.ids)[self.rows]])
        if path == "norm":
            if not self.given.trace.layers:
                raise Missing("needs the layers, which the recording does not say: open it with config=")
            return self._norm("norm", self.get(f"layers.{len(self.given.trace.layers) - 1}.output"))
        if path == "logits":
            return self._linear("lm_head", self.get("norm"))
        _, number, tap = path.split(".", 2)
        layer, prefix = int(number), f"layers.{number}."
        if tap == "attn.norm":
            return self._norm(prefix + "attn_norm", self._residual(layer))
        if tap in ("attn.q", "attn.k", "attn.v"):
            return self._heads(layer, tap[-1])
        if tap == "attn.weights":
            return self._attention_weights(layer)
        if tap == "attn.out":
            return self._attention_out(layer)
        if tap == "middle":
            return self._joined(prefix + "middle", self._residual(layer), self.get(prefix + "attn.out"))
        if tap in ("moe.input", "mlp.input"):
            return self._norm(prefix + "moe_norm", self.get(prefix + "middle"))
        if tap == "mlp.output":
            return self._mlp(prefix + "mlp", self.get(prefix + "mlp.input"))["output"]
        if tap == "output":
            block = "moe.output" if layer in self.given.trace.moe_layers else "mlp.output"
            return self._joined(prefix + "output", self.get(prefix + "middle"), self.get(prefix + block))
        return self._moe(layer, tap.removeprefix("moe."))

    def _joined(self, path: str, stream: F64, branch: F64) -> F64:
        kept, added = self.use(path + ".factors", (1.0, 1.0))
        return cast(F64, kept * stream + added * branch)

    def _residual(self, layer: int) -> F64:
        return self.get(f"layers.{layer - 1}.output" if layer else "embed")

    def _need(self, name: str) -> F64:
        weight = self.weight(name)
        assert weight is not None
        return weight

    def _linear(self, name: str, x: F64) -> F64:
        y = self.use(name + ".input", x) @ self._need(name).T
        bias = self.weight(name + ".bias")
        return cast(F64, y if bias is None else y + bias)

    def _norm(self, name: str, x: F64) -> F64:
        """RMSNorm; without a model its weight is solved from the other run, whose constants are taken to be right."""
        x, plain = self.use(name + ".input", x), self.given.settings.eps
        try:
            weight = self._need(name)
        except Missing:
            weight = self.use(name + ".weight", self._norm_weight(name, x, plain))
        rule, eps = self.use(name + ".rule", rms_norm), self.use(name + ".eps", plain)
        return cast(F64, rule(x, weight, eps))

    def _norm_weight(self, name: str, x: F64, eps: float) -> F64:
        tap = {"attn_norm": "attn.norm", "moe_norm": "moe.input", "norm": "norm"}.get(name.rpartition(".")[2])
        path = f"{name.rpartition('.')[0]}.{tap}".lstrip(".")
        for trace in (self.given.other, self.given.trace):
            if tap and self.given.known_config and trace.get(path) is not None:
                made, unit = np.asarray(trace[path][self.rows], np.float64), rms_norm(x, np.ones(1), eps)
                return cast(F64, (made * unit).sum(0) / np.square(unit).sum(0).clip(1e-300))
        raise Missing(f"needs the weights ({name}): pass model=")

    def _heads(self, layer: int, which: str) -> F64:
        """q, k or v by head; q and k normed where the family does it, and rotated."""
        point = f"layers.{layer}.attn.{which}"
        try:
            raw = self._raw_heads(layer, which)
        except Missing:
            raw = self._unrotated(point)
        raw = self.use(point + ".raw", raw)
        if which == "v":
            return cast(F64, raw)
        frequencies, grown = self._frequencies(raw)
        places = self.use(point + ".positions", self.rows)
        turns = self.use(point + ".frequencies", frequencies)
        angles = (np.asarray(places, np.float32)[:, None] * np.asarray(turns, np.float32)).astype(np.float64)
        return cast(F64, self.use(point + ".rotate", rotate_halves)(raw, angles) * grown)

    def _frequencies(self, heads: F64) -> tuple[F64, float]:
        if not self.given.known_config:
            raise Missing("needs a configuration (rope): pass model=")
        return frequencies_of(self.given.settings.rope, heads.shape[-1])

    def _raw_heads(self, layer: int, which: str) -> F64:
        name, settings = f"layers.{layer}.attn.{which}", self.given.settings
        y, width = self._linear(name, self.get(f"layers.{layer}.attn.norm")), settings.head_dim
        assert width is not None
        if which != "v" and settings.qk_norm == "full":
            y = self._norm(name + "_norm", y)
        if settings.clip is not None:
            y = np.clip(y, -settings.clip, settings.clip)
        heads = y.reshape(len(y), -1, width)
        return self._norm(name + "_norm", heads) if which != "v" and settings.qk_norm == "head" else heads

    def _unrotated(self, path: str) -> F64:
        """Without a model: the other run's tap turned back by the configuration's angles."""
        tap = self.given.other.get(path)
        if tap is None:
            raise Missing(f"needs the weights ({path}): pass model=")
        value = np.asarray(tap[self.rows], np.float64)
        if path.endswith(".v"):
            return value
        frequencies, grown = self._frequencies(value)
        angles = (self.rows.astype(np.float32)[:, None] * frequencies.astype(np.float32)).astype(np.float64)
        return rotate_halves(value, -angles) / grown

    def _attention_weights(self, layer: int) -> F64:
        """(heads, rows, keys) after the softmax."""
        path = f"layers.{layer}.attn."
        q = self.use(path + "q.read", self.get(path + "q"))
        k = self.use(path + "k.read", self._whole_get(path + "k"))
        scale = self.use(path + "scale", 1 / math.sqrt(q.shape[-1]))
        window = self.given.settings.windows[layer] if layer < len(self.given.settings.windows) else None
        seen = self.use(path + "seen", Seen(window))(self.rows[:, None], np.arange(len(k))[None])
        mates = self.use(path + "kv_head", np.arange(q.shape[1]) * k.shape[1] // q.shape[1])
        scores = np.einsum("thd,shd->hts", q, k[:, mates], optimize=True) * scale
        weights = softmax(np.where(seen, scores, -np.inf))
        return np.nan_to_num(weights)  # a row that sees nothing

    def _attention_out(self, layer: int) -> F64:
        path = f"layers.{layer}.attn."
        # the tap "weights" is (heads, T, S): its rows are not tokens, so it is always computed
        if path + "weights" not in self._taps:
            self._taps[path + "weights"] = self.use(path + "weights", self._attention_weights(layer))
        weights, v = self._taps[path + "weights"], self.use(path + "v.read", self._whole_get(path + "v"))
        mates = np.arange(len(weights)) * v.shape[1] // len(weights)
        mates = self.use(path + "kv_head", mates)
        mixed = np.einsum("hts,shd->thd", weights, v[:, mates], optimize=True)
        mixed = self.use(path + "mixed", mixed)
        return self._linear(path + "o", mixed.reshape(len(mixed), -1))

    def _mlp(self, name: str, x: F64, known: Callable[[str], F64 | None] = lambda tap: None) -> dict[str, F64]:
        """A gated MLP; `known` gives recorded values by tap."""
        out = {"input": x}
        for tap in ("gate", "up", "hidden", "output"):
            value = known(tap)
            if value is None and tap in ("gate", "up"):
                value = self.use(f"{name}.{tap}.value", self._linear(f"{name}.{tap}", x))
            elif value is None and tap == "hidden":
                value = self.use(f"{name}.hidden", self.use(name + ".act", gated)(out["gate"], out["up"]))
            elif value is None:
                value = self.use(f"{name}.output", self._linear(f"{name}.down", out["hidden"]))
            out[tap] = cast(F64, value)
        return out

    def expert(self, layer: int, expert: int, tokens: Array, tap: str) -> F64:
        """A tap of one expert for these tokens."""
        name = f"layers.{layer}.moe.experts.{expert}"

        def known(part: str) -> F64 | None:
            return self.given.expert_rows(layer, expert, part, tokens)

        x = known("input")
        if x is None:
            x = self.get(f"layers.{layer}.moe.input")[np.searchsorted(self.rows, tokens)]
        x = self.use(name + ".input", x)
        if tap in ("gate", "up"):
            return cast(F64, self.use(f"{name}.{tap}.value", self._linear(f"{name}.{tap}", x)))
        if tap == "hidden":
            gate, up = (known(part) for part in ("gate", "up"))
            gate = self.use(f"{name}.gate.value", self._linear(f"{name}.gate", x)) if gate is None else gate
            up = self.use(f"{name}.up.value", self._linear(f"{name}.up", x)) if up is None else up
            return cast(F64, self.use(name + ".hidden", self.use(name + ".act", gated)(gate, up)))
        if tap == "input":
            return cast(F64, x)
        hidden = known("hidden")
        if hidden is None:
            hidden = self.expert(layer, expert, tokens, "hidden")
        return cast(F64, self.use(f"{name}.output", self._linear(f"{name}.down", hidden)))

    def expert_target(self, layer: int, expert: int, tokens: Array, tap: str) -> F64:
        """`expert`, or what the other run has when the weights are missing."""
        try:
            return self.expert(layer, expert, tokens, tap)
        except Missing as missing:
            rows = rows_of(self.given.other, layer, expert, tap)
            if rows is None or not np.isin(tokens, rows[0]).all():
                raise
            self.given.lacking = str(missing)
            value = rows[1][np.searchsorted(rows[0], tokens)].astype(np.float64)
            name = f"layers.{layer}.moe.experts.{expert}.{tap}"
            return cast(F64, self.use(name + ".value" if tap in ("gate", "up") else name, value))

    def _moe(self, layer: int, tap: str) -> F64:
        path, settings = f"layers.{layer}.moe.", self.given.settings
        if tap == "router_logits":
            return self._linear(path + "router", self.get(path + "input"))
        if tap == "scores":
            return cast(F64, self.use(path + "score_rule", softmax)(self.get(path + "router_logits")))
        if tap == "expert_ids":
            order = np.argsort(-self.get(path + "scores"), axis=-1, kind="stable")
            return cast(F64, order[:, : settings.top_k])
        if tap == "gates":
            if settings.gate_rule not in GATE_RULES:
                raise Missing(f"no formula for the gate rule '{settings.gate_rule}'")
            rule = self.use(path + "gate_rule", GATE_RULES[settings.gate_rule])
            ids = self.get(path + "expert_ids").astype(np.intp)
            return cast(F64, rule(self.get(path + "router_logits"), self._scores(layer), ids))
        if tap == "shared.output":
            return self._mlp(path + "shared", self.get(path + "input"))["output"]
        if tap == "shared.gate":
            raw = self._linear(path + "shared_gate", self.get(path + "input"))
            return cast(F64, self.use(path + "shared.gate_rule", sigmoid)(raw))
        if tap == "routed":
            return self._routed(layer)
        if tap == "output":
            routed = self.get(path + "routed")
            if not self._has_shared(layer):
                return routed
            gate = self.use(path + "shared.applied", self.get(path + "shared.gate"))
            return cast(F64, routed + gate * self.get(path + "shared.output"))
        raise Missing(f"no formula for '{path}{tap}'")

    def _scores(self, layer: int) -> F64:
        path = f"layers.{layer}.moe.scores"
        return self.get(path)

    def _has_shared(self, layer: int) -> bool:
        """From the model when there is one, else from what was recorded."""
        path = f"layers.{layer}.moe.shared."
        if self.given.model is not None:
            return path + "gate" in self.given.model.weights
        return any(path + "output" in trace for trace in (self.given.trace, self.given.other))

    def _routed(self, layer: int) -> F64:
        path = f"layers.{layer}.moe."
        ids = self.get(path + "expert_ids").astype(np.intp)
        gates = self.use(path + "applied_gates", self.get(path + "gates"))
        out: F64 | None = None
        for expert in np.unique(ids[ids >= 0]):
            where, slot = np.nonzero(ids == expert)
            known = self.given.expert_rows(layer, int(expert), "output", self.rows[where])
            rows = self.expert(layer, int(expert), self.rows[where], "output") if known is None else known
            rows = self.use(path + "outputs", rows)
            out = np.zeros((len(ids), rows.shape[1])) if out is None else out
            np.add.at(out, where, gates[where, slot, None] * rows)
        if out is None:
            raise Missing(f"'{path}expert_ids' names no expert")
        return out
