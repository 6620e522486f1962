"""One small sound file of every format that lab.load_trace imports, written by the layout alone: no code of the
package is used. `GOLDENS` names them; each has the keywords it needs and what must come out.
"""

from __future__ import annotations

import base64
import io
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "formats"

# A model of 4 layers, the first dense, 5 experts, 2 chosen; 6 tokens.
LAYERS, MOE, EXPERTS, TOP_K, TOKENS = 4, (1, 2, 3), 5, 2, 6
CONFIG = {
    "model_type": "deepseek_v3", "num_hidden_layers": LAYERS, "first_k_dense_replace": 1, "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
}  # fmt: skip
IDS = [7, 3, 9, 3, 1, 4]


def _routes() -> np.ndarray:
    """[tokens, layers with experts, k]: distinct ids of every row."""
    rng = np.random.default_rng(5)
    return np.argsort(rng.random((TOKENS, len(MOE), EXPERTS)), axis=-1)[..., :TOP_K].astype(np.int32)


ROUTES = _routes()
COUNTS = np.stack([np.bincount(ROUTES[:, i].ravel(), minlength=EXPERTS) for i in range(len(MOE))])
GATES = np.round(np.random.default_rng(6).random(ROUTES.shape), 4).astype(np.float32)


@dataclass(frozen=True)
class Golden:
    """A sound file: how to write it, what to say when opening it, what it is."""

    name: str
    format: str
    write: Callable[[Path], Path]
    say: dict[str, Any] = field(default_factory=dict)
    routes: Any = None  # [tokens, layers with experts, k]
    counts: Any = None  # [layers with experts, experts]
    ids: Any = None


def _file(suffix: str, make: Callable[[], bytes]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / f"golden{suffix}"
        path.write_bytes(make())
        return path

    return write


def _copy(name: str) -> Callable[[Path], Path]:
    return lambda folder: _file(name[name.index(".") :], lambda: (FIXTURES / name).read_bytes())(folder)


def npy_bytes(array: np.ndarray) -> bytes:
    """A .npy, version 1, by hand."""
    descr = array.dtype.str
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {array.shape}, }}"
    header += " " * (-(10 + len(header) + 1) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + array.tobytes()


def all_layers(routes: np.ndarray = ROUTES, dense: int = 0) -> np.ndarray:
    """The early layout of vLLM: every layer of the model, the dense one filled with zeros."""
    return np.concatenate([np.full((len(routes), 1, TOP_K), dense, routes.dtype), routes], axis=1)


def npz_bytes() -> bytes:
    handle = io.BytesIO()
    routes = ROUTES.astype(np.int16)
    np.savez(
        handle, prompt_routed_experts=routes[:4], routed_experts=routes[4:],
        prompt_token_ids=np.array(IDS[:4]), token_ids=np.array([*IDS[4:], 8]),
    )  # fmt: skip
    return handle.getvalue()


def vllm_json() -> bytes:
    routes = ROUTES.copy()
    routes[0] = -1  # the first token came from the prefix cache
    choice = {"index": 0, "text": "…", "token_ids": IDS[4:], "routed_experts": routes[4:].tolist()}
    return json.dumps(
        {"id": "r", "choices": [choice], "prompt_token_ids": IDS[:4], "prompt_routed_experts": routes[:4].tolist()}
    ).encode()


def sglang_payload(routes: np.ndarray = ROUTES) -> bytes:
    return base64.b64encode(np.ascontiguousarray(routes, "<i4").tobytes())


def sglang_json() -> bytes:
    info = {"prompt_tokens": 4, "completion_tokens": 3, "routed_experts": sglang_payload(all_layers()).decode()}
    return json.dumps({"text": "…", "meta_info": info}).encode()


def gguf_bytes(entries: dict[str, np.ndarray], kind: str = "imatrix") -> bytes:
    """A GGUF, version 3, with the key-values of an importance matrix."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    pairs = [
        text("general.type") + struct.pack("<I", 8) + text(kind),
        text("imatrix.datasets") + struct.pack("<IIQ", 9, 8, 1) + text("calibration.txt"),
        text("imatrix.chunk_count") + struct.pack("<II", 4, 2),
        text("imatrix.chunk_size") + struct.pack("<II", 4, 3),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(pairs)) + b"".join(pairs)
    place, data = 0, b""
    for name, array in entries.items():
        shape = array.shape[::-1]
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, place)
        raw = array.astype("<f4").tobytes()
        raw += b"\0" * (-len(raw) % 32)
        data += raw
        place += len(raw)
    return head + b"\0" * (-len(head) % 32) + data


def imatrix_entries() -> dict[str, np.ndarray]:
    entries = {"blk.0.ffn_down.weight.in_sum2": np.ones((1, 4)), "blk.0.ffn_down.weight.counts": np.full((1, 1), 6.0)}
    for place, layer in enumerate(MOE):
        for part in ("gate", "up", "down"):
            sums = np.arange(EXPERTS * 4.0).reshape(EXPERTS, 4) * COUNTS[place][:, None]
            entries[f"blk.{layer}.ffn_{part}_exps.weight.in_sum2"] = sums
            entries[f"blk.{layer}.ffn_{part}_exps.weight.counts"] = COUNTS[place][:, None].astype(np.float64)
        entries[f"blk.{layer}.attn_q.weight.in_sum2"] = np.ones((1, 4))
        entries[f"blk.{layer}.attn_q.weight.counts"] = np.full((1, 1), float(TOKENS))
    return entries


def dat_bytes(experts: int = EXPERTS) -> bytes:
    """The older importance matrix: 2 calls; expert 3 of layer 2 was never used."""
    out = b""
    names = [f"blk.{layer}.{part}.weight" for layer in MOE for part in ("attn_q", "ffn_gate_exps")]
    for name in names:
        values = np.arange(4.0) if "attn" in name else 0.5 * np.arange(experts * 4.0)
        values = (values * 2).astype("<f4")
        if name == "blk.2.ffn_gate_exps.weight":
            values[12:16] = 2
        raw = name.encode()
        out += struct.pack("<i", len(raw)) + raw + struct.pack("<ii", 2, len(values)) + values.tobytes()
    return struct.pack("<i", len(names)) + out + struct.pack("<ii", 2, 8) + b"text.txt"


KL_WINDOW, KL_WORDS, KL_WINDOWS = 6, 7, 2
KL_IDS = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 2]


def kl_logits() -> np.ndarray:
    """[windows, rows, words] log probabilities."""
    z = np.random.default_rng(7).standard_normal((KL_WINDOWS, KL_WINDOW - 1 - KL_WINDOW // 2, KL_WORDS))
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def kl_bytes() -> bytes:
    out = b"_logits_" + struct.pack("<iii", KL_WINDOW, KL_WORDS, KL_WINDOWS) + struct.pack("<12i", *KL_IDS)
    for row in kl_logits().reshape(-1, KL_WORDS):
        lowest, scale = row.min(), (row.max() - row.min()) / 65535
        codes = np.append(np.round((row - lowest) / scale), 0).astype("<u2")  # 7 words are padded to 8
        out += struct.pack("<ff", scale, lowest) + codes.tobytes()
    return out


def route_trace_lines() -> list[str]:
    """A prompt of 4 tokens, then 2 tokens one by one."""
    lines, call = [], 0
    for start, stop in ((0, 4), (4, 5), (5, 6)):
        for place, layer in enumerate(MOE):
            for row, token in enumerate(range(start, stop)):
                pairs = zip(ROUTES[token, place], GATES[token, place], strict=True)
                lines.append(f"{call} {row} {layer} " + " ".join(f"{e}:{g:.4f}" for e, g in pairs) + "\n")
            call += 1
    return lines


def usage_lines(header: bool) -> list[str]:
    lines = [f"-1 {LAYERS} {EXPERTS}\n", "-2 1 2166136261\n"] if header else []
    return lines + [
        f"{layer} {e} {COUNTS[i, e]}\n" for i, layer in enumerate(MOE) for e in range(EXPERTS) if COUNTS[i, e]
    ]


def iku1_bytes() -> bytes:
    block = np.concatenate([np.zeros((1, EXPERTS)), COUNTS]).astype("<u4")
    return b"IKU1" + struct.pack("<II", LAYERS, EXPERTS) + block.tobytes()


def moe_trace_lines() -> list[str]:
    rows = [
        f"{layer},{e}\n"
        for start, stop in ((0, 4), (4, 5), (5, 6))
        for i, layer in enumerate(MOE)
        for token in range(start, stop)
        for e in ROUTES[token, i]
    ]
    return ["layer,expert\n", *rows]


def csv_lines() -> list[str]:
    rows = [f"{layer},{e},{COUNTS[i, e]}\n" for i, layer in enumerate(MOE) for e in range(EXPERTS)]
    return ["layer_id,expert_id,count\n", *rows]


def olmoe_lines() -> list[str]:
    """Two texts of 3 tokens; [token][slot][layer]."""
    turned = ROUTES.transpose(0, 2, 1)
    return [
        json.dumps({"input_ids": IDS[a:b], "predicted_token_ids": IDS[a:b], "exp_ids": turned[a:b].tolist()}) + "\n"
        for a, b in ((0, 3), (3, 6))
    ]


def _text(lines: Callable[[], list[str]]) -> Callable[[], bytes]:
    return lambda: "".join(lines()).encode()


def debugger_files(folder: Path) -> Path:
    """The dump with its tensors in files: a folder of them."""
    import shutil

    shutil.copytree(FIXTURES / "debugger_files", folder / "dump", dirs_exist_ok=True)
    return folder / "dump" / "MixtralForCausalLM_debug_tree_FULL_TENSORS.json"


def debugger_printed(folder: Path) -> Path:
    raw = (FIXTURES / "debugger_printed" / "MixtralForCausalLM_debug_tree_FULL_TENSORS.json").read_bytes()
    return _file(".json", lambda: raw)(folder)


MIXTRAL = {"layers": 2, "experts": 4, "top_k": 2}
RECORDED = np.array(  # of tests/fixtures/formats/make_fixtures.py, logical experts of layers 1 and 2
    [[[3, 2], [3, 1]], [[2, 0], [0, 2]], [[1, 0], [1, 2]], [[0, 2], [3, 1]]]
)

CACHED = ROUTES.copy()
CACHED[0] = -1
LATE = np.concatenate([ROUTES, np.full((1, *ROUTES.shape[1:]), -1, np.int32)])  # the last token sampled has no row
SAY = {"config": CONFIG}

GOLDENS = [
    Golden("vllm-npy", "vllm", _file(".npy", lambda: npy_bytes(all_layers())), {**SAY, "ids": IDS}, ROUTES, None, IDS),
    Golden("vllm-npz", "vllm", _file(".npz", npz_bytes), SAY, LATE, None, [*IDS, 8]),
    Golden("vllm-json", "vllm", _file(".json", vllm_json), SAY, CACHED, None, IDS),
    Golden("sglang-bare", "sglang", _file(".b64", sglang_payload), {**SAY, "ids": [*IDS, 8]}, LATE, None, [*IDS, 8]),
    Golden("sglang-json", "sglang", _file(".json", sglang_json), SAY, ROUTES, None, [-1] * TOKENS),
    Golden("sglang-stat", "sglang_recorder", _copy("sglang_stat.pt"), {"layers": [1, 2], "top_k": 2}, None,
           [[6, 2, 4, 0], [2, 4, 4, 2]]),
    Golden("sglang-per-token", "sglang_recorder", _copy("sglang_per_token_0.pt"), {"layers": [1, 2]}, RECORDED, None,
           [11, 12, 13, 14]),
    Golden("sglang-per-pass", "sglang_recorder", _copy("sglang_per_pass_0.pt"), {"layers": [1, 2], "top_k": 2}, None,
           [[np.sum(RECORDED[:, i] == e) for e in range(4)] for i in range(2)]),
    Golden("sglang-csv", "sglang_csv", _file(".csv", _text(csv_lines)), SAY, None, COUNTS),
    Golden("imatrix", "imatrix", _file(".gguf", lambda: gguf_bytes(imatrix_entries())), SAY, None, COUNTS),
    Golden("imatrix-dat", "imatrix_dat", _file(".dat", dat_bytes), SAY),
    Golden("moe-trace", "moe_trace", _file(".csv", _text(moe_trace_lines)), SAY, None, COUNTS),
    Golden("kl-base", "kl_base", _file(".kld", kl_bytes), {}, None, None, KL_IDS),
    Golden("debugger-printed", "transformers_debug", debugger_printed, {}, None, None, [3, 1, 4, 1, 5]),
    Golden("debugger-files", "transformers_debug", debugger_files, {}, None, None, [3, 1, 4, 1, 5]),
    Golden("olmoe", "olmoe", _file(".jsonl", _text(olmoe_lines)), SAY, ROUTES, None, IDS),
    Golden("route-trace", "route_trace", _file(".txt", _text(route_trace_lines)), {**SAY, "ids": IDS}, ROUTES, None,
           IDS),
    Golden("usage", "usage", _file(".coli_usage", _text(lambda: usage_lines(True))), SAY, None, COUNTS),
    Golden("usage-older", "usage", _file(".coli_usage", _text(lambda: usage_lines(False))), SAY, None, COUNTS),
    Golden("usage-iku1", "usage", _file(".coli_usage", iku1_bytes), SAY, None, COUNTS),
]  # fmt: skip
