"""TokenStepper: a debugger's view of a walk through the model: where am I, why did it stop, what comes next?

It drives a `Stepper`. What is changed in the view is changed in a fork, so that the original runs on beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from colibri_lab.errors import ArgumentError, BusyError, ColibriError
from colibri_lab.widgets import _cell
from colibri_lab.widgets._modules import join_modules, style_sheet
from colibri_lab.widgets._wire import Message, pack
from colibri_lab.widgets._work import IDLE, Stopped, Work, Working
from colibri_lab.widgets.html import view_page, write_page
from colibri_lab.widgets.stepper_data import (
    Walks,
    bounds,
    check_look,
    comparison,
    first_choice,
    frame,
    head,
    parse_numbers,
    rank,
    stage_rank,
)
from colibri_lab.widgets.stepper_picture import stepper_png, stepper_text
from colibri_lab.widgets.stepper_runs import change_routing, change_values, changes, come, recipe, stepper_of, title

__all__ = ["TokenStepper"]

_RETRY_SECONDS = 0.2
_KEPT_BYTES = 24 << 20  # frames of the walk that a saved page may carry; the oldest are forgotten first
_BUSY = "A cell is running on this session. Looking at what is shown works; this step waits its turn."
_AT_ONCE = ("ready", "seen", "stop", "html")  # requests that are answered where they arrive; others in a thread
UNITS = ("stage", "expert", "layer", "token")


class TokenStepper(Working, anywidget.AnyWidget):
    """Walks a prompt through the model, stage by stage, and shows the buffers of every moment.

    `x` is a stepper, a session (its tokens are walked through anew in a session of its own; or `text`, which is then
    fed to this session), or a text (for the bundled model). `chunk` is that of `session.stepper`: None takes all tokens
    as one pass, so that many rows meet at an expert.

    `selection` is a dict of layer, token (row) and expert, readable and settable. `unit` is "stage", "expert", "layer"
    or "token". `stepper` is the walk, `forked` its fork or None; `look` says whose buffers are shown, "original" or
    "fork". Both may be used from Python; the view follows when the cell ends, or at `refresh()`.

    Raises ArgumentError for anything else, and whatever making the stepper raises.
    """

    _esm = join_modules("stepper", "stepper")
    _css = style_sheet("stepper")

    selection = traitlets.Dict().tag(sync=True)
    unit = traitlets.Enum(UNITS, default_value="stage").tag(sync=True)
    look = traitlets.Enum(("original", "fork"), default_value="original").tag(sync=True)
    _status = traitlets.Dict(default_value=dict(IDLE)).tag(sync=True)
    _in_cell = traitlets.Bool(False).tag(sync=True)

    def __init__(self, x: Any, text: str | None = None, chunk: int | None = None) -> None:
        self._walk: Walks | None = None
        self._fork: Any = None
        self._compared: Message | None = None
        self._posted: Message | None = None  # the comparison that the browser has
        self._work = threading.Lock()
        self._stop = threading.Event()
        self._frames: list[tuple[Any, Message]] = []
        self._shown: Any = None
        self._moving = False
        walk = stepper_of(x, text, chunk)
        self._walk = walk
        _, stop = bounds(walk)
        layers = walk.session.model.config.moe_layers
        self.selection = {"layer": layers[0] if layers else 0, "token": stop - 1, "expert": 0}
        self._arrive()
        super().__init__()
        self.on_msg(self._on_message)
        self._after_cells(True)
        _cell.remember(self)

    # ---- what is shown ----

    @property
    def stepper(self) -> Any:
        """The walk: the original."""
        if self._walk is None:
            raise ColibriError("this view is closed; make a new one: lab.TokenStepper(...)")
        return self._walk

    @property
    def forked(self) -> Any:
        """The fork, a stepper too; None when there is none."""
        return self._fork

    @property
    def code(self) -> str:
        """One line of Python that leads a stepper from the start to this place."""
        return str(self._frame()[0]["code"])

    @property
    def _run(self) -> Any:
        """The run whose buffers are shown, which Step drives; the other follows."""
        return self._fork if self.look == "fork" and self._fork is not None else self.stepper

    @traitlets.validate("selection")
    def _valid_selection(self, proposal: dict[str, Any]) -> dict[str, int]:
        wish = dict(proposal["value"])
        unknown = set(wish) - {"layer", "token", "expert"}
        if unknown:
            raise ArgumentError(f"A selection has layer, token and expert, not {', '.join(sorted(map(str, unknown)))}.")
        old = self.selection
        full = check_look(self.stepper, {**old, **wish})
        moved = any(full[key] != old.get(key) for key in ("layer", "token"))
        if moved and "expert" not in wish and old:
            with suppress(BusyError):
                full["expert"] = _or(first_choice(self._run, full["layer"], full["token"]), full["expert"])
        return full

    @traitlets.observe("selection", "look")
    def _selected(self, _: Any) -> None:
        if self._walk is not None and not self._moving and self._shown is not None and not self._work.locked():
            try:
                self._patiently(self._post_frame, wait=False)
            except BusyError:
                self._status = {"state": "busy", "text": _BUSY}

    # ---- moving ----

    def step(self, unit: str | None = None) -> Any:
        """On by one unit ("stage", "expert", "layer", "token"; None: `unit`). Returns where it stands. At the end it
        raises ArgumentError, BusyError when this view is already working, and whatever the stepper raises.
        """
        wanted = unit or self.unit

        def go(run: Any, work: Work) -> None:
            if run.at_end:
                raise ArgumentError("the walk is at its end; Back goes back")
            run.step(wanted, progress=work.hear)

        return self._move(f"Stepping by one {wanted}", go)

    def back(self, unit: str | None = None) -> Any:
        """Back by one unit: rows are abandoned and the pass is run anew up to there. Raises as `step` does."""
        wanted = unit or self.unit

        def go(run: Any, _: Work) -> None:
            if run.at_start:
                raise ArgumentError("the walk is at its start")
            run.back(wanted)

        return self._move(f"Going back by one {wanted}", go)

    def run_to(self, condition: str | None = None) -> Any:
        """On to the next place where `condition` or an enabled breakpoint holds; else to the end, which is said.

        Raises ConditionError, with the column, before anything runs.
        """
        found = True

        def go(run: Any, work: Work) -> None:
            nonlocal found
            found = run.run_to(condition, progress=work.hear) is not None

        what = f"Running to {condition}" if condition else "Running to the next breakpoint"
        where = self._move(what, go)
        if not found:
            self._status = {"state": "idle", "text": f"{condition or 'No breakpoint'} was not met before the end."}
        return where

    def finish(self) -> Any:
        """On to the end, past breakpoints."""
        return self._move("Running to the end", lambda run, work: run.finish(progress=work.hear))

    def go_to(self, stage: str, layer: int | None = None, expert: int | None = None) -> Any:
        """To a place of this pass: runs on to one that is ahead, goes back to one behind."""
        wanted = stage_rank(stage, layer, expert)
        return self._move("Going there", lambda run, work: come(run, (run.where.pass_index, *wanted), work))

    def refresh(self) -> None:
        """Shows where the stepper stands now, after it was moved from Python."""
        self._arrive()
        self._patiently(self._post_frame)
        self._status = dict(IDLE)

    def _move(self, what: str, go: Callable[[Any, Work], None]) -> Any:
        self._refuse_a_second()
        with self._work, self._working(what) as work:
            run = self._run
            other = self.stepper if run is self._fork else self._fork
            work.left = "It stands where it got to."
            try:
                self._patiently(lambda: go(run, work))
            finally:
                self._settle(run, other)
        return self._run.where

    def _settle(self, run: Any, other: Any) -> None:
        """After a move: the other run comes along, and the view shows the place."""
        if self._walk is None:
            return
        if other is not None:
            self._patiently(lambda: come(other, rank(run.where), None))
        with self.hold_sync():  # the picture first, the selection behind it
            self._arrive()
            self._patiently(self._post_frame)

    def _arrive(self) -> None:
        """The selection goes to where the run stands: its layer, a token of its pass."""
        run = self._run
        where = run.where
        start, stop = bounds(run)
        wish = dict(self.selection)
        if where.layer is not None:
            wish["layer"] = where.layer
        elif where.stage in ("norm", "logits"):
            wish["layer"] = run.session.model.config.num_hidden_layers - 1
        if where.reason not in ("", "end") and where.tokens and wish["token"] not in where.tokens:
            wish["token"] = where.tokens[-1]
        if not start <= wish["token"] < stop:
            wish["token"] = stop - 1
        if where.expert is not None:
            wish["expert"] = where.expert
        else:
            with suppress(BusyError):
                wish["expert"] = _or(first_choice(run, wish["layer"], wish["token"]), wish["expert"])
        self._moving = True
        try:
            self.selection = wish
        finally:
            self._moving = False

    # ---- changing ----

    def fork(self) -> Any:
        """Makes the fork, at the place where the walk stands; returns it. What is changed in the view is changed there.

        Raises ArgumentError when there is one already.
        """
        if self._fork is not None:
            raise ArgumentError("there is a fork already; drop_fork() forgets it")
        return self._change("Forking", lambda: None)

    def drop_fork(self) -> None:
        """Forgets the fork with its changes."""
        self._fork = self._compared = None
        self._moving = True
        self.look = "original"
        self._moving = False
        self._arrive()
        self._patiently(self._post_frame)

    def edit_routing(self, layer: int, token: int, experts: Sequence[int], gates: Sequence[float]) -> Any:
        """In the fork (made if there is none): these experts and gates for one token. Gates alone are written into
        their buffer; other experts are forced, which needs the router as the last stage or ahead. Returns the Edit.
        """
        return self._change("Changing the routing", lambda: change_routing(self._fork, layer, token, experts, gates))

    def edit_values(self, path: str, token: int, values: Sequence[float]) -> Any:
        """In the fork: the first values of one token's row of a buffer. Returns the Edit."""
        return self._change("Changing values", lambda: change_values(self._fork, path, token, values))

    def switch_off(self, layer: int, expert: int) -> Any:
        """In the fork: the expert contributes nothing. Returns the Edit."""
        return self._change("Switching off", lambda: self._fork.ablate(layer, expert))

    def undo(self) -> Any:
        """Takes back the last change: of the fork while it has any of its own, else of the original. Returns it."""

        def change() -> Any:
            own = self._fork is not None and len(self._fork.edits) > len(self.stepper.edits)
            return (self._fork if own else self.stepper).undo()

        return self._change("Undoing", change, fork=False)

    def compare(self) -> Any:
        """What the fork changes up to the end of the walk: `stepper.compare(forked)`, which is also shown."""
        if self._fork is None:
            raise ArgumentError("there is no fork to compare with; fork() makes one")
        found = self.stepper.compare(self._fork)
        facts, arrays = comparison(found, self.stepper.passes[0][0])
        specs, buffers = pack(arrays)
        self._compared = ({"kind": "compared", **facts, "arrays": specs}, buffers)
        return found

    def _change(self, what: str, change: Callable[[], Any], fork: bool = True) -> Any:
        """One change: in a fork, which is dropped again when it was made for a change that is refused."""
        self._refuse_a_second()
        with self._work, self._working(what):
            made = fork and self._fork is None
            if made:
                self._fork = self._patiently(lambda: self.stepper.fork())
            try:
                done = self._patiently(change)
            except BaseException:
                if made:
                    self._fork = None
                raise
            self._moving = True
            self.look = "fork" if fork else self.look
            self._moving = False
            if self._fork is not None:
                self._tell({"state": "working", "text": "Running both to the end, to compare"})
                self._patiently(self.compare)
            self._arrive()
            self._patiently(self._post_frame)
        return self._fork if fork and done is None else done

    # ---- work ----

    def _patiently(self, call: Callable[[], Any], wait: bool = True) -> Any:
        """Calls; while another thread is inside the session, says so and waits its turn, until Stop."""
        waited = False
        while True:
            try:
                done = call()
            except BusyError as error:
                if not wait or "without this stepper" in str(error):
                    raise
                if not waited:
                    self._status = {"state": "busy", "text": _BUSY}
                waited = True
                if self._stop.wait(_RETRY_SECONDS):
                    raise Stopped from None
            else:
                return done

    def _after_cells(self, on: bool) -> None:
        """In a notebook: looks after every cell whether the stepper was moved or changed there."""
        with suppress(ImportError, ValueError):
            from IPython import get_ipython

            shell = get_ipython()
            if shell is not None and hasattr(shell, "kernel"):
                (shell.events.register if on else shell.events.unregister)("post_run_cell", self._look_again)

    def _look_again(self, *_: Any) -> None:
        with suppress(ColibriError):
            if self._walk is not None and not self._work.locked() and self._state() != self._shown:
                self.refresh()

    def _state(self) -> Any:
        """What a picture depends on, apart from the selection."""
        run = self._run
        points = [(p.name, p.condition, p.enabled, p.hits) for p in run.breakpoints.values()]
        return (
            rank(run.where),
            run.where.reason,
            self.look,
            changes(self.stepper, self._fork),
            list(run.watches),
            points,
        )

    # ---- messages ----

    def _on_message(self, _: Any, request: Mapping[str, Any], __: Sequence[Any]) -> None:
        """A request of the browser; all but the shortest in a thread of its own."""
        if request.get("kind") in _AT_ONCE:
            self._guarded(request)
        else:
            threading.Thread(target=self._guarded, args=(request,), daemon=True, name="colibri-stepper").start()

    def _guarded(self, request: Mapping[str, Any]) -> None:
        try:
            super()._guarded(request)
        finally:
            if request.get("kind") not in _AT_ONCE:
                self._post(({"kind": "done", "number": request.get("number", 0)}, []))

    def handle(self, request: Mapping[str, Any]) -> None:
        """Answers one request of the browser, here and now; raises what goes wrong."""
        if self._walk is None:
            return  # closed while the message was on its way
        kind = str(request.get("kind"))
        simple: dict[str, Callable[[], Any]] = {
            "ready": self._send_all, "stop": self.stop, "finish": self.finish, "undo": self.undo, "fork": self.fork,
            "drop": self.drop_fork, "refresh": self.refresh,
        }  # fmt: skip
        if kind in simple:
            simple[kind]()
        elif kind in ("step", "back"):
            getattr(self, kind)(str(request["unit"]))
        elif kind == "run_to":
            self.run_to(str(request["condition"]).strip() or None)
        elif kind == "go_to":
            self.go_to(str(request["stage"]), request.get("layer"), request.get("expert"))
        elif kind == "break":
            self._breakpoint(str(request["what"]), str(request["name"]))
        elif kind == "watch":
            text = str(request["text"]).strip()
            self._both("watch" if request["add"] else "unwatch", text)
        elif kind == "routing":
            experts = [int(e) for e in parse_numbers(request["experts"])]
            self.edit_routing(int(request["layer"]), int(request["token"]), experts, parse_numbers(request["gates"]))
        elif kind == "values":
            self.edit_values(str(request["path"]), int(request["token"]), parse_numbers(request["values"]))
        elif kind == "off":
            self.switch_off(int(request["layer"]), int(request["expert"]))
        elif kind == "html":
            self.send({"kind": "html", "name": "token-stepper.html", "text": self._page()})
        else:
            raise ArgumentError(f"The view sent a request that is not known: {kind!r:.40}.")

    def _breakpoint(self, what: str, name: str) -> None:
        """Adds a breakpoint by its condition; removes, enables or disables one by its name: in both runs."""
        if what not in ("add", "remove", "enable", "disable"):
            raise ArgumentError(f"nothing can {what!r:.40} a breakpoint")
        for run in (self.stepper, self._fork):
            if run is not None:
                getattr(run.breakpoints, what)(name)
        self._patiently(self._post_frame)

    def _both(self, what: str, text: str) -> None:
        for run in (self.stepper, self._fork):
            if run is not None:
                self._patiently(partial(getattr(run, what), text))
        self._patiently(self._post_frame)

    def _send_all(self) -> None:
        self._post(self._head())
        self._posted = None
        try:
            self._post_frame()
        except BusyError:
            self._status = {"state": "busy", "text": _BUSY}
            if self._frames:
                self._post(self._frames[-1][1])

    def _post(self, message: Message) -> None:
        if self._walk is not None:
            self.send(message[0], buffers=message[1])

    def _post_frame(self) -> None:
        """Sends the picture of this moment, and keeps it for a saved page."""
        message = self._frame()
        self._shown = self._state()
        self._keep(self._shown, message)
        self._post(message)
        if self._compared is not None and self._compared is not self._posted:
            self._posted = self._compared
            self._post(self._compared)

    def _frame(self) -> Message:
        facts, arrays = frame(self._run, self.selection)
        if self._fork is not None:  # a hit in either run is a hit
            for point in facts["breakpoints"]:
                both = [run.breakpoints[point["name"]].hits for run in (self.stepper, self._fork)]
                point["hits"] = sum(both)
        specs, buffers = pack(arrays)
        run = {"look": self.look, "edits": changes(self.stepper, self._fork), "forked": self._fork is not None}
        return {"kind": "frame", **facts, "run": run, "arrays": specs}, buffers

    def _head(self) -> Message:
        return {"kind": "head", **head(self.stepper), "title": title(self.stepper), "recipe": recipe(self.stepper)}, []

    def _keep(self, state: Any, message: Message) -> None:
        """One frame for each place, the last look at it; in the order of the walk as it was gone."""
        if self._frames and self._frames[-1][0] == state:
            self._frames.pop()
        self._frames.append((state, message))
        total = 0
        for number in range(len(self._frames) - 1, -1, -1):
            total += sum(len(part) for part in self._frames[number][1][1])
            if total > _KEPT_BYTES and number < len(self._frames) - 1:
                del self._frames[: number + 1]
                return

    # ---- without a kernel ----

    def to_html(self, path: str | PathLike[str]) -> Path:
        """Writes the walk so far as one self-contained page that steps through it without a kernel; returns its path.

        The page says how many moments it holds; of a long walk the oldest are left out. Raises FileError.
        """
        return write_page(path, self._page())

    def _page(self) -> str:
        messages: list[Message] = [self._head()]
        if self._compared is not None:
            messages.append(self._compared)
        if not self._frames:
            self._keep(self._state(), self._frame())
        messages += [message for _, message in self._frames]
        state = {"selection": self.selection, "unit": self.unit, "look": self.look, "_status": IDLE}
        return view_page("stepper", title(self.stepper), state, messages)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:  # type: ignore[override]
        """The live view, and for when no kernel runs a picture and a few lines of text."""
        if self._walk is None:
            return {"text/plain": repr(self)}
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        facts, arrays = frame(self._run, self.selection)
        facts["edits"] = changes(self.stepper, self._fork)
        return {
            "text/plain": stepper_text(head(self.stepper), facts, arrays, title(self.stepper)),
            "image/png": stepper_png(head(self.stepper), facts, arrays, title(self.stepper)),
            "application/vnd.jupyter.widget-view+json": view,
        }

    def __repr__(self) -> str:
        if self._walk is None:
            return "<TokenStepper, closed>"
        return f"<TokenStepper of {title(self.stepper)}; {self._walk.where}>"

    def close(self) -> None:
        """Ends the view and lets go of its stepper and fork."""
        self._stop.set()
        self._after_cells(False)
        self._walk = self._fork = self._compared = None
        self._frames = []
        self.on_msg(self._on_message, remove=True)
        super().close()


def _or(value: int | None, other: int) -> int:
    return other if value is None else value
