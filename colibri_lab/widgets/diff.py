"""DiffView: two runs side by side: same or not; if not, where does it start, and is it a bug or a tie?

It shows a finished `Diff`; looking never runs a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from colibri_lab.difference.result import Diff
from colibri_lab.difference.verdict import diff
from colibri_lab.errors import ArgumentError, ColibriError
from colibri_lab.widgets import _cell
from colibri_lab.widgets._modules import join_modules, style_sheet
from colibri_lab.widgets._wire import Message, message_of, pack
from colibri_lab.widgets._work import IDLE, Working
from colibri_lab.widgets.diff_data import DiffData
from colibri_lab.widgets.diff_picture import diff_png, diff_text, title
from colibri_lab.widgets.html import view_page, write_page

__all__ = ["DiffView"]

_RECIPE = """import colibri_lab as lab

diff = lab.diff(a, b)  # the two runs that you compared
view = lab.DiffView(diff)
"""


class DiffView(Working, anywidget.AnyWidget):
    """Shows a `Diff`, or compares two runs first: `DiffView(a, b, …)` is `DiffView(lab.diff(a, b, …))`, with all that
    `lab.diff` takes. An open `model` also gives the texts of next tokens that stand in neither run.

    `selection` is a dict of path (of a tap, experts of a layer as "*"), layer, token (row) and expert (None: all of
    them), readable and settable; keys left out keep their value, and a layer alone goes to the same tap there. It
    begins at the first divergence. `diff` is what is shown, `code` the selection as Python.

    Raises ArgumentError for anything but a Diff or two runs, and whatever `lab.diff` raises.
    """

    _esm = join_modules("diff", "diff")
    _css = style_sheet("diff")

    selection = traitlets.Dict().tag(sync=True)
    _status = traitlets.Dict(default_value=dict(IDLE)).tag(sync=True)

    def __init__(self, a: Any, b: Any = None, *, model: Any = None, **options: Any) -> None:
        self._data: DiffData | None = None
        self._data = DiffData(_compared(a, b, model, options), model)
        self.selection = self._data.start()
        super().__init__()
        self.on_msg(self._on_message)
        _cell.remember(self)

    # ---- what is shown ----

    @property
    def diff(self) -> Diff:
        """The comparison that is shown."""
        return self._shown.diff

    @property
    def code(self) -> str:
        """The selection as one line of Python, for a view named `view`."""
        where = {name: value for name, value in self.selection.items() if name != "layer" and value is not None}
        return f"view.selection = dict({', '.join(f'{name}={value!r}' for name, value in where.items())})"

    @property
    def _shown(self) -> DiffData:
        if self._data is None:
            raise ColibriError("this view is closed; make a new one: lab.DiffView(...)")
        return self._data

    @traitlets.validate("selection")
    def _valid_selection(self, proposal: dict[str, Any]) -> dict[str, Any]:
        return self._shown.check(proposal["value"], self.selection)

    @traitlets.observe("selection")
    def _selected(self, change: Any) -> None:
        """Whoever moved the selection, what it shows follows."""
        if self._data is not None and self.comm is not None:
            self._send_selected(change["old"] or {})

    # ---- messages ----

    def _on_message(self, _: Any, request: Mapping[str, Any], __: Sequence[Any]) -> None:
        self._guarded(request)

    def handle(self, request: Mapping[str, Any]) -> None:
        """Answers one request of the browser, here and now; raises what goes wrong."""
        if self._data is None:
            return  # closed while the message was on its way
        kind = request.get("kind")
        if kind == "ready":
            self._post(self._head())
            self._send_selected({})
        elif kind == "html":
            self.send({"kind": "html", "name": "diff-view.html", "text": self._page()})
        else:
            raise ArgumentError(f"The view sent a request that is not known: {kind!r:.40}.")

    def _send_selected(self, old: Mapping[str, Any]) -> None:
        where = self.selection
        if where["path"] is not None:
            self._post(self._values())
        if where["token"] is not None and where["token"] != old.get("token"):
            self._post(self._next(where["token"]))

    def _post(self, message: Message) -> None:
        self.send(message[0], buffers=message[1])

    def _head(self) -> Message:
        specs, buffers = pack(self._shown.overview())
        return {"kind": "head", "facts": {**self._shown.facts(), "recipe": _RECIPE}, "arrays": specs}, buffers

    def _values(self) -> Message:
        where = self.selection
        return message_of("values", self._shown.values(where["path"], where["expert"], where["token"]))

    def _next(self, token: int) -> Message:
        return message_of("next", self._shown.next_tokens(token))

    # ---- without a kernel ----

    def to_html(self, path: str | PathLike[str]) -> Path:
        """Writes the view as one self-contained page that makes no request; returns its path. It holds every tap, with
        fewer points of each the more there are. Raises FileError when it cannot be written.
        """
        return write_page(path, self._page())

    def _page(self) -> str:
        messages = [self._head()]
        messages += [message_of("values", found) for found in self._shown.page_values(self.selection)]
        messages += [self._next(token) for token in self._shown.page_tokens(self.selection)]
        return view_page("diff", title(self.diff), {"selection": self.selection, "_status": IDLE}, messages)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:  # type: ignore[override]
        """The live view, and for when no kernel runs a picture and a few lines of text."""
        if self._data is None:
            return {"text/plain": repr(self)}
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        return {
            "text/plain": diff_text(self._data),
            "image/png": diff_png(self._data, self.selection),
            "application/vnd.jupyter.widget-view+json": view,
        }

    def __repr__(self) -> str:
        if self._data is None:
            return "<DiffView, closed>"
        return f"<DiffView of {title(self.diff)}: {self.diff.verdict}>"

    def close(self) -> None:
        """Ends the view and lets go of both traces."""
        self._data = None
        self.on_msg(self._on_message, remove=True)
        super().close()


def _compared(a: Any, b: Any, model: Any, options: dict[str, Any]) -> Diff:
    if isinstance(a, Diff):
        if b is not None or options:
            raise ArgumentError("DiffView(diff) takes only a model beside a comparison; give the rest to lab.diff.")
        return a
    if b is None:
        raise ArgumentError(f"DiffView takes a Diff or two runs to compare, not one {type(a).__name__}.")
    return diff(a, b, model=model, **options)
