"""Faults of finite weights: products and sums that leave the range of the format, by how much NumPy says.

A weight row is scaled by a power of two, which scales everything that is linear in it exactly. The engine's order of
summation (16 lanes, then 16→8→4→2→1) is followed step by step, so that the first token and the kind are known;
where a partial sum comes near the limit the draw is thrown away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from fault_case import Case, Expected, Index
from fault_models import Patient, Place
from fault_weights import row_index

LIMIT = {None: 2.0**128, "float16": 65520.0, "bfloat16": 2.0**128 * (1 - 2.0**-9)}  # from here on: Inf
NEAR = 0.02  # a share of the limit: nearer than this no claim is made; more than any rounding of a row of bfloat16
TRIES = 12


@dataclass(frozen=True)
class Sums:
    values: np.ndarray  # (T,) as float32 gives them
    close: bool  # something came near the limit


def lane_sums(w: np.ndarray, x: np.ndarray, bias: float = 0.0, limit: float = 2.0**128) -> Sums:
    """The products of one weight row with rows x (T, n) as the engine sums them, and rounded to a narrower format."""
    w, x = w.astype(np.float64), x.astype(np.float64)
    lanes, close = np.zeros((len(x), 16)), False

    def rounded(value: np.ndarray, top: float) -> np.ndarray:
        nonlocal close
        size = np.abs(value)
        close = close or bool(np.any((size > top * (1 - NEAR)) & (size < top * (1 + NEAR))))
        return np.where(size >= top, np.copysign(np.inf, value), value)

    with np.errstate(invalid="ignore"):  # Inf − Inf is what is looked for
        for i in range(0, len(w), 16):
            part = slice(i, min(i + 16, len(w)))
            lanes[:, : part.stop - i] = rounded(w[part] * x[:, part] + lanes[:, : part.stop - i], 2.0**128)
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = rounded(lanes[:, :half] + lanes[:, half:], 2.0**128)
        return Sums(rounded(rounded(lanes[:, 0] + bias, 2.0**128), limit), close)


def scaled(array: np.ndarray, rows: object, power: int) -> np.ndarray | None:
    """The array with some rows times 2^power; None when that leaves the stored format."""
    out = array.copy()
    with np.errstate(over="ignore"):
        out[rows] = (out[rows].astype(np.float64) * 2.0**power).astype(out.dtype)
    return out if np.isfinite(out.astype(np.float64)).all() else None


def kind_of(value: float) -> str:
    return "inf − inf" if math.isnan(value) else "overflow"


def expect(place: Place, token: int, index: tuple[Index, ...], kind: str) -> Expected:
    return Expected(place.path, place.layer, place.stage, token, index, frozenset({kind}), place.expert)


def power_for(largest: float, limit: float) -> int:
    """The least power of two that puts the largest value 5 % over the limit."""
    return math.ceil(math.log2(1.05 * limit / largest))


def overflow(patient: Patient, place: Place, random: np.random.Generator, emulate: str | None = None) -> Case | None:
    """One row of a product is too large for some token; the first such is the origin's."""
    if not place.reads or place.what in ("shared.gate_product", "norm"):
        return None
    if patient.config.get("clip_qkv") is not None and place.what == "attn.v":
        return None  # cut: see fault_weights.swallowed
    trace, limit = patient.clean(emulate), LIMIT[emulate]
    tokens = patient.tokens(place, trace)
    if not tokens:
        return None
    x, weight = patient.inputs(place, trace), patient.weight(place.weight)
    bias_name = place.weight + ".bias"
    bias = patient.weight(bias_name) if bias_name in patient.model.weights else None
    for row in random.permutation(len(weight))[:TRIES].tolist():
        now = lane_sums(weight[row], x)
        if not (largest := float(np.abs(now.values).max())):
            continue
        array = scaled(weight, row, power_for(largest, limit))
        if array is None:
            continue
        after = lane_sums(array[row], x, 0.0 if bias is None else float(bias[row]), limit)
        broken = np.flatnonzero(~np.isfinite(after.values))
        if after.close or not len(broken):
            continue
        first = int(broken[0])
        expected = expect(place, tokens[first], row_index(patient, place, row), kind_of(after.values[first]))
        where = f"{place.weight}[{row}]"
        return Case("overflow", place.what, patient.name, where, {place.weight: array}, (expected,), emulate)
    return None


def inf_minus_inf(patient: Patient, place: Place, random: np.random.Generator) -> Case | None:
    """Two products of one sum overflow with opposite signs, in different lanes; all else of the row is 0."""
    if not place.reads or place.what in ("shared.gate_product", "norm"):
        return None
    trace = patient.clean()
    tokens = patient.tokens(place, trace)
    if not tokens:
        return None
    x, weight = patient.inputs(place, trace), patient.weight(place.weight)
    top = 3.3e38
    for row in random.permutation(len(weight))[:TRIES].tolist():
        large = np.argsort(-np.abs(x[0].astype(np.float64)))[:4]
        pairs = [(int(a), int(b)) for a in large for b in large if a < b and a % 16 != b % 16]
        for a, b in pairs:
            array = weight.copy()
            array[row] = 0
            array[row, a], array[row, b] = np.copysign(top, x[0, a]), -np.copysign(top, x[0, b])
            after = lane_sums(array[row], x)
            if after.close or not math.isnan(after.values[0]):
                continue
            expected = expect(place, tokens[0], row_index(patient, place, row), "inf − inf")
            where = f"{place.weight}[{row}, {a} and {b}]"
            return Case("inf − inf", place.what, patient.name, where, {place.weight: array}, (expected,))
    return None


def norm_overflow(
    patient: Patient, place: Place, random: np.random.Generator, emulate: str | None = None
) -> Case | None:
    """The weight of a norm makes one channel too large. The taps of norms are normalised value times weight."""
    if place.what not in ("attn.norm", "moe.input", "mlp.input", "norm"):
        return None
    trace, weight, limit = patient.clean(emulate), patient.weight(place.weight), LIMIT[emulate]
    for channel in random.permutation(len(weight))[:TRIES].tolist():
        column = trace[place.path][:, channel].astype(np.float64)
        if emulate is None:
            power = power_for(float(np.abs(column).max()), limit)
        else:  # the tap was rounded: twice the limit is far enough from it
            power = power_for(float(np.abs(column).max()), 1.9 * limit)
        array = scaled(weight, channel, power)
        after = np.abs(column * 2.0**power)
        if array is None or np.any((after > limit * (1 - 0.02)) & (after < limit * 1.02)):
            continue
        token = int(np.flatnonzero(after >= limit)[0])
        expected = expect(place, token, (channel,), "overflow")
        where = f"{place.weight}[{channel}]"
        return Case("overflow", place.what, patient.name, where, {place.weight: array}, (expected,), emulate)
    return None


def hidden_overflow(
    patient: Patient, place: Place, random: np.random.Generator, emulate: str | None = None
) -> Case | None:
    """act(gate) · up, both finite, are too large together: in experts, shared experts and dense networks."""
    if not place.what.endswith(".gate") or not place.reads:
        return None
    trace, limit = patient.clean(emulate), LIMIT[emulate]
    tokens = patient.tokens(place, trace)
    if not tokens:
        return None
    up_name, x = place.weight.removesuffix("gate") + "up", patient.inputs(place, trace)
    gate, up = patient.weight(place.weight), patient.weight(up_name)
    for row in random.permutation(len(gate))[:TRIES].tolist():
        g, u = lane_sums(gate[row], x).values, lane_sums(up[row], x).values
        if g.max() < 0.1:
            continue
        power = 12 if emulate is None else 6  # of gate: so large that act(gate) is gate, or 0
        act = np.where(g > 0, g * 2.0**power, 0.0)
        vague = np.abs(g * 2.0**power) < 110  # act is neither
        largest = float(np.abs(act * u).max())
        if not largest or np.any(vague):
            continue
        rise = power_for(largest, 1.2 * limit)
        new_gate, new_up = scaled(gate, row, power), scaled(up, row, rise)
        after = np.abs(act * u) * 2.0**rise
        high = np.maximum(np.abs(u) * 2.0**rise, np.abs(g) * 2.0**power)
        if new_gate is None or new_up is None or high.max() > limit / 2:
            continue
        if np.any((after > limit * (1 - 0.02)) & (after < limit * 1.02)):
            continue
        point = place.path.removesuffix("gate") + "hidden" if place.expert is not None else place.path
        expected = Expected(
            point, place.layer, place.stage, tokens[int(np.flatnonzero(after >= limit)[0])], (row,),
            frozenset({"overflow"}), place.expert,
        )  # fmt: skip
        what = place.what.removesuffix("gate") + "hidden"
        changes = {place.weight: new_gate, up_name: new_up}
        return Case("overflow", what, patient.name, f"{place.weight}[{row}]", changes, (expected,), emulate)
    return None


def score_overflow(patient: Patient, place: Place, random: np.random.Generator) -> Case | None:
    """q · k is too large for some pair of a token and a key. Only where q and k are not normalised."""
    if place.what != "attn.q" or f"{place.weight}_norm" in patient.model.weights:
        return None
    trace, at = patient.clean(), place.path.removesuffix("q")
    q, k = trace[at + "q"].astype(np.float64), trace[at + "k"].astype(np.float64)
    dim, group = patient.head_dim, q.shape[1] // k.shape[1]
    for head in random.permutation(q.shape[1]).tolist():
        keys = k[:, head // group]
        largest = max(abs(float(q[t, head] @ keys[s])) for t in range(len(q)) for s in range(t + 1))
        power = power_for(largest, 2.0**128)
        first, second = power // 2, power - power // 2
        names = [(at + "q", head, first), (at + "k", head // group, second)]
        changes: dict[str, np.ndarray] = {}
        for name, of, by in names:
            for part in (name, name + ".bias"):
                if part in patient.model.weights:
                    array = scaled(patient.weight(part), slice(of * dim, (of + 1) * dim), by)
                    assert array is not None
                    changes[part] = array
        found, close = None, False
        for t in range(len(q)):
            pairs = [lane_sums(keys[s] * 2.0**second, q[t : t + 1, head] * 2.0**first) for s in range(t + 1)]
            values = np.array([p.values[0] for p in pairs])
            close = close or any(p.close for p in pairs)
            if not np.isfinite(values).all():
                shown = np.any(np.isnan(values) | (values == np.inf)) or np.all(values == -np.inf)
                found = (t, int(np.flatnonzero(~np.isfinite(values))[0]), shown, values)
                break
        if close or found is None or not found[2]:  # a -Inf beside finite scores has the weight 0: no tap shows it
            continue
        token, key, _, values = found
        expected = Expected(
            at + "weights", place.layer, "attention", token, ((head, key),), frozenset({kind_of(values[key])})
        )
        return Case("overflow", "attn.scores", patient.name, f"{at}q · k, head {head}", changes, (expected,))
    return None


def zero_variance(patient: Patient, place: Place, random: np.random.Generator) -> Case | None:
    """A norm of zeros with an eps of 0. `patient` is one without eps."""
    weights, variance = patient.model.weights, frozenset({"variance"})

    def case(path: str, stage: str, token: int, index: Index, changes: dict[str, np.ndarray]) -> Case:
        expected = Expected(path, place.layer, stage, token, (index,), variance)
        return Case("zero variance", place.what, patient.name, path, changes, (expected,), patient=patient)

    if place.what == "attn.norm" and place.layer == 0:
        token = int(random.integers(len(patient.ids)))
        embed = patient.weight("embed")
        embed[patient.ids[token]] = 0 if random.integers(2) else 1e-30  # whose squares are 0 too
        return case(place.path, place.stage, token, 0, {"embed": embed})
    if place.what in ("attn.q_norm", "attn.k_norm"):
        product, dim = place.path, patient.head_dim
        array = patient.weight(product)
        whole = len(weights[place.weight]) > dim
        head = 0 if whole else int(random.integers(len(array) // dim))
        array[slice(None) if whole else slice(head * dim, (head + 1) * dim)] = 0
        return case(place.path, place.stage, 0, (head, 0), {product: array})
    if place.what in ("moe.input", "mlp.input"):
        return _cancelled(patient, place, random, case)
    return None


def _cancelled(patient: Patient, place: Place, random: np.random.Generator, case) -> Case | None:
    """attn.out is made to be minus what enters the layer, for token 0: v of its one key is 1 in one channel."""
    layer, trace = place.layer or 0, patient.clean()
    at = f"layers.{layer}.attn."
    x = trace["embed" if layer == 0 else f"layers.{layer - 1}.output"][0]
    norm = trace[at + "norm"][0]
    v, out = patient.weight(at + "v"), patient.weight(at + "o")
    v[:], out[:] = 0, 0
    for column in random.permutation(len(norm)).tolist():
        weight = np.float32(1) / norm[column]
        near = [np.nextafter(weight, np.float32(side), dtype=np.float32) for side in (-np.inf, np.inf)]
        exact = [w for w in (weight, *near) if np.float32(w * norm[column]) == 1]
        if exact:
            v[0, column] = exact[0]
            break
    else:
        return None
    out[:, 0] = -x
    changes = {at + "v": v, at + "o": out}
    if at + "v.bias" in patient.model.weights:
        changes[at + "v.bias"] = np.zeros_like(patient.weight(at + "v.bias"))
    return case(place.path, place.stage, 0, 0, changes)


def residual_overflow(patient: Patient, place: Place, random: np.random.Generator) -> Case | None:
    """In float16 the stream is large in one channel of one token, and what is added to it is large there too: the sum
    behind attention (the vehicle is its output projection) or behind the experts (all their down projections).
    """
    at, limit = f"layers.{place.layer}.", LIMIT["float16"]
    if place.what == "attn.out":
        names, added = [place.weight], place.path
        path = at + ("moe.input" if f"{at}moe.router" in patient.model.weights else "mlp.input")
        stage, what = "router" if "moe" in path else "mlp", "middle"
    elif place.what == "mlp.down" or (place.what == "experts.down" and place.expert == 0):
        names = [place.weight]
        if place.expert is not None:
            names = [f"{at}moe.experts.{e}.down" for e in range(int(patient.config.num_experts))]
        if place.expert is not None and f"{at}moe.shared.down" in patient.model.weights:
            return None  # the shared expert's part is not scaled
        added = at + ("mlp" if place.expert is None else "moe") + ".output"
        path, stage, what = at + "output", "residual", "output"
    else:
        return None
    token, channel = int(random.integers(len(patient.ids))), int(random.integers(patient.hidden))
    embed = patient.weight("embed")
    embed[patient.ids[token], channel] = 40000
    trace = patient.run({"embed": embed}, "float16").trace()
    if any(not np.isfinite(trace[path]).all() for path in ("embed", "logits")):
        return None
    before = "embed" if place.layer == 0 else f"layers.{(place.layer or 0) - 1}.output"
    stream = trace[before][:, channel].astype(np.float64)
    if what == "output":
        stream = stream + trace[at + "attn.out"][:, channel]
    plus = trace[added][:, channel].astype(np.float64)
    if abs(plus[token]) < 1e-3:
        return None
    power = math.floor(math.log2(0.9 * limit / abs(plus[token])))
    sign = math.copysign(1.0, plus[token] * stream[token])
    rows = [plus]
    if place.expert is not None:
        rows += [trace[f"{at}moe.experts.{e}.output"][:, channel] for e in range(len(names))]
    changes = {"embed": embed}
    for name in names:
        array = scaled(patient.weight(name), channel, power)
        if array is None:
            return None
        array[channel] *= array.dtype.type(sign)
        changes[name] = array
    sums = stream + plus * 2.0**power * sign
    largest = max(float(np.abs(values).max(initial=0)) for values in rows) * 2.0**power
    if largest > 0.97 * limit or not np.any(np.abs(sums) > limit * 1.03):
        return None
    if np.any((np.abs(sums) > limit * 0.97) & (np.abs(sums) < limit * 1.03)):
        return None
    expected = Expected(
        path, place.layer, stage, int(np.flatnonzero(np.abs(sums) > limit)[0]), (channel,), frozenset({"overflow"})
    )
    return Case("overflow", what, patient.name, f"{path}, channel {channel}", changes, (expected,), "float16")


def aggregate_overflow(patient: Patient, place: Place, random: np.random.Generator) -> Case | None:
    """The routed sum and the shared expert are both finite and too large together."""
    if place.what != "shared.down":
        return None
    trace, at = patient.clean(), f"layers.{place.layer}.moe."
    names = [f"{at}experts.{e}.down" for e in range(int(patient.config.num_experts))]
    limit = 2.0**128
    for channel in random.permutation(patient.hidden).tolist():
        routed = trace[at + "routed"][:, channel].astype(np.float64)
        shared, gate = trace[at + "shared.output"][:, channel].astype(np.float64), trace[at + "shared.gate"][:, 0]
        rows = [trace[f"{at}experts.{e}.output"][:, channel] for e in range(len(names))]
        outputs = max(float(np.abs(values).max(initial=0)) for values in rows)
        a = math.floor(math.log2(0.97 * limit / max(outputs, float(np.abs(routed).max()))))
        b = math.floor(math.log2(0.97 * limit / float(np.abs(shared).max())))
        sums = np.abs(routed * 2.0**a + gate * shared * 2.0**b)
        if not np.any(sums > limit * 1.02) or np.any((sums > limit * 0.98) & (sums < limit * 1.02)):
            continue
        changes = {name: scaled(patient.weight(name), channel, a) for name in names}
        changes[place.weight] = scaled(patient.weight(place.weight), channel, b)
        if any(array is None for array in changes.values()):
            continue
        token = int(np.flatnonzero(sums > limit)[0])
        expected = Expected(at + "output", place.layer, "aggregator", token, (channel,), frozenset({"overflow"}))
        kept = {name: array for name, array in changes.items() if array is not None}
        return Case("overflow", "moe.output", patient.name, f"{at}output, channel {channel}", kept, (expected,))
    return None


def embed_overflow(patient: Patient, place: Place, random: np.random.Generator) -> Case | None:
    """A finite embedding that float16 cannot hold."""
    if place.what != "embed":
        return None
    token, channel = int(random.integers(len(patient.ids))), int(random.integers(patient.hidden))
    embed = patient.weight("embed")
    embed[patient.ids[token], channel] = 70000
    expected = Expected("embed", None, "embed", token, (channel,), frozenset({"overflow"}))
    where = f"embed[{patient.ids[token]}, {channel}]"
    return Case("overflow", "embed", patient.name, where, {"embed": embed}, (expected,), "float16")
