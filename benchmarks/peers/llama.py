"""llama.py: llama.cpp through llama-cpp-python, on a GGUF file of the same weights, with its own defaults but for the
sizes.

The batch is as long as the prompt; the inner batch (n_ubatch) stays at llama.cpp's 512. The KV cache stays f16, its
default. Flash attention is on, as llama.cpp itself chooses where it can (the Python package alone turns it off).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from models import made

from peers import gguf_file


class Peer:
    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._llama: llama_cpp.Llama | None = None

    def versions(self) -> dict[str, str]:
        features = llama_cpp.llama_print_system_info().decode()
        return {"llama-cpp-python": llama_cpp.__version__, "llama.cpp features": features.strip(" |")}

    def prepare(self, path: str) -> str:
        """Writes the GGUF file beside a checkpoint of the cache if it is not there yet."""
        folder = Path(path)
        if folder.resolve().parent != self._cache.resolve():
            raise ValueError("a GGUF file is written for the suite's own models alone")
        target = folder.with_name(f"{folder.name}.gguf")
        return str(made(target, lambda partial: gguf_file.write(folder, partial)))

    def open(self, path: Path, threads: int, max_tokens: int) -> None:
        self._path = path.with_name(f"{path.name}.gguf")
        self.configure(threads, max_tokens, "none")

    def configure(self, threads: int, max_tokens: int, capture: str) -> None:
        self._llama = None  # gives the old context back before the new one is made
        self._llama = llama_cpp.Llama(
            str(self._path),
            n_ctx=max_tokens,
            n_batch=max_tokens,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=True,
            verbose=False,
        )
        about = {
            key.rpartition(".")[2]: value for key, value in self._llama.metadata.items() if key.startswith("llama.")
        }
        self.vocabulary = self._llama.n_vocab()
        head = int(about["embedding_length"]) // int(about["head_count"])
        self.kv_bytes = 2 * 2 * int(about["block_count"]) * int(about["head_count_kv"]) * head  # K and V, float16

    def clear(self) -> None:
        self._llama.reset()

    def feed(self, ids: list[int]) -> None:
        self._llama.eval(ids)

    def logits(self) -> np.ndarray[Any, Any]:
        pointer = llama_cpp.llama_get_logits_ith(self._llama.ctx, -1)
        return np.ctypeslib.as_array(pointer, shape=(self.vocabulary,)).copy()

    def notes(self) -> dict[str, Any]:
        return {"threads": self._llama.n_threads}
