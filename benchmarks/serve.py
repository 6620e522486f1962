"""serve.py NAME CACHE: one contender (peers/NAME.py, or the limits) in a process of its own, asked over pipes.

A request is a line of JSON {"do": operation, ...} on standard input, the answer a line on what was standard output:
{"answer": ...} or {"error": sentence}. Everything that is timed is timed here, by the same code for every engine; the
pipes cost nothing.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

KV_SLACK = 64  # a decode sample may lengthen its context by this much or an eighth before the context is made anew


class Peer(Protocol):
    """What peers/NAME.py defines as `Peer`. Making one imports the engine, which counts as its import time."""

    vocabulary: int
    kv_bytes: int  # of one position in all layers

    def versions(self) -> dict[str, str]: ...
    def open(self, path: Path, threads: int, max_tokens: int) -> None: ...
    def configure(self, threads: int, max_tokens: int, capture: str) -> None: ...
    def clear(self) -> None: ...
    def feed(self, ids: list[int]) -> None: ...
    def logits(self) -> np.ndarray[Any, Any]: ...
    def notes(self) -> dict[str, Any]: ...


def process_memory() -> dict[str, int]:
    """Bytes of this process: peak, and now resident, anonymous, file-backed (Linux; elsewhere the peak alone)."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    names = {"peak": "VmHWM", "resident": "VmRSS", "anonymous": "RssAnon", "file": "RssFile"}
    return {name: int(fields[key].split()[0]) * 1024 for name, key in names.items()}


class Server:
    """The operations on one engine."""

    def __init__(self, name: str, cache: Path) -> None:
        start = time.perf_counter()
        self._peer: Peer = importlib.import_module(f"peers.{name}").Peer(cache)
        self._imported = time.perf_counter() - start
        self._bare = process_memory()
        self._length = -1  # tokens in the context; -1: unknown
        self._at: tuple[Any, ...] = ()

    def versions(self) -> dict[str, str]:
        return self._peer.versions()

    def open(self, path: str, threads: int, max_tokens: int) -> dict[str, float]:
        start = time.perf_counter()
        self._peer.open(Path(path), threads, max_tokens)
        opened = time.perf_counter() - start
        self._ids = np.random.default_rng(1).integers(0, self._peer.vocabulary, 1 << 16).tolist()
        self._next, self._length, self._at = 0, -1, (threads, max_tokens, "none")
        return {"import": self._imported, "open": opened}

    def configure(self, threads: int, max_tokens: int, capture: str = "none") -> dict[str, Any]:
        if self._at != (threads, max_tokens, capture):
            self._peer.configure(threads, max_tokens, capture)
            self._at, self._length = (threads, max_tokens, capture), -1
        return {"kv_bytes": self._peer.kv_bytes}

    def prefill(self, tokens: int, seconds: float, chunk: int = 0) -> dict[str, float]:
        """Prompts of `tokens`, each from nothing, until `seconds` have passed; at once or `chunk` tokens at a time."""
        spent, prompts = 0.0, 0
        while spent < seconds or not prompts:
            self._peer.clear()
            spent += sum(self._feed(min(chunk or tokens, tokens - done)) for done in range(0, tokens, chunk or tokens))
            prompts += 1
        self._length = tokens
        return {"rate": tokens * prompts / spent, "seconds": spent, "prompts": prompts}

    def decode(self, context: int, seconds: float) -> dict[str, float]:
        """One token after the other from `context` on, until `seconds` have passed; the same ids for every engine."""
        slack = max(KV_SLACK, context // 8)
        each: list[float] = []
        lengths = 0
        while sum(each) < seconds or len(each) < 4:
            if not context <= self._length < context + slack:
                self._peer.clear()
                self._next = 0
                self._feed(max(1, context))
                self._length = max(1, context)
            each.append(self._feed(1))
            lengths += self._length
            self._length += 1
        return {
            "rate": len(each) / sum(each),
            "tokens": len(each),
            "mean_context": lengths / len(each),
            "mean_ms": 1e3 * sum(each) / len(each),
            "p99_ms": 1e3 * float(np.percentile(each, 99)),
        }

    def logits(self, tokens: int) -> str:
        """The last logits (float32, base64) of the first `tokens` ids, to see that all run the same network."""
        self._peer.clear()
        self._next = 0
        self._feed(tokens)
        self._length = tokens
        return base64.b64encode(np.ascontiguousarray(self._peer.logits(), np.float32).tobytes()).decode()

    def memory(self) -> dict[str, Any]:
        return {"bare": self._bare, "now": process_memory(), "notes": self._peer.notes()}

    def call(self, method: str, **arguments: Any) -> Any:
        """An operation that this peer alone has."""
        return getattr(self._peer, method)(**arguments)

    def _feed(self, tokens: int) -> float:
        if self._next + tokens > len(self._ids):
            self._next = 0
        ids = self._ids[self._next : self._next + tokens]
        self._next += tokens
        start = time.perf_counter()
        self._peer.feed(ids)
        return time.perf_counter() - start


def limits_server(cache: Path) -> Any:
    from limits import Limits

    return Limits(cache)


def main() -> None:
    name, cache = sys.argv[1], Path(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints goes to the log
    server: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if server is None:  # made with the first request, so that its failure is an answer
                server = limits_server(cache) if name == "limits" else Server(name, cache)
            operation: Callable[..., Any] = getattr(server, request.pop("do"))
            answer = {"answer": operation(**request)}
        except Exception as error:  # the parent decides what a failing contender means
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
