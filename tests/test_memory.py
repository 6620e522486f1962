"""Where memory goes: what the panels of model and session tell, and that what is given back is gone."""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import colibri_lab as lab
from colibri_lab import memory
from colibri_lab.testing import tiny_model

MB = 10**6
HUGE = 2 << 20
MADV_DONTNEED = 4


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a little more than 64 MB, in one file."""
    folder = tiny_model(tmp_path_factory.mktemp("large") / "m", hidden=256, expert_width=512, experts=22)
    assert 64 * MB < (folder / "model.safetensors").stat().st_size < 90 * MB
    return folder


@pytest.fixture(autouse=True)
def nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert capfd.readouterr() == ("", "")


def touch_everything(model: lab.Model) -> None:
    for name in model.weights:
        model.weights.census(name)


def drop(model: lab.Model) -> None:
    """Tells the system that this process needs none of the files' pages now."""
    libc = ctypes.CDLL(None, use_errno=True)
    for _, address, size in model._engine.files():
        assert libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), MADV_DONTNEED) == 0, ctypes.get_errno()


def test_E2_mapped_weights_are_told_apart_from_anonymous_memory(large: Path) -> None:
    """Opened, touched, dropped by advice: the file's part goes up and down, the anonymous part stays where it is."""
    with lab.open(large) as model:
        size = (large / "model.safetensors").stat().st_size
        opened = model.memory()
        assert opened["mapped"] == size and opened["resident"] < 1 * MB
        touch_everything(model)
        touched = model.memory()
        assert size - 1 * MB < touched["resident"] <= size + HUGE
        assert touched["anonymous"] == 0 and touched["reserved"] == 0
        before, after = opened["process"], touched["process"]
        assert after["file"] - before["file"] > size - 1 * MB and after["anonymous"] - before["anonymous"] < 4 * MB
        assert abs(after["file"] + after["anonymous"] + after["shared"] - after["resident"]) < 1 * MB
        drop(model)
        assert model.memory()["resident"] < 1 * MB


def test_E2_loading_and_freeing_two_hundred_times_leaves_anonymous_memory_flat(large: Path) -> None:
    """Open, run, look, close: after a first few rounds the process grows by less than 4 MB in 200."""

    def once() -> int:
        with lab.open(large) as model:
            session = model.session(capture="all", max_tokens=64)
            session.feed([1, 2, 3])
            assert session.tape.gates(0).any()
            del session
        return memory._process()["anonymous"]

    for _ in range(20):
        start = once()
    grown = [once() - start for _ in range(200)]
    assert max(grown) < 4 * MB and lab.open(large).memory()["failed_unmaps"] == 0


def test_E2_two_models_do_not_count_each_others_memory(large: Path) -> None:
    """Weights touched and sessions run in one model leave the figures of another, even of the same file, alone."""
    with lab.open(large) as one, lab.open(large) as other:
        touch_everything(one)
        session = one.session(max_tokens=64)
        session.feed([1, 2, 3])
        assert one.memory()["anonymous"] > 0 and one.memory()["resident"] > 64 * MB
        assert other.memory()["anonymous"] == other.memory()["reserved"] == 0 and other.memory()["resident"] < 1 * MB
        assert other.memory()["sessions"] == [] and len(one.memory()["sessions"]) == 1
        del session
        gc.collect()


def test_each_open_session_is_listed_and_the_sum_is_the_models() -> None:
    """Reserved, resident and copied bytes add up over the open sessions; a closed one is gone from the list."""
    model = lab.open()
    sessions = [model.session(capture=level, max_tokens=64) for level in ("none", "all")]
    for session in sessions:
        session.feed([1, 2, 3])
    panel = model.memory()
    assert sorted(s["reserved"] for s in panel["sessions"]) == sorted(s.memory()["reserved"] for s in sessions)
    assert panel["reserved"] == sum(s["reserved"] + s["rounding"] for s in panel["sessions"])
    assert panel["anonymous"] == sum(s["resident"] for s in panel["sessions"]) > 0
    assert panel["anonymous"] <= panel["reserved"] and panel["kept_by_views"] == {"reserved": 0, "resident": 0}
    del session, sessions[0]
    gc.collect()
    assert [s["reserved"] for s in model.memory()["sessions"]] == [sessions[0].memory()["reserved"]]


def test_memory_that_only_a_view_still_keeps_is_told() -> None:
    """After reset and after the session is gone, a kept array's block stands under kept_by_views until it goes too."""
    model = lab.open()
    session = model.session(capture="all", max_tokens=64)
    session.feed([1, 2, 3])
    tape = session.memory()["tape"]
    first = session.tape.gates(0)
    session.reset()
    session.feed([4, 5])
    second = session.tape.gates(0)
    kept = model.memory()["kept_by_views"]
    assert tape <= kept["reserved"] < tape + 8192 and 0 < kept["resident"] <= kept["reserved"]
    del session
    gc.collect()
    assert model.memory()["kept_by_views"]["reserved"] >= 2 * tape and model.memory()["sessions"] == []
    del first, second
    gc.collect()
    assert model.memory()["kept_by_views"] == {"reserved": 0, "resident": 0}


def test_a_tape_costs_what_was_written_not_what_was_reserved(tmp_path: Path) -> None:
    """Room for 100,000 tokens, three fed: less than 16 MB of more than 400 are in memory."""
    model = lab.open(tiny_model(tmp_path / "m", config={"max_position_embeddings": 200_000}))
    session = model.session(capture="all", max_tokens=100_000)
    session.feed([1, 2, 3])
    panel = session.memory()
    assert panel["tape"] > 400 * MB and 0 < panel["resident"] < 16 * MB
    assert panel["pages"]["tape"]["kind"] == "plain"


def test_the_pages_in_force_and_their_cost_can_be_read(monkeypatch: pytest.MonkeyPatch, large: Path) -> None:
    """Working memory asks for huge pages unless told not to; what the system gave is told in bytes and words."""
    model = lab.open(large)
    found = {}
    for wanted in ("madvise", "off", "hugetlb"):
        monkeypatch.setenv("COLIBRI_HUGE_PAGES", wanted)
        session = model.session(max_tokens=1024)
        session.feed(list(range(40)))
        panel = found[wanted] = session.memory()
        assert panel["scratch"] > HUGE and panel["huge"] % HUGE == 0 and panel["huge"] <= panel["resident"]
        assert panel["rounding"] < 2 * HUGE and panel["pages"]["scratch"]["why"]
    assert found["off"]["pages"]["scratch"]["kind"] == "plain" and found["off"]["rounding"] < 4 * 65536
    kinds = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if kinds.exists() and "[never]" not in kinds.read_text():
        assert found["madvise"]["pages"]["scratch"]["kind"] == "madvise"
        assert found["hugetlb"]["pages"]["scratch"]["kind"] in ("hugetlb", "madvise")
    monkeypatch.setenv("COLIBRI_HUGE_PAGES", "2M")
    with pytest.raises(lab.ArgumentError, match='COLIBRI_HUGE_PAGES is "2M"; it can be "madvise"'):
        model.session()


def test_anonymous_memory_stays_within_what_the_session_tells(large: Path) -> None:
    """Opening, feeding a long prompt and looking takes no more anonymous memory than it tells, plus 8 MB."""
    before = lab.open().memory()["process"]["anonymous"]
    model = lab.open(large)
    session = model.session(capture="moe", max_tokens=600)
    session.feed([i % 60 for i in range(600)], progress=False)
    told = session.memory()
    assert model.memory()["process"]["anonymous"] - before < told["reserved"] + told["rounding"] + 8 * MB
    assert model.memory()["resident"] < model.memory()["mapped"] + HUGE


def test_panels_show_themselves_as_text_and_table_and_are_plain_data() -> None:
    """One line per row in text and HTML, nothing in HTML that could be markup, numbers that JSON takes."""
    model = lab.open()
    session = model.session(capture=["layers.*.moe.gates"], max_tokens=64)
    session.feed([1, 2, 3])
    for panel in (model.memory(), session.memory()):
        text, table = repr(panel), panel._repr_html_()
        assert max(map(len, text.splitlines())) < 240 and text.count("\n") == table.count("<tr>") >= 4
        assert "in memory" in text and "reserved" in text
        assert json.loads(json.dumps(panel)) == dict(panel)
    assert "session 1" in repr(model.memory()) and "3 of 64 tokens" in repr(model.memory())


def test_sizes_are_three_figures_with_a_unit() -> None:
    """Decimal units, as disks and model hubs count; −1 is said in words."""
    sizes = [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_600, "1 MB"), (1_234_567, "1.23 MB"), (-1, "unknown")]
    assert [memory._size(count) for count, _ in sizes] == [text for _, text in sizes]


def test_a_system_without_a_table_of_mappings_gives_minus_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine itself knows stays; the rest is −1 and "unknown"."""
    monkeypatch.setattr(memory, "mappings", lambda: None)
    model = lab.open()
    session = model.session(max_tokens=64)
    panel = model.memory()
    assert panel["resident"] == panel["anonymous"] == panel["huge"] == session.memory()["resident"] == -1
    assert panel["mapped"] > 0 and panel["reserved"] > 0 and "unknown in memory" in repr(panel)
