"""What would cure a run that is not finite: the run once more with one change, and whether that was enough."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError, is_number, is_whole, nearest
from colibri_lab.nan.replay import obstacle
from colibri_lab.nan.replays import Change, Rerun, emulation_of, kl_of, rerouted, run, run_code, tightest
from colibri_lab.nan.result import Cure, Found, Origin
from colibri_lab.nan.source import Source, opened
from colibri_lab.numerics import FORMATS
from colibri_lab.progress import Progress, shown
from colibri_lab.trace import Trace

__all__ = ["CURES", "cure", "cures"]

CURES = ("precision", "clamp", "ablate", "weight")
"""Kinds of cures."""

Report = Callable[[float], object]


class _NotTried(Exception):
    """Why a change makes no sense here."""


def cure(
    found: Found, kind: str, *, origin: int = 0, value: float = 0.0, to: str | None = None, whole: bool = False,
    model: Any = None, progress: Progress = None,
) -> Cure:  # fmt: skip
    """Replays the run with one change, all else as it was: tokens, gate mode, emulation.

    `kind`: "ablate" switches off the expert of the origin for all tokens; "clamp" turns ±Inf and what is too large into
    the largest number at the origin's point (NaN stays); "precision" keeps that point, and its sums, in the format `to`
    (None: float32), or with `whole` the whole model; "weight" puts `value` in the place of the weight's element.
    Without an emulation "precision" is the sum of an expert's output in float64, where its exact value fits float32.

    `origin`: which of `found.origins`. `model`: for a trace from a file, the lab.Model that made it, or its path.

    `gone` is False while anything is left that is not finite, also another origin: `left` is the first of these. It is
    None, and `note` says why, where the change makes no sense or the run cannot be replayed. KL and re-routed tokens
    are counted against the float32 run of an emulated one; of a disease in the weights against the run with the element
    replaced; else they are None.

    Raises ArgumentError for an unknown kind, origin, value or format and for what `find` did not return,
    KeyboardInterrupt within a second of Ctrl-C.
    """
    _must_be_found(found)
    if kind not in CURES:
        raise ArgumentError(f"there is no cure {kind!r:.40}{nearest(str(kind), CURES)}; there are {', '.join(CURES)}")
    if not (is_whole(origin) and -len(found.origins) <= origin < len(found.origins)):
        raise ArgumentError(f"there is no origin {origin!r:.40}; there are {len(found.origins)}, counted from 0")
    if not is_number(value):
        raise ArgumentError(f"value takes a number; this is {value!r:.80}")
    to = None if to is None else _format(to)
    ward = _Ward(found, found.origins[origin], model)
    with shown(progress, 1000, "‰", "cure") as report:
        return ward.cure(kind, _float(value), to, whole, report or _nobody)


def cures(found: Found, progress: Progress = None, *, model: Any = None) -> list[Cure]:
    """Every change that may help against the first origin, each replayed once: its point in float32, the whole model in
    a format that reaches farther (emulated runs), clamping, the expert switched off, the weight replaced.

    Ctrl-C, or the notebook's stop button, ends it within a second and returns: what was replayed stands in the list,
    the others say that they were not tried. Raises ArgumentError for what `find` did not return.
    """
    _must_be_found(found)
    ward, jobs = _Ward(found, found.origin, model), [("precision", False), ("clamp", False)]
    if ward.emulation is not None:
        jobs.append(("precision", True))
    jobs += [("ablate", False), ("weight", False)]
    done: list[Cure] = []
    with shown(progress, 1000, "‰", "cures") as report:
        try:
            for number, (kind, whole) in enumerate(jobs):
                start = number / len(jobs)

                def told(share: float, start: float = start) -> None:
                    if report is not None:
                        report(start + share / len(jobs))

                done.append(ward.cure(kind, 0.0, None, whole, told))
        except KeyboardInterrupt:
            done += [ward.not_tried(kind, whole, "it was stopped before its turn") for kind, whole in jobs[len(done) :]]
    return done


class _Ward:
    """One origin and the runs that were made because of it."""

    def __init__(self, found: Found, origin: Origin, model: Any) -> None:
        self.trace, self.origin = found.trace, origin
        self.model = found.trace.model if model is None else opened(model)
        path = None if self.model is None else str(self.model.path)
        self.opened = "found.trace.model" if found.trace.model is not None else f"lab.open({path!r})"
        self.obstacle = obstacle(Source(found.trace, self.model))
        self.emulation = None if self.obstacle else emulation_of(found.trace)
        self._reference: Trace | None = None  # a run without the disease
        self._looked = False  # whether there was a search for one
        self._replaced: Rerun | None = None  # the run with the weight's element replaced by 0

    def cure(self, kind: str, value: float, to: str | None, whole: bool, report: Report) -> Cure:
        try:
            if self.obstacle:
                raise _NotTried(f"the run cannot be replayed: {self.obstacle}")
            if kind == "ablate":
                change, words = self._ablate()
            elif kind == "clamp":
                change, words = self._clamp()
            elif kind == "weight":
                change, words = self._weight(value)
            else:
                change, words = self._precision(to, whole)
        except _NotTried as reason:
            return self.not_tried(kind, whole, str(reason))
        again = self._run(change, kind == "weight" and value == 0, lambda done: report(0.5 * done))
        reference, note = self._reference_run(kind, again, lambda done: report(0.5 + 0.5 * done))
        report(1.0)
        row = Cure(_kind(kind), words, again.found is None, code=run_code(self.trace, change, self.opened))
        if again.found is not None:
            left = again.found.origin
            return replace(row, left=left, note=self._left(kind, left, len(again.found.origins)))
        row = replace(row, headroom=tightest(again.trace), note=note)
        if reference is None:
            return row
        off = (self._layer(), self._expert()) if kind == "ablate" else None
        return replace(row, kl=kl_of(reference, again.trace), rerouted=rerouted(reference, again.trace, off))

    def _run(self, change: Change, replaced: bool, report: Report) -> Rerun:
        """`replaced`: it is the run in which the weight's element is 0, which is made once."""
        if not replaced:
            return run(self.trace, change, report)
        if self._replaced is None:
            self._replaced = run(self.trace, change, report)
        return self._replaced

    def not_tried(self, kind: str, whole: bool, reason: str) -> Cure:
        """A row that says why there is none."""
        names = {
            "ablate": "Switch off an expert" if self.origin.expert is None else self._off(),
            "clamp": f"Clamp {_short(self._point())}",
            "precision": "Whole model in another format" if whole else f"{_title(self._point())} in higher precision",
            "weight": "Replace the weight",
        }  # fmt: skip
        return Cure(_kind(kind), names[kind], None, note=f"not tried: {reason}")

    # ---- the changes ----

    def _ablate(self) -> tuple[Change, str]:
        if self.origin.expert is None:
            raise _NotTried(f"{self.origin.path} lies in no expert")
        layer, expert = self._layer(), self._expert()
        return Change(
            self.model, self.emulation, lambda stepper: stepper.ablate(layer=layer, expert=expert),
            steer_code=(f"stepper.ablate(layer={layer}, expert={expert})",),
        ), self._off()  # fmt: skip

    def _clamp(self) -> tuple[Change, str]:
        import colibri_lab as lab

        point = self._point()
        base = self.emulation or lab.Emulation()
        try:
            changed = replace(base, saturate=(*base.saturate, point))
            changed.check(self.model.config)
        except ArgumentError:
            raise _NotTried(f"{point} is no point at which an emulation can clamp") from None
        largest = FORMATS[base.storage_of(point)].largest
        return Change(self.model, changed), f"Clamp {_short(point)} to ±{_number(largest)}"

    def _precision(self, to: str | None, whole: bool) -> tuple[Change, str]:
        import colibri_lab as lab

        if self.emulation is None:
            return self._in_float64()
        if whole:
            wide = to or ("bfloat16" if self.origin.dtype == "float16" else "float32")
            added = None if self.emulation.accumulation is None else wide
            flush, clamped = self.emulation.flush_subnormals, self.emulation.saturate
            return Change(self.model, lab.Emulation(wide, added, flush, clamped)), f"Whole model in {wide}"
        point, wide = self._point(), to or "float32"
        kept = self.emulation.storage_of(point) == wide
        summed = self.emulation.accumulation_of(point) == wide
        if kept and summed:
            raise _NotTried(f"{point} is in {wide} already")
        storage: Any = _with(self.emulation.storage, point, wide)
        sums: Any = self.emulation.accumulation
        if sums is not None and not summed:
            sums = _with(sums, point, wide)
        try:
            changed = replace(self.emulation, storage=storage, accumulation=sums)
        except ArgumentError as error:
            raise _NotTried(str(error)) from None
        return Change(self.model, changed), f"{_title(point)} in {wide}"

    def _in_float64(self) -> tuple[Change, str]:
        """The run is float32 already: what it would be in float64, put in by a stepper."""
        origin = self.origin
        exact = origin.exact
        if origin.kind != "overflow" or exact is None:
            raise _NotTried(f"the run is float32, and {origin.kind} is no question of precision")
        largest = FORMATS["float32"].largest
        if not abs(exact) <= largest:
            size = f"the exact value {exact:.4g} is {abs(exact) / largest:.3g} × the largest float32"
            raise _NotTried(f"{size}: no precision of the sum helps")
        if origin.expert is None or not origin.path.endswith(".output"):
            fits = f"the exact value {exact:.4g} fits float32"
            raise _NotTried(f"{fits}, but a stepper cannot put it into {self._point()}")
        tokens, rows = self._sums64()
        with np.errstate(over="ignore"):
            narrow = rows.astype(np.float32)
        if not np.isfinite(narrow).all():
            raise _NotTried("another sum of the same row does not fit float32: no precision of the sum helps")
        path = origin.path
        return Change(
            self.model, None, lambda stepper: stepper.patch(path, narrow, tokens=tokens),
            steer_code=(
                "import numpy as np",
                f"tokens = {tokens!r}",
                f'rows = found.trace.expert_rows({origin.layer}, {origin.expert})',
                'hidden = rows["hidden"][np.isin(rows["tokens"], tokens)].astype(np.float64)',
                f'exact = hidden @ model.weights["{path.removesuffix("output")}down"].astype(np.float64).T',
                f'stepper.patch("{path}", exact.astype(np.float32), tokens=tokens)',
            ),
        ), f"{_title(self._point())} summed in float64"  # fmt: skip

    def _sums64(self) -> tuple[list[int], NDArray[np.float64]]:
        """(tokens, rows) of the output of the origin's expert in float64, for the tokens in which it broke."""
        source = Source(self.trace, self.model)
        found = source.expert_rows(self._layer(), self._expert(), "hidden")
        weight = source.weight(self.origin.path.removesuffix("output") + "down")
        if found is None or weight is None:
            raise _NotTried("what the expert summed was not recorded")
        chosen = np.isin(found[0], self.origin.tokens or (self.origin.token,))
        return found[0][chosen].tolist(), found[1][chosen].astype(np.float64) @ weight.astype(np.float64).T

    def _weight(self, value: float) -> tuple[Change, str]:
        place = self.origin.weight
        if place is None:
            raise _NotTried("weights are finite" if self.origin.kind != "unknown" else "the cause is not known")
        values = np.array(self.model.weights[place.name])
        values[place.index] = value
        index = ", ".join(map(str, place.index))
        return Change(
            self.model.with_weights({place.name: values}), self.emulation,
            model_code=(
                "import numpy as np",
                f'values = np.array(model.weights["{place.name}"])',
                f"values[{index}] = {_literal(value)}",
                f'model = model.with_weights({{"{place.name}": values}})',
            ),
        ), f"Replace {place.name}[{index}] by {_number(value)}"  # fmt: skip

    # ---- what it is compared with ----

    def _reference_run(self, kind: str, again: Rerun, report: Report) -> tuple[Trace | None, str]:
        """(a run without the disease, or None; what is to be said about it)."""
        if again.found is not None:
            return None, ""
        if kind == "weight":
            self._reference, self._looked = again.trace, True
            return None, "other cures are compared with this run"
        if not self._looked:
            self._look_for_reference(report)
        if self._reference is not None:
            return self._reference, ""
        return None, "no run without the disease to compare with" + (
            "" if self.emulation is None else ": in float32 it is not finite either"
        )

    def _look_for_reference(self, report: Report) -> None:
        if self.origin.weight is not None:
            change = self._weight(0.0)[0]
        elif self.emulation is not None:
            change = Change(self.model, None)
        else:
            self._looked = True
            return
        again = self._run(change, self.origin.weight is not None, report)
        self._looked = True
        if again.found is None:
            self._reference = again.trace

    def _left(self, kind: str, left: Origin, count: int) -> str:
        same = (left.path, left.kind) == (self.origin.path, self.origin.kind)
        more = f", and {count - 1} more" if count > 1 else ""
        if same and kind == "clamp" and np.isnan(left.value):
            return f"NaN stays NaN when it is clamped{more}"
        where = "it is still born there" if same else f"now born in {left.path}, token {left.token}: {left.cause}"
        return where + more

    # ---- places ----

    def _point(self) -> str:
        """The point of the origin as an emulation names it: experts are one."""
        return re.sub(r"\.experts\.\d+\.", ".experts.*.", self.origin.point or self.origin.path)

    def _layer(self) -> int:
        assert self.origin.layer is not None
        return self.origin.layer

    def _expert(self) -> int:
        assert self.origin.expert is not None
        return self.origin.expert

    def _off(self) -> str:
        return f"Switch off expert {self.origin.expert} in layer {self.origin.layer}"


def _must_be_found(found: Any) -> None:
    if found is None:
        raise ArgumentError("there is nothing to cure: lab.nan.find returned None, so all that was computed is finite")
    if not isinstance(found, Found):
        raise ArgumentError(f"a cure takes what lab.nan.find returned; this is a {type(found).__name__}: {found!r:.80}")


def _format(to: Any) -> str:
    """Its full name."""
    import colibri_lab as lab

    kind = lab.Emulation(to).storage
    if not isinstance(kind, str):
        raise ArgumentError(f"to takes one number format; this is {to!r:.80}")
    return kind


def _float(value: Any) -> float:
    """A number of any kind as a float; one beyond every format is infinite."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _kind(kind: str) -> Any:
    return kind


def _nobody(done: float) -> None:
    """Hears progress that nobody asked for."""


def _with(formats: Any, point: str, wide: str) -> dict[str, str]:
    """Formats by pattern, with this point in another one; the last pattern that matches counts."""
    base = {"*": formats} if isinstance(formats, str) else {key: kind for key, kind in formats.items() if key != point}
    return {**base, point: wide}


def _short(point: str) -> str:
    """ "hidden of the experts in layer 3", "middle in layer 3"."""
    part = point.split(".")
    if part[0] != "layers":
        return point
    name = ".".join(part[2:])
    of = f"{part[-1]} of the experts" if ".experts." in point else name
    return f"{of} in layer {part[1]}"


def _title(point: str) -> str:
    """The same at the start of a sentence."""
    text = _short(point)
    return text[0].upper() + text[1:]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) < 1e7 and value == int(value) else f"{value:.4g}"


def _literal(value: float) -> str:
    return repr(value) if np.isfinite(value) else f'float("{value}")'
