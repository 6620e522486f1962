"""Config: the sizes and named semantics of a checkpoint, as the engine understood them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from colibri_lab.errors import TapError, nearest

__all__ = ["Config"]


class Config(Mapping[str, Any]):
    """A read-only mapping whose entries are attributes as well: `config["hidden_size"]` is `config.hidden_size`.

    Names are those of Hugging Face where one exists (`vocab_size`, `num_hidden_layers`, `head_dim` …), plus
    `num_experts`, `top_k` and `gate_rule`. Per layer there are `moe_layers` (the layers that have a router),
    `shared_layers` (those with a shared expert), `layer_types` ("full_attention" or "sliding_attention") and `windows`
    (keys a query sees, itself included; None for all).
    """

    def __init__(self, fields: Mapping[str, Any], layers: list[tuple[bool, bool, int]]) -> None:
        per_layer = {
            "moe_layers": tuple(number for number, (is_moe, _, _) in enumerate(layers) if is_moe),
            "shared_layers": tuple(number for number, (_, shared, _) in enumerate(layers) if shared),
            "layer_types": tuple("sliding_attention" if window else "full_attention" for _, _, window in layers),
            "windows": tuple(window or None for _, _, window in layers),
        }
        self._values: dict[str, Any] = {**fields, **per_layer}

    def __getitem__(self, name: str) -> Any:
        try:
            return self._values[name]
        except (KeyError, TypeError):
            raise TapError(f"the configuration has no field '{name}'{nearest(str(name), self._values)}") from None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not ours; also keeps copy and pickle from recursing
            raise AttributeError(name)
        try:
            return self[name]
        except TapError as error:
            raise AttributeError(str(error)) from None

    def __setattr__(self, name: str, value: object) -> None:
        if name != "_values":
            raise AttributeError(f"a model's configuration is read-only; '{name}' cannot be set")
        super().__setattr__(name, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def __repr__(self) -> str:
        """All fields, in lines of a hundred columns; those that are off stand together at the end."""
        off = [name for name, value in self._values.items() if _is_off(value)]
        on = [f"{name} {_short(value)}" for name, value in self._values.items() if name not in off]
        return "\n".join((*_lines("", on), *_lines("not used: ", off)))


def _is_off(value: object) -> bool:
    return value in (None, ()) or (isinstance(value, tuple) and set(value) == {None})


def _short(value: object) -> str:
    """A value as one reads it: a run of layers as "0 to 5", layers that are all alike as one, others cut."""
    if not isinstance(value, tuple):
        return str(value)
    first, count = value[0], len(value)
    if count > 1 and len(set(value)) == 1:
        return f"{first} in all {count}"
    if count > 1 and isinstance(first, int) and value == tuple(range(first, first + count)):
        return f"{first} to {value[-1]}"
    return textwrap.shorten(", ".join(map(str, value)), 60, placeholder=" …")


def _lines(head: str, parts: list[str]) -> list[str]:
    """The parts with dots between them, none of them broken, in as few lines as a hundred columns allow."""
    glued = "\xa0· ".join(part.replace(" ", "\xa0") for part in parts)  # textwrap breaks at plain spaces only
    lines = textwrap.wrap(head + glued, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]
