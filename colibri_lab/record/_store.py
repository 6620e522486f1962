"""The arrays of one recording: float32 copies in host memory, one per tap that was asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import UnsupportedError

__all__ = ["Store"]

Array = NDArray[Any]


class Store:
    """`source` gives for every wanted path the module that fills it, for the sentence when it does not."""

    def __init__(self, wanted: Collection[str], tokens: int, source: Mapping[str, str], torch: Any) -> None:
        self.wanted, self.tokens = frozenset(wanted), tokens
        self.arrays: dict[str, Array] = {}
        self._source, self._torch = source, torch

    def keep(self, path: str, tensor: Any, *shape: int) -> None:
        """Copies a tensor, any dtype and device, as float32 of (T, *shape); nothing when nobody asked for the path.

        Narrow floats are widened exactly. Raises UnsupportedError when the module ran twice, or on other rows.
        """
        if path not in self.wanted:
            return
        if path in self.arrays:
            raise UnsupportedError(
                f"'{path}' was recorded twice in one pass: {self._source[path]} ran a second time (a layer used twice, "
                "or a forward inside the forward)"
            )
        tensor = tensor.detach()
        rows = tensor.numel() // max(int(np.prod(shape)) if shape else tensor.shape[-1], 1)
        if rows != self.tokens:
            raise UnsupportedError(
                f"'{path}' has {rows} rows for {self.tokens} tokens: {self._source[path]} returned the shape "
                f"{tuple(tensor.shape)}"
            )
        self.arrays[path] = self.host(tensor.reshape(self.tokens, *(shape or tensor.shape[-1:])))

    def host(self, tensor: Any, dtype: type = np.float32) -> Array:
        """A contiguous copy in host memory."""
        out = np.empty(tuple(tensor.shape), dtype)
        self._torch.from_numpy(out).copy_(tensor.detach())
        return out

    def put(self, path: str, array: Array) -> None:
        """Takes an array that is host memory already."""
        if path in self.wanted:
            self.arrays[path] = array

    def finish(self) -> dict[str, Array]:
        """All arrays. Raises UnsupportedError that names the module whose values never came."""
        missing = sorted(self.wanted - set(self.arrays))
        if missing:
            more = f" (and of {len(missing) - 1} more taps)" if len(missing) > 1 else ""
            raise UnsupportedError(
                f"captured 0 rows of '{missing[0]}'{more}: {self._source[missing[0]]} never ran; a compiled, fused or "
                "replaced module hides what happens inside it"
            )
        return self.arrays
