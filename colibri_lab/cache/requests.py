"""The requests that a trace makes of a cache of experts, in pieces."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Literal

import numpy as np
from numpy.typing import NDArray

from colibri_lab.cache._compiled import cachelab
from colibri_lab.cache.checks import listed
from colibri_lab.errors import ArgumentError, FileError, is_whole
from colibri_lab.routing.streaming import expert_ids
from colibri_lab.trace import Trace

Scope = Literal["layer", "global"]
Passes = Literal["trace"] | Sequence[int] | None
Whole = NDArray[np.int64]
Ids = NDArray[np.int32]

_STEP = 1 << 14  # tokens counted at a time
_MOST_KEYS = 1 << 24  # CACHELAB_MAX_KEYS
_LOOKS = 1 << 27  # keys looked at between two looks for Ctrl-C
_IN_MEMORY = 1 << 24  # bytes of next uses; more go to a temporary file
NEVER = np.iinfo(np.int32).max  # a next use that does not come


def streams(trace: Trace, scope: Scope) -> Iterator[slice]:
    """The rows of `trace.moe_layers` that share a cache, cache by cache."""
    if not (isinstance(scope, str) and scope in ("layer", "global")):
        raise ArgumentError(f"a cache is per 'layer' or 'global', not {scope!r:.80}")
    layers = len(trace.moe_layers)
    if scope == "layer":
        yield from (slice(row, row + 1) for row in range(layers))
    elif layers * trace.num_experts > _MOST_KEYS:
        raise ArgumentError(
            f"one cache for {layers} layers of {trace.num_experts} experts has more than {_MOST_KEYS} to keep apart; "
            "scope='layer' has one for each"
        )
    elif layers:
        yield slice(0, layers)


def passes_known(trace: Trace) -> bool:
    """Whether the passes of a trace are those of its run: some producers keep tokens and not how they were run."""
    return bool(trace.meta.get("passes_known", True))


def bounds_of(trace: Trace, passes: Passes) -> Whole | None:
    """First tokens of the passes and the number of tokens at the end; None: every token is one, as for passes="trace"
    of a trace whose passes are not known.

    Raises ArgumentError when token counts are none, or do not add up to the trace.
    """
    if passes is None:
        return None
    tokens = trace.n_tokens
    if isinstance(passes, str):
        if passes != "trace":
            raise ArgumentError(f"passes are None, 'trace' or a list of token counts, not {passes!r:.80}")
        if not passes_known(trace):
            return None
        return np.array([start for start, _ in trace.passes] + [tokens], np.int64)
    counts = listed(passes, "passes are None, 'trace' or a list of token counts")
    if not all(is_whole(n) and n >= 1 for n in counts) or sum(counts) != tokens:
        raise ArgumentError(f"passes are counts of 1 or more that add up to {tokens} tokens; these are {counts!r:.80}")
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)


def profile_of(trace: Trace) -> Whole:
    """(Lm, E) how often a trace asks for each expert."""
    uses = np.zeros((len(trace.moe_layers), trace.num_experts), np.int64)
    for row, layer in enumerate(trace.moe_layers):
        for start in range(0, trace.n_tokens, _STEP):
            ids = expert_ids(trace, layer, slice(start, start + _STEP))
            uses[row] += np.bincount(ids[ids >= 0], minlength=trace.num_experts)
    return uses


@dataclass(frozen=True)
class Requests:
    """What the layers `rows` of a trace ask of the cache that they share."""

    trace: Trace
    rows: slice
    bounds: Whole | None

    @property
    def tokens(self) -> int:
        """T."""
        return self.trace.n_tokens

    @property
    def layers(self) -> list[int]:
        """Numbers of the layers that share the cache."""
        return self.trace.moe_layers[self.rows]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, experts and slots."""
        return len(self.layers), self.trace.num_experts, self.trace.top_k

    def spans(self, requests: int, cuts: Iterable[int] = ()) -> list[tuple[int, int]]:
        """Token rows [start, stop) of about so many requests each, cut also at `cuts`."""
        step = max(1, requests // (len(self.layers) * self.trace.top_k))
        edges = sorted({*range(0, self.tokens, step), *cuts, self.tokens})
        return [(a, b) for a, b in pairwise(edges) if a < b]

    def at_once(self, most: int, slots: int = 0) -> int:
        """Requests to serve at a time: `most`, or fewer when there are so many keys that this would take long, for who
        goes may be found by a look at all of them; each of `slots` fetches of a token looks too.
        """
        layers, experts, k = self.shape
        return max(1, min(most, _LOOKS * k // (layers * experts * (k + slots))))

    def passes(self, start: int, stop: int) -> Whole:
        """(stop − start + 1) number of the pass of each token, and of the one at `stop`."""
        tokens = np.arange(start, stop + 1)
        return tokens if self.bounds is None else np.searchsorted(self.bounds, tokens, "right") - 1

    def pass_of(self, token: int) -> tuple[int, int]:
        """Tokens [start, stop) of the pass that holds `token`."""
        if self.bounds is None:
            return token, token + 1
        number = int(np.searchsorted(self.bounds, token, "right"))
        return int(self.bounds[number - 1]), int(self.bounds[number])

    def ids(self, start: int, stop: int) -> Ids:
        """(layers, tokens, k) expert ids, −1 where a slot has none."""
        arrays = [self.trace[f"layers.{layer}.moe.expert_ids"][start:stop] for layer in self.layers]
        if len(arrays) == 1:
            return np.ascontiguousarray(arrays[0], np.int32)[None]
        return np.stack([np.asarray(array, np.int32) for array in arrays])


class Future:
    """When each request's expert is asked for again, by pass number: written backwards into a file, read forwards."""

    def __init__(self, requests: Requests, spans: Sequence[tuple[int, int]], file: IO[bytes]) -> None:
        layers, experts, k = requests.shape
        self._file, self._shape, self._row = file, (layers, -1, k), layers * k * 4
        last, following = np.full((2, layers, experts), NEVER, np.int32)
        for start, stop in reversed(spans):
            ids, passes = requests.ids(start, stop), requests.passes(start, stop)[:-1]
            found = [cachelab.next_uses(ids[n], passes, last[n], following[n]) for n in range(layers)]
            self._file.seek(start * self._row)
            self._file.write(np.stack(found).tobytes())
        self._file.flush()  # a full disk is told here, not by the first read
        self.first: Ids = last.reshape(-1)
        """(layers · experts) pass of each expert's first use."""

    def read(self, start: int, stop: int) -> Ids:
        """(layers, tokens, k) for the tokens of a span."""
        self._file.seek(start * self._row)
        data = self._file.read((stop - start) * self._row)
        return np.frombuffer(data, np.int32).reshape(self._shape)


@contextmanager
def future_of(requests: Requests, spans: Sequence[tuple[int, int]]) -> Iterator[Future]:
    """The future of some requests: in memory when it is short, else in a temporary file."""
    layers, _, k = requests.shape
    n_bytes = requests.tokens * layers * k * 4
    with ExitStack() as files:
        try:
            file: IO[bytes] = io.BytesIO()
            if n_bytes > _IN_MEMORY:
                file = files.enter_context(tempfile.TemporaryFile())
            future = Future(requests, spans, file)
        except OSError as error:
            raise FileError(
                f"belady keeps {n_bytes:,} bytes of next uses in a temporary file, and there is no place for them "
                f"(TMPDIR says where): {error.strerror or error}"
            ) from error
        yield future
