"""The words for what a search for NaN and Inf found."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from colibri_lab.nan.result import Found

__all__ = ["report", "summary", "to_json"]


def summary(found: Found) -> str:
    """Where it was born and why."""
    origin = found.origin
    more = f" {len(found.origins)} independent origins in all." if len(found.origins) > 1 else ""
    return f"{origin.cause}.{more}"


def report(found: Found) -> str:
    """Each origin, then what is not known."""
    lines = [f"{origin.path}, token {origin.token}, {origin.index}: {origin.cause}" for origin in found.origins]
    return "\n".join([*lines, *found.notes, ""])


def to_json(found: Found) -> str:
    """Origins, propagation and notes."""
    plain: dict[str, Any] = {
        "origins": [dataclasses.asdict(origin) for origin in found.origins],
        "propagation": dataclasses.asdict(found.propagation),
        "notes": list(found.notes),
    }
    return json.dumps(_named(plain), indent=1)


def _named(value: Any) -> Any:
    """NaN and infinities as strings."""
    if isinstance(value, dict):
        return {key: _named(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_named(item) for item in value]
    return str(value) if isinstance(value, float) and not abs(value) < float("inf") else value
