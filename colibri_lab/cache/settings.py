"""What a simulation is asked for, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from colibri_lab.cache.checks import ByLayer, array_of, by_layer, mapping_of
from colibri_lab.cache.policies import check_policy
from colibri_lab.cache.requests import Requests, Scope, Whole, profile_of, streams
from colibri_lab.errors import ArgumentError, is_whole
from colibri_lab.trace import HasTrace, Trace, trace_of

Unit = Literal["experts", "bytes"]


class HasPlan(Protocol):
    """What was fetched ahead: `ids` (Lm, T, p) whole numbers, −1 for none; `late` the same shape, bool, or None."""

    ids: NDArray[Any]
    late: NDArray[Any] | None


@dataclass(frozen=True)
class Settings:
    """All but the trace and the requests."""

    policy: str
    capacity: int
    scope: Scope
    unit: Unit
    expert_bytes: Whole | None  # (Lm, E)
    uses: Whole | None  # (Lm, E) of the profile
    profile: str  # what the profile is, in words
    pin: list[tuple[int, int]]  # rows and experts
    warm: list[tuple[int, int]]
    resize: dict[int, int]
    ahead: NDArray[np.int32] | None  # (Lm, T, p)
    late: NDArray[np.bool_] | None

    def limits(self, capacity: int, requests: Requests) -> tuple[int, int]:
        """A capacity in units and in whole experts of middling size, no more than the layers have."""
        layers, experts, _ = requests.shape
        keys = layers * experts
        if self.unit == "experts":
            return min(capacity, keys), min(capacity, keys)
        assert self.expert_bytes is not None
        total = int(self.expert_bytes[requests.rows].sum())
        limit = min(capacity, total)
        return limit, limit * keys // total

    def sizes(self, rows: slice) -> Whole | None:
        """Room that each key takes, or None for 1."""
        return self.expert_bytes[rows].ravel() if self.unit == "bytes" and self.expert_bytes is not None else None

    def cost(self, rows: slice) -> Whole | None:
        """Bytes that it takes to read each key, or None."""
        return None if self.expert_bytes is None else self.expert_bytes[rows].ravel()


def settings_of(
    trace: Trace,
    policy: str,
    capacity: int,
    scope: Scope,
    *,
    unit: str,
    expert_bytes: int | NDArray[Any] | None,
    profile: Trace | HasTrace | None,
    pin: ByLayer | None,
    warm: ByLayer | None,
    resize: Mapping[int, int] | None,
    prefetch: HasPlan | None,
) -> Settings:
    """Checks each; see `colibri_lab.cache.simulate`."""
    check_policy(policy)
    if not (isinstance(unit, str) and unit in ("experts", "bytes")):
        raise ArgumentError(f"a capacity is in 'experts' or 'bytes', not {unit!r:.80}")
    sizes = sizes_given(trace, expert_bytes)
    if unit == "bytes" and sizes is None:
        raise ArgumentError("a capacity in bytes needs expert_bytes, the size of an expert")
    least = _least(trace, scope, sizes if unit == "bytes" else None)
    _check_capacity(capacity, least, trace.top_k, unit)
    changes = mapping_of(resize, "resize", "{token: capacity}")
    for token, changed in changes.items():
        if not (is_whole(token) and 0 <= token < trace.n_tokens):
            raise ArgumentError(f"resize names tokens 0 to {trace.n_tokens - 1}, not {token!r:.80}")
        _check_capacity(changed, least, trace.top_k, unit)
    pins, warmed = (
        by_layer(trace.moe_layers, trace.num_experts, named, what) for what, named in (("pin", pin), ("warm", warm))
    )
    ahead, late = _plan(trace, prefetch)
    if policy == "static" and prefetch is not None:
        raise ArgumentError("a static cache lets nobody in, so there is no prefetch; choose another policy")
    uses, words = None, ""
    if policy == "static":
        source = trace if profile is None else trace_of(profile)
        words = "profile: this trace itself" if source is trace else f"profile: a trace of {source.n_tokens} tokens"
        uses = _uses(trace, source)
    elif profile is not None:
        raise ArgumentError(f"a profile is for the policy 'static'; {policy!r} needs none")
    return Settings(
        policy,
        int(capacity),
        scope,
        "bytes" if unit == "bytes" else "experts",
        sizes,
        uses,
        words,
        pins,
        warmed,
        {int(token): int(changed) for token, changed in sorted(changes.items())},
        ahead,
        late,
    )


def _check_capacity(capacity: int, least: int, k: int, unit: str) -> None:
    if not is_whole(capacity):
        raise ArgumentError(f"a capacity is a whole number of {unit}, not {capacity!r:.80}")
    if capacity < least:
        set_of = f"the {k} experts of a token and layer are needed together"
        raise ArgumentError(f"{set_of}, so a capacity is {least} {unit} or more, not {int(capacity)}")


def _least(trace: Trace, scope: Scope, sizes: Whole | None) -> int:
    """Room for the largest set."""
    list(streams(trace, scope))  # refuses another scope
    if sizes is None or not sizes.size:
        return trace.top_k
    return int(np.sort(sizes, axis=1)[:, -trace.top_k :].sum(axis=1).max())


def sizes_given(trace: Trace, given: int | NDArray[Any] | None) -> Whole | None:
    """(Lm, E) bytes of the experts, from one size or one for each; None for None. Raises ArgumentError."""
    if given is None:
        return None
    shape = (len(trace.moe_layers), trace.num_experts)
    array = array_of(given, "expert_bytes")
    if array.dtype.kind not in "iu" or array.shape not in ((), shape):
        raise ArgumentError(
            f"expert_bytes is a whole number or whole numbers {shape}; this is {array.dtype} {array.shape}"
        )
    if array.size and not (int(array.min()) >= 1 and int(array.max()) < 2**40):
        raise ArgumentError(f"an expert has 1 byte to 2^40, not {int(array.min())} to {int(array.max())}")
    return np.ascontiguousarray(np.broadcast_to(array.astype(np.int64), shape))


def _plan(trace: Trace, plan: HasPlan | None) -> tuple[NDArray[np.int32] | None, NDArray[np.bool_] | None]:
    if plan is None:
        return None, None
    if not hasattr(plan, "ids"):
        raise ArgumentError(f"a prefetch is a plan, such as lab.cache.plan(trace) makes, not {type(plan).__name__}")
    ids, layers, tokens = array_of(plan.ids, "the ids of a plan"), len(trace.moe_layers), trace.n_tokens
    if ids.dtype.kind not in "iu" or ids.ndim != 3 or ids.shape[:2] != (layers, tokens):
        raise ArgumentError(f"a plan is whole numbers ({layers}, {tokens}, any); this is {ids.dtype} {ids.shape}")
    if ids.size and not -1 <= int(ids.min()) <= int(ids.max()) < trace.num_experts:
        raise ArgumentError(f"a plan names 0 to {trace.num_experts - 1}, or −1; not {ids.min()} to {ids.max()}")
    given = getattr(plan, "late", None)
    late = None if given is None else array_of(given, "`late`").astype(bool)
    if late is not None and late.shape != ids.shape:
        raise ArgumentError(f"`late` has the shape {late.shape}, `ids` {ids.shape}")
    return ids.astype(np.int32), late


def _uses(trace: Trace, profile: Trace) -> Whole:
    """(Lm, E) how often the profile asks for each expert."""
    shape = (len(trace.moe_layers), trace.num_experts)
    if (len(profile.moe_layers), profile.num_experts) != shape:
        other = (len(profile.moe_layers), profile.num_experts)
        raise ArgumentError(f"the profile has {other} MoE layers and experts, this trace {shape}")
    return profile_of(profile)
