"""Whether an overflow in a coming layer is told by the layers before it.

Of one tap, y(l) = log2 absmax over the layers. The line through the last five is that of Theil (1950) and Sen (1968),
the median of the slopes between all pairs, each pair weighing by its distance and its recency; a single jump, as from
massive activations, does not move it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.nan.words import bits_left, place

__all__ = ["Forecast", "foretell", "next_overflow"]

F64 = NDArray[np.float64]

_WINDOW = 5  # layers that are looked at
_RECENT = 0.6  # what a layer weighs against the next one
_STEEP = 0.8  # bits per layer: a slope that four layers are enough for; twice that for three
_GENTLE = 0.2  # bits per layer: the least slope, for which five rising layers are asked
_ALONG = 0.3  # the last two steps are at least this share of the slope; for a look two layers ahead twice that
_SLACK = 2.2  # bits by which they may at most fall behind it: a curve that flattens is no ramp
_AHEAD = (1, 2)  # layers


@dataclass(frozen=True)
class Forecast:
    """An overflow that was foretold: from the layers up to `known` for `layer`."""

    tap: str  # without its layer: "moe.experts.*.hidden"
    stage: str
    format: str
    known: int  # the last layer that was looked at
    layer: int  # in which it is expected
    bits: float  # left at `known`
    slope: float  # bits lost per layer
    came: bool | None  # whether the tap went beyond the format there or one layer beside; None: no such layer yet

    @property
    def words(self) -> str:
        """One sentence."""
        return (
            f"From layers up to {self.known}: {place(f'layers.{self.layer}.{self.tap}')}, will overflow {self.format}. "
            f"{bits_left(self.bits).capitalize()} left at layer {self.known}, and each layer takes {self.slope:.1f}."
        )

    def __str__(self) -> str:
        return self.words


def next_overflow(sizes: F64, limit: float) -> tuple[int, float] | None:
    """(layers ahead, bits per layer) of an overflow that a row of log2 absmax foretells; None when it foretells none.

    `limit` is the log2 of the largest number. Fewer than three layers foretell nothing.
    """
    y = np.asarray(sizes, np.float64)[-_WINDOW:]
    n = len(y)
    if n < 3 or not np.isfinite(y).all():
        return None
    x = np.arange(n) - (n - 1.0)
    i, j = np.triu_indices(n, 1)
    slope = _median((y[j] - y[i]) / (j - i), _RECENT ** (n - 1 - j) * (j - i))
    rest = y - slope * x
    level = _median(rest, np.power(_RECENT, -x))
    spread = 1.4826 * float(np.median(np.abs(rest - level)))  # that of a normal distribution
    steps = np.diff(y)
    steady = n == _WINDOW and slope >= max(_GENTLE, 3 * spread) and steps.min() > 0
    weakest = float(steps[-2:].min())
    steep = slope >= (2 * _STEEP if n == 3 else _STEEP)
    if slope < spread or weakest < max(_ALONG * slope, slope - _SLACK) or not (steep or steady):
        return None
    near, far = _AHEAD
    if level + near * slope + spread / 2 >= limit:
        return near, slope
    return (far, slope) if level + far * slope >= limit and weakest >= 2 * _ALONG * slope else None


def _median(values: F64, weights: F64) -> float:
    order = np.argsort(values)
    share = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(share, share[-1] / 2)])


def foretell(
    series: Mapping[str, NDArray[Any]], format: str, limit: float, stages: Mapping[str, str]
) -> tuple[Forecast, ...]:
    """The first overflow foretold of each tap, by layer.

    `series` maps a tap to rows (layer, log2 absmax, whether it went beyond the format) of the layers that have it, in
    order. Each layer is judged by those before it, up to the first beyond the format.
    """
    found = []
    for tap, rows in series.items():
        layers, sizes, beyond = rows[:, 0].astype(int), rows[:, 1], rows[:, 2].astype(bool)
        first = int(beyond.argmax()) if beyond.any() else None
        for n in range(3, (len(layers) if first is None else first) + 1):
            ahead = next_overflow(sizes[:n], limit)
            if ahead is None:
                continue
            spot = n - 1 + ahead[0]
            known = int(layers[n - 1])
            layer = int(layers[spot]) if spot < len(layers) else known + ahead[0] * int(layers[n - 1] - layers[n - 2])
            came = abs(first - spot) <= 1 if first is not None else (False if spot + 1 < len(layers) else None)
            left = limit - float(sizes[n - 1])
            found.append(Forecast(tap, stages.get(tap, ""), format, known, layer, left, ahead[1], came))
            break
    return tuple(sorted(found, key=lambda item: (item.known, item.layer)))
