"""RoutingExplorer: which expert takes which token, and was the router sure? One linked selection (layer, token, expert)
over all views.

It reads a `Trace`. Given a session it can also run prompts; everything shown is still a finished trace, so looking
never waits for the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from colibri_lab.errors import ArgumentError, BusyError, CapacityError, ColibriError, NotCapturedError
from colibri_lab.trace import Trace
from colibri_lab.widgets import _cell
from colibri_lab.widgets._modules import join_modules, style_sheet
from colibri_lab.widgets._wire import Message, Request, pack
from colibri_lab.widgets._work import IDLE, RunsPrompts, Stopped, Working, short
from colibri_lab.widgets.explorer_data import ExplorerData
from colibri_lab.widgets.html import view_page, write_page
from colibri_lab.widgets.picture import explorer_png, explorer_text

__all__ = ["RoutingExplorer"]

_RETRY_SECONDS = 0.2
_PAGE_VALUES_BELOW = 8 << 20  # bytes of router values that a saved page may carry
_BUSY = "A cell is running on this session. Looking at finished data works; this run waits its turn."


class RoutingExplorer(Working, anywidget.AnyWidget):
    """Shows the routing of a trace, or of a session that it can also run.

    `selection` is a dict of layer (the model's own number), token (row) and expert, readable and settable; keys left
    out keep their value, and an expert left out is the first choice at a new place. `colour_by` is "expert", "entropy"
    or "margin". `code` is the selection as Python. `trace` is what is shown. `run`, `generate` and `stop` need a
    session.

    Raises ArgumentError for anything but a session or a trace, and NotCapturedError when no expert ids were captured.
    """

    _esm = join_modules("explorer", "explorer")
    _css = style_sheet("explorer")

    selection = traitlets.Dict().tag(sync=True)
    colour_by = traitlets.Enum(["expert", "entropy", "margin"], default_value="expert").tag(sync=True)
    _status = traitlets.Dict(default_value=dict(IDLE)).tag(sync=True)
    _in_cell = traitlets.Bool(False).tag(sync=True)

    def __init__(self, session_or_trace: RunsPrompts | Trace) -> None:
        self._session: RunsPrompts | None = None
        self._version = 0
        self._work = threading.Lock()
        self._stop = threading.Event()
        self._data: ExplorerData | None = None
        if isinstance(session_or_trace, Trace):
            trace = session_or_trace
        elif callable(getattr(session_or_trace, "feed", None)) and callable(getattr(session_or_trace, "trace", None)):
            self._session = session_or_trace
            trace = session_or_trace.trace()
        else:
            hint = (
                "; make a session of it: model.session()"
                if callable(getattr(session_or_trace, "session", None))
                else ""
            )
            raise ArgumentError(
                f"RoutingExplorer takes a session or a trace, not {type(session_or_trace).__name__}{hint}"
            )
        self._show(trace)
        self._prompt = self._text()
        super().__init__()
        self.on_msg(self._on_message)
        _cell.remember(self)

    # ---- what is shown ----

    @property
    def trace(self) -> Trace:
        """The trace that is shown."""
        return self._shown.trace

    @property
    def code(self) -> str:
        """The selection as one line of Python, for an explorer named `explorer`."""
        where = self.selection
        return f"explorer.selection = dict(layer={where['layer']}, token={where['token']}, expert={where['expert']})"

    @property
    def _shown(self) -> ExplorerData:
        if self._data is None:
            raise ColibriError("this explorer is closed; make a new one: lab.RoutingExplorer(...)")
        return self._data

    def _show(self, trace: Trace) -> None:
        """Shows another trace; the selection stays where it still exists, else it goes to the last token."""
        data = ExplorerData(trace)
        if not trace.n_tokens and any(f"layers.{layer}.moe.load" in trace for layer in data.layers):
            raise NotCapturedError(
                "this recording counted experts and kept no token: lab.routing.load(trace) has its counts"
            )
        if trace.n_tokens and not data.layers:
            raise NotCapturedError("this trace has no layer with experts: there is no routing to show")
        if data.layers and f"layers.{data.layers[0]}.moe.expert_ids" not in trace:
            raise NotCapturedError('no expert ids were captured; ask for them with model.session(capture="routing")')
        if self._version and self._data is None:
            return  # closed while the work was ending: let go of this trace as well
        old = dict(self.selection) if self._data is not None else {}
        self._data = data
        self._version += 1
        layer = (
            old.get("layer")
            if old.get("layer") in data.layers
            else (data.layers[len(data.layers) // 2] if data.layers else 0)
        )
        token = data.tokens - 1 if data.tokens else None
        self.selection = {"layer": layer, "token": token, "expert": None}
        if self._version > 1:
            self._send_all()

    @traitlets.validate("selection")
    def _valid_selection(self, proposal: dict[str, Any]) -> dict[str, int | None]:
        wish = dict(proposal["value"])
        unknown = set(wish) - {"layer", "token", "expert"}
        if unknown:
            raise ArgumentError(f"A selection has layer, token and expert, not {', '.join(sorted(map(str, unknown)))}.")
        old = self.selection
        moved = any(wish.get(key, old.get(key)) != old.get(key) for key in ("layer", "token"))
        full = {**old, **({"expert": None} if moved else {}), **wish}
        return self._shown.check(full.get("layer"), full.get("token"), full.get("expert"))

    # ---- running ----

    def run(self, text: str) -> None:
        """Empties the session, feeds it `text` as one pass and shows the result. Returns when that is done; `stop` from
        another thread ends it. Waits while another thread is inside the session.

        Raises ArgumentError (no session, no text), CapacityError (more tokens than the session holds; nothing is
        changed), BusyError (this explorer is already working) and whatever the session raises.
        """
        session = self._need_session()
        ids = self._encode(session, text)
        self._refuse_a_second()
        with self._work, self._working(f"Running {short(text)}") as work:
            work.begin()
            before = session.ids

            def afresh() -> None:
                session.reset()
                session.feed(ids, progress=lambda done: work.report(round(done * len(ids)), len(ids)))

            try:
                self._patiently(afresh)
                trace = self._patiently(session.trace)
            except BaseException:
                work.left = self._left(before, session.ids)
                raise
            self._prompt = text
            self._show(trace)

    def generate(self, count: int = 32) -> None:
        """Continues what is shown by up to `count` tokens, greedily, and shows the result; again continues further.
        `stop` from another thread keeps what was made.

        Raises as `run` does, ArgumentError in an empty session, and BusyError when another thread changes the session
        between two tokens.
        """
        session = self._need_session()
        self._refuse_a_second()
        with self._work, self._working("Generating") as work:
            work.begin()
            made = 0
            try:
                for made in self._tokens(session, count):
                    work.left = f"{made} new token{'s are' if made > 1 else ' is'} kept."
                    work.report(made, count)
            finally:
                if made:
                    kept, work.left = work.left, f"{work.left} The picture does not have them yet."
                    self._show(self._patiently(session.trace))
                    work.left = kept

    def _need_session(self) -> RunsPrompts:
        if self._session is None:
            raise ArgumentError(
                "This explorer shows a trace; running needs a model: lab.RoutingExplorer(lab.open().session())."
            )
        return self._session

    def _encode(self, session: RunsPrompts, text: str) -> list[int]:
        """The prompt's ids, checked before anything is changed."""
        if not isinstance(text, str):
            raise ArgumentError(f"A prompt is a text, not {type(text).__name__}.")
        if not text:
            raise ArgumentError("There is no prompt to run: type one first.")
        if session.model.tokenizer is None:
            raise ArgumentError("This model has no tokenizer: feed ids with session.feed and show session.trace().")
        ids: list[int] = session.model.tokenizer.encode(text, special=True)
        if len(ids) > session.max_tokens:
            raise CapacityError(f"The prompt has {len(ids):,} tokens and the session holds {session.max_tokens:,}.")
        return ids

    def _patiently(self, call: Callable[[], Any]) -> Any:
        """Calls; while another thread is inside the session, says so and waits its turn, until Stop. What `call` does
        it does before it returns: an iterator would do it later.
        """
        while True:
            try:
                return call()
            except BusyError:
                self._wait()

    def _left(self, before: list[int], now: list[int]) -> str:
        """What a run leaves behind that did not reach its picture."""
        if now and now == before:
            return "Nothing was changed."
        held = f"holds {len(now):,} token{'s' * (len(now) != 1)}" if now else "is empty"
        picture = "; the picture is of the previous run" if self._data is not None and self._data.tokens else ""
        return f"The session {held} now{picture}."

    def _wait(self) -> None:
        self._status = {"state": "busy", "text": _BUSY}
        if self._stop.wait(_RETRY_SECONDS):
            raise Stopped

    def _tokens(self, session: RunsPrompts, count: int) -> Iterator[int]:
        """Generates, waiting its turn before every token; yields how many there are. Raises BusyError when another
        thread has changed the session since the last one.
        """
        made = 0
        held: list[int] = []  # what the session holds after the last token
        while True:
            try:
                for token in session.generate(count - made, progress=False):
                    if made:
                        held.append(int(token))
                    else:
                        held = session.ids
                    made += 1
                    yield made
                return
            except BusyError as error:
                self._wait()
                if made and session.ids != held:
                    raise BusyError("another call changed the session while this was generating") from error

    # ---- messages ----

    def _on_message(self, _: Any, request: Request, __: Sequence[Any]) -> None:
        """A request of the browser; what takes long in a thread of its own."""
        if request.get("kind") in ("run", "generate"):
            threading.Thread(target=self._guarded, args=(request,), daemon=True, name="colibri-explorer").start()
        else:
            self._guarded(request)

    def handle(self, request: Request) -> None:
        """Answers one request of the browser, here and now; raises what goes wrong."""
        kind = request.get("kind")
        if self._data is None:
            return  # closed while the message was on its way
        if kind == "ready":
            self._send_all()
        elif kind == "run":
            self.run(request["text"])
        elif kind == "generate":
            if "text" in request:  # the prompt box holds another prompt than the one that is shown
                self.run(request["text"])
                if self._stop.is_set():
                    return
            self.generate(int(request["count"]))
        elif kind == "stop":
            self.stop()
        elif kind == "html":
            self.send({"kind": "html", "name": "routing-explorer.html", "text": self._page()})
        elif request.get("version") != self._version:
            return  # of a trace that is no longer shown
        elif kind == "blocks":
            layers = [int(layer) for layer in request["layers"]]
            for layer in layers:
                self._post(self._block_message(layer, last=layer == layers[-1]))
        elif kind == "column":
            self._post(self._column_message(int(request["token"])))
        else:
            raise ArgumentError(f"The view sent a request that is not known: {kind!r}.")

    def _send_all(self) -> None:
        """What the first picture needs: the head, the selected layer, and the selected token."""
        self._post(self._head_message())
        data, where = self._shown, self.selection
        if data.tokens and data.layers:
            self._post(self._column_message(where["token"]))
            self._post(self._block_message(data.layers.index(where["layer"]), last=True))

    def _post(self, message: Message) -> None:
        self.send(message[0], buffers=message[1])

    def _head_message(self) -> Message:
        specs, buffers = pack(self._shown.overview())
        return {"kind": "head", "version": self._version, "facts": self._facts(), "arrays": specs}, buffers

    def _block_message(self, layer: int, last: bool = False) -> Message:
        specs, buffers = pack(self._shown.block(layer))
        return {"kind": "block", "version": self._version, "layer": layer, "last": last, "arrays": specs}, buffers

    def _column_message(self, token: int) -> Message:
        specs, buffers = pack(self._shown.column(token))
        return {"kind": "column", "version": self._version, "token": token, "arrays": specs}, buffers

    def _facts(self) -> dict[str, Any]:
        data = self._shown
        recorded = not data.layers or data.values(0) is not None
        runs = self._session is not None
        return {
            **data.facts(), "title": self._title(), "runs": runs, "recipe": self._recipe(),
            "prompt": self._prompt, "parts": self._parts(),
            "why_not": "" if runs else "(opened from a trace; running needs a model)",
            "no_values": "" if recorded else "The trace holds no router logits; capture=\"routing\" keeps them.",
        }  # fmt: skip

    def _text(self) -> str:
        """What was fed, as text: without the special tokens that the tokenizer puts in front by itself."""
        tokenizer = None if self._session is None else self._session.model.tokenizer
        front = [] if tokenizer is None else tokenizer.encode("", special=True)
        trace = self.trace
        return "".join(trace.texts[len(front) if trace.ids[: len(front)] == list(front) else 0 :])

    def _parts(self) -> dict[int, str]:
        """Bytes, in hexadecimal, of the vocabulary ids here that are less than a character: they have no text."""
        tokenizer = None if self._session is None else self._session.model.tokenizer
        if tokenizer is None:
            return {}
        trace = self.trace
        bare = {id for id, text in zip(trace.ids, trace.texts, strict=True) if not text}
        return {id: tokenizer.piece(id).hex(" ").upper() for id in sorted(bare) if tokenizer.piece(id)}

    def _title(self) -> str:
        data = self._shown
        meta = data.trace.meta
        name = str(meta.get("model_name") or meta.get("model_type") or "model")
        name = "bundled model" if name == "tiny-colibri" else name
        kind = "" if self._session is not None else " (trace)"
        every = len(data.layers)
        layers, tokens = f"{every} layer{'s' * (every != 1)}", f"{data.tokens:,} token{'s' * (data.tokens != 1)}"
        return f"{name}{kind} · {layers} × {data.experts} experts, top-{data.top_k} · {tokens}"

    def _recipe(self) -> str:
        """Python that makes this explorer again, without its selection."""
        if self._session is None:
            return "import colibri_lab as lab\n\nexplorer = lab.RoutingExplorer(trace)  # the trace that you opened\n"
        path = Path(self._session.model.path)
        model = "" if "bundled" in path.parts else repr(str(path))
        tokenizer = self._session.model.tokenizer
        whole = tokenizer is not None and tokenizer.encode(self._prompt, special=True) == self.trace.ids
        fed = repr(self._prompt) if whole else str(self.trace.ids)
        feed = f"session.feed({fed})\n" if self.trace.n_tokens else ""
        session = f"session = lab.open({model}).session()\n{feed}"
        return f"import colibri_lab as lab\n\n{session}explorer = lab.RoutingExplorer(session)\n"

    # ---- without a kernel ----

    def to_html(self, path: str | PathLike[str]) -> Path:
        """Writes the view as one self-contained page that makes no request; returns its path. Raises FileError when it
        cannot be written.
        """
        return write_page(path, self._page())

    def _page(self) -> str:
        data = self._shown
        facts = {"runs": False, "why_not": "(a saved page; running needs Python)"}
        head, buffers = self._head_message()
        messages: list[Message] = [({**head, "facts": {**head["facts"], **facts}}, buffers)]
        messages += [self._block_message(layer) for layer in range(len(data.layers))] if data.tokens else []
        if data.tokens and not data.every_value:
            size = 4 * len(data.layers) * data.tokens * data.experts
            every = size <= _PAGE_VALUES_BELOW
            messages += [
                self._column_message(token) for token in (range(data.tokens) if every else [self.selection["token"]])
            ]
            if not every and not head["facts"]["no_values"]:
                messages[0][0]["facts"]["no_values"] = (
                    f"The router logits of all tokens ({size / 1e6:,.0f} MB) are not in this page; "
                    "the chosen experts are shown."
                )
        state = {"selection": self.selection, "colour_by": self.colour_by, "_status": IDLE}
        return view_page("explorer", self._title(), state, messages)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:  # type: ignore[override]
        """The live view, and for when no kernel runs a picture and three lines of text."""
        if self._data is None:
            return {"text/plain": repr(self)}
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        return {
            "text/plain": explorer_text(self._data, self.selection, self._title()),
            "image/png": explorer_png(self._data, self.selection, self._title()),
            "application/vnd.jupyter.widget-view+json": view,
        }

    def __repr__(self) -> str:
        if self._data is None:
            return "<RoutingExplorer, closed>"
        where = self.selection
        place = ", ".join(f"{name} {number}" for name, number in where.items())
        return f"<RoutingExplorer of {self._title()}; {place}>"

    def close(self) -> None:
        """Ends the view and lets go of its trace and session."""
        self._stop.set()
        self._data = self._session = None
        self.on_msg(self._on_message, remove=True)
        super().close()
