"""Which changes can be tried against an origin, and why the others are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from colibri_lab.nan.result import Cure, Found, Origin
from colibri_lab.widgets.nan_tree import tap_name

__all__ = ["Offer", "name_of", "offers"]


@dataclass(frozen=True)
class Offer:
    """One row of the table of cures: what `nan.cure` is to try, and what stands there before it is tried."""

    name: str  # of the row: the kind, or "whole model"
    row: Cure  # not tried yet; its note says why it cannot be

    @property
    def options(self) -> dict[str, Any]:
        """What `nan.cure` takes besides the kind."""
        return {"whole": True} if self.name == WHOLE else {}


WHOLE = "whole model"


def offers(found: Found, number: int, model: Any = None) -> list[Offer]:
    """The changes that make sense for origin `number`, in the order of what they cost."""
    origin = found.origins[number]
    general = ""
    if model is None and found.trace.model is None:
        general = "no model is open; give model="
    elif found.trace.edits:
        general = "a run with edits cannot be replayed"
    rows = {
        "precision": Cure("precision", f"{_place(origin)} in higher precision", None, general),
        "clamp": Cure("clamp", f"Clamp {_place(origin, lower=True)} to the largest {origin.dtype}", None, general),
        WHOLE: Cure("precision", "Whole model in a format that reaches farther", None, general),
        "ablate": Cure("ablate", _ablation(origin), None, general or _without(origin.expert, "no expert is in it")),
        "weight": Cure("weight", _weight(origin), None, general or _without(origin.weight, "no weight is the cause")),
    }
    if not found.trace.meta.get("emulation"):
        del rows[WHOLE]  # it is as wide already as a run can be
    return [Offer(name, row) for name, row in rows.items()]


def name_of(cure: Cure) -> str:
    """The row in which a result stands."""
    return WHOLE if cure.change.lower().startswith(WHOLE) else cure.kind


def _without(thing: Any, reason: str) -> str:
    return reason if thing is None else ""


def _place(origin: Origin, lower: bool = False) -> str:
    name = tap_name(origin.path)
    where = "" if origin.layer is None else f" of layer {origin.layer}"
    return (name if lower else name[0].upper() + name[1:]) + where


def _ablation(origin: Origin) -> str:
    if origin.expert is None:
        return "Switch off an expert"
    return f"Switch off expert {origin.expert} in layer {origin.layer}"


def _weight(origin: Origin) -> str:
    if origin.weight is None:
        return "Replace the weight"
    return f"Replace {origin.weight.name}[{', '.join(map(str, origin.weight.index))}]"
