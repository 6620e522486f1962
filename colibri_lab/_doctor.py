"""The health of a checkpoint folder, told before anything is loaded: `lab.doctor(path)`."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from colibri_lab._files import local_path, must_exist
from colibri_lab.errors import ColibriError, FileError
from colibri_lab.sniff import not_safetensors, read_json
from colibri_lab.tokenizer import Tokenizer
from colibri_lab.trace_file import is_trace

__all__ = ["Report", "doctor"]

_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


@dataclass
class Report:
    """What `doctor` found. Printing it shows everything; `ok` is True when there is no problem."""

    path: Path
    facts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    opens: bool | None = None
    """Whether lab.open takes it; None when the engine is not built here."""

    @property
    def ok(self) -> bool:
        """No problem found."""
        return not self.problems

    def __str__(self) -> str:
        count = len(self.problems)
        verdict = f"{count} problem{'s' * (count > 1)}" if count else "healthy"
        lines = [f"{self.path}: {verdict}"]
        for mark, sentences in (("✗", self.problems), ("!", self.notes), ("·", self.facts)):
            lines += [f"  {mark} {sentence}" for sentence in sentences]
        return "\n".join(lines)

    __repr__ = __str__


def doctor(path: str | PathLike[str], values: bool = False) -> Report:
    """Looks at the files of a checkpoint and says what is wrong with them, in sentences.

    `path` is a folder, or a file in it. Reads headers and small JSON files, no tensor data: config.json, the weight
    files (present, complete against the index, sound headers, no Git LFS pointers or web pages in their place), pickles
    (never opened), the tokenizer; then asks lab.open. `values` reads all weights too: those that hold NaN or Inf are
    problems. Raises nothing for a sick checkpoint: all is in the report.
    """
    folder = local_path(path)
    report = Report(folder)
    try:
        must_exist(folder)
    except FileError as error:
        report.problems.append(str(error))
        return report
    if not folder.is_dir():
        if is_trace(folder):
            report.problems.append(f"{folder} is a trace of a run, not a checkpoint; lab.load_trace reads it")
            return report
        folder = folder.parent
    for look in (_config, _weights, _tokenizer):
        try:
            look(folder, report)
        except OSError as error:  # a name too long for the system, a folder that may not be listed
            report.problems.append(f"cannot look at {error.filename or folder}: {error.strerror}")
    _opens(report.path, report, values)
    return report


def _config(folder: Path, report: Report) -> None:
    config = _json(folder / "config.json", report, needed="it says which architecture the weights belong to")
    if config is None:
        return
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        report.problems.append("config.json has no model_type")
        return
    named = {name: config[name] for name in ("num_local_experts", "num_experts", "n_routed_experts") if name in config}
    experts = ", ".join(f"{name} {value}" for name, value in named.items()) or "no number of experts"
    report.facts.append(f"config.json: {model_type}, {config.get('num_hidden_layers')} layers, {experts}")
    if len(set(map(str, named.values()))) > 1:
        report.problems.append(f"config.json contradicts itself: {experts}")


def _weights(folder: Path, report: Report) -> None:
    """Single file before an index, as transformers does."""
    single, index = folder / "model.safetensors", folder / _INDEX
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
    if pickles:
        report.notes.append(f"pickles are never opened, since loading one runs code: {_some(pickles)}")
    if single.exists():
        if index.exists():
            report.notes.append(f"both model.safetensors and {_INDEX} exist; the single file is the one that is read")
        _summary({single.name: _header(single, report)}, report)
    elif index.exists():
        _shards(folder, index, report)
    else:
        others = sorted(file.name for file in folder.glob("*.safetensors"))
        found = f"; it has {_some(others)}" if others else "; its weights are pickles only" if pickles else ""
        report.problems.append(f"there is neither model.safetensors nor {_INDEX}{found}")


def _shards(folder: Path, index: Path, report: Report) -> None:
    content = _json(index, report, needed="it says which file holds which tensor")
    weight_map = content.get("weight_map") if content is not None else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        if content is not None:
            report.problems.append(f"{_INDEX} has no weight_map from tensor names to file names")
        return
    names = sorted(set(weight_map.values()))
    leaving = [name for name in names if Path(name).name != name]
    if leaving:
        report.problems.append(f"{_INDEX} names files outside the folder: {_some(leaving)}")
    missing = [name for name in names if name not in leaving and not (folder / name).exists()]
    if missing:
        report.problems.append(f"{len(missing)} of {len(names)} weight files are missing: {_some(missing)}")
    headers = {name: _header(folder / name, report) for name in names if name not in leaving and name not in missing}
    absent = [f"{t} (in {f})" for t, f in weight_map.items() if t not in (headers.get(f) or (t,))]
    if absent:
        report.problems.append(f"{len(absent)} tensors that the index names are not in their file: {_some(absent)}")
    extra = [f"{t} (in {f})" for f, header in headers.items() for t in header or () if weight_map.get(t) != f]
    if extra:
        report.problems.append(f"{len(extra)} tensors are in a file and not in the index: {_some(extra)}")
    _summary(headers, report)


def _header(file: Path, report: Report) -> dict[str, Any] | None:
    """Tensor entries of one file, or None after noting what is wrong with it."""
    from safetensors import SafetensorError, safe_open

    try:
        wrong = not_safetensors(file)
        if wrong is not None:
            report.problems.append(f"{file.name} is {wrong}")
            return None
        with safe_open(file, framework="numpy"):  # the library checks sizes, offsets and coverage
            pass
        with file.open("rb") as handle:
            header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
    except (OSError, SafetensorError) as error:
        report.problems.append(f"{file.name} cannot be read: {error}")
        return None
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _summary(headers: dict[str, dict[str, Any] | None], report: Report) -> None:
    entries = [entry for header in headers.values() for entry in (header or {}).values()]
    total = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in entries)
    kinds = ", ".join(f"{count} {name}" for name, count in Counter(entry["dtype"] for entry in entries).most_common())
    report.facts.append(
        f"weights: {len(headers)} files, {len(entries)} tensors, {total / 1e6:,.1f} MB ({kinds or 'none'})"
    )


def _tokenizer(folder: Path, report: Report) -> None:
    file = folder / "tokenizer.json"
    if not file.is_file():
        others = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (folder / name).is_file()]
        found = f"; it has {_some(others)}" if others else ""
        report.notes.append(f"there is no tokenizer.json, so the model takes ids, not text{found}")
        _json(folder / "generation_config.json", report)  # else the tokenizer reads it, for the end tokens
        return
    try:
        tokenizer = Tokenizer.load(folder)
    except ColibriError as error:
        report.problems.append(str(error))
        return
    assert tokenizer is not None
    chat = "with" if tokenizer.chat_templates else "without"
    report.facts.append(
        f"tokenizer: {tokenizer.vocab_size} tokens, {chat} a chat template, ends at {tokenizer.eos_ids}"
    )
    settings = _json(folder / "tokenizer_config.json", report) or {}
    wants, adds = settings.get("add_bos_token"), tokenizer.bos_id in tokenizer.encode("a")[:1]
    if isinstance(wants, bool) and tokenizer.bos_id is not None and wants != adds:
        report.notes.append(
            f"tokenizer_config.json says add_bos_token {str(wants).lower()}, but tokenizer.json "
            f"{'adds' if adds else 'does not add'} a start token; tokenizer.json is followed"
        )


def _opens(path: Path, report: Report, values: bool) -> None:
    try:
        from colibri_lab import model, nan
    except ImportError:
        report.notes.append("whether lab.open takes it is not known: the compiled engine is not built here")
        return
    try:
        with model.open(path) as opened:
            report.notes += opened.info["not_used"]
            sick = [str(weight) for weight in nan.weights(opened)] if values else []
            report.problems += sick
            if values and not sick:
                report.facts.append(f"the {len(opened.weights)} weights are finite")
    except (ColibriError, OSError) as error:
        report.opens = False
        report.problems.append(f"lab.open refuses it: {error}")
    else:
        report.opens = True
        report.facts.append("lab.open takes it")


def _json(file: Path, report: Report, needed: str | None = None) -> dict[str, Any] | None:
    """A JSON object, or None after noting what is wrong; a missing file is a problem only when `needed` says why."""
    if not file.is_file():
        if needed:
            report.problems.append(f"{file.name} is missing; {needed}")
        return None
    try:
        return read_json(file)
    except ColibriError as error:
        report.problems.append(str(error))
        return None


def _some(names: list[str], count: int = 3) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
