"""Hold a tape to reference values: one tolerance, ids as sets, gates by expert, expert rows by token."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

# Of a tensor's largest magnitude. Two back ends of transformers differ by up to 1e-5 among themselves; a wrong formula,
# a window off by one or a frequency rounded another way is beyond 1e-3.
TOLERANCE = 5e-5
# Two experts whose logits are closer than this may be swapped by arithmetic order alone.
TIE = 1e-4

EXPERT = re.compile(r"(layers\.\d+\.moe\.experts\.\d+\.)(\w+)$")


def relative_error(ours: np.ndarray, reference: np.ndarray) -> float:
    """Largest difference over the reference's largest magnitude; inf when shapes differ or a value is not finite."""
    if ours.shape != reference.shape:
        return np.inf
    if ours.size == 0:
        return 0.0
    difference = np.abs(ours.astype(np.float64) - reference).max()
    return float(difference / np.abs(reference).max()) if np.isfinite(difference) else np.inf


def by_expert(ids: np.ndarray, gates: np.ndarray, n_experts: int) -> np.ndarray:
    """[T, E] gates at their expert's place, 0 elsewhere."""
    out = np.zeros((len(ids), n_experts))
    np.put_along_axis(out, np.asarray(ids, np.int64), gates, -1)
    return out


def routing_difference(ids: np.ndarray, reference_ids: np.ndarray, logits: np.ndarray) -> tuple[int, int]:
    """(tokens sent to other experts, tokens whose reference margin is below TIE); ids are compared as sets."""
    k = reference_ids.shape[1]
    ordered = -np.sort(-logits, axis=-1)
    margins = ordered[:, k - 1] - ordered[:, k] if k < logits.shape[1] else np.full(len(logits), np.inf)
    other = (np.sort(ids, axis=-1) != np.sort(reference_ids, axis=-1)).any(axis=-1)
    return int(other.sum()), int((margins < TIE).sum())


def errors(tape: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Relative error of every path of `reference`; paths are those of the tape, expert rows go with their `tokens`."""
    out = {}
    for path, expected in reference.items():
        expert = EXPERT.match(path)
        if path.endswith(".expert_ids"):
            ours = tape[path]
            assert ours.dtype == np.int32, path
            same = ours.shape == expected.shape and (np.sort(ours, -1) == np.sort(expected, -1)).all()
            out[path] = 0.0 if same else np.inf
        elif path.endswith(".moe.gates"):
            ids = path.removesuffix("gates") + "expert_ids"
            n_experts = 1 + max(int(reference[ids].max()), int(tape[ids].max()))
            out[path] = relative_error(
                by_expert(tape[ids], tape[path], n_experts), by_expert(reference[ids], expected, n_experts)
            )
        elif expert:
            ours_at = np.argsort(tape[expert[1] + "tokens"], kind="stable")
            theirs_at = np.argsort(reference[expert[1] + "tokens"], kind="stable")
            ours, expected = tape[path], expected[theirs_at]
            if len(ours) != len(expected):
                out[path] = np.inf
            elif expert[2] == "tokens":
                out[path] = 0.0 if (ours[ours_at] == expected).all() else np.inf
            else:
                out[path] = relative_error(ours[ours_at], expected)
        else:
            out[path] = relative_error(tape[path], expected)
    return out


def assert_agrees(
    tape: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], tolerance: float = TOLERANCE
) -> float:
    """Every path of `reference` within the tolerance; returns the largest error."""
    found = errors(tape, reference)
    wrong = {path: error for path, error in found.items() if not error <= tolerance}
    first = dict(list(wrong.items())[:8])
    assert not wrong, f"{len(wrong)} of {len(found)} paths are off, in the data's order: {first}"
    return max(found.values())
