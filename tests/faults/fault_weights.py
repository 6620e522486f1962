"""Faults of single weights: a NaN, a signalling NaN, an Inf, an Inf that meets a zero."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from fault_case import Case, Expected, Index
from fault_models import Patient, Place

BITS = {  # (quiet NaN, signalling NaN, Inf) by stored dtype
    np.dtype(np.float32): (0x7FC00000, 0x7FA00001, 0x7F800000),
    np.dtype(np.float16): (0x7E00, 0x7D01, 0x7C00),
    np.dtype(ml_dtypes.bfloat16): (0x7FC0, 0x7FA1, 0x7F80),
}
FAULTS = {"weight NaN": 0, "signalling NaN": 1, "weight Inf": 2, "weight -Inf": 2}


def poke(array: np.ndarray, index: Index, fault: str) -> None:
    """Writes the bits of the fault into one element."""
    bits = BITS[array.dtype][FAULTS[fault]]
    words = array.view(f"u{array.itemsize}")
    words[index] = bits | (1 << (8 * array.itemsize - 1) if fault == "weight -Inf" else 0)


def row_index(patient: Patient, place: Place, row: int) -> tuple[Index, ...]:
    """Row of a weight as the place in what it makes. A product that q, k or v is made of has one axis, its tap has two:
    both names of the one value are right.
    """
    return ((row // patient.head_dim, row % patient.head_dim), row) if place.heads else (row,)


def weight_fault(patient: Patient, place: Place, fault: str, random: np.random.Generator, emulate=None) -> Case | None:
    """One element of one weight. None: it is swallowed (see `swallowed`), or nobody reads it."""
    trace = patient.clean(emulate)
    tokens = patient.tokens(place, trace)
    if not tokens or swallowed(patient, place, fault):
        return None
    array = patient.weight(place.weight)
    element = tuple(int(random.integers(size)) for size in array.shape)
    if place.what == "embed":
        tokens = [int(random.integers(len(patient.ids)))]
        element = (patient.ids[tokens[0]], element[1])
    poke(array, element, fault)
    index = (element[-1],) if place.what == "embed" else row_index(patient, place, element[0])
    if place.what.endswith(("q_norm", "k_norm")):  # the rotation joins a channel with its partner half a head away
        head, channel = divmod(element[0], patient.head_dim)
        index = ((head, channel % (patient.head_dim // 2)),)
    named: Index = element if len(element) > 1 else element[0]
    expected = Expected(
        place.path, place.layer, place.stage, tokens[0], index,
        frozenset({"embedding" if place.what == "embed" else "weight value"}),
        place.expert, (place.weight, named),
    )  # fmt: skip
    where = f"{place.weight}{list(element)}"
    return Case(fault, place.what, patient.name, where, {place.weight: array}, (expected,), emulate)


def swallowed(patient: Patient, place: Place, fault: str) -> bool:
    """An Inf that no tap shows: sigmoid(±Inf) is 0 or 1, and clip_qkv cuts an infinite v (q and k are normalised
    before they are cut, which makes a NaN of the Inf; their norm's own weight comes last, and is cut too).
    """
    if "Inf" not in fault:
        return False
    cut = patient.config.get("clip_qkv") is not None and place.what in ("attn.v", "attn.q_norm", "attn.k_norm")
    return place.what == "shared.gate_product" or cut


def zero_times_inf(patient: Patient, place: Place, random: np.random.Generator, emulate=None) -> Case | None:
    """A column of the input is exactly 0, and there one weight is Inf. The weight is the cause."""
    array = patient.weight(place.weight)
    if array.ndim != 2 or place.what == "embed":
        return None
    row, column = (int(random.integers(size)) for size in array.shape)
    changes = zero_column(patient, place, column)
    poke(array, (row, column), "weight Inf")
    trace = patient.run(changes, emulate).trace()  # what is zero changes the routing
    tokens = patient.tokens(place, trace)
    if not tokens:
        return None
    assert place.reads in ("context", "hidden") or not np.any(trace[place.reads][..., column])
    expected = Expected(
        place.path, place.layer, place.stage, tokens[0], row_index(patient, place, row),
        frozenset({"weight value"}), place.expert, (place.weight, (row, column)),
    )  # fmt: skip
    where = f"{place.weight}{[row, column]}"
    return Case("0 × inf", place.what, patient.name, where, changes | {place.weight: array}, (expected,), emulate)


def zero_column(patient: Patient, place: Place, column: int) -> dict[str, np.ndarray]:
    """Weights that make one column of the operation's input 0."""
    prefix = f"layers.{place.layer}."
    if place.reads == "context":
        head, channel = divmod(column, patient.head_dim)
        group = int(patient.config.num_attention_heads) // int(patient.config.num_key_value_heads)
        row = head // group * patient.head_dim + channel
        names = [name for name in (prefix + "attn.v", prefix + "attn.v.bias") if name in patient.model.weights]
    elif place.what.endswith("down"):
        row, names = column, [place.weight.removesuffix("down") + "up"]
    else:
        norms = {prefix + "attn.norm": prefix + "attn_norm", "norm": "norm"}
        row, names = column, [norms.get(place.reads, prefix + "moe_norm")]
    changes = {name: patient.weight(name) for name in names}
    for array in changes.values():
        array[row] = 0
    return changes
