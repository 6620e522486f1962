"""What to fetch ahead: for every token and layer, the experts that a guess names before the router has spoken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from colibri_lab.cache.requests import Whole
from colibri_lab.errors import ArgumentError, is_whole
from colibri_lab.progress import Progress, shown
from colibri_lab.routing.streaming import expert_ids
from colibri_lab.trace import HasTrace, Trace, trace_of

Kind = Literal["previous", "frequency", "oracle"]

_PIECE = 1 << 20  # counts worked on at a time


@dataclass(frozen=True)
class Plan:
    """Experts to fetch before token t needs them at a layer, the likeliest first."""

    kind: str
    ids: NDArray[np.int32]  # (Lm, T, p), −1 for none
    late: NDArray[np.bool_] | None = None  # (Lm, T, p): those that arrive after they were needed; None: nobody knows
    source: str = ""  # what the guess was made from, as a sentence

    def __repr__(self) -> str:
        layers, tokens, width = self.ids.shape
        return f"<Plan {self.kind}: up to {width} experts for {tokens} tokens in {layers} layers. {self.source}>"


def plan(
    trace: Trace | HasTrace,
    kind: Kind,
    count: int | None = None,
    *,
    profile: Trace | HasTrace | None = None,
    progress: Progress = None,
) -> Plan:
    """The `count` experts (None: k) that a rule fetches ahead for every token and MoE layer.

    "previous": those that the token before chose at the same layer, in its slot order; none for the first token.
    "frequency": those chosen most often at the layer by all tokens before, equal ones by number; an expert nobody has
    chosen is not fetched. With `profile`, counts are those of that trace as a whole, the same for every token.
    "oracle": those that the token will choose: what a perfect guess is worth.
    `lab.cache.look_ahead` makes the plan of a router that looks ahead.

    Raises ArgumentError for another kind, a count outside 1 to E (to k, where a token chooses no more), a profile of
    another shape; NotCapturedError when a trace has no expert ids.
    """
    trace = trace_of(trace)
    if kind not in ("previous", "frequency", "oracle"):
        raise ArgumentError(f"a plan is 'previous', 'frequency' or 'oracle', not {kind!r:.80}; see also look_ahead")
    most = trace.num_experts if kind == "frequency" else trace.top_k
    width = checked_count(count, trace, most)
    if profile is not None and kind != "frequency":
        raise ArgumentError(f"a profile is for the plan 'frequency'; '{kind}' reads the trace itself")
    out = np.full((len(trace.moe_layers), trace.n_tokens, width), -1, np.int32)
    if profile is not None:
        return _from_profile(trace, trace_of(profile), out)
    with shown(progress, trace.n_tokens * len(out), "tokens × layers", "plan") as report:
        for row, layer in enumerate(trace.moe_layers):
            if kind == "oracle":
                out[row] = expert_ids(trace, layer)[:, :width]
            elif kind == "previous":
                out[row, 1:] = expert_ids(trace, layer)[:-1, :width]
            else:
                for tokens, counts in _counts_before(trace, layer):
                    out[row, tokens] = _most_frequent(counts, width)
                    if report is not None:
                        report((row + tokens.stop / trace.n_tokens) / len(out))
    return Plan(kind, out, None, _SOURCES[kind])


_SOURCES = {
    "previous": "The experts of the token before, at the same layer.",
    "frequency": "The experts chosen most often by the tokens before, at the same layer.",
    "oracle": "The experts that the tokens really chose.",
}


def checked_count(count: int | None, trace: Trace, most: int) -> int:
    """Experts a plan names for each token; None is k. Raises ArgumentError outside 1 to `most`."""
    if count is None:
        return trace.top_k
    if not is_whole(count) or not 1 <= count <= most:
        raise ArgumentError(f"this plan names 1 to {most} experts for a token, not {count!r:.80}")
    return int(count)


def _from_profile(trace: Trace, profile: Trace, out: NDArray[np.int32]) -> Plan:
    mine, other = (trace.moe_layers, trace.num_experts), (profile.moe_layers, profile.num_experts)
    if mine != other:
        raise ArgumentError(
            f"the profile has {other[1]} experts in the MoE layers {other[0]!s:.60}; the trace has {mine[1]} in "
            f"{mine[0]!s:.60}"
        )
    for row, layer in enumerate(profile.moe_layers):
        ids = expert_ids(profile, layer)
        counts = np.bincount(ids[ids >= 0], minlength=trace.num_experts)
        out[row] = _most_frequent(counts[None], out.shape[2])
    source = f"The experts chosen most often by the {profile.n_tokens} tokens of a profile, at the same layer."
    return Plan("frequency", out, None, source)


def _counts_before(trace: Trace, layer: int) -> Iterator[tuple[slice, Whole]]:
    """Piece by piece: tokens and, for each, how often the tokens before it chose each expert, (tokens, E)."""
    experts = trace.num_experts
    step, total = max(1, _PIECE // experts), np.zeros(experts, np.int64)
    for start in range(0, trace.n_tokens, step):
        ids = expert_ids(trace, layer, slice(start, start + step))
        rows, slots = np.nonzero(ids >= 0)
        counts = np.zeros((len(ids) + 1, experts), np.int64)
        counts[0] = total
        np.add.at(counts, (rows + 1, ids[rows, slots]), 1)
        counts = np.cumsum(counts, axis=0)
        total = counts[-1]
        yield slice(start, start + len(ids)), counts[:-1]


def _most_frequent(counts: NDArray[Any], width: int) -> NDArray[np.int32]:
    """(rows, width) numbers of the largest counts, the largest first and equal ones by number; −1 for a count of 0."""
    best = np.argsort(-counts, axis=1, kind="stable")[:, :width]
    return np.where(np.take_along_axis(counts, best, axis=1) > 0, best, -1).astype(np.int32)
