"""How good a prefetch of experts was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.cache.checks import array_of
from colibri_lab.cache.plans import Plan
from colibri_lab.cache.requests import Whole
from colibri_lab.cache.settings import sizes_given
from colibri_lab.errors import ArgumentError
from colibri_lab.routing.measured import Measured, Ratios
from colibri_lab.routing.streaming import BLOCK, check_level, expert_ids, hot, in_blocks
from colibri_lab.trace import HasTrace, Trace, trace_of

_PIECE = 1 << 20  # marks made at a time


@dataclass(frozen=True)
class Prefetch:
    """How good a prefetch was, layer by layer; all counts (Lm,)."""

    needed: Whole  # requests of the trace
    issued: Whole  # experts fetched ahead
    used: Whole  # of these, needed by their token
    late: Whole  # of the used ones, arrived too late
    precision: Measured  # used / issued; chance: k/E
    recall: Measured  # in time / needed; chance: issued per token / E
    wasted_bytes: Whole | None  # fetched and not needed; None when the size of an expert was not given

    @property
    def wasted(self) -> Whole:
        """Experts fetched and not needed."""
        return self.issued - self.used


def prefetch_quality(
    trace: Trace | HasTrace,
    issued: Plan | NDArray[Any],
    *,
    late: NDArray[Any] | None = None,
    expert_bytes: int | NDArray[Any] | None = None,
    level: float = 0.95,
) -> Prefetch:
    """Holds a prefetch against what the tokens really needed.

    `issued`: a Plan, or (Lm, T, p) expert ids fetched ahead for each token and layer, −1 for none; an expert named
    twice counts as fetched twice and used once. `late`: bool of the same shape, those that came after they were needed
    (None: as the plan says, else none); they count as used but not in recall. `expert_bytes`: one size, or one for
    each expert, (Lm, E).
    Raises ArgumentError when shapes or ids do not fit.
    """
    trace, level = trace_of(trace), check_level(level)
    layers, experts, tokens = len(trace.moe_layers), trace.num_experts, trace.n_tokens
    if isinstance(issued, Plan):
        late, issued = issued.late if late is None else late, issued.ids
    guess = array_of(issued, "a prefetch")
    if guess.dtype.kind not in "iu" or guess.ndim != 3 or guess.shape[:2] != (layers, tokens):
        raise ArgumentError(
            f"a prefetch names whole numbers of the shape ({layers}, {tokens}, any); these are {guess.dtype} "
            f"{guess.shape}"
        )
    if guess.size and not -1 <= int(guess.min()) <= int(guess.max()) < experts:
        raise ArgumentError(f"a prefetch names 0 to {experts - 1}, or −1; not {guess.min()} to {guess.max()}")
    after = np.zeros(guess.shape, bool) if late is None else array_of(late, "`late`").astype(bool)
    if after.shape != guess.shape:
        raise ArgumentError(f"`late` has the shape {after.shape}, `issued` {guess.shape}")
    sizes = sizes_given(trace, expert_bytes)
    wasted = None if sizes is None else np.zeros(layers, np.int64)
    counts, step = np.zeros((4, layers), np.int64), max(1, _PIECE // (experts + guess.shape[2]))
    precision, recall = Ratios((layers,), (layers,)), Ratios((layers,), (layers,))
    for row, layer in enumerate(trace.moe_layers):
        needed, sent, used, found = per_token = np.zeros((4, tokens), np.int64)
        for start in range(0, tokens, step):
            some = slice(start, start + step)
            ids = guess[row, some].astype(np.int64)
            wanted = hot(expert_ids(trace, layer, some), experts) > 0
            if wasted is not None and sizes is not None:
                sent_of = np.bincount(ids[ids >= 0], minlength=experts)
                used_of = (wanted & (hot(ids, experts) > 0)).sum(axis=0)
                wasted[row] += ((sent_of - used_of) * sizes[row]).sum()
            fetched, in_time = hot(ids, experts) > 0, hot(np.where(after[row, some], -1, ids), experts) > 0
            per_token[:2, some] = wanted.sum(axis=1), (ids >= 0).sum(axis=1)
            per_token[2:, some] = (wanted & fetched).sum(axis=1), (wanted & in_time).sum(axis=1)
        counts[:, row] = needed.sum(), sent.sum(), used.sum(), used.sum() - found.sum()
        precision.add(in_blocks(used, BLOCK), in_blocks(sent, BLOCK), row)
        recall.add(in_blocks(found, BLOCK), in_blocks(needed, BLOCK), row)
    share = counts[1] / max(tokens, 1) / experts
    return Prefetch(
        counts[0],
        counts[1],
        counts[2],
        counts[3],
        precision.share(level, trace.top_k / experts, "Used / fetched; chance: k/E."),
        recall.share(level, share, "Found in time / needed; chance: fetched per token / E."),
        wasted,
    )
