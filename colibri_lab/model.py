"""Model: a checkpoint, mapped read-only and shared by any number of sessions."""

from __future__ import annotations

import difflib
import gc
import os
import re
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from colibri_lab._engine import core
from colibri_lab._files import local_path, must_exist
from colibri_lab._paths import TapTable
from colibri_lab.config import Config
from colibri_lab.errors import ArgumentError, BusyError, FileError, FormatError
from colibri_lab.weights import Weights

if TYPE_CHECKING:
    from colibri_lab.emulation import Emulation
    from colibri_lab.memory import MemoryPanel
    from colibri_lab.session import Session
    from colibri_lab.tokenizer import Tokenizer

__all__ = ["Model", "open"]


def open(path: str | os.PathLike[str] | None = None) -> Model:
    """Opens a checkpoint. Nothing is read but headers; weights stay where the file maps them.

    `path` is a folder (a single `model.safetensors` before an index, as transformers does), or a `.safetensors` or
    index file beside its `config.json`. Without a path the small bundled model opens.

    Weights that hold NaN or Inf open; everything else wrong is refused: FileError (missing, unreadable), FormatError
    (breaks its format or contradicts another file), UnsupportedError (an architecture or option that changes numbers
    and is not known).
    """
    if path is None:
        return Model(Path(__file__).parent / "bundled" / "tiny-colibri")
    return Model(path)


class Model:
    """An opened checkpoint: `config`, `weights`, `tokenizer` (None when absent), `info`, and `session()` to run it.

    Any thread may use a model; each session has one thread at a time. A `with` block closes it at the end.
    """

    config: Config
    weights: Weights

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = local_path(path)
        must_exist(self.path, _neighbours)
        try:
            self._engine = core.Model(os.fsencode(self.path))  # names on disk are bytes, not always UTF-8
        except (FileError, FormatError) as error:
            other = _other_file(self.path)
            if other is None:
                raise
            raise other from error
        fields = self._engine.fields()
        layers = [self._engine.layer(number) for number in range(int(fields["num_hidden_layers"] or 0))]
        self.config = Config(fields, layers)
        self.weights = Weights(self._engine)
        self._taps = TapTable(core.tap_kinds, self.config)
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint's files."""
        return self.path if self.path.is_dir() else self.path.parent

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, read at the first use; None when the folder has no `tokenizer.json`."""
        from colibri_lab.tokenizer import Tokenizer

        return Tokenizer.load(self.folder)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The model's end tokens: `eos_token_id` of generation_config.json, else of config.json; empty when neither
        names one. Raises FormatError or FileError, naming the file, when one of them is broken.
        """
        from colibri_lab.tokenizer import end_ids

        return end_ids(self.folder)

    @cached_property
    def identity(self) -> str:
        """A fingerprint of the weight files, equal for equal checkpoints (`colibri_lab.identity`), and of what
        `with_weights` put in the place of their tensors.
        """
        from colibri_lab.identity import model_identity, replaced_identity  # here: opening needs no hash library

        files = model_identity({self.weights.describe(name).file for name in self.weights})
        replaced = self.weights.replaced
        return replaced_identity(files, {name: self.weights[name] for name in replaced}) if replaced else files

    @cached_property
    def weights_dtype(self) -> str:
        """The dtype in which most of the weights are stored, as NumPy names it: "bfloat16"."""
        counts: dict[str, int] = {}
        for weight in map(self.weights.describe, self.weights):
            counts[str(weight.dtype)] = counts.get(str(weight.dtype), 0) + _elements(weight)
        return max(counts, key=lambda name: counts[name])

    @property
    def info(self) -> dict[str, Any]:
        """What was opened and how it runs: files, bytes, dtypes, parameters, what the files hold and the model does not
        use, weights that had to be copied or were replaced (`with_weights`), code path, threads of a session that asks
        for none and what limits them ("this machine", "affinity", "cgroup quota" or "COLIBRI_CPUS").
        """
        cpus, limit = core.usable_cpus()
        tensors: dict[tuple[str, int], core.Weight] = {}
        for name in self.weights:  # a tied weight has two names and one place
            weight = self.weights.describe(name)
            tensors.setdefault((weight.file, weight.file_offset), weight)
        dtypes: dict[str, int] = {}
        for weight in tensors.values():
            dtypes[str(weight.dtype)] = dtypes.get(str(weight.dtype), 0) + 1
        files = sorted({weight.file for weight in tensors.values()})
        return {
            "path": str(self.path),
            "model_type": self.config["model_type"],
            "files": files,
            "bytes": sum(_elements(weight) * weight.dtype.itemsize for weight in tensors.values()),
            "parameters": sum(map(_elements, tensors.values())),
            "dtypes": dtypes,
            "not_used": _not_used(self._engine.unused(), self.config["num_hidden_layers"]),
            "copied_weights": {
                w.name: f"its {w.dtype} values begin at byte {w.file_offset}, not at a multiple of {w.dtype.itemsize}"
                for w in map(self.weights.describe, self.weights)
                if not w.aligned
            },
            "replaced_weights": self.weights.replaced,
            "isa": core.isa(),
            "isa_available": list(core.isa_names()),
            "threads": cpus,
            "threads_limit": limit,
            "engine_version": core.__version__,
        }

    def with_weights(self, values: Mapping[str, NDArray[Any]]) -> Model:
        """A second model on the same files whose named weights are replaced in memory; the files are never written.

        `values`: name of a weight -> array of its shape and stored dtype. The array is copied bit for bit, a signalling
        NaN too. Tied weights (embed and lm_head) are one: replacing one replaces both. What this model had replaced
        stays so in the new one. `identity`, `info["replaced_weights"]` and the traces of its sessions say so.

        Raises TapError for an unknown name, ArgumentError for another dtype or shape, for no mapping and for tied
        weights given two values, FileError when the files changed since they were opened.
        """
        if not isinstance(values, Mapping):
            raise ArgumentError(f"with_weights takes a dict from names of weights to arrays; this is {values!r:.80}")
        arrays = {name: _fitting(self.weights.describe(name), value) for name, value in values.items()}
        tied = [name for name in ("embed", "lm_head") if name in arrays]
        places = {(self.weights.describe(name).file, self.weights.describe(name).file_offset) for name in tied}
        if len(places) < len({arrays[name].tobytes() for name in tied}):
            raise ArgumentError("embed and lm_head are one tensor in this model (tied); give one of them")
        self._engine.check_files()
        other, numbers = Model(self.path), {name: number for number, name in enumerate(self.weights)}
        before = {name: self.weights[name] for name in self.weights.replaced}
        for replaced in (before, arrays):  # in this order: a tied weight has two names
            for name, array in replaced.items():
                other._engine.replace(numbers[name], array)
        other.weights = Weights(other._engine)
        return other

    def memory(self) -> MemoryPanel:
        """Where memory goes now, in bytes; a mapping that shows itself as a small table.

        Weights: `mapped` (files), of it `resident` (in this process' memory and shared with the page cache, so the
        system takes it back when memory is short), of that `huge_file` (on huge pages). Anonymous memory of sessions,
        and of views that outlive them: `reserved` (in whole pages), of it `anonymous` (in memory), of that `huge` (on
        huge pages); `swapped`; `kept_by_views` (`reserved` and `resident` of blocks that no session uses any more).
        `copied_bytes` over all open sessions. `sessions`: what `session.memory()` says of each open one. `process`:
        `resident` size of the whole process, split into `file`, `anonymous` and `shared`, and `hugetlb` beside it.
        `failed_unmaps`: mappings that the system refused to take back. `users`: how many sessions and views are
        alive. Sizes are −1 where the system does not tell.
        """
        from colibri_lab.memory import model_memory

        return model_memory(self)

    def session(
        self,
        capture: str | Sequence[str] = "routing",
        threads: int | None = None,
        max_tokens: int | None = None,
        gate_mode: str | None = None,
        to: str | os.PathLike[str] | None = None,
        watch: str = "off",
        emulate: str | Emulation | None = None,
    ) -> Session:
        """A new timeline of tokens on this model.

        `capture`: "none", "routing" (logits, scores, ids, gates), "moe" (plus what goes into and out of experts),
        "all", or a list of tap patterns (an empty one is "none"). `max_tokens` reserves exactly that much; None takes
        the smaller of `max_position_embeddings` and what half of the available memory holds. `threads` None: as many as
        affinity and cgroup quota give; more than that would only take turns, so no more are made (`session.threads`
        shows both numbers). `gate_mode` None: the checkpoint's own rule; "softmax", "softmax_renormalised",
        "softmax_of_chosen" and "raw_logits" are for study.

        `to` names a file that holds the tape: the session writes what it captures there while it computes, and the file
        is a sound trace (`lab.load_trace`) of all finished passes at every moment, also after the process was killed.
        It follows the session: rows that are stepped back over or reset leave it. What it replaces is kept until the
        new file is ready. Its taps take disk instead of memory; `max_tokens` None then also keeps to half of the free
        disk.

        `watch` "watch": every value of every point is looked at as soon as it is computed (NaN, infinities, subnormals,
        largest magnitude: `session.watch`), also between taps and whatever is captured; values stay the same. "stop":
        also, a pass ends at the first stage whose values are not all finite: NonFiniteError names point, layer, expert,
        token, index and value, and the session is as before the pass. Forks of steppers keep the option.

        `emulate` names a number format ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2") that the values of every
        point are rounded to, or is a `lab.Emulation`, which says it point by point and for the sums too. Weights are
        used as they are. Views and the trace are float32 that hold numbers of that format.

        Raises ArgumentError for an unknown capture, gate mode, watch or format, or a `to` that is one of the model's
        files; OutOfMemoryError or FileError with the bytes when it cannot fit; FileError when `to` cannot be written or
        another session records there.
        """
        from colibri_lab.session import Session

        limit = self.config.max_position_embeddings
        session = Session(
            self,
            list(capture) if isinstance(capture, Iterable) and not isinstance(capture, str) else [capture],
            threads,
            max_tokens,
            gate_mode,
            to,
            watch,
            emulate,
        )
        if max_tokens is not None and limit is not None and max_tokens > limit:
            warnings.warn(
                f"max_tokens={max_tokens} is more than the {limit} positions this model was made for "
                "(max_position_embeddings); beyond them its answers are not what it was trained to give",
                stacklevel=2,
            )
        return session

    def close(self) -> None:
        """Unmaps the files. Raises BusyError while sessions or views live; afterwards every use raises. Closing twice
        is fine.
        """
        if self._engine.closed:
            return
        if self._engine.users():
            gc.collect()  # what only a reference cycle keeps is not in use
        users = self._engine.users()
        if users:
            raise BusyError(
                f"{users} {'session or view' if users == 1 else 'sessions and views'} of this model still in use; drop "
                "them first (del, and Out[n] in a notebook holds what a cell showed; each NumPy array of its weights "
                "or taps is a view)"
            )
        self._engine.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes, unless sessions or views outlive the block: then the files stay mapped until these are gone."""
        with suppress(BusyError):
            self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a model is a mapped file and cannot be pickled or copied; open its path again where you need it"
        )

    def __repr__(self) -> str:
        if self._engine.closed:
            return f"<Model {self.path}: closed>"
        c, replaced = self.config, len(self.weights.replaced)
        more = f", {replaced} replaced tensors" if replaced else ""
        return (
            f"<Model {c.model_type} at {self.path}: {c.num_hidden_layers} layers, {c.num_experts} experts, "
            f"{c.top_k} chosen, {self.info['parameters']:,} parameters{more}>"
        )


def _fitting(weight: core.Weight, value: NDArray[Any]) -> NDArray[Any]:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ArgumentError(f"{weight.name} is {weight.dtype} {list(weight.shape)}; no array: {error}") from None
    if array.dtype != weight.dtype or array.shape != weight.shape:
        raise ArgumentError(
            f"{weight.name} is {weight.dtype} {list(weight.shape)}, and so must be what replaces it, "
            f"not {array.dtype} {list(array.shape)}"
        )
    return array


def _elements(weight: core.Weight) -> int:
    count = 1
    for size in weight.shape:
        count *= size
    return count


def _not_used(names: Iterable[str], layers: int) -> list[str]:
    """Sentences about tensors that the files hold and the model does not use; [] when it uses all."""
    groups: dict[tuple[str, str], set[str]] = {}
    for name in names:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer and int(layer[1]) >= layers:
            groups.setdefault(("layer", f"in the file beyond num_hidden_layers = {layers}"), set()).add(layer[1])
        elif name.startswith("mtp."):
            groups.setdefault(("tensor", "of heads that predict several tokens at once (mtp.)"), set()).add(name)
        else:
            groups.setdefault(("stored rotary table", "(inv_freq; it is computed instead)"), set()).add(name)
    return [
        f"{len(members)} {what}s {which} are not used" if len(members) > 1 else f"1 {what} {which} is not used"
        for (what, which), members in groups.items()
    ]


def _other_file(path: Path) -> FileError | FormatError | None:
    """The error for a file that was opened as a model and is none: what it is and what to open instead. None for a
    folder, and for weights beside their config.json.
    """
    from colibri_lab.trace_file import is_trace  # here: a path that opens has no need of it

    if not path.is_file() or path.name.endswith(".safetensors.index.json"):
        return None
    if is_trace(path):
        return FormatError(f"'{path}' is a trace of a run, not a model: lab.load_trace('{path}') reads it")
    whole = (path.parent / "config.json").is_file()
    if path.suffix == ".safetensors" and whole:
        return None  # the engine's sentence names what is wrong in it
    folder = f"open the folder: lab.open('{path.parent}')" if whole else "no config.json lies beside it; open a folder"
    return FileError(f"'{path}' alone is no model, which needs config.json and its weights: {folder}")


def _neighbours(path: Path) -> str:
    """The end of a sentence about a missing path: what lies nearby under a similar name, or that a name on a hub is no
    folder.
    """
    folder = path.parent
    if (folder / "config.json").is_file():
        return f"; a checkpoint is opened by its folder: lab.open('{folder}')"
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        names = sorted(
            entry.name for entry in folder.iterdir() if entry.is_dir() or entry.suffix in (".safetensors", ".json")
        )
    except OSError:
        return ""
    wanted = path.relative_to(folder).parts[0]
    close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.6)
    if not close and len(path.parts) == 2 and not path.is_absolute() and not path.parent.exists():
        return "; if it is a model's name on a hub, download it to a folder first: lab.open reads local files only"
    if not close and folder == path.parent:
        close = names[:3]
    return f"; near it there is {' or '.join(repr(str(folder / name)) for name in close)}" if close else ""
