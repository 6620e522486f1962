"""catalogue.py: the scripts of this folder by name, in the order in which they are told."""

from __future__ import annotations

import sys
from collections.abc import Callable

from contenders import ContenderError

from claims import alignment, gates, huge_pages, layout, load, memory, selection, size, speed
from claims.claim import Plan, Result, missing

CLAIMS: dict[str, Callable[[Plan], list[Result]]] = {
    "selection": selection.run,
    "gates": gates.run,
    "alignment": alignment.run,
    "huge_pages": huge_pages.run,
    "layout": layout.run,
    "size": size.run,
    "load": load.run,
    "memory": memory.run,
    "speed": speed.run,
}


def measure(name: str, plan: Plan) -> list[Result]:
    """The results of one script; what fails is a result that says so."""
    try:
        return CLAIMS[name](plan)
    except (OSError, ContenderError) as error:
        said = (sys.modules[CLAIMS[name].__module__].__doc__ or "").split("\n\n")[0]
        return [missing(name, said, str(error))]
