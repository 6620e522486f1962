"""NumPy's .npy and .npz, read without its pickles and never more of them than is there."""

from __future__ import annotations

import math
import re
import zipfile
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import FormatError
from colibri_lab.formats.source import Source

__all__ = ["BAD_ZIP", "MAGIC", "arrays", "members"]

MAGIC = b"\x93NUMPY"
BAD_ZIP = (
    zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, OSError, ValueError, OverflowError,
    KeyError, IndexError, TypeError,
)  # fmt: skip
"""What a damaged archive raises inside `zipfile`."""

_HEADER = re.compile(
    r"\{'descr': '([<>|=][a-zA-Z]\d+)', 'fortran_order': (True|False), 'shape': \(([\d, ]{0,200})\), \}\s*"
)
_LONGEST = 1 << 14  # bytes of a header
_PACKED = 256  # a member may be so many times its compressed size: routes repeat, a bomb repeats more


def arrays(source: Source) -> dict[str, NDArray[Any]]:
    """All arrays of the file by name; the name of a .npy's only one is ""."""
    if source.head.startswith(MAGIC):
        return {"": _read(source, source.mapped(), "the file")}
    return {
        name.removesuffix(".npy"): _read(source, memoryview(raw), f"'{name}'")
        for name, raw in members(source, ".npy").items()
    }


def members(source: Source, suffix: str) -> dict[str, bytes]:
    """The members of a zip archive whose names end in `suffix`."""
    try:
        with zipfile.ZipFile(source.path) as archive:
            wanted = [info for info in archive.infolist() if info.filename.endswith(suffix)]
            for info in wanted:
                if info.compress_size > source.size:
                    source.refuse(f"'{info.filename}' claims {info.compress_size} bytes of {source.size}")
                if info.file_size > _PACKED * (info.compress_size + 4096):
                    source.refuse(f"'{info.filename}' claims {info.file_size} bytes out of {info.compress_size}")
            whole = sum(info.file_size for info in wanted)
            if whole > _PACKED * (source.size + 4096):
                source.refuse(f"its {len(wanted)} members claim {whole} bytes out of {source.size}")
            out = {info.filename: archive.read(info) for info in wanted}
    except FormatError:
        raise
    except BAD_ZIP as error:
        source.refuse(f"it is a damaged zip archive, or was cut short: {error}")
    return out


def _read(source: Source, data: memoryview, what: str) -> NDArray[Any]:
    """The array of a .npy, without a copy."""
    start = bytes(data[:12])
    if not start.startswith(MAGIC) or len(start) < 12 or start[6] not in (1, 2):
        source.refuse(f"{what} is no NumPy array, or was cut short")
    begin = 12 if start[6] == 2 else 10
    length = int.from_bytes(start[8:begin], "little")
    raw = bytes(data[begin : begin + min(length, _LONGEST)])
    found = _HEADER.fullmatch(raw.decode("latin-1"))
    if len(raw) != length or found is None:
        source.refuse(f"{what} has no header of a plain array: {raw[:80]!r}")
    try:
        dtype = np.dtype(found[1])
        shape = tuple(int(part) for part in found[3].split(",") if part.strip())
    except (TypeError, ValueError):
        source.refuse(f"{what} has a header that makes no sense: {raw[:80]!r}")
    if dtype.itemsize == 0:
        source.refuse(f"{what} has elements of no size")
    if dtype.hasobject:
        source.refuse(f"{what} holds Python objects: a pickle, which is never opened here")
    need, have = math.prod(shape) * dtype.itemsize, len(data) - begin - length
    if need != have:
        source.refuse(f"{what} of shape {shape} needs {need} bytes and has {have}: cut short or damaged")
    flat = np.frombuffer(data, dtype, offset=begin + length)
    try:
        return flat.reshape(shape, order="F" if found[2] == "True" else "C")
    except (ValueError, OverflowError):  # more axes, or a longer one beside an empty one, than NumPy has
        source.refuse(f"{what} has a shape that makes no sense: {found[3]:.60}")
