"""transformers.py: Hugging Face transformers on PyTorch, CPU, in the dtype of the checkpoint, logits of the last row
alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers


class Peer:
    def __init__(self, cache: Path) -> None:
        transformers.utils.logging.disable_progress_bar()

    def versions(self) -> dict[str, str]:
        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "torch CPU": torch.backends.cpu.get_cpu_capability(),
        }

    def open(self, path: Path, threads: int, max_tokens: int) -> None:
        torch.set_num_threads(threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype="auto", local_files_only=True
        ).eval()
        config = self._model.config
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.vocabulary = config.vocab_size
        self.kv_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head * self._model.dtype.itemsize
        self.clear()

    def configure(self, threads: int, max_tokens: int, capture: str) -> None:
        torch.set_num_threads(threads)
        self.clear()

    def clear(self) -> None:
        self._past: Any = None

    @torch.inference_mode()
    def feed(self, ids: list[int]) -> None:
        out = self._model(torch.tensor([ids]), past_key_values=self._past, use_cache=True, logits_to_keep=1)
        self._past, self._logits = out.past_key_values, out.logits

    def logits(self) -> np.ndarray[Any, Any]:
        return self._logits[0, -1].float().numpy()

    def notes(self) -> dict[str, Any]:
        return {"dtype": str(self._model.dtype), "threads": torch.get_num_threads()}
