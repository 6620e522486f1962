"""Recordings: the file is a sound trace at every moment and holds what the session holds, which computes as without."""

from __future__ import annotations

import gc
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorder import ids_of
from recordings import assert_same, header_of, python, raw
from safetensors import SafetensorError, safe_open

import colibri_lab as lab
from colibri_lab import recording, recording_file
from colibri_lab.errors import BusyError, CapacityError, FileError

ROOT = Path(__file__).resolve().parent.parent
CAPTURES = ("none", "routing", "moe", "all", ("moe", "layers.*.attn.weights", "logits"))
PAGE = 4096


@pytest.fixture(scope="module")
def model() -> Iterator[lab.Model]:
    yield lab.open()


def plain(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """What the safetensors library reads, all of it."""
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys() if not name.startswith("__unused__.")}  # noqa: SIM118


# ---- the same as a session in memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", CAPTURES, ids=str)
def test_a_recording_is_what_the_session_is(model: lab.Model, tmp_path: Path, capture: Any) -> None:
    """After each pass file, session and a session without a file are the same to a reader, logits included."""
    file = tmp_path / "run.safetensors"
    recorded, plainly = (model.session(capture=capture, max_tokens=64, to=to) for to in (file, None))
    assert_same(lab.load_trace(file), plainly.trace())
    for x in ("Hello there, gentle world", " é", [5, 6, 7], [8]):
        a, b = recorded.feed(x), plainly.feed(x)
        assert raw(a.logits) == raw(b.logits)
        assert_same(recorded.trace(), plainly.trace())
        assert_same(lab.load_trace(file), plainly.trace())
        assert plain(file)["tokens.ids"].tolist() == recorded.ids


def test_the_compact_form_is_the_same_bytes_whoever_saves_it(model: lab.Model, tmp_path: Path) -> None:
    """Saved from memory, from a recording session, from the recording, or from the saved one; twice."""
    recorded, plainly = (model.session(capture="all", max_tokens=64, to=to) for to in (tmp_path / "run", None))
    for session in (recorded, plainly):
        session.feed("A bird in the hand")
        session.feed([3, 4])
    sources = (plainly.trace(), recorded.trace(), lab.load_trace(tmp_path / "run"), plainly.trace())
    saved = []
    for number, trace in enumerate(sources):
        trace.save(tmp_path / f"{number}")
        saved.append((tmp_path / f"{number}").read_bytes())
    lab.load_trace(tmp_path / "0").save(tmp_path / "again")
    assert {*saved, (tmp_path / "again").read_bytes()} == {saved[0]}
    assert_same(lab.load_trace(tmp_path / "0"), plainly.trace())


def test_a_saved_recording_may_take_the_place_of_the_recording(model: lab.Model, tmp_path: Path) -> None:
    """save() onto the file being recorded replaces it by name; the session goes on in the file that it had."""
    file = tmp_path / "run"
    session = model.session(capture="moe", max_tokens=32, to=file)
    session.feed([1, 2, 3])
    session.trace().save(file)
    session.feed([4])
    assert lab.load_trace(file).ids == [1, 2, 3] and session.trace().ids == [1, 2, 3, 4]


def test_the_meta_tells_of_the_run_and_the_model(model: lab.Model, tmp_path: Path) -> None:
    session = model.session(capture="routing", max_tokens=8, to=tmp_path / "run")
    session.feed([1])
    trace, loaded = session.trace(), lab.load_trace(tmp_path / "run")
    assert trace.model is model and loaded.model is None
    for meta in (trace.meta, loaded.meta):
        assert meta["arithmetic"] == "float32" and meta["weights_dtype"] in ("bfloat16", "float32", "float16")
        assert meta["config"]["hidden_size"] == model.config.hidden_size and set(meta["config"]) == set(model.config)
        assert meta["capture"] == ["routing"]


def test_a_character_of_several_tokens(model: lab.Model, tmp_path: Path) -> None:
    """While it is unfinished the last token has U+FFFD, afterwards the token that completes it has the character."""
    assert model.tokenizer is not None
    file = tmp_path / "run"
    session = model.session(capture="none", max_tokens=64, to=file)
    for token_id in model.tokenizer.encode("a 你🙂 b"):
        session.feed([token_id])
        assert lab.load_trace(file).texts == session.texts
    assert "�" not in "".join(session.texts) and "" in session.texts


def test_a_trace_that_is_held_stays_while_the_session_goes_on(model: lab.Model, tmp_path: Path) -> None:
    file = tmp_path / "run"
    session = model.session(capture="moe", max_tokens=32, to=file)
    session.feed([1, 2])
    before = lab.load_trace(file)
    kept = {path: raw(array) for path, array in before.items()}
    session.feed([3])
    assert before.ids == [1, 2] and {path: raw(array) for path, array in before.items()} == kept


def test_the_tape_is_told_apart_from_memory(model: lab.Model, tmp_path: Path) -> None:
    session = model.session(capture="moe", max_tokens=32, to=tmp_path / "run")
    assert session.memory()["pages"]["tape"]["kind"] == "file"
    assert session.recording == tmp_path / "run" and "recording into" in repr(session)
    assert model.session(max_tokens=8).recording is None


# ---- a sound file at every moment ---------------------------------------------------------------------------------


@pytest.mark.parametrize("resets", ["forward", "resets"])
def test_a_process_killed_at_any_moment_leaves_its_closed_passes(
    model: lab.Model, tmp_path: Path, resets: str
) -> None:
    """SIGKILL at 60 random moments: the plain reader opens each file, and every closed pass is there, byte for byte."""
    script = ROOT / "tests" / "support" / "recorder.py"
    command = [sys.executable, str(script), str(tmp_path), "30", "11", resets]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": "."})
    assert done.returncode == 0, done.stderr
    lines = [line.rsplit(" ", 1) for line in done.stdout.splitlines()]
    assert len(lines) == 30
    longest = max(len(lab.load_trace(file).passes) for file, _ in lines)
    reference = model.session(capture="all", max_tokens=512, threads=1)
    for number in range(longest):
        reference.feed(ids_of(number), progress=False)
    whole = reference.trace()
    for file, said in lines:
        names = plain(Path(file))
        trace = lab.load_trace(file)
        if resets == "forward":
            assert len(trace.passes) >= int(said), file
        n, k = len(trace.ids), trace.top_k
        assert trace.ids == whole.ids[:n] and trace.passes == whole.passes[: len(trace.passes)]
        assert set(trace) == set(whole)
        for path in trace:
            rows = len(trace.passes) if path.endswith(".offsets") else n * k if ".dispatch." in path else n
            assert raw(trace[path]) == raw(whole[path][:rows]), (file, path)
            assert path in names or path.endswith("moe.output"), path
    assert len({said for _, said in lines}) > 2  # they were killed at different moments


def test_a_header_of_old_and_new_pages_is_sound(model: lab.Model, tmp_path: Path) -> None:
    """Every split of the header's pages, both ways round, and random mixtures: the reader takes whole passes."""
    file, torn = tmp_path / "run", tmp_path / "torn"
    session = model.session(capture="all", max_tokens=64, to=file)
    session.feed([1, 2, 3])
    early = header_of(file)
    session.feed([4, 5])
    session.feed([6])
    late, data = header_of(file), file.read_bytes()
    n_pages = len(late) // PAGE
    changed = [i for i in range(n_pages) if early[i * PAGE : (i + 1) * PAGE] != late[i * PAGE : (i + 1) * PAGE]]
    assert len(early) == len(late) == n_pages * PAGE and len(changed) >= 4
    chance = random.Random(0)
    mixtures = [[i < split for i in range(n_pages)] for split in range(n_pages + 1)]
    mixtures += [[i >= split for i in range(n_pages)] for split in range(n_pages + 1)]
    mixtures += [[chance.random() < 0.5 for _ in range(n_pages)] for _ in range(30)]
    seen = set()
    for mixture in mixtures:
        pages = [(late if new else early)[i * PAGE : (i + 1) * PAGE] for i, new in enumerate(mixture)]
        torn.write_bytes(b"".join(pages) + data[len(late) :])
        rows = {len(array) for name, array in plain(torn).items() if name.endswith("moe.gates")}
        assert rows <= {3, 6}
        trace = lab.load_trace(torn)
        whole = all(new for i, new in enumerate(mixture) if i in changed)
        assert trace.passes == ([(0, 3), (3, 5), (5, 6)] if whole else [(0, 3)])
        seen.add(len(rows))
        for path in trace:
            assert raw(trace[path]) == raw(session.tape[path][: len(trace[path])]), path
    assert seen == {1, 2}  # some had tensors of different lengths


READER = """
import sys, time
from safetensors import safe_open
import colibri_lab as lab
path, n = sys.argv[1], 0
print("ready", flush=True)
while n < 400:
    with safe_open(path, framework="numpy") as file:
        ids = file.get_tensor("tokens.ids")
        assert file.get_tensor("layers.0.moe.gates").shape[0] == len(ids), "rows of two moments"
    n += 1
    if n % 20 == 0:
        trace = lab.load_trace(path)
        assert trace.passes == [] or trace.passes[-1][1] == len(trace.ids)
        del trace
    time.sleep(0.005)
print("read", n, flush=True)
"""


def test_a_reader_in_another_process_opens_the_file_again_and_again(model: lab.Model, tmp_path: Path) -> None:
    """While passes close as fast as they can, every one of 400 openings by the plain reader succeeds."""
    file = tmp_path / "run"
    session = model.session(capture="all", max_tokens=512, threads=1, to=file)
    reader = subprocess.Popen([sys.executable, "-c", READER, file], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert reader.stdout is not None and reader.stdout.readline() == "ready\n"
    passes = 0
    while reader.poll() is None:
        if len(session.ids) == session.max_tokens:
            session.reset()
        session.feed([passes % 100 + 1], progress=False)
        passes += 1
    with reader.stdout:
        assert reader.returncode == 0 and reader.stdout.read() == "read 400\n"
    assert passes > 20


def test_a_reader_on_another_thread_never_meets_a_deadlock(model: lab.Model, tmp_path: Path) -> None:
    """It may hold the interpreter's lock inside open while the header is being written."""
    file = tmp_path / "run"
    session = model.session(capture="routing", max_tokens=512, threads=1, to=file)
    errors: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(200):
                plain(file)
                time.sleep(0.002)
        except (OSError, SafetensorError) as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    while thread.is_alive():
        if len(session.ids) == session.max_tokens:
            session.reset()
        session.feed([1], progress=False)
    thread.join()
    assert not errors


def test_an_interrupted_pass_leaves_the_file_as_it_was(model: lab.Model, tmp_path: Path) -> None:
    file = tmp_path / "run"
    session = model.session(capture="all", max_tokens=64, to=file)
    session.feed([1, 2])
    before = header_of(file)

    def stop(done: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        for _ in range(50):
            session.feed([3] * 50, progress=stop)
            session.reset()
            session.feed([1, 2])
    assert header_of(file) == before and len(session.ids) == 2
    session.feed([4])
    assert_same(lab.load_trace(file), session.trace())


def test_what_an_interrupt_kept_back_comes_with_the_next_pass(
    model: lab.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between the end of a pass and the header: the file is behind, and catches up."""
    file = tmp_path / "run"
    session = model.session(capture="all", max_tokens=64, to=file)
    session.feed("é")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for place in ("publish", "write"):
        with monkeypatch.context() as patch:
            patch.setattr(recording_file.RecordingFile, place, interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.feed([11, 12])
    assert lab.load_trace(file).passes == session.trace().passes[:1] or place  # the trace brings it up to date
    session.feed([13])
    assert_same(lab.load_trace(file), session.trace())


# ---- stepping, and going back --------------------------------------------------------------------------------------


def test_a_stepper_records_as_it_walks(model: lab.Model, tmp_path: Path) -> None:
    """Closed passes are in the file, an open one is not; back, edits, undo and finish: the file is as the session."""
    file = tmp_path / "run"
    session = model.session(capture="all", max_tokens=64, to=file)
    other = model.session(capture="all", max_tokens=64)
    for one in (session, other):
        one.feed([9, 8])
        stepper = one.stepper([1, 2, 3, 4], chunk=2)
        stepper.step("layer")
        stepper.step("token")
        stepper.ablate(0, 1)
        stepper.step("token")
        stepper.back("token")
        stepper.back("stage")
        stepper.force(1, [0, 2])
        stepper.finish()
        stepper.undo()
    assert_same(session.trace(), other.trace())
    assert_same(lab.load_trace(file), other.trace())
    assert len(lab.load_trace(file).edits) == 1
    session.reset()
    assert lab.load_trace(file).ids == [] and lab.load_trace(file).edits == []


def test_rows_that_a_view_still_shows_stay_with_the_old_file(model: lab.Model, tmp_path: Path) -> None:
    """Stepping back under a live view: the view keeps what it shows, and the kept rows go on in a new file."""
    file = tmp_path / "run"
    session = model.session(capture="moe", max_tokens=64, to=file)
    session.feed([1, 2])
    stepper = session.stepper([3, 4])
    stepper.step("token")
    view = session.tape["layers.0.moe.gates"]
    kept, inode = view.copy(), file.stat().st_ino
    stepper.step("token")
    stepper.back("token")
    stepper.back("token")
    stepper.force(0, [3, 4])
    stepper.finish()
    assert raw(view) == raw(kept) and file.stat().st_ino != inode
    assert session.memory()["copied_bytes"] > 0
    assert_same(lab.load_trace(file), session.trace())
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_rows_that_nobody_shows_are_written_over_in_place(model: lab.Model, tmp_path: Path) -> None:
    file = tmp_path / "run"
    session = model.session(capture="moe", max_tokens=64, to=file)
    session.feed([1, 2])
    inode = file.stat().st_ino
    session.reset()
    assert lab.load_trace(file).ids == []
    session.feed([5])
    assert file.stat().st_ino == inode and session.memory()["copied_bytes"] == 0
    assert_same(lab.load_trace(file), session.trace())


def test_a_live_edit_of_an_open_pass_reaches_the_file(model: lab.Model, tmp_path: Path) -> None:
    file = tmp_path / "run"
    session = model.session(capture="all", max_tokens=64, to=file)
    stepper = session.stepper([1, 2, 3], chunk=None)
    stepper.run_to("stage == 'router' and layer == 0")
    rows = stepper.edit("layers.0.moe.input")
    rows[1] = 0.5
    stepper.finish()
    loaded = lab.load_trace(file)
    assert (loaded["layers.0.moe.input"][1] == 0.5).all() and len(loaded.edits) == 1
    assert_same(loaded, session.trace())
    rows = None


def test_a_fork_lies_in_memory(model: lab.Model, tmp_path: Path) -> None:
    file = tmp_path / "run"
    session = model.session(capture="moe", max_tokens=64, to=file)
    stepper = session.stepper([1, 2, 3])
    stepper.step("token")
    fork = stepper.fork()
    fork.finish()
    assert lab.load_trace(file).ids == [1]
    forked = fork._walk.session if hasattr(fork, "_walk") else None
    assert forked is None or forked.recording is None
    stepper.finish()
    assert_same(lab.load_trace(file), session.trace())


def test_edits_beyond_their_room_are_refused(
    model: lab.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file stays at the passes before them; the session has all."""
    monkeypatch.setattr(recording, "EDITS_BYTES", 300)
    session = model.session(capture="moe", max_tokens=64, to=tmp_path / "run")
    session.feed([1])
    stepper = session.stepper([2])
    for layer in range(2):
        for expert in range(2):
            stepper.ablate(layer, expert)
    with pytest.raises(CapacityError, match=r"room for 300 bytes of edits, and they need \d+"):
        stepper.finish()
    assert lab.load_trace(tmp_path / "run").ids == session.ids == [1]
    for _ in range(3):
        stepper.undo()
    stepper.finish()
    assert_same(lab.load_trace(tmp_path / "run"), session.trace())


# ---- one file, one session ------------------------------------------------------------------------------------------


def test_two_processes_cannot_record_into_one_file(model: lab.Model, tmp_path: Path) -> None:
    """When the session is gone, its file can be replaced."""
    file = tmp_path / "run"
    first = model.session(capture="moe", max_tokens=32, to=file)
    first.feed([1, 2])
    code = "import sys, colibri_lab as lab; lab.open().session(max_tokens=8, to=sys.argv[1])"
    assert "another process is recording into it" in python(code, file).stderr
    assert lab.load_trace(file).ids == [1, 2] and [path.name for path in tmp_path.iterdir()] == ["run"]
    held = lab.load_trace(file)
    gates = raw(held["layers.0.moe.gates"])
    del first
    gc.collect()
    second = model.session(max_tokens=32, to=file)
    second.feed([3])
    assert lab.load_trace(file).ids == [3]
    assert raw(held["layers.0.moe.gates"]) == gates  # a trace that is open keeps the file that it was opened from


def test_a_notebook_cell_that_records_can_be_run_again(model: lab.Model, tmp_path: Path) -> None:
    """The file is a new one, a warning says so, and the session before goes on with all that it has."""
    file = tmp_path / "run"
    first = model.session(capture="moe", max_tokens=32, to=file)
    first.feed([1, 2])
    with pytest.warns(UserWarning, match="that session goes on without one") as said:
        second = model.session(capture="moe", max_tokens=32, to=file)
    assert said[0].filename == __file__  # the cell, not the library
    second.feed([3])
    first.feed([4])
    assert lab.load_trace(file).ids == [3] and first.ids == [1, 2, 4]
    assert_same(lab.load_trace(file), second.trace())
    first.trace().save(tmp_path / "first")
    assert lab.load_trace(tmp_path / "first").ids == [1, 2, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "run"]


def test_a_session_that_goes_leaves_its_file_and_its_views(model: lab.Model, tmp_path: Path) -> None:
    file = tmp_path / "run"
    session = model.session(capture="moe", max_tokens=32, to=file)
    session.feed([1, 2])
    view, kept = session.tape["layers.0.moe.gates"], session.tape["layers.0.moe.gates"].copy()
    trace = session.trace()
    del session
    assert raw(view) == raw(kept) == raw(lab.load_trace(file)["layers.0.moe.gates"])
    assert trace.ids == [1, 2]


def test_a_model_closes_when_its_recording_sessions_are_gone(tmp_path: Path) -> None:
    model = lab.open()
    session = model.session(max_tokens=32, to=tmp_path / "run")
    session.feed([1])
    with pytest.raises(BusyError):
        model.close()
    del session
    model.close()
    assert lab.load_trace(tmp_path / "run").ids == [1]


def test_a_process_forked_off_may_look_and_not_write(model: lab.Model, tmp_path: Path) -> None:
    """It shares the file with its parent, whose recording it would spoil."""
    code = """
import os, sys, colibri_lab as lab
session = lab.open().session(capture="moe", max_tokens=32, to=sys.argv[1])
session.feed([1, 2])
stepper = session.stepper([3])
child = os.fork()
if not child:
    refused = 0
    for act in (lambda: session.feed([5]), session.reset, stepper.step, lambda: next(session.generate(1))):
        try:
            act()
        except lab.BusyError as error:
            refused += "forked" in str(error)
    os._exit(10 * refused + (session.tape["layers.0.moe.gates"].shape[0] == 2) + (len(session.trace().ids) == 2))
status = os.waitpid(child, 0)[1]
stepper.finish()
print(os.waitstatus_to_exitcode(status), lab.load_trace(sys.argv[1]).ids)
"""
    done = python(code, tmp_path / "run")
    assert done.stdout == "42 [1, 2, 3]\n", (done.stdout, done.stderr)


def test_a_file_that_was_moved_away_is_let_go(model: lab.Model, tmp_path: Path) -> None:
    """The recording goes on in the file, under its new name; only a new file cannot take the old name from another."""
    file, moved = tmp_path / "run", tmp_path / "kept"
    session = model.session(capture="moe", max_tokens=32, to=file)
    session.feed([1, 2])
    file.rename(moved)
    file.write_text("mine")
    session.feed([3])
    assert lab.load_trace(moved).ids == [1, 2, 3]
    view = session.tape["layers.0.moe.gates"]
    with pytest.raises(FileError, match="no longer the file"):
        session.reset()
    assert file.read_text() == "mine" and len(view) == 3
    assert lab.load_trace(moved).ids == [1, 2, 3]


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_example_of_the_page_reads_a_recording(model: lab.Model, tmp_path: Path) -> None:
    """The code of docs/trace-format.md needs safetensors and NumPy alone, and finds what the session computed."""
    page = (ROOT / "docs" / "trace-format.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL))
    assert "colibri" not in code.replace("colibri-trace", "")
    session = model.session(capture="moe", max_tokens=64, to=tmp_path / "run.safetensors")
    session.feed("Hello there")
    session.feed([1, 2])
    for name in ("run.safetensors", "saved.safetensors"):
        session.trace().save(tmp_path / "saved.safetensors")
        (tmp_path / "use").mkdir(exist_ok=True)
        (tmp_path / "use" / "run.safetensors").write_bytes((tmp_path / name).read_bytes())
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "use", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        rows = session.tape.expert_rows(0, int(session.tape.expert_ids(0)[0, 0]))["tokens"].tolist()
        assert f"{len(session.ids)} tokens in 2 passes" in done.stdout and f"rows {rows}" in done.stdout
