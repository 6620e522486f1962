"""Moment: what conditions and watches see of the place where a stepper stands, row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError, NotCapturedError
from colibri_lab.places import Place
from colibri_lab.routing import row_entropy, row_margin

if TYPE_CHECKING:
    from colibri_lab.conditions import Expression
    from colibri_lab.walk import Walk

__all__ = ["Moment"]

Array = NDArray[Any]

# The tap that a stage has just written, and that absmax and nonfinite are about.
_WRITTEN = {
    "embed": "embed", "attention": "layers.{l}.attn.out", "router": "layers.{l}.moe.router_logits",
    "dispatcher": "layers.{l}.moe.input", "expert": "layers.{l}.moe.experts.{e}.output",
    "shared": "layers.{l}.moe.shared.output", "aggregator": "layers.{l}.moe.output", "mlp": "layers.{l}.mlp.output",
    "residual": "layers.{l}.output", "norm": "norm", "logits": "logits",
}  # fmt: skip
_ONLY_KEPT = ("attn.weights", *(f"moe.experts.{part}" for part in ("gate", "up", "hidden")))
"""Taps that are nowhere to be seen unless the capture keeps them; all others can be read while they are there."""
_ROUTED = ("router", "dispatcher", "expert", "shared", "aggregator", "residual")


def _is_full(path: str) -> bool:
    """Whether it names its layer, if it has one."""
    return path in ("embed", "norm", "logits") or path.startswith("layers.")


class Moment:
    """The scene (see `colibri_lab.conditions`) of a walk that stands after some stage.

    At an expert the rows are those sent to it, at the logits the last one (so that no capture changes what is found);
    elsewhere all of the pass. A tap gives one entry for each row of these.
    """

    def __init__(self, walk: Walk, texts: list[str]) -> None:
        self._walk = walk
        self._texts = texts
        self._place = walk.place
        self._start, self._stop = walk.bounds()
        self._known: dict[str, Any] = {}

    def rows(self) -> NDArray[np.int64]:
        """(n,) token rows of the session."""
        place = self._place
        if place is None:
            return np.empty(0, np.int64)
        if place.expert >= 0:
            return self._walk.sent
        return np.arange(self._stop - 1 if place.stage == "logits" else self._start, self._stop)

    def value(self, name: str) -> Any:
        """What a name of the language stands for here; None: nothing."""
        if name not in self._known:
            self._known[name] = self._find(name)
        return self._known[name]

    def tap(self, path: str) -> Array | None:
        """The rows of a tap, one for each of `rows()`; None when it is not there now. Raises TapError."""
        if _is_full(path):
            return self._read(path)
        layer = -1 if self._place is None else self._place.layer
        return self._read(f"layers.{layer}.{path}") if layer in self._walk.layers_with(path) else None

    def check(self, expression: Expression) -> None:
        """Raises ConditionError for what can never hold, TapError for a tap that the model does not have, and
        NotCapturedError for one that this session never has.
        """
        expression.check_condition()
        walk = self._walk
        for path in expression.paths:
            full = [path] if _is_full(path) else [f"layers.{layer}.{path}" for layer in walk.layers_with(path)]
            taps = [walk.tap(one) for one in full]
            if walk.name(taps[0]) in _ONLY_KEPT and not any(walk.engine.captures(tap.kind, tap.layer) for tap in taps):
                raise NotCapturedError(f'"{path}" is not kept by this session; ask for it with capture "{full[0]}"')

    def _read(self, path: str) -> Array | None:
        tap = self._walk.tap(path)
        if path == "logits" and self._place == Place("logits"):
            logits: Array = self._walk.engine.logits()[None]
            return logits
        try:
            rows = self._walk.read(path)
        except (ArgumentError, NotCapturedError):
            return None
        tokens = self.rows()
        if tap.expert >= 0:
            return self._of_expert(path, rows, tokens)
        if not self._walk.is_by_token(tap):  # packed rows, head by head: no row for a token
            return None
        return rows if len(tokens) == len(rows) else rows[tokens - self._start]

    def _of_expert(self, path: str, rows: Array, tokens: NDArray[np.int64]) -> Array | None:
        """Rows of one expert exist for its own tokens only."""
        place = self._place
        tap = self._walk.tap(path)
        if place is not None and (place.layer, place.expert) == (tap.layer, tap.expert):
            return rows
        return None

    def _find(self, name: str) -> Any:
        place = self._place
        if place is None:
            return None
        rows = self.rows()
        if name == "token":
            return rows
        if name == "text":
            return np.array([self._texts[row] for row in rows.tolist()], dtype=object)
        if name == "stage":
            return place.stage
        if name in ("layer", "expert"):
            number = getattr(place, name)
            return number if number >= 0 else None
        if name == "count":
            return len(rows)
        if name in ("absmax", "nonfinite"):
            return self._of_written(name)
        return self._of_router(name)

    def _of_written(self, name: str) -> Any:
        assert self._place is not None
        layer, expert = str(self._place.layer), str(self._place.expert)
        written = self._read(_WRITTEN[self._place.stage].replace("{l}", layer).replace("{e}", expert))
        if written is None:
            return None
        flat = written.reshape(len(written), -1)
        if name == "nonfinite":
            return (~np.isfinite(flat)).sum(axis=1)
        return np.abs(flat.astype(np.float64)).max(axis=1)  # NaN wins

    def _of_router(self, name: str) -> Any:
        place = self._place
        assert place is not None
        if place.stage not in _ROUTED or place.layer not in self._walk.session.model.config.moe_layers:
            return None
        base = f"layers.{place.layer}.moe."
        if name == "entropy":
            logits = self._read(base + "router_logits")
            return None if logits is None else row_entropy(logits)
        if name == "margin":
            scores = self._read(base + "scores")
            return None if scores is None else row_margin(scores, self._walk.top_k)[0]
        ids, gates = self._read(base + "expert_ids"), self._read(base + "gates")
        if ids is None or gates is None or name not in ("experts", "gate"):
            return None
        if name == "experts":
            return ids
        if place.expert < 0:
            return gates.max(axis=1)
        return np.where(ids == place.expert, gates, 0).sum(axis=1, dtype=np.float64)
