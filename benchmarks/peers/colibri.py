"""colibri.py: this project's engine, through its public Python face."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

import colibri_lab as lab


class Peer:
    """One model, and one session for each configuration that was asked for with the present thread count and length."""

    def __init__(self, cache: Path) -> None:
        lab.open, lab.Session  # noqa: B018  imported when first named, which is import and not opening
        self._sessions: dict[str, lab.Session] = {}
        self._sizes = (0, 0)

    def versions(self) -> dict[str, str]:
        info = lab.open().info
        return {"colibri-lab": lab.__version__, "code path": info["isa"], "python": platform.python_version()}

    def open(self, path: Path, threads: int, max_tokens: int) -> None:
        self._model = lab.open(path)
        config = self._model.config
        self.vocabulary = config.vocab_size
        self.kv_bytes = (
            2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        )  # K and V, float32
        self.configure(threads, max_tokens, "none")

    def configure(self, threads: int, max_tokens: int, capture: str) -> None:
        if self._sizes != (threads, max_tokens):
            self._sessions.clear()
            self._sizes = (threads, max_tokens)
        if capture not in self._sessions:
            self._sessions[capture] = self._model.session(capture=capture, threads=threads, max_tokens=max_tokens)
        self._session = self._sessions[capture]

    def clear(self) -> None:
        self._session.reset()

    def feed(self, ids: list[int]) -> None:
        self._session.feed(ids, progress=False)

    def turn(self, tokens: int, threads: int) -> float:
        """Seconds of a session from opening to closing that writes `tokens` tokens, each the most likely."""
        start = time.perf_counter()
        session = self._model.session(threads=threads, max_tokens=1 + tokens)
        session.feed([0], progress=False)
        for _ in session.generate(tokens, stop_ids=(), progress=False):
            pass
        del session
        return time.perf_counter() - start

    def logits(self) -> np.ndarray[Any, Any]:
        return self._session.logits

    def notes(self) -> dict[str, Any]:
        return {"session": self._session.memory(), "weights": self._model.memory(), "threads": self._session.threads}

    def arithmetic(self) -> dict[str, int]:
        """Multiply-adds: of one token in all layers, of the logits, and of attention for each key that a token sees."""
        c, weights = self._model.config, self._model.weights
        per_token = 0
        for name in weights:
            if name.startswith("layers.") and len(shape := weights.describe(name).shape) == 2:
                chosen = c.top_k / c.num_experts if ".experts." in name else 1
                per_token += round(shape[0] * shape[1] * chosen)
        attention = 2 * c.num_hidden_layers * c.num_attention_heads * c.head_dim  # q·k and p·V
        return {"per_token": per_token, "logits": c.vocab_size * c.hidden_size, "per_key": attention}

    def layout(self) -> list[dict[str, Any]]:
        """The weights that a token reads, in the order of the forward pass, for Limits.map."""
        weights, config = self._model.weights, self._model.config
        steps: list[dict[str, Any]] = []
        experts: dict[str, dict[str, list[tuple[str, int, int, int]]]] = {}
        for name in [*(n for n in weights if n.startswith("layers.")), "norm", "lm_head"]:
            w = weights.describe(name)
            rows = w.shape[0] if len(w.shape) == 2 else 1
            matrix = (w.file, w.file_offset, rows, w.shape[-1] * w.dtype.itemsize)
            layer, found, rest = name.partition(".experts.")
            if not found:
                steps.append({"choose": 1, "of": [[matrix]]})
                continue
            if layer not in experts:
                experts[layer] = {}
                steps.append({"choose": config.top_k, "of": experts[layer]})
            experts[layer].setdefault(rest.partition(".")[0], []).append(matrix)
        return [{**step, "of": list(step["of"].values())} if isinstance(step["of"], dict) else step for step in steps]
