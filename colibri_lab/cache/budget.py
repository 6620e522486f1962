"""A budget of experts: who is in, who comes, who goes. Decides only; what it decides is done by who asks it.

Written for reading, not for speed, and apart from the simulator in C, so that the two check one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

from colibri_lab.errors import ArgumentError, nearest

__all__ = ["BUDGET_POLICIES", "Budget", "BudgetPolicy", "Served"]

BudgetPolicy = Literal["lru", "fifo", "lfu", "static"]
BUDGET_POLICIES: tuple[BudgetPolicy, ...] = get_args(BudgetPolicy)
"""Policies that a real run can follow: they need no future, and one figure for each expert."""

Key = tuple[int, int]  # (row of the MoE layer, expert)


class Served(NamedTuple):
    """What became of one request."""

    key: Key
    hit: bool
    kept: bool  # it is in the budget now
    evicted: Key | None  # who had to go for it


class Budget:
    """At most `capacity` experts at once, of one layer or of all.

    A set is served as a whole, in its order: its members are never evicted for one another, and one that finds no room
    is a miss and not kept. Who goes is the expert outside the set with the smallest rank:

        lru     when it was asked for last
        fifo    when it came
        lfu     how often it was asked for since the start, also while it was out; then when it was asked for last
        static  nobody

    `chosen` are there from the start, the first one as if asked for earliest.
    """

    def __init__(self, policy: BudgetPolicy, capacity: int, chosen: Iterable[Key] = ()) -> None:
        if policy not in BUDGET_POLICIES:
            raise ArgumentError(
                f"a real run follows {', '.join(map(repr, BUDGET_POLICIES))}, not {policy!r:.80}"
                f"{nearest(str(policy), BUDGET_POLICIES)}; lab.cache.simulate knows more of them, also those that need "
                "the future"
            )
        self.capacity = capacity
        self._policy = policy
        self._uses: dict[Key, int] = {}
        # Of each that is in, by which the smallest goes; those that were there before all requests in their order.
        self._rank: dict[Key, tuple[int, int]] = {key: (0, place) for place, key in enumerate(chosen)}
        self._clock = len(self._rank)

    @property
    def held(self) -> frozenset[Key]:
        """The experts that are in."""
        return frozenset(self._rank)

    def serve(self, members: Sequence[Key]) -> list[Served]:
        """Serves one set of distinct experts, in their order."""
        present = frozenset(members)
        return [self._one(key, present) for key in members]

    def _one(self, key: Key, present: frozenset[Key]) -> Served:
        self._clock += 1
        self._uses[key] = self._uses.get(key, 0) + 1
        hit = key in self._rank
        evicted = None
        if not hit:
            if self._policy == "static":
                return Served(key, False, False, None)
            if len(self._rank) >= self.capacity:
                evicted = min(self._rank.keys() - present, key=self._rank.__getitem__, default=None)
                if evicted is None:
                    return Served(key, False, False, None)
                del self._rank[evicted]
        if not (hit and self._policy == "fifo"):
            self._rank[key] = (self._uses[key] if self._policy == "lfu" else 0, self._clock)
        return Served(key, hit, True, evicted)
