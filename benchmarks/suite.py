"""suite.py: what is to be measured, and one checkpoint with every engine that runs it."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from contenders import OURS, TITLES, Contender, ContenderError
from harness import Cell, Probe, Sample, interleave
from models import Spec
from serve import KV_SLACK


@dataclass(frozen=True)
class Plan:
    """The arguments of a run."""

    cache: Path
    threads: tuple[int, ...]
    rounds: int
    seconds: float  # of one sample, at least
    prompts: tuple[int, ...]
    contexts: tuple[int, ...]
    peers: tuple[str, ...]  # beside ours; those that work here
    limits: bool  # whether the machine's limits can be measured here
    probe_seconds: float = 0.25
    void_above: float = 0.10
    process_rounds: int = 5  # of what takes a process of its own for each sample: load, kernel
    steady_seconds: float = 600.0  # of generation, over which speed and memory stay
    scaling_base: tuple[Spec, Spec] | None = None  # the models that curves over layers and over experts vary

    @property
    def max_tokens(self) -> int:
        longest = max((context + max(KV_SLACK, context // 8) for context in self.contexts), default=0)
        return max(longest, *self.prompts, KV_SLACK) + 1


def say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


@dataclass
class Checkpoint:
    """The engines of one checkpoint, each in its process, while a `with` block lasts. Ours is always there."""

    plan: Plan
    name: str
    dtype: str
    path: Path
    peers: tuple[str, ...]
    engines: dict[str, Contender] = field(default_factory=dict)
    limits: Contender | None = None
    token_bytes: int = 0
    weight_bytes: int = 0
    arithmetic: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Checkpoint:
        self._stack = ExitStack()
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _start(self) -> None:
        for name in (OURS, *self.peers):
            engine = self._stack.enter_context(Contender(name, self.plan.cache))
            try:
                if name == "llama":
                    engine.ask("call", method="prepare", path=str(self.path))
                engine.ask("open", path=str(self.path), threads=self.plan.threads[0], max_tokens=self.plan.max_tokens)
                self.engines[name] = engine
            except ContenderError as error:
                if name == OURS:
                    raise
                self._leave_out(error)
        self.arithmetic = self.engines[OURS].ask("call", method="arithmetic")
        self.weight_bytes = self.engines[OURS].ask("call", method="notes")["weights"]["mapped"]
        if self.plan.limits:
            self.limits = self._stack.enter_context(Contender("limits", self.plan.cache))
            self.limits.ask("map", steps=self.engines[OURS].ask("call", method="layout"))
            self.token_bytes = self.limits.ask("token_bytes")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def point(self, **more: Any) -> dict[str, Any]:
        return {"model": self.name, "dtype": self.dtype, **more}

    def configure(self, threads: int) -> None:
        for engine in list(self.engines.values()):
            try:
                engine.ask("configure", threads=threads, max_tokens=self.plan.max_tokens)
            except ContenderError as error:
                if engine.name == OURS:
                    raise
                self._leave_out(error)

    def cell(
        self,
        measure: str,
        unit: str,
        point: Mapping[str, Any],
        ask: Callable[[Contender], Sample],
        probe: Probe | None = None,
        limit_of: Callable[[Sample, float], float] | None = None,
    ) -> Cell:
        """One sample of every engine per round. An engine that fails is left out from here on, and the cell begun
        anew.
        """
        while True:
            asked = {name: partial(ask, engine) for name, engine in self.engines.items()}
            try:
                samples = interleave(asked, self.plan.rounds, probe, limit_of)
            except ContenderError as error:
                if error.name not in self.engines or error.name == OURS:
                    raise
                self._leave_out(error)
            else:
                return Cell(measure, unit, self.point(**point), samples)

    def read_probe(self, threads: int) -> Probe | None:
        if self.limits is None:
            return None
        ask = partial(self.limits.ask, "read_gbs", threads=threads, seconds=self.plan.probe_seconds)
        return Probe(ask, void_above=self.plan.void_above)

    def fma_probe(self, threads: int) -> Probe | None:
        return None if self.limits is None else Probe(partial(self.limits.ask, "fma_gflops", threads=threads))

    def agreement(self, tokens: int) -> Iterator[tuple[str, float, float]]:
        """(peer, largest difference of a logit from ours, largest logit) after the same ids: all run the same
        network.
        """

        def last(engine: Contender) -> np.ndarray[Any, np.dtype[np.float32]]:
            return np.frombuffer(base64.b64decode(engine.ask("logits", tokens=tokens)), np.float32)

        ours = last(self.engines[OURS])
        for name, engine in self.engines.items():
            if name != OURS:
                yield name, float(np.abs(last(engine) - ours).max()), float(np.abs(ours).max())

    def _leave_out(self, error: ContenderError) -> None:
        say(f"{TITLES[error.name]} is left out for {self.name} {self.dtype}: {error}")
        self.left_out[error.name] = str(error)
        self.engines.pop(error.name, None)


def ours_alone(plan: Plan, **changes: Any) -> Plan:
    """The same plan without peers and limits."""
    return replace(plan, peers=(), limits=False, **changes)
