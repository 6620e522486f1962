"""Weights: the checkpoint's tensors where the file maps them, under their canonical names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import TapError, nearest

if TYPE_CHECKING:
    from colibri_lab import _core

__all__ = ["Weights"]


class Weights(Mapping[str, NDArray[Any]]):
    """Read-only arrays [out, in] in the stored dtype (`ml_dtypes.bfloat16` for bf16), no copy; a bias is `name.bias`.

    Names iterate as `embed, norm, lm_head`, then layer by layer in the order of the forward pass. An array keeps the
    mapping alive and cannot be made writable. A tensor that its file places at an unaligned address comes as a read-
    only copy; `model.info["copied_weights"]` lists those. Reading a view of a file that shrinks meanwhile is not
    guarded by the engine: a new look-up raises FileError, an old view cannot.
    """

    def __init__(self, engine: _core.Model) -> None:
        self._engine = engine
        self._table = engine.weights()
        self._index = {weight.name: number for number, weight in enumerate(self._table)}

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._engine.weight(self._find(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def float32(self, name: str) -> NDArray[np.float32]:
        """The weight widened exactly to float32: a writable copy of your own. A signalling NaN becomes quiet.

        Raises TapError for an unknown name, FileError when the file changed.
        """
        return self._engine.float32(self._find(name))

    def census(self, name: str) -> tuple[int, int, int, int]:
        """(NaN, Inf, subnormal, flat index of the first NaN or Inf, or −1), counted by bit pattern as it is stored."""
        return self._engine.census(self._find(name))

    def describe(self, name: str) -> _core.Weight:
        """Shape, dtype, and the tensor, file and byte where the weight lies; nothing is read."""
        return self._table[self._find(name)]

    @property
    def replaced(self) -> list[str]:
        """Names of the weights whose values are not the file's (`model.with_weights`)."""
        return [weight.name for weight in self._table if weight.replaced]

    def _find(self, name: str) -> int:
        try:
            return self._index[name]
        except (KeyError, TypeError):
            raise TapError(f"the model has no weight '{name}'{nearest(str(name), self._index)}") from None

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "weights are views of a mapped file and cannot be pickled or copied; take arrays: weights.float32(name)"
        )

    def __repr__(self) -> str:
        return f"<Weights: {len(self)} tensors, {sum(int(np.prod(w.shape)) for w in self._table):,} parameters>"
