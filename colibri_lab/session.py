"""Session: one timeline of tokens on a model, with everything it computed on the way."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, overload

import numpy as np
from numpy.typing import NDArray

from colibri_lab._engine import core
from colibri_lab.emulation import Emulation, emulation_of
from colibri_lab.errors import ArgumentError, BusyError, ColibriError, NotCapturedError, is_whole
from colibri_lab.progress import Progress, shown
from colibri_lab.tape import Tape
from colibri_lab.threads import Threads
from colibri_lab.trace import Trace
from colibri_lab.watch import MODES, Watch

if TYPE_CHECKING:
    from colibri_lab.generate import Token
    from colibri_lab.interventions import Edit
    from colibri_lab.memory import MemoryPanel
    from colibri_lab.model import Model
    from colibri_lab.recording import RecordedSession
    from colibri_lab.stepper import Stepper
    from colibri_lab.tokenizer import Tokenizer

__all__ = ["Pass", "Passes", "Session"]

Array = NDArray[Any]


class Pass:
    """One `feed`: token rows [start, stop) of its session, their `ids`, the `logits` of the last one, and a `tape` of
    these rows.
    """

    def __init__(self, session: Session, index: int, last: bool) -> None:
        self.index = index
        self.start, self.stop = session._engine.pass_bounds(index)
        self.ids: list[int] = session._ids[self.start : self.stop]
        self.tape = Tape(session, index)
        self._logits: Array | None = None
        if last:
            with suppress(ColibriError):  # gone with a reset that another thread is doing
                self._logits = session._engine.logits()

    @property
    def logits(self) -> Array:
        """(V,) float32 of the pass' last token, read-only. A pass that you hold keeps them.

        Raises NotCapturedError for an older pass taken from `session.passes` whose logits nobody kept.
        """
        if self._logits is not None:
            return self._logits
        try:
            logits: Array = self.tape["logits"][-1]
        except NotCapturedError:
            raise NotCapturedError(
                f"nobody kept the logits of pass {self.index}: hold the Pass that feed returns, "
                'or use capture="all" or "logits"'
            ) from None
        return logits

    def __len__(self) -> int:
        return self.stop - self.start

    def __repr__(self) -> str:
        return f"<Pass {self.index}: tokens {self.start} to {self.stop - 1}>"


class Passes(Sequence[Pass]):
    """The passes of a session so far, oldest first."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __len__(self) -> int:
        return self._session._engine.pass_count

    @overload
    def __getitem__(self, index: int) -> Pass: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pass]: ...
    def __getitem__(self, index: int | slice) -> Pass | list[Pass]:
        count = len(self)
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(count))]
        if not -count <= index < count:
            raise IndexError(f"there is no pass {index}; the session has {count}")
        return self._session._pass(index % count)

    def __repr__(self) -> str:
        return repr(list(self))


class Session:
    """Feed it text or ids, look at its `tape`, generate from it. Made by `model.session()`.

    One thread at a time: a second one gets BusyError. Ctrl-C ends a long call within a second and leaves the session as
    before that pass.
    """

    def __init__(
        self,
        model: Model,
        capture: Sequence[str],
        threads: int | None,
        max_tokens: int | None,
        gate_mode: str | None,
        to: str | os.PathLike[str] | None = None,
        watch: str = "off",
        emulate: str | Emulation | None = None,
    ) -> None:
        if any(not isinstance(pattern, str) for pattern in capture):
            raise ArgumentError(f"capture takes a level or a list of tap patterns, all texts; this is {capture!r:.80}")
        for pattern in capture:
            if not (pattern.isascii() and pattern.isprintable()):  # the engine's texts end at a NUL
                raise ArgumentError(
                    f"capture {pattern!r:.80} names no tap of this model: paths are plain ASCII, such as "
                    '"layers.*.moe.gates" (or use "none", "routing", "moe", "all")'
                )
        if gate_mode is not None and not (isinstance(gate_mode, str) and gate_mode.isascii()):
            raise ArgumentError(
                f'gate_mode is a text such as "softmax", or None for the model\'s own rule; this is {gate_mode!r:.80}'
            )
        if watch not in MODES:
            raise ArgumentError(f'watch is "off", "watch" or "stop"; this is {watch!r:.80}')
        self.model = model
        self._watching = watch
        self.capture: tuple[str, ...] = tuple(capture) or ("none",)
        self.emulation: Emulation | None = emulation_of(emulate)
        """The number formats that it emulates; None: float32 everywhere."""
        formats = None
        if self.emulation is not None:
            self.emulation.check(model.config)
            formats = self.emulation.table(model.config)
        options = list(self.capture), _count("max_tokens", max_tokens), _count("threads", threads), gate_mode
        if to is None:
            self._engine = core.Session(model._engine, *options, emulation=formats, watch=watch)
        else:
            from colibri_lab.recording import RecordedSession

            self._engine = RecordedSession(model._engine, *options, to, formats, watch)
        self._threads = Threads(self._engine.threads, self._engine.threads_asked or None, *core.usable_cpus())
        self.gate_mode: str = gate_mode or str(model.config["gate_rule"])
        self._ids: list[int] = []
        self._edits: list[Edit] = []  # of steppers
        self._moved_by: object = None  # the mark of the walk that moved it last
        self._held: weakref.WeakValueDictionary[tuple[int, int], Pass] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._process = os.getpid()  # of who came in last
        if to is not None:
            self._recorded().begin_file(self)
        model._sessions.add(self)

    # ---- run ----

    def feed(self, x: str | Sequence[int] | NDArray[np.integer[Any]], progress: Progress = None) -> Pass:
        """Runs the model over more tokens, as one pass.

        `x` is a text or token ids. A text gets the tokenizer's special tokens (such as <s>) only in an empty session;
        ids are taken as they are. `progress`: None shows a bar when the pass takes more than a second
        (`show_progress(False)` turns that off), False shows none, a function is called with the fraction done.

        Raises ArgumentError (no tokens, an id outside the vocabulary, a text without a tokenizer), CapacityError (more
        than `max_tokens`; the session stays as it was), BusyError (another thread is inside), FileError (a weight file
        changed), KeyboardInterrupt.
        """
        with self._alone():
            return self._feed(self._to_ids(x), progress)

    def chat(self, messages: Sequence[Mapping[str, Any]], progress: Progress = None) -> Pass:
        """Feeds a conversation through the checkpoint's chat template, up to where the answer begins.

        `messages` are dicts: `[{"role": "user", "content": "Hi"}]`. The template writes its own start token, so none is
        added; one that then stands twice gives a warning.
        Raises UnsupportedError when there is no tokenizer or no template, ArgumentError when the template refuses the
        messages.
        """
        from colibri_lab.chat import encode_chat

        with self._alone():
            return self._feed(_ids_of(encode_chat(self.model.tokenizer, messages, self.ids)), progress)

    def generate(
        self,
        n: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop_ids: Sequence[int] | None = None,
        progress: Progress = None,
    ) -> Iterator[Token]:
        """Continues by up to `n` tokens, one pass each; yields them as they come. The same seed gives the same tokens.

        `temperature` 0 takes the most likely token; `top_k` 0 and `top_p` 1 keep all. `stop_ids` None: the model's end
        tokens, () never stops; the stopping token is yielded and part of the session. Texts join to what the tokens
        say; a character whose bytes span tokens comes with the last of them.

        Raises NonFiniteError instead of a token when the logits hold NaN or +Inf, naming step and origin; CapacityError
        at `max_tokens`. Tokens made until then stay in the session.
        """
        from colibri_lab.generate import generate

        return generate(self, n, temperature, top_k, top_p, seed, stop_ids, progress)

    def stepper(self, x: str | Sequence[int] | NDArray[np.integer[Any]], chunk: int | None = 1) -> Stepper:
        """A debugger that walks these tokens through the model stage by stage; see `Stepper`.

        `x` as for `feed`. `chunk`: tokens in one pass; None takes all at once, so that many rows meet at an expert.
        Raises what `feed` raises, and BusyError while another stepper is in the middle of a pass.
        """
        from colibri_lab.stepper import Stepper

        with self._alone():
            return Stepper(self, self._to_ids(x), chunk)

    def reset(self) -> None:
        """Forgets all tokens. Arrays that you hold stay as they are."""
        with self._alone():
            self._moved_by = None
            self._engine.truncate(0)
            self._edits = []
            self._tell_file()  # of the edits that are gone

    # ---- look ----

    @property
    def ids(self) -> list[int]:
        """Token ids so far."""
        return self._ids[: self._engine.length]

    @property
    def texts(self) -> list[str]:
        """The text of each token; empty texts when the model has no tokenizer."""
        tokenizer = self.model.tokenizer
        return [""] * self._engine.length if tokenizer is None else tokenizer.texts(self.ids)

    @property
    def passes(self) -> Passes:
        """The passes so far; `session.passes[i].tape[path]` shows the rows of one."""
        return Passes(self)

    @property
    def logits(self) -> Array:
        """(V,) float32 after the last token, read-only, at every capture. Raises ArgumentError in an empty session."""
        if not self._engine.length:
            raise ArgumentError("an empty session has no logits; feed it first")
        return self._engine.logits()

    @property
    def tape(self) -> Tape:
        """Zero-copy views of all tokens, by tap path."""
        return Tape(self)

    @property
    def watch(self) -> Watch:
        """What was found at every point of all tokens so far, by bit pattern: a table that says "clean" when all is
        finite. Empty unless the session was made with `watch=`.
        """
        return Watch.of(self._engine.watch_table(), self._watching, core.point_kinds)

    @property
    def recording(self) -> Path | None:
        """The file that holds the tape of a session made with `to=`; None when it lies in memory, as a fork's does."""
        return getattr(self._engine, "path", None)

    @property
    def max_tokens(self) -> int:
        """Tokens for which memory is reserved."""
        return self._engine.max_tokens

    @property
    def threads(self) -> Threads:
        """Threads in use, a number that shows what was requested and what limits it.

        In a notebook: `64 requested, 2 effective; limited by affinity to 2 CPUs`. In a child forked off later: 1.
        """
        made, now = self._threads, self._engine.threads
        return made if now == made else Threads(now, made.requested, made.cpus, "fork")

    def memory(self) -> MemoryPanel:
        """In bytes: `reserved` address space, of it `tape` (history, of it `kv_cache`) and `scratch`; `rounding` to
        whole pages beyond that; `copied_bytes` by resets under live views. A mapping, shown as a small table.

        What is in memory now: `resident`, of it `huge` (on huge pages); `swapped`; −1 where the system does not tell.
        `pages`: for `tape` and `scratch` the `kind` of pages ("plain", "madvise", "hugetlb"), their size in `bytes`,
        and `why`. The environment variable COLIBRI_HUGE_PAGES chooses when a session is made: "madvise" (for scratch),
        "all" (for the tape too), "hugetlb" (scratch from the system's pool), "off".
        """
        from colibri_lab.memory import session_memory

        return session_memory(self)

    def trace(self) -> Trace:
        """What was captured, as a Trace over the same memory (no copy). It stays as it is when the session goes on."""
        with self._alone():
            self._tell_file()
            arrays = {path: self.tape[path] for path in self.tape.stored()}
            meta = {
                **self._about(),
                "passes": [list(self._engine.pass_bounds(index)) for index in range(self._engine.pass_count)],
                "edits": [edit.record() for edit in self._edits],
            }
            trace = Trace(arrays, ids=self.ids, texts=self.texts, meta=meta)
            trace.model = self.model
            return trace

    # ---- inside ----

    def _about(self) -> dict[str, Any]:
        """The entries of a trace's meta that do not change while the session goes on."""
        config = self.model.config
        return {
            "producer": "colibri-lab",
            "producer_version": core.__version__,
            "model_type": config["model_type"],
            "model_name": self.model.path.name,  # not the path: a trace travels
            "model_identity": self.model.identity,
            "num_hidden_layers": config["num_hidden_layers"],
            "moe_layers": list(config["moe_layers"]),
            "num_experts": config["num_experts"],
            "top_k": config["top_k"],
            "gate_rule": self.gate_mode,
            "gate_mode": self.gate_mode,
            "capture": list(self.capture),
            "arithmetic": "float32" if self.emulation is None else self.emulation.arithmetic,
            **({} if self.emulation is None else {"emulation": self.emulation.record()}),
            "weights_dtype": self.model.weights_dtype,
            "config": {name: list(value) if isinstance(value, tuple) else value for name, value in config.items()},
        }

    def _recorded(self) -> RecordedSession:
        from colibri_lab.recording import RecordedSession

        assert isinstance(self._engine, RecordedSession)
        return self._engine

    def _tell_file(self) -> None:
        """Brings the file of a recording up to date: edits change between passes."""
        if self.recording is not None:
            self._recorded().sync()

    def _alone(self) -> threading.Lock:
        """What to hold while inside: `with self._alone(): ...`. Raises BusyError when another call holds it.

        The lock itself, not a context manager in Python, whose lines Ctrl-C could part: the lock would be lost. Two
        threads that look at the same instant both see it free; then one waits for the other.
        """
        if self._lock.locked():
            if os.getpid() != self._process:
                raise BusyError(
                    "session busy: it was in use when this process was forked off, and nobody here will finish that; "
                    "open a new session"
                )
            raise BusyError("session busy: another call is inside it; wait for it, or use a session of your own")
        self._process = os.getpid()
        return self._lock

    def _fork(self, n_tokens: int) -> Session:
        """A session of its own with a copy of the closed rows up to a pass boundary. Within `_alone()`."""
        other = Session.__new__(Session)
        other.__dict__.update(self.__dict__)
        other._engine = self._engine.fork(n_tokens)
        other._ids, other._edits = self._ids[:n_tokens], list(self._edits)
        other._held = weakref.WeakValueDictionary()
        other._lock = threading.Lock()
        self.model._sessions.add(other)
        return other

    def _to_ids(self, x: Any) -> NDArray[np.int32]:
        if not isinstance(x, str):
            return _ids_of(x)
        return _ids_of(self._tokenizer().encode(x, special=not self._engine.length))

    def _tokenizer(self) -> Tokenizer:
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise ArgumentError(
                f"the checkpoint at '{self.model.path}' has no tokenizer.json, so it takes ids, not a text"
            )
        return tokenizer

    def _feed(self, ids: NDArray[np.int32], progress: Progress) -> Pass:
        self._check_closed()
        if not ids.size:
            raise ArgumentError("nothing to feed: give at least one token")
        if self._engine.open_pass() is None:  # else the engine refuses, and these are the ids of a stepper
            # Noted before the run and cut to its length when read: an interrupt between two lines parts nothing.
            self._ids[self._engine.length :] = ids.tolist()
            self._moved_by = None
        with shown(progress, len(ids), "tokens", "prefill") as report:
            self._engine.feed(ids, report)
        return self.passes[-1]

    def _check_closed(self) -> None:
        """Raises BusyError while a stepper is in the middle of a pass."""
        if self._engine.open_pass() is not None:
            stage, layer, _ = self._engine.next_stage() or ("logits", -1, -1)
            at = f"the {stage} of layer {layer}" if layer >= 0 else f"the stage {stage}"
            raise BusyError(
                f"session busy: a pass is open, a stepper stands before {at}; let it finish(), or session.reset()"
            )

    def _pass(self, index: int) -> Pass:
        """Pass number `index`. Its parts count only if no other thread ended a pass or reset while we gathered them."""
        while True:
            now = epoch, count = self._engine.truncations, self._engine.pass_count
            if index >= count:
                raise IndexError(f"there is no pass {index}; the session has {count}")
            found = self._held.get((epoch, index))
            if found is None:
                found = Pass(self, index, last=index == count - 1)
            if now == (self._engine.truncations, self._engine.pass_count):
                return self._held.setdefault((epoch, index), found)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a session is live engine memory and cannot be pickled or copied; session.trace().save(path) writes what "
            "it holds, and model.session() starts another"
        )

    def __repr__(self) -> str:
        return (
            f"<Session of {self.model.config.model_type}: {self._engine.length} of {self.max_tokens} tokens, "
            f"capture {', '.join(self.capture)}, {self.threads} threads"
            + (f", emulating {self.emulation}" if self.emulation else "")
            + (f", recording into {self.recording}>" if self.recording else ">")
        )


def _count(name: str, value: int | None) -> int:
    """A positive number for the engine, whose 0 means "you choose"."""
    if value is None:
        return 0
    if not is_whole(value) or not 0 < value < 2**31:
        raise ArgumentError(f"{name} must be a positive whole number, or None; this is {value!r:.80}")
    return int(value)


def _ids_of(x: Any) -> NDArray[np.int32]:
    """Token ids as the engine takes them. Raises ArgumentError for anything that is not a flat row of whole numbers."""
    try:
        ids = np.asarray(x)
    except ValueError:
        raise ArgumentError("token ids must form one flat row; this is nested unevenly") from None
    if ids.size == 0 and ids.ndim == 1:
        return np.empty(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ArgumentError(
            f"feed takes a text or a flat row of whole token ids; this is {ids.dtype} of shape {ids.shape}"
        )
    wrong = (ids < 0) | (ids > np.iinfo(np.int32).max)
    if wrong.any():
        place = int(np.flatnonzero(wrong)[0])
        raise ArgumentError(f"token id {int(ids[place])} at place {place} is no token of any vocabulary")
    return ids.astype(np.int32)
