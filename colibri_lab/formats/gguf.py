"""The parts of a GGUF file that an importance matrix needs: its key-values and its float32 tensors, bounded."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.formats.source import Reader, Source

__all__ = ["MAGIC", "read"]

MAGIC = b"GGUF"

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST = 1 << 16  # bytes of a name or a text
_F32 = 0


def read(source: Source, data: memoryview) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
    """(key-values, tensors by name in NumPy's order of axes); a tensor of another type than float32 is left out.

    Raises FormatError for what breaks the format.
    """
    reader = Reader(source, data, "the GGUF")
    if bytes(reader.take(4, "the magic")) != MAGIC:
        source.refuse("it has not the magic of a GGUF")
    version = reader.number("I", "the version")
    if version not in (2, 3):
        source.refuse(f"it is a GGUF of version {version} (or of a big-endian machine); 2 and 3 are read")
    tensors, pairs = reader.number("Q", "the number of tensors"), reader.number("Q", "the number of key-values")
    if tensors > reader.left // 24 or pairs > reader.left // 12:  # the fewest bytes that each takes
        source.refuse(
            f"it claims {tensors} tensors and {pairs} key-values in {reader.left} bytes: damaged, or cut short"
        )
    values = {}
    for _ in range(pairs):
        key = reader.string("Q", _LONGEST, "a key")
        values[key] = _value(reader, reader.number("I", f"the type of '{key}'"))
    entries = [_entry(reader) for _ in range(tensors)]
    alignment = values.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
        source.refuse(f"its alignment {alignment!r} is no power of two")
    start = -(-reader.at // alignment) * alignment
    out = {}
    for name, shape, kind, offset in entries:
        if kind != _F32:
            continue
        size = math.prod(shape) * 4
        if start + offset + size > len(data):
            source.refuse(f"the tensor '{name}' of shape {shape} ends beyond the file: it was cut short")
        if name in out:
            source.refuse(f"the tensor '{name}' is there twice")
        out[name] = np.frombuffer(data, "<f4", math.prod(shape), start + offset).reshape(shape)
    return values, out


def _value(reader: Reader, kind: int, deep: bool = False) -> Any:
    if kind in _SCALARS:
        return reader.number(_SCALARS[kind], "a value")
    if kind == _STRING:
        return reader.string("Q", _LONGEST, "a text")
    if kind != _ARRAY or deep:
        reader.source.refuse(f"a value has the type {kind}, which is not known")
    inner, count = reader.number("I", "the type of a list"), reader.number("Q", "the length of a list")
    if count > reader.left:
        reader.source.refuse(f"a list claims {count} values in {reader.left} bytes: damaged, or cut short")
    return [_value(reader, inner, True) for _ in range(count)]


def _entry(reader: Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.string("Q", _LONGEST, "a tensor's name")
    axes = reader.number("I", f"the number of axes of '{name}'")
    if not 1 <= axes <= 4:
        reader.source.refuse(f"the tensor '{name}' has {axes} axes; 1 to 4 are possible")
    shape = tuple(reader.number("Q", f"the shape of '{name}'") for _ in range(axes))
    return name, shape[::-1], reader.number("I", "a tensor's type"), reader.number("Q", "a tensor's place")
