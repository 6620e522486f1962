"""The figures of this machine that decide how fast experts come and go, measured with a model's own weights."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np

from colibri_lab.cache.budget import Budget
from colibri_lab.cache.checks import open_model
from colibri_lab.cache.costs import Machine
from colibri_lab.cache.expert_pages import ExpertPages
from colibri_lab.cache.live_run import Walked
from colibri_lab.errors import UnsupportedError
from colibri_lab.progress import Progress, shown

__all__ = ["measure_machine"]

_READS = 120  # experts read cold
_BYTES = 1 << 29  # or fewer, of this many bytes together
_FEWEST = 8
_TOKENS = 12  # decoded with all they need resident


def measure_machine(model: Any, *, threads: int | None = None, progress: Progress = None) -> Machine:
    """Reads experts cold and decodes with all experts resident, here and now, in turn, so that both meet the same
    machine.

    Read rate: up to 120 experts in random order, out of memory and out of the page cache before, read whole as
    `lab.cache.live` reads them; their bytes by the sum of their seconds. Seconds per read: the mean time to let one go.
    Compute: the median over 12 tokens that are decoded a second time, when all they need is resident, through a stepper
    as a live run does (a plain session is faster by what stepping costs). The overlap is 0, for a live run reads and
    computes in turn; memory_bytes is left open, for how much others leave is theirs to say.

    A disk has caches of its own, and shared ones are shared: measure close to what is to be predicted. All experts are
    dropped first, and what was used stays in memory. Raises UnsupportedError where experts cannot be read cold, else
    what `lab.cache.live` raises.
    """
    pages = ExpertPages(open_model(model, "measure_machine"))
    cold, sentence = pages.begin()
    if not cold:
        raise UnsupportedError(f"no cold reads to measure. {sentence}")
    keys = [(row, expert) for row in range(len(pages.layers)) for expert in range(model.config.num_experts)]
    each = int(pages.expert_bytes.mean())
    count = min(len(keys), max(_FEWEST, min(_READS, _BYTES // each)))
    chosen = [keys[place] for place in np.random.default_rng(0).permutation(len(keys))[:count]]
    tokens = [1 + number * 7919 % (model.config.vocab_size - 1) for number in range(_TOKENS)]
    enough = Budget("fifo", len(keys))
    reading = dropping = 0.0
    n_bytes = 0
    with shown(progress, 2 * _TOKENS, "tokens", "measure") as report:
        for again in (False, True):  # the second time all that is needed is there
            session = model.session(capture="routing", threads=threads, max_tokens=_TOKENS)
            walked = Walked(session, pages, lambda row: enough)
            for number, token in enumerate(tokens):
                for key in chosen[number::_TOKENS] if again else []:
                    pages.drop(key)
                    started = time.perf_counter()
                    n_bytes += pages.read(key)
                    read = time.perf_counter()
                    pages.drop(key)
                    reading, dropping = reading + read - started, dropping + time.perf_counter() - read
                    if key in enough.held:
                        pages.read(key)
                walked.walk([token])
                if report is not None:
                    report((again * _TOKENS + number + 1) / (2 * _TOKENS))
    return Machine(
        n_bytes / reading,
        median(seconds for _, _, _, seconds, *_ in walked.passes),
        dropping / count,
        source=(
            f"measured: {count} experts of {each:,} bytes read cold, {_TOKENS} tokens decoded with all resident, "
            f"{int(session.threads)} {'thread' if session.threads == 1 else 'threads'}"
        ),
    )
