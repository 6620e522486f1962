"""Sessions: feeding, passes, limits, interrupts, threads, and files that change under a run."""

from __future__ import annotations

import copy
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab import progress
from colibri_lab.testing import canonical, tiny_model

IDS = [0, 5, 9, 13, 21, 34, 55, 7, 8, 11]


@pytest.fixture(scope="module")
def model() -> lab.Model:
    return lab.open()


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> lab.Model:
    """Large enough that 2,000 tokens take much longer than the 50 ms after which the tests interrupt."""
    folder = tiny_model(
        tmp_path_factory.mktemp("slow"), hidden=384, expert_width=384, layers=4, head_dim=96,
        config={"max_position_embeddings": 2048},
    )  # fmt: skip
    return lab.open(folder)


# ---- feed ----


def test_feed_takes_text_and_ids_of_every_kind(model: lab.Model) -> None:
    """A text, a list, a tuple, any integer array, a numpy integer in a list: all the same ids, all the same logits."""
    text = "In the beginning"
    first = model.session(max_tokens=32)
    passed = first.feed(text)
    ids = first.ids
    assert ids[0] == model.tokenizer.bos_id and (passed.start, passed.stop, passed.ids) == (0, len(ids), ids)
    for form in (
        ids, tuple(ids), np.array(ids),
        np.array(ids, np.uint8 if max(ids) < 256 else np.uint16), np.array(ids, np.int64)[::1],
        [np.int32(i) for i in ids], np.repeat(ids, 2)[::2],
    ):  # fmt: skip
        session = model.session(max_tokens=32)
        assert session.feed(form).logits.tobytes() == passed.logits.tobytes() and session.ids == ids


def test_a_text_gets_special_tokens_only_in_an_empty_session(model: lab.Model) -> None:
    """The start token stands once, at the beginning; ids are taken as they are."""
    session = model.session(max_tokens=64)
    session.feed("In the")
    session.feed(" beginning")
    session.feed("In the")
    bos = model.tokenizer.bos_id
    assert session.ids[0] == bos and session.ids.count(bos) == 1
    session.reset()
    session.feed([5, 6])
    assert session.ids == [5, 6]
    session.reset()
    session.feed("In the")
    assert session.ids.count(bos) == 1
    assert "".join(session.texts).endswith("In the") and len(session.texts) == len(session.ids)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ([], "nothing to feed"),
        ("", "nothing to feed"),  # a text without tokens, once the session has begun
        ([[1, 2]], "flat row"),
        ([1.0, 2.0], "float64"),
        ([True], "bool"),
        ([1, [2]], "flat row|nested"),
        (None, "flat row"),
        (3, "flat row"),
        ([-1], "-1"),
        ([2048], "2048"),
        ([2**40], "no token of any vocabulary"),
        ([0, 5, 99999], "99999"),
        (["a"], "flat row"),
        (b"ab", "flat row"),
        (np.array([1.5]), "float64"),
        (np.zeros((2, 2), int), r"\(2, 2\)"),
    ],
)
def test_G3_wrong_ids_are_refused_and_leave_the_session_as_it_was(model: lab.Model, wrong, sentence) -> None:
    """A bad value is named; nothing was appended, and the next feed works."""
    session = model.session(max_tokens=32)
    session.feed(IDS)
    with pytest.raises(lab.ArgumentError, match=sentence):
        session.feed(wrong)
    assert session.ids == IDS and len(session.passes) == 1
    session.feed([1])
    assert len(session.ids) == len(IDS) + 1


def test_a_model_without_a_tokenizer_takes_ids_only(tmp_path: Path) -> None:
    """A text is refused with the folder's name; texts are empty."""
    session = lab.open(tiny_model(tmp_path / "m")).session(max_tokens=8)
    with pytest.raises(lab.ArgumentError, match=r"no tokenizer\.json"):
        session.feed("x")
    with pytest.raises(lab.UnsupportedError, match=r"no tokenizer\.json"):
        session.chat([{"role": "user", "content": "x"}])
    session.feed([1, 2])
    assert session.texts == ["", ""]


def test_chunks_give_the_bytes_of_one_pass(model: lab.Model) -> None:
    """At once, token by token, in pieces, with one thread or two: the same bytes in every tap of the session."""
    whole = model.session(capture="all", max_tokens=16)
    whole.feed(IDS)
    for chunks, threads in (([1] * 10, 1), ([3, 4, 3], 2), ([9, 1], 1)):
        session, start = model.session(capture="all", max_tokens=16, threads=threads), 0
        for n in chunks:
            session.feed(IDS[start : start + n])
            start += n
        for path in session.tape.stored():
            if ".dispatch." not in path:
                assert canonical(session.tape[path]) == canonical(whole.tape[path]), path
        assert canonical(session.logits) == canonical(whole.logits)


# ---- passes and logits ----


def test_passes_keep_their_place_and_the_logits_you_hold(model: lab.Model) -> None:
    """A Pass you hold keeps its logits; one that nobody held asks for a capture that keeps them."""
    session = model.session(max_tokens=32)
    first = session.feed(IDS[:4])
    session.feed(IDS[4:6])
    session.feed(IDS[6:])
    assert [(p.start, p.stop) for p in session.passes] == [(0, 4), (4, 6), (6, 10)] and len(session.passes) == 3
    assert session.passes[0] is first and session.passes[-1].ids == IDS[6:] and len(session.passes[1:]) == 2
    own = model.session(max_tokens=8)
    own.feed(IDS[:4])
    assert np.array_equal(first.logits, own.logits)
    assert np.array_equal(session.passes[2].logits, session.logits)
    with pytest.raises(lab.NotCapturedError, match=r'pass 1: hold the Pass .* capture="all" or "logits"'):
        session.passes[1].logits  # noqa: B018
    with pytest.raises(IndexError):
        session.passes[3]


def test_captured_logits_serve_old_passes(model: lab.Model) -> None:
    """With capture "logits" an old pass has them although nobody held it."""
    session = model.session(capture=["routing", "logits"], max_tokens=16)
    expected = session.feed(IDS[:4]).logits.copy()
    session.feed(IDS[4:])
    assert np.array_equal(session.passes[0].logits, expected)


def test_an_empty_session_has_no_logits(model: lab.Model) -> None:
    """Asking for them, or generating, says to feed first; after a reset as well."""
    session = model.session(max_tokens=8)
    for _ in range(2):
        with pytest.raises(lab.ArgumentError, match="feed it first"):
            session.logits  # noqa: B018
        with pytest.raises(lab.ArgumentError, match="feed it first"):
            session.generate(3)
        session.feed([1])
        session.reset()
    assert session.ids == [] and len(session.passes) == 0


def test_a_pass_from_before_a_reset_is_told_apart(model: lab.Model) -> None:
    """Its logits stay, its tape says that it was abandoned, and the new timeline has passes of its own."""
    session = model.session(max_tokens=16)
    old = session.feed(IDS[:4])
    expected = old.logits.copy()
    session.reset()
    new = session.feed(IDS[4:])
    with pytest.raises(lab.NotCapturedError, match="abandoned by reset"):
        old.tape.gates(0)
    assert np.array_equal(old.logits, expected) and session.passes[0] is new and new is not old


def test_gate_modes_are_named_and_change_the_gates(model: lab.Model) -> None:
    """The model's own rule by default; an unknown one is refused with the list."""
    own = model.session(max_tokens=8)
    own.feed(IDS[:3])
    raw = model.session(max_tokens=8, gate_mode="raw_logits")
    raw.feed(IDS[:3])
    chosen = np.take_along_axis(raw.tape.router_logits(0), raw.tape.expert_ids(0), axis=1)
    assert np.array_equal(raw.tape.gates(0), chosen) and own.gate_mode == "softmax_renormalised"
    same = model.session(max_tokens=8, gate_mode="softmax_renormalised")
    same.feed(IDS[:3])
    assert same.logits.tobytes() == own.logits.tobytes()
    assert raw.trace().meta["gate_rule"] == "raw_logits"
    with pytest.raises(lab.ArgumentError, match=r"no gate mode 'softmx'; there are 'softmax', 'softmax_renorm"):
        model.session(gate_mode="softmx")


# ---- limits ----


def test_capacity_names_both_numbers_and_leaves_the_session_usable(model: lab.Model) -> None:
    """Beyond max_tokens nothing is appended; what fits still does; a full session can be read and reset."""
    session = model.session(capture="all", max_tokens=12)
    assert session.max_tokens == 12
    session.feed(IDS)
    before = session.tape.gates(3).tobytes()
    with pytest.raises(lab.CapacityError, match=r"3 .*10.*12|3 more tokens after 10"):
        session.feed([1, 2, 3])
    assert session.ids == IDS and session.tape.gates(3).tobytes() == before
    session.feed([1, 2])
    with pytest.raises(lab.CapacityError):
        session.feed([1])
    assert session.trace().ids == [*IDS, 1, 2]
    session.reset()
    assert session.feed([1] * 12).stop == 12


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "8", True, 2**40])
def test_max_tokens_and_threads_are_positive_numbers(model: lab.Model, wrong) -> None:
    """Anything else is refused by name."""
    with pytest.raises(lab.ArgumentError, match="max_tokens must be a positive whole number"):
        model.session(max_tokens=wrong)
    with pytest.raises(lab.ArgumentError, match="threads"):
        model.session(threads=wrong)


def test_more_tokens_than_the_model_was_made_for_is_one_warning(model: lab.Model) -> None:
    """An explicit larger number is allowed and warned of once; the default stays within."""
    with pytest.warns(UserWarning, match="max_tokens=600 is more than the 512 positions") as seen:
        session = model.session(max_tokens=600)
    assert len(seen) == 1 and session.max_tokens == 600
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.session().max_tokens == 512
        assert model.session(max_tokens=512).max_tokens == 512


def test_what_cannot_fit_is_refused_in_bytes(model: lab.Model) -> None:
    """A plan beyond the machine's memory is refused at the start with the bytes it needs."""
    with pytest.raises(lab.OutOfMemoryError, match="bytes"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.session(capture="all", max_tokens=2**31 - 1)


def test_memory_tells_what_is_reserved(model: lab.Model) -> None:
    """The tape grows with capture; the KV cache is part of it."""
    small, large = (model.session(capture=c, max_tokens=32).memory() for c in ("none", "all"))
    assert small["kv_cache"] == large["kv_cache"] == 32 * 6 * 2 * 2 * 32 * 4
    assert small["kv_cache"] <= small["tape"] < large["tape"] <= large["reserved"] and large["copied_bytes"] == 0


# ---- progress and interrupts ----


def test_progress_is_called_with_the_fraction_done(slow: lab.Model) -> None:
    """From 0 upwards, below 1, on the calling thread."""
    seen: list[tuple[float, int]] = []
    session = slow.session(max_tokens=512)
    session.feed([3] * 512, progress=lambda done: seen.append((done, threading.get_ident())))
    fractions = [done for done, _ in seen]
    assert fractions == sorted(fractions) and fractions[0] == 0 and fractions[-1] < 1
    assert {thread for _, thread in seen} == {threading.get_ident()}


def test_an_exception_in_progress_ends_the_pass(model: lab.Model) -> None:
    """It comes out of feed as it is; the session is as before and usable."""
    session = model.session(capture="all", max_tokens=32)
    session.feed(IDS)
    before = {path: session.tape[path].tobytes() for path in session.tape.stored()}

    def refuse(done: float) -> None:
        raise ZeroDivisionError(f"mine at {done}")

    with pytest.raises(ZeroDivisionError, match="mine at 0"):
        session.feed([1, 2, 3], progress=refuse)
    assert session.ids == IDS
    assert {path: session.tape[path].tobytes() for path in session.tape.stored()} == before
    with pytest.raises(lab.BusyError, match="session busy"):
        session.feed([1], progress=lambda done: session.feed([2]))
    again = model.session(max_tokens=32)
    again.feed(IDS)
    assert np.array_equal(session.feed([1, 2, 3]).logits, again.feed([1, 2, 3]).logits)


class FakeBar:
    made: list[FakeBar]

    def __init__(self, total: int, unit: str, label: str, elapsed: float) -> None:
        self.total, self.label, self.n, self.closed, self.size = total, label, 0, False, total
        self.made.append(self)

    def update(self, n: int) -> None:
        self.n += n

    def close(self) -> None:
        self.closed, self.short = True, self.n < self.total


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeBar]]:
    monkeypatch.setattr(progress, "_bar", FakeBar)
    FakeBar.made = []
    yield FakeBar.made
    progress.show_progress(True)


def test_a_bar_appears_only_for_long_calls_and_when_wanted(
    model: lab.Model, bars: list[FakeBar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not within the first second; not with progress=False or show_progress(False); True wins over the switch."""
    session = model.session(max_tokens=64)
    session.feed(IDS)
    list(session.generate(2))
    assert not bars
    monkeypatch.setattr(progress, "DELAY", 0.0)
    session.feed(IDS, progress=False)
    progress.show_progress(False)
    session.feed(IDS)
    assert not bars
    session.feed(IDS, progress=True)
    progress.show_progress(True)
    list(session.generate(3, stop_ids=()))
    assert [(bar.size, bar.label, bar.closed) for bar in bars] == [(10, "prefill", True), (3, "generate", True)]
    assert bars[1].n == 3


def test_a_bar_is_never_closed_short_of_its_total(bars: list[FakeBar], monkeypatch: pytest.MonkeyPatch) -> None:
    """Notebooks would keep it, in red, as if the pass had failed: so whether the work ended early or not at all."""
    monkeypatch.setattr(progress, "DELAY", 0.0)
    with progress.shown(True, 40, "tokens", "prefill") as report:
        assert report is not None
        report(0.75)
    with pytest.raises(KeyboardInterrupt), progress.shown(True, 40, "tokens", "generate") as report:
        assert report is not None
        report(0.5)
        raise KeyboardInterrupt
    assert [(bar.n, bar.closed, bar.short) for bar in bars] == [(30, True, False), (20, True, False)]


def test_the_real_bar_writes_and_goes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """tqdm outside a notebook: a line on standard error that names the work."""
    monkeypatch.setattr(progress, "DELAY", 0.0)
    with progress.shown(True, 40, "tokens", "prefill") as report:
        report(0.0)
        report(0.5)
    assert "prefill" in capsys.readouterr().err


@pytest.fixture
def alarm() -> Iterator[None]:
    """SIGALRM raises KeyboardInterrupt, as Ctrl-C does."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("shown", [False, None])
def test_G4_an_interrupt_ends_a_long_pass(slow: lab.Model, shown) -> None:
    """A 2,000-token prompt, a signal during it: KeyboardInterrupt, the session as before the pass, and usable."""
    session = slow.session(capture="routing", max_tokens=2048)
    session.feed([1, 2, 3])
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(KeyboardInterrupt):
        session.feed([5] * 2000, progress=shown)
    assert session.ids == [1, 2, 3] and len(session.passes) == 1
    own = slow.session(max_tokens=16)
    own.feed([1, 2, 3])
    assert np.array_equal(session.feed([4]).logits, own.feed([4]).logits)


@pytest.mark.usefixtures("alarm")
def test_G4_an_interrupt_ends_a_long_generation(slow: lab.Model) -> None:
    """Tokens made until then stay, and the session goes on."""
    session = slow.session(max_tokens=2048)
    session.feed([1, 2, 3])
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    made = []
    with pytest.raises(KeyboardInterrupt):
        for token in session.generate(2000, stop_ids=()):
            made.append(int(token))
    assert session.ids[3 : 3 + len(made)] == made and len(session.ids) < 2003
    assert session.feed([4]).stop == len(session.ids)


# ---- files that change ----

SHRINK = """
import faulthandler, os, sys
faulthandler.enable()
import colibri_lab as lab

path, when = sys.argv[1:]
file = path + "/model.safetensors"
model = lab.open(path)
session = model.session(capture="all", max_tokens=64, threads=2)
session.feed([1, 2, 3])
kept = session.tape.gates(0).copy()

def shrink(done=0):
    if os.path.getsize(file) == size:
        os.truncate(file, size // 2)

size = os.path.getsize(file)
if when == "before":
    shrink()
try:
    session.feed([4] * 32, progress=shrink)
    print("no error")
except lab.FileError as error:
    print("refused:", error)
for use in (lambda: session.feed([1]), lambda: model.weights.float32("norm"), lambda: model.weights["embed"],
            lambda: model.weights.census("layers.1.moe.experts.3.down")):
    try:
        use()
        print("no error")
    except lab.FileError as error:
        print("again:", error)
assert session.ids == [1, 2, 3] and (session.tape.gates(0) == kept).all()
print("lives")
"""


@pytest.mark.parametrize("when", ["before", "during"])
def test_E1_a_file_that_shrinks_is_an_exception(tmp_path: Path, when: str) -> None:
    """Cut to half before a pass, or in the middle of one: FileError names the file; process and session live."""
    folder = tiny_model(tmp_path / "m", hidden=64, expert_width=64, experts=8)
    assert (folder / "model.safetensors").stat().st_size > 64 * 4096
    done = subprocess.run(
        [sys.executable, "-c", SHRINK, str(folder), when], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    lines = done.stdout.splitlines()
    assert (
        lines[0].startswith("refused:")
        and "model.safetensors" in lines[0]
        and "changed while it was mapped" in lines[0]
    )
    assert len(lines) == 6 and all(line.startswith("again:") for line in lines[1:5]) and lines[5] == "lives"


def test_E1_a_file_written_to_in_place_is_an_exception(tmp_path: Path) -> None:
    """Same size, other bytes: the time of change tells. A file replaced by rename leaves the open model alone."""
    folder = tiny_model(tmp_path / "m")
    model = lab.open(folder)
    session = model.session(max_tokens=16)
    before = session.feed([1, 2, 3]).logits.copy()
    other = shutil.copy(folder / "model.safetensors", tmp_path / "other")
    Path(other).replace(folder / "model.safetensors")
    session.reset()
    assert np.array_equal(session.feed([1, 2, 3]).logits, before)
    fresh = lab.open(folder)
    session = fresh.session(max_tokens=16)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    with pytest.raises(lab.FileError, match=r"model\.safetensors"):
        session.feed([1])


def test_sessions_cannot_be_pickled_or_copied(model: lab.Model) -> None:
    """The error says why and what to do."""
    session = model.session(max_tokens=8)
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="live engine memory"):
            attempt(session)
    assert "0 of 8 tokens" in repr(session)


@pytest.mark.parametrize("capture", [None, 5, b"all", "routing\0more", "layers.*\ud800", ["all", "x\0"], "öutput"])
def test_what_is_no_capture_is_refused_whole(model: lab.Model, capture) -> None:
    """A text that only begins like a level is not that level."""
    with pytest.raises(lab.ArgumentError, match="capture"):
        model.session(capture=capture, max_tokens=4)


def test_an_empty_capture_keeps_nothing(model: lab.Model) -> None:
    """No pattern is the level "none", not the default, and the session says so."""
    session, none = model.session(capture=[], max_tokens=4), model.session(capture="none", max_tokens=4)
    assert list(session.tape) == list(none.tape) and session.capture == ("none",)


@pytest.mark.parametrize("mode", [5, "\ud800", b"softmax"])
def test_what_is_no_gate_mode_is_refused(model: lab.Model, mode) -> None:
    """With a sentence, whatever its type."""
    with pytest.raises(lab.ArgumentError, match="gate_mode"):
        model.session(gate_mode=mode, max_tokens=4)
