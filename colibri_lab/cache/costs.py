"""From counters to seconds: what a machine makes of a cache, and which prefetched experts come too late."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.cache.plans import Plan
from colibri_lab.cache.requests import Whole, bounds_of
from colibri_lab.cache.simulation import Counts, Simulation
from colibri_lab.errors import ArgumentError, is_number, is_whole
from colibri_lab.progress import Progress, shown
from colibri_lab.trace import HasTrace, Trace, trace_of

__all__ = ["Machine", "Speed", "lateness", "predict"]


@dataclass(frozen=True)
class Machine:
    """What a machine can do, in the few figures that decide how fast experts come.

    `lab.cache.measure_machine(model)` measures them; each may also be given, for a machine that is not here.
    Raises ArgumentError for figures that no machine has.
    """

    read_bytes_per_s: float
    """Rate at which the weights of one expert come from where they lie, one request after another."""
    seconds_per_token: float
    """What one decoded token takes when all it needs is resident."""
    seconds_per_read: float = 0.0
    """What each expert read costs beside its bytes: to find room and to let another go."""
    overlap: float = 0.0
    """Share of the shorter of computing and reading that hides behind the longer: 0 one after the other, 1 all."""
    memory_bytes: int | None = None
    """Memory that holds resident weights and cache together; None: enough for both."""
    source: str = "given by hand"
    """How the figures were come by, in a sentence."""

    def __post_init__(self) -> None:
        for name, least in (("read_bytes_per_s", "above 0"), ("seconds_per_token", ""), ("seconds_per_read", "")):
            value = getattr(self, name)
            if not is_number(value) or not math.isfinite(value) or value < 0 or (least and value == 0):
                raise ArgumentError(f"{name} is a number {least or 'of 0 or more'}; this is {value!r:.80}")
        if not is_number(self.overlap) or not 0 <= self.overlap <= 1:
            raise ArgumentError(f"overlap is a share from 0 to 1; this is {self.overlap!r:.80}")
        if self.memory_bytes is not None and (not is_whole(self.memory_bytes) or self.memory_bytes < 1):
            raise ArgumentError(f"memory_bytes is a positive whole number or None; this is {self.memory_bytes!r:.80}")

    def seconds_to_read(self, n_bytes: float, reads: float) -> float:
        """n_bytes / read_bytes_per_s + reads · seconds_per_read."""
        return n_bytes / self.read_bytes_per_s + reads * self.seconds_per_read

    def seconds_together(self, compute: float, demand: float, ahead: float = 0.0) -> float:
        """max(max(c, d) + (1 − overlap) · min(c, d), a + d), of computing c, reads on demand d and reads ahead a.

        Without reads ahead it is the sum at overlap 0 and the longer one at 1. Those run beside all else, on one disk.
        """
        alone = max(compute, demand) + (1 - self.overlap) * min(compute, demand)
        return max(alone, ahead + demand)


@dataclass(frozen=True)
class Speed:
    """What a machine makes of a simulated cache, per decoded token; NaN where no token was decoded."""

    tokens_per_s: float
    seconds_compute: float
    seconds_read: float
    """Of misses, prefetches and overflow: all that the disk is busy, hidden or not."""
    seconds_hidden: float
    """How much of it passes while the model computes: a token takes seconds_compute + seconds_read − seconds_hidden."""
    bytes_per_token: float
    """Read for misses and prefetches; the overflow comes on top."""
    overflow_bytes: int
    """What resident weights and cache together need beyond the machine's memory: it is read again for every token."""
    prefill_bytes: int
    """Read in all prefill passes together."""
    prefill_seconds_read: float
    """What that takes. What prefill computes is not predicted: a pass of many tokens is no multiple of one token."""
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def predict(simulation: Simulation, machine: Machine, *, resident_bytes: int | None = None) -> Speed:
    """How fast a decoder is with this cache on this machine.

    Per decoded token (`simulation.decode`), with compute time c = seconds_per_token, R_d reads of B_d bytes on demand
    (misses and late hits), R_a reads of B_a bytes ahead (prefetches that are not late hits, wasted ones too) and
    overflow O:

        on demand      d = (B_d + O) / read_bytes_per_s + R_d · seconds_per_read
        ahead          a = B_a / read_bytes_per_s + R_a · seconds_per_read
        without ahead  t0 = max(c, d) + (1 − overlap) · min(c, d)
        token          t = max(t0, a + d)
        O = max(0, resident_bytes + capacity in bytes − memory_bytes), 0 when memory_bytes is None

    A layer waits for what it reads on demand, so only `overlap` of it hides. Reads ahead wait for nobody and run beside
    computing, so they add nothing until the disk, which carries a + d one after the other, is the slowest of all. A
    layer's bytes are shared among its reads evenly, which is exact where its experts have one size.

    O is why more cache can be slower: what does not fit is let go by the system and read again for every token, while
    the hits that a larger cache adds grow fewer and fewer. `resident_bytes`: weights that are no experts, KV cache,
    working memory; None counts the cache alone. Experts of different sizes count by their mean in the capacity.

    Raises ArgumentError when the simulation was not told how large an expert is.
    """
    if not isinstance(simulation, Simulation) or not isinstance(machine, Machine):
        raise ArgumentError(
            "predict takes a simulation (lab.cache.simulate(trace, …, expert_bytes=…)) and a machine "
            "(lab.cache.measure_machine(model), or lab.cache.Machine(read_bytes_per_s, seconds_per_token)), in this "
            f"order; these are {type(simulation).__name__} and {type(machine).__name__}"
        )
    if simulation.bytes_read is None or simulation.expert_bytes is None:
        raise ArgumentError(
            "bytes decide the speed, and this simulation does not know them: simulate(…, expert_bytes=…) tells it; "
            "lab.cache.residency(model).bytes has them"
        )
    if resident_bytes is not None and (not is_whole(resident_bytes) or resident_bytes < 0):
        raise ArgumentError(f"resident_bytes is a whole number of 0 or more; this is {resident_bytes!r:.80}")
    decode, prefill = simulation.decode, simulation.prefill
    tokens = _decoded(simulation)
    overflow = 0
    if machine.memory_bytes is not None:
        needed = (resident_bytes or 0) + _capacity_bytes(simulation, simulation.expert_bytes)
        overflow = max(0, needed - machine.memory_bytes)
    prefill_bytes, prefill_reads = _read(prefill)
    per_token = _read(decode)[0] / tokens if tokens else math.nan
    (demand_bytes, demand_reads), (ahead_bytes, ahead_reads) = (
        (n_bytes / tokens, reads / tokens) if tokens else (math.nan, math.nan) for n_bytes, reads in _split(decode)
    )
    compute = machine.seconds_per_token
    demand = machine.seconds_to_read(demand_bytes + overflow, demand_reads)
    ahead = machine.seconds_to_read(ahead_bytes, ahead_reads)
    read = demand + ahead
    seconds = machine.seconds_together(compute, demand, ahead)
    hidden = max(0.0, compute + read - seconds) if tokens else math.nan
    per_s = math.nan if not tokens else 1 / seconds if seconds else math.inf
    return Speed(
        per_s,
        compute,
        read,
        hidden,
        per_token,
        overflow,
        prefill_bytes,
        machine.seconds_to_read(prefill_bytes, prefill_reads),
        _sentence(tokens, per_s, compute, read, hidden, per_token, overflow, int(decode.first_uses.sum())),
    )


def _read(counts: Counts) -> tuple[int, int]:
    """Bytes, and reads of an expert: each miss and each prefetch, late ones included."""
    assert counts.bytes_read is not None  # predict() has looked
    return int(counts.bytes_read.sum()), int(counts.misses.sum() + counts.prefetched.sum())


def _split(counts: Counts) -> tuple[tuple[float, float], tuple[float, float]]:
    """Bytes and reads on demand (misses and late hits), and ahead of time."""
    assert counts.bytes_read is not None  # predict() has looked
    demand, ahead = counts.misses + counts.late_hits, counts.prefetched - counts.late_hits
    each = counts.bytes_read / np.maximum(demand + ahead, 1)  # of the layer
    return (float((demand * each).sum()), float(demand.sum())), (float((ahead * each).sum()), float(ahead.sum()))


def _decoded(simulation: Simulation) -> int:
    """Passes of one token."""
    bounds = bounds_of(simulation.trace, simulation.passes)
    return simulation.trace.n_tokens if bounds is None else int((np.diff(bounds) == 1).sum())


def _capacity_bytes(simulation: Simulation, sizes: Whole) -> int:
    """Bytes of a full cache, or of all caches together; never more than there are."""
    caches = len(sizes) if simulation.scope == "layer" else 1
    if not sizes.size:
        return 0
    each = simulation.capacity * (1 if simulation.unit == "bytes" else float(sizes.mean()))
    return min(round(caches * each), int(sizes.sum()))


def _sentence(
    tokens: int, per_s: float, compute: float, read: float, hidden: float, per_token: float, overflow: int, first: int
) -> str:
    if not tokens:
        return "no token was decoded, so there is no speed of decoding"
    beside = f", {_plain(hidden * 1e3)} ms of it while computing" if hidden > 1e-9 * (compute + read) else ""
    more = f"; {overflow / 1e6:.0f} MB do not fit in memory and are read again for every token" if overflow else ""
    once = f"; {first:,} first uses of an expert are in it, and a longer run has fewer for each token" if first else ""
    return (
        f"{_plain(per_s)} tokens/s: {_plain(compute * 1e3)} ms computing and {_plain(read * 1e3)} ms reading "
        f"{_plain(per_token / 1e6)} MB for each token{beside}{more}{once}"
    )


def _plain(value: float) -> str:
    """Three digits, or all before the point, without a power of ten."""
    if not math.isfinite(value) or not value:
        return f"{value:g}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def lateness(
    trace: Trace | HasTrace,
    plan: Plan,
    machine: Machine,
    expert_bytes: int | NDArray[np.integer[Any]],
    *,
    progress: Progress = None,
) -> Plan:
    """The same plan with `late`, (Lm, T, p) bool: which planned experts are not there yet when their layer asks.

    One channel brings the experts one after another, in the order in which they were planned; each takes

        d = bytes / read_bytes_per_s + seconds_per_read

    What is planned for a layer is asked for when the layer before it has routed (for the first layer: the last layer of
    the token before), so that the compute time of one layer, seconds_per_token / Lm, lies in between. With A(n) the
    moment at which the n-th layer in line has routed, and F(n, j) that at which its j-th planned expert is there:

        F(n, j) = max(F before it in line, A(n − 1)) + d        late: F(n, j) > A(n)
        A(n + 1) = max(A(n), F(n, j) of the late ones that are needed) + seconds_per_token / Lm

    A layer waits for what it needs and is on its way; late ones that nobody needs hold up those behind them. Every
    planned expert is brought (a cache that has some already only helps), and other misses do not use the channel: both
    are told apart by `simulate` with the plan that comes back. `overlap` and `memory_bytes` play no part.

    `expert_bytes`: one size, or one for each expert, (Lm, E). Raises ArgumentError when plan, trace and sizes do not
    fit.
    """
    trace = trace_of(trace)
    layers, tokens = len(trace.moe_layers), trace.n_tokens
    if plan.ids.shape[:2] != (layers, tokens):
        raise ArgumentError(f"the plan is of {plan.ids.shape[:2]} layers and tokens, the trace of {(layers, tokens)}")
    sizes = np.asarray(expert_bytes)
    if sizes.dtype.kind not in "iu" or sizes.shape not in ((), (layers, trace.num_experts)):
        raise ArgumentError(
            f"expert_bytes is a whole number or an array of ({layers}, {trace.num_experts}) of them; this is "
            f"{sizes.dtype} {sizes.shape}"
        )
    takes = np.broadcast_to(sizes / machine.read_bytes_per_s + machine.seconds_per_read, (layers, trace.num_experts))
    each = machine.seconds_per_token / max(layers, 1)
    late = np.zeros(plan.ids.shape, bool)
    asked_before = free = 0.0  # A(n − 1), and when the channel has brought all that was planned
    asked = each
    with shown(progress, tokens, "tokens", "lateness") as report:
        for token in range(tokens):
            for row, layer in enumerate(trace.moe_layers):
                planned = plan.ids[row, token]
                durations = np.where(planned >= 0, takes[row, planned], 0.0)
                there = max(free, asked_before) + np.cumsum(durations)
                late[row, token] = (there > asked) & (planned >= 0)
                awaited = late[row, token] & np.isin(planned, trace[f"layers.{layer}.moe.expert_ids"][token])
                free = float(there[-1]) if len(there) else free
                asked_before, asked = asked, max(asked, float(there[awaited].max(initial=asked))) + each
            if report is not None:
                report((token + 1) / tokens)
    return replace(plan, late=late)
