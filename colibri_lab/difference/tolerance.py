"""How far two right runs may stray: declared before the two are compared.

Either measured, from a pair that should be equal (`tolerance`), or derived (`declared`) from the arithmetic, the length
of the products and the depth, in units of eps, the spacing of numbers at 1 (2^-23 in float32):

    relative(tap) = eps · s · (amplification · carry + own),   carry = 24 √l at layer l,   s = max(1, √H / 16)

`carry` is what the residual stream brings into a layer: roundings of the layers before it, of random sign. `own` is
what the stage and those of its layer before it add. `s`: a product of H terms, in 16 partial sums, errs by about √(H /
16) roundings, of which up to 4 count as own. A softmax turns an absolute error of its logits into a relative one of its
values, so behind a router both are multiplied by the largest |logit| of A. In 16-bit arithmetic products are summed in
float32 and only their results rounded: a quarter of it all.

Behind a norm the two are also held to each other as wholes: where B ≈ f · A, f − 1 may be 1.5 eps + relative(tap) / √n
over n numbers of like size. Roundings have either sign and vanish in the mean (0.6 eps at most was seen in such taps),
so the epsilon of a norm, 1e-5 for 1e-6, is found at any depth: it makes f − 1 = −4.5e-6 (38 eps) at mean square 1.

The numbers of the table are 3 to 5 times the largest that was seen between the engine and transformers, 8 sizes of 4
families and 4 layers: attn.norm 1.3 eps in layer 0, then 6, 8 and 10 eps; layer outputs 5, 7, 9 and 10 eps.
"""

from __future__ import annotations

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
_CARRY = 24.0
_DRIFT = 1.5  # eps

# kind of tap -> (amplification of what the stream carries in, own roundings), in eps
_GROWTH = {
    "attn.norm": (1, 8), "attn.q": (2, 32), "attn.k": (2, 32), "attn.v": (2, 48), "attn.weights": (2, 48),
    "attn.out": (1, 24),
    "moe.input": (1, 16), "moe.router_logits": (1, 24), "moe.scores": (1, 24), "moe.gates": (1, 24),
    "moe.experts.*.input": (1, 16), "moe.experts.*.gate": (1, 24), "moe.experts.*.up": (1, 24),
    "moe.experts.*.hidden": (1.5, 40), "moe.experts.*.output": (1.5, 40),
    "moe.shared.gate": (1, 24), "moe.shared.output": (1.5, 40),
    "moe.routed": (2, 40), "moe.output": (2, 40),
    "mlp.input": (1, 16), "mlp.output": (1.5, 40),
    "output": (1, 0), "norm": (1, 8), "logits": (1, 24),
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
        return given
    if not (is_number(given) and 0 <= given < np.inf):
        raise ArgumentError(
            f"a tolerance is a number of at least 0 (a share of a tap's largest value), a Tolerance of lab.tolerance() "
            f"or None, not {given!r:.80}"
        )
    return Tolerance(float(given), {}, f"Given: {float(given):.2g} of the largest value of each tap.")


def declared(pair: Pair) -> Tolerance:
    """The tolerance where nothing was measured; of the numbers it looks only at the size of A's router logits."""
    arithmetic = [_arithmetic(pair, side) for side in "ab"]
    coarse = max(arithmetic, key=lambda name: _EPS[name])
    unit = _EPS[coarse] * (1.0 if coarse in ("float32", "float64") else 0.25)
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
    """What a softmax makes of an error of its logits: times the largest of them; at least 2."""
    raw = pair.a.meta["gate_rule"] in ("softmax_of_chosen", "raw_logits")  # their scores are the logits themselves
    probabilities = pair.as_probabilities(tap.path)
    if not (probabilities or tap.kind == "moe.gates" or (tap.kind == "moe.scores" and not raw)):
        return 1.0
    side = pair.b if probabilities == "a" else pair.a
    logits = side.get(f"layers.{tap.layer}.moe.router_logits")
    if logits is None:
        return 8.0  # unknown; the logits of a trained router are seldom larger
    values = np.abs(logits[: pair.n].astype(np.float32))
    return max(2.0, float(values[np.isfinite(values)].max(initial=0.0)))


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
