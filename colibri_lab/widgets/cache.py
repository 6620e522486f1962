"""CacheLab: which experts to keep, what that buys, and what the machine really does."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from colibri_lab.cache import POLICIES, Machine
from colibri_lab.errors import ArgumentError, ColibriError, FileError
from colibri_lab.trace import Trace, trace_of
from colibri_lab.widgets import _cell
from colibri_lab.widgets._modules import join_modules, style_sheet
from colibri_lab.widgets._wire import Message, message_of
from colibri_lab.widgets._work import IDLE, Working
from colibri_lab.widgets.cache_data import CacheData, sizes_of
from colibri_lab.widgets.cache_panels import Panels
from colibri_lab.widgets.cache_picture import cache_png, cache_text
from colibri_lab.widgets.html import view_page, write_page

__all__ = ["CacheLab"]

_SHOWN = ("lru", "lfu", "fifo", "arc", "static", "belady")  # policies with a button; a saved page has their curves
_PAGE_BYTES, _PAGE_WORK = 3_000_000, 1_000_000  # timelines of a saved page; tokens × layers × capacities of its curves
class CacheLab(Working, anywidget.AnyWidget):
    """Shows what a cache of experts would do for the tokens of `x`: a session, a trace, the path of one, or a real run
    with a budget (`lab.cache.live`), whose measured speed stands beside the predicted one.

    `policy`, `capacity` (experts), `scope`, `passes` ("each": token by token; "trace": as they were fed) and `prefetch`
    are the setting at the start; None is that of the real run, else "lru", half of the experts, "layer", "each".
    `setting` is a dict of these five, readable and settable; keys left out keep their value. `selection` is a dict of
    layer, token and expert. `simulation` is the simulated cache of the setting, `code` makes it again.

    `machine` (`lab.cache.measure_machine(model)`) lets it predict tokens/s, `runs` are more real runs to draw,
    `expert_bytes` (an int or (Lm, E)) is needed where no model is open, `profile` a trace whose busiest experts the
    static policy holds.

    Raises ArgumentError for anything else, NotCapturedError for a trace without expert ids.
    """

    _esm = join_modules("cache", "cache")
    _css = style_sheet("cache")

    setting = traitlets.Dict().tag(sync=True)
    selection = traitlets.Dict().tag(sync=True)
    _status = traitlets.Dict(default_value=dict(IDLE)).tag(sync=True)
    _in_cell = traitlets.Bool(False).tag(sync=True)

    _data: CacheData | None = None

    def __init__(
        self,
        x: Any,
        *,
        policy: str | None = None,
        capacity: int | None = None,
        scope: str | None = None,
        passes: str | None = None,
        prefetch: str = "none",
        machine: Any = None,
        runs: Sequence[Any] = (),
        expert_bytes: Any = None,
        profile: Any = None,
    ) -> None:
        self._work = threading.Lock()
        self._stop = threading.Event()
        self._data = data = _shown(x, machine, runs, expert_bytes, profile)
        self._panels: Panels | None = Panels(data)
        wish = {"policy": policy, "capacity": capacity, "scope": scope, "passes": passes, "prefetch": prefetch}
        self.setting = data.check({name: value for name, value in wish.items() if value is not None}, data.first())
        self.selection = data.start(self.setting)
        super().__init__()
        self.on_msg(self._on_message)
        _cell.remember(self)

    # ---- what is shown ----

    @property
    def trace(self) -> Trace:
        """The trace whose requests are served."""
        return self._shown.trace

    @property
    def simulation(self) -> Any:
        """The simulated cache of the setting, as `lab.cache.simulate` returns it."""
        return self._shown.simulate(self.setting)

    @property
    def expert_bytes(self) -> Any:
        """Bytes of an expert, one for all or (Lm, E); None where they are not known."""
        return self._shown.sizes

    @property
    def profile(self) -> Any:
        """The trace whose busiest experts the static policy holds; None: this trace itself."""
        return self._shown.profile

    @property
    def code(self) -> str:
        """The setting as one line of Python, for a view named `view`; "Copy as code" adds report and machine."""
        where = self.setting
        words = [f'policy="{where["policy"]}"', f"capacity={where['capacity']}", f'scope="{where["scope"]}"']
        words += ['passes="trace"'] if where["passes"] == "trace" else []
        words += ["expert_bytes=view.expert_bytes"] if self.expert_bytes is not None else []
        words += ["profile=view.profile"] if where["policy"] == "static" and self.profile is not None else []
        if where["prefetch"] == "look-ahead":
            words.append("prefetch=lab.cache.look_ahead(view.trace)")
        elif where["prefetch"] != "none":
            words.append(f'prefetch=lab.cache.plan(view.trace, "{where["prefetch"]}")')
        return f"lab.cache.simulate(view.trace, {', '.join(words)})"

    @property
    def _shown(self) -> CacheData:
        if self._data is None:
            raise ColibriError("this view is closed; make a new one: lab.CacheLab(...)")
        return self._data

    @traitlets.validate("setting")
    def _valid_setting(self, proposal: dict[str, Any]) -> dict[str, Any]:
        return self._shown.check(proposal["value"], self.setting)

    @traitlets.validate("selection")
    def _valid_selection(self, proposal: dict[str, Any]) -> dict[str, Any]:
        return self._shown.places.check(proposal["value"], self.selection)

    @traitlets.observe("setting", "selection")
    def _moved(self, change: Any) -> None:
        """Whoever moved them, what they show follows."""
        if self._data is not None and self.comm is not None:
            self._send_timeline()
            if change["name"] == "selection":
                self._send_panels()

    # ---- messages ----

    def _on_message(self, _: Any, request: Mapping[str, Any], __: Sequence[Any]) -> None:
        """A request of the browser; what takes long in a thread of its own."""
        if self._takes_long(request):
            threading.Thread(target=self._guarded, args=(request,), daemon=True, name="colibri-cache").start()
        else:
            self._guarded(request)

    def _takes_long(self, request: Mapping[str, Any]) -> bool:
        kind = request.get("kind")
        return kind == "panel" or (kind == "curve" and self._data is not None and not self._data.is_quick(self.setting))

    def handle(self, request: Mapping[str, Any]) -> None:
        """Answers one request of the browser, here and now; raises what goes wrong."""
        if self._data is None:
            return  # closed while the message was on its way
        kind = request.get("kind")
        if kind == "ready":
            self._post(({"kind": "head", "facts": self._facts()}, []))
            if self.trace.n_tokens and self._data.is_quick(self.setting):  # else the browser asks, and a thread answers
                self._post(self._curve(self.setting["policy"]))
            self._send_timeline()
            self._send_panels()
        elif kind == "curve":
            self._look_ahead()
            self._post(self._curve(str(request["policy"])))
        elif kind == "miss":
            found = self._data.next_miss(self.setting, self.selection, int(request["by"]))
            if found is not None:
                self.selection = found
            else:
                self.send({"kind": "nomiss", "by": request["by"]})
        elif kind == "panel":
            self._act(str(request["name"]), str(request["act"]))
        elif kind == "stop":
            self.stop()
        elif kind == "html":
            self.send({"kind": "html", "name": "cache-lab.html", "text": self._page()})
        else:
            raise ArgumentError(f"The view sent a request that is not known: {kind!r:.40}.")

    def _act(self, name: str, act: str) -> None:
        """A button of a panel. What it does may take a while and can be stopped."""
        self._refuse_a_second()
        panels = self._panels
        if panels is None:
            return
        with self._work, self._working(panels.doing(name, act, self.selection)) as work:
            work.begin()
            panels.act(name, act, self.selection, work.hear)
        self._send_panels()

    def _look_ahead(self) -> None:
        """What the setting fetches ahead, where that takes a while: shown, and Stop ends it and the prefetch."""
        data = self._shown
        if data.is_planned(self.setting):
            return
        with self._work:  # a second request waits for the first
            if not data.is_planned(self.setting):
                with self._working("Asking each router one layer ahead") as work:
                    work.begin()
                    data.plan("look-ahead", work.hear)
            if not data.is_planned(self.setting):  # stopped: whoever waits has nothing left to do
                self.setting = {"prefetch": "none"}
                return
        self._send_timeline()

    def _facts(self) -> dict[str, Any]:
        """What the browser is told first, with what "Copy as code" puts before and after the line of code."""
        data, after = self._shown, "print(simulation.report())"
        if data.machine is not None and data.sizes is not None:
            after += f"\nmachine = lab.cache.{data.machine!r}"
            after += f"\nprint(lab.cache.predict(simulation, machine, resident_bytes={data.other_bytes}))"
        return {**data.facts(), "recipe": ["import colibri_lab as lab\n\nsimulation = ", f"\n{after}\n"]}

    def _curve(self, policy: str) -> Message:
        return {"kind": "curve", **self._shown.curve(self.setting, policy)}, []

    def _send_timeline(self) -> None:
        where = self.selection
        if where["layer"] is not None and self.trace.n_tokens and self._shown.is_planned(self.setting):
            self._post(self._timeline(self.setting, where["layer"], where["token"]))

    def _timeline(self, setting: Mapping[str, Any], layer: int, token: int | None) -> Message:
        return message_of("timeline", self._shown.timeline(setting, layer, token))

    def _send_panels(self) -> None:
        for message in self._panel_messages():
            self._post(message)

    def _panel_messages(self) -> list[Message]:
        """What the panels below the timeline show, one message each: see `cache_panels`."""
        return [
            (head | {"name": name}, buffers)
            for name, found in (self._panels.shown(self.selection) if self._panels is not None else ())
            for head, buffers in [message_of("panel", found)]
        ]

    def _post(self, message: Message) -> None:
        self.send(message[0], buffers=message[1])

    # ---- without a kernel ----

    def to_html(self, path: str | PathLike[str]) -> Path:
        """Writes the view as one self-contained page that makes no request; returns its path. It holds the curves of
        the usual policies and of every one that was looked at, and timelines of as many capacities and layers as take
        little room. Raises FileError when it cannot be written.
        """
        return write_page(path, self._page())

    def _page(self) -> str:
        data, where = self._shown, self.selection
        messages: list[Message] = [({"kind": "head", "facts": self._facts()}, [])]
        if data.trace.n_tokens:
            messages += self._page_curves()
            messages += self._page_timelines() if where["layer"] is not None else []
        messages += self._panel_messages()
        state = {"setting": self.setting, "selection": where, "_status": IDLE, "_in_cell": False}
        return view_page("cache", f"Cache Lab: {data.title()}", state, messages)

    def _page_curves(self) -> list[Message]:
        """Of the policies with a button; of the other scope too, where that is little work."""
        data, here = self._shown, self.setting
        other = data.check({"scope": "global" if here["scope"] == "layer" else "layer"}, here)
        little = data.trace.n_tokens * len(data.trace.moe_layers) * len(data.capacities(other)) < _PAGE_WORK
        return [
            ({"kind": "curve", **data.curve(setting, policy)}, [])
            for setting in ((here, other) if little else (here,))
            for policy in dict.fromkeys((here["policy"], *_SHOWN, *(POLICIES if little and setting is here else ())))
            if policy != "static" or here["prefetch"] == "none"
        ]

    def _page_timelines(self) -> list[Message]:
        """Of the selected layer at every capacity, then of the other layers, until they take too much room."""
        data, where, here = self._shown, self.selection, self.setting
        token, layers = where["token"], data.trace.moe_layers
        around = sorted(data.capacities(here), key=lambda capacity: abs(capacity - here["capacity"]))
        wanted = [({**here, "capacity": capacity}, where["layer"]) for capacity in around]
        wanted += [(here, layer) for layer in layers if layer != where["layer"]]
        out: list[Message] = []
        room = _PAGE_BYTES
        for setting, layer in wanted:
            message = self._timeline(setting, layer, token)
            room -= sum(map(len, message[1]))
            if out and room < 0:
                break
            out.append(message)
        return out

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:  # type: ignore[override]
        """The live view, and for when no kernel runs a picture and a few lines of text."""
        if self._data is None:
            return {"text/plain": repr(self)}
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        return {
            "text/plain": cache_text(self._data, self.setting, self.selection),
            "image/png": cache_png(self._data, self.setting, self.selection),
            "application/vnd.jupyter.widget-view+json": view,
        }

    def __repr__(self) -> str:
        if self._data is None:
            return "<CacheLab, closed>"
        return f"<CacheLab of {self._data.title()}: {self.setting['policy']}, {self.setting['capacity']} experts>"

    def close(self) -> None:
        """Ends the view and lets go of the trace."""
        if self._data is not None:  # else it was refused when it was made, or is closed
            self.stop()
        self._data = self._panels = None
        self.on_msg(self._on_message, remove=True)
        super().close()


def _check(machine: Any, runs: Any, profile: Any) -> None:
    """Raises ArgumentError for what is no machine, no real runs, or no trace to profile."""
    if machine is not None and not isinstance(machine, Machine):
        makes = "lab.cache.measure_machine(model) makes one"
        raise ArgumentError(f"machine is a lab.cache.Machine, not {type(machine).__name__}; {makes}")
    if not isinstance(runs, Sequence) or not all(hasattr(run, "tokens_per_s") for run in runs):
        raise ArgumentError("runs is a list of real runs, each made by lab.cache.live")
    if profile is not None:
        trace_of(profile)


def _shown(x: Any, machine: Any, runs: Sequence[Any], sizes: Any, profile: Any) -> CacheData:
    session = None
    if isinstance(x, str | PathLike):
        import colibri_lab

        if Path(x).is_dir():
            opened = f'lab.CacheLab(lab.open("{x}").session(capture="routing"))'
            raise FileError(f"'{x}' is a folder, not a recording; a checkpoint is opened first: {opened}")
        x = colibri_lab.load_trace(x)
    elif hasattr(x, "tokens_per_s") and hasattr(x, "simulation"):  # a real run
        machine, runs, x = machine or x.machine, [x, *runs], x.trace
    elif hasattr(x, "tape") and hasattr(x, "feed"):
        session = x
    elif not isinstance(x, Trace):
        is_model = callable(getattr(x, "session", None))
        hint = '; make a session of it: model.session(capture="routing")' if is_model else ""
        raise ArgumentError(f"CacheLab takes a session, a trace, its path or a real run, not {type(x).__name__}{hint}")
    trace = trace_of(x)
    _check(machine, runs, profile)
    if sizes is None and runs:
        sizes = runs[0].expert_bytes
    if sizes is None and trace.model is not None:
        sizes = sizes_of(trace)
    return CacheData(trace, session=session, machine=machine, runs=runs, sizes=sizes, profile=profile)
