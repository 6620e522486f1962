"""A router that spares the cache: what it would save to take an expert that is there for one that is not, and what it
would cost in the model's answers. Run for real through the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.cache.budget import Budget, BudgetPolicy
from colibri_lab.cache.checks import ByLayer, array_of, by_layer, open_model
from colibri_lab.cache.requests import Scope, Whole
from colibri_lab.errors import ArgumentError, is_number, is_whole
from colibri_lab.progress import Progress, shown
from colibri_lab.trace import Trace


@dataclass(frozen=True, repr=False)
class Substitution:
    """Two runs over the same tokens: the plain one, and one whose router takes residents for what would miss."""

    capacity: int
    margin: float
    policy: str
    scope: str
    requests: Whole  # (Lm,), the same in both runs
    misses_plain: Whole  # (Lm,)
    misses: Whole  # (Lm,) with substitution
    replaced: Whole  # (Lm, T) slots of each token that went to another expert
    kl: NDArray[np.float64]  # (T,) KL(plain ‖ substituted) in nats of the next-token distribution after each token
    agrees: NDArray[np.bool_]  # (T,) whether the likeliest next token is the same
    plain: Trace  # of the plain run
    trace: Trace  # of the other; its edits are the substitutions

    @property
    def mean_kl(self) -> float:
        """Mean over the positions, in nats; NaN when a distribution is not finite."""
        return float(self.kl.mean())

    @property
    def agreement(self) -> float:
        """Share of the positions with the same likeliest next token."""
        return float(self.agrees.mean())

    @property
    def saved(self) -> Whole:
        """(Lm,) misses of the plain run less those with substitution; can be negative, for routing goes other ways."""
        return self.misses_plain - self.misses

    def report(self) -> str:
        """Counts by layer and in all, and what they cost, as plain text."""
        rows = [(str(layer), *numbers) for layer, *numbers in zip(
            self.trace.moe_layers, self.requests, self.misses_plain, self.misses, self.replaced.sum(axis=1), strict=True
        )]  # fmt: skip
        total = (self.requests, self.misses_plain, self.misses, self.replaced)
        rows.append(("all", *(int(counts.sum()) for counts in total)))
        lines = [f"{'layer':>5} {'requests':>10} {'misses':>10} {'substituted':>12} {'slots replaced':>15}"]
        lines += [f"{row[0]:>5} {row[1]:>10} {row[2]:>10} {row[3]:>12} {row[4]:>15}" for row in rows]
        tokens = int((self.replaced > 0).any(axis=0).sum())
        return "\n".join([
            f"{self.policy}, {self.capacity} experts per {'layer' if self.scope == 'layer' else 'model'}, "
            f"margin {self.margin:g}", *lines,
            f"{tokens} of {len(self.kl)} tokens changed; mean KL {self.mean_kl:.4g} nats, largest "
            f"{float(self.kl.max()):.4g}; the same next token after {self.agreement:.1%}"
            + ("" if np.isfinite(self.kl).all() else "; some logits are not finite, lab.nan.find(session) tells why"),
        ])  # fmt: skip

    def __repr__(self) -> str:
        return (
            f"<Substitution: {int(self.misses_plain.sum())} misses become {int(self.misses.sum())}, "
            f"{int(self.replaced.sum())} slots replaced, mean KL {self.mean_kl:.4g} nats>"
        )


def substitute(
    model: Any,
    x: str | Sequence[int] | NDArray[np.integer[Any]],
    capacity: int,
    margin: float,
    policy: BudgetPolicy = "lru",
    scope: Scope = "layer",
    *,
    warm: ByLayer | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> Substitution:
    """Runs the tokens of `x` twice, one at a time: as they are, and sparing a cache of `capacity` experts.

    Wherever a chosen expert is not in the cache, the best resident that the token has not chosen takes its slot, if its
    score is less than `margin` below (scores as `moe.scores`: probabilities or logits, by the model's rule). Slots are
    looked at from the best on, no resident is taken twice, and the new set stands in the order of its scores, its gates
    made by the model's gate rule over it (`stepper.force`). A margin of 0 changes nothing, nor does a cache that holds
    all. The cache begins empty, or with the experts of `warm` ({layer: experts}, the first one asked for earliest);
    `policy` is one of BUDGET_POLICIES ("static": those of `warm` stay), `scope` as in `simulate`. Both runs read the
    same tokens (`x`: a text or ids), so `kl` compares answers after the same prefix.

    A cold cache with a large margin stays with the experts that came first: that is the measure's lesson, not an error.
    Raises ArgumentError (capacity below k, margin below 0, another policy, scope or x), and what a session raises.
    """
    config = open_model(model, "substitute").config
    if scope not in ("layer", "global"):
        raise ArgumentError(f"a cache is per 'layer' or 'global', not {scope!r:.80}")
    if not is_whole(capacity) or capacity < config.top_k:
        raise ArgumentError(
            f"a cache holds at least the {config.top_k} experts of one token and layer; capacity is {capacity!r:.80}"
        )
    if not is_number(margin) or not margin >= 0:
        raise ArgumentError(f"a margin is a number from 0 on (or inf), a distance of scores; this is {margin!r:.80}")
    ids, layers = _ids_of(model, x), list(config.moe_layers)
    plain, other = (model.session(max_tokens=len(ids), threads=threads) for _ in range(2))
    cache, without = (_Caches(layers, config.num_experts, int(capacity), policy, scope, warm) for _ in range(2))
    replaced = np.zeros((len(layers), len(ids)), np.int64)
    kl, agrees = np.zeros(len(ids)), np.zeros(len(ids), np.bool_)
    with shown(progress, len(ids), "tokens", "substitute") as report:
        for token, number in enumerate(ids):
            plain.feed([number], progress=False)
            for row, layer in enumerate(layers):
                without.request(row, plain.tape[f"layers.{layer}.moe.expert_ids"][token].tolist())
            replaced[:, token] = _walk(other.stepper([number]), cache, float(margin))
            kl[token], agrees[token] = _compared(plain.logits, other.logits)
            if report is not None:
                report((token + 1) / len(ids))
    requests = np.full(len(layers), len(ids) * config.top_k, np.int64)
    return Substitution(
        int(capacity), float(margin), policy, scope, requests, without.misses, cache.misses, replaced, kl, agrees,
        plain.trace(), other.trace(),
    )  # fmt: skip


class _Caches:
    """The caches of all MoE layers, or the one of all, by the row of the layer; counts what is asked of them."""

    def __init__(
        self, layers: list[int], experts: int, capacity: int, policy: BudgetPolicy, scope: Scope, warm: ByLayer | None
    ) -> None:
        named = by_layer(layers, experts, warm, "warm")
        keys = [[key for key in named if key[0] == row] for row in range(len(layers))]
        groups = [[key for of_layer in keys for key in of_layer]] if scope == "global" else keys
        if any(len(group) > capacity for group in groups):
            raise ArgumentError(f"warm names more experts than the cache holds ({capacity})")
        budgets = [Budget(policy, capacity, group) for group in groups]
        self._budgets = budgets * len(layers) if scope == "global" else budgets
        self.misses: Whole = np.zeros(len(layers), np.int64)

    def resident(self, row: int, experts: int) -> NDArray[np.bool_]:
        """(experts,) which of a layer are in."""
        out = np.zeros(experts, np.bool_)
        out[[expert for owner, expert in self._budgets[row].held if owner == row]] = True
        return out

    def request(self, row: int, experts: list[int]) -> None:
        """Serves one set, in slot order."""
        self.misses[row] += sum(not served.hit for served in self._budgets[row].serve([(row, e) for e in experts]))


def spared(ids: list[int], scores: NDArray[Any], resident: NDArray[np.bool_], margin: float) -> tuple[list[int], int]:
    """The experts that a token goes to, the best score first, and how many of them it did not choose.

    ids: those chosen, by descending score; scores (E,); resident (E,).
    """
    free = [e for e in np.argsort(-scores, kind="stable").tolist() if resident[e] and e not in ids]
    out = list(ids)
    for slot, expert in enumerate(ids):
        if not resident[expert] and free and float(scores[expert]) - float(scores[free[0]]) < margin:
            out[slot] = free.pop(0)
    changed = sum(expert not in ids for expert in out)
    return sorted(out, key=lambda e: (-float(scores[e]), e)) if changed else out, changed


def _walk(stepper: Any, cache: _Caches, margin: float) -> list[int]:
    """One token through all layers; slots replaced in each MoE layer."""
    replaced: list[int] = []  # one entry for each router that has run
    while not stepper.at_end:
        where = stepper.step()
        if where.stage != "router":
            continue
        base = f"layers.{where.layer}.moe."
        scores, ids = stepper.peek(base + "scores")[0], stepper.peek(base + "expert_ids")[0].tolist()
        row = len(replaced)
        experts, changed = spared(ids, scores, cache.resident(row, len(scores)), margin)
        if changed:
            stepper.force(where.layer, experts)
        cache.request(row, experts)
        replaced.append(changed)
    return replaced


def _compared(plain: NDArray[Any], other: NDArray[Any]) -> tuple[float, bool]:
    """KL(plain ‖ other) in nats, NaN when one is not finite, and whether both have the same largest logit."""
    a, b = _log_softmax(plain), _log_softmax(other)
    kl = float((np.exp(a) * (a - b)).sum())
    return max(0.0, kl) if np.isfinite(kl) else np.nan, bool(np.argmax(plain) == np.argmax(other))


def _log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        wide -= wide.max()
        return np.asarray(wide - np.log(np.exp(wide).sum()))


def _ids_of(model: Any, x: Any) -> list[int]:
    """Token ids of a text or of ids. A text gets the tokenizer's special tokens."""
    if isinstance(x, str):
        if model.tokenizer is None:
            raise ArgumentError(f"the checkpoint at '{model.path}' has no tokenizer.json, so it takes ids, not a text")
        return list(model.tokenizer.encode(x, special=True))
    ids = array_of(x, "a row of token ids")
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise ArgumentError(f"substitute takes a text or a row of token ids; this is {ids.dtype} of shape {ids.shape}")
    return [int(number) for number in ids]
