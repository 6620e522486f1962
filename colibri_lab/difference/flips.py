"""Tokens that two runs sent to different experts, and what each such flip is.

The verdict is held against a tolerance on scores, tau, that was declared beforehand. It never sets a flip's margin
beside the difference that was observed: every flip has a margin below twice the largest change of a score, so that test
would call everything a tie.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from colibri_lab.difference.pair import Pair
from colibri_lab.difference.result import Flip, Tolerance

__all__ = ["Past", "coarse_scores", "flipped", "flips_of_layer", "unrecorded", "with_consequences"]


@dataclass(frozen=True)
class Past:
    """What is known about a token before its router decides."""

    left: bool  # its router input (or, unrecorded, something upstream) is beyond tolerance
    explained: bool  # it depends on a tie or on a change that a run made itself
    words: str  # how its past differs, one sentence


def flips_of_layer(pair: Pair, layer: int, tolerance: Tolerance, past: dict[int, Past]) -> list[Flip]:
    """The flips of a layer by token. `past` holds the tokens of `flipped`."""
    routing = pair.routing(layer)
    if routing is None:
        return []
    tokens = flipped(pair, layer)
    scores = _scores(pair, layer, tokens)
    tau, by = _tau(pair, layer, tolerance)
    slope = _slope(pair, layer, tolerance) if by == "scores" else np.inf
    return [
        _flip(pair, layer, int(token), routing[0][token], routing[1][token], row, tau, slope, by, past[int(token)])
        for token, row in zip(tokens, scores, strict=True)
    ]


def flipped(pair: Pair, layer: int) -> NDArray[np.int64]:
    """Tokens whose sets of experts differ; a row that one side did not record (all −1) counts as none."""
    routing = pair.routing(layer)
    if routing is None:
        return np.empty(0, np.int64)
    a, b = routing
    return np.flatnonzero((a != b).any(axis=1) & ~_one_sided(a, b))


def unrecorded(pair: Pair) -> str:
    """A sentence on the tokens whose experts one side alone recorded; else ""."""
    found = []
    for layer in pair.a.moe_layers:
        routing = pair.routing(layer)
        missing = 0 if routing is None else int(_one_sided(*routing).sum())
        if missing:
            found.append((layer, missing))
    if not found:
        return ""
    layer, missing = max(found, key=lambda each: each[1])
    return (
        f"One run did not record the experts of {missing} token{'s' * (missing != 1)} in layer {layer}"
        f"{f', and of some in {len(found) - 1} more' if len(found) > 1 else ''}; these were not compared."
    )


def _one_sided(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """(T,) which tokens have experts on one side only."""
    return np.asarray((a >= 0).any(axis=1) != (b >= 0).any(axis=1))


def with_consequences(flips: list[Flip], pair: Pair) -> tuple[Flip, ...]:
    """The flips with the change that each token's block output suffered, largest first; unknown ones last."""
    out: list[Flip] = []
    for layer in sorted({flip.layer for flip in flips}):
        mine = [flip for flip in flips if flip.layer == layer]
        path = next(
            (
                path
                for path in (f"layers.{layer}.moe.output", f"layers.{layer}.moe.routed", f"layers.{layer}.output")
                if pair.has(path)
            ),
            None,
        )
        if path is None:
            out += mine
            continue
        a, b = pair.pick(path, np.array([flip.token for flip in mine], np.int64))
        with np.errstate(invalid="ignore"):
            change = np.abs(b - a).reshape(len(mine), -1).max(axis=1)
            size = np.abs(a).reshape(len(mine), -1).max(axis=1)
        for flip, moved, whole in zip(mine, change.tolist(), size.tolist(), strict=True):
            relative = moved / whole if whole else (0.0 if moved == 0 else np.inf)
            out.append(replace(flip, consequence=relative))
    return tuple(sorted(out, key=lambda flip: (-_known(flip.consequence), flip.layer, flip.token)))


def _known(value: float) -> float:
    return -1.0 if np.isnan(value) else value


def coarse_scores(pair: Pair, tolerance: Tolerance) -> str:
    """A sentence when the tolerance on scores is so wide that most choices of a layer pass for ties; else ""."""
    found = []
    for layer in pair.a.moe_layers:
        tau, kind = _tau(pair, layer, tolerance)
        scores = next((t.get(f"layers.{layer}.moe.{kind}") for t in (pair.a, pair.b) if kind), None)
        k = pair.a.top_k
        if scores is None or pair.routing(layer) is None or not 0 < k < scores.shape[1]:
            continue
        rows = scores[: pair.n].astype(np.float64)
        rows = rows[np.isfinite(rows).all(axis=1)]
        last, next_ = -np.partition(-rows, (k - 1, k), axis=1)[:, k - 1 : k + 1].T
        slope = _slope(pair, layer, tolerance) if kind == "scores" else np.inf
        allowed = np.full(len(rows), tau)
        if np.isfinite(slope):
            p = np.minimum(last, 0.5)
            allowed = np.minimum(allowed, slope * p * (1 - p))
        share = float((last - next_ < 2 * allowed).mean()) if len(rows) else 0.0
        if share > 0.5:
            found.append((layer, share))
    if not found:
        return ""
    layer, share = max(found, key=lambda each: each[1])
    where = ", ".join(str(each[0]) for each in found[:8]) + (" …" if len(found) > 8 else "")
    return (
        f"The tolerance on scores is coarse in layer{'s' * (len(found) > 1)} {where}: {share:.0%} of the choices in "
        f"layer {layer} are nearer than twice of it, so there a tie says little."
    )


@dataclass(frozen=True)
class _Scores:
    a: NDArray[np.float64] | None  # (E,) selection scores of the token
    b: NDArray[np.float64] | None


def _judged_by(pair: Pair, layer: int) -> str | None:
    """Which tap ranks the experts on both sides: scores; without them router logits, where the rule ranks by them."""
    for kind in ("scores", "router_logits"):
        if pair.has(f"layers.{layer}.moe.{kind}") and (kind == "scores" or _by_logits(pair)):
            return kind
    return None


def _by_logits(pair: Pair) -> bool:
    """Whether the experts rank as their logits do: a bias or groups would change it."""
    return all("softmax" in str(t.meta["gate_rule"]) or t.meta["gate_rule"] == "raw_logits" for t in (pair.a, pair.b))


def _scores(pair: Pair, layer: int, tokens: NDArray[np.int64]) -> list[_Scores]:
    kind = _judged_by(pair, layer)
    if kind is not None:
        a, b = pair.pick(f"layers.{layer}.moe.{kind}", tokens)
        return [_Scores(x, y) for x, y in zip(a, b, strict=True)]
    for kind in ("scores", "router_logits"):
        path = f"layers.{layer}.moe.{kind}"
        sides = [trace.get(path) for trace in (pair.a, pair.b)]
        if kind == "router_logits" and not _by_logits(pair):
            break
        if sum(side is not None for side in sides) == 1:
            one = [None if side is None else side[tokens].astype(np.float64) for side in sides]
            return [
                _Scores(None if one[0] is None else one[0][i], None if one[1] is None else one[1][i])
                for i in range(len(tokens))
            ]
    return [_Scores(None, None)] * len(tokens)


def _tau(pair: Pair, layer: int, tolerance: Tolerance) -> tuple[float, str]:
    """The tolerance on scores, absolute: relative to the largest |score| of the layer in A."""
    for kind in ("scores", "router_logits"):
        path = f"layers.{layer}.moe.{kind}"
        values: NDArray[Any] | None = next(
            (t.get(path) for t in (pair.a, pair.b) if t.get(path) is not None), None
        )
        if values is None or (kind == "router_logits" and not _by_logits(pair)):
            continue
        sizes = np.abs(values[: pair.n].astype(np.float64))
        return tolerance.of(path) * float(sizes[np.isfinite(sizes)].max(initial=0.0)), kind
    return 0.0, ""


def _slope(pair: Pair, layer: int, tolerance: Tolerance) -> float:
    """The tolerance on router logits, absolute, where scores are their softmax: a probability p then may change by
    p (1 − p) of it, which for the small ones is far less than the tolerance of the whole tap. inf where that is not
    known, or where scores were rounded further than their logits.
    """
    scores, logits = f"layers.{layer}.moe.scores", f"layers.{layer}.moe.router_logits"
    sides = [trace for trace in (pair.a, pair.b) if trace.get(scores) is not None]
    rules = all(trace.meta["gate_rule"] in ("softmax", "softmax_renormalised") for trace in (pair.a, pair.b))
    fine = all(trace[scores].dtype.itemsize >= 4 and not trace.meta.get("printed") for trace in sides)
    values: NDArray[Any] | None = pair.a.get(logits)
    if not (rules and fine) or values is None or pair.as_probabilities(logits):
        return np.inf
    sizes = np.abs(values[: pair.n].astype(np.float64))
    return tolerance.of(logits) * max(1.0, float(sizes[np.isfinite(sizes)].max(initial=0.0)))


def _steepest(scores: list[NDArray[np.float64]]) -> float:
    """The largest p (1 − p) among some probabilities; NaN is passed over."""
    p = np.minimum(np.concatenate([np.empty(0), *scores]), 0.5)
    return float((p * (1 - p))[np.isfinite(p)].max(initial=0.0))


def _flip(
    pair: Pair, layer: int, token: int, row_a: NDArray[Any], row_b: NDArray[Any], scores: _Scores, tau: float,
    slope: float, by: str, past: Past,
) -> Flip:  # fmt: skip
    ids_a, ids_b = (tuple(int(i) for i in row if i >= 0) for row in (row_a, row_b))
    out, into = sorted(set(ids_a) - set(ids_b)), sorted(set(ids_b) - set(ids_a))
    a, b = scores.a, scores.b
    gap_a, gap_b, shift, moved = _gaps(a, b, out, into)
    if np.isfinite(slope):
        tau = min(tau, slope * _steepest([s[out + into] for s in (a, b) if s is not None]))
    margin = _margin(a, len(ids_a)) if a is not None else np.nan
    many_a, many_b = len(set(ids_a)), len(set(ids_b))
    swap = (
        f"{_experts(into)} for {_experts(out)}"
        if out and into
        else f"{many_b} expert{'s' * (many_b != 1)} for {many_a}"
    )
    verdict: Literal["tie", "defect", "downstream"]
    known = [s for s in (a, b) if s is not None]
    both_nan = len(known) == 2 and all(np.isnan(s).any() for s in known)
    gaps = [gap for gap in (gap_a, gap_b) if not np.isnan(gap)]
    if past.explained or past.left:
        verdict, cause = "downstream", f"{swap}: {past.words}"
    elif many_a != many_b:
        verdict, cause = "defect", f"{swap}: A chose {many_a}, B {many_b}; no tie of scores explains that."
    elif both_nan:
        verdict, cause = "tie", f"{swap}: the scores of this token hold NaN in both runs, so its ids mean nothing."
    elif gaps and out and into and max(gaps) <= 2 * tau and not shift > tau:
        verdict = "tie"
        cause = (
            f"{swap}: they score alike, {max(gaps):.2g} apart where {2 * tau:.2g} (twice the tolerance on {_name(by)}) "
            "is allowed; either choice is right."
        )
    elif not known:
        verdict, cause = "defect", f"{swap}: neither run kept scores, so this cannot be told from a tie."
    elif len(known) < 2:
        side = "A" if a is not None else "B"
        verdict, cause = "defect", (
            f"{swap}: {gaps[0] if gaps else np.nan:.2g} apart in {side}, which is more than {2 * tau:.2g}, twice the "
            f"tolerance on {_name(by)}; the other run kept no scores."
        )
    elif shift > tau or np.isnan(shift):
        equal = pair.has(f"layers.{layer}.moe.input")
        why = (
            "the router's own scores moved though its input is equal"
            if equal
            else "the router's scores moved, and what it read was not recorded"
        )
        verdict, cause = "defect", f"{swap}: {why}; by up to {shift:.2g}, where {tau:.2g} is allowed."
    else:
        verdict, cause = "defect", (
            f"{swap}: scores agree to {shift:.2g}, yet {'B' if gap_b <= 0 else 'A'} takes an expert that scores "
            f"{max(gaps):.2g} less: the choice itself differs."
        )
    return Flip(layer, token, _ranked(pair.a, layer, token), _ranked(pair.b, layer, token), margin, moved, verdict,
                _sentence(cause), np.nan)  # fmt: skip


def _gaps(
    a: NDArray[np.float64] | None, b: NDArray[np.float64] | None, out: list[int], into: list[int]
) -> tuple[float, float, float, float]:
    """(gap in A, gap in B, largest change of an exchanged score, how far they moved towards each other).

    The gaps are the largest between an expert that one run chose and one that it left out for it; never negative, since
    either side may also have chosen against its scores.
    """
    if not (out and into):
        return np.nan, np.nan, np.nan, np.nan
    gap_a = np.nan if a is None else float(np.abs(_difference(a[out], a[into])).max())
    gap_b = np.nan if b is None else float(np.abs(_difference(b[out], b[into])).max())
    if a is None or b is None:
        return gap_a, gap_b, np.nan, np.nan
    both = out + into
    with np.errstate(invalid="ignore"):
        change = np.where(a[both] == b[both], 0.0, np.abs(b[both] - a[both]))
        moved = float((_difference(a[out], a[into]) - _difference(b[out], b[into])).max())
    return gap_a, gap_b, float(change.max()), moved


def _difference(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """x − y of every pair; two equal infinities are a tie."""
    with np.errstate(invalid="ignore"):
        return np.where(x[:, None] == y, 0.0, x[:, None] - y)


def _margin(scores: NDArray[np.float64], k: int) -> float:
    if k >= len(scores) or np.isnan(scores).any():
        return np.nan if np.isnan(scores).any() else np.inf
    ranked = np.sort(scores)[::-1]
    return 0.0 if ranked[k - 1] == ranked[k] else float(ranked[k - 1] - ranked[k])


def _ranked(trace: Any, layer: int, token: int) -> tuple[int, ...]:
    """The ids as the run lists them, by descending score; empty slots left out."""
    return tuple(int(i) for i in trace[f"layers.{layer}.moe.expert_ids"][token] if i >= 0)


def _experts(ids: list[int]) -> str:
    return f"expert{'s' * (len(ids) > 1)} {', '.join(map(str, ids))}"


def _name(kind: str) -> str:
    return kind.replace("_", " ")


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
