"""The place of a first divergence: what the suspect run has there, and what a replay with a fault would have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from colibri_lab.difference.formulas import Missing, expert_of, relative
from colibri_lab.difference.maths import Change, Given, Replay, rows_of
from colibri_lab.difference.variants import rounded
from colibri_lab.trace import Trace

__all__ = ["Scene", "fitted"]

Array = NDArray[Any]

_ROWS = 256  # token rows that a replay of a stage without attention looks at
_QUERIES = 96  # rows of attention, behind each of which stand all its keys
_EXPERTS = 6  # of the experts that differ


class Scene:
    """One run at one tap. `left_over(changes)` is the relative error of a replay with these changes against it.

    `path`: a tap path, experts as "*". `token`: the first row that differs. `n_tokens`: rows that both runs have.
    """

    def __init__(
        self, suspect: Trace, other: Trace, path: str, token: int, n_tokens: int, model: Any, common: tuple[str, ...],
        believed: Trace | None = None,
    ) -> None:  # fmt: skip
        self.suspect, self.other, self.path, self.token, self.model = suspect, other, path, max(token, 0), model
        self.given = Given(suspect, other, path, model, common, believed)
        inside = expert_of(path)
        self.expert_tap = inside[2] if inside else ""
        part = path.split(".")
        self.layer = int(part[1]) if part[0] == "layers" else None
        self.rows = self._sample(n_tokens)
        self.experts: list[int] = self._experts() if inside else []
        self.wanted = self._recorded(suspect)
        self.twin = self._recorded(other)
        self._base: Replay | None = None
        replay = Replay(self.given, self.rows)
        self.plain_value = self._value(replay)
        self._base = replay
        self.points: list[str] = list(replay.passed)
        self.plain = self.measure(self.plain_value)
        self.computed = not self.given.lacking

    # ---- what is looked at ----

    def _sample(self, n_tokens: int) -> Array:
        """Token rows: from the start, around the first that differs, and evenly to the end."""
        attention = ".attn." in self.path or self.path.endswith((".moe.input", ".mlp.input"))
        most = _QUERIES if attention else _ROWS
        if n_tokens <= most:
            return np.arange(n_tokens)
        near = np.arange(max(self.token - 2, 0), min(self.token + 16, n_tokens))
        return np.unique(np.concatenate([np.arange(8), near, np.linspace(0, n_tokens - 1, most - 24).astype(int)]))

    def _experts(self) -> list[int]:
        """The experts whose rows differ, those that differ most first; a few of them."""
        layer, tap = cast(int, self.layer), self.expert_tap
        errors: dict[int, float] = {}
        for expert in range(self.suspect.num_experts):
            mine, theirs = (rows_of(trace, layer, expert, tap) for trace in (self.suspect, self.other))
            if mine is None or theirs is None:
                continue
            both, i, j = np.intersect1d(mine[0], theirs[0], return_indices=True)
            if len(both):
                errors[expert] = relative(mine[1][i], theirs[1][j])
        top = max(errors.values(), default=0.0)
        self.all_differing = sorted(e for e, error in errors.items() if error > max(1e-3 * min(top, 1.0), 1e-7))
        self.agreeing = sorted(set(errors) - set(self.all_differing))
        return sorted(self.all_differing, key=lambda e: -errors[e])[:_EXPERTS]

    def tokens_of(self, expert: int) -> Array:
        """The tokens of an expert that both runs have, at most a few hundred."""
        layer = cast(int, self.layer)
        mine, theirs = (rows_of(trace, layer, expert, self.expert_tap) for trace in (self.suspect, self.other))
        if mine is None or theirs is None:
            return np.empty(0, np.int64)
        return np.intersect1d(mine[0], theirs[0])[:_ROWS]

    def _recorded(self, trace: Trace) -> Array:
        if self.path.endswith(".attn.weights"):  # (heads, T, S)
            return np.asarray(trace[self.path][:, self.rows, : self.rows[-1] + 1], np.float64)
        if not self.expert_tap:
            value = np.asarray(trace[self.path][self.rows], np.float64)
            return np.sort(value, axis=1) if self.path.endswith(".expert_ids") else value
        parts = []
        for expert in self.experts:
            rows = rows_of(trace, cast(int, self.layer), expert, self.expert_tap)
            if rows is not None:
                parts.append(rows[1][np.searchsorted(rows[0], self.tokens_of(expert))].astype(np.float64))
        if not parts:
            raise Missing("no expert has rows in both runs")
        return np.concatenate(parts)

    # ---- replays ----

    def value(self, changes: Mapping[str, Change] | None = None) -> Array:
        """The tap as a run with these changes would have it. Raises Missing."""
        return self._value(Replay(self.given, self.rows, changes, base=self._base))

    def _value(self, replay: Replay) -> Array:
        if not self.expert_tap:
            return replay.get(self.path)
        layer = cast(int, self.layer)
        if self.expert_tap != "input" and f"layers.{layer}.moe.dispatch.input" not in self.suspect:
            every = np.unique(np.concatenate([self.rows, *(self.tokens_of(e) for e in self.experts)]))
            replay.rows = every.astype(np.intp)  # the same in every replay of this scene
        return np.concatenate([
            replay.expert_target(layer, e, self.tokens_of(e), self.expert_tap) for e in self.experts
        ])  # fmt: skip

    def expert_value(self, expert: int, changes: Mapping[str, Change], most: int = _ROWS) -> tuple[Array, Array]:
        """(replayed, recorded) rows of one expert, at most so many."""
        layer, tokens = cast(int, self.layer), self.tokens_of(expert)[:most]
        rows = rows_of(self.suspect, layer, expert, self.expert_tap)
        assert rows is not None
        replay = Replay(self.given, tokens, changes)
        found = replay.expert_target(layer, expert, tokens, self.expert_tap)
        return found, rows[1][np.searchsorted(rows[0], tokens)].astype(np.float64)

    def measure(self, value: Array) -> float:
        """The relative error of a replayed value."""
        if self.path.endswith(".expert_ids"):  # sets: their order means nothing
            value = np.sort(value, axis=1)
        same = value.shape == self.wanted.shape or (value.size == self.wanted.size and ".attn." in self.path)
        return relative(value.reshape(self.wanted.shape), self.wanted) if same else math.inf

    def left_over(self, changes: Mapping[str, Change]) -> float:
        """The relative error that remains with these changes; inf when they make no sense here."""
        try:
            with np.errstate(all="ignore"):
                error = self.measure(self.value(changes))
        except (Missing, ValueError, IndexError, TypeError, AssertionError):
            return math.inf
        return error if math.isfinite(error) else math.inf

    def has(self, point: str) -> bool:
        """Whether a replay passes this point."""
        return point in self.points

    def ending(self, *ends: str) -> list[str]:
        """The points that end so, in the order of the data's way."""
        return [point for point in self.points if point.endswith(ends)]

    @property
    def arithmetic(self) -> str:
        """In which number type both runs say that they were computed; "" when they differ or do not say."""
        said = {str(trace.meta.get("arithmetic", "")) for trace in (self.suspect, self.other)}
        return said.pop() if len(said) == 1 else ""

    def coarse(self) -> str | None:
        """"bfloat16" or "float16" when all values of the suspect are of that type and those of the other are not."""
        for dtype in ("bfloat16", "float16"):
            mine, theirs = (np.mean(rounded(v, dtype) == v) for v in (self.wanted, self.twin))
            if mine == 1 and theirs < 0.9:
                return dtype
        return None


def fitted(
    error: Callable[[float], float], grid: Sequence[float], good: float, logarithmic: bool = True
) -> tuple[float, float]:
    """(value, error): the best of `grid`, refined by golden section between its neighbours unless it is `good` already,
    and written with few digits where that is as good.
    """
    tried = sorted((value, error(value)) for value in dict.fromkeys(grid))
    at = min(range(len(tried)), key=lambda i: tried[i][1])
    best, least = tried[at]
    outside = sorted(e for _, e in tried)[len(tried) // 2]
    if least <= good or not math.isfinite(least) or (len(tried) > 2 and least > 0.7 * outside):
        return best, least
    low, high = tried[max(at - 1, 0)][0], tried[min(at + 1, len(tried) - 1)][0]
    logarithmic = logarithmic and low > 0
    there, back = (math.log, math.exp) if logarithmic else (float, float)
    a, b = there(low), there(high)
    ratio = (math.sqrt(5) - 1) / 2
    c, d = b - ratio * (b - a), a + ratio * (b - a)
    at_c, at_d = error(back(c)), error(back(d))
    for _ in range(48):
        if at_c < at_d:
            b, d, at_d = d, c, at_c
            c = b - ratio * (b - a)
            at_c = error(back(c))
        else:
            a, c, at_c = c, d, at_d
            d = a + ratio * (b - a)
            at_d = error(back(d))
        if min(at_c, at_d) <= good / 4 or abs(b - a) < 1e-9:
            break
    value, found = (back(c), at_c) if at_c < at_d else (back(d), at_d)
    best, least = (value, found) if found < least else (best, least)
    for digits in (1, 2, 3, 4):
        short = float(f"{best:.{digits}g}")
        with_few = error(short)
        if with_few <= max(1.5 * least, good / 4):
            return short, with_few
    return best, least
