"""Losses that training adds so that routers stay balanced and their logits small: as measures, without their factor."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError
from colibri_lab.routing.choice import probabilities
from colibri_lab.routing.measured import Measured, Moments, Ratios
from colibri_lab.routing.streaming import BLOCK, Accumulator, expert_ids, hot, in_blocks, tiles
from colibri_lab.trace import HasTrace, Trace, trace_of

__all__ = ["BalanceLoss", "Form", "ZLoss", "load_balance_loss", "z_loss"]

Form = Literal["switch", "deepseek", "transformers", "transformers_layers"]

_WORDS = {
    "switch": "E Σ f P, f by first choice (Switch); chance: 1, balanced.",
    "deepseek": "E Σ f P, f by all k slots (DeepSeek); chance: 1, balanced.",
    "transformers": "E Σ f P over all layers at once with slots summed (transformers); chance: k, balanced.",
    "transformers_layers": "E Σ f P layer by layer with slots summed; chance: k, balanced.",
}


class BalanceLoss(Accumulator):
    """Load-balance loss E Σ f_i P_i: f_i how much expert i is used, P_i its mean probability. Without its factor α.

    | form | f_i | rows | balanced |
    |---|---|---|---|
    | "switch" | share of tokens whose first choice is i (arXiv 2101.03961, section 2.2) | (Lm,) | 1 |
    | "deepseek" | share of all used slots: n_i / (k T) | (Lm,) | 1 |
    | "transformers" | n_i / T over all layers at once, as transformers' function does | (1,) | k |
    | "transformers_layers" | n_i / T layer by layer, as OLMoE's script corrects it | (Lm,) | k |

    All layers at once hide what one layer lacks and another has too much of.
    Tokens whose logits are not finite, or that have no expert, are left out. Raises NotCapturedError when the trace has
    no router logits or no expert ids.
    """

    def __init__(self, form: Form = "deepseek", block: int = BLOCK) -> None:
        super().__init__(block)
        if form not in get_args(Form):
            raise ArgumentError(f"a load-balance loss has the form {', '.join(get_args(Form))}, not {form!r:.80}")
        self.form = form

    def options(self) -> dict[str, Any]:
        """What was asked for at the start."""
        return {"form": self.form, **super().options()}

    def _taps(self, trace: Trace) -> tuple[str, ...]:
        return ("expert_ids", "router_logits")

    def _add(self, trace: Trace, *more: Any) -> None:
        layers, experts = trace.moe_layers, trace.num_experts
        whole = self.form == "transformers"
        sums = self.sums["loss"] = Moments((1 if whole else len(layers),), 2 * experts + 1)
        for rows in tiles(trace.n_tokens, self.block, 4 * experts * max(1, experts // self.block)):
            together: NDArray[Any] | float = 0.0
            for row, layer in enumerate(layers):
                x = in_blocks(self._vectors(trace, layer, rows), self.block)
                together = together + x
                if not whole:
                    sums.add(x, row)
            if whole and layers:
                sums.add(np.asarray(together), 0)

    def _vectors(self, trace: Trace, layer: int, rows: slice) -> NDArray[np.float64]:
        """(rows, 2 E + 1): choices of each expert, probabilities, 1; zeros for a token that is left out."""
        ids, p = expert_ids(trace, layer, rows), probabilities(trace, layer, rows)
        chosen = hot(ids[:, :1] if self.form == "switch" else ids, trace.num_experts)
        out = np.concatenate([chosen, p, np.ones((len(p), 1))], axis=1)
        return np.where(np.isfinite(p).all(axis=1, keepdims=True) & chosen.any(axis=1, keepdims=True), out, 0.0)

    def result(self, level: float = 0.95) -> Measured:
        """The loss per layer, (Lm,); (1,) for the form "transformers"."""
        level = self._checked(level)
        experts, x = self.num_experts, self.sums["loss"].sums
        n, p, tokens = x[:, :experts], x[:, experts : 2 * experts], x[:, -1:]
        slots = n.sum(axis=1, keepdims=True)
        # Slots summed means n / T: k times the share of slots. With unused slots T is what the used ones would fill.
        balanced = self.top_k if self.form.startswith("transformers") else 1
        with np.errstate(divide="ignore", invalid="ignore"):
            f, mean = n / slots, p / tokens
            loss = experts * (f * mean).sum(axis=1, keepdims=True)
            gradient = np.concatenate([(experts * mean - loss) / slots, experts * f / tokens, -loss / tokens], axis=1)
        measured: Measured = self.sums["loss"].measured(
            balanced * loss[:, 0], balanced * gradient, level, balanced, _WORDS[self.form]
        )
        return measured


def load_balance_loss(trace: Trace | HasTrace, form: Form = "deepseek", level: float = 0.95) -> Measured:
    """`BalanceLoss` of one trace."""
    return BalanceLoss(form).add(trace).result(level)


class ZLoss(Accumulator):
    """Router z-loss: mean over tokens of (ln Σ exp z)², (Lm,); arXiv 2202.08906. Without its factor.

    Chance: (ln E)², a router whose logits are all 0. Tokens whose value is not finite are left out.
    """

    def _taps(self, trace: Trace) -> tuple[str, ...]:
        return ("router_logits",)

    def _add(self, trace: Trace, *more: Any) -> None:
        sums = self.sums["z"] = Ratios((len(trace.moe_layers),), (len(trace.moe_layers),))
        for row, layer in enumerate(trace.moe_layers):
            values = trace[f"layers.{layer}.moe.router_logits"]
            for rows in tiles(len(values), self.block, values.shape[1]):
                z = values[rows].astype(np.float64)
                with np.errstate(invalid="ignore"):
                    top = z.max(axis=1)
                    square = (top + np.log(np.exp(z - top[:, None]).sum(axis=1))) ** 2
                known = np.isfinite(square)
                sums.add(in_blocks(np.where(known, square, 0.0), self.block), in_blocks(known, self.block), row)

    def result(self, level: float = 0.95) -> Measured:
        """Mean z-loss per layer."""
        level = self._checked(level)
        words = "Mean of (ln Σ exp z)²; chance: all logits 0."
        measured: Measured = self.sums["z"].mean(level, np.log(self.num_experts) ** 2, words)
        return measured


def z_loss(trace: Trace | HasTrace, level: float = 0.95) -> Measured:
    """`ZLoss` of one trace."""
    return ZLoss().add(trace_of(trace)).result(level)
