"""Pairs that compute the same thing in two ways: another program, storage, spelling, order of sums, or other passes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from checkpoints import fused, write_safetensors

from colibri_lab.trace import Trace
from tests.planted.case import Case
from tests.planted.unseen_forward import Forward, faulty
from tests.planted.unseen_models import ALL, MOE, WITH_WEIGHTS, Config, Tensors, base, family_of, run, write

Pair = Callable[[Path, Config, Tensors, list[int]], tuple[Trace, Trace]]


def case(model: str, what: str, pair: Pair, engine: bool = True) -> Case:
    """`engine`: our engine knows the family, so there is a checkpoint to give with the traces."""

    def make(folder: Path) -> tuple[Trace, Trace, Path | None]:
        config, tensors, ids = base(model)
        reference = write(folder / "reference", config, tensors) if engine else None
        return *pair(folder, config, tensors, ids), reference

    return Case(f"unseen-{model}-clean-{what}", "clean", family_of(model), None, "", make)


def numpy_and_engine(capture: tuple[str, ...] = WITH_WEIGHTS, chunks: tuple[int, ...] = ()) -> Pair:
    def pair(folder: Path, config: Config, tensors: Tensors, ids: list[int]) -> tuple[Trace, Trace]:
        return run(folder / "reference", ids, capture), Forward(config, tensors).run(ids, capture, chunks)

    return pair


def other_file(change: Callable[[Config, Tensors], tuple[Config, Mapping[str, np.ndarray]]]) -> Pair:
    """The same values in a file of another form."""

    def pair(folder: Path, config: Config, tensors: Tensors, ids: list[int]) -> tuple[Trace, Trace]:
        suspect = write(folder / "suspect", *change(config, tensors))
        return run(folder / "reference", ids), run(suspect, ids)

    return pair


def half_file(dtype: type) -> Pair:
    """Values that a half type can hold, once stored as float32 and once in that type."""

    def pair(folder: Path, config: Config, tensors: Tensors, ids: list[int]) -> tuple[Trace, Trace]:
        halves = {name: value.astype(dtype) for name, value in tensors.items()}
        reference = write(folder / "reference", config, {n: v.astype(np.float32) for n, v in halves.items()})
        return run(reference, ids), run(write(folder / "suspect", config, halves), ids)

    return pair


def in_two_shards(folder: Path, config: Config, tensors: Tensors, ids: list[int]) -> tuple[Trace, Trace]:
    suspect = write(folder / "suspect", config, tensors)
    (suspect / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for file in set(files.values()):
        write_safetensors(suspect / file, {name: tensors[name] for name in tensors if files[name] == file})
    (suspect / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return run(folder / "reference", ids), run(suspect, ids)


def in_passes(*chunks: int) -> Pair:
    def pair(folder: Path, config: Config, tensors: Tensors, ids: list[int]) -> tuple[Trace, Trace]:
        return run(folder / "reference", ids), run(folder / "reference", ids, chunks=chunks)

    return pair


def moe_and_all(folder: Path, config: Config, tensors: Tensors, ids: list[int]) -> tuple[Trace, Trace]:
    return run(folder / "reference", ids, ALL), run(folder / "reference", ids, MOE)


def old_spelling(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """rope_theta where configs had it before transformers 5."""
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    return old | {"rope_theta": config["rope_parameters"]["rope_theta"], "rope_scaling": None}, tensors


def summed_in_halves(self: Forward, x: np.ndarray, name: str) -> np.ndarray:
    """Another order of sums, as another kernel or a split over two devices has it."""
    weight, half = self.tensors[name + ".weight"], x.shape[-1] // 2
    y = x[:, half:] @ weight[:, half:].T + x[:, :half] @ weight[:, :half].T
    return y + self.tensors[name + ".bias"] if name + ".bias" in self.tensors else y


def other_sums(chunks: tuple[int, ...] = ()) -> Pair:
    def pair(folder: Path, config: Config, tensors: Tensors, ids: list[int]) -> tuple[Trace, Trace]:
        suspect = faulty(linear=summed_in_halves)(config, tensors)
        return Forward(config, tensors).run(ids), suspect.run(ids, chunks=chunks)

    return pair


def clean() -> list[Case]:
    models = (
        "mixtral", "mixtral-square", "mixtral-many", "qwen3", "qwen3-dense", "qwen2", "qwen2-sparse", "olmoe",
        "olmoe-clip",
    )  # fmt: skip
    return [
        *(case(model, "numpy", numpy_and_engine()) for model in models),
        case("qwen2", "numpy-moe-capture", numpy_and_engine(MOE)),
        case("mixtral-square", "numpy-decoding", numpy_and_engine(ALL, (24, 1, 1, 1, 1, 1, 1))),
        case("qwen3-dense", "numpy-chunks", numpy_and_engine(ALL, (13, 13))),
        *(case(model, "bf16-file", half_file(ml_dtypes.bfloat16)) for model in ("mixtral", "qwen3", "qwen2", "olmoe")),
        case("qwen2-sparse", "f16-file", half_file(np.float16)),
        case("mixtral", "stacked-experts", other_file(lambda config, tensors: (config, fused(config, tensors)))),
        case("qwen2-sparse", "stacked-experts", other_file(lambda config, tensors: (config, fused(config, tensors)))),
        case("qwen3", "old-spelling", other_file(old_spelling)),
        case("olmoe", "two-shards", in_two_shards),
        case("mixtral-square", "chunks", in_passes(11, 11, 8)),
        case("qwen2-sparse", "decoding", in_passes(30, 1, 1, 1, 1, 1, 1)),
        case("olmoe-clip", "token-by-token", in_passes(*[1] * 24)),
        case("qwen3", "captures", moe_and_all),
        case("mixtral-many", "order-of-sums", other_sums()),
        case("deepseek", "order-of-sums", other_sums(), engine=False),
        case("glm4", "order-of-sums-and-chunks", other_sums((14, 14)), engine=False),
        case("ernie", "order-of-sums", other_sums(), engine=False),
    ]
