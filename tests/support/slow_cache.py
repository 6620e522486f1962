"""A cache of experts in plain Python, written from the sentences of `lab.cache.POLICIES`: slow, and easy to believe."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from colibri_lab.trace import Trace

Key = tuple[int, int]  # row of the layer, expert
COUNTERS = [
    "requests", "pin_hits", "policy_hits", "prefetch_hits", "late_hits", "misses", "first_uses", "not_kept",
    "prefetched", "wasted", "bytes_read",
]  # fmt: skip


@dataclass
class Set:
    """What one pass asks of one layer."""

    number: int  # of the pass
    start: int  # its first token
    row: int
    kind: str
    members: list[tuple[Key, int, int]]  # with token and slot of the first request
    ahead: list[Key] = field(default_factory=list)
    late: list[Key] = field(default_factory=list)


def sets_of(trace: Trace, rows: range, passes: list[int] | None, plan: Any = None) -> list[Set]:
    """The sets of the layers that share a cache, in order."""
    tokens = trace.n_tokens
    counts = [1] * tokens if passes is None else passes
    found, start = [], 0
    for number, count in enumerate(counts):
        for row in rows:
            members: dict[Key, tuple[int, int]] = {}
            named: dict[Key, bool] = {}
            for token in range(start, start + count):
                for slot, expert in enumerate(trace[f"layers.{trace.moe_layers[row]}.moe.expert_ids"][token].tolist()):
                    if expert >= 0:
                        members.setdefault((row, expert), (token, slot))
                for slot, expert in enumerate([] if plan is None else plan.ids[row, token].tolist()):
                    if expert >= 0:
                        named.setdefault((row, expert), plan.late is not None and bool(plan.late[row, token, slot]))
            one = Set(number, start, row, "prefill" if count > 1 else "decode", [(k, *at) for k, at in members.items()])
            one.ahead = [key for key, late in named.items() if not late]
            one.late = [key for key, late in named.items() if late]
            found.append(one)
        start += count
    return found


class Cache:
    """One cache; `step` serves one set. Experts that are there stand in `inside`, in order of entry."""

    def __init__(
        self, policy: str, limit: int, places: int, sets: list[Set], layers: int, size: dict[Key, int]
    ) -> None:
        self.policy, self.limit, self.places, self.sets, self.layers, self.size = (
            policy,
            limit,
            places,
            sets,
            layers,
            size,
        )
        self.inside: list[Key] = []
        self.pinned: set[Key] = set()
        self.stays: set[Key] = set()  # members, or fetched together
        self.fetched: dict[Key, str] = {}  # not used yet, with the kind of pass
        self.time = 0
        self.uses: dict[Key, list[int]] = {}  # times, since the start
        self.touched: dict[Key, int] = {}  # last use or entry
        self.used_in: dict[Key, int] = {}  # pass
        self.bit: dict[Key, bool] = {}
        self.parts: list[list[Key]] = [[], [], [], []]  # slru, lfru: 0 goes first, 1 takes half; arc: T1 T2 B1 B2
        self.since_entry: Counter[Key] = Counter()
        self.goal, self.ghost = 0, -1
        self.seen: set[Key] = set()  # asked for before
        self.at = -1  # index of the set in progress
        self.begun = False
        self.profile: dict[Key, int] = {}
        self.counts: Counter[tuple[int, str, str]] = Counter()
        self.cost: dict[Key, int] = {}

    # ---- what policies do ----

    def may_go(self, key: Key) -> bool:
        return key not in self.stays and key not in self.pinned

    def use(self, key: Key) -> None:
        self.time += 1
        self.uses.setdefault(key, []).append(self.time)
        self.touched[key] = self.time
        self.used_in[key] = self.sets[self.at].number

    def hit(self, key: Key) -> None:
        self.use(key)
        self.bit[key] = True
        self.since_entry[key] += 1
        for part in self.parts:
            if key in part and self.policy in ("slru", "lfru", "arc"):
                part.remove(key)
                self.parts[1].append(key)
                break
        self.spill()

    def enter(self, key: Key, asked: bool) -> None:
        self.inside.append(key)
        if asked:
            self.use(key)
        else:
            self.time += 1
            self.touched[key] = self.time
        self.bit[key] = False
        self.since_entry[key] = int(asked)
        if self.policy == "arc":
            known = key in self.parts[2] or key in self.parts[3]
            for ghosts in self.parts[2:]:
                if key in ghosts:
                    ghosts.remove(key)
            self.parts[1 if known and asked else 0].append(key)
            self.ghost = -1
            self.forget()
        else:
            self.parts[1 if self.policy == "lfru" else 0].append(key)
            self.spill()

    def spill(self) -> None:
        while self.policy in ("slru", "lfru") and sum(self.size[k] for k in self.parts[1]) > self.limit // 2:
            self.parts[0].append(self.parts[1].pop(0))

    def forget(self) -> None:
        t1, t2, b1, b2 = self.parts
        while b1 and len(t1) + len(b1) > self.places:
            b1.pop(0)
        while b2 and len(t1) + len(t2) + len(b1) + len(b2) > 2 * self.places:
            b2.pop(0)

    def adapt(self, key: Key) -> None:
        _, _, b1, b2 = self.parts
        self.ghost = 2 if key in b1 else 3 if key in b2 else -1
        if self.ghost == 2:
            self.goal = min(self.places, self.goal + max(1, len(b2) // len(b1)))
        elif self.ghost == 3:
            self.goal = max(0, self.goal - max(1, len(b1) // len(b2)))

    def next_use(self, key: Key) -> int:
        first = self.at + self.begun
        return next((n for n in range(first, len(self.sets)) if any(key == k for k, *_ in self.sets[n].members)), 10**9)

    def waits(self, key: Key) -> int:
        """Sets until the layer of a key comes again."""
        ahead = (key[0] - self.sets[self.at].row) % self.layers
        return self.layers if ahead == 0 and self.begun else ahead

    def victim(self) -> Key:
        free = [key for key in self.inside if self.may_go(key)]
        last = self.touched
        match self.policy:
            case "fifo":
                return free[0]
            case "lru":
                return min(free, key=lambda k: last[k])
            case "lfu":
                return min(free, key=lambda k: (len(self.uses.get(k, [])), last[k]))
            case "lru-k":
                return min(free, key=lambda k: (([-1, -1, *self.uses.get(k, [])])[-2], last[k]))
            case "static":
                return min(free, key=lambda k: (self.profile[k], (-k[0], -k[1])))
            case "belady":
                return min(free, key=lambda k: (-self.next_use(k), k))
            case "least-stale":
                now = self.sets[self.at].number
                return min(free, key=lambda k: (self.used_in.get(k) == now, -self.waits(k), last[k]))
            case "clock":
                while True:
                    front = self.inside[0]
                    if self.may_go(front) and not self.bit[front]:
                        return front
                    if self.may_go(front):
                        self.bit[front] = False
                    self.inside.append(self.inside.pop(0))
            case "slru":
                return next(k for k in self.parts[0] + self.parts[1] if self.may_go(k))
            case "lfru":
                unprivileged = [k for k in self.parts[0] if self.may_go(k)]
                if unprivileged:
                    return min(unprivileged, key=lambda k: self.since_entry[k])
                return next(k for k in self.parts[1] if self.may_go(k))
        first, second = self.parts[:2]
        if not (len(first) > self.goal or (len(first) == self.goal and self.ghost == 3)):
            first, second = second, first
        return next(k for k in first + second if self.may_go(k))

    # ---- room ----

    def room(self, keys: list[Key]) -> int:
        return sum(self.size[key] for key in keys)

    def leave(self, key: Key) -> None:
        self.inside.remove(key)
        if key in self.fetched:
            self.counts[key[0], self.fetched.pop(key), "wasted"] += 1
        for number, part in enumerate(self.parts[:2]):
            if key in part:
                part.remove(key)
                if self.policy == "arc":
                    self.parts[number + 2].append(key)

    def admit(self, key: Key, asked: bool) -> list[Key] | None:
        """Who went, or None when there is no room."""
        fixed = [k for k in [*self.inside, *self.pinned] if not self.may_go(k)]
        if self.policy == "static" or self.room(fixed) + self.size[key] > self.limit:
            return None
        if asked and self.policy == "arc":
            self.adapt(key)
        gone = []
        while self.room(self.inside) + self.room(list(self.pinned)) + self.size[key] > self.limit:
            gone.append(self.victim())
            self.leave(gone[-1])
        self.enter(key, asked)
        return gone

    def resize(self, limit: int, places: int) -> None:
        self.limit, self.places = limit, places
        at, begun, self.at, self.begun = self.at, self.begun, self.at + 1, False
        used, self.used_in = self.used_in, {}
        while self.room(self.inside) + self.room(list(self.pinned)) > limit:
            self.leave(self.victim())
        self.at, self.begun, self.used_in = at, begun, used
        self.goal = min(self.goal, places)
        if self.policy == "arc":
            self.forget()
        self.spill()

    # ---- sets ----

    def fetch(self, keys: list[Key], kind: str, served: set[Key]) -> None:
        self.stays = set(keys)
        for key in keys:
            there = key in self.inside or key in self.pinned or key in served
            if not there and self.admit(key, False) is not None:
                self.fetched[key] = kind
                self.counts[key[0], kind, "prefetched"] += 1
                self.counts[key[0], kind, "bytes_read"] += self.cost[key]
        self.stays = set()

    def keeps(self, one: Set) -> set[Key]:
        """Members that stay until their set ends."""
        members = [key for key, *_ in one.members if key not in self.pinned]
        room = self.limit - self.room(list(self.pinned))
        if self.policy != "belady" or self.room(members) <= room:
            return set(members)
        kept = []
        for key in sorted(members, key=lambda k: (self.next_use(k), members.index(k))):
            if self.room([*kept, key]) <= room:
                kept.append(key)
        return set(kept)

    def step(self) -> list[tuple[Any, ...]]:
        """Serves the next set: (token, slot, expert, outcome, kept, evicted, their number) of each member."""
        self.at += 1
        one = self.sets[self.at]
        self.begun = False
        self.fetch(one.ahead, one.kind, set())
        self.begun = True
        outcomes = []
        for key, *_ in one.members:
            there = "pin" if key in self.pinned else "prefetch" if key in self.fetched else "hit"
            missing = "late" if key in one.late else "miss"
            outcomes.append(there if key in self.pinned or key in self.inside else missing)
        self.stays = self.keeps(one)
        went: list[list[Key]] = []
        name = {"pin": "pin_hits", "hit": "policy_hits", "prefetch": "prefetch_hits", "late": "late_hits"}
        for (key, *_), outcome in zip(one.members, outcomes, strict=True):
            self.counts[one.row, one.kind, "requests"] += 1
            self.counts[one.row, one.kind, name.get(outcome, "misses")] += 1
            self.counts[one.row, one.kind, "first_uses"] += outcome == "miss" and key not in self.seen
            self.seen.add(key)
            self.fetched.pop(key, None)
            gone: list[Key] | None = []
            if outcome in ("late", "miss"):
                self.counts[one.row, one.kind, "bytes_read"] += self.cost[key]
                self.counts[one.row, one.kind, "prefetched"] += outcome == "late"
            if key in self.inside:
                self.hit(key)
            elif key not in self.pinned:
                gone = self.admit(key, True) if key in self.stays else None
                if gone is None:
                    self.use(key)
            went.append(gone or [])
        events = []
        for (key, token, slot), outcome, gone in zip(one.members, outcomes, went, strict=True):
            kept = key in self.inside or key in self.pinned
            self.counts[one.row, one.kind, "not_kept"] += not kept and outcome in ("late", "miss")
            events.append((token, slot, key[1], outcome, kept, gone[0] if gone else (-1, -1), len(gone)))
        self.stays = set()
        self.fetch(one.late, one.kind, {key for key, *_ in one.members})
        return events
