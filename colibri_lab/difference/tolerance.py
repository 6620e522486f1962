"""How far two right runs may stray: declared before the two are compared.

Either measured, from a pair that should be equal (`tolerance`), or derived (`declared`) from the arithmetic, the length
of the products and the depth, in units of eps, the spacing of numbers at 1 (2^-23 in float32):

    relative(tap) = eps · s · (amplification · carry + own),   carry = 16 √l at layer l,   s = max(1, √H / 16)

`carry` is what the residual stream brings into a layer: roundings of the layers before it, of random sign. `own` is
what the stage and those of its layer before it add. `s`: a product of H terms, in 16 partial sums, errs by about √(H /
16) roundings, of which up to 4 count as own. In 16-bit arithmetic products are summed in float32 and only their results
rounded: 2/5 of it all.

Scores and gates: a softmax changes p by p (1 − p) (dz − the mean dz), so an error of r · max |z| of the logits is one
of p (1 − p) / max p · max |z| · r of the probabilities, at most a quarter of max |z| · r where an expert may have all
of the weight. It is taken at the p of A for which it is largest, and at least once r. A sigmoid has the same slope.

Behind a norm the two are also held to each other as wholes: where B ≈ f · A, f − 1 may be 1.5 eps + relative(tap) / √n
over n numbers of like size. Roundings have either sign and vanish in the mean (0.6 eps at most was seen in such taps),
so the epsilon of a norm, 1e-5 for 1e-6, is found at any depth: it makes f − 1 = −4.5e-6 (38 eps) at mean square 1.

The numbers of the table are 2 to 4 times the largest that was seen in clean pairs: the engine in float32 beside
transformers in float32, bfloat16 and float16, both attentions, 4 families of 4 to 12 layers and the bundled model.
attn.norm, in eps of float32: 1.6 in layer 0, then 7, 8, 10, 11, and 18 in layer 11; in eps of bfloat16 or float16: 0.5,
then 1.9, 2.8, 4.2, 3.4, and 3.2 in layer 11.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from colibri_lab.difference.pair import Pair, trace_from
from colibri_lab.difference.reach import errors_apart_from_flips
from colibri_lab.difference.result import Tolerance
from colibri_lab.difference.taps import Tap, parse
from colibri_lab.errors import ArgumentError, is_number

if TYPE_CHECKING:
    from colibri_lab.trace import HasTrace, Trace

__all__ = ["FACTOR", "declared", "resolve", "tolerance"]

FACTOR = 10.0
"""A measured tolerance is this many times the noise: one pair shows a typical noise, not the largest."""

_FLOOR = 8.0  # eps: what a norm, the shortest chain of roundings, is granted
_EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10, "float64": 2.0**-52}
_CARRY = 16.0
_RESULTS_ONLY = 0.4  # of the roundings: what 16-bit arithmetic rounds
_LARGEST_LOGIT = 16.0  # where they were not kept; the logits of a trained router are seldom larger
_DRIFT = 1.5  # eps

# kind of tap -> (amplification of what the stream carries in, own roundings), in eps
_GROWTH = {
    "attn.norm": (1, 5), "attn.q": (1.25, 12), "attn.k": (1.25, 12), "attn.v": (1.25, 12), "attn.weights": (1, 20),
    "attn.out": (1, 14),
    "moe.input": (1, 14), "moe.router_logits": (1, 14), "moe.scores": (1, 14), "moe.gates": (1, 14),
    "moe.experts.*.input": (1, 14), "moe.experts.*.gate": (1, 14), "moe.experts.*.up": (1, 14),
    "moe.experts.*.hidden": (1.5, 18), "moe.experts.*.output": (1.5, 18),
    "moe.shared.gate": (1, 14), "moe.shared.output": (1.5, 18),
    "moe.routed": (2, 24), "moe.output": (2, 24),
    "mlp.input": (1, 14), "mlp.output": (1.5, 18),
    "output": (1, 0), "norm": (1, 5), "logits": (1, 14),
}  # fmt: skip


def tolerance(x: Trace | HasTrace | Any, y: Trace | HasTrace | Any) -> Tolerance:
    """Measures the tolerance from two runs that should be equal, traces, sessions or paths of traces.

    Such a pair is the reference run twice with another order of summation (another attention, other kernels, another
    machine) or in another number type. Each tap is granted ten times the noise seen there, and at least eight spacings
    of float32 (or of the wider of the two stored formats). Tokens that the two runs sent to different experts, and all
    that depends on them, measure no noise and are left out. Raises ArgumentError when the two share no tap or token, or
    when they are one and the same bits everywhere: that measures nothing.
    """
    pair = Pair(trace_from(x), trace_from(y))
    by_tap: dict[str, float] = {}
    same, drift = True, 0.0
    for tap, error, untouched in errors_apart_from_flips(pair):
        noise = float(error.relative_by_row[untouched].max(initial=0.0))
        if not np.isfinite(noise):
            raise ArgumentError(
                f"{tap.path} differs by {noise} between two runs that should be equal; a tolerance cannot be "
                "measured from them"
            )
        same &= error.same_bits
        if tap.scaled:
            drift = max(drift, abs(error.drift(untouched)[0]))
        by_tap[tap.path] = max(FACTOR * noise, _FLOOR * max(_stored_eps(pair, tap), _EPS["float32"]))
    if same:
        raise ArgumentError(
            "these two runs are the same bits everywhere, so they show no noise; measure with another order of "
            "summation, another attention or another number type, or leave the tolerance to its default"
        )
    words = (
        f"Measured: {FACTOR:g} times the difference of two runs that should be equal, tap by tap, and at least "
        f"{_FLOOR * _EPS['float32']:.2g} of the largest value."
    )
    return Tolerance(max(by_tap.values()), by_tap, words, max(FACTOR * drift, _DRIFT * _EPS["float32"]))


def resolve(given: float | Tolerance | None, pair: Pair) -> Tolerance:
    """The tolerance that a caller of `diff` asked for. Raises ArgumentError."""
    if given is None:
        return declared(pair)
    if isinstance(given, Tolerance):
        odd = {path: value for path, value in {"": given.relative, **given.by_tap}.items() if not 0 <= value < np.inf}
        if odd:
            path, value = next(iter(odd.items()))
            where = f"of {path}" if path else "in general"
            raise ArgumentError(f"this Tolerance allows {value} {where}, which is no number of at least 0")
        return given
    if not (is_number(given) and 0 <= given <= sys.float_info.max):
        raise ArgumentError(
            f"a tolerance is a number of at least 0 (a share of a tap's largest value), a Tolerance of lab.tolerance() "
            f"or None, not {given!r:.80}"
        )
    return Tolerance(float(given), {}, f"Given: {float(given):.2g} of the largest value of each tap.")


def declared(pair: Pair) -> Tolerance:
    """The tolerance where nothing was measured; of the numbers it looks only at the size of A's router logits."""
    arithmetic = [_arithmetic(pair, side) for side in "ab"]
    coarse = max(arithmetic, key=lambda name: _EPS[name])
    unit = _EPS[coarse] * (1.0 if coarse in ("float32", "float64") else _RESULTS_ONLY)
    unit = max(unit, _EPS["float32"])  # nobody stores more than float32
    unit *= max(1.0, np.sqrt(_width(pair)) / 16)
    by_tap = {}
    for tap in pair.taps():
        eps = unit * _growth(tap, len(pair.a.layers)) * _sharpness(pair, tap)
        stored = _stored_eps(pair, tap)
        by_tap[tap.path] = eps + (stored if stored > _EPS["float32"] else 0.0) + _printed(pair, tap)
    floats = [value for path, value in by_tap.items() if not path.endswith(".expert_ids")]
    low, high = min(floats, default=_FLOOR * unit), max(floats, default=_FLOOR * unit)
    unsaid = [name for name, trace in (("A", pair.a), ("B", pair.b)) if _only_routes(trace)]
    if unsaid:
        pair.notes.append(
            f"{' and '.join(unsaid)} does not say in which arithmetic it was computed; {coarse} is assumed. If it was "
            "a shorter format, measure the tolerance with lab.tolerance, or flips of near-ties count as defects."
        )
    words = (
        f"Declared before the comparison from the roundings of {coarse}: {low:.1g} of the largest value at the first "
        f"taps, growing with depth to {high:.1g}."
    )
    return Tolerance(high, by_tap, words, _DRIFT * unit)


def _growth(tap: Tap, layers: int) -> float:
    """Roundings that a tap may differ by, in eps."""
    if tap.kind == "embed":
        return 4.0  # looked up; some families multiply it by a constant
    if tap.kind == "moe.expert_ids":
        return 0.0
    depth = layers if tap.layer < 0 else tap.layer + (tap.kind == "output")
    amplification, own = _GROWTH[tap.kind]
    return amplification * _CARRY * float(np.sqrt(depth)) + own


def _sharpness(pair: Pair, tap: Tap) -> float:
    """By how much a softmax makes an error of its logits a larger one of its values; at least 1."""
    rule = pair.a.meta["gate_rule"]
    probabilities = pair.as_probabilities(tap.path)
    of_logits = {
        "moe.scores": rule in ("softmax_of_chosen", "raw_logits"),  # their scores are the logits themselves
        "moe.gates": rule == "raw_logits",
    }
    if not probabilities and of_logits.get(tap.kind, True):
        return 1.0
    values_of, logits_of = {"": (pair.a, pair.a), "a": (pair.a, pair.b), "b": (pair.b, pair.a)}[probabilities]
    logits = logits_of.get(f"layers.{tap.layer}.moe.router_logits")
    largest = _LARGEST_LOGIT if logits is None else _size(logits[: pair.n])
    p = np.abs(values_of[tap.stored][: pair.n].astype(np.float64))
    p = p[np.isfinite(p)]
    whole = float(p.max(initial=0.0))
    if not whole:
        return 1.0
    p /= max(1.0, whole)  # gates may be scaled
    return max(1.0, largest * float((p * (1 - p)).max()) / min(1.0, whole))


def _size(values: Any) -> float:
    wide = np.abs(values.astype(np.float32))
    return float(wide[np.isfinite(wide)].max(initial=0.0))


def _arithmetic(pair: Pair, side: str) -> str:
    """In which number type a run was computed: as it says, else the finest in which it stores activations."""
    trace = pair.a if side == "a" else pair.b
    said = _arithmetic_said(trace)
    if said is not None:
        return said
    taps = [tap for tap in pair.taps() if tap.kind != "moe.expert_ids"]
    values = [tap for tap in taps if tap.stage != "router"] or taps  # some compute routers in float32
    stored = {pair.dtypes[tap.path][side == "b"] for tap in values} & _EPS.keys()
    return min(stored, key=lambda name: _EPS[name], default="float32")


def _only_routes(trace: Trace) -> bool:
    """Whether nothing shows in which arithmetic it was computed."""
    taps = [tap for tap in map(parse, trace) if tap is not None]
    return _arithmetic_said(trace) is None and all(tap.stage == "router" for tap in taps)


def _arithmetic_said(trace: Trace) -> str | None:
    said = str(trace.meta.get("arithmetic", "")).removeprefix("torch.")
    return said if said in _EPS else None


def _stored_eps(pair: Pair, tap: Tap) -> float:
    return max(_EPS.get(name, 0.0) for name in pair.dtypes[tap.path])


def _printed(pair: Pair, tap: Tap) -> float:
    """What was lost where a recording keeps some decimals only: half a unit of the last one, relative."""
    lost = 0.0
    for trace in (pair.a, pair.b):
        meta = trace.meta
        decimals = meta.get("gates_decimals") if tap.kind == "moe.gates" else 4 if meta.get("printed") is True else None
        if tap.kind == "logits" and "logits_floor" in meta:
            lost = max(lost, 1 / 65535)  # a KL base: 16 bits over the range of its values
        if isinstance(decimals, int):
            values = pair.a[tap.stored]
            largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0)) or 1.0
            lost = max(lost, 0.5 * 10.0**-decimals / largest)
    return 1.01 * lost


def _width(pair: Pair) -> int:
    """H, the length of most products."""
    for kind in ("attn.norm", "moe.input", "output", "mlp.input", "moe.output", "norm", "embed"):
        for tap in pair.taps():
            if tap.kind == kind:
                return int(pair.a[tap.stored].shape[-1])
    return 256
