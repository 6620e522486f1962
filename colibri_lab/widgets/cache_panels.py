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

from colibri_lab.errors import ArgumentError, ColibriError, nearest
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
    "read": "Running the tokens once more for the attention of layer {layer}",
}
_CHANGES = {"warm": "Warm", "drop": "Drop", "lock": "Lock", "unlock": "Unlock"}
_QUICK = 1 << 32  # parameters times tokens up to which the tokens run again without being asked
_SHARE = 0.9  # of the attention: the fewest keys that hold it count as used
_LISTED = 60  # keys that are named
_TOKENS = 64  # of the prompt that a profile runs, at most
_NO_MODEL = "This is a recording: the model that made it is not open here. lab.CacheLab(session) shows more."
_NO_KEYS = "This is a recording: it holds no cached keys. lab.CacheLab(session) shows more."
_NO_SESSION = (
    "The model is open, but this view was made without a session, and only a session has cached keys: "
    "session = view.trace.model.session(); session.feed(view.trace.ids); lab.CacheLab(session)."
)
_MOVED_ON = "The session holds other tokens now than this view shows; a new view shows them: lab.CacheLab(session)."
_NOT_READ = "Which keys this query uses shows when the tokens have run once more, in a session of its own."


class Panels:
    """What the view shows of the machine, beside what it simulates."""

    def __init__(self, data: CacheData) -> None:
        self.data = data
        self._model = data.session.model if data.session is not None else data.trace.model
        self._residency: Any = None
        self._change = ""  # what the last button did, and to which expert
        self._changed: tuple[int, int] | None = None
        self._profile: dict[str, Any] | None = None
        self._keys: Any = None

    def shown(self, selection: Mapping[str, Any]) -> list[tuple[str, Facts]]:
        """(name, (facts, arrays)) of every panel."""
        return [
            ("residency", self._in_memory(selection)),
            ("roofline", (self._profile or {"reason": self._why_not_measured()}, {})),
            ("keys", self._keys_of(selection)),
        ]

    def doing(self, name: str, act: str, selection: Mapping[str, Any]) -> str:
        """What a button does, as the words shown while it works."""
        return _DOING.get(act, f"{act} of {name}").format(**selection)

    def act(self, name: str, act: str, selection: Mapping[str, Any], progress: Any) -> None:
        """Does what a button says. `progress` hears how far it is and may end it by raising.

        Raises ArgumentError for what is not offered, and whatever the work raises.
        """
        if (name, act) == ("roofline", "measure"):
            self._measure(progress)
        elif (name, act) == ("keys", "read"):
            self._read_keys(selection, progress)
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
        return "" if self.data.trace.n_tokens else "Nothing has run: feed the session first."

    def _measure(self, progress: Any) -> None:
        why_not = self._why_not_measured()
        if why_not:
            raise ArgumentError(why_not)
        import colibri_lab

        ids = list(self.data.trace.ids[:_TOKENS])
        self._profile = profile_facts(colibri_lab.profile(self._model, ids, progress=progress))


    # ---- keys and values ----

    def _why_no_keys(self) -> str:
        return _NO_KEYS if self._model is None else _NO_SESSION

    def _moved_on(self) -> bool:
        """Whether the session was reset or rewound since: its keys are of other tokens."""
        ids = self.data.trace.ids
        return list(self.data.session.ids[: len(ids)]) != list(ids)

    def _cached(self) -> Any:
        if self._keys is None:
            from colibri_lab import cache

            self._keys = cache.keys(self.data.session)
        return self._keys

    def _keys_of(self, selection: Mapping[str, Any]) -> Facts:
        session, trace = self.data.session, self.data.trace
        layer, token = selection["layer"], selection["token"]
        if session is None or token is None:
            nothing = "No token is selected." if trace.n_tokens else "Nothing has run yet: no key is cached."
            return {"reason": self._why_no_keys() if session is None else nothing}, {}
        if self._moved_on():
            return {"reason": _MOVED_ON}, {}
        try:
            cached = self._cached()
            if not cached.known(layer, token) and session.model.info["parameters"] * trace.n_tokens > _QUICK:
                return {"reason": _NOT_READ, "can": True, **cost_facts(cached, trace, layer)}, {}
            return keys_facts(cached, trace, layer, token)
        except ColibriError as error:  # a run with edits, memory, another thread at work
            return {"reason": str(error)}, {}

    def _read_keys(self, selection: Mapping[str, Any], progress: Any) -> None:
        if self.data.session is None or selection["token"] is None:
            raise ArgumentError(self._why_no_keys())
        if self._moved_on():
            raise ArgumentError(_MOVED_ON)
        self._cached().weights(selection["layer"], selection["token"], progress=progress)


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


def cost_facts(cached: Any, trace: Trace, layer: int) -> dict[str, Any]:
    """What the keys and values of a session cost, and how far a query of `layer` sees."""
    return {
        "layer": layer,
        "bytes_per_token": cached.bytes_per_token.tolist(),
        "total": int(cached.bytes.sum()),
        "tokens": trace.n_tokens,
        "windows": [None if window < 0 else window for window in cached.window.tolist()],
    }


def keys_facts(cached: Any, trace: Trace, layer: int, token: int) -> Facts:
    """What the query of `token` in `layer` uses of `lab.cache.keys`. Array `weights` (token + 1,) float32: attention by
    position, heads averaged, and `mask` of the fewest positions that hold 90 % of it; `used` has the largest of them.
    """
    weights = cached.weights(layer, token).mean(axis=0)
    cost = cost_facts(cached, trace, layer)
    if not np.isfinite(weights).all():
        return {"reason": f"The attention of token {token} in layer {layer} is not finite.", **cost}, {}
    order = np.argsort(-weights, kind="stable")
    held = np.cumsum(weights[order], dtype=np.float64)
    count = int((held < _SHARE * held[-1]).sum()) + 1
    mask = np.zeros(token + 1, np.uint8)
    mask[order[:count]] = 1

    def named(position: int) -> dict[str, Any]:
        text = trace.texts[position] if trace.texts else ""
        return {"position": position, "text": text, "id": int(trace.ids[position]), "weight": float(weights[position])}

    first, last = cached.reach(layer, token)
    facts = {
        "reason": "",
        "token": token,
        "query": named(token),
        "first": first,
        "reached": last - first + 1,
        "used": [named(position) for position in order[: min(count, _LISTED)].tolist()],
        "count": count,
        "held": float(held[count - 1] / held[-1]),
        "one_head": cached.used(layer, token, share=_SHARE),
    }
    return facts | cost, {"weights": weights.astype(np.float32), "mask": mask}
