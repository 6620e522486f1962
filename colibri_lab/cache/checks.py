"""What callers give to more than one function of this package, looked at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError, is_whole

ByLayer = Mapping[int, Sequence[int]]


def open_model(model: Any, what: str) -> Any:
    """A model. Raises ArgumentError for a path, a session or anything else."""
    if not hasattr(model, "weights"):
        of_model = hasattr(model, "moe_layers") or hasattr(model, "tape")  # a trace or a session
        near = "the one it is of, x.model" if of_model else "lab.open(path)"
        raise ArgumentError(f"{what} takes a model: {near}; this is {model!r:.80}")
    return model


def listed(given: Iterable[Any], sentence: str) -> list[Any]:
    """What stands in a list. Raises ArgumentError with the sentence for a number or the like."""
    try:
        return list(given)
    except TypeError:
        raise ArgumentError(f"{sentence}, not {given!r:.80}") from None


def array_of(given: Any, what: str) -> NDArray[Any]:
    """An array. Raises ArgumentError where rows differ in length."""
    try:
        return np.asarray(given)
    except ValueError:
        raise ArgumentError(f"{what} must be an array, and the rows of this differ in length") from None


def mapping_of(given: Mapping[Any, Any] | None, what: str, example: str) -> dict[Any, Any]:
    """Keys and values; none for None. Raises ArgumentError for anything but a mapping."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ArgumentError(f"{what} is {example}; this is {given!r:.80}")
    return dict(given)


def by_layer(layers: Sequence[int], experts: int, given: ByLayer | None, what: str) -> list[tuple[int, int]]:
    """Rows and experts, in the order given, each once. Raises ArgumentError for others than there are."""
    rows = {layer: row for row, layer in enumerate(layers)}
    found: dict[tuple[int, int], None] = {}
    for layer, some in mapping_of(given, what, "{layer: experts}").items():
        if layer not in rows:
            raise ArgumentError(f"{what} names MoE layers, {list(layers)!s:.60}; not {layer!r:.40}")
        for expert in listed(some, f"{what} names a list of experts for each layer"):
            if not (is_whole(expert) and 0 <= expert < experts):
                raise ArgumentError(f"{what} names experts 0 to {experts - 1}, not {expert!r:.40}")
            found[rows[layer], int(expert)] = None
    return list(found)
