"""`lab.diff`: goes through two traces in the order in which their values were computed, and judges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.difference.causes import why
from colibri_lab.difference.edits import OwnChange, own_changes
from colibri_lab.difference.errors_of import TapError, tap_error
from colibri_lab.difference.flips import Past, coarse_scores, flipped, flips_of_layer, unrecorded, with_consequences
from colibri_lab.difference.pair import Pair, trace_from
from colibri_lab.difference.prediction import predict
from colibri_lab.difference.reach import Reach
from colibri_lab.difference.result import TABLE, Diagnosis, Diff, Divergence, Flip, Tolerance, Verdict
from colibri_lab.difference.taps import Tap
from colibri_lab.difference.tolerance import resolve
from colibri_lab.errors import ArgumentError
from colibri_lab.progress import Progress, shown

if TYPE_CHECKING:
    from colibri_lab.trace import HasTrace, Trace

__all__ = ["diff"]

_CONSTANT = 0.01  # a larger factor between two runs is no slightly different constant: they are other numbers
_OF_THE_ROUTER = ("moe.router_logits", "moe.scores")


def diff(
    a: Trace | HasTrace | str | PathLike[str],
    b: Trace | HasTrace | str | PathLike[str],
    *,
    tolerance: float | Tolerance | None = None,
    model: Any = None,
    names: tuple[str, str] | None = None,
    progress: Progress = None,
) -> Diff:
    """Compares two runs tap by tap in the order of the data's way, and says where B leaves A and what that means.

    `a` is the reference, `b` the run under test: traces, sessions, or files that `load_trace` opens. Rows go by token
    over the longest common prefix of ids; how either run was cut into passes does not matter.

    `tolerance` is declared before the comparison: None derives one from the arithmetic, a float is a share of each
    tap's largest value, a Tolerance was measured by `lab.tolerance`. `model`, an open model or a path, holds the
    weights with which faults are tried; None takes the open model of a live session. `names`: what to call the two.

    Verdicts: "identical" (all within tolerance, the same experts), "tie" (what is beyond follows from flips between
    experts that score alike), "defect" (B leaves A and no tie explains it), "downstream" (what differs first is what
    one run says it changed itself).

    Raises ArgumentError when the two share no first token or no tap, or when an argument is none; what `load_trace`
    raises for a file.
    """
    if names is not None and not (
        isinstance(names, tuple | list) and len(names) == 2 and all(isinstance(name, str) for name in names)
    ):
        raise ArgumentError(f"names are two texts, of A and of B, not {names!r:.80}")
    if not (model is None or isinstance(model, str | PathLike) or hasattr(model, "config")):
        raise ArgumentError(f"model is an open model (lab.open) or a path, not {model!r:.80}")
    trace_a, trace_b = trace_from(a), trace_from(b)
    pair = Pair(trace_a, trace_b)
    allowed = resolve(tolerance, pair)
    run = _Run(pair, allowed, own_changes(pair))
    taps = pair.taps()
    with shown(progress, len(taps), "taps", "comparing") as report:
        run.go(taps, report)
    weights = model if model is not None else _model_of(trace_a, trace_b)
    with shown(progress, 100, "%", "trying faults") as report:
        diagnosis = _diagnosis(pair, run.first, weights, report)
    return Diff(
        a=trace_a,
        b=trace_b,
        names=(names[0], names[1]) if names else (_name(a, trace_a), _name(b, trace_b)),
        n_tokens=pair.n,
        tolerance=allowed,
        verdict=run.verdict(),
        first_divergence=run.first or run.changed,
        flips=with_consequences(run.flips, pair),
        table=np.array(run.table, TABLE),
        diagnosis=diagnosis,
        prediction=predict(pair),
        notes=tuple(filter(None, (*pair.notes, unrecorded(pair), coarse_scores(pair, allowed), run.reservation()))),
    )


@dataclass
class _Run:
    """What is known while the taps are gone through."""

    pair: Pair
    tolerance: Tolerance
    changes: list[OwnChange]
    table: list[tuple[Any, ...]] = field(default_factory=list)
    flips: list[Flip] = field(default_factory=list)
    first: Divergence | None = None  # the first that nothing explains
    changed: Divergence | None = None  # the first that a run's own change explains

    def __post_init__(self) -> None:
        n = self.pair.n
        self.ties = Reach(n)
        self.unjudged = self.rows = 0  # rows that a tie can have touched, of all rows that were compared
        self.first_tap = np.full(n, -1)  # index into the table, of each token
        self.worst = np.zeros(n)
        self.worst_tap = np.full(n, -1)
        self.waiting: list[tuple[Tap, TapError, NDArray[np.bool_], int]] = []
        self.input: tuple[int, TapError, NDArray[np.bool_]] | None = None  # layer, error and rows of its moe.input

    def go(self, taps: list[Tap], report: Callable[[float], object] | None) -> None:
        for number, tap in enumerate(taps):
            self.ties.enter(tap)
            if tap.kind == "moe.expert_ids":
                self._routing(tap)
            else:
                self._values(tap)
            if report is not None:
                report((number + 1) / len(taps))

    def verdict(self) -> Verdict:
        if self.first is not None:
            return "defect"
        if self.changed is not None:
            return "downstream"
        return "tie" if any(flip.verdict == "tie" for flip in self.flips) else "identical"

    def reservation(self) -> str:
        """In words: how much a tie leaves open, since whatever follows from it may differ by any amount."""
        if self.verdict() != "tie" or not self.unjudged:
            return ""
        return (
            f"{100 * self.unjudged / self.rows:.3g} % of the rows can follow from these ties and were not judged: a "
            "fault that shows in no other row is not seen."
        )

    # ---- values ----

    def _values(self, tap: Tap) -> None:
        error = tap_error(self.pair.blocks(tap.path))
        allowed = self.tolerance.of(tap.path)
        beyond = error.beyond(allowed)
        if tap.kind not in _OF_THE_ROUTER:
            self._settle()
        self.waiting.append((tap, error, beyond, len(self.table)))
        if tap.kind == "moe.input":
            self.input = (tap.layer, error, beyond)
        token = int(error.tokens[beyond.argmax() if beyond.any() else error.by_row.argmax()]) if len(beyond) else -1
        state = "same bits" if error.same_bits else "beyond" if beyond.any() else "within"
        untouched = ~self.ties.rows[error.tokens]
        self.unjudged += int((~untouched).sum())
        self.rows += len(untouched)
        unexplained, drifted = beyond & untouched, ""
        if not unexplained.any():
            drifted = self._drift(tap, error, untouched)
        if drifted:
            state, unexplained = "beyond", untouched
        self.table.append((tap.path, error.max_abs, error.max_rel, error.cosine, error.ulp, tap.layer, tap.stage,
                           allowed, state, token if error.max_abs else -1, 0))  # fmt: skip
        if unexplained.any() and self.first is None:
            words = drifted or why(self.pair, tap, error, unexplained, allowed)
            whole = "" if drifted else self._drift(tap, error, untouched)
            self._diverge(tap, error, unexplained, f"{words} {whole}".strip())

    def _drift(self, tap: Tap, error: TapError, rows: NDArray[np.bool_]) -> str:
        """In words, when B as a whole is another multiple of A than roundings explain; else ""."""
        if not tap.scaled:
            return ""
        drift, numbers = error.drift(rows)
        allowed = self.tolerance.drift_of(tap.path, numbers)
        if abs(drift) <= allowed or abs(drift) > _CONSTANT:
            return ""
        return (
            f"As a whole B is A times {1 + drift:.9g}, where roundings explain at most 1 ± {allowed:.1g}: a constant "
            "that differs, such as a norm's epsilon."
        )

    def _diverge(self, tap: Tap, error: TapError, beyond: NDArray[np.bool_], cause: str) -> None:
        """Notes the first divergence, and apart from it the first that a run's own change explains."""
        own = next((c for c in self.changes if c.explains(tap, int(error.tokens[beyond.argmax()]))), None)
        if own is not None:
            by_change = np.array([any(c.explains(tap, int(t)) for c in self.changes) for t in error.tokens])
            if self.changed is None:
                self.changed = self._divergence(tap, error, beyond, f"{own.side} changed it itself: {own.words}.")
            beyond = beyond & ~by_change
            if not beyond.any():
                return
        self.first = self._divergence(tap, error, beyond, cause)

    def _divergence(self, tap: Tap, error: TapError, beyond: NDArray[np.bool_], cause: str) -> Divergence:
        row = int(beyond.argmax())
        expert = None if error.experts is None else int(error.experts[row])
        return Divergence(tap.path, tap.layer if tap.layer >= 0 else None, tap.stage, int(error.tokens[row]),
                          error.max_rel, cause, expert)  # fmt: skip

    def _settle(self, keep: tuple[str, ...] = ()) -> None:
        """Takes what was compared into the past of the tokens, but for taps of the kinds `keep`."""
        kept = []
        for tap, error, beyond, index in self.waiting:
            if tap.kind in keep:
                kept.append((tap, error, beyond, index))
                continue
            left = error.tokens[beyond]
            self.first_tap[left[self.first_tap[left] < 0]] = index
            moved = np.zeros(self.pair.n)
            np.maximum.at(moved, error.tokens, error.relative_by_row)
            larger = moved > self.worst
            self.worst[larger], self.worst_tap[larger] = moved[larger], index
        self.waiting = kept

    # ---- routing ----

    def _routing(self, tap: Tap) -> None:
        self._settle(keep=_OF_THE_ROUTER)
        tokens = flipped(self.pair, tap.layer)
        past = {int(token): self._past(tap, int(token)) for token in tokens}
        flips = flips_of_layer(self.pair, tap.layer, self.tolerance, past)
        self.flips += flips
        ties = [flip.token for flip in flips if flip.verdict == "tie"]
        faults = [flip for flip in flips if flip.verdict == "defect"]
        self.ties.add(np.array(ties, np.int64))
        share = len(flips) / max(self.pair.n, 1)
        state = "same" if not flips else "tie" if len(ties) == len(flips) else "flips"
        self.table.append((tap.path, float(len(flips)), share, np.nan, np.nan, tap.layer, tap.stage, 0.0, state,
                           flips[0].token if flips else -1, len(flips)))  # fmt: skip
        if faults and self.first is None:
            self.first = Divergence(tap.path, tap.layer, tap.stage, faults[0].token, share, faults[0].cause)
        own = next((f for f in flips for c in self.changes if c.explains(tap, f.token)), None)
        if own is not None and self.changed is None and self.first is None:
            self.changed = Divergence(tap.path, tap.layer, tap.stage, own.token, share, own.cause)

    def _past(self, tap: Tap, token: int) -> Past:
        own = next((change for change in self.changes if change.explains(tap, token)), None)
        if own is not None:
            return Past(True, True, f"{own.side} changed its own run: {own.words}.")
        if self.ties.rows[token]:
            return Past(True, True, "it depends on a token that a tie upstream sent elsewhere.")
        if self.input is not None and self.input[0] == tap.layer:
            left = bool(self.input[2][token])
        else:
            left = bool((self.first_tap[: token + 1] >= 0).any())
        return Past(left, False, self._history(tap, token) if left else "")

    def _history(self, tap: Tap, token: int) -> str:
        """Which stage upstream moved this token's scores, by how much."""
        parts = []
        if self.input is not None and self.input[0] == tap.layer:
            _, error, _ = self.input
            parts.append(f"the router's input had already moved by {error.relative_by_row[token]:.2g}")
        if self.first_tap[token] >= 0:
            row = self.table[self.first_tap[token]]
            reads = ", which reads earlier rows that had left" if row[0].endswith(("attn.out", "attn.weights")) else ""
            parts.append(f"this token first left A at {row[0]}{reads}")
        else:
            earlier = int((self.first_tap[:token] >= 0).argmax())
            path = self.table[self.first_tap[earlier]][0]
            parts.append(f"attention reads token {earlier}, which had left A at {path}")
        if self.worst_tap[token] >= 0:
            path = self.table[self.worst_tap[token]][0]
            parts.append(f"the largest change upstream is {self.worst[token]:.2g} at {path}")
        return "; ".join(parts) + "."


def _diagnosis(
    pair: Pair, first: Divergence | None, model: Any, report: Callable[[float], object] | None
) -> Diagnosis | None:
    if first is None:
        return None
    if isinstance(model, str | PathLike):
        import colibri_lab as lab

        model = lab.open(model)
    from colibri_lab.difference.diagnosis import diagnose  # here: most comparisons find nothing to explain

    return diagnose(pair, first, model, report)


def _model_of(a: Trace, b: Trace) -> Any:
    for trace in (a, b):
        model = getattr(trace, "model", None)
        if model is not None:
            return model
    return None


def _name(source: Any, trace: Trace) -> str:
    """ "colibri-lab, tiny-colibri, float32": as far as the trace says it."""
    file = Path(source).name if isinstance(source, str | PathLike) else ""
    model = str(trace.meta.get("model_name", "")) or file
    dtype = str(trace.meta.get("arithmetic", "")).removeprefix("torch.")
    return ", ".join(filter(None, (str(trace.meta["producer"]), model, dtype)))
