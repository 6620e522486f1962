"""Faults of the arithmetic itself, each run on the faulty engine and judged.

`python fault_hooked.py MODULE SEED COUNT` prints a JSON line for each case: {"fault", "what", "name", "place", "kind"};
empty place and kind: all right.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fault_engine

if __name__ == "__main__":  # before the package is imported
    set_fault = fault_engine.use(Path(sys.argv[1]))

import numpy as np
from fault_case import Case, Expected, Index, judge
from fault_models import NAMES, Patient, patient

import colibri_lab as lab
from colibri_lab.emulation import POINTS

POISON = 0x7FA5A5A5  # what memory that was never written holds in a test
NAN, INF, MINUS_INF = 0x7FC00000, 0x7F800000, 0xFF800000
BEHIND = {  # a point that is no tap: the tap that it counts under
    "attn.scores": "attn.weights", "attn.q.product": "attn.q", "attn.k.product": "attn.k", "attn.v.product": "attn.v",
    "attn.context": "attn.out", "shared.gate.product": "shared.gate",
}  # fmt: skip
STAGES = {
    "embed": "embed", "attn": "attention", "moe": "router", "experts": "expert", "shared": "shared",
    "routed": "aggregator", "output": "residual", "norm": "norm", "logits": "logits", "mlp": "mlp",
}  # fmt: skip


@dataclass(frozen=True)
class Spot:
    """A point of one model in which values can fail."""

    what: str  # without "layers.N."
    point: int
    path: str
    stage: str
    layer: int
    expert: int
    tap: bool


def spots(p: Patient, trace: lab.Trace) -> Iterator[Spot]:
    """Every point of the model, experts that are used each."""
    for number, pattern in enumerate(POINTS):
        what = pattern.removeprefix("layers.*.")
        for layer in p.layers if pattern.startswith("layers") else [-1]:
            moe = layer in trace.moe_layers
            shared = f"layers.{layer}.moe.shared.gate" in p.model.weights
            if (
                (what.startswith("moe") and not moe)
                or (what.startswith("mlp") and moe)
                or ("shared" in what and not shared)
            ):
                continue
            if what == "moe.output" and not shared:  # the same memory as moe.routed
                continue
            experts = (
                sorted({int(e) for e in trace[f"layers.{layer}.moe.expert_ids"].ravel()}) if "experts" in what else [-1]
            )
            for expert in experts:
                yield spot(p, number, what, layer, expert, moe)


def spot(p: Patient, number: int, what: str, layer: int, expert: int, moe: bool) -> Spot:
    name = what.replace("*", str(expert))
    behind = next((tap for point, tap in BEHIND.items() if name.endswith(point)), None)
    tap = name
    if what == "middle":
        tap = "moe.input" if moe else "mlp.input"
    elif ".inner." in what:
        tap = "moe.shared.output" if moe else "mlp.output"
    elif behind is not None:
        tap = name.replace(next(point for point in BEHIND if name.endswith(point)), behind)
    if what == "middle":
        stage = "router" if moe else "mlp"
    elif what in ("moe.routed", "moe.output"):
        stage = "aggregator"
    else:
        head = what.split(".")
        stage = STAGES[head[1] if len(head) > 1 and head[1] in ("experts", "shared") else head[0]]
    path = tap if layer < 0 else f"layers.{layer}.{tap}"
    return Spot(what, number, path, stage, layer, expert, tap == name)


def row_shape(p: Patient, s: Spot, trace: lab.Trace, token: int) -> tuple[int, ...]:
    """The axes of a token's row of the point."""
    c, dim = p.config, p.head_dim
    heads, kv_heads = int(c.num_attention_heads), int(c.num_key_value_heads)
    if s.what in ("attn.scores", "attn.weights"):
        return heads, token + 1
    if s.what in ("attn.context", "attn.q", "attn.q.product"):
        return heads, dim
    if s.what.startswith(("attn.k", "attn.v")):
        return kv_heads, dim
    if ".inner." in s.what:
        prefix = f"layers.{s.layer}.{'moe.shared' if s.what.startswith('moe') else 'mlp'}"
        return (len(p.model.weights[f"{prefix}.gate"]),)
    if s.what in ("middle",):
        return (p.hidden,)
    return tuple(trace[s.path].shape[1:])


def planted(p: Patient, s: Spot, fault: str, random: np.random.Generator) -> tuple[Case, tuple[int, ...]] | None:
    """The case and what set_fault takes; None: this fault does not exist at this point."""
    trace = p.clean()
    tokens = list(range(len(p.ids)))
    if s.expert >= 0:
        tokens = [int(t) for t in np.flatnonzero((trace[f"layers.{s.layer}.moe.expert_ids"] == s.expert).any(1))]
    token = tokens[int(random.integers(len(tokens)))]
    shape = row_shape(p, s, trace, token)
    n = int(np.prod(shape))
    kinds, bits = {"unknown"}, NAN if random.integers(2) else INF
    if fault == "stale buffer":
        first, last, bits, kinds = 0, n, POISON, {"uninitialised"}
    elif fault == "masked row" or fault == "bad scale":
        if s.what != "attn.scores":
            return None
        head = int(random.integers(shape[0]))
        first, last = head * shape[1], (head + 1) * shape[1]
        kinds = {fault.removeprefix("bad ")}
        bits = MINUS_INF if fault == "masked row" else bits
    else:
        first = int(random.integers(n))
        last = first + 1
    if fault == "arithmetic" and not shown(p, s, bits):
        return None
    indices: tuple[Index, ...] = (tuple(int(i) for i in np.unravel_index(first, shape)) if len(shape) > 1 else first,)
    if not s.tap:
        # What failed lies between two taps. Which values of the point they were can be told from the watch table
        # alone; what was broken is told by it too, or is "unknown" with what it would need.
        # Scores that are not finite although q · k is are "scale" by what the table shows, whoever spoiled them.
        indices = (*indices, first, *behind(p, s, first, token))
        kinds |= {"unknown"} if fault == "stale buffer" else set()
        kinds |= {"scale"} if s.what == "attn.scores" and fault != "masked row" else set()
    expected = Expected(
        s.path, s.layer if s.layer >= 0 else None, s.stage, token, indices, frozenset(kinds),
        s.expert if s.expert >= 0 else None,
    )  # fmt: skip
    case = Case(fault, s.what, p.name, f"{s.path}, token {token}, from value {first}", {}, (expected,))
    return case, (s.point, s.layer, s.expert, token, first, last, bits)


def shown(p: Patient, s: Spot, bits: int) -> bool:
    """Whether one such value reaches a tap: an Inf need not."""
    if bits == NAN:
        return True
    clipped = p.config.get("clip_qkv") is not None and s.what == "attn.v.product"
    return (
        s.what not in ("attn.scores", "moe.shared.gate.product", "middle")
        and ".inner.gate" not in s.what
        and not clipped
    )


def behind(p: Patient, s: Spot, first: int, token: int) -> list[Index]:
    """The first value of the tap's row that is not finite, where the point itself is not recorded."""
    if s.what == "attn.scores":
        return [(first // (token + 1), 0)]
    if s.what.endswith(".product") and s.what.startswith("attn"):
        part, dim = s.what.split(".")[1], p.head_dim
        head, channel = divmod(first, dim)
        if part == "v":
            return [(head, channel)]
        norm = f"layers.{s.layer}.attn.{part}_norm"
        if norm not in p.model.weights:
            return [(head, channel % (dim // 2))]
        return [(0, 0) if len(p.model.weights[norm]) > dim else (head, 0), (head, channel % (dim // 2))]
    return [0]


def main(seed: int, count: int) -> None:
    random = np.random.default_rng(seed)
    jobs: dict[tuple[str, str], list[tuple[str, Spot]]] = {}
    for name in NAMES:
        for s in spots(patient(name), patient(name).clean()):
            for fault in ("arithmetic", "stale buffer", "masked row", "bad scale"):
                jobs.setdefault((fault, s.what), []).append((name, s))
    for (fault, what), choices in jobs.items():
        done = 0
        for i in random.permutation(len(choices) * 4).tolist():
            name, s = choices[i % len(choices)]
            if done == count * (2 if what == "attn.scores" else 1):
                break
            made = planted(patient(name), s, fault, random)
            if made is None:
                continue
            case, place = made
            done += 1
            set_fault(*place)
            session = patient(name).run(watch="watch")
            found = lab.nan.find(session)
            set_fault(-1, -1, -1, -1, 0, 0, 0)
            wrong, kind = judge(case, found)
            line = {"fault": fault, "what": what, "name": case.name, "place": wrong, "kind": kind}
            print(json.dumps(line, default=str), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[2]), int(sys.argv[3]))
