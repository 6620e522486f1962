"""Faults of experts and of the other gated MLPs: order, gate and up exchanged or cut apart wrongly, activation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any, cast

import numpy as np

from colibri_lab.difference import changes as c
from colibri_lab.difference import variants as v
from colibri_lab.difference.changes import Fault, FusedRows, Use, Weight
from colibri_lab.difference.faults_router import matched, told
from colibri_lab.difference.formulas import Missing, relative
from colibri_lab.difference.maths import Change, rows_of
from colibri_lab.difference.scene import Scene

__all__ = ["expert_faults", "mlp_names"]

_ENDS = (".gate.weight", ".up.weight", ".down.weight", ".act", ".gate.value", ".up.value", ".output")

_ACTIVATIONS: tuple[tuple[Callable[..., Any], str], ...] = (
    (v.gelu, "gelu"),
    (v.gelu_tanh, "gelu (tanh formula)"),
    (v.relu, "relu"),
    (v.quick_gelu, "quick gelu (sigmoid of 1.702 x)"),
    (v.relu_squared, "squared relu"),
    (v.sigmoid_gate, "sigmoid"),
    (v.tanh_gate, "tanh"),
    (v.no_activation, "no activation"),
    (v.both_activated, "silu on gate and up"),
    (v.product_activated, "silu of the product"),
    (v.up_left_out, "silu(gate) without the product with up"),
    (v.up_plus_one, "silu(gate) times (up + 1)"),
)


def mlp_names(scene: Scene) -> list[str]:
    """Prefixes of the gated MLPs whose weights or activation a replay passes: "layers.0.moe.experts.3"."""
    found: dict[str, None] = {}
    for point in scene.points:
        for end in _ENDS:
            name = point.removesuffix(end)
            if point.endswith(end) and (".experts." in name or name.endswith((".moe.shared", ".mlp"))):
                found[name] = None
    return list(found)


def expert_faults(scene: Scene, good: float) -> Iterator[Fault]:
    """Experts that differ are taken together; in a tap behind all of them, all together and then each alone."""
    if scene.expert_tap:
        yield from _rows_of_fused(scene)
    groups = [group for group, _ in grouped(scene)]
    for names in groups:
        yield from _inside(scene, names)
    if scene.expert_tap:
        yield from _order_faults(scene, good)
    if not scene.expert_tap and any(".experts." in name for names in groups for name in names):
        yield from _orders_seen_from_afar(scene)


def grouped(scene: Scene) -> list[tuple[list[str], str]]:
    """Groups of MLPs that may share a fault: the experts of a layer, and each alone where they are not seen singly."""
    names = mlp_names(scene)
    experts = [name for name in names if ".experts." in name]
    groups = [[name] for name in names if ".experts." not in name]
    if experts:
        groups.append(experts)
    if not scene.expert_tap and 1 < len(experts) <= 64:
        groups += [[name] for name in experts]
    return [(group, where(scene, group)) for group in groups]


def where(scene: Scene, names: list[str]) -> str:
    """Experts or other MLPs in words."""
    layer = names[0].split(".")[1]
    if names[0].endswith(".moe.shared"):
        return f"the shared expert of layer {layer}"
    if names[0].endswith(".mlp"):
        return f"the dense MLP of layer {layer}"
    numbers = [name.rpartition(".")[2] for name in names]
    if scene.expert_tap:
        numbers = [str(e) for e in scene.all_differing]
        if not scene.agreeing and len(numbers) > 1:
            return f"all experts of layer {layer}"
    elif len(numbers) > 1:
        return f"the experts of layer {layer}"
    few = ", ".join(numbers[:6]) + (" …" if len(numbers) > 6 else "")
    return f"expert{'s' * (len(numbers) > 1)} {few} of layer {layer}"


def _all(names: list[str], make: Callable[[str], Mapping[str, Change]]) -> dict[str, Change]:
    return {point: change for name in names for point, change in make(name).items()}


def _inside(scene: Scene, names: list[str]) -> Iterator[Fault]:
    place = where(scene, names)

    def swap(name: str) -> dict[str, Change]:
        return {f"{name}.gate.weight": Weight(f"{name}.up"), f"{name}.up.weight": Weight(f"{name}.gate")}

    yield Fault("swapped_gate_up", f"the gate and up weights (w1, w3) of {place} are swapped", _all(names, swap))
    if any(scene.has(f"{name}.act") for name in names):
        yield Fault("swapped_gate_up", f"the activation is applied to up instead of gate in {place}",
                    _all(names, lambda n: {f"{n}.act": Use(v.up_activated)}))  # fmt: skip
        for function, words in _ACTIVATIONS:
            yield Fault("activation", f"{words} instead of silu in {place}",
                        {f"{name}.act": Use(function) for name in names})  # fmt: skip
    if not any(scene.has(f"{name}.{part}.weight") for name in names for part in ("gate", "up")):
        return
    wide = _width(scene, names[0])
    sizes = [size for size in dict.fromkeys((1, wide // 2, wide // 4, wide // 8, 2, 4, 8, 16, 32, 64, 128))
             if size and wide % size == 0 and size < wide]  # fmt: skip
    for size in sizes:
        rows = "interleaved" if size == 1 else f"in blocks of {size} ({wide // size} shards)"
        for how, words in (
            ("halves of blocks", f"gate and up rows that stand {rows} are cut into halves"),
            ("blocks of halves", f"gate and up halves are read as rows {rows}"),
        ):
            for turned in (False, True):
                def cut(n: str, how: str = how, size: int = size, turned: bool = turned) -> dict[str, Change]:
                    parts = ("up", "gate") if turned else ("gate", "up")
                    return {f"{n}.gate.weight": FusedRows(n + ".", parts[0], how, size),
                            f"{n}.up.weight": FusedRows(n + ".", parts[1], how, size)}  # fmt: skip

                yield Fault("interleaved_halves", f"{words}{' and exchanged' * turned} in {place}", _all(names, cut))
    for step in dict.fromkeys((1, -1, 2, -2, wide // 2, -(wide // 2), wide // 4, -(wide // 4), 4, -4, 8, -8)):
        def shifted(n: str, step: int = step) -> dict[str, Change]:
            return {f"{n}.{part}.weight": FusedRows(n + ".", part, "cut late", step) for part in ("gate", "up")}

        if step:
            yield Fault("interleaved_halves", f"the fused gate and up rows are cut {abs(step)} rows too "
                        f"{'late' if step > 0 else 'early'} in {place}", _all(names, shifted))  # fmt: skip


def _width(scene: Scene, name: str) -> int:
    try:
        weight = scene.given.weight(name + ".gate")
    except Missing:
        return 0
    return 0 if weight is None else len(weight)


# ---- which expert stands where ----


def _order_faults(scene: Scene, good: float) -> Iterator[Fault]:
    """Each differing expert against the weights of every other: all three matrices, or gate and up, or one."""
    layer, tap = cast(int, scene.layer), scene.expert_tap
    prefix = f"layers.{layer}.moe.experts."
    if tap == "input":
        return
    kinds: list[tuple[str, ...]] = [("gate", "up", "down"), ("down",), ("gate", "up"), ("gate",), ("up",)]
    if tap != "output":
        kinds = [("gate", "up"), ("gate",), ("up",)] if tap == "hidden" else [(tap,)]
    for parts in kinds:
        origin = _origins(scene, prefix, parts, good)
        if not origin or not set(scene.experts) <= set(origin):
            continue
        order = np.arange(scene.suspect.num_experts)
        for expert, other in origin.items():
            order[expert] = other
        named = "weights" if len(parts) == 3 or tap in ("gate", "up", "hidden") else f"{' and '.join(parts)} weights"
        more = "" if len(scene.all_differing) <= len(origin) else " and so on"
        changes = {
            f"{prefix}{e}.{part}.weight": Weight(f"{prefix}{o}.{part}") for e, o in origin.items() for part in parts
        }
        words = f"{named} of experts of layer {layer} are in another order: {told(order, origin)}{more}"
        yield Fault("expert_order", words, changes)
    yield from _order_from_traces(scene)


def _origins(scene: Scene, prefix: str, parts: tuple[str, ...], good: float) -> dict[int, int]:
    """Whose weights each differing expert has, judged by a few of its rows; each weight is widened once."""
    every = list(scene.experts)
    if len(scene.all_differing) <= 16:
        every += [e for e in scene.all_differing if e not in every]
    least = {expert: (np.inf, expert) for expert in every}
    for other in range(scene.suspect.num_experts):
        for expert in every:
            if other == expert or least[expert][0] <= good:
                continue
            changes = {f"{prefix}{expert}.{part}.weight": Weight(f"{prefix}{other}.{part}") for part in parts}
            try:
                error = relative(*scene.expert_value(expert, changes, 8))
            except (Missing, ValueError):
                continue
            least[expert] = min(least[expert], (error, other))
    return {expert: other for expert, (error, other) in least.items() if error <= max(good, 1e-2)}


def _order_from_traces(scene: Scene) -> Iterator[Fault]:
    """Without weights: what the suspect's expert gave for a token is what another expert gave in the other run."""
    if not scene.given.lacking:
        return
    layer, tap = cast(int, scene.layer), scene.expert_tap
    order = np.arange(scene.suspect.num_experts)
    theirs = {e: rows_of(scene.other, layer, e, tap) for e in range(scene.suspect.num_experts)}
    for expert in scene.experts:
        mine = rows_of(scene.suspect, layer, expert, tap)
        for other, rows in theirs.items():
            if mine is None or rows is None or other == expert:
                continue
            _, i, j = np.intersect1d(mine[0], rows[0], return_indices=True)
            if len(i) and relative(mine[1][i], rows[1][j]) < 1e-3:
                order[expert] = other
                break
        else:
            return
    changes: dict[str, Change] = {
        f"layers.{layer}.moe.experts.{e}.{tap}": c.OtherExpert(layer, int(order[e]), tap) for e in scene.experts
    }
    if tap in ("gate", "up"):
        changes = {f"{point}.value": change for point, change in changes.items()}
    yield Fault("expert_order", f"experts of layer {layer} are in another order: {told(order)}", changes)


def _rows_of_fused(scene: Scene) -> Iterator[Fault]:
    """Columns of the gate or up tap found among both taps of the reference: any other cut of the fused tensor."""
    tap, layer = scene.expert_tap, cast(int, scene.layer)
    if tap not in ("gate", "up") or not scene.experts:
        return
    expert = max(scene.experts, key=lambda e: len(scene.tokens_of(e)))
    tokens = scene.tokens_of(expert)
    mine = rows_of(scene.suspect, layer, expert, tap)
    assert mine is not None
    wanted = mine[1][np.searchsorted(mine[0], tokens)].astype(np.float64)
    both = []
    for part in ("gate", "up"):
        rows = rows_of(scene.other, layer, expert, part)
        if rows is None or not np.isin(tokens, rows[0]).all():
            return
        both.append(rows[1][np.searchsorted(rows[0], tokens)].astype(np.float64))
    wide = wanted.shape[1]
    order = matched(wanted, np.concatenate(both, axis=1))
    plain = np.arange(wide) + (0 if tap == "gate" else wide)
    if order is None or (order == plain).all() or len(wanted) < 2:
        return
    names = [f"layers.{layer}.moe.experts.{e}" for e in scene.experts]
    swapped = (order == (plain + wide) % (2 * wide)).all()
    changes: dict[str, Change] = {
        f"{name}.{tap}.value": c.FusedColumns(tuple(order.tolist()), layer, int(name.rpartition(".")[2]))
        for name in names
    }
    place = where(scene, names)
    if swapped:
        yield Fault("swapped_gate_up", f"the gate and up weights (w1, w3) of {place} are swapped", changes)
    else:
        shown = ", ".join(f"{'gate' if o < wide else 'up'} {o % wide}" for o in order[:4])
        yield Fault("interleaved_halves", f"rows of the fused gate and up tensor of {place} stand elsewhere: the rows "
                    f"of {tap} are {shown} …", changes)  # fmt: skip


def _orders_seen_from_afar(scene: Scene) -> Iterator[Fault]:
    """Experts were not recorded singly: text order, reverse, by one, and every pair."""
    names = [name for name in mlp_names(scene) if ".experts." in name]
    layer, n = int(names[0].split(".")[1]), scene.suspect.num_experts
    prefix = f"layers.{layer}.moe.experts."
    present = {int(name.rpartition(".")[2]) for name in names}
    text = np.asarray(sorted(range(n), key=str))
    orders = [text, np.argsort(text), np.arange(n)[::-1], np.roll(np.arange(n), 1), np.roll(np.arange(n), -1)]
    for a, b in combinations(range(n), 2) if n <= 16 else ():
        order = np.arange(n)
        order[[a, b]] = b, a
        if {a, b} & present:
            orders.append(order)
    for order in orders:
        if (order == np.arange(n)).all():
            continue
        for parts in (("gate", "up", "down"), ("down",), ("gate", "up")):
            changes: dict[str, Change] = {
                f"{prefix}{e}.{part}.weight": Weight(f"{prefix}{order[e]}.{part}")
                for e in sorted(present) if order[e] != e for part in parts
            }  # fmt: skip
            named = "weights" if len(parts) == 3 else f"{' and '.join(parts)} weights"
            words = f"{named} of experts of layer {layer} are in another order: {told(order)}"
            yield Fault("expert_order", words, changes)
