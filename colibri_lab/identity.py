"""Which weights a trace was made with: a hash that is quick on hundreds of gigabytes and notices a changed file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from colibri_lab._files import local_path, must_exist
from colibri_lab.errors import FileError

__all__ = ["model_identity", "replaced_identity"]

_BLOCK = 64 * 1024
_SAMPLES = 16  # blocks read per file, spread evenly from the first byte of data to the last


def model_identity(files: Iterable[str | PathLike[str]], full: bool = False) -> str:
    """A text such as "sampled-sha256:…" that is equal for equal weights, wherever they lie.

    Of each file, in the order of their names: name, size, safetensors header, and up to 16 blocks of 64 KiB (all of it
    when there are no more; `full` reads everything and says "sha256:…"). A change between the blocks that leaves the
    header alone goes unnoticed; that is the price of opening a large model at once. Raises FileError for a file that
    cannot be read.
    """
    paths = sorted((local_path(file) for file in files), key=lambda path: path.name)
    total = hashlib.sha256()
    for path in paths:
        must_exist(path)
        try:
            status = path.stat()
            total.update(_file_digest(path, status.st_size, status.st_mtime_ns, full))
        except OSError as error:
            raise FileError(f"cannot read {path}: {error.strerror or error}") from error
    return f"{'sha256' if full else 'sampled-sha256'}:{total.hexdigest()}"


def replaced_identity(files: str, values: Mapping[str, NDArray[Any]]) -> str:
    """The identity `files` of a checkpoint of which `values` replace some weights: name, dtype and bytes of each."""
    digest = hashlib.sha256()
    for name in sorted(values):
        digest.update(f"{name}\0{values[name].dtype}\0".encode())
        digest.update(values[name].tobytes())
    return f"{files}+replaced-sha256:{digest.hexdigest()}"


@lru_cache(maxsize=1024)
def _file_digest(path: Path, size: int, modified: int, full: bool) -> bytes:
    """Digest of one file; size and time of change are in the key, so that a changed file is read again."""
    digest = hashlib.sha256(f"{path.name}\0{size}\0".encode())
    with path.open("rb") as handle:
        start = min(8 + int.from_bytes(handle.read(8), "little"), size)
        handle.seek(0)
        for position in range(0, start, _BLOCK):
            digest.update(handle.read(min(_BLOCK, start - position)))
        blocks = -(-(size - start) // _BLOCK)
        every = full or blocks <= _SAMPLES
        numbers = range(blocks) if every else (number * (blocks - 1) // (_SAMPLES - 1) for number in range(_SAMPLES))
        for number in numbers:
            handle.seek(start + number * _BLOCK)
            digest.update(handle.read(_BLOCK))
    return digest.digest()
