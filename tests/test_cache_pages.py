"""Residency of experts' pages: what mincore says before and after, whose page it is, and that no answer needs it."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import resource
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import colibri_lab as lab
from colibri_lab import _cachelab
from colibri_lab.cache import pages as pages_module
from colibri_lab.cache.spans import covered, joined, size, without
from colibri_lab.testing import tiny_model

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")

PAGE = os.sysconf("SC_PAGESIZE")
SHAPE = {"hidden": 128, "expert_width": 136, "experts": 6, "layers": 2}  # 17 pages a matrix
STORED = {"plain": {}, "sharded": {"sharded": True}, "fused": {"fused": True}, "bfloat16": {"dtype": "BF16"}}


def written(folder: Path, **options: Any) -> Path:
    """A checkpoint whose files are on disk, so that their pages can go."""
    tiny_model(folder, **{**SHAPE, **options})
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return folder


@pytest.fixture(scope="module", params=list(STORED))
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("m") / request.param, **STORED[request.param])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("m") / "m")


# ---- oracles of our own --------------------------------------------------------------------------------------------


def tensors_of(path: Path) -> dict[str, tuple[int, int]]:
    """Where every tensor of a file lies, from its header."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {name: tuple(8 + length + at for at in entry["data_offsets"]) for name, entry in header.items()}


def spans_of(folder: Path, layer: int, expert: int) -> list[tuple[Path, int, int]]:
    """(file, first byte, end) of the three matrices of an expert, by their names on the hub."""
    out = []
    for path in sorted(folder.glob("*.safetensors")):
        for name, (start, stop) in tensors_of(path).items():
            if name.startswith(f"model.layers.{layer}.block_sparse_moe.experts.{expert}."):
                out.append((path, start, stop))
            elif name.startswith(f"model.layers.{layer}.mlp.experts.") and name.endswith("_proj"):
                each = (stop - start) // SHAPE["experts"]
                out.append((path, start + expert * each, start + (expert + 1) * each))
    return out


def mincore(model: lab.Model, path: Path) -> NDArray[np.bool_]:
    """Which pages of a file the kernel says are in memory."""
    address, n_bytes = next((a, n) for file, a, n in model._engine.files() if Path(file) == path)
    told = np.zeros(-(-n_bytes // PAGE), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes), ctypes.c_void_p(told.ctypes.data))
    assert done == 0, os.strerror(ctypes.get_errno())
    return (told & 1).astype(bool)


def share_of(model: lab.Model, folder: Path, layer: int, expert: int) -> float:
    """Of the bytes of an expert those on resident pages, counted byte by byte."""
    inside = total = 0
    for path, start, stop in spans_of(folder, layer, expert):
        owners = np.arange(start, stop) // PAGE
        inside += int(mincore(model, path)[owners].sum())
        total += stop - start
    return inside / total


def keeps_its_pages(folder: Path) -> bool:
    """Is this a file system in memory?"""
    mounts = [line.split(" ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    inside = [fields for fields in mounts if folder.resolve().is_relative_to(fields[4])]
    best = max(inside, key=lambda fields: len(fields[4]))
    return best[best.index("-") + 1] in ("tmpfs", "ramfs")


def dropped(change: lab.cache.Change, folder: Path) -> bool:
    """Whether a drop took effect; where the file system has no other place for its pages, that it says so."""
    if keeps_its_pages(folder):
        assert change.after == 1.0 and "tmpfs" in change.sentence
        return False
    assert change.after <= change.shared, change.sentence
    return True


@contextmanager
def somebody_else() -> Iterator[None]:
    """As a user who does not own a file of the system nor may write to it, as an ordinary user is anyhow."""
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if os.getuid() == 0:
            os.seteuid(0)


# ---- what is told --------------------------------------------------------------------------------------------------


def test_the_share_of_each_expert_is_what_mincore_says_of_its_bytes(stored: Path) -> None:
    """Plain, sharded, fused and 16-bit checkpoints; after drops and warms at random."""
    model = lab.open(stored)
    residency = lab.cache.residency(model)
    random = np.random.default_rng(3)
    for _ in range(3):
        residency.drop(int(random.integers(2)), random.integers(0, 6, 3))
        residency.warm(int(random.integers(2)), int(random.integers(6)))
        residency.refresh()
        expected = [[share_of(model, stored, layer, expert) for expert in range(6)] for layer in range(2)]
        assert np.array_equal(residency.share, expected) and residency.available and residency.reason == ""
    sizes = [[sum(b - a for _, a, b in spans_of(stored, layer, expert)) for expert in range(6)] for layer in range(2)]
    assert np.array_equal(residency.bytes, sizes) and residency.bytes.dtype == np.int64
    assert not (residency.share.flags.writeable or residency.bytes.flags.writeable or residency.locked.flags.writeable)


def test_a_dropped_expert_is_out_of_the_page_cache_and_its_neighbours_are_not(stored: Path) -> None:
    """Page by page over all files: gone is what holds bytes of this expert alone, and comes back by warming."""
    model = lab.open(stored)
    residency = lab.cache.residency(model)
    for path in stored.glob("*.safetensors"):
        path.read_bytes()
    change = residency.drop(1, 3)
    assert change.before == 1.0
    if dropped(change, stored):
        for path in stored.glob("*.safetensors"):
            end = path.stat().st_size
            held = np.zeros(end, bool)
            for file, start, stop in spans_of(stored, 1, 3):
                held[start:stop] |= file == path
            alone = np.minimum.reduceat(held, np.arange(0, end, PAGE))
            assert np.array_equal(mincore(model, path), ~alone) and (alone.any() or "sharded" in str(stored))
        assert residency.share[1, 3] == change.after and f"{change.after:.1%} now" in change.sentence
    back = residency.warm(1, 3)
    assert back.before == change.after and back.after == 1.0 == residency.share[1, 3]
    assert share_of(model, stored, 1, 3) == 1.0


def test_a_page_shared_by_neighbours_goes_when_all_of_them_go(folder: Path) -> None:
    """Expert by expert the pages on the borders stay; both at once, those between them go too."""
    model = lab.open(folder)
    residency = lab.cache.residency(model)
    residency.warm()
    each = residency.drop(0, 0).shared, residency.drop(0, 1).shared
    residency.warm()
    both = residency.drop(0, [1, 0, 1])
    if dropped(both, folder):
        assert 0 < both.shared < sum(each) / 2
        whole = residency.drop()
        assert whole.shared < both.shared and dropped(whole, folder)
        residency.refresh()
        assert (residency.share < 0.05).all() and (residency.share >= 0).all()


def test_a_file_system_in_memory_keeps_its_pages_and_says_so() -> None:
    """On tmpfs a drop changes nothing and claims nothing."""
    place = Path("/dev/shm")
    if not place.is_dir() or not keeps_its_pages(place):
        place = Path(os.environ.get("XDG_RUNTIME_DIR", "/run"))
    assert keeps_its_pages(place), "no file system in memory is mounted here"
    folder = place / f"colibri-pages-{os.getpid()}"
    try:
        model = lab.open(written(folder))
        change = lab.cache.residency(model).drop(0, 2)
        assert change.before == change.after == 1.0 and "bytes of whole pages stayed" in change.sentence
        assert "tmpfs" in change.sentence
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def test_pages_that_another_mapping_uses_stay_and_the_reason_says_so(folder: Path) -> None:
    """A second model on the same file holds what it touched; once it is closed, a drop takes it."""
    one, other = lab.open(folder), lab.open(folder)
    lab.cache.residency(other).warm(0, 4)
    change = lab.cache.residency(one).drop(0, 4)
    assert change.after == 1.0 and ("another mapping" in change.sentence or keeps_its_pages(folder))
    other.close()
    dropped(lab.cache.residency(one).drop(0, 4), folder)


def test_what_the_page_cache_holds_counts_although_this_process_has_not_mapped_it(folder: Path) -> None:
    """Resident in the page cache and resident in this process are two things: mincore tells the first."""
    model = lab.open(folder)
    residency = lab.cache.residency(model)
    dropped(residency.drop(), folder)
    (folder / "model.safetensors").read_bytes()  # as another program would
    residency.refresh()
    assert (residency.share == 1.0).all()
    assert model.memory()["resident"] < residency.bytes.sum() / 2
    residency.warm()
    assert model.memory()["resident"] >= residency.bytes.sum()


def test_of_a_file_of_somebody_else_nothing_is_told() -> None:
    """The kernel answers "all" about a file that one neither owns nor may write to, so it is not asked."""
    with somebody_else():
        status, reason = _cachelab.residency_told(b"/etc/passwd")
    assert status == 1 and "/etc/passwd belongs to another user and may not be written to" in reason


def test_a_share_that_is_not_told_is_nan_and_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a system without mincore: no number is made up, and a change says that nothing can be said."""
    monkeypatch.setattr(_cachelab, "residency_told", lambda file: (1, "no such call"))
    residency = lab.cache.residency(lab.open(folder))
    assert np.isnan(residency.share).all() and not residency.available
    assert residency.reason == "not available here: no such call" and residency.reason in repr(residency)
    change = residency.warm(0, 1)
    assert np.isnan(change.before) and np.isnan(change.after) and "is not told (not available here" in change.sentence
    assert "not told" in residency.report() and "nan" not in residency.report()


def test_a_system_without_a_table_of_mappings_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Huge pages and locks stand in /proc/self/smaps alone."""
    monkeypatch.setattr(pages_module, "mappings", lambda: None)
    residency = lab.cache.residency(lab.open(folder))
    assert str(residency.pages["huge_file"]).startswith("not available here")
    assert np.isnan(residency.lock(0, 0).after) and "not available here" in residency.lock(0, 0).sentence
    residency.unlock()


# ---- locks ---------------------------------------------------------------------------------------------------------


def locked_bytes() -> int:
    """Of all mappings of this process, as the system counts them."""
    return sum(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/smaps").read_text().splitlines()
        if line.startswith("Locked:")
    )


def test_a_locked_expert_is_locked_in_the_systems_own_table_and_no_drop_takes_it(folder: Path) -> None:
    """Locked, dropped without effect, unlocked, dropped."""
    model = lab.open(folder)
    residency = lab.cache.residency(model)
    before = locked_bytes()
    change = residency.lock(1, 2)
    assert (change.before, change.after) == (0.0, 1.0) and np.argwhere(residency.locked).tolist() == [[1, 2]]
    spans = joined((start, stop) for _, start, stop in spans_of(folder, 1, 2))
    pages = sum(-(-stop // PAGE) - start // PAGE for start, stop in spans)
    assert locked_bytes() - before == pages * PAGE
    kept = residency.drop(1, 2)
    assert kept.after == 1.0 and "locked stay" in kept.sentence
    assert residency.unlock(1, 2).after == 0.0 and locked_bytes() == before and not residency.locked.any()
    dropped(residency.drop(1, 2), folder)


def test_unlocking_one_of_two_neighbours_leaves_their_common_page_locked(folder: Path) -> None:
    """Locks of one page do not add up, so that page is the neighbour's still."""
    residency = lab.cache.residency(lab.open(folder))
    residency.lock(0, [2, 3])
    change = residency.unlock(0, 2)
    assert np.argwhere(residency.locked).tolist() == [[0, 3]] and 0 < change.after < 0.1
    assert residency.unlock().after == 0.0


def test_a_model_that_is_closed_takes_its_locks_with_it(folder: Path) -> None:
    """Nothing stays locked behind."""
    before = locked_bytes()
    model = lab.open(folder)
    residency = lab.cache.residency(model)
    residency.lock()
    assert locked_bytes() - before >= residency.bytes.sum()
    model.close()
    assert locked_bytes() == before


def test_more_than_may_be_locked_is_refused_with_the_limit_and_nothing_is_locked(folder: Path) -> None:
    """All or nothing: RLIMIT_MEMLOCK is named in bytes, and what was locked before stays."""
    residency = lab.cache.residency(lab.open(folder))
    residency.lock(0, 5)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = int(residency.bytes[0, 0]) * 3
    before = locked_bytes()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, hard))
    try:
        with somebody_else():
            change = residency.lock()
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    assert f"may lock {limit} bytes" in change.sentence and "nothing was locked by this call" in change.sentence
    assert locked_bytes() == before and np.argwhere(residency.locked).tolist() == [[0, 5]]


def test_a_lock_that_is_stopped_half_way_locks_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between two pieces: what this call had locked is unlocked again, what was locked before stays."""
    residency = lab.cache.residency(lab.open(folder))
    residency.lock(1, 1)
    before, pieces = locked_bytes(), []
    monkeypatch.setattr(pages_module, "_READ", 4 * PAGE)
    asked = type(residency)._range

    def stopped(self: Any, file: str, span: tuple[int, int]) -> Any:
        pieces.append(span)
        if len(pieces) == 20:  # expert 0 is locked by now, and a part of expert 1, which was locked before
            raise KeyboardInterrupt
        return asked(self, file, span)

    with monkeypatch.context() as patch:
        patch.setattr(type(residency), "_range", stopped)
        with pytest.raises(KeyboardInterrupt):
            residency.lock(1)
    assert len(pieces) > 20 and all(stop - start <= 4 * PAGE for start, stop in pieces[:20])
    assert locked_bytes() == before
    residency.refresh()
    assert np.argwhere(residency.locked).tolist() == [[1, 1]]


# ---- results -------------------------------------------------------------------------------------------------------


def test_results_are_the_same_bytes_whatever_is_dropped_warmed_and_locked_meanwhile(folder: Path) -> None:
    """Another thread drops, warms and locks experts while sessions feed: logits and taps stay what they are."""
    ids = [[int(i) for i in np.random.default_rng(n).integers(3, 60, 24)] for n in range(6)]

    def run(model: lab.Model) -> list[bytes]:
        session = model.session(capture="all", max_tokens=256)
        out = []
        for part in ids:
            session.feed(part)
            session.feed(part[:1])
            out.append(session.logits.tobytes())
        return [*out, *(session.tape[path].tobytes() for path in session.tape.stored())]

    expected = run(lab.open(folder))
    model = lab.open(folder)
    residency = lab.cache.residency(model)
    stop, failed, rounds = threading.Event(), [], [0]

    def disturb() -> None:
        random = np.random.default_rng(1)
        try:
            while not stop.is_set() or rounds[0] < 3:
                residency.drop(None, random.integers(0, 6, 3))
                residency.lock(0, 1)
                residency.warm(1, int(random.integers(6)))
                residency.drop()
                residency.unlock()
                rounds[0] += 1
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=disturb)
    thread.start()
    for _ in range(4):
        assert run(model) == expected
    stop.set()
    thread.join()
    assert not failed and rounds[0] >= 3
    residency.drop()
    assert run(model) == expected


# ---- the memory panel ----------------------------------------------------------------------------------------------


def test_E2_residency_and_memory_panel_move_together_as_experts_come_and_go(tmp_path: Path) -> None:
    """64 MB, warmed and dropped again: the file's part of the process goes up and down, the anonymous part stays."""
    folder = written(tmp_path / "large", hidden=256, expert_width=512, experts=22)
    model = lab.open(folder)
    residency = lab.cache.residency(model)
    dropped(residency.drop(), folder)
    opened = model.memory()
    residency.warm()
    warmed = model.memory()
    assert residency.share.min() == 1.0 and residency.bytes.sum() > 64 * 10**6
    assert warmed["resident"] - opened["resident"] >= residency.bytes.sum() * 0.99
    assert warmed["process"]["file"] - opened["process"]["file"] >= residency.bytes.sum() * 0.99
    dropped(residency.drop(), folder)
    gone = model.memory()
    assert gone["resident"] < residency.bytes.sum() / 10
    for panel in (warmed, gone):
        assert abs(panel["process"]["anonymous"] - opened["process"]["anonymous"]) < 4 * 10**6
        assert panel["anonymous"] == panel["reserved"] == 0


def test_E2_two_hundred_rounds_of_warming_and_dropping_leave_anonymous_memory_flat(folder: Path) -> None:
    """No page, mapping or file descriptor stays behind, whether the model stays open or is opened and locked anew."""

    def sizes() -> tuple[int, int, int]:
        gc.collect()
        status = Path("/proc/self/status").read_text()
        anonymous = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
        return anonymous, len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("\n")

    def opened_anew() -> None:
        with lab.open(folder) as model:
            lab.cache.residency(model).lock(0, 2)

    residency = lab.cache.residency(lab.open(folder))
    for _ in range(5):
        opened_anew()
    start = sizes()
    for _ in range(200):
        residency.warm(0, 1)
        residency.drop(0, 1)
    for _ in range(10):
        opened_anew()
    end = sizes()
    assert end[0] - start[0] < 4000 and end[1] <= start[1] and end[2] - start[2] < 10


def test_page_faults_and_kinds_of_pages_are_told(folder: Path) -> None:
    """Faults rise when pages are touched; huge pages are bytes; a session's blocks say what they got and why."""
    model = lab.open(folder)
    residency = lab.cache.residency(model)
    first = residency.pages
    session = model.session(max_tokens=1024)
    session.feed(list(range(3, 40)))
    residency.refresh()
    now = residency.pages
    assert now["faults"]["minor"] > first["faults"]["minor"] and now["faults"]["major"] >= first["faults"]["major"]
    assert now["page_bytes"] == PAGE and now["huge_file"] >= 0 and first["kinds"] == []
    assert now["kinds"][0]["scratch"]["kind"] in ("plain", "madvise", "hugetlb") and now["kinds"][0]["tape"]["why"]


# ---- arguments and words -------------------------------------------------------------------------------------------


def test_layers_and_experts_that_there_are_not_are_refused_with_those_there_are(tmp_path: Path) -> None:
    """Numbers are of layers with experts; texts, truth values and fractions are none."""
    folder = tiny_model(tmp_path / "q", "qwen2_moe", layers=4, dense_layers=(1,))
    residency = lab.cache.residency(lab.open(folder))
    assert residency.layers == (0, 2, 3) and residency.share.shape == (3, 4)
    assert residency.warm([0, 3], range(2)).after == 1.0
    for call in (residency.warm, residency.drop, residency.lock, residency.unlock):
        with pytest.raises(lab.ArgumentError, match=r"no layer 1 with experts; layers with experts are 0, 2, 3"):
            call(1, 0)
        with pytest.raises(lab.ArgumentError, match=r"no expert 4; experts are 0 to 3"):
            call(0, [0, 4])
        for wrong in ("0", True, 1.5, [True]):
            with pytest.raises(lab.ArgumentError, match="expert"):
                call(0, wrong)
    with pytest.raises(lab.ArgumentError, match=r"residency takes a model"):
        lab.cache.residency("model")


def test_weights_replaced_in_memory_lie_in_no_file_and_are_refused_by_name(folder: Path) -> None:
    """Asked for by number they are refused; of all, the others are meant."""
    model = lab.open(folder)
    name = "layers.1.moe.experts.4.up"
    other = model.with_weights({name: np.zeros_like(model.weights[name])})
    residency = lab.cache.residency(other)
    assert np.argwhere(np.isnan(residency.share)).tolist() == [[1, 4]] and f"{name} was replaced" in residency.reason
    with pytest.raises(lab.ArgumentError, match=rf"{name} was replaced in memory"):
        residency.drop(1, 4)
    assert residency.warm().sentence.startswith("11 experts") and np.isnan(residency.share[1, 4])
    assert "was replaced" in residency.report()


def test_a_closed_model_says_so(folder: Path) -> None:
    """Nothing is asked about addresses that are no longer ours; a view of residency keeps no model open."""
    model = lab.open(folder)
    residency = lab.cache.residency(model)
    model.close()
    for call in (residency.refresh, residency.warm, residency.drop, residency.lock, residency.unlock):
        with pytest.raises(lab.ColibriError, match="closed"):
            call()
    assert "layer" in residency.report() and "Residency" in repr(residency)


def test_the_report_counts_experts_wholly_partly_and_not_in_memory(folder: Path) -> None:
    """One row for each layer; the numbers are those of the arrays."""
    residency = lab.cache.residency(lab.open(folder))
    residency.drop(0)
    residency.warm(0, 1)
    residency.lock(1, 0)
    residency.refresh()
    rows = [line.split() for line in residency.report().splitlines()[2:4]]
    for row, cells in enumerate(rows):
        share, n_bytes = residency.share[row], residency.bytes[row]
        counts = [(share == 1).sum(), ((share > 0) & (share < 1)).sum(), (share == 0).sum()]
        assert [int(cell) for cell in cells[3:]] == [*counts, residency.locked[row].sum()]
        assert int(cells[1].replace(",", "")) == n_bytes.sum()
        assert cells[2] == f"{(share * n_bytes).sum() / n_bytes.sum():.1%}"
    assert "page faults" in residency.report() and "huge pages" in residency.report()


def test_the_code_of_the_page_on_residency_runs(tmp_path: Path) -> None:
    """The example at the head of docs/residency.md, as it stands."""
    page = (Path(__file__).resolve().parent.parent / "docs" / "residency.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "keys that hold 90%" in done.stdout, done.stderr


def test_spans_are_joined_subtracted_and_measured_as_sets_of_bytes() -> None:
    """Against sets of integers, on random spans."""
    random = np.random.default_rng(0)
    for _ in range(300):
        some, others = (
            [tuple(sorted(random.integers(0, 40, 2).tolist())) for _ in range(int(random.integers(0, 6)))] for _ in "ab"
        )
        one, two = ({at for a, b in spans for at in range(a, b)} for spans in (some, others))
        assert {at for a, b in joined(some) for at in range(a, b)} == one and size(joined(some)) == len(one)
        left = without(joined(some), joined(others))
        assert {at for a, b in left for at in range(a, b)} == one - two and size(left) == len(one - two)
        assert covered(joined(some), joined(others)) == len(one & two)
