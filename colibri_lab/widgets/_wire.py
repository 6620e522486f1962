"""What crosses between Python and the browser: one array format and the shapes of all messages.

An array travels as one binary buffer (C order, little endian) beside `{"name", "dtype", "shape"}`; nothing becomes JSON
numbers, so NaN and infinities pass unharmed. Small state (selection, colouring, status) lives in synced traits;
everything heavy is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

__all__ = ["ArraySpec", "Block", "Column", "Head", "Html", "Message", "Request", "Status", "message_of", "pack"]

Message = tuple[dict[str, Any], list[bytes]]
"""Content and buffers."""

_BROWSER_TYPES = {"uint8", "uint16", "uint32", "int32", "float32"}


class ArraySpec(TypedDict):
    """How to read one buffer."""

    name: str
    dtype: str
    shape: list[int]


class Request(TypedDict, total=False):
    """From the browser: what it wants to have or to happen."""

    kind: Literal["ready", "blocks", "column", "run", "generate", "stop", "html"]
    version: int
    layers: list[int]
    """Indices into the list of MoE layers."""
    token: int
    text: str
    """A prompt; with "generate" only when it is to be run first."""
    count: int


class Head(TypedDict):
    """To the browser: what the trace is, once per trace; buffers: see `ExplorerData.overview`."""

    kind: Literal["head"]
    version: int
    facts: dict[str, Any]
    arrays: list[ArraySpec]


class Block(TypedDict):
    """To the browser: all tokens of one MoE layer; buffers: see `ExplorerData.block`."""

    kind: Literal["block"]
    version: int
    layer: int
    arrays: list[ArraySpec]


class Column(TypedDict):
    """To the browser: one token through all MoE layers; buffers: see `ExplorerData.column`."""

    kind: Literal["column"]
    version: int
    token: int
    arrays: list[ArraySpec]


class Html(TypedDict):
    """To the browser: the view as one self-contained page, to be saved there."""

    kind: Literal["html"]
    name: str
    text: str


class Status(TypedDict, total=False):
    """The synced state of work: what runs, how far it is, or why it failed."""

    state: Literal["idle", "working", "busy", "error"]
    text: str
    done: int
    total: int
    seconds_left: int
    traceback: str


def pack(arrays: Mapping[str, NDArray[Any]]) -> tuple[list[ArraySpec], list[bytes]]:
    """Specs and buffers of `arrays`, in order. Raises TypeError for a dtype that has no typed array in a browser."""
    specs: list[ArraySpec] = []
    buffers: list[bytes] = []
    for name, array in arrays.items():
        if array.dtype.name not in _BROWSER_TYPES:
            raise TypeError(
                f"array '{name}' is {array.dtype.name}; the browser reads {', '.join(sorted(_BROWSER_TYPES))}"
            )
        specs.append({"name": name, "dtype": array.dtype.name, "shape": list(array.shape)})
        buffers.append(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes())
    return specs, buffers


def message_of(kind: str, found: tuple[dict[str, Any], Mapping[str, NDArray[Any]]]) -> Message:
    """Facts and arrays as one message. Raises TypeError as `pack` does."""
    specs, buffers = pack(found[1])
    return {"kind": kind, "facts": found[0], "arrays": specs}, buffers
