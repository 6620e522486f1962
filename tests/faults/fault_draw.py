"""The seeded draw: which faults, where, how many of each.

Faults that do not exist in a stage, and why:
- weight Inf and overflow in `shared.gate_product`: sigmoid(±Inf) is 0 or 1, no tap shows it; likewise v under clip_qkv.
- overflow of `attn.weights`, `moe.scores`, `moe.gates`, `moe.shared.gate`: they lie between 0 and 1; of the context and
  of `moe.routed`: sums weighted by numbers that add up to at most 1 are no larger than their largest term.
- overflow of `middle` and `output` in float32: a stream above 2^64 has an infinite mean square, so its norm is 0 and so
  is what is added to it. In float16 it can be done, and is.
- inf − inf: only sums of products have terms of both signs that overflow.
- 0 × inf among finite operands: no operation of the engine multiplies by what overflowed inside it; so an Inf weight
  meets a zero, and the weight is the cause.
- zero variance: norms alone. The last norm would need a stream that the last experts cancel exactly.
- masked row: the engine masks no key, so only failing arithmetic (fault_hooked.py) makes one; router logits of −Inf are
  an origin of their own before the softmax reads them.
- bad scale: what a configuration could say is refused by open() (tests/test_faults.py); fault_hooked.py does the rest.
- stale rows: at every point by fault_hooked.py, but `moe.output` without a shared expert, which is `moe.routed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from fault_case import Case
from fault_models import NAMES, Patient, Place, patient, without_eps
from fault_sums import (
    aggregate_overflow,
    embed_overflow,
    hidden_overflow,
    inf_minus_inf,
    norm_overflow,
    overflow,
    residual_overflow,
    score_overflow,
    zero_variance,
)
from fault_weights import FAULTS, weight_fault, zero_times_inf

Maker = Callable[[Patient, Place, np.random.Generator], Case | None]
EPS0 = ("mixtral", "qwen3_moe", "olmoe", "qwen2_moe_step")
EMULATED = ("float16", "bfloat16")


def some_layers(p: Patient) -> set[int | None]:
    """All of a small model; the first, a middle and the last of a larger one."""
    layers = p.layers if len(p.layers) <= 4 else [p.layers[0], p.layers[len(p.layers) // 2], p.layers[-1]]
    return {None, *layers}


def _makers() -> dict[str, tuple[Maker, ...]]:
    def weights(fault: str) -> Maker:
        return lambda p, place, random: weight_fault(p, place, fault, random)

    makers: dict[str, tuple[Maker, ...]] = {fault: (weights(fault),) for fault in FAULTS}
    makers["overflow"] = (overflow, norm_overflow, hidden_overflow, score_overflow, aggregate_overflow)
    makers["inf − inf"] = (inf_minus_inf,)
    makers["0 × inf"] = (zero_times_inf,)
    return makers


def _emulated(emulate: str) -> dict[str, tuple[Maker, ...]]:
    def with_format(make: Callable[..., Case | None], *given: str) -> Maker:
        return lambda p, place, random: make(p, place, *given, random, emulate)

    return {
        f"overflow, {emulate}": tuple(map(with_format, (overflow, norm_overflow, hidden_overflow))),
        f"weight NaN, {emulate}": (with_format(weight_fault, "weight NaN"),),
        f"weight Inf, {emulate}": (with_format(weight_fault, "weight Inf"),),
        f"0 × inf, {emulate}": (with_format(zero_times_inf),),
    }


def draw(seed: int, count: int, folder: Path) -> Iterator[Case]:
    """`count` cases of each fault in each stage, over models, layers and experts; fewer where fewer can be made."""
    random = np.random.default_rng(seed)
    patients = [patient(name) for name in NAMES]
    for fault, makers in _makers().items():
        yield from _cases(fault, makers, patients, count, random)
    for emulate in EMULATED:
        for fault, makers in _emulated(emulate).items():
            yield from _cases(fault, makers, patients, max(1, count // 2), random)
    yield from _cases("overflow, float16", (residual_overflow, embed_overflow), patients, count, random)
    yield from _cases("zero variance", (zero_variance,), [without_eps(name, folder) for name in EPS0], count, random)


def _cases(
    fault: str, makers: tuple[Maker, ...], patients: list[Patient], count: int, random: np.random.Generator
) -> Iterator[Case]:
    choices: dict[str, list[tuple[Patient, Place, Maker]]] = {}
    for p in patients:
        for place in p.places():
            if place.layer in some_layers(p):
                for number, make in enumerate(makers):
                    choices.setdefault(f"{place.what} {number}", []).append((p, place, make))
    for of in choices.values():
        made = 0
        for i in [int(i) for _ in range(count) for i in random.permutation(len(of))]:
            p, place, make = of[i]
            if made == count:
                break
            case = make(p, place, random)
            if case is not None:
                made += 1
                yield case
