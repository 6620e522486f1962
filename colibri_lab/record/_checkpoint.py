"""The model to record: one that is loaded already, or a checkpoint folder that transformers loads."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri_lab._files import local_path, must_exist
from colibri_lab.errors import ArgumentError, FileError, FormatError, nearest
from colibri_lab.record._family import check_family
from colibri_lab.record._libraries import libraries
from colibri_lab.sniff import read_json
from colibri_lab.tokenizer import Tokenizer

__all__ = ["Opened", "open_model"]

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Opened:
    """A model, and what the trace says of where it came from."""

    model: Any
    folder: Path | None  # where its tokenizer is
    name: str
    weights_dtype: str
    identity: str | None

    def tokenizer(self) -> Tokenizer:
        """The checkpoint's own. Raises ArgumentError when the model brings none."""
        tokenizer = Tokenizer.load(self.folder) if self.folder is not None else None
        if tokenizer is None:
            where = f"the checkpoint at '{self.folder}' has no tokenizer.json" if self.folder else "this model has none"
            raise ArgumentError(f"a text needs the checkpoint's tokenizer, and {where}; give token ids instead")
        return tokenizer

    def texts(self, ids: list[int]) -> list[str]:
        """A text per token; empty when there is no tokenizer."""
        tokenizer = Tokenizer.load(self.folder) if self.folder is not None else None
        return [] if tokenizer is None else tokenizer.texts(ids)


def open_model(model: Any, dtype: Any, device: str | None = None) -> Opened:
    """Loads a folder (float32 unless `dtype` says otherwise), or takes the loaded model as it is.

    Raises ArgumentError when another dtype than the model's own is asked for: a model is never cast in place.
    """
    torch, _ = libraries()
    asked = _dtype_name(torch, dtype)
    if isinstance(model, torch.nn.Module):
        return _loaded(model, asked, torch, device)
    folder = local_path(getattr(model, "folder", model))  # an open lab.Model stands for its checkpoint
    return _from_folder(folder, asked or "float32", device)


def _dtype_name(torch: Any, dtype: Any) -> str | None:
    name = dtype if dtype is None or isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if name is not None and name not in DTYPES:
        raise ArgumentError(f"dtype is None or one of {', '.join(DTYPES)}, not {dtype!r:.80}{nearest(name, DTYPES)}")
    return name


def _loaded(model: Any, asked: str | None, torch: Any, device: str | None) -> Opened:
    own = Counter(str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point())
    main = own.most_common(1)[0][0] if own else "float32"
    if asked is not None and asked != main:
        raise ArgumentError(
            f"this model computes in {main}, and a model that is loaded is never cast; load it with dtype={asked!r}, "
            "or give the folder of its checkpoint"
        )
    if device is not None:
        raise ArgumentError("device= is for a checkpoint's folder; a loaded model is recorded where it is")
    name = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    return Opened(model, _folder_of(name), Path(name).name, main, None)


def _folder_of(name: str) -> Path | None:
    """Where the files of a loaded model lie: its folder, or the local copy that the hub's library keeps."""
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    _, transformers = libraries()
    try:
        file = transformers.utils.cached_file(name, "tokenizer.json", local_files_only=True)
    except (OSError, ValueError):
        return None
    return Path(file).parent if file else None


def _from_folder(folder: Path, dtype: str, device: str | None) -> Opened:
    torch, transformers = libraries()
    must_exist(folder)
    if folder.is_file():
        folder = folder.parent
    must_exist(folder / "config.json")
    config = read_json(folder / "config.json")
    check_family(config.get("model_type"), str(folder / "config.json"))
    try:
        settings = _config(transformers, folder, config)
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=settings,
            dtype=getattr(torch, dtype),
            **_experts(transformers, settings, getattr(torch, dtype).itemsize),
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except OSError as error:
        raise FileError(f"transformers cannot load {folder}: {_one_line(error)}") from error
    except Exception as error:  # each reader below it has errors of its own
        raise FormatError(f"transformers cannot load {folder}: {_one_line(error)}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise FormatError(
            f"{folder} lacks weights, which transformers would draw at random: {missing[0]} is one of {len(missing)}"
        )
    loaded.eval()
    if device is not None:
        try:
            loaded.to(device)
        except (RuntimeError, AssertionError) as error:
            raise ArgumentError(f"the model cannot go to the device {device!r}: {_one_line(error)}") from error
    files = sorted(folder.glob("*.safetensors"))
    return Opened(loaded, folder, folder.resolve().name, _stored_dtype(files) or dtype, _identity(files))


def _config(transformers: Any, folder: Path, spelled: dict[str, Any]) -> Any:
    """The configuration as this transformers reads it. Releases pass over what they spell another way: before 5
    `rope_parameters`, in some the number of experts.
    """
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    experts = spelled.get("num_experts", spelled.get("num_local_experts"))
    if experts is not None:
        setattr(config, "num_local_experts" if config.model_type == "mixtral" else "num_experts", experts)
    rope = spelled.get("rope_parameters")
    if rope and int(transformers.__version__.split(".")[0]) < 5:
        config.rope_theta = rope.get("rope_theta", config.rope_theta)
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        config.rope_scaling = None if scaling.get("rope_type", "default") == "default" else scaling
    return config


def _experts(transformers: Any, config: Any, itemsize: int) -> dict[str, str]:
    """The grouped product that is the default wants rows of whole 16 bytes; other sizes need the plain loop."""
    widths = [getattr(config, name, 0) or 0 for name in ("hidden_size", "intermediate_size", "moe_intermediate_size")]
    odd = any(width * itemsize % 16 for width in widths)
    return {"experts_implementation": "eager"} if odd and int(transformers.__version__.split(".")[0]) >= 5 else {}


def _stored_dtype(files: list[Path]) -> str | None:
    """The dtype of most values in the files."""
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
    sizes: Counter[str] = Counter()
    for file in files:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                sizes[tensor["dtype"]] += tensor["data_offsets"][1] - tensor["data_offsets"][0]
    stored = sizes.most_common(1)
    return names.get(stored[0][0], stored[0][0].lower()) if stored else None


def _identity(files: list[Path]) -> str | None:
    from colibri_lab.identity import model_identity

    return model_identity(files) if files else None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
