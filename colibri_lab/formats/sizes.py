"""What a recording does not say and its reader must be told: which layers have experts, how many, how many are chosen.

`config` is where all of it stands for most models; `layers`, `experts` and `top_k` say it one by one and win. Nothing
is guessed: what is needed and was not given raises ArgumentError naming the keyword.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from colibri_lab._files import local_path, must_exist
from colibri_lab.errors import ArgumentError, FormatError, is_whole
from colibri_lab.progress import Progress
from colibri_lab.sniff import read_json

__all__ = ["LIMIT", "Said", "said"]

LIMIT = 1 << 16
"""More layers or experts than this is no model."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k")
_LAYERS = ("num_hidden_layers", "n_layers", "num_layers")
_PARTS = ("text_config", "llm_config", "ffn_config")  # where configs of larger models keep those of the text model
_EVERY_LAYER = {
    "mixtral", "olmoe", "flex_olmo", "phimoe", "gpt_oss", "granitemoe", "granitemoeshared", "granitemoehybrid", "dbrx",
    "jetmoe", "minimax", "minimax_m2", "hunyuan_v1_moe", "qwen3_5_moe", "qwen3_5_moe_text", "mimo_v2_flash",
}  # fmt: skip
"""Model types with experts in every layer, unless their config has one of the fields of `_moe_layers`."""


@dataclass(frozen=True)
class Said:
    """What the caller said about a recording. None is "not said"."""

    num_hidden_layers: int | None = None
    moe_layers: tuple[int, ...] | None = None
    num_experts: int | None = None
    top_k: int | None = None
    ids: list[int] | None = None
    start: int = 0
    windows: tuple[int, ...] | None = None
    model_type: str = "unknown"
    gate_rule: str = "unknown"
    config: dict[str, Any] = field(default_factory=dict)
    progress: Progress = None

    def experts(self, format_name: str) -> int:
        """E; raises ArgumentError when it was not said."""
        if self.num_experts is None:
            _ask(format_name, "how many experts a layer has", "experts=")
        return self.num_experts

    def chosen(self, format_name: str) -> int:
        """k; raises ArgumentError when it was not said."""
        if self.top_k is None:
            _ask(format_name, "how many experts a token is sent to", "top_k=")
        return self.top_k

    def axis(self, length: int, format_name: str, other: int | None = None) -> tuple[int, dict[int, int]]:
        """What a recording's layer axis of `length` counts: (layers of the model, {layer number: position on the axis}
        of those with experts).

        The axis may count all layers or those with experts; which, follows from what was said. Raises ArgumentError
        when nothing was, FormatError when it is neither (`other`, the length of the axis before it, may fit).
        """
        if self.moe_layers is None:
            _ask(format_name, f"which layers the {length} of its layer axis are", "layers=")
        moe, known = self.moe_layers, self.num_hidden_layers
        at_least = moe[-1] + 1
        if length == len(moe):
            return known or at_least, {layer: i for i, layer in enumerate(moe)}
        if length == known or (known is None and length >= at_least):
            return length, {layer: layer for layer in moe}
        every = f"{known} layers, {len(moe)} of them with experts" if known else f"{len(moe)} layers with experts"
        turned = (
            f"; the axis before it has {other}: were layers and tokens exchanged?" if other in (known, len(moe)) else ""
        )
        raise FormatError(f"the layer axis has {length} entries, and the model has {every}{turned}")


def _ask(format_name: str, what: str, keyword: str) -> NoReturn:
    raise ArgumentError(
        f"a recording of the format '{format_name}' does not say {what}; give {keyword} or config= (a config.json, a "
        "model, or a dict)"
    )


def said(
    config: Any = None,
    layers: int | Sequence[int] | None = None,
    experts: int | None = None,
    top_k: int | None = None,
    ids: Sequence[int] | None = None,
    start: int | None = None,
    windows: int | Sequence[int] | None = None,
    progress: Progress = None,
) -> Said:
    """The keywords of `load_trace`, checked and put together. Raises ArgumentError for one that makes no sense."""
    fields = _fields(config)
    moe = _given_layers(layers) if layers is not None else _moe_layers(fields)
    total = _first(fields, _LAYERS)
    if moe and total is not None and moe[-1] >= total:
        raise ArgumentError(f"layers= names layer {moe[-1]}, and the config has {total} layers")
    if total is None and is_whole(layers) and moe:
        total = len(moe)  # all of so many layers
    sizes = {"experts": experts, "top_k": top_k}
    for name, value in sizes.items():
        if value is not None and not (is_whole(value) and 1 <= value <= LIMIT):
            raise ArgumentError(f"{name}= is a whole number from 1 to {LIMIT}, not {value!r:.80}")
    number = _first(fields, _EXPERTS) if experts is None else int(experts)
    # `top_k` is ours; in a Hugging Face config it belongs to sampling.
    chosen = _first(fields, ("top_k",) if "gate_rule" in fields else _TOP_K) if top_k is None else int(top_k)
    if number is not None and chosen is not None and chosen > number:
        raise ArgumentError(f"{chosen} experts chosen of {number} is impossible")
    return Said(
        num_hidden_layers=total,
        moe_layers=moe,
        num_experts=number,
        top_k=chosen,
        ids=_whole_list("ids", ids),
        start=0 if start is None else (_whole_list("start", [start]) or [0])[0],
        windows=None if windows is None else tuple(_whole_list("windows", _listed(windows)) or ()),
        model_type=str(fields.get("model_type", "unknown")),
        gate_rule=str(fields.get("gate_rule", "unknown")),
        config=_plain(fields),
        progress=progress,
    )


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that JSON can hold, as it will give them back."""
    try:
        out: dict[str, Any] = json.loads(json.dumps(dict(fields)))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"config= holds what JSON cannot: {error}") from error
    return out


def _listed(value: Any) -> Any:
    return [value] if is_whole(value) else value


def _whole_list(name: str, values: Any) -> list[int] | None:
    if values is None:
        return None
    try:
        plain = list(values)
    except TypeError:
        plain = [None]
    if isinstance(values, str | bytes) or not all(is_whole(v) and 0 <= v < 1 << 62 for v in plain):
        raise ArgumentError(f"{name}= takes whole numbers, none negative; this is {values!r:.80}")
    return [int(v) for v in plain]


def _given_layers(layers: Any) -> tuple[int, ...]:
    """`layers`: a number (all of so many layers have experts) or the numbers of the layers that do."""
    numbers = list(range(layers)) if is_whole(layers) and 0 < layers <= LIMIT else layers
    if is_whole(numbers) or not (numbers := _whole_list("layers", numbers)):
        raise ArgumentError(f"layers= takes their number or the numbers of those with experts, not {layers!r:.80}")
    if numbers != sorted(set(numbers)) or numbers[-1] >= LIMIT:
        raise ArgumentError(f"layers= takes ascending layer numbers below {LIMIT}, not {layers!r:.80}")
    return tuple(numbers)


def _fields(config: Any) -> Mapping[str, Any]:
    """The flat fields of a config: of a model, a path to a config.json or its folder, or a mapping."""
    if config is None:
        return {}
    found = getattr(config, "config", config)
    if hasattr(found, "to_dict"):
        found = found.to_dict()
    if not isinstance(found, Mapping):
        try:
            path = local_path(found)
        except ArgumentError:
            raise ArgumentError(
                f"config= takes a path to a config.json, a model, or a dict; this is {config!r:.80}"
            ) from None
        must_exist(path)
        found = read_json(path / "config.json" if path.is_dir() else path)
    flat = dict(found)
    for part in _PARTS:
        if isinstance(flat.get(part), Mapping):
            flat = {**flat, **flat[part]} if part != "ffn_config" else {**flat[part], **flat}
    return flat


def _first(fields: Mapping[str, Any], names: Sequence[str]) -> int | None:
    for name in names:
        value: Any = fields.get(name)
        if is_whole(value):
            if not 1 <= value <= LIMIT:
                raise ArgumentError(f"config= has {name} = {value}; a whole number from 1 to {LIMIT} makes sense")
            return int(value)
    return None


def _moe_layers(fields: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layers with experts, by the field that says so; None when no field and no known model type does."""
    total = _first(fields, _LAYERS)
    if total is None:
        return None
    every = range(total)

    def number(name: str, default: int) -> int:
        value = fields.get(name, default)
        if value is None:
            return default
        if not is_whole(value):
            raise ArgumentError(f"config= has {name} = {value!r:.60}, which is no whole number; give layers=")
        return int(value)

    listed = fields.get("moe_layers")
    if isinstance(listed, list | tuple) and listed:
        return _given_layers(list(listed))
    kinds = fields.get("mlp_layer_types")
    if isinstance(kinds, list | tuple) and len(kinds) == total:
        found = [n for n, kind in enumerate(kinds) if kind in ("sparse", "moe")]
    elif "decoder_sparse_step" in fields or "mlp_only_layers" in fields:
        step, dense = number("decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
        if not isinstance(dense, list | tuple) or not all(is_whole(layer) for layer in dense):
            raise ArgumentError(f"config= has mlp_only_layers = {dense!r:.60}: no layer numbers; give layers=")
        found = [n for n in every if step > 0 and (n + 1) % step == 0 and n not in dense]
    elif "first_k_dense_replace" in fields:
        first, step = number("first_k_dense_replace", 0), number("moe_layer_freq", 1)
        found = [n for n in every if n >= first and n % max(step, 1) == 0]
    elif "moe_layer_start_index" in fields:
        start, stop, step = (
            number("moe_layer_start_index", 0),
            number("moe_layer_end_index", -1),
            number("moe_layer_interval", 1),
        )
        stop = total - 1 if stop < 0 else stop
        found = [n for n in every if start <= n <= stop and (n + 1) % max(step, 1) == 0]
    elif "expert_layer_period" in fields:
        found = [
            n
            for n in every
            if n % max(number("expert_layer_period", 1), 1) == number("expert_layer_offset", 0)
        ]
    elif "num_dense_layers" in fields:
        found = [n for n in every if n >= number("num_dense_layers", 0)]
    elif fields.get("model_type") in _EVERY_LAYER:
        found = list(every)
    else:
        return None
    return tuple(found) or None
