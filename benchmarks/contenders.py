"""contenders.py: the other end of serve.py: starts an engine in its own process, asks it, and says when it is
missing.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).parent
OURS = "colibri"
TITLES = {"colibri": "colibri-lab", "llama": "llama.cpp", "transformers": "transformers"}


class ContenderError(RuntimeError):
    """The engine `name` could not do what it was asked; the sentence is the engine's own."""

    def __init__(self, name: str, sentence: str) -> None:
        super().__init__(sentence)
        self.name = name


class Contender:
    """One engine in a process that stays alive between samples."""

    def __init__(self, name: str, cache: Path, timeout: float = 1800.0) -> None:
        self.name = name
        self._timeout = timeout
        self._log = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (close)
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "serve.py"), name, str(cache)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
        )

    def ask(self, do: str, **arguments: Any) -> Any:
        """The answer of one operation. Raises ContenderError when it fails, dies or does not answer in time."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise ContenderError(self.name, f"ended: {self._last_words()}") from None
        ready, _, _ = select.select([self._process.stdout], [], [], self._timeout)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            reason = self._last_words() if ready else f"no answer within {self._timeout:.0f} s"
            self.close()
            raise ContenderError(self.name, f"ended while it did '{do}': {reason}")
        answer = json.loads(line)
        if "error" in answer:
            raise ContenderError(self.name, answer["error"])
        return answer["answer"]

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Contender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._log.closed:
            self.close()

    def _last_words(self) -> str:
        self._process.wait(timeout=10)
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return f"exit code {self._process.returncode}" + (f", {lines[-1][:300]}" if lines else "")


def available(names: list[str], cache: Path) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """(versions of the contenders that work here, reasons of those that do not)."""
    versions, missing = {}, {}
    for name in names:
        with Contender(name, cache, timeout=120.0) as contender:
            try:
                versions[name] = contender.ask("versions")
            except ContenderError as error:
                missing[name] = str(error)
    return versions, missing
