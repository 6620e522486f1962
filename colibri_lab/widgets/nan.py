"""NanTracer: where NaN and Inf are born in a run, how they travelled, and what makes them go away."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import traitlets

from colibri_lab import nan
from colibri_lab.errors import ArgumentError, ColibriError, nearest
from colibri_lab.nan.result import Cure, Found
from colibri_lab.nan.source import Source, opened
from colibri_lab.trace import Trace, trace_of
from colibri_lab.widgets import _cell
from colibri_lab.widgets._modules import join_modules, style_sheet
from colibri_lab.widgets._wire import Message, pack
from colibri_lab.widgets._work import IDLE, Work, Working
from colibri_lab.widgets.html import view_page, write_page
from colibri_lab.widgets.nan_data import NanData, cure_facts
from colibri_lab.widgets.nan_offers import name_of, offers
from colibri_lab.widgets.nan_picture import nan_png, nan_text

__all__ = ["NanTracer"]

_PAGE_ORIGINS = 50  # ways that a saved page holds
_RECIPE = """import colibri_lab as lab

found = lab.nan.find(run)  # the session or trace that you traced
view = lab.NanTracer(found)
"""


class NanTracer(Working, anywidget.AnyWidget):
    """Shows what `lab.nan.find` found. `x` is that `Found`, or a session, a trace or the path of one, which are
    searched first (a recording with the open `model` that made it); a run without NaN and Inf is shown as clean, with
    what comes nearest to overflow.

    `selection` is a dict of path (of a tap, experts of a layer as "*"), layer, token (row) and expert (None: all of
    them), readable and settable; keys left out keep their value, and a layer alone goes to the same tap there. `chosen`
    is the number of the origin that is shown, in `found.origins`. `cure` replays the run with one change; `cures` are
    results of `lab.nan.cures(found)`, about its first origin, that are there already.

    Raises ArgumentError for anything else, and whatever the search raises.
    """

    _esm = join_modules("nan", "nan")
    _css = style_sheet("nan")

    selection = traitlets.Dict().tag(sync=True)
    chosen = traitlets.Int(0).tag(sync=True)
    _status = traitlets.Dict(default_value=dict(IDLE)).tag(sync=True)
    _in_cell = traitlets.Bool(False).tag(sync=True)

    def __init__(self, x: Any, *, model: Any = None, cures: Sequence[Cure] = (), progress: Any = None) -> None:
        self._work = threading.Lock()
        self._stop = threading.Event()
        self._cures = {(0, name_of(cure)): cure for cure in cures}  # by origin and name of the change
        self._running: int | None = None  # row of the table of cures
        self._data: NanData | None = None
        self._model = opened(model)
        self._data = _searched(x, self._model, progress)
        self.selection = self._data.start()
        super().__init__()
        self.on_msg(self._on_message)
        _cell.remember(self)

    # ---- what is shown ----

    @property
    def found(self) -> Found | None:
        """What was found; None for a clean run."""
        return self._shown.found

    @property
    def cures(self) -> list[Cure]:
        """The changes that were tried against the chosen origin."""
        return [cure for (number, _), cure in self._cures.items() if number == self.chosen]

    @property
    def code(self) -> str:
        """The selection as one line of Python, for a view named `view`."""
        where = {name: value for name, value in self.selection.items() if name != "layer" and value is not None}
        return f"view.selection = dict({', '.join(f'{name}={value!r}' for name, value in where.items())})"

    @property
    def _shown(self) -> NanData:
        if self._data is None:
            raise ColibriError("this view is closed; make a new one: lab.NanTracer(...)")
        return self._data

    @traitlets.validate("selection")
    def _valid_selection(self, proposal: dict[str, Any]) -> dict[str, Any]:
        return self._shown.check(proposal["value"], self.selection)

    @traitlets.observe("selection")
    def _selected(self, _: Any) -> None:
        """Whoever moved the selection, what it shows follows."""
        if self._data is not None and self.comm is not None:
            self._send_cell()

    @traitlets.validate("chosen")
    def _valid_chosen(self, proposal: dict[str, Any]) -> int:
        number, last = int(proposal["value"]), max(len(self._shown.origins) - 1, 0)
        if not 0 <= number <= last:
            raise ArgumentError(f"there is no origin {number:.20g}; origins are 0 to {last}.")
        return number

    @traitlets.observe("chosen")
    def _chose(self, _: Any) -> None:
        if self._data is not None and self.comm is not None:
            self._send_origin()

    # ---- cures ----

    def cure(self, name: str) -> Cure | None:
        """Replays the run with one change against the chosen origin and shows whether it vanishes. `name` is "ablate",
        "clamp", "precision", "weight", or "whole model". Returns when that is done, None when `stop` from another
        thread ended it.

        Raises ArgumentError for a change that is not offered, with the reason, and whatever the replay raises.
        """
        found, number = self._shown.found, self.chosen
        if found is None:
            raise ArgumentError("The run is clean: nothing needs a cure.")
        offered = {offer.name: offer for offer in offers(found, number, self._model)}
        if not isinstance(name, str) or name not in offered:
            raise ArgumentError(f"no change is called {name!r:.40}{nearest(str(name), offered)}")
        offer = offered[name]
        if offer.row.note:
            raise ArgumentError(f"{offer.row.change}: not tried, {offer.row.note}.")
        self._refuse_a_second()
        done: Cure | None = None
        with self._work:
            self._running = list(offered).index(name)
            try:
                with self._working(f"Replaying with one change: {offer.row.change}") as work:
                    work.begin()
                    self._send_cures()
                    options = {"model": self._model, "progress": work.hear, **offer.options}
                    done = nan.cure(found, offer.row.kind, origin=number, **options)
                    self._cures[number, name] = done
                    if offer.row.kind == "precision" and done.gone and self._data is not None:
                        self._replay(found.trace, work)
            finally:
                self._running = None
                self._send_cures()
        return done

    def _replay(self, trace: Trace, work: Work) -> None:
        """The sizes of an emulated run in plain float32: what the layers behind the origin would have held."""
        data = self._shown
        if data.replayed is not None or not trace.meta.get("emulation"):
            return
        model, count = self._model or trace.model, trace.n_tokens
        session = model.session(capture="all", max_tokens=count, gate_mode=trace.meta.get("gate_mode"))
        session.feed(trace.ids, progress=work.hear)
        data.replay_with(nan.scan(session))
        if self.comm is not None:
            self._send_replayed()

    # ---- messages ----

    def _on_message(self, _: Any, request: Mapping[str, Any], __: Sequence[Any]) -> None:
        """A request of the browser; what takes long in a thread of its own."""
        if request.get("kind") == "cure":
            threading.Thread(target=self._guarded, args=(request,), daemon=True, name="colibri-nan").start()
        else:
            self._guarded(request)

    def handle(self, request: Mapping[str, Any]) -> None:
        """Answers one request of the browser, here and now; raises what goes wrong."""
        if self._data is None:
            return  # closed while the message was on its way
        kind = request.get("kind")
        if kind == "ready":
            self._post(self._head())
            self._send_cures()
            self._send_origin()
            self._send_cell()
            self._send_replayed()
        elif kind == "cure":
            self.cure(str(request["name"]))
        elif kind == "stop":
            self.stop()
        elif kind == "html":
            self.send({"kind": "html", "name": "nan-tracer.html", "text": self._page()})
        else:
            raise ArgumentError(f"The view sent a request that is not known: {kind!r:.40}.")

    def _cures_message(self) -> dict[str, Any]:
        """The table of cures of the chosen origin: results where there are any, else what can be tried."""
        found, number, rows = self._shown.found, self.chosen, []
        for offer in offers(found, number, self._model) if found is not None else ():
            done = self._cures.get((number, offer.name))
            runs = not offer.row.note and (done is None or done.gone is not None)
            rows.append({**cure_facts(done or offer.row), "name": offer.name, "of": number, "runs": runs})
        return {"kind": "cures", "rows": rows, "running": self._running}

    def _send_cures(self) -> None:
        if self._data is not None and self.comm is not None:
            self.send(self._cures_message())

    def _send_origin(self) -> None:
        if self._shown.found is not None:
            self.send({"kind": "origin", **self._shown.origin(self.chosen)})
            self._send_cures()

    def _send_cell(self) -> None:
        where = self.selection
        self.send({"kind": "cell", "cell": self._shown.cell(where["path"], where["token"], where["expert"])})

    def _post(self, message: Message) -> None:
        self.send(message[0], buffers=message[1])

    def _head(self) -> Message:
        specs, buffers = pack(self._shown.overview())
        return {"kind": "head", "facts": {**self._shown.facts(), "recipe": _RECIPE}, "arrays": specs}, buffers

    def _send_replayed(self) -> None:
        for message in self._replayed():
            self._post(message)

    def _replayed(self) -> list[Message]:
        sizes = self._shown.replayed
        if sizes is None:
            return []
        specs, buffers = pack({"absmax": sizes})
        return [({"kind": "replayed", "arrays": specs}, buffers)]

    # ---- without a kernel ----

    def to_html(self, path: str | PathLike[str]) -> Path:
        """Writes the view as one self-contained page that makes no request; returns its path. Raises FileError when it
        cannot be written.
        """
        return write_page(path, self._page())

    def _page(self) -> str:
        data, where = self._shown, self.selection
        messages: list[Message] = [self._head(), (self._cures_message(), [])]
        numbers = dict.fromkeys([self.chosen, *range(len(data.origins))][:_PAGE_ORIGINS]) if data.origins else ()
        messages += [({"kind": "origin", **data.origin(number)}, []) for number in numbers]
        messages.append(({"kind": "cell", "cell": data.cell(where["path"], where["token"], where["expert"])}, []))
        messages += self._replayed()
        state = {"selection": where, "chosen": self.chosen, "_status": IDLE, "_in_cell": False}
        return view_page("nan", f"NaN Tracer: {data.title()}", state, messages)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:  # type: ignore[override]
        """The live view, and for when no kernel runs a picture and a few lines of text."""
        if self._data is None:
            return {"text/plain": repr(self)}
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        return {
            "text/plain": nan_text(self._data, self.chosen),
            "image/png": nan_png(self._data, self.chosen, self.selection),
            "application/vnd.jupyter.widget-view+json": view,
        }

    def __repr__(self) -> str:
        if self._data is None:
            return "<NanTracer, closed>"
        found, trace = self._data.found, self._data.trace
        what = "nothing has run" if trace is not None and not trace.n_tokens else "clean"
        return f"<NanTracer of {self._data.title()}: {what if found is None else found.origin.kind}>"

    def close(self) -> None:
        """Ends the view and lets go of the run."""
        self.stop()
        self._data = None
        self._cures.clear()
        self.on_msg(self._on_message, remove=True)
        super().close()


def _searched(x: Any, model: Any, progress: Any) -> NanData:
    if isinstance(x, Found):
        return NanData.of(x)
    if x is None:  # what a search returns for a clean run
        return NanData.clean(None)
    if isinstance(x, str | PathLike):
        import colibri_lab

        x = colibri_lab.load_trace(x)
    if not isinstance(x, Trace) and not hasattr(x, "tape"):
        hint = "; make a session of it: model.session()" if callable(getattr(x, "session", None)) else ""
        raise ArgumentError(
            f"NanTracer takes a session, a trace, its path or what was found, not {type(x).__name__}{hint}"
        )
    trace = trace_of(x)
    if not trace.n_tokens:
        return NanData.clean(trace)
    found = nan.find(x, model=model, progress=progress)
    if found is not None:
        return NanData.of(found)
    table: np.ndarray[Any, Any] = nan.scan(trace)
    data = NanData.clean(trace, table, Source(trace).dtype)
    data.room = nan.headroom(trace, [data.format])
    return data
