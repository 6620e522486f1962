"""Trace files: what is saved comes back, any reader opens them, and no hostile file gets through."""

from __future__ import annotations

import itertools
import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

import colibri_lab as lab
from colibri_lab import utf8_texts
from colibri_lab.errors import ArgumentError, FileError, FormatError, UnsupportedError
from colibri_lab.testing import canonical, synthetic_trace
from colibri_lab.trace import Trace
from colibri_lab.trace_file import load_trace, quiet, save_trace


@pytest.fixture
def trace() -> Trace:
    return synthetic_trace(3, 8, 2, 40, hidden=4, passes=[30, 10], dense_layers=[0], nonfinite=True)


def of_length(tokens: int) -> dict[str, Any]:
    """The meta of a trace of one layer with 8 experts."""
    return {**synthetic_trace(1, 8, 1, 1).meta, "passes": [[0, tokens]]}


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edits the JSON header of a file and leaves its data alone."""
    raw = path.read_bytes()
    size = struct.unpack_from("<Q", raw)[0]
    header = json.loads(raw[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


class TestRoundTrip:
    def test_everything_comes_back(self, trace: Trace, tmp_path: Path) -> None:
        trace.save(tmp_path / "run.safetensors")
        back = load_trace(tmp_path / "run.safetensors")
        assert (back.ids, back.texts, back.meta) == (trace.ids, trace.texts, trace.meta)
        assert set(back) == set(trace)
        for path in trace:
            assert back[path].dtype == trace[path].dtype and back[path].shape == trace[path].shape
            assert canonical(back[path]) == canonical(trace[path]), path

    def test_arrays_are_mapped_aligned_and_read_only(self, trace: Trace, tmp_path: Path) -> None:
        trace.save(tmp_path / "run.safetensors")
        for array in load_trace(tmp_path / "run.safetensors").values():
            assert array.flags.aligned and not array.flags.writeable and not array.flags.owndata
            with pytest.raises(ValueError):
                array.setflags(write=True)

    def test_saving_twice_gives_the_same_bytes_also_of_the_loaded_one(self, trace: Trace, tmp_path: Path) -> None:
        a, b = tmp_path / "a", tmp_path / "b"
        trace.save(a)
        load_trace(a).save(b)
        assert a.read_bytes() == b.read_bytes()
        load_trace(a).save(a)  # onto the file that is mapped
        assert a.read_bytes() == b.read_bytes()

    def test_the_safetensors_library_reads_it(self, trace: Trace, tmp_path: Path) -> None:
        trace.save(tmp_path / "run.safetensors")
        with safe_open(tmp_path / "run.safetensors", framework="numpy") as file:
            own = {"tokens.ids", "tokens.text", "tokens.text_offsets", "tokens.passes"}
            assert set(file.keys()) == {*trace, *own}
            assert file.get_tensor("tokens.passes").tolist() == [[0, 30], [30, 40]]
            np.testing.assert_array_equal(file.get_tensor("layers.1.moe.gates"), trace["layers.1.moe.gates"])
            metadata = file.metadata()
            text, offsets = file.get_tensor("tokens.text").tobytes(), file.get_tensor("tokens.text_offsets")
        assert all(isinstance(value, str) for value in metadata.values())
        assert metadata["format"] == "colibri-trace" and "passes" not in metadata
        assert [text[a:b].decode() for a, b in itertools.pairwise(offsets)] == trace.texts

    def test_G1_every_nan_is_the_quiet_one_and_infinities_stay(self, tmp_path: Path) -> None:
        """Sign and payload of a NaN are no part of the answer. The array in memory is untouched."""
        bits = np.array(
            [0x7F800001, 0xFFC00000, 0x7FFFFFFF, 0x7F800000, 0xFF800000, 0x80000000, 1, 0x3F800000], np.uint32
        )
        base = synthetic_trace(1, 2, 1, 2)
        trace = Trace(
            {**base, "norm": bits.view(np.float32).reshape(2, 4)}, ids=base.ids, texts=base.texts, meta=base.meta
        )
        trace.save(tmp_path / "t")
        assert (
            load_trace(tmp_path / "t")["norm"].view(np.uint32).ravel().tolist() == [0x7FC00000] * 3 + bits[3:].tolist()
        )
        assert bits[0] == 0x7F800001

    @pytest.mark.parametrize(
        ("dtype", "nan"), [(np.float16, 0x7E00), (ml_dtypes.bfloat16, 0x7FC0), (np.float64, 0x7FF8000000000000)]
    )
    def test_other_widths_have_their_quiet_nan_too(self, dtype: Any, nan: int) -> None:
        array = np.array([1, np.nan, -np.nan, np.inf]).astype(dtype)
        unsigned = f"u{array.dtype.itemsize}"
        assert quiet(array).view(unsigned)[1:3].tolist() == [nan, nan]
        assert quiet(array[:1]) is not None and quiet(array)[3] == np.inf

    def test_texts_of_any_kind(self, tmp_path: Path) -> None:
        texts = ["", "\n", "你好", "🙂", "\0", "a\ud800"]
        base = synthetic_trace(1, 2, 1, 6)
        Trace({**base}, ids=base.ids, texts=texts, meta=base.meta).save(tmp_path / "t")
        assert load_trace(tmp_path / "t").texts == [*texts[:5], "a\\ud800"]

    def test_ids_and_texts_come_back_over_many_pieces(self, tmp_path: Path) -> None:
        """What is checked and decoded in pieces of tokens and of bytes has no seams."""
        tokens = (1 << 17) + 3
        ids = (np.arange(tokens) * 7919 % 100_003 - 1).tolist()
        texts = ["é🙂你\n\0"[: i % 6] * 2 for i in range(tokens)]
        save_trace(Trace({}, ids=ids, texts=texts, meta=of_length(tokens)), tmp_path / "t")
        back = load_trace(tmp_path / "t")
        assert back.utf8_texts().strings(65_530, 65_540) == texts[65_530:65_540]
        assert back.token_ids(65_530, 65_540).tolist() == ids[65_530:65_540]
        assert back.ids == ids and back.texts == texts
        assert back.ids is back.ids and type(back.ids[0]) is int and back.texts is back.texts

    def test_what_its_owner_changed_in_the_lists_is_what_is_saved(self, trace: Trace, tmp_path: Path) -> None:
        trace.save(tmp_path / "t")
        back = load_trace(tmp_path / "t")
        back.texts[:] = [""] * back.n_tokens
        back.ids[3] = 77
        back.save(tmp_path / "u")
        assert set(load_trace(tmp_path / "u").texts) == {""} and load_trace(tmp_path / "u").ids[3] == 77

    def test_a_view_that_is_not_contiguous_and_a_big_endian_array(self, tmp_path: Path) -> None:
        base = synthetic_trace(1, 2, 1, 4)
        odd, big = np.arange(48.0).reshape(4, 12)[:, ::3], np.arange(4, dtype=">i4")
        trace = Trace({**base, "norm": odd, "mine": big}, ids=base.ids, texts=base.texts, meta=base.meta)
        trace.save(tmp_path / "t")
        back = load_trace(tmp_path / "t")
        np.testing.assert_array_equal(back["norm"], odd)
        np.testing.assert_array_equal(back["mine"], big)

    def test_an_empty_trace(self, tmp_path: Path) -> None:
        synthetic_trace(2, 4, 2, 0, hidden=3).save(tmp_path / "t")
        back = load_trace(tmp_path / "t")
        assert back.ids == [] and back["layers.0.moe.experts.0.output"].shape == (0, 3)

    def test_unused_tails_of_a_recording_are_skipped(self, tmp_path: Path) -> None:
        base = synthetic_trace(1, 2, 1, 4)
        tail = {"__unused__.0": np.zeros(9, np.uint8)}
        Trace({**base, **tail}, ids=base.ids, texts=base.texts, meta=base.meta).save(tmp_path / "t")
        assert set(load_trace(tmp_path / "t")) == set(base)


class TestLists:
    def test_a_trace_from_a_file_makes_no_list_of_its_tokens_until_it_is_asked(self, tmp_path: Path) -> None:
        """Opening it and an analysis take less than the pointers of one list would."""
        tokens = 1 << 19
        routes = {"layers.0.moe.expert_ids": (np.arange(tokens, dtype=np.int32) * 7919 % 8)[:, None]}
        save_trace(
            Trace(routes, ids=[1000] * tokens, texts=["née"] * tokens, meta=of_length(tokens)), tmp_path / "t"
        )
        synthetic_trace(1, 8, 1, 9).save(tmp_path / "first")
        lab.routing.usage(load_trace(tmp_path / "first"))  # all modules are loaded
        tracemalloc.start()
        try:
            trace = load_trace(tmp_path / "t")
            lab.cache.miss_ratio_curve(trace, progress=False)
            assert trace.n_tokens == tokens and str(tokens) in repr(trace)
            assert tracemalloc.get_traced_memory()[1] < 8 * tokens
            assert trace.ids[-1] == 1000 and trace.texts[-1] == "née"
            assert tracemalloc.get_traced_memory()[1] > 2 * 8 * tokens
        finally:
            tracemalloc.stop()

    def test_bytes_that_a_recording_wrote_over_are_shown_and_raise_nothing(self, tmp_path: Path) -> None:
        """A session that went back writes other texts where an open trace has its own."""
        save_trace(Trace({}, ids=[1, 2], texts=["né", "xx"], meta=of_length(2)), tmp_path / "t")
        trace = load_trace(tmp_path / "t")
        with (tmp_path / "t").open("r+b") as file:
            file.seek((tmp_path / "t").read_bytes().index("néxx".encode()))
            file.write("xxéx".encode())
        assert trace.texts == ["xx\\xc3", "\\xa9x"]


class TestWriting:
    def test_a_failed_write_leaves_the_old_file_and_no_litter(self, trace: Trace, tmp_path: Path) -> None:
        target = tmp_path / "run.safetensors"
        trace.save(target)
        before = target.read_bytes()
        wrong = Trace({**trace, "mine": np.zeros(2, np.complex64)}, ids=trace.ids, texts=trace.texts, meta=trace.meta)
        with pytest.raises(UnsupportedError, match="'mine' is complex64"):
            wrong.save(target)
        with pytest.raises(ArgumentError, match=r"meta\['edits'\]"):
            save_trace(Trace({}, ids=trace.ids, texts=[], meta=trace.meta | {"edits": [object()]}), target)
        assert target.read_bytes() == before and list(tmp_path.iterdir()) == [target]

    def test_a_folder_that_is_not_there_is_named(self, trace: Trace, tmp_path: Path) -> None:
        with pytest.raises(FileError, match="nowhere"):
            trace.save(tmp_path / "nowhere" / "run.safetensors")


class TestRefused:
    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", "an empty file"),
            (b"1234567", "too short"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "a Git LFS pointer"),
            (b"<!DOCTYPE html><html></html>", "a web page"),
            (b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00.", "a Python pickle"),
            (b"PK\x03\x04" + bytes(60), "a zip archive"),
            (b"GGUF" + bytes(60), "a GGUF file"),
            (b'{"a": 1, "b": 2}', "a JSON text"),
            (struct.pack("<Q", 2**63) + b"{}", "cut short"),
            (struct.pack("<Q", 2) + b"[]", "no JSON header"),
            (struct.pack("<Q", 60) + b"{}", "cut short"),
        ],
    )
    def test_what_is_no_trace_is_called_what_it_is(self, content: bytes, words: str, tmp_path: Path) -> None:
        (tmp_path / "t").write_bytes(content)
        with pytest.raises(FormatError, match=words):
            load_trace(tmp_path / "t")

    def test_a_folder_a_missing_file_and_model_weights(self, tmp_path: Path) -> None:
        from safetensors.numpy import save_file

        with pytest.raises(FormatError, match="a folder, not a trace"):
            load_trace(tmp_path)
        with pytest.raises(FileError, match="nothing"):
            load_trace(tmp_path / "nothing")
        save_file({"model.norm.weight": np.zeros(4, np.float32)}, tmp_path / "w", metadata={"format": "pt"})
        with pytest.raises(
            FormatError, match=r"no trace \(it holds 'model.norm.weight'\); model weights are opened with lab.open"
        ):
            load_trace(tmp_path / "w")

    @pytest.mark.parametrize(
        ("name", "value", "words"),
        [
            ("format_version", "2", "format version '2'"),
            ("passes", "[[0, 39]]", "end at token 39"),
            ("passes", "[", "'passes' is not JSON"),
            ("passes", "[" * 100_000, "'passes' is not JSON"),
            ("passes", "null", "NoneType"),
            ("num_experts", "7", r"expected \(2, 8\)"),
            ("num_experts", "1" * 9000, "num_experts"),
            ("top_k", "3", "tokens need"),
            ("moe_layers", "[0, 1]", "no MoE layer"),
            ("num_hidden_layers", "2", "ascending layer numbers below 2"),
            ("edits", None, "'edits'"),
            ("moe_layers", '"12"', "moe_layers"),
        ],
    )
    def test_metadata_that_lies(self, trace: Trace, name: str, value: str | None, words: str, tmp_path: Path) -> None:
        def change(header: dict[str, Any]) -> None:
            header["__metadata__"][name] = value
            if value is None:
                del header["__metadata__"][name]

        path = tmp_path / "t"
        trace.save(path)
        rewrite(path, change)
        with pytest.raises(FormatError, match=words) as caught:
            load_trace(path)
        assert str(path) in str(caught.value)

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("layers.1.moe.scores", [8, 40]),
            ("tokens.ids", [4, 10]),
            ("tokens.text_offsets", [1, 41]),
            ("layers.1.moe.dispatch.offsets", [9, 2]),
            ("layers.1.moe.dispatch.input", [320]),
        ],
    )
    def test_shapes_that_lie(self, trace: Trace, name: str, shape: list[int], tmp_path: Path) -> None:
        path = tmp_path / "t"
        trace.save(path)
        rewrite(path, lambda header: header[name].update(shape=shape))
        with pytest.raises(FormatError):
            load_trace(path)

    @pytest.mark.parametrize(
        "name", ["tokens.ids", "tokens.text", "tokens.text_offsets", "layers.1.moe.dispatch.tokens"]
    )
    def test_a_missing_tensor_is_named(self, trace: Trace, name: str, tmp_path: Path) -> None:
        path = tmp_path / "t"
        trace.save(path)
        rewrite(path, lambda header: header.update({"other": header.pop(name)}))
        with pytest.raises(FormatError, match=name.rpartition(".")[2]):
            load_trace(path)

    @pytest.mark.parametrize(
        ("name", "place", "value", "words"),
        [
            ("layers.2.moe.expert_ids", 0, 8, "layers.2.moe.expert_ids.*token 0"),
            ("layers.2.moe.expert_ids", 3, -2, "layers.2.moe.expert_ids.*token 1"),
            ("layers.1.moe.dispatch.offsets", 4, 60, "must rise"),
            ("layers.1.moe.dispatch.tokens", 0, 35, "outside their pass"),
            ("tokens.text_offsets", 3, 10**9, "must be 41 int64 rising"),
            ("tokens.ids", 3, -4, "none negative"),
        ],
    )
    def test_numbers_that_lie(
        self, trace: Trace, name: str, place: int, value: int, words: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "t"
        trace.save(path)
        raw = bytearray(path.read_bytes())
        size = struct.unpack_from("<Q", raw)[0]
        entry = json.loads(raw[8 : 8 + size])[name]
        code = {"I32": "<i4", "I64": "<i8"}[entry["dtype"]]
        start, stop = (8 + size + offset for offset in entry["data_offsets"])
        data = np.frombuffer(raw[start:stop], code).copy()
        data[place] = value
        raw[start:stop] = data.tobytes()
        path.write_bytes(raw)
        with pytest.raises(FormatError, match=words):
            load_trace(path)

    def test_text_that_is_cut_inside_a_character(self, tmp_path: Path) -> None:
        base = synthetic_trace(1, 2, 1, 2)
        Trace({**base}, ids=base.ids, texts=["é", "x"], meta=base.meta).save(tmp_path / "t")
        raw = bytearray((tmp_path / "t").read_bytes())
        offset = raw.index("éx".encode())
        raw[offset : offset + 3] = b"x\xc3\xa9"
        (tmp_path / "t").write_bytes(raw)
        with pytest.raises(FormatError, match="UTF-8"):
            load_trace(tmp_path / "t")

    def test_pieces_refuse_what_decoding_every_text_on_its_own_refuses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Random bytes cut at random: sound exactly when offsets rise over all bytes and each text is UTF-8."""
        monkeypatch.setattr(utf8_texts, "_TOKENS", 2)
        monkeypatch.setattr(utf8_texts, "_BYTES", 3)
        rng = np.random.default_rng(0)
        bits = [b"a", "é".encode(), "你".encode(), "🙂".encode(), b"\xc3", b"\xa9", b"\xed\xa0\x80", b"\xc0\x80"]
        outcomes = []
        for _ in range(4000):
            raw = b"".join(bits[i] for i in rng.choice(8, rng.integers(6), p=[0.2, 0.2, 0.2, 0.2, *[0.05] * 4]))
            offsets = np.array([0, *np.sort(rng.integers(0, len(raw) + 1, rng.integers(4))), len(raw)], np.int64)
            if rng.random() < 0.2:
                offsets[rng.integers(len(offsets))] = rng.integers(-2, len(raw) + 3)
            ends = offsets.tolist()
            try:
                assert ends[0] == 0 and ends[-1] == len(raw) and ends == sorted(ends)
                strings = [raw[a:b].decode() for a, b in itertools.pairwise(ends)]
            except (AssertionError, UnicodeDecodeError):
                strings = None
            texts = utf8_texts.Utf8Texts(np.frombuffer(raw, np.uint8), offsets)
            try:
                texts.check(len(ends) - 1)
                found = texts.strings()
            except FormatError:
                found = None
            assert found == strings, (raw, ends)
            outcomes.append(found is None)
        assert 500 < sum(outcomes) < 3500

    def test_any_single_damaged_header_byte_is_refused_or_harmless(self, tmp_path: Path) -> None:
        """Never another exception than ours, whatever byte of a small file's header is flipped."""
        path = tmp_path / "t"
        synthetic_trace(1, 3, 2, 3, hidden=2).save(path)
        raw = path.read_bytes()
        rng = np.random.default_rng(0)
        for place in rng.choice(8 + struct.unpack_from("<Q", raw)[0], 300, replace=False).tolist():
            damaged = bytearray(raw)
            damaged[place] ^= 1 << int(rng.integers(8))
            path.write_bytes(damaged)
            try:
                trace = load_trace(path)
            except FormatError:
                continue
            assert len(trace.ids) == 3


    @pytest.mark.parametrize("shape", [[0, 1 << 62], [(1 << 64) - 1, 0], [1] * 65 + [0]])
    def test_a_shape_that_no_array_can_have_is_refused(self, tmp_path: Path, shape: list[int]) -> None:
        """The safetensors library takes them, since they need no bytes."""
        synthetic_trace(1, 3, 2, 3, hidden=2).save(tmp_path / "t")
        rewrite(tmp_path / "t", lambda h: h.update(odd={"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}))
        with pytest.raises(FormatError, match="'odd' has a shape that makes no sense"):
            load_trace(tmp_path / "t")


class TestOddTargetsAndNames:
    def test_a_meta_value_may_hold_a_path_that_is_not_utf8(self, trace: Trace, tmp_path: Path) -> None:
        odd = Trace(dict(trace), ids=trace.ids, texts=trace.texts, meta={**trace.meta, "from": "/m\udcff"})
        odd.save(tmp_path / "x")
        assert load_trace(tmp_path / "x").meta["from"] == "/m\udcff"

    def test_a_pipe_or_device_is_not_replaced_by_a_file(self, trace: Trace, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(FileError, match="no regular file"):
            trace.save(tmp_path / "pipe")
        assert (tmp_path / "pipe").is_fifo() and [p.name for p in tmp_path.iterdir()] == ["pipe"]

    @pytest.mark.parametrize("name", ["format", "format_version", 5, "\ud800"])
    def test_a_meta_name_that_the_file_cannot_hold_is_refused(self, trace: Trace, tmp_path: Path, name: Any) -> None:
        odd = Trace(dict(trace), ids=trace.ids, texts=trace.texts, meta={**trace.meta, name: "x"})
        with pytest.raises(ArgumentError):
            odd.save(tmp_path / "x")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("name", ["tokens.ids", "__metadata__", "\ud800"])
    def test_an_array_name_that_the_file_cannot_hold_is_refused(self, trace: Trace, tmp_path: Path, name: str) -> None:
        odd = Trace({**trace, name: np.zeros(3)}, ids=trace.ids, texts=trace.texts, meta=trace.meta)
        with pytest.raises(ArgumentError):
            odd.save(tmp_path / "x")
        assert list(tmp_path.iterdir()) == []


def test_a_parquet_table_is_named(tmp_path: Path) -> None:
    """It is what a trace was exported to, and no trace."""
    (tmp_path / "run.parquet").write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(FormatError, match="a Parquet table"):
        load_trace(tmp_path / "run.parquet")


@pytest.mark.parametrize("piece", [lab.cache.simulate, lab.routing.load, lambda trace: trace["layers.0.moe.gates"]])
def test_a_trace_whose_file_became_shorter_is_an_error_and_no_end_of_the_process(piece: Any, tmp_path: Path) -> None:
    """Reading rows that are gone would be SIGBUS. A file of its name that another one replaces is left alone."""
    path, whole = tmp_path / "run.safetensors", synthetic_trace(2, 8, 2, 20_000)
    whole.save(path)
    trace = lab.load_trace(path)
    (tmp_path / "new").write_bytes(b"another")
    (tmp_path / "new").replace(path)
    assert piece(trace) is not None
    whole.save(path)
    trace = lab.load_trace(path)
    with path.open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(lab.FileError, match="become shorter"):
        piece(trace)
