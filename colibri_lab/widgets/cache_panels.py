"""The panels below the timeline: what is in memory now, what limits each stage, keys and values.

Each panel has a name, which is also that of its ES module and of its place in the page: "residency", "roofline",
"keys". `shown` gives what each of them draws, as facts for JSON and arrays for `pack`; the browser calls the module's
`html(panel, view)` with both as one object. A button with `data-panel="residency" data-do="warm"` comes back as
`act("residency", "warm", selection, progress)`, in a thread of its own; afterwards `shown` is asked again.

Nothing is measured by being looked at: the system is asked about memory when the view opens and when a button is
pressed, and a profile runs when it is asked for. What cannot be had is a sentence that says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from colibri_lab.errors import ArgumentError, nearest
from colibri_lab.trace import Trace
from colibri_lab.widgets.cache_data import CacheData
from colibri_lab.widgets.cache_stages import profile_facts

__all__ = ["Panels", "keys_facts", "residency_facts"]

Facts = tuple[dict[str, Any], dict[str, Any]]

_DOING = {
    "warm": "Reading expert {expert} of layer {layer} into memory",
    "drop": "Taking expert {expert} of layer {layer} out of memory",
    "lock": "Locking expert {expert} of layer {layer} in memory",
    "unlock": "Letting go of expert {expert} of layer {layer}",
    "refresh": "Asking the system what is in memory",
    "measure": "Measuring each stage",
}
_CHANGES = {"warm": "Warm", "drop": "Drop", "lock": "Lock", "unlock": "Unlock"}
_SHARE = 0.9  # of the attention: the fewest keys that hold it count as used
_TOKENS = 64  # of the prompt that a profile runs, at most
_NO_MODEL = "This is a recording: the model that made it is not open here. lab.CacheLab(session) shows more."


class Panels:
    """What the view shows of the machine, beside what it simulates."""

    def __init__(self, data: CacheData) -> None:
        self.data = data
        self._model = data.session.model if data.session is not None else data.trace.model
        self._residency: Any = None
        self._change = ""  # what the last button did, and to which expert
        self._changed: tuple[int, int] | None = None
        self._profile: dict[str, Any] | None = None

    def shown(self, selection: Mapping[str, Any]) -> list[tuple[str, Facts]]:
        """(name, (facts, arrays)) of every panel."""
        return [
            ("residency", self._in_memory(selection)),
            ("roofline", (self._profile or {"reason": self._why_not_measured()}, {})),
        ]

    def doing(self, name: str, act: str) -> str:
        """What a button does, as the words shown while it works."""
        return _DOING.get(act, f"{act} of {name}")

    def act(self, name: str, act: str, selection: Mapping[str, Any], progress: Any) -> None:
        """Does what a button says. `progress` hears how far it is and may end it by raising.

        Raises ArgumentError for what is not offered, and whatever the work raises.
        """
        if (name, act) == ("roofline", "measure"):
            self._measure(progress)
        elif name == "residency" and act in (*_CHANGES, "refresh"):
            self._change_memory(act, selection)
        else:
            raise ArgumentError(f"no button is called {act!r:.40}{nearest(act, _DOING)}")

    # ---- memory ----

    def _change_memory(self, act: str, selection: Mapping[str, Any]) -> None:
        pages = self._pages()
        if pages is None:
            raise ArgumentError(_NO_MODEL)
        self._change, self._changed = "", None
        if act != "refresh":
            layer, expert = selection["layer"], selection["expert"]
            if layer is None or expert is None:
                raise ArgumentError("Select an expert first.")
            self._change, self._changed = _said(act, getattr(pages, act)(layer, expert)), (layer, expert)
        pages.refresh()

    def _pages(self) -> Any:
        if self._residency is None and self._model is not None:
            from colibri_lab import cache

            self._residency = cache.residency(self._model)
        return self._residency

    def _in_memory(self, selection: Mapping[str, Any]) -> Facts:
        pages = self._pages()
        if pages is None:
            return {"available": False, "reason": _NO_MODEL, "layers": [], "experts": 0}, {}
        said = self._change if self._changed == (selection["layer"], selection["expert"]) else ""
        return residency_facts(pages, self.data.trace.moe_layers, said)

    # ---- stages ----

    def _why_not_measured(self) -> str:
        if self._model is None:
            return _NO_MODEL
        return "" if self.data.trace.ids else "Nothing has run: feed the session first."

    def _measure(self, progress: Any) -> None:
        why_not = self._why_not_measured()
        if why_not:
            raise ArgumentError(why_not)
        import colibri_lab

        ids = list(self.data.trace.ids[:_TOKENS])
        self._profile = profile_facts(colibri_lab.profile(self._model, ids, progress=progress))


def _said(act: str, change: Any) -> str:
    """What a change did, with what the system has to say about it."""
    if np.isnan(change.before) or np.isnan(change.after):
        return str(change.sentence)
    what = "locked" if act in ("lock", "unlock") else "in memory"
    why = change.sentence.partition("; ")[2]
    told = f"{_CHANGES[act]}: {100 * change.before:.0f} % {what} before, {100 * change.after:.0f} % now"
    return f"{told}; {why}." if why else f"{told}."


def residency_facts(pages: Any, layers: list[int], change: str = "") -> Facts:
    """`lab.cache.residency` for the browser. Arrays (Lm, E): `share` float32 (NaN: not known), `locked` uint8, `size`
    uint32 in bytes. `change` says what was just done.
    """
    facts = {
        "available": bool(pages.available),
        "reason": str(pages.reason),
        "layers": list(layers),
        "experts": int(pages.share.shape[1]),
        "change": change,
    }
    arrays = {"share": pages.share.astype(np.float32), "locked": pages.locked.astype(np.uint8)}
    return facts, arrays | {"size": pages.bytes.astype(np.uint32)}


def keys_facts(cached: Any, trace: Trace, layer: int, token: int) -> Facts:
    """What the query of `token` in `layer` uses of `lab.cache.keys`. Array `weights` (token + 1,) float32: attention by
    position, heads averaged, and `mask` of the fewest positions that hold 90 % of it; `used` has the largest of them.
    """
    first, last = cached.reach(layer, token)
    heads = np.asarray(cached.weights(layer, token))
    weights = np.zeros(token + 1, np.float32)
    weights[first : last + 1] = heads.mean(axis=0)[-(last + 1 - first) :]
    used = np.asarray(cached.used(layer, token, share=_SHARE))
    used = used[np.argsort(-weights[used], kind="stable")]

    def named(position: int) -> dict[str, Any]:
        text = trace.texts[position] if trace.texts else ""
        return {"position": position, "text": text, "id": int(trace.ids[position]), "weight": float(weights[position])}

    windows = [None if n is None or n < 0 or n >= np.iinfo(np.int32).max else int(n) for n in cached.window]
    facts = {
        "reason": "",
        "layer": layer,
        "token": token,
        "query": named(token),
        "first": int(first),
        "reached": int(last - first + 1),
        "used": [named(int(position)) for position in used[:100]],
        "count": len(used),
        "held": float(weights[used].sum()),
        "bytes_per_token": [int(n) for n in cached.bytes_per_token],
        "total": int(np.sum(cached.bytes)),
        "tokens": len(trace.ids),
        "windows": windows,
        "layers": list(trace.layers),
    }
    mask = np.zeros(token + 1, np.uint8)
    mask[used] = 1
    return facts, {"weights": weights, "mask": mask}
