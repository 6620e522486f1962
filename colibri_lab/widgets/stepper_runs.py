"""What the stepper's view does to a stepper and to its fork: brings one to where the other stands, changes rows, and
says in Python what was done.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError, NotCapturedError
from colibri_lab.widgets._work import Work
from colibri_lab.widgets.stepper_data import Walks, bounds, rank

__all__ = ["change_routing", "change_values", "changes", "come", "recipe", "stepper_of", "title"]


def stepper_of(x: Any, text: str | None, chunk: int | None) -> Walks:
    """The stepper that `TokenStepper(x, text, chunk)` is about."""
    if callable(getattr(x, "run_to", None)) and hasattr(x, "breakpoints"):
        walk: Walks = x
        return walk
    if isinstance(x, str):
        import colibri_lab

        walk = colibri_lab.open().session(capture="moe").stepper(x, chunk=chunk)
        return walk
    if callable(getattr(x, "stepper", None)):
        if text is not None:
            walk = x.stepper(text, chunk=chunk)
            return walk
        if not x.ids:
            raise ArgumentError("the session is empty: give the text to walk through, lab.TokenStepper(session, text)")
        capture = list(x.capture) if x.capture != ("none",) else "moe"
        walk = x.model.session(capture=capture, gate_mode=x.gate_mode).stepper(x.ids, chunk=chunk)
        return walk
    hint = "; make a session of it: model.session()" if callable(getattr(x, "session", None)) else ""
    raise ArgumentError(f"TokenStepper takes a stepper, a session or a text, not {type(x).__name__}{hint}")


def come(run: Any, wanted: tuple[float, ...], work: Work | None) -> None:
    """Brings a stepper to a place, or to the first one after it when its experts differ: back by layers, on by
    stages.
    """
    while rank(run.where) > wanted and not run.at_start:
        run.back("layer")
    while rank(run.where) < wanted and not run.at_end:
        run.step("stage", progress=False if work is None else work.hear)


def change_routing(walk: Walks, layer: int, token: int, experts: Sequence[int], gates: Sequence[float]) -> Any:
    """These experts and gates for one token; returns the Edit. Gates alone are written into their buffer, other experts
    are forced. Raises what the stepper raises: with the place where to change it instead.
    """
    path = f"layers.{layer}.moe."
    row = token - bounds(walk)[0]
    held = None
    with suppress(ArgumentError, LookupError):
        held = walk.peek(path + "expert_ids")[row]
    if held is not None and list(experts) == [int(e) for e in held]:
        return _write(walk, path + "gates", row, np.array(gates, np.float32), token)
    chosen = [i for i, expert in enumerate(experts) if expert >= 0]
    return walk.force(layer, [int(experts[i]) for i in chosen], [float(gates[i]) for i in chosen], tokens=[token])


def change_values(walk: Walks, path: str, token: int, values: Sequence[float]) -> Any:
    """The first values of one token's row of a buffer; returns the Edit."""
    rows = walk.peek(path)
    at = token - bounds(walk)[0]
    if ".experts." in path:
        found = np.flatnonzero(walk.peek(path.rpartition(".")[0] + ".tokens") == token)
        if not len(found):
            raise ArgumentError(f"token {token} has no row in '{path}'")
        at = int(found[0])
    row = np.array(rows[at])
    row.reshape(-1)[: len(values)] = values
    return _write(walk, path, at, row, token)


def _write(walk: Walks, path: str, at: int, row: NDArray[Any], token: int) -> Any:
    """Puts a row into a buffer: value by value where the buffer is kept, so that the edit's code is exact; else as a
    patch.
    """
    try:
        view = walk.edit(path)
    except NotCapturedError:
        return walk.patch(path, row[None], tokens=[token])
    old = np.array(view[at])
    changed = ~np.equal(old, row) & ~((old != old) & (row != row))  # a NaN stays a NaN
    if not changed.any():
        raise ArgumentError("no value differs from what is there")
    view[at][changed] = row[changed]
    walk.readers(path)  # the next call notes what was written
    return walk.edits[-1]


def changes(walk: Walks, fork: Walks | None) -> list[list[str]]:
    """Changes made: [run, line of Python]. What the fork has from before it was made is the original's."""
    own = [edit.code for edit in walk.edits]
    codes = [["original", code] for code in own]
    if fork is not None:
        codes += [["fork", edit.code.replace("stepper.", "fork.")] for edit in fork.edits[len(own) :]]
    return codes


def title(walk: Walks) -> str:
    """The model and the length of the walk."""
    name = walk.session.model.path.name
    name = "bundled model" if name == "tiny-colibri" else name
    count, passes = len(walk.ids), len(walk.passes)
    kind = "one pass" if passes == 1 else f"{passes} passes"
    return f"{name} · {count:,} token{'s' * (count != 1)} in {kind}"


def recipe(walk: Walks) -> str:
    """Python that makes the view again, at the start of the walk."""
    path = Path(walk.session.model.path)
    model = "" if "bundled" in path.parts else repr(str(path))
    widest = max(stop - start for start, stop in walk.passes)
    chunk = "None" if len(walk.passes) == 1 else str(widest)
    ids = [*walk.session.ids[: walk.passes[0][0]], *walk.ids]
    return (
        "import colibri_lab as lab\n\n"
        f"session = lab.open({model}).session(capture={list(walk.session.capture)})\n"
        f"stepper = session.stepper({ids}, chunk={chunk})\n"
        "view = lab.TokenStepper(stepper)\n"
    )
