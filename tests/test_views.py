"""Views: whose memory they show, how long it lives, and that nobody can change it."""

from __future__ import annotations

import gc
import os
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from checkpoints import read_safetensors

import colibri_lab as lab
from colibri_lab.testing import tiny_model

IDS = [0, 5, 9, 13, 21, 34, 55, 7, 8, 11]


@pytest.fixture(scope="module")
def model() -> lab.Model:
    return lab.open()


@pytest.fixture
def session(model: lab.Model) -> lab.Session:
    session = model.session(capture="all", max_tokens=64)
    session.feed(IDS)
    return session


def lease_of(view: np.ndarray) -> object:
    base = view
    while isinstance(base, np.ndarray):
        base = base.base
    return base


def extent(view: np.ndarray) -> tuple[int, int]:
    """First byte and the byte after the last one."""
    return np.lib.array_utils.byte_bounds(view)


def fill_memory() -> None:
    """100 MB of other numbers, where freed memory would be given out again."""
    assert np.full(25_000_000, 7.0, np.float32)[-1] == 7


def test_every_tap_lies_in_the_engines_block(session: lab.Session) -> None:
    """No view is a copy: its bytes lie in the block that its lease keeps, inside one address range for the session."""
    blocks = set()
    for path in session.tape:
        view = session.tape[path]
        lease = lease_of(view)
        assert type(lease).__name__ == "Lease" and not view.flags.owndata, path
        if view.size:
            first, last = extent(view)
            assert lease.address <= first < last <= lease.address + lease.bytes, path
        blocks.add((lease.address, lease.bytes))
    assert len(blocks) == 1
    assert blocks.pop()[1] >= session.memory()["tape"] - 4096


def test_two_views_share_one_address(session: lab.Session) -> None:
    """Asking twice gives two arrays over the same bytes; a pass' view is a piece of the session's."""
    whole, again = session.tape["layers.2.moe.gates"], session.tape["layers.2.moe.gates"]
    assert whole is not again and whole.ctypes.data == again.ctypes.data
    session.feed([1, 2, 3])
    whole, piece = session.tape["layers.2.moe.gates"], session.passes[-1].tape["layers.2.moe.gates"]
    assert piece.ctypes.data == whole[len(IDS) :].ctypes.data and piece.shape == (3, 2)


def test_an_experts_rows_are_a_piece_of_the_packed_ones(session: lab.Session) -> None:
    """`experts.{e}.input` is a slice of `dispatch.input`, at the place that the offsets name."""
    offsets = session.tape["layers.1.moe.dispatch.offsets"]
    packed = session.tape["layers.1.moe.dispatch.input"]
    assert offsets.dtype == np.int64 and offsets.shape == (1, 9)
    for expert in range(8):
        rows = session.tape.expert_inputs(1, expert)
        assert rows.shape == (offsets[0, expert + 1] - offsets[0, expert], 128)
        if rows.size:
            assert rows.ctypes.data == packed[offsets[0, expert] :].ctypes.data


def test_the_keys_and_values_are_the_cache_itself(model: lab.Model) -> None:
    """`attn.k` and `attn.v` are there at every capture, over all tokens."""
    session = model.session(capture="none", max_tokens=16)
    session.feed(IDS)
    assert {path.rpartition(".")[2] for path in session.tape} == {"k", "v"}
    assert session.tape["layers.5.attn.k"].shape == (len(IDS), 2, 32)


DERIVED = {  # what is kept of an array, and how it is looked at afterwards
    "whole": (lambda a: a, lambda kept: kept),
    "slice": (lambda a: a[:1], lambda kept: kept),
    "transpose": (lambda a: a.T, lambda kept: kept),
    "stride": (lambda a: a[:, ::2], lambda kept: kept),
    "memoryview": (memoryview, np.asarray),
    "iterator": (iter, lambda kept: np.stack(list(kept))),
    "other dtype": (lambda a: a.view(np.int32), lambda kept: kept.view(np.float32)),
}


@pytest.mark.parametrize("name", DERIVED)
def test_F1_a_view_outlives_everything_else(name: str) -> None:
    """Deleting model, session and tape leaves one derived object valid, even when freed memory would be used again."""
    keep, look = DERIVED[name]
    model = lab.open()
    session = model.session(capture="all", max_tokens=64)
    session.feed(IDS)
    array = session.tape.expert_outputs(0, int(session.tape.expert_ids(0)[0, 0]))
    expected = look(keep(array.copy()))
    assert expected.size
    kept = keep(array)
    del model, session, array
    gc.collect()
    fill_memory()
    assert np.array_equal(look(kept), expected)


def test_F1_a_trace_outlives_its_session() -> None:
    """Its arrays hold the memory: they read the same when everything else is gone."""
    session = lab.open().session(capture="all", max_tokens=64)
    session.feed(IDS)
    trace = session.trace()
    expected = {path: trace[path].copy() for path in trace}
    del session
    gc.collect()
    fill_memory()
    assert all(np.array_equal(trace[path], expected[path]) for path in trace)


def test_F1_a_weight_view_outlives_the_model() -> None:
    """A mapped weight stays mapped for as long as a slice of it lives; close refuses until then."""
    model = lab.open()
    rows = model.weights["layers.0.moe.experts.3.gate"][2:4]
    expected = rows.copy()
    with pytest.raises(lab.BusyError, match="1 session or view of"):
        model.close()
    del model
    gc.collect()
    fill_memory()
    assert np.array_equal(rows, expected)


def test_F1_memory_goes_when_the_last_view_goes(model: lab.Model) -> None:
    """Users are counted: sessions and views come and go, and nothing stays behind."""
    before = model.memory()["users"]
    session = model.session(max_tokens=16)
    session.feed(IDS)
    view = session.tape.gates(0)[1:]
    assert model.memory()["users"] > before + 1
    del session
    gc.collect()
    assert model.memory()["users"] == before + 1
    del view
    gc.collect()
    assert model.memory()["users"] == before


def read_only_attempts(view: np.ndarray) -> None:
    for target in (view, view[:1], view.T, view.view(), np.asarray(view), view.reshape(-1)):
        assert not target.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            target[...] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            target.setflags(write=True)
        with pytest.raises(ValueError, match="WRITEABLE"):
            target.flags.writeable = True
    with pytest.raises(ValueError, match=r"read-only|resize"):
        view.resize(3)
    if view.dtype != ml_dtypes.bfloat16:  # no buffer format is registered for it
        buffer = memoryview(view)
        assert buffer.readonly
        again = np.asarray(buffer)
        assert not again.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            again.setflags(write=True)
    with pytest.raises(ValueError, match="WRITEABLE"):
        np.lib.stride_tricks.as_strided(view).setflags(write=True)


def test_F3_read_only_cannot_be_lifted(session: lab.Session) -> None:
    """Taps, logits, trace entries and weights refuse writing, and refuse to be made writable by any door of NumPy."""
    trace = session.trace()
    weights = session.model.weights
    for view in (
        session.tape["layers.0.moe.router_logits"],
        session.tape["layers.0.moe.expert_ids"],
        session.tape["layers.0.attn.k"],
        session.tape["layers.0.moe.dispatch.offsets"],
        session.logits,
        session.passes[0].logits,
        trace["layers.0.moe.scores"],
        weights["embed"],
        weights["layers.0.attn_norm"],
    ):
        read_only_attempts(view)


def test_F3_an_empty_view_is_read_only_as_well(model: lab.Model) -> None:
    """An array without elements has a lease and the same rules."""
    session = model.session(capture="all", max_tokens=4)
    for view in (session.tape.gates(0), session.tape.expert_inputs(0, 3), session.tape["layers.0.attn.k"]):
        assert view.size == 0 and not view.flags.writeable and type(lease_of(view)).__name__ == "Lease"
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.setflags(write=True)


def test_F2_a_second_run_leaves_a_kept_array_alone(model: lab.Model) -> None:
    """History is immutable: an array of an early pass keeps its first value through later passes, a reset and new
    passes.
    """
    session = model.session(max_tokens=64)
    a = session.feed(IDS).tape.router_logits(0)
    first = a.copy()
    b = session.feed([3] * 20).tape.router_logits(0)
    assert np.array_equal(a, first) and a.dtype == np.float32
    second = b.copy()
    copied = session.memory()["copied_bytes"]
    session.reset()
    session.feed([7] * 40)
    assert np.array_equal(a, first) and np.array_equal(b, second)
    assert session.tape.router_logits(0).ctypes.data != a.ctypes.data
    assert session.memory()["copied_bytes"] == copied  # a reset keeps no row


def test_a_kept_array_never_changes_while_a_thousand_tokens_run(tmp_path) -> None:
    """Every tap kept after the first pass has the same bytes 1,000 tokens later, in a context of 2,048."""
    folder = tiny_model(tmp_path / "m", config={"max_position_embeddings": 2048})
    session = lab.open(folder).session(capture="all")
    assert session.max_tokens == 2048
    held = session.feed([i % 64 for i in range(24)])
    views = {path: session.tape[path] for path in session.tape}
    before = {path: view.tobytes() for path, view in views.items()}
    logits = held.logits.tobytes()
    for step in range(500):
        session.feed([step % 64])
    for step in range(10):
        session.feed([(step * 7 + i) % 64 for i in range(50)])
    assert len(session.ids) == 1024
    for path, view in views.items():
        assert view.tobytes() == before[path], path
    assert held.logits.tobytes() == logits
    assert session.tape["layers.0.moe.gates"][:24].ctypes.data == views["layers.0.moe.gates"].ctypes.data


def test_F4_an_expert_without_a_token_has_no_rows(model: lab.Model) -> None:
    """Nobody chose it: shape (0, H), the right dtype, no warning, in the tape, the joined rows and the trace."""
    session = model.session(capture="all", max_tokens=8)
    session.feed([5])
    chosen = set(session.tape.expert_ids(0)[0].tolist())
    expert = next(e for e in range(8) if e not in chosen)
    for tap, width, dtype in (("input", 128, "f4"), ("output", 128, "f4"), ("hidden", 192, "f4"), ("gate", 192, "f4")):
        view = session.tape[f"layers.0.moe.experts.{expert}.{tap}"]
        assert view.shape == (0, width) and view.dtype == dtype
    assert session.tape[f"layers.0.moe.experts.{expert}.tokens"].shape == (0,)
    assert session.tape[f"layers.0.moe.experts.{expert}.tokens"].dtype == np.int32
    rows = session.tape.expert_rows(0, expert)
    assert rows["input"].shape == (0, 128) and rows["tokens"].dtype == np.int32
    assert session.trace()[f"layers.0.moe.experts.{expert}.input"].shape == (0, 128)
    assert float(session.tape.expert_inputs(0, expert).sum()) == 0


def test_F4_an_empty_session_has_arrays_without_rows(model: lab.Model) -> None:
    """Before the first token every tap has its shape with zero rows, and a trace can be taken."""
    session = model.session(capture="all", max_tokens=8)
    for path in session.tape:
        assert session.tape[path].size == 0, path
    assert session.tape["layers.0.moe.router_logits"].shape == (0, 8)
    assert session.tape["layers.0.moe.dispatch.offsets"].shape == (0, 9)
    assert session.tape.expert_rows(0, 0)["input"].shape == (0, 128)
    assert session.trace().ids == []


def churn(session: lab.Session, seconds: float) -> int:
    """Views made and dropped on this thread while another one runs passes; returns how many passes those were."""
    stop = threading.Event()
    passes: list[int] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            while not stop.is_set():
                if session.max_tokens - len(session.ids) < 8:
                    session.reset()
                passes.append(session.feed([1, 2, 3, 4, 5, 6, 7, 8], progress=False).index)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    end = time.monotonic() + seconds
    kept: list[np.ndarray] = []
    while time.monotonic() < end:
        for path in ("layers.0.moe.gates", "layers.3.moe.experts.2.input", "layers.5.attn.k", "layers.1.output"):
            kept.append(session.tape[path][-3:].T)
        del kept[:-7]
    stop.set()
    thread.join()
    assert not failures, failures
    return len(passes)


def test_F5_views_come_and_go_while_a_pass_runs(model: lab.Model) -> None:
    """The lock of Python is held around object lifetime: two threads, one running, one making and dropping views."""
    before = model.memory()["users"]
    session = model.session(capture="all", max_tokens=96)
    assert churn(session, 2.0) > 3
    del session
    gc.collect()
    assert model.memory()["users"] == before


@pytest.mark.soak
def test_F5_views_come_and_go_for_a_minute(model: lab.Model) -> None:
    """The same for sixty seconds (COLIBRI_SOAK_SECONDS)."""
    seconds = float(os.environ.get("COLIBRI_SOAK_SECONDS", "60"))
    print(churn(model.session(capture="all", max_tokens=96), seconds), "passes")


def test_F5_the_last_reference_to_a_model_may_go_while_it_runs() -> None:
    """A pass in progress keeps its session, and the session its model."""
    holder = {"session": lab.open().session(max_tokens=512)}
    result: list[np.ndarray] = []
    thread = threading.Thread(
        target=lambda: result.append(holder.pop("session").feed([3] * 400, progress=False).logits)
    )
    thread.start()
    for _ in range(5):
        gc.collect()
    thread.join()
    assert not holder and np.isfinite(result[0]).all()


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_C7_weights_have_their_stored_dtype_and_an_exact_float32_copy(tmp_path, dtype: str) -> None:
    """bf16 is ml_dtypes.bfloat16, f16 is float16; float32() is a writable copy of the same values."""
    folder = tiny_model(tmp_path / dtype, dtype=dtype)
    stored = read_safetensors(folder / "model.safetensors")
    model = lab.open(folder)
    expected = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[dtype]
    view, copy = model.weights["layers.1.attn.q"], model.weights.float32("layers.1.attn.q")
    source = stored["model.layers.1.self_attn.q_proj.weight"]
    assert view.dtype == expected and view.shape == source.shape and view.tobytes() == source.tobytes()
    assert copy.dtype == np.float32 and copy.flags.writeable and np.array_equal(copy, source.astype(np.float32))
    copy[:] = 0
    assert view.tobytes() == source.tobytes()
