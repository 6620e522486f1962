"""Plausible garbage is refused by name: each importer, at least three corrupted files, and the sentence that says "
"why."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import format_goldens as goldens
import numpy as np
import pytest
from format_goldens import CONFIG, FIXTURES, GOLDENS, ROUTES, all_layers, npy_bytes

import colibri_lab as lab

SAY = {"config": CONFIG}
STAT = {"layers": [1, 2], "top_k": 2}


def changed(routes: np.ndarray, where: tuple[int, ...], value: Any) -> np.ndarray:
    out = routes.copy()
    out[where] = value
    return out


def lines(make: Callable[..., list[str]], at: int, new: str | None, *arguments: Any) -> bytes:
    """A text format with one line replaced, or taken out."""
    rows = make(*arguments)
    rows[at : at + 1] = [] if new is None else [new]
    return "".join(rows).encode()


def response(**parts: Any) -> bytes:
    return json.dumps(parts).encode()


def gguf(**changes: Any) -> bytes:
    entries = goldens.imatrix_entries()
    for name, value in changes.items():
        key = name.replace("__", ".")
        if value is None:
            del entries[key]
        else:
            entries[key] = np.asarray(value, np.float64)
    return goldens.gguf_bytes(entries)


def kl(at: int, value: bytes) -> bytes:
    raw = bytearray(goldens.kl_bytes())
    raw[at : at + len(value)] = value
    return bytes(raw)


def olmoe(**changes: Any) -> bytes:
    row = json.loads(goldens.olmoe_lines()[0])
    return (json.dumps({**row, **changes}) + "\n").encode()


def debugger(change: Callable[[str], str]) -> bytes:
    text = (FIXTURES / "debugger_printed" / "MixtralForCausalLM_debug_tree_FULL_TENSORS.json").read_text()
    new = change(text)
    assert new != text
    return new.encode()


def tree(change: Callable[[dict[str, Any]], None]) -> bytes:
    """The printed dump with one node changed."""
    value = json.loads(debugger(lambda text: text + " "))

    def visit(node: dict[str, Any]) -> None:
        change(node)
        for child in node.get("children", []):
            visit(child)

    visit(value)
    return json.dumps(value).encode()


def probabilities(node: dict[str, Any]) -> None:
    if node["module_path"].endswith("layers.0.mlp.gate"):
        shown = ["tensor([[0.2500, 0.2500, 0.2500, 0.2500]," + "[0.7000, 0.1000, 0.1000, 0.1000]," * 4 + "])"]
        node["outputs"] = {"shape": "torch.Size([5, 4])", "dtype": "torch.float32", "value": shown}


def without_layer_0(node: dict[str, Any]) -> None:
    kept = [child for child in node.get("children", []) if not child["module_path"].endswith("layers.0")]
    if "children" in node:
        node["children"] = kept


def one_row_less(node: dict[str, Any]) -> None:
    if node["module_path"].endswith("lm_head"):
        shown = ["tensor([[" + "[" + "1.0, " * 16 + "]," + "[" + "2.0, " * 16 + "]" + "]])"]
        node["outputs"] = {"shape": "torch.Size([1, 2, 16])", "dtype": "torch.float32", "value": shown}


IKU1 = goldens.iku1_bytes()
NPY = npy_bytes(all_layers())
GARBAGE: list[tuple[str, bytes, dict[str, Any], str]] = [
    # ---- vLLM
    ("vllm", npy_bytes(np.zeros_like(all_layers())), SAY,
     "layer 1 holds zeros alone: it is a dense layer .* or its capt"),
    ("vllm", npy_bytes(changed(all_layers(), (2, 3), 0)), SAY, "layer 3, token 2: all ids are 0.*the capture failed"),
    ("vllm", npy_bytes(changed(all_layers(), (4, 2, 0), 5)), SAY, "layer 2, token 4: .* have one outside 0 to 4"),
    ("vllm", npy_bytes(changed(all_layers(), (4, 2, 0), -2)), SAY, "layer 2, token 4: .* have one outside 0 to 4"),
    ("vllm", npy_bytes(changed(all_layers(), (1, 1), 3)), SAY, "layer 1, token 1: .* have one named twice"),
    ("vllm", npy_bytes(changed(all_layers(), (slice(None), 2), -1)), SAY, "layer 2 has no route of any token"),
    ("vllm", npy_bytes(changed(all_layers(), (0, 0), [1, 2])), SAY, "layer 0 has routes and is none of those with exp"),
    ("vllm", npy_bytes(all_layers().astype(np.float32)), SAY,
     "float32 numbers: gates or probabilities, not expert ids"),
    ("vllm", npy_bytes(all_layers().transpose(1, 0, 2).copy()), SAY,
     "axis has 6 entries.*were layers and tokens exchanged"),
    ("vllm", npy_bytes(all_layers().transpose(0, 2, 1).copy()), SAY,
     r"4 slots, and 2 experts .*layer axis seems to be last"),
    ("vllm", npy_bytes(all_layers()[:4]), {**SAY, "ids": goldens.IDS},
     "4 rows from token 0 on and there are 6 .*missing"),
    ("vllm", npy_bytes(all_layers()), {**SAY, "ids": [1, 2]}, "6 rows .* 2 token ids.*too many"),
    ("vllm", npy_bytes(all_layers()[..., 0]), SAY, r"shape \(6, 4\) is no \[tokens, layers, k\]"),
    ("vllm", NPY[:-4], SAY, "needs 192 bytes and has 188: cut short or damaged"),
    ("vllm", NPY.replace(b"(6, 4, 2)", b"(60000000000, 4, 2)"), SAY, "no header of a plain array|needs .* bytes"),
    ("vllm", NPY.replace(b"'<i4'", b"'|O8'"), SAY, "a pickle, which is never opened here"),
    ("vllm", response(routed_experts=None), SAY, "routed_experts is null: the server lost the routes"),
    ("vllm", response(routed_experts=[[[1, 2]], [[1]]]), SAY, r"no regular \[tokens, layers, k\]"),
    ("vllm", goldens.npz_bytes()[:-30], SAY, "damaged zip archive, or was cut short"),
    # ---- SGLang
    ("sglang", goldens.sglang_payload()[:-8], {**SAY, "ids": goldens.IDS},
     "no base64, or was cut short|no whole number|no .rows"),
    ("sglang", goldens.sglang_payload(ROUTES[:3]), {**SAY, "ids": goldens.IDS}, "rows are missing, or a size is wrong"),
    ("sglang", goldens.sglang_payload(np.zeros_like(ROUTES)), {**SAY, "ids": goldens.IDS}, "layer 1 holds zeros alone"),
    ("sglang", goldens.sglang_payload(changed(ROUTES, (0, 0, 0), 9)), {**SAY, "ids": goldens.IDS}, "outside 0 to 4"),
    ("sglang", goldens.sglang_json().replace(b'"completion_tokens": 3', b'"completion_tokens": 9'), SAY,
     "rows are missing"),
    ("sglang", goldens.sglang_json().replace(b"AA", b"A~", 1), SAY, "no base64"),
    ("sglang_csv", lines(goldens.csv_lines, 2, "1,9,3\n"), SAY, "line 3: expert 9 of layer 1 is outside 0 to 4"),
    ("sglang_csv", lines(goldens.csv_lines, 2, "1,0,3\n"), SAY, "line 3: layer 1, expert 0 was counted before"),
    ("sglang_csv", "".join(goldens.csv_lines()[:11]).encode(), SAY, "layer 3 has experts and no row"),
    ("sglang_csv", lines(goldens.csv_lines, 2, "1,0.5,3\n"), SAY, "line 3 is no row of 3 numbers"),
    ("sglang_csv", "".join(goldens.csv_lines()).encode()[:-1], SAY, "line 16 has no end: the file was cut short"),
    ("sglang_csv", b"layer_id,expert_id,count\n1,0,0\n2,0,0\n3,0,0\n", SAY, "all counts are 0"),
    # ---- llama.cpp
    ("imatrix", b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1), SAY, "claims 1152921504606846976 tensors"),
    ("imatrix", b"GGUF" + struct.pack("<I", 1 << 24) + bytes(16), SAY, "version 16777216 .or of a big-endian"),
    ("imatrix", goldens.gguf_bytes(goldens.imatrix_entries(), "model"), SAY,
     "a GGUF of type 'model', not an importance"),
    ("imatrix", goldens.gguf_bytes(goldens.imatrix_entries())[:-64], SAY, "ends beyond the file: it was cut short"),
    ("imatrix", gguf(blk__2__ffn_up_exps__weight__counts=[[9], [0], [1], [1], [1]]), SAY,
     "not those of the layer's other"),
    ("imatrix", gguf(blk__1__ffn_up_exps__weight__counts=np.full((5, 1), 0.5)), SAY, "which are no counts"),
    ("imatrix", gguf(blk__1__ffn_up_exps__weight__counts=[[12]]), SAY, "one count for all experts"),
    ("imatrix", goldens.gguf_bytes(goldens.imatrix_entries()), {"top_k": 3},
     "counted 2 experts per token, and top_k=3"),
    ("imatrix", goldens.gguf_bytes({"blk.0.ffn_down.weight.counts": np.ones((1, 1))}), SAY, "has no weight of experts"),
    ("imatrix_dat", goldens.dat_bytes()[:-40], SAY, "is cut short or damaged|bytes are left"),
    ("imatrix_dat", goldens.dat_bytes(4), SAY, "16 values, no multiple of 5 experts"),
    ("imatrix_dat", goldens.dat_bytes() + b"more", SAY, "behind its last entry"),
    ("imatrix_dat", struct.pack("<i", 1 << 19) + goldens.dat_bytes()[4:], SAY, "claims 524288 entries"),
    ("moe_trace", lines(goldens.moe_trace_lines, 1, None), SAY, "twice for one token|ends with 1 experts"),
    ("moe_trace", lines(goldens.moe_trace_lines, 3, "1,7\n"), SAY, "line 4: expert 7 of layer 1 is outside 0 to 4"),
    ("moe_trace", b"layer,expert\n1,2\n1,2\n", SAY, "names expert 2 twice for one token; top_k=2 is wrong"),
    ("moe_trace", "".join(goldens.moe_trace_lines()).encode(), {**SAY, "top_k": 4}, "top_k= is wrong|top_k=4 is wrong"),
    ("kl_base", goldens.kl_bytes()[:-3], {}, "are there: it was cut short"),
    ("kl_base", kl(8, struct.pack("<i", 1 << 30)), {}, "the token ids needs"),
    ("kl_base", kl(20, struct.pack("<i", 99)), {}, "token ids outside 0 to 6"),
    ("kl_base", kl(68, struct.pack("<ff", 0.0, -0.1)), {},
     "window 0, row 0 of those recorded: probabilities add up to 6.33"),
    ("kl_base", kl(68, struct.pack("<ff", float("nan"), 0)), {}, "probabilities add up to nan"),
    # ---- transformers
    ("transformers_debug", tree(probabilities), {},
     "adds up to 1 in every row: probabilities, where router logits are cl"),
    ("transformers_debug", tree(without_layer_0), {}, "layer 0 is missing .the debugger prunes"),
    ("transformers_debug", tree(one_row_less), {}, "'logits' has 2 rows and another tap 5: rows are missing"),
    ("transformers_debug", debugger(lambda text: text[: len(text) // 2]), {}, "no JSON, or was cut short"),
    ("transformers_debug", debugger(lambda text: text.replace("torch.Size([5, 2])", "torch.Size([5, 3])")), {},
     "shows 10 num"),
    ("transformers_debug", debugger(lambda text: text.replace("torch.Size([1, 5, 8])", "torch.Size([5, 1, 8])")), {},
     "batch of 5"),
    ("transformers_debug", debugger(lambda text: text.replace("tensor([[0, 1]", "tensor([[1, 1]")), {}, "named twice"),
    ("transformers_debug", (FIXTURES / "debugger_printed/MixtralForCausalLM_debug_tree_SUMMARY.json").read_bytes(), {},
     "a summary; open the .*FULL_TENSORS.json"),
    ("transformers_debug", debugger(lambda text: text.replace("tensor(", "tensor(...")), {}, "cut by torch's printing"),
    # ---- OLMoE
    ("olmoe", olmoe(exp_ids=ROUTES[:3].tolist()), SAY,
     "3 slots, and 2 experts are chosen .slots and layers are exchanged"),
    ("olmoe", olmoe(input_ids=[1, 2]), SAY, "line 1: 2 input_ids and 3 rows of exp_ids: rows are missing"),
    ("olmoe", olmoe(exp_ids=(ROUTES[:3].transpose(0, 2, 1) / 7).tolist()), SAY, "probabilities or gates, not ids"),
    ("olmoe", olmoe(exp_ids=np.zeros((3, 2, 3), int).tolist()), SAY, "layer 1 holds zeros alone"),
    ("olmoe", "".join(goldens.olmoe_lines())[:-20].encode(), SAY, "line 2 has no end: the file was cut short"),
    # ---- JustVugg/colibri
    ("route_trace", lines(goldens.route_trace_lines, 2, None), SAY, "row 3 of layer 1 where row 2 of layer 1 is due"),
    ("route_trace", "".join(goldens.route_trace_lines()[:4] + goldens.route_trace_lines()[8:]).encode(), SAY,
     "call 2 follows call 0; calls are missing"),
    ("route_trace", "".join(goldens.route_trace_lines()[:-1]).encode(), SAY, "ends without 1 rows of layer 3"),
    ("route_trace", lines(goldens.route_trace_lines, 5, "1 1 2 9:0.5 1:0.5\n"), SAY,
     "layer 2, token 1: .* outside 0 to 4"),
    ("route_trace", lines(goldens.route_trace_lines, 5, "1 1 2 3:0.5 3:0.5\n"), SAY, "named twice"),
    ("route_trace", lines(goldens.route_trace_lines, 5, "1 1 2 3:0.5 zero\n"), SAY,
     "line 6 is no `call row layer id:gate"),
    ("route_trace", "".join(goldens.route_trace_lines()).encode()[:-5], SAY, "line 18 has no end"),
    ("route_trace", "".join(goldens.route_trace_lines()).encode(), {**SAY, "ids": [1, 2, 3]}, "6 rows .* 3 token ids"),
    ("usage", lines(goldens.usage_lines, 3, "1 99 2\n", True), SAY, "layer 1: expert 99 is outside 0 to 4"),
    ("usage", lines(goldens.usage_lines, 3, "7 1 2\n", True), SAY, "layer 7 is beyond the 4 layers of its header"),
    ("usage", lines(goldens.usage_lines, 3, "1 x 2\n", True), SAY, "line 4 is no `layer expert count`"),
    ("usage", lines(goldens.usage_lines, 0, "-1 4 9\n", True), SAY, "its header says 9 experts, and there are 5"),
    ("usage", IKU1[:-4], SAY, "need 80 bytes and 76 are there: it was cut short"),
    ("usage", b"IKU1" + struct.pack("<II", 1 << 31, 1 << 31) + IKU1[12:], SAY, "need .* bytes and 80 are there"),
    ("usage", IKU1[:12] + bytes(80), SAY, "all counts are 0"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "content", "say", "why"), GARBAGE)
def test_garbage_is_refused_and_the_reason_is_named(
    format: str, content: bytes, say: dict[str, Any], why: str, tmp_path: Path
) -> None:
    """Found by content, refused by name, with the file in the sentence."""
    path = tmp_path / "recording"
    path.write_bytes(content)
    with pytest.raises(lab.FormatError, match=why) as caught:
        lab.load_trace(path, **say)
    assert str(path) in str(caught.value)


def test_every_format_has_at_least_three_kinds_of_garbage() -> None:
    recorder = ["sglang_recorder"] * 3  # below, for they are archives
    counts = {name: [row[0] for row in GARBAGE].count(name) for name in {golden.format for golden in GOLDENS}}
    counts["sglang_recorder"] = len(recorder)
    assert min(counts.values()) >= 3, counts


def test_usage_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    path.write_bytes(lines(goldens.usage_lines, 1, "-2 2 5\n", True))
    with pytest.raises(lab.UnsupportedError, match="usage of version 2; 1 is read here"):
        lab.load_trace(path, **SAY)


# ---- archives of torch.save ----------------------------------------------------------------------------------------


def rewritten(tmp_path: Path, name: str, change: Callable[[str, bytes], bytes | None], compress: bool = False) -> Path:
    """A torch archive with its members changed, or left out."""
    path = tmp_path / "recording.pt"
    kind = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(FIXTURES / name) as old, zipfile.ZipFile(path, "w", kind) as new:
        for info in old.infolist():
            raw = change(info.filename.partition("/")[2], old.read(info))
            if raw is not None:
                new.writestr(info.filename, raw)
    return path


class _Evil:
    """What a pickle would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("/never", "w"))


def _pickled(value: Any, protocol: int) -> Callable[[str, bytes], bytes]:
    import pickle

    return lambda member, raw: pickle.dumps(value, protocol) if member == "data.pkl" else raw


ARCHIVES: list[tuple[str, Callable[[str, bytes], bytes | None], str]] = [
    ("sglang_stat.pt", _pickled({"logical_count": _Evil()}, 2),
     "wants to call (_?io|__builtin__|builtins).open; it was not op"),
    ("sglang_stat.pt", _pickled({"logical_count": _Evil()}, 4), "instruction .*plain data and tensors do not need"),
    ("sglang_stat.pt", _pickled({"logical_count": bytearray(4)}, 5), "instruction|it was not opened"),
    ("sglang_stat.pt", _pickled({"counts": 3}, 2), "it holds counts, no recording"),
    ("sglang_stat.pt", lambda member, raw: None if member == "data/0" else raw,
     "the storage '0' of a tensor is missing"),
    ("sglang_stat.pt", lambda member, raw: raw[:-8] if member == "data/0" else raw,
     "the storage '0' has 88 bytes, and 24 "),
    ("sglang_stat.pt", lambda member, raw: bytes(len(raw)) if member == "data/0" else raw, "all counts are 0|nothing"),
    ("sglang_stat.pt", lambda member, raw: b"\xff" * len(raw) if member == "data/0" else raw, "negative counts"),
    ("sglang_stat.pt", lambda member, raw: b"big" if member == "byteorder" else raw, "written on a big-endian machine"),
    ("sglang_stat.pt", lambda member, raw: raw[:40] if member == "data.pkl" else raw, "cut short|name without an end"),
    ("sglang_stat.pt", lambda member, raw: raw.replace(b"IntStorage", b"OddStorage"), "stored as OddStorage"),
    ("sglang_per_token_0.pt", lambda member, raw: raw.replace(b"\x05\0\0\0\x04\0\0\0", b"\x05\0\0\0\x09\0\0\0"),
     "physical experts outside 0 to 5"),
    ("sglang_per_token_0.pt", lambda member, raw: raw.replace(b"\x05\0\0\0\x04\0\0\0", b"\x05\0\0\0\x03\0\0\0"),
     "contradict the counts beside them"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "why"), ARCHIVES)
def test_an_archive_of_torch_that_is_no_recording_is_refused(
    name: str, change: Callable[[str, bytes], bytes | None], why: str, tmp_path: Path
) -> None:
    """Nothing of it is run; the reason is named."""
    path = rewritten(tmp_path, name, change)
    with pytest.raises(lab.FormatError, match=why):
        lab.load_trace(path, **STAT)
    assert not Path("/never").exists()


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    """torch stores plain bytes; what is compressed may be a bomb."""
    path = rewritten(tmp_path, "sglang_stat.pt", lambda member, raw: raw + bytes(100000), compress=True)
    with pytest.raises(lab.FormatError, match="is compressed"):
        lab.load_trace(path, **STAT)


def test_ranks_of_two_recordings_are_not_joined(tmp_path: Path) -> None:
    """Other passes, or files of other formats."""
    first, path = FIXTURES / "sglang_per_token_0.pt", tmp_path
    other = rewritten(path, "sglang_per_token_1_same.pt", lambda _, raw: raw.replace(b"passes", b"passes"))
    assert lab.load_trace([first, other], **STAT).ids == [11, 12, 13, 14]
    with pytest.raises(lab.FormatError, match="one file, written by rank 0"):
        lab.load_trace([FIXTURES / "sglang_stat.pt", FIXTURES / "sglang_stat.pt"], **STAT)
    (tmp_path / "x.npy").write_bytes(NPY)
    with pytest.raises(lab.ArgumentError, match="files of a list are of one recording; these are"):
        lab.load_trace([first, tmp_path / "x.npy"], **STAT)


def test_a_zip_bomb_of_arrays_is_refused(tmp_path: Path) -> None:
    """A member a thousand times its packed size is read no further than its directory."""
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("routed_experts.npy", npy_bytes(np.zeros((1 << 20, 4, 2), np.int32)))
    with pytest.raises(lab.FormatError, match="claims 33554"):
        lab.load_trace(path, **SAY)


def test_an_empty_array_and_one_of_nothing_are_refused(tmp_path: Path) -> None:
    """No token, and elements without a size."""
    path = tmp_path / "routes.npy"
    for array, why in ((np.zeros((0, 4, 2), np.int32), "no route"), (np.zeros((3, 4, 2), "S1"), "not expert ids")):
        path.write_bytes(npy_bytes(array))
        with pytest.raises(lab.FormatError, match=why):
            lab.load_trace(path, **SAY)
    path.write_bytes(npy_bytes(np.zeros((3, 4, 2), "S1")).replace(b"|S1", b"|S0")[:-24])
    with pytest.raises(lab.FormatError, match="elements of no size"):
        lab.load_trace(path, **SAY)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda folder, name: (folder / name).unlink(), "cannot read .*No such file"),
        (lambda folder, name: (folder / name).write_bytes(b"\x08" + bytes(20)), "no sound safetensors file"),
        (lambda folder, name: (folder / name).write_bytes((folder / name).read_bytes()[:-4]), "no sound safetensors"),
    ],
)
def test_a_damaged_tensor_beside_a_dump_is_refused(
    change: Callable[[Path, str], None], why: str, tmp_path: Path
) -> None:
    """The tree is sound, a file of it is not."""
    tree = goldens.debugger_files(tmp_path)
    change(tree.parent, "MixtralForCausalLM.lm_head_outputs.safetensors")
    with pytest.raises(lab.ColibriError, match=why):
        lab.load_trace(tree)


def test_a_dump_reads_no_file_that_is_not_beside_it(tmp_path: Path) -> None:
    """A name that leads elsewhere is refused."""
    tree = goldens.debugger_files(tmp_path)
    text = tree.read_text().replace("./MixtralForCausalLM.lm_head_outputs", "../MixtralForCausalLM.lm_head_outputs")
    tree.write_text(text)
    with pytest.raises(lab.FormatError, match=r"names the file '\.\./.*', which is not beside the tree"):
        lab.load_trace(tree)


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").write_bytes(b"0" * 64)

    def closed(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", closed)
    for format in (None, "colibri", "vllm"):
        with pytest.raises(lab.FileError, match=r"cannot read .*closed: Permission denied"):
            lab.load_trace(tmp_path / "closed", format)


@pytest.mark.parametrize("shape", ["0, 99999999999999999999", f"0, {1 << 62}, {1 << 62}", "1," * 70])
def test_a_shape_that_no_array_can_have_is_refused(tmp_path: Path, shape: str) -> None:
    header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({shape}), }}\n".encode()
    data = b"" if shape.startswith("0") else b"\0" * 4
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + data)
    with pytest.raises(lab.FormatError, match="shape that makes no sense"):
        lab.load_trace(tmp_path / "x.npy", config=CONFIG)


def test_an_archive_of_many_members_that_are_small_until_unpacked_is_refused(tmp_path: Path) -> None:
    """No member alone is out of proportion; together they would fill the memory."""
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(64):
            archive.writestr(f"{number}.npy", bytes(1 << 20))
    with pytest.raises(lab.FormatError, match="claim 67108864 bytes out of"):
        lab.load_trace(tmp_path / "x.npz", config=CONFIG)


@pytest.mark.parametrize("dense", [7, [[0]], "0", {"0": 1}])
def test_dense_layers_of_a_config_that_are_no_list_are_asked_for(tmp_path: Path, dense: Any) -> None:
    np.save(tmp_path / "x.npy", ROUTES)
    config = {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": dense}
    with pytest.raises(lab.ArgumentError, match=r"mlp_only_layers.*give layers="):
        lab.load_trace(tmp_path / "x.npy", config=config)


@pytest.mark.parametrize("there", ["pipe", "zero"])
def test_a_config_that_is_a_pipe_or_device_is_refused(tmp_path: Path, there: str) -> None:
    np.save(tmp_path / "x.npy", ROUTES)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(lab.FormatError, match="no regular file"):
        lab.load_trace(tmp_path / "x.npy", config=tmp_path / there)
