"""Places of a cache's timeline: the selection of layer, token and expert, and who was next in line there."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.cache.notes import not_finite
from colibri_lab.errors import ArgumentError, is_whole
from colibri_lab.routing.streaming import expert_ids
from colibri_lab.trace import Trace

__all__ = ["Places"]

_NUMBERS = {"router_logits": "logit", "scores": "score"}  # what ranks experts
_NEAR = 0.9  # of the last chosen one's weight


class Places:
    """The layers, tokens and experts of a trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def check(self, wish: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
        """The whole selection that a wish stands for: keys left out keep their value. Raises ArgumentError."""
        unknown = set(wish) - {"layer", "token", "expert"}
        if unknown:
            raise ArgumentError(f"A selection has layer, token and expert, not {', '.join(sorted(map(str, unknown)))}.")
        new = {name: wish.get(name, old.get(name)) for name in ("layer", "token", "expert")}
        trace = self.trace
        layers = trace.moe_layers
        if new["layer"] is None and layers:
            new["layer"] = layers[0]
        if new["layer"] is not None and new["layer"] not in layers:
            raise ArgumentError(f"layer {new['layer']!r:.20} has no experts; those with a router are {_listed(layers)}")
        for name, count in (("token", trace.n_tokens), ("expert", trace.num_experts)):
            value = new[name]
            if value is not None and not (is_whole(value) and 0 <= value < count):
                choice = f"; {name}s are 0 to {count - 1}" if count else ""
                raise ArgumentError(f"there is no {name} {value!r:.20}{choice}")
        return {name: None if value is None else int(value) for name, value in new.items()}

    @property
    def recorded(self) -> bool:
        """Whether the trace tells who was next in line."""
        return any(self._numbers(layer) for layer in self.trace.moe_layers)

    @property
    def holes(self) -> int:
        """Slots without an expert in all layers: not used, or not recorded."""
        return sum(int((expert_ids(self.trace, layer) < 0).sum()) for layer in self.trace.moe_layers)

    @cached_property
    def not_finite(self) -> int:
        """Tokens with router logits that are not finite, in some layer."""
        return not_finite(self.trace)

    def runners_up(
        self, layer: int, start: int, stop: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.bool_], str]:
        """Of each token the best expert that was not chosen (−1: not recorded, or no ranking), how far it is behind the
        last chosen one (NaN), whether that is a near-tie, and what the distance is counted in.

        In "logit" where the choice follows the router logits, else in "score". Near: e^−gap, or the ratio of the two
        scores, is above 0.9, so that taking the other one would change its weight by less than a tenth.
        """
        count = stop - start
        nobody = np.full(count, -1, np.int32), np.full(count, np.nan, np.float32), np.zeros(count, bool)
        if not count or self.trace.num_experts <= self.trace.top_k:
            return *nobody, ""
        ids = expert_ids(self.trace, layer, slice(start, stop)).astype(np.intp)
        for name, unit in _NUMBERS.items():
            values = self.trace.get(f"layers.{layer}.moe.{name}")
            if values is None:
                continue
            best, chosen, gap = _next_in_line(np.asarray(values[start:stop], np.float32), ids)
            if unit == "logit" and (gap < 0).any():
                continue  # a bias or groups decide: the choice does not follow the logits
            known = np.isfinite(gap) & (ids >= 0).all(axis=1)
            with np.errstate(invalid="ignore"):
                near = gap < (-np.log(_NEAR) if unit == "logit" else (1 - _NEAR) * np.abs(chosen))
            runner = np.where(known, best, -1).astype(np.int32)
            return runner, np.where(known, gap, np.nan).astype(np.float32), near & known, unit
        return *nobody, ""

    def _numbers(self, layer: int) -> bool:
        return any(self.trace.get(f"layers.{layer}.moe.{name}") is not None for name in _NUMBERS)


def _next_in_line(
    numbers: NDArray[np.float32], ids: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.float32], NDArray[np.float32]]:
    """Of each row the best place outside `ids`, the least number at `ids`, and its distance to that best one."""
    rows, rest = np.arange(len(numbers)), numbers.copy()
    for slot in range(ids.shape[1]):
        rest[rows, ids[:, slot]] = np.where(ids[:, slot] >= 0, -np.inf, rest[rows, ids[:, slot]])
    best = rest.argmax(axis=1)
    chosen = np.take_along_axis(numbers, np.maximum(ids, 0), axis=1).min(axis=1)
    with np.errstate(invalid="ignore"):
        return best, chosen, chosen - rest[rows, best]


def _listed(layers: list[int]) -> str:
    return ", ".join(map(str, layers)) if len(layers) <= 8 else f"{layers[0]} … {layers[-1]}"
