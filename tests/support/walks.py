"""What the tests of steppers share: models to walk through, and everything that a session holds as bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import colibri_lab as lab
from colibri_lab import testing

PROMPT = "The engine counts its gates: 1, 2, 3."
FAMILIES = {
    "mixtral": {"family": "mixtral", "layers": 2, "experts": 4},
    "olmoe": {"family": "olmoe", "layers": 2, "experts": 6, "top_k": 3},
    "qwen2_moe": {"family": "qwen2_moe", "layers": 3, "experts": 5, "dense_layers": (1,)},  # with a shared expert
}


def model_of(name: str, folder: Path) -> lab.Model:
    """The bundled model, or a small random one of a family."""
    return lab.open() if name == "bundled" else lab.open(testing.tiny_model(folder / name, **FAMILIES[name]))


def ids_for(model: lab.Model, count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, model.config.vocab_size - 8, count).tolist()


def held(session: lab.Session) -> dict[str, bytes]:
    """Every kept tap and the last logits, with every NaN the same."""
    arrays = {path: session.tape[path] for path in session.tape.stored()} | {"(logits)": session.logits}
    return {path: same_nan(array).tobytes() for path, array in arrays.items()}


def same_nan(array: np.ndarray) -> np.ndarray:
    out = np.array(array)
    if out.dtype == np.float32:
        out[np.isnan(out)] = np.nan
    return out


def fed(model: lab.Model, chunks: list[list[int]], capture: str = "all") -> lab.Session:
    """A session that was run straight through."""
    session = model.session(capture=capture, max_tokens=64, threads=1)
    for ids in chunks:
        session.feed(ids)
    return session
