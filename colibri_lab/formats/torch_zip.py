"""Tensors out of a file of `torch.save`, without torch and without running anything.

Such a file is a zip archive with `data.pkl` and one member of raw bytes per storage. The pickle is read by the small
machine below: it knows the instructions that dicts, lists, tuples, numbers, texts and tensors need, resolves no name,
and calls nothing. Any other name or instruction is refused by name.
"""

from __future__ import annotations

import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import FormatError
from colibri_lab.formats.npy import BAD_ZIP
from colibri_lab.formats.source import Reader, Source

__all__ = ["is_torch_zip", "load"]

_STORAGES = {
    "DoubleStorage": "<f8", "FloatStorage": "<f4", "HalfStorage": "<f2", "BFloat16Storage": "bfloat16",
    "LongStorage": "<i8", "IntStorage": "<i4", "ShortStorage": "<i2", "CharStorage": "i1", "ByteStorage": "u1",
    "BoolStorage": "?",
}  # fmt: skip
_TENSOR = "torch._utils._rebuild_tensor_v2"
_ORDERED = "collections.OrderedDict"
_HINT = "it was not opened, for a pickle that wants code can do anything"


@dataclass(frozen=True)
class _Name:
    """A name the pickle asks for. It is never looked up."""

    text: str


class _Mark:
    """A place on the stack."""


def is_torch_zip(source: Source) -> bool:
    """Whether the file is a zip archive with a `data.pkl`."""
    if not source.head.startswith(b"PK"):
        return False
    try:
        with zipfile.ZipFile(source.path) as archive:
            return any(name.rpartition("/")[2] == "data.pkl" for name in archive.namelist())
    except BAD_ZIP:
        return b"data.pkl" in source.head[:300]  # a file cut short has lost its directory


def load(source: Source) -> Any:
    """The object that was saved: dicts, lists, tuples, numbers, texts, and arrays in place of tensors.

    Raises FormatError for a damaged archive, a storage that does not hold what its tensor needs, and anything that is
    not plain data.
    """
    try:
        with zipfile.ZipFile(source.path) as archive:
            members = {info.filename: info for info in archive.infolist()}
            for info in members.values():
                # zipfile would ask for as many bytes as either size says
                plain = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
                if not plain or info.file_size > source.size:
                    source.refuse(f"'{info.filename}' is compressed, or larger than the file; torch stores plain bytes")
            pickle = next(name for name in members if name.rpartition("/")[2] == "data.pkl")
            root = pickle.removesuffix("data.pkl")
            if root + "byteorder" in members and archive.read(root + "byteorder") != b"little":
                source.refuse("it was written on a big-endian machine")

            def storage(key: str) -> bytes:
                if f"{root}data/{key}" not in members:
                    source.refuse(f"the storage '{key}' of a tensor is missing")
                return archive.read(f"{root}data/{key}")

            return _Machine(source, archive.read(pickle), storage).run()
    except FormatError:
        raise
    except (*BAD_ZIP, StopIteration) as error:
        source.refuse(f"it is a damaged archive of torch.save, or was cut short: {error}")


class _Machine:
    """Runs the instructions of one pickle over a stack of plain values."""

    def __init__(self, source: Source, code: bytes, storage: Callable[[str], bytes]) -> None:
        self.source, self.storage = source, storage
        self.code = Reader(source, code, "the pickle")
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, NDArray[Any]] = {}

    def run(self) -> Any:
        while (op := chr(self.code.number("B", "an instruction"))) != ".":
            self.step(op)
        if len(self.stack) != 1:
            self.refuse("its pickle ends in the middle")
        return self.stack[0]

    def refuse(self, why: str) -> NoReturn:
        self.source.refuse(why)

    def step(self, op: str) -> None:
        """One instruction; those of protocol 2 that plain data need, and a few of later protocols."""
        push, code = self.stack.append, self.code
        plain = {"N": None, "\x88": True, "\x89": False}
        numbers = {"J": "i", "K": "B", "M": "H"}
        if op in plain:
            push(plain[op])
        elif op in numbers:
            push(code.number(numbers[op], "a number"))
        elif op == "G":
            push(struct.unpack(">d", code.take(8, "a number"))[0])
        elif op == "\x8a":
            push(int.from_bytes(code.take(code.number("B", "a length"), "a number"), "little", signed=True))
        elif op in "X\x8c":
            push(code.string("I" if op == "X" else "B", code.left, "a text"))
        elif op in "}])":
            push({"}": dict, "]": list, ")": tuple}[op]())
        elif op == "(":
            push(_Mark())
        elif op in "q\x94r":
            key = len(self.memo) if op == "\x94" else code.number("B" if op == "q" else "I", "a memo's number")
            self.memo[key] = self.top()
        elif op in "hj":
            key = code.number("B" if op == "h" else "I", "a memo's number")
            if key not in self.memo:
                self.refuse(f"its pickle asks for memo {key}, which was never kept")
            push(self.memo[key])
        elif op in "t\x85\x86\x87":
            push(tuple(self.to_mark() if op == "t" else self.pop(ord(op) - 0x84)))
        elif op in "ae":
            items = self.to_mark() if op == "e" else self.pop(1)
            self.container(list).extend(items)
        elif op in "su":
            items = self.to_mark() if op == "u" else self.pop(2)
            target = self.container(dict)
            if len(items) % 2 or not all(isinstance(key, str | int) for key in items[::2]):
                self.refuse("its pickle fills a dict with what are no pairs, or with keys that are no texts or numbers")
            target.update(zip(items[::2], items[1::2], strict=True))
        elif op == "c":
            push(_Name(f"{self.line()}.{self.line()}"))
        elif op == "Q":
            push(self.persistent(self.pop(1)[0]))
        elif op == "R":
            name, arguments = self.pop(2)
            push(self.call(name, arguments))
        elif op == "b":
            self.pop(1)  # attributes of an OrderedDict
        elif op == "\x80":
            if code.number("B", "the protocol") > 5:
                self.refuse("its pickle has a protocol that is not known")
        elif op == "\x95":
            code.take(8, "a frame")
        else:
            self.refuse(f"its pickle has the instruction {op!r}, which plain data and tensors do not need; {_HINT}")

    def top(self) -> Any:
        if not self.stack:
            self.refuse("its pickle takes from an empty stack")
        return self.stack[-1]

    def pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            self.refuse("its pickle takes from an empty stack")
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items

    def to_mark(self) -> list[Any]:
        for place in range(len(self.stack) - 1, -1, -1):
            if isinstance(self.stack[place], _Mark):
                items = self.stack[place + 1 :]
                del self.stack[place:]
                return items
        self.refuse("its pickle looks for a mark that is not there")

    def container(self, kind: type) -> Any:
        if not isinstance(self.top(), kind):
            self.refuse(f"its pickle fills a {type(self.top()).__name__} as if it were a {kind.__name__}")
        return self.top()

    def line(self) -> str:
        end = bytes(self.code.data[self.code.at : self.code.at + 256]).find(b"\n")
        if end < 0:
            self.refuse("its pickle has a name without an end")
        return str(self.code.take(end + 1, "a name"), "utf-8", "replace")[:-1]

    def call(self, name: Any, arguments: Any) -> Any:
        if not isinstance(name, _Name) or name.text not in (_TENSOR, _ORDERED):
            wanted = name.text if isinstance(name, _Name) else type(name).__name__
            self.refuse(f"its pickle wants to call {wanted}; {_HINT}")
        if name.text == _ORDERED:
            return OrderedDict()
        if not isinstance(arguments, tuple) or len(arguments) < 4:
            self.refuse("a tensor is described by too little")
        return self.tensor(*arguments[:4])

    def persistent(self, described: Any) -> NDArray[Any]:
        """The storage that ('storage', type, key, device, count) names, as a flat array."""
        if not (isinstance(described, tuple) and len(described) == 5 and isinstance(described[2], str)):
            self.refuse("a storage is described by what is no description")
        kind, key, count = described[1], described[2], described[4]
        name = kind.text.removeprefix("torch.") if isinstance(kind, _Name) else str(kind)[:80]
        if name not in _STORAGES:
            self.refuse(f"a tensor is stored as {name}; {', '.join(_STORAGES)} are read here")
        if key not in self.storages:
            raw = self.storage(key)
            dtype = _bfloat16() if _STORAGES[name] == "bfloat16" else np.dtype(_STORAGES[name])
            if not isinstance(count, int) or len(raw) != count * dtype.itemsize:
                self.refuse(f"the storage '{key}' has {len(raw)} bytes, and {count!r:.40} {dtype} are claimed")
            self.storages[key] = np.frombuffer(raw, dtype)
        return self.storages[key]

    def tensor(self, storage: Any, offset: Any, shape: Any, strides: Any) -> NDArray[Any]:
        """A view on a storage; every element must lie inside it, and a tensor may not be larger than its storage."""
        sizes = (*shape, *strides, offset) if isinstance(shape, tuple) and isinstance(strides, tuple) else (-1,)
        sound = all(type(n) is int and 0 <= n < 1 << 62 for n in sizes) and len(shape) == len(strides) <= 32
        if not sound or not isinstance(storage, np.ndarray):
            self.refuse("a tensor has a shape that makes no sense")
        count, last = 1, offset
        for size, stride in zip(shape, strides, strict=True):
            count, last = count * size, last + (size - 1) * stride
        if count == 0:
            return np.empty(shape, storage.dtype)
        if count > storage.size or last >= storage.size:
            self.refuse(f"a tensor of shape {shape} reaches beyond its storage of {storage.size} elements")
        steps = tuple(stride * storage.itemsize for stride in strides)
        return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps, writeable=False)


def _bfloat16() -> np.dtype[Any]:
    import ml_dtypes

    out: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return out
