"""Which experts serve which token id: the one read, the one that follows, the one predicted to follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError, is_whole
from colibri_lab.routing.intervals import score_interval, student_quantile
from colibri_lab.routing.measured import Measured
from colibri_lab.routing.nulls import largest_count
from colibri_lab.routing.streaming import Accumulator, check_level, expert_ids, tiles
from colibri_lab.trace import HasTrace, Trace

__all__ = ["By", "Vocabulary", "VocabularyShares", "vocabulary"]

By = Literal["input", "next", "predicted"]

LEAST = 10
"""Occurrences that an id needs to be reported, as in OLMoE's tables: fewer make every expert look special."""


@dataclass(frozen=True)
class VocabularyShares:
    """Vocabulary specialisation: how much of an id goes to its favourite expert, and the mean of it over ids."""

    ids: NDArray[np.int64]  # (n,) token ids seen at least `least` times, ascending
    counts: NDArray[np.int64]  # (n,) how often
    expert: NDArray[np.int64]  # (Lm, n) favourite expert, ties to the lower number; −1 where the layer sent it nowhere
    share: Measured  # (Lm, n) tokens of the id that went to it
    mean: Measured  # (Lm,) over ids


class Tally:
    """Counts of whole-number keys, kept sorted: as long as there are different keys, whatever their number."""

    def __init__(self) -> None:
        self.keys, self.counts = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def add(self, keys: NDArray[np.int64], counts: NDArray[np.int64] | None = None) -> None:
        """Counts each of the keys once, or `counts` times."""
        joined = np.concatenate([self.keys, keys])
        weights = np.concatenate([self.counts, np.ones(len(keys), np.int64) if counts is None else counts])
        self.keys, places = np.unique(joined, return_inverse=True)
        self.counts = np.zeros(len(self.keys), np.int64)
        np.add.at(self.counts, places, weights)

    def merge(self, other: Tally) -> None:
        """Adds another one."""
        self.add(other.keys, other.counts)

    def of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """How often each key was seen."""
        if not len(self.keys):
            return np.zeros(keys.shape, np.int64)
        places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.asarray(np.where(self.keys[places] == keys, self.counts[places], 0))


class Vocabulary(Accumulator):
    """Vocabulary specialisation over any number of traces (OLMoE, arXiv 2409.02060, section 5.4).

    `by`: the id of the token itself ("input"), of the one that follows it ("next"), or the likeliest next one by the
    logits ("predicted", needs them captured). `of`: "first" choices alone, as OLMoE's script, or the whole "set".
    Memory grows with the number of different (id, expert) pairs, not of tokens.

    Chance of a given expert: 1/E, or k/E. A favourite is a maximum, so by chance it has more, above all when the id is
    rare: `share.chance` is the mean of 400 simulated blind runs with as many occurrences.
    """

    def __init__(self, by: By = "input", of: Literal["first", "set"] = "first", least: int = LEAST) -> None:
        super().__init__()
        if by not in get_args(By):
            raise ArgumentError(f"ids are taken by {', '.join(get_args(By))}, not {by!r:.80}")
        if of not in ("first", "set"):
            raise ArgumentError(f"choices are counted by 'first' or by 'set', not {of!r:.80}")
        if not (is_whole(least) and least >= 1):
            raise ArgumentError(f"an id needs 1 occurrence or more, a whole number, not {least!r:.80}")
        self.by, self.of, self.least = by, of, int(least)

    def options(self) -> dict[str, Any]:
        """What was asked for at the start."""
        return {"by": self.by, "of": self.of, "least": self.least}

    def _add(self, trace: Trace, *more: Any) -> None:
        self.sums["ids"] = Tally()
        for row in range(len(trace.moe_layers)):
            self.sums[row, "ids"], self.sums[row, "pairs"] = Tally(), Tally()
        for rows in tiles(trace.n_tokens, 1, max(trace.top_k, 64)):
            ids, known = _ids_by(trace, self.by, rows)
            self.sums["ids"].add(ids[known])
            for row, layer in enumerate(trace.moe_layers):
                chosen = expert_ids(trace, layer, rows)[known]
                if self.of == "first":
                    chosen = chosen[:, :1]
                used = chosen >= 0
                self.sums[row, "ids"].add(ids[known][used.any(axis=1)])
                keys = ids[known][:, None] * trace.num_experts + chosen
                self.sums[row, "pairs"].add(keys[used])

    def of_id(self, token: int, level: float = 0.95) -> Measured:
        """Share of one id's tokens that went to each expert, (Lm, E); NaN where it was not seen."""
        level = self._checked(level)
        if not is_whole(token):
            raise ArgumentError(f"a token id is a whole number, not {token!r:.80}")
        rows = range(len(self.moe_layers))
        keys = int(token) * self.num_experts + np.arange(self.num_experts)
        hits = np.array([self.sums[row, "pairs"].of(keys) for row in rows]).reshape(len(rows), self.num_experts)
        seen = np.array([self.sums[row, "ids"].of(np.array([token])) for row in rows]).reshape(len(rows), 1)
        return _occurrences(hits, seen, level, self._slots() / self.num_experts)

    def result(self, level: float = 0.95) -> VocabularyShares:
        """The favourite expert of every id seen often enough."""
        level = self._checked(level)
        tally, experts, layers = self.sums["ids"], self.num_experts, len(self.moe_layers)
        often = tally.counts >= self.least
        ids, counts = tally.keys[often], tally.counts[often]
        favourite, hits = np.full((layers, len(ids)), -1, np.int64), np.zeros((layers, len(ids)), np.int64)
        seen = np.array([self.sums[row, "ids"].of(ids) for row in range(layers)], np.int64)
        seen = seen.reshape(layers, len(ids))
        for row in range(layers):
            pairs = self.sums[row, "pairs"]
            order = np.lexsort((-(pairs.keys % experts), pairs.counts))  # ascending count, then descending expert
            best = dict(zip((pairs.keys[order] // experts).tolist(), order.tolist(), strict=True))  # the last one wins
            for column, token in enumerate(ids.tolist()):
                if token in best:
                    favourite[row, column] = pairs.keys[best[token]] % experts
                    hits[row, column] = pairs.counts[best[token]]
        lines = {int(n): largest_count(int(n), self._slots(), experts) for n in np.unique(seen)}
        chance = np.array([lines[n] for n in seen.ravel().tolist()], np.float64).reshape(seen.shape)
        share = _occurrences(hits, seen, level, chance)
        return VocabularyShares(ids, counts, favourite, share, _mean_over_ids(share, level))

    def _slots(self) -> int:
        return 1 if self.of == "first" else self.top_k


def vocabulary(
    trace: Trace | HasTrace,
    by: By = "input",
    of: Literal["first", "set"] = "first",
    least: int = LEAST,
    level: float = 0.95,
) -> VocabularyShares:
    """`Vocabulary` of one trace."""
    return Vocabulary(by, of, least).add(trace).result(level)


def _ids_by(trace: Trace, by: By, rows: slice) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The id of every row, and whether it has one (the last token has no next, a NaN predicts nothing)."""
    if by == "predicted":
        logits = trace["logits"][rows]
        ids = np.empty(len(logits), np.int64)
        known = np.empty(len(logits), bool)
        for start in range(0, len(logits), 64):
            block = logits[start : start + 64].astype(np.float64)
            ids[start : start + 64] = block.argmax(axis=1)
            known[start : start + 64] = ~np.isnan(block).any(axis=1)
        return ids, known
    shift = 1 if by == "next" else 0
    read = trace.token_ids(rows.start + shift, rows.stop + shift)
    ids = np.zeros(rows.stop - rows.start, np.int64)
    ids[: len(read)] = read
    return ids, np.arange(len(ids)) < len(read)


def _occurrences(hits: Any, seen: Any, level: float, chance: Any) -> Measured:
    with np.errstate(divide="ignore", invalid="ignore"):
        value = np.where(seen > 0, hits / seen, np.nan)
    low, high = score_interval(value, np.where(seen > 0, seen, np.nan), student_quantile(10**9, level))
    words = "Share of an id's tokens. Interval: Wilson's score, occurrences taken as independent."
    return Measured(value, low, high, np.asarray(chance, np.float64), level, words)


def _mean_over_ids(share: Measured, level: float) -> Measured:
    known = ~np.isnan(share.value)
    n = known.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(known, share.value, 0.0).sum(axis=1) / n
        chance = np.where(known, share.chance, 0.0).sum(axis=1) / n
        square = np.where(known, (share.value - mean[:, None]) ** 2, 0.0).sum(axis=1) / (n - 1)
        reach = student_quantile(n - 1, check_level(level)) * np.sqrt(square / n)
    words = (
        "Mean over ids of the favourite's share; chance: the favourite of simulated blind tokens. "
        "Interval: Student's t over ids."
    )
    return Measured(mean, mean - reach, mean + reach, chance, level, words)
