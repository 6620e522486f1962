"""The pages of a model's experts, where its files are mapped: read, dropped, looked at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab import _cachelab
from colibri_lab.cache.budget import Key
from colibri_lab.cache.spans import Span, joined, size
from colibri_lab.errors import ArgumentError, FileError, UnsupportedError

__all__ = ["ExpertPages"]

_UNAVAILABLE = 1  # cachelab_status
_LARGEST = 16 << 20  # bytes of one request: Ctrl-C waits for no more
_ALIGNED = 1 << 16  # where requests are cut: all pages are whole there


class ExpertPages:
    """Where the experts of a model lie, piece by piece, and the means to fetch them and to let them go.

    Weights of one expert that lie side by side in a file are one piece, read at once; pieces of more than 16 MiB come
    in several reads. Pages hold 4 KiB or more and know no tensors: one that an expert shares with its neighbour is read
    with either and dropped with neither.

    Raises ArgumentError for a model with replaced experts, which lie in no file.
    """

    def __init__(self, model: Any) -> None:
        config = model.config
        self.layers: tuple[int, ...] = config.moe_layers
        places = {
            (row, expert): [f"layers.{layer}.moe.experts.{expert}.{part}" for part in ("gate", "up", "down")]
            for row, layer in enumerate(self.layers)
            for expert in range(config.num_experts)
        }
        ours = {name: key for key, names in places.items() for part in names for name in (part, f"{part}.bias")}
        replaced = [name for name in model.weights.replaced if name in ours]
        if replaced:
            raise ArgumentError(
                f"{replaced[0]} was replaced in memory (with_weights) and lies in no file, so it cannot be dropped and "
                "read again; use the model as it was opened"
            )
        model._engine.check_files()
        addresses = {path: address for path, address, _ in model._engine.files()}
        own: dict[Key, dict[str, list[Span]]] = {key: {} for key in places}
        others: dict[str, list[Span]] = {}
        for name in model.weights:
            weight = model.weights.describe(name)
            n_bytes = int(np.prod(weight.shape)) * weight.dtype.itemsize
            whose = own[ours[name]] if name in ours else others
            whose.setdefault(weight.file, []).append((weight.file_offset, weight.file_offset + n_bytes))
        whole = {file: [span for spans in own.values() for span in spans.get(file, [])] for file in addresses}
        self._files = [os.fsencode(path) for path in addresses]
        self._own = {key: _ranges(spans, addresses) for key, spans in own.items()}
        self._all = _ranges(whole, addresses)
        self._others = _ranges(others, addresses)
        self.expert_bytes: NDArray[np.int64] = np.zeros((len(self.layers), config.num_experts), np.int64)
        """(Lm, E) bytes of the weights of each expert."""
        for key, spans in own.items():
            self.expert_bytes[key] = sum(size(some) for some in spans.values())
        pieces = [span for spans in own.values() for some in spans.values() for span in _cut(some)]
        self.request_bytes = max(stop - start for start, stop in pieces)
        """Size of the largest read."""
        self.resident_bytes = sum(size(joined(some)) for some in others.values())
        """Bytes of the weights that are no experts."""

    def begin(self) -> tuple[bool, str]:
        """Lets go of all experts, reads in all other weights, and looks: whether every expert is out, and a sentence.

        Raises UnsupportedError, with the reason, where the system cannot let go of pages.
        """
        for file in self._files:
            _written_out(file)
        for pages in self._all:
            _done(pages.drop())
        for pages in self._others:
            _done(pages.warm())
        for key in self._own:  # reading the others may have brought in what lies beside them
            self.drop(key)
        for file in self._files:
            status, reason = _cachelab.residency_told(file)
            if status:
                return False, f"Whether the experts were out of memory at the start is not known: {reason}."
        shares = np.array([self.resident(key) for key in self._own])
        known = shares[~np.isnan(shares)]
        if not len(known):
            return False, "No expert fills a page of its own, so none could be dropped: reads came from memory."
        left = int((known > 0).sum())
        if left:
            return False, (
                f"The system did not let go of {left} of {len(shares)} experts at the start: their first reads came "
                "from memory. Most likely another notebook, process or open model has the file mapped: close it there "
                "(model.close()), or use a copy of the checkpoint; a file system in memory keeps all."
            )
        return True, "At the start every expert was out of memory, out of the page cache too (mincore)."

    def read(self, key: Key) -> int:
        """Fetches an expert, until all of its pages are mapped; returns its bytes. Raises FileError."""
        for pages in self._own[key]:
            _done(pages.warm())
        return int(self.expert_bytes[key])

    def drop(self, key: Key) -> None:
        """Lets go of an expert: of the pages that hold nothing else. Raises FileError."""
        for pages in self._own[key]:
            _done(pages.drop())

    def resident(self, key: Key) -> float:
        """Share of the pages that hold nothing but this expert which are in memory; NaN when there are none."""
        inside: list[NDArray[np.uint8]] = []
        for pages in self._own[key]:
            status, reason, flags = pages.resident_pages()
            _done((status, reason))
            inside.append(flags[1:-1])
        whole = np.concatenate(inside)
        return float(whole.mean()) if len(whole) else float("nan")


def _cut(spans: list[Span]) -> Iterator[Span]:
    """The same bytes in as few pieces as they form, none larger than a request."""
    for start, stop in joined(spans):
        yield from pairwise([start, *range(start // _ALIGNED * _ALIGNED + _LARGEST, stop, _LARGEST), stop])


def _ranges(spans: dict[str, list[Span]], addresses: dict[str, int]) -> list[_cachelab.PageRange]:
    """Bytes of files as the system is asked about them."""
    return [
        _cachelab.PageRange(os.fsencode(file), start, addresses[file] + start, stop - start)
        for file, some in spans.items()
        for start, stop in _cut(some)
    ]


def _done(answer: tuple[Any, ...]) -> None:
    """Raises what a call on pages answered, unless it was done; pages that stay after a drop are no error."""
    status, reason, *left = answer
    if status == _UNAVAILABLE:
        raise UnsupportedError(f"a budget of experts cannot be kept here: {reason}")
    if status and not any(left):
        raise FileError(f"the pages of the model's experts: {reason}")


def _written_out(file: bytes) -> None:
    """Pages that were written and not yet stored cannot be let go."""
    try:
        number = os.open(file, os.O_RDONLY)
    except OSError:
        return  # read-only media keep nothing to be written
    try:
        os.fsync(number)
    except OSError:
        return
    finally:
        os.close(number)
