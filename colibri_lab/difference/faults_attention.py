"""Faults of attention: rotation style, base and positions, the mask, the softmax scale, the order of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from colibri_lab.difference import changes as c
from colibri_lab.difference import variants as v
from colibri_lab.difference.changes import Fault, Is, Moved, Theta, Through, Times, Unscaled, Use
from colibri_lab.difference.formulas import Missing, Seen, frequencies_of
from colibri_lab.difference.maths import Change
from colibri_lab.difference.scene import Scene, fitted

__all__ = ["attention_faults"]

_STYLES: tuple[tuple[Callable[..., Any], str], ...] = (
    (v.interleaved, "pairs of neighbours (interleaved) are rotated instead of halves"),
    (v.unrotated, "the rotation is left out"),
    (v.backwards, "rotated by the negative angle"),
    (v.joined_then_halves, "rows stand in interleaved order and are rotated as halves"),
    (v.parted_then_halves, "rows were reordered for halves twice"),
    (v.halves_then_parted, "channels are reordered after the rotation"),
    (v.halves_then_joined, "channels are interleaved after the rotation"),
    (v.interleaved_then_joined, "rows stand in interleaved order and are rotated as pairs"),
    (v.interleaved_backwards, "pairs of neighbours are rotated by the negative angle"),
    (v.angles_interleaved, "angles stand in pairs for halves"),
    (v.pairs_with_halved_angles, "angles stand as halves for pairs"),
    (v.without_minus, "the minus before the sine is missing"),
    (v.sin_for_cos, "sine and cosine are exchanged"),
    (v.first_half_only, "only the first half of the channels is rotated"),
    (v.first_half_own_angles, "only half of the channels is rotated, at the angles of a narrower rotation"),
)

_THETAS = (10.0, 1e2, 5e2, 1e3, 1e4, 1e5, 1.5e5, 5e5, 1e6, 5e6, 1e7, 1e8)


def attention_faults(scene: Scene, good: float) -> Iterator[Fault]:
    """Rotation first, then the mask, then scale and heads."""
    turned = [point.removesuffix(".rotate") for point in scene.ending(".rotate")]
    groups = [turned] if len(turned) > 1 else []  # q and k together, then each
    for group in [*groups, *([name] for name in turned)]:
        yield from _rotation_faults(scene, group, good)
    for point in scene.ending(".seen"):
        yield from _mask_faults(scene, point)
    for point in scene.ending(".attn.scale"):
        yield from _scale_faults(scene, point, good)
    for point in scene.ending(".kv_head"):
        yield from _head_faults(scene, point)
    for point in scene.ending(".attn.mixed"):
        words = f"heads and channels change places before the output projection of layer {point.split('.')[1]}"
        yield Fault("head_order", words, {point: Through(v.heads_inside)})
    for point in scene.ending(".raw"):
        if point.endswith(".v.raw"):
            yield from _turned_values(scene, point)


def _each(names: list[str], end: str, change: Change) -> dict[str, Change]:
    return {name + end: change for name in names}


def _rotation_faults(scene: Scene, names: list[str], good: float) -> Iterator[Fault]:
    where = _where(names)
    rope = scene.given.settings.rope
    changes: dict[str, Change]
    theta = float(rope.get("rope_theta") or 1e4)

    def with_theta(value: float) -> float:
        return scene.left_over(_each(names, ".frequencies", Theta(value)))

    found, _ = fitted(with_theta, [t for t in (*_THETAS, theta / 10, theta * 10, theta / 2, theta * 2, theta**0.5)
                                   if t > 1 and t != theta], good)  # fmt: skip
    solved = _solved_theta(scene, names)
    if solved is not None and with_theta(solved) < with_theta(found):
        found, _ = fitted(with_theta, [solved / 1.01, solved, solved * 1.01], good)
    words = f"rotation base (theta) {found:g} instead of {theta:g} in {where}"
    yield Fault("rope_theta", words, _each(names, ".frequencies", Theta(found)))
    if (rope.get("rope_type") or "default") != "default":
        words = f"the rope scaling '{rope['rope_type']}' is left out in {where}"
        yield Fault("rope_theta", words, _each(names, ".frequencies", Unscaled()))

    yield from _position_faults(scene, names, where)
    for function, words in _STYLES:
        yield Fault("rope_style", f"{words} in {where}", _each(names, ".rotate", Use(function)))
    normed = [name for name in names if scene.has(f"{name}_norm.input")]
    if normed and scene.given.settings.head_dim:
        for order in (v.joined, v.parted):
            words = f"rows are reordered ({order.__name__}) and the weights of their norm are not in {where}"
            yield Fault("rope_style", words,
                        _each(normed, "_norm.input", c.Reordered(order, scene.given.settings.head_dim)))  # fmt: skip
        changes = {f"{name}_norm.input": c.TurnedBefore(scene.given.settings.head_dim) for name in normed}
        changes |= _each(normed, ".rotate", Use(v.unrotated))
        yield Fault("rope_style", f"rotated before the norm instead of after it in {where}", changes)
    yield Fault("rope_style", f"(heads, channels) read as (channels, heads) in {where}",
                _each(names, ".raw", Through(v.channels_before_heads)))  # fmt: skip
    wide = {
        name: scene.suspect[name].shape[1] * scene.suspect[name].shape[2] for name in names if name in scene.suspect
    }
    if wide:
        changes = {f"{name}.frequencies": Theta(theta, width) for name, width in wide.items()}
        changes |= _each(names, ".rotate", Use(v.across_heads))
        yield Fault("rope_style", f"rotated over the whole width before the heads are cut in {where}", changes)

    def with_factor(value: float) -> float:
        return scene.left_over(_each(names, ".frequencies", Times(value)))

    factor, _ = fitted(with_factor, [0.0625, 0.125, 0.25, 0.5, 2.0, 4.0, 8.0, 6.283185307], good)
    yield Fault("rope_theta", f"all angles are {factor:g} times as large in {where}",
                _each(names, ".frequencies", Times(factor)))  # fmt: skip


def _solved_theta(scene: Scene, names: list[str]) -> float | None:
    """theta from the angles by which the token at position 1 is turned: theta^(-2j/d) for pair j, all below pi."""
    if len(names) != 1 or names[0] != scene.path or 1 not in scene.rows:
        return None
    try:
        at = int(np.searchsorted(scene.rows, 1))
        still = scene.value(_each(names, ".rotate", Use(v.unrotated)))[at]
    except Missing:
        return None
    seen = scene.wanted[at]
    half = seen.shape[-1] // 2
    raw, turned = (v[..., :half] + 1j * v[..., half:] for v in (still, seen))
    angle = np.angle((turned * raw.conj()).sum(0))
    j = np.arange(half)
    use = (angle > 1e-4) & (j > 0)
    if not use.any():
        return None
    weight = angle[use]  # small angles are the less certain
    slope = float((weight * j[use] * -np.log(angle[use])).sum() / (weight * j[use] ** 2).sum())
    return float(np.exp(min(max(slope * half, 0.1), 40)))


def _position_faults(scene: Scene, names: list[str], where: str) -> Iterator[Fault]:
    """Every row moved by the whole number of steps that fits it best, if the whole tap is then explained."""
    most = int(scene.rows[-1]) + 1
    steps = sorted(range(-min(most, 32), min(most, 32) + 1), key=lambda n: (abs(n), -n))
    for step in (1, -1, 2, -2):
        yield Fault("position_off_by_one", f"positions are {_off(step)} in {where}",
                    _each(names, ".positions", Moved((step,))))  # fmt: skip
    if scene.path not in names or len(names) != 1:
        for step in (1, -1):  # from the first row that differs on: a cache read one step off
            moved = tuple(step * int(row >= scene.token) for row in range(most))
            yield Fault("position_off_by_one", f"positions are {_off(step)} from token {scene.token} on in {where}",
                        _each(names, ".positions", Moved(moved)))  # fmt: skip
        return
    least, best = np.full(len(scene.rows), np.inf), np.zeros(len(scene.rows), int)
    for step in steps:
        try:
            value = scene.value(_each(names, ".positions", Moved((step,))))
        except (Missing, ValueError):
            return
        error = np.square(value - scene.wanted).sum(tuple(range(1, value.ndim)))
        better = error < least * 0.25
        least, best = np.where(better, error, least), np.where(better, step, best)
    if not best.any():
        return
    every = np.zeros(most, int)
    every[scene.rows] = best
    some = sorted({int(step) for step in best if step})
    words = " or ".join(_off(step) for step in some[:3]) + (" and so on" if len(some) > 3 else "")
    first = int(scene.rows[np.flatnonzero(best)[0]])
    start = "" if best.all() else f" from token {first} on"
    if len(some) > 3:  # any angle is some whole number of steps, roughly: no position fault
        return
    yield Fault("position_off_by_one", f"positions are {words}{start} in {where}",
                _each(names, ".positions", Moved(tuple(every.tolist()))))  # fmt: skip


def _off(step: int) -> str:
    return f"{abs(step)} too {'high' if step > 0 else 'low'}"


def _mask_faults(scene: Scene, point: str) -> Iterator[Fault]:
    layer = int(point.split(".")[1])
    windows = scene.given.settings.windows
    window = windows[layer] if layer < len(windows) else None
    says = f"a window of {window}" if window else "no window"
    bites = scene.token  # without a window in the reference, the first row that one of w keys changes is row w
    tried: list[int | None] = [None]
    if window:
        tried = [window + 1, window - 1, window + 2, window - 2, None, 2 * window, window // 2]
    tried += [width for width in (bites, bites - 1, bites + 1, bites + 2) if width not in tried]
    for width in tried:
        if width == window or (width is not None and width < 1):
            continue
        found = f"a window of {width} keys" if width else "no window"
        yield Fault("window_off_by_one", f"layer {layer} has {found} where the configuration has {says}",
                    {point: Is(Seen(width))})  # fmt: skip
    more = ((1, "also the next token"), (-1, "only the tokens before it, not itself"), (10**9, "all tokens"))
    for ahead, words in more:
        yield Fault("window_off_by_one", f"in layer {layer} a query sees {words}", {point: Is(Seen(window, ahead))})


def _scale_faults(scene: Scene, point: str, good: float) -> Iterator[Fault]:
    layer, settings = int(point.split(".")[1]), scene.given.settings
    width = settings.head_dim or 1
    heads = settings.hidden / width if settings.hidden else 1.0
    plain = width**-0.5
    named = (1.0, 1 / width, settings.hidden**-0.5 if settings.hidden else 1.0, heads**-0.5, (width / 2) ** -0.5)
    grid = [*named, plain * 2, plain / 2, plain * 4, plain / 4, width**0.5, plain * 8, plain / 8]

    def error(scale: float) -> float:
        return scene.left_over({point: Is(scale)})

    scale, _ = fitted(error, [s for s in grid if abs(s - plain) > 1e-9], good)
    yield Fault("scale_factor", f"the softmax scale of layer {layer} is {scale:.6g} instead of {plain:.6g}",
                {point: Is(scale)})  # fmt: skip


def _head_faults(scene: Scene, point: str) -> Iterator[Fault]:
    layer, settings = int(point.split(".")[1]), scene.given.settings
    k = scene.suspect.get(f"layers.{layer}.attn.k")
    if k is None or settings.head_dim is None:
        return
    heads, kv_heads = settings.hidden // settings.head_dim, k.shape[1]
    mine = scene.suspect.get(f"layers.{layer}.attn.q")
    heads = mine.shape[1] if mine is not None else heads
    if heads == kv_heads:
        return
    tiled: Mapping[str, Change] = {point: Is(np.arange(heads) % kv_heads)}
    words = f"kv heads of layer {layer} are tiled (0, 1, 0, 1) instead of repeated (0, 0, 1, 1)"
    yield Fault("head_order", words, tiled)
    yield Fault("head_order", f"all heads of layer {layer} use kv head 0", {point: Is(np.zeros(heads, int))})


def _turned_values(scene: Scene, point: str) -> Iterator[Fault]:
    """v was rotated like k."""
    layer = int(point.split(".")[1])
    if not scene.given.known_config or scene.given.settings.head_dim is None:
        return
    frequencies = frequencies_of(scene.given.settings.rope, scene.given.settings.head_dim)[0]
    yield Fault("rope_style", f"v is rotated too in layer {layer}", {point: c.Turned(tuple(frequencies.tolist()))})


def _where(names: list[str]) -> str:
    layer = names[0].split(".")[1]
    return f"{' and '.join(name[-1] for name in names)} of layer {layer}"
