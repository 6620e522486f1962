"""How many threads a session has, and why so many."""

from __future__ import annotations

__all__ = ["Threads"]


class Threads(int):
    """The threads at work: a number that also tells how many were `requested` (None: nobody asked), how many `cpus`
    this process may use, and the `limit` that says so: "this machine", "affinity", "cgroup quota" or "COLIBRI_CPUS".
    In a child forked off after the session was made the limit is "fork", since a child has none of its threads.
    """

    requested: int | None
    cpus: int
    limit: str

    def __new__(cls, effective: int, requested: int | None, cpus: int, limit: str) -> Threads:
        """As the attributes say."""
        threads = super().__new__(cls, effective)
        threads.requested, threads.cpus, threads.limit = requested, cpus, limit
        return threads

    @property
    def effective(self) -> int:
        """The number itself."""
        return int(self)

    def __repr__(self) -> str:
        asked = "none" if self.requested is None else self.requested
        if self.limit == "fork":
            return f"{asked} requested, {int(self)} effective; a forked child has no others: open a new session"
        limited = self.requested is None or self.requested > self.effective
        why = f"limited by {self.limit}" if limited else f"the limit, by {self.limit}, is"
        cpus = "1 CPU" if self.cpus == 1 else f"{self.cpus} CPUs"
        return f"{asked} requested, {int(self)} effective; {why}{' to' if limited else ''} {cpus}"

    __str__ = int.__repr__  # in a sentence: the number

    def __reduce__(self) -> tuple[type[Threads], tuple[int, int | None, int, str]]:
        return Threads, (int(self), self.requested, self.cpus, self.limit)
