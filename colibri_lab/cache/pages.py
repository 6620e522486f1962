"""Which pages of every expert's weights are in memory, and what brings them there and away."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colibri_lab import _cachelab
from colibri_lab._mappings import Mapping, mappings
from colibri_lab.cache.checks import open_model
from colibri_lab.cache.spans import Span, covered, joined, size, without
from colibri_lab.errors import ArgumentError, is_whole

Which = int | Sequence[int] | NDArray[np.integer[Any]] | None
"""One number, several, or None for all."""

_OK = 0  # CACHELAB_OK
_READ, _DROPPED = 16 << 20, 256 << 20  # bytes between two looks at the stop button; whole pages of any size


class Change(NamedTuple):
    """What a call did to the bytes of the experts that it was asked for.

    `before` and `after`: their share in memory (warm, drop) or locked (lock, unlock), as the system told it before and
    afterwards; NaN where it does not tell. `shared`: their share on pages that hold bytes of other tensors too, which
    `drop` leaves: all else is gone when `after` <= `shared`. `sentence` says the same in words, and why something
    stayed or was refused.
    """

    before: float
    after: float
    shared: float
    sentence: str


class Residency:
    """Made by `residency(model)`. What the kernel says of the pages under each expert, when it was last asked.

    Rows are `model.config.moe_layers`, columns are experts. All arrays are read-only.
    """

    share: NDArray[np.float64]
    """(Lm, E): of each expert's bytes (gate, up, down and their biases) those in memory; NaN where it is not told."""
    locked: NDArray[np.bool_]
    """(Lm, E): all pages of the expert are locked in memory, whoever locked them."""
    pages: dict[str, Any]
    """`page_bytes`; `huge_file`: bytes of weights on huge pages; `huge`: bytes of working memory on huge pages;
    `kinds`: for every session of the model what its tape and scratch were given (kind, size and why); `faults`: minor
    (served from memory) and major (had to read) page faults of this process so far. What the system does not tell is a
    sentence that begins with "not available here".
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._tensors, self._replaced = _tensors(model)
        files = {file for spans in self._tensors.values() for file in spans}
        self._mapped = {path: (address, n_bytes) for path, address, n_bytes in model._engine.files() if path in files}
        table = mappings()
        self._reasons = {file: _reason(file, place, table) for file, place in self._mapped.items()}
        rows, experts = len(self.layers), self.experts
        self.bytes: NDArray[np.int64] = np.zeros((rows, experts), np.int64)
        """(Lm, E): of all tensors of each expert."""
        for row in range(rows):
            self.bytes[row] = [self._size([(row, expert)]) for expert in range(experts)]
        self.bytes.flags.writeable = False
        self.refresh()

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of the rows."""
        return tuple(self._model.config["moe_layers"])

    @property
    def experts(self) -> int:
        """How many experts a layer has."""
        return int(self._model.config["num_experts"])

    @property
    def available(self) -> bool:
        """Is there an expert whose residency is told?"""
        return bool((~np.isnan(self.share)).any())

    @property
    def reason(self) -> str:
        """Why `share` is NaN where it is; empty when all is told."""
        told = [f"not available here: {reason}" for reason in self._reasons.values() if reason]
        if self._replaced:
            names = sorted(self._replaced.values())
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            told.append(f"{names[0]}{more} was replaced in memory (with_weights), so no file holds what is used")
        return "; ".join(told)

    def refresh(self) -> None:
        """Asks again, about all experts. Raises BusyError or FileError as reading a weight does."""
        with self._held():
            table = mappings()
            share = np.full((len(self.layers), self.experts), np.nan)
            for row in range(len(self.layers)):
                for expert in range(self.experts):
                    share[row, expert] = self._resident([(row, expert)])
            self._see(share, self._locked(table))
            memory = self._model.memory()
            status, reason, minor, major = _cachelab.page_faults()
            missing = "not available here: this system has no /proc/self/smaps"
            self.pages = {
                "page_bytes": _cachelab.page_bytes(),
                "huge_file": memory["huge_file"] if table is not None else missing,
                "huge": memory["huge"] if table is not None else missing,
                "kinds": [session["pages"] for session in memory["sessions"]],
                "faults": {"minor": minor, "major": major} if status == _OK else reason,
            }

    # ---- change ----

    def warm(self, layer: Which = None, expert: Which = None) -> Change:
        """Reads the experts' pages in and maps them, so that using them waits for no disk. Returns when they are there.

        `layer` numbers as in `layers`. Raises ArgumentError for a layer or expert that there is not, and for one with
        a weight that was replaced in memory when it is asked for by number. Ctrl-C ends it; what was read stays.
        """
        chosen = self._chosen(layer, expert)
        with self._held():
            before, why = self._resident(chosen), ""
            for file, spans in self._spans(chosen).items():
                for piece in _pieces(spans, _READ):
                    status, reason = self._range(file, piece).warm()
                    why = why or (reason if status else "")
            return self._changed(chosen, before, why)

    def drop(self, layer: Which = None, expert: Which = None) -> Change:
        """Has the experts' pages leave memory: this mapping lets go of them, then the page cache is asked to.

        Only whole pages: one that a neighbouring tensor shares stays unless that tensor goes too. Nothing is claimed:
        `after` is what the system says afterwards. What is used next is read from the file again, and results stay
        what they are. Arguments and errors are those of `warm`.
        """
        chosen = self._chosen(layer, expert)
        with self._held():
            before, left, why = self._resident(chosen), 0, ""
            for file, spans in self._spans(chosen).items():
                for piece in _pieces(spans, _DROPPED):
                    status, reason, stayed = self._range(file, piece).drop()
                    left += stayed
                    why = why or (reason if status else "")
            if left:
                why = f"{left:,} bytes of whole pages stayed: {why}"
            return self._changed(chosen, before, why)

    def lock(self, layer: Which = None, expert: Which = None) -> Change:
        """Reads the experts' pages in and keeps them there until `unlock`, or until the model is closed.

        All or nothing: when the system refuses a part (there is a limit, `ulimit -l`), what this call locked is
        unlocked again, and the sentence gives the limit. Arguments and errors are those of `warm`.
        """
        chosen = self._chosen(layer, expert)
        with self._held():
            table, done, why = mappings(), list[tuple[str, Span]](), ""
            before, already = self._locked_share(chosen, table), _locked_spans(table)
            pieces = ((file, piece) for file, spans in self._spans(chosen).items() for piece in _pieces(spans, _READ))
            try:
                for file, piece in pieces:
                    done.append((file, piece))
                    _, why = self._range(file, piece).lock()
                    if why:
                        break
                else:
                    done.clear()
            finally:  # refused or stopped
                for file, piece in done:
                    self._unlock(file, without([_pages(piece)], self._in_file(file, already)))
            why += "; nothing was locked by this call" if why else ""
            return self._relocked(chosen, before, why)

    def unlock(self, layer: Which = None, expert: Which = None) -> Change:
        """Gives the system its say over these pages back. A page that a locked neighbour shares stays locked.

        Arguments and errors are those of `warm`.
        """
        chosen = self._chosen(layer, expert)
        with self._held():
            table = mappings()
            before, locked = self._locked_share(chosen, table), self._locked(table)
            locked[tuple(zip(*chosen, strict=True))] = False
            stay, why = self._spans((int(row), int(number)) for row, number in np.argwhere(locked)), ""
            for file, spans in self._spans(chosen).items():
                pages, kept = (joined(map(_pages, some)) for some in (spans, stay.get(file, [])))
                why = why or self._unlock(file, without(pages, kept))
            return self._relocked(chosen, before, why)

    # ---- look ----

    def report(self) -> str:
        """A plain table: per layer the bytes in memory, and experts wholly in, partly in, out, and locked."""
        lines = [
            f"experts of {self._model.path.name}: pages of {self.pages['page_bytes']:,} bytes",
            "layer            bytes  in memory  whole   part    out  locked",
        ]
        for row, layer in enumerate(self.layers):
            share, n_bytes = self.share[row], self.bytes[row]
            told = ~np.isnan(share)
            inside = f"{(share * n_bytes)[told].sum() / n_bytes[told].sum():9.1%}" if told.any() else f"{'not told':>9}"
            whole, out = int((share == 1).sum()), int((share == 0).sum())
            part = int(told.sum()) - whole - out
            counts = f"{whole:>5}  {part:>5}  {out:>5}  {self.locked[row].sum():>6}"
            lines.append(f"{layer:>5}  {n_bytes.sum():>15,}  {inside}  {counts}")
        faults = self.pages["faults"]
        if isinstance(faults, dict):
            faults = f"{faults['minor']:,} page faults served from memory, {faults['major']:,} that had to read"
        huge = self.pages["huge_file"]
        lines.append(f"on huge pages: {f'{huge:,} bytes of the weights' if isinstance(huge, int) else huge}; {faults}")
        return "\n".join(lines + ([self.reason] if self.reason else []))

    def __repr__(self) -> str:
        told = ~np.isnan(self.share)
        if not told.any():
            return f"<Residency of {self._model.path.name}: {self.reason}>"
        inside, total = (self.share * self.bytes)[told].sum(), self.bytes[told].sum()
        return (
            f"<Residency of {self._model.path.name}: {inside / total:.1%} of {total:,} bytes of {told.sum()} experts "
            f"in memory, {self.locked.sum()} experts locked>"
        )

    # ---- inside ----

    def _held(self) -> _Held:
        return _Held(self._model)

    def _range(self, file: str, span: Span) -> _cachelab.PageRange:
        address, _ = self._mapped[file]
        return _cachelab.PageRange(os.fsencode(file), span[0], address + span[0], span[1] - span[0])

    def _spans(self, chosen: Iterable[tuple[int, int]]) -> dict[str, list[Span]]:
        """Bytes of some experts by file; tensors side by side are one span."""
        out: dict[str, list[Span]] = {}
        for place in chosen:
            for file, spans in self._tensors.get(place, {}).items():
                out.setdefault(file, []).extend(spans)
        return {file: joined(spans) for file, spans in out.items()}

    def _size(self, chosen: Iterable[tuple[int, int]]) -> int:
        return sum(size(spans) for spans in self._spans(chosen).values())

    def _resident(self, chosen: Sequence[tuple[int, int]]) -> float:
        """Share of their bytes that is in memory; NaN when it is not told of all."""
        inside = 0
        for file, spans in self._spans(chosen).items():
            if self._reasons[file]:
                return np.nan
            for span in spans:
                status, _, count = self._range(file, span).resident()
                if status != _OK:
                    return np.nan
                inside += count
        total = self._size(chosen)
        return inside / total if total and not self._replaced.keys() & set(chosen) else np.nan

    def _shared(self, chosen: Sequence[tuple[int, int]]) -> float:
        """Share of their bytes on pages that hold bytes of others too."""
        page, total, whole = _cachelab.page_bytes(), self._size(chosen), 0
        for file, spans in self._spans(chosen).items():
            end = self._mapped[file][1]
            for start, stop in spans:
                whole += max(0, (stop if stop == end else stop // page * page) - -(-start // page) * page)
        return (total - whole) / total if total else np.nan

    def _in_file(self, file: str, addresses: Iterable[Span]) -> list[Span]:
        base, _ = self._mapped[file]
        return [(start - base, stop - base) for start, stop in addresses]

    def _locked_share(self, chosen: Sequence[tuple[int, int]], table: list[Mapping] | None) -> float:
        locked, total = _locked_spans(table), self._size(chosen)
        inside = sum(covered(spans, self._in_file(file, locked)) for file, spans in self._spans(chosen).items())
        return inside / total if total and table is not None else np.nan

    def _unlock(self, file: str, spans: Iterable[Span]) -> str:
        why = ""
        for span in spans:
            status, reason = self._range(file, span).unlock()
            why = why or (reason if status else "")
        return why

    def _locked(self, table: list[Mapping] | None) -> NDArray[np.bool_]:
        locked, spans = np.zeros((len(self.layers), self.experts), np.bool_), _locked_spans(table)
        if spans:
            in_file = {file: self._in_file(file, spans) for file in self._mapped}
            for (row, expert), files in self._tensors.items():
                locked[row, expert] = all(covered(some, in_file[file]) == size(some) for file, some in files.items())
        return locked

    def _see(self, share: NDArray[np.float64], locked: NDArray[np.bool_]) -> None:
        share.flags.writeable = locked.flags.writeable = False
        self.share, self.locked = share, locked

    def _shares(self, chosen: Sequence[tuple[int, int]]) -> NDArray[np.float64]:
        """Shares, asked again for some."""
        share = self.share.copy()
        for place in chosen:
            share[place] = self._resident([place])
        return share

    def _changed(self, chosen: Sequence[tuple[int, int]], before: float, why: str) -> Change:
        self._see(self._shares(chosen), self.locked)
        after, shared = self._resident(chosen), self._shared(chosen)
        sentence = self._sentence(chosen, "in memory", before, after)
        if after > 0 and shared > 0:
            sentence += f"; {round(shared * self._size(chosen)):,} bytes lie on pages shared with other tensors"
        return Change(before, after, shared, sentence + (f"; {why}" if why else ""))

    def _relocked(self, chosen: Sequence[tuple[int, int]], before: float, why: str) -> Change:
        table = mappings()
        self._see(self._shares(chosen), self._locked(table))
        after = self._locked_share(chosen, table)
        sentence = self._sentence(chosen, "locked", before, after)
        return Change(before, after, self._shared(chosen), sentence + (f"; {why}" if why else ""))

    def _sentence(self, chosen: Sequence[tuple[int, int]], state: str, before: float, after: float) -> str:
        what = f"{len(chosen)} {'expert' if len(chosen) == 1 else 'experts'} of {self._size(chosen):,} bytes"
        if not chosen:
            return "no experts were asked for"
        if np.isnan(before) or np.isnan(after):
            return f"{what}: how much is {state} is not told ({self.reason or 'not available here'})"
        return f"{what}: {before:.1%} {state} before, {after:.1%} now"

    def _chosen(self, layer: Which, expert: Which) -> list[tuple[int, int]]:
        """(row, expert) of those asked for."""
        rows = [self.layers.index(number) for number in _numbers("layer", layer, self.layers)]
        experts = _numbers("expert", expert, range(self.experts))
        chosen = [(row, number) for row in rows for number in experts]
        replaced = [place for place in chosen if place in self._replaced]
        if replaced and (layer is not None or expert is not None):
            raise ArgumentError(
                f"{self._replaced[replaced[0]]} was replaced in memory (with_weights): no file's pages hold it; choose "
                "other experts, or None for all that lie in files"
            )
        return [place for place in chosen if place not in self._replaced]


def residency(model: Any) -> Residency:
    """Which pages of every expert's weights are in memory now; warms, drops and locks them.

    What it tells is the kernel's word (mincore), of file pages in the page cache: they may be there because another
    process read them. docs/residency.md says how that can mislead. Results of the engine do not depend on it.
    Raises ArgumentError for anything but an open model.
    """
    return Residency(open_model(model, "residency"))


class _Held:
    """Keeps a model's files mapped meanwhile; a closed one says so."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __enter__(self) -> None:
        weights = self._model.weights  # a view of an aligned weight is a lease on the mappings
        self._view = weights[next((name for name in weights if weights.describe(name).aligned), "embed")]

    def __exit__(self, *_: object) -> None:
        del self._view


def _tensors(model: Any) -> tuple[dict[tuple[int, int], dict[str, list[Span]]], dict[tuple[int, int], str]]:
    """Bytes of every (row, expert) by file, and a replaced weight of each expert that has one."""
    rows = {layer: row for row, layer in enumerate(model.config["moe_layers"])}
    spans: dict[tuple[int, int], dict[str, list[Span]]] = {}
    replaced: dict[tuple[int, int], str] = {}
    for name in model.weights:
        parts = name.split(".")
        if len(parts) < 5 or parts[3] != "experts":  # layers.{l}.moe.experts.{e}.gate
            continue
        place, weight = (rows[int(parts[1])], int(parts[4])), model.weights.describe(name)
        if weight.replaced:
            replaced.setdefault(place, name)
        n_bytes = int(np.prod(weight.shape, dtype=np.int64)) * weight.dtype.itemsize
        of_file = spans.setdefault(place, {}).setdefault(weight.file, [])
        of_file.append((weight.file_offset, weight.file_offset + n_bytes))
    joint = {place: {file: joined(some) for file, some in files.items()} for place, files in spans.items()}
    return joint, replaced


def _reason(file: str, place: tuple[int, int], table: list[Mapping] | None) -> str:
    """Why nothing can be told of a file; empty when it can."""
    status, reason = _cachelab.residency_told(os.fsencode(file))
    if status != _OK:
        return str(reason)
    address, n_bytes = place
    backed = joined((m.start, m.stop) for m in table or () if m.inode)
    inside = table is None or covered([(address, address + n_bytes)], backed) == n_bytes
    return "" if inside else f"{file} is not mapped from a file"


def _locked_spans(table: list[Mapping] | None) -> list[Span]:
    return joined((m.start, m.stop) for m in table or () if "lo" in m.flags)


def _pieces(spans: Iterable[Span], step: int) -> Iterator[Span]:
    """The spans, parted at multiples of `step`."""
    for start, stop in spans:
        while start < stop:
            end = min(start // step * step + step, stop)
            yield start, end
            start = end


def _pages(span: Span) -> Span:
    """The whole pages that hold any of its bytes."""
    page = _cachelab.page_bytes()
    return span[0] // page * page, -(-span[1] // page) * page


def _numbers(name: str, asked: Which, valid: Sequence[int]) -> list[int]:
    if asked is None:
        return list(valid)
    several: Any = [asked] if is_whole(asked) else asked
    if isinstance(several, str | bytes) or not isinstance(several, Iterable):
        raise ArgumentError(f"{name} is a whole number, several, or None for all; this is {asked!r:.80}")
    out = []
    for number in several:
        if not is_whole(number) or number not in valid:
            raise ArgumentError(f"there is no {name} {number!r:.80}{_range_of(name, valid)}")
        out.append(int(number))
    return sorted(set(out))


def _range_of(name: str, valid: Sequence[int]) -> str:
    """The end of a sentence: which there are."""
    if len(valid) == 0:
        return f" with experts: the model has no such {name}"
    if list(valid) == list(range(valid[0], valid[-1] + 1)):
        return f"; {name}s are {valid[0]} to {valid[-1]}"
    return f" with experts; {name}s with experts are {', '.join(map(str, valid))}"
