"""The policies of a cache of experts, each in a sentence from which it can be written again."""

from __future__ import annotations

from typing import Literal, get_args

from colibri_lab.errors import ArgumentError, nearest

Policy = Literal["lru", "lfu", "fifo", "clock", "slru", "lfru", "lru-k", "arc", "least-stale", "static", "belady"]

POLICIES: dict[str, str] = {
    "lru": "Least recently used: evicts the expert whose last use, or entry if it was not used since, is longest ago.",
    "lfu": "Least frequently used: evicts the expert with the fewest uses since the start, those while it was out "
    "included; of equals the one whose last use (or entry) is longest ago.",
    "fifo": "First in, first out: evicts the expert that entered first; uses change nothing.",
    "clock": "Experts stand in a queue, newcomers at its end, with a bit that entry clears and a later use sets: the "
    "front one that may not go moves to the end as it is, one with the bit loses it and moves to the end, the first "
    "other one is evicted.",
    "slru": "Segmented LRU (Karedla et al., 1994): newcomers are on probation, a use makes an expert the latest of the "
    "protected ones; while these take more than half the capacity (rounded down) the one among them used longest ago "
    "becomes the latest on probation; evicts the earliest on probation, and of the protected only when no other may "
    "go.",
    "lfru": "Least frequently recently used (Bilal and Kang, 2017): a newcomer or a used expert becomes the latest of "
    "a privileged part; while that takes more than half the capacity (rounded down) its earliest falls into the "
    "unprivileged part; evicts of this the one with the fewest uses since it entered, of equals the one that fell "
    "first, and of the privileged the earliest only when no other may go.",
    "lru-k": "LRU-2 (O'Neil et al., 1993): evicts the expert whose last use but one is longest ago, uses while it was "
    "out included; those used once or never go first; of equals the one whose last use (or entry) is longest ago.",
    "arc": "Adaptive replacement (Megiddo and Modha, 2003) as published, in whole places: p moves by the whole part of "
    "the published ratio of B1 and B2, at least 1; REPLACE passes over experts that may not go, and turns to the other "
    "list when all of one may not; a miss that is not kept adapts nothing.",
    "least-stale": "After Hoang et al., 2026: evicts stale experts first, those not used in the pass in progress; "
    "among the stale and among the rest those whose layer comes again last (the layer being served comes again "
    "last of all; before its set begins, first of all); of one layer the one whose last use (or entry) is longest ago.",
    "static": "Holds from the start the experts most used in a profile, of equals the lower layer and expert, each "
    "that still fits, and never lets another in; a lowered limit evicts the least used of them.",
    "belady": "Belady's MIN (1966), which knows the future: evicts the expert whose next use is in the latest set, of "
    "equals the lower layer and expert; of a set without room for all it keeps the members whose next use comes "
    "soonest, of equals the earlier in the set.",
}
"""What each policy does. One that may not go is a member of the set in progress, or pinned, or fetched with it."""

assert tuple(POLICIES) == get_args(Policy)

NUMBERS = {name: number for number, name in enumerate(POLICIES)}
"""Their numbers in csrc/include/colibri_cachelab.h."""

STACKS = frozenset({"lru", "lfu", "lru-k", "least-stale", "belady"})
"""Those that rank all experts alike whatever the capacity, so that one pass shows all capacities."""


def check_policy(policy: str) -> str:
    """The policy. Raises ArgumentError for another name, with the nearest ones."""
    if isinstance(policy, str) and policy in POLICIES:
        return policy
    near = nearest(policy, POLICIES) if isinstance(policy, str) else ""
    raise ArgumentError(f"there is no policy {policy!r:.80}{near or '; there are ' + ', '.join(POLICIES)}")
