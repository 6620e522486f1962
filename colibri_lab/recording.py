"""A session that records: its tape is a piece of a file, so that what it computes is on its way to the disk at once.

`RecordedSession` is the engine's session with one promise more: between two calls, the file at `path` is a sound trace
of all closed passes. A pass is computed into the mapped file, its tokens are written beside it, then the header says
that they are there. Rows that are abandoned leave the header before anything overwrites them. Where a session in memory
would leave its block to a view that still shows abandoned rows, this one leaves its file: the kept rows are copied into
a new one that takes its name.
"""

from __future__ import annotations

import json
import os
import struct
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab._engine import core
from colibri_lab.errors import BusyError, CapacityError, FileError
from colibri_lab.recording_file import Column, RecordingFile, free_bytes, target_of
from colibri_lab.streaming import TextStream
from colibri_lab.trace_file import EDITS, dtype_name, recording_metadata

if TYPE_CHECKING:
    from colibri_lab.session import Session

__all__ = ["RecordedSession"]

EDITS_BYTES = 1 << 20  # room for what is told of edits; thousands of them
HEADS = "heads,T,S"  # axes of the one tap that is laid out head by head


class RecordedSession(core.Session):
    """The engine's session over a file. `begin_file` must come before the first pass.

    In a process that was forked off, the file is its parent's: whatever would write to it raises BusyError.
    """

    def __init__(
        self,
        model: core.Model,
        capture: list[str],
        max_tokens: int,
        threads: int,
        gate_mode: str | None,
        to: str | os.PathLike[str],
        emulation: NDArray[np.uint8] | None = None,
        watch: str = "off",
    ) -> None:
        self.path: Path = target_of(to, [path for path, _, _ in model.files()])
        left = max(1, free_bytes(self.path.parent))
        super().__init__(model, capture, max_tokens, threads, gate_mode, left, emulation, watch)
        self._process = os.getpid()

    def begin_file(self, owner: Session) -> None:
        """Makes the file; from here on `owner`'s tokens and edits go there too. Raises FileError."""
        self._owner: Callable[[], Session | None] = weakref.ref(owner)
        self._columns, self._aliases = self._lay_out(owner)
        self._text = next(column for column in self._columns if column.name == "tokens.text")
        self._file = self._make_file(owner)
        try:
            self.map(self._file.descriptor, self._file.data_start, 0)
            self._file.put()
        except BaseException:
            self._file.close()
            raise
        self._let_go = weakref.finalize(self, RecordingFile.close, self._file)

    def _make_file(self, owner: Session) -> RecordingFile:
        file = RecordingFile(self.path, self._columns, recording_metadata(owner._about(), self._aliases))
        left = free_bytes(self.path.parent)
        if file.n_bytes > left:
            file.close()
            raise FileError(
                f"cannot record into {self.path}: {self.max_tokens} tokens at this capture need {file.n_bytes} bytes "
                f"of disk and {left} are left; take a smaller max_tokens"
            )
        self._stops: list[int] = []  # of the passes that the file holds
        self._edits: list[dict[str, Any]] = []  # as the file tells them
        self._edits_end = 0
        self._stream: TextStream | None = None  # None: to be built anew from the tokens that the file holds
        self._text_end = 0  # bytes of text, those of an unfinished character apart
        self._sizes: dict[str, int] = {}
        return file

    def _lay_out(self, owner: Session) -> tuple[list[Column], dict[str, str]]:
        """The columns by their place, and the taps that are the same rows as another one."""
        config, n = owner.model.config, self.max_tokens
        columns: list[Column] = []
        at: dict[int, str] = {}
        aliases: dict[str, str] = {}
        for path, place in owner.model._taps.places(experts=False):
            found = self.place(place.kind, max(place.layer, 0))
            if found is None:
                continue
            offset, row_bytes, n_rows = found
            if offset in at:
                aliases[path] = at[offset]
                continue
            at[offset] = path
            kind = core.tap_kinds[place.kind]
            dtype = dtype_name(kind.dtype)
            if kind.axes == HEADS:
                heads = config.num_attention_heads
                columns.append(Column(path, dtype, (n, n), n * row_bytes, offset, heads, ""))
                continue
            shape = self.tap(place.kind, place.layer, place.expert, -1).shape[1:]
            rows = {"N": config.top_k}.get(kind.axes.partition(",")[0], 1)
            grows = "passes" if kind.axes.startswith("passes") else "tokens"
            columns.append(Column(path, dtype, shape, row_bytes, offset, n_rows, grows, rows))
        columns.sort(key=lambda column: column.place)

        page = os.sysconf("SC_PAGESIZE")
        place_of_tokens = (self.memory()["tape"] + page - 1) // page * page
        tokenizer = owner.model.tokenizer
        longest = 0 if tokenizer is None else tokenizer.longest
        for name, dtype, row, row_bytes, grows, per_token, n_rows in (
            ("tokens.ids", "I64", (), 8, "tokens", 1, n),
            ("tokens.text_offsets", "I64", (), 8, "fences", 1, n + 1),
            ("tokens.passes", "I64", (2,), 16, "passes", 1, n),
            ("tokens.text", "U8", (), 1, "bytes", longest, n * longest),
            (EDITS, "U8", (), 1, "bytes", 0, EDITS_BYTES),
        ):
            columns.append(Column(name, dtype, row, row_bytes, place_of_tokens, n_rows, grows, per_token))
            place_of_tokens += n_rows * row_bytes
        return columns, aliases

    # ---- what the engine does ----

    def feed(self, ids: NDArray[np.int32], progress: Callable[[float], object] | None) -> None:
        """Runs a pass, and tells the file of it. Raises FileError when the disk has no room for it."""
        self._make_room(len(ids))
        super().feed(ids, progress)
        self.sync()

    def begin(self, ids: NDArray[np.int32]) -> None:
        """Opens a pass for which the disk has room."""
        self._make_room(len(ids))
        super().begin(ids)

    def step(self, progress: Callable[[float], object] | None) -> tuple[str, int, int]:
        """Runs a stage, and tells the file of a pass that it ends."""
        self._check_process()
        place = super().step(progress)
        if self.open_pass() is None:
            self.sync()
        return place

    def truncate(self, n_tokens: int) -> None:
        """Abandons rows, here and in the file."""
        self._keep(n_tokens, lambda: super(RecordedSession, self).truncate(n_tokens))

    def abandon(self) -> None:
        """Drops the open pass."""
        self._keep(self.length, super().abandon)

    def move(self) -> None:
        """Away from every view of the tape: into a new file, when there is one."""
        self._keep(self.length, super().move)

    def open_edit(self, kind: int, layer: int, expert: int) -> NDArray[Any]:
        """As the engine's, where the file is ours to write."""
        self._check_process()
        return super().open_edit(kind, layer, expert)

    def open_write(self, kind: int, layer: int, expert: int, rows: NDArray[Any]) -> None:
        """As the engine's, where the file is ours to write."""
        self._check_process()
        super().open_write(kind, layer, expert, rows)

    def route_again(self, gate_mode: str | None, k: int, first: int, count: int, keep_ids: bool) -> None:
        """As the engine's, where the file is ours to write."""
        self._check_process()
        super().route_again(gate_mode, k, first, count, keep_ids)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise BusyError(
                f"this session records into {self.path} for the process that this one was forked from; open a session "
                "of your own"
            )

    def _make_room(self, n: int) -> None:
        """Before a pass of n tokens: nothing is waiting to be told, and the disk has room for it."""
        self._check_process()
        self.sync()  # what an interrupt kept back; rows that the header still shows must not be written over
        if 0 < n <= self.max_tokens - self.length:  # else the engine refuses
            self._file.check_room(self.length, self.length + n)

    def _keep(self, n_tokens: int, act: Callable[[], None]) -> None:
        """Something that abandons rows: here, or, when views hold them, in a new file."""
        self._check_process()
        self._forget(n_tokens)
        try:
            act()
        except FileError:
            self._move_file(n_tokens)
        self.sync(edits=False)  # they come with the next pass; steppers change them once rows are gone

    def _move_file(self, n_tokens: int) -> None:
        """Goes on in a new file, which takes the name of the old one when all is there."""
        owner = self._owner()
        assert owner is not None
        old, file = self._file, self._make_file(owner)
        try:
            file.check_room(0, n_tokens)
            self.map(file.descriptor, file.data_start, n_tokens)
        except BaseException:
            file.close()
            raise
        self._file = file
        self._let_go.detach()
        self._let_go = weakref.finalize(self, RecordingFile.close, file)
        try:
            self.sync()
            file.put(before=old)
        finally:
            old.close()

    # ---- what the file says ----

    def _forget(self, n_tokens: int) -> None:
        """The file's rows from n_tokens on are to be written anew, if they come again."""
        while self._stops and self._stops[-1] > n_tokens:
            self._stops.pop()
            self._stream = None

    def sync(self, edits: bool = True) -> None:
        """Tells the file of what changed since the last time: closed passes, abandoned ones, edits. Cheap when nothing
        did. Raises FileError, or CapacityError when the edits are more than the file has room for.
        """
        owner = self._owner()
        if owner is None or os.getpid() != self._process:
            return
        try:
            self._tell(owner, edits)
        except BaseException:  # Ctrl-C too: what was begun is told anew
            self._stream = None
            raise

    def _tell(self, owner: Session, edits: bool) -> None:
        length, passes = self.length, self.pass_count
        start = self._stops[-1] if self._stops else 0
        ids = owner._ids[:length]
        self._write_text(owner, ids, start)
        if length > start:
            self._write("tokens.ids", 8 * start, np.array(ids[start:], np.int64).tobytes())
            bounds = [self.pass_bounds(number) for number in range(len(self._stops), passes)]
            self._write("tokens.passes", 16 * len(self._stops), np.array(bounds, np.int64).tobytes())
            self._stops += [stop for _, stop in bounds]
        if edits:
            self._write_edits([edit.record() for edit in owner._edits])
        self._file.publish(length, passes, self._sizes)

    def _write(self, name: str, offset: int, data: bytes) -> None:
        column = next(column for column in self._columns if column.name == name)
        self._file.write(column.place + offset, data)

    def _write_text(self, owner: Session, ids: Sequence[int], start: int) -> None:
        """The texts of the tokens from `start` on. An unfinished character at the end is part of the last one, until
        another token comes: then its bytes wait for the token that completes it.
        """
        tokenizer = owner.model.tokenizer
        if tokenizer is None or (self._stream is not None and len(ids) == start):
            return
        if self._stream is None:
            self._stream = TextStream(tokenizer)
            self._text_end = sum(len(_utf8(self._stream.push(token_id))) for token_id in ids[:start])
        texts = [_utf8(self._stream.push(token_id)) for token_id in ids[start:]]
        rest = _utf8(self._stream.unfinished())
        fences = [self._text_end]
        for text in texts:
            fences.append(fences[-1] + len(text))
        self._text_end = fences[-1]
        if ids:
            fences[-1] += len(rest)
        if fences[-1] > self._text.n_rows:
            raise CapacityError(
                f"the texts of {len(ids)} tokens have {fences[-1]} bytes; {self.path} has room for {self._text.n_rows}"
            )
        self._write("tokens.text", fences[0], b"".join([*texts, rest]))
        self._write("tokens.text_offsets", 8 * start, struct.pack(f"<{len(fences)}q", *fences))
        self._sizes["tokens.text"] = fences[-1]

    def _write_edits(self, edits: list[dict[str, Any]]) -> None:
        """Adds a line to the log of edits when they have changed: how many of those before stay, and which come."""
        if edits == self._edits:
            return
        keep = 0
        while keep < min(len(edits), len(self._edits)) and edits[keep] == self._edits[keep]:
            keep += 1
        line = json.dumps({"keep": keep, "add": edits[keep:]}, ensure_ascii=False).encode() + b"\n"
        room = self._columns[-1].n_rows
        if self._edits_end + len(line) > room:
            raise CapacityError(
                f"{self.path} has room for {room} bytes of edits, and they need {self._edits_end + len(line)}: undo "
                "some, or record into another file"
            )
        self._write(EDITS, self._edits_end, line)
        self._edits, self._edits_end = edits, self._edits_end + len(line)
        self._sizes[EDITS] = self._edits_end


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")
