"""Tap paths: which ones a model has, and what a path means to the engine. Pure functions of the tap table and the
configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from colibri_lab.config import Config
from colibri_lab.errors import TapError, nearest

if TYPE_CHECKING:
    from colibri_lab import _core

__all__ = ["Place", "TapTable", "matcher"]

_NUMBER = "(0|[1-9][0-9]{0,18})"  # as Python writes it: no sign, no leading zero, ASCII
_LAYER = re.compile(rf"^layers\.{_NUMBER}\.")
_EXPERT = re.compile(rf"\.experts\.{_NUMBER}\.")


class Place(NamedTuple):
    """A tap as the engine takes it: row of the tap table, layer, expert (−1 where there is none)."""

    kind: int
    layer: int
    expert: int


def matcher(pattern: str) -> re.Pattern[str]:
    """`*` stands for any run of characters, as in `capture`; everything else is itself. Raises TapError for no text."""
    if not isinstance(pattern, str):
        raise TapError(f"a pattern of tap paths is a text such as 'layers.*.moe.gates'; this is {pattern!r:.80}")
    first, *rest = map(re.escape, pattern.split("*"))
    middle = (f"(?>.*?{part})" for part in rest[:-1])  # found once, at the first place: never tried again elsewhere
    return re.compile(first + "".join(middle) + "".join(f".*{part}" for part in rest[-1:]))


class TapTable:
    """The taps that one model has, by path and in the order of the data's way."""

    def __init__(self, kinds: Sequence[_core.TapKind], config: Config) -> None:
        self.kinds = kinds
        self.config = config
        self._by_path = {kind.path: number for number, kind in enumerate(kinds)}
        self._found: dict[str, Place] = {}
        every = range(config.num_hidden_layers)
        moe = config.moe_layers
        self._layers: dict[str, Sequence[int]] = {
            "layer": every, "moe": moe, "expert": moe, "shared": config.shared_layers,
            "dense": [layer for layer in every if layer not in set(moe)],
        }  # fmt: skip

    def places(self, experts: bool = True, layers: Sequence[int] | None = None) -> Iterator[tuple[str, Place]]:
        """Every tap of the model with its path: the embedding, layer by layer, the end. `experts`: those of single ones
        as well. `layers`: of these alone; None means all.
        """
        scopes = [kind.scope for kind in self.kinds]
        first = next((n for n, scope in enumerate(scopes) if scope != "model"), len(scopes))
        before, after = range(first), [n for n in range(first, len(scopes)) if scopes[n] == "model"]
        yield from ((self.kinds[n].path, Place(n, -1, -1)) for n in before)
        for layer in self._layers["layer"] if layers is None else layers:
            for n in range(first, len(scopes)):
                if scopes[n] != "model" and layer in self._layers[scopes[n]]:
                    path = self.kinds[n].path.replace("{l}", str(layer))
                    if scopes[n] != "expert":
                        yield path, Place(n, layer, -1)
                    elif experts:
                        for expert in range(self.config.num_experts):
                            yield path.replace("{e}", str(expert)), Place(n, layer, expert)
        yield from ((self.kinds[n].path, Place(n, -1, -1)) for n in after)

    def find(self, path: object) -> Place:
        """Where `path` lies. Raises TapError for an unknown path, and for a layer or expert that the model does not
        have.
        """
        if not isinstance(path, str):
            raise TapError(f"a tap path is a text such as 'layers.0.moe.gates'; this is {path!r:.80}")
        if path in self._found:
            return self._found[path]
        layer, expert = _LAYER.search(path), _EXPERT.search(path)
        general = _LAYER.sub("layers.{l}.", path)
        general = _EXPERT.sub(".experts.{e}.", general)
        kind = self._by_path.get(general)
        if kind is None:
            numbers = {"{l}": layer[1] if layer else "0", "{e}": expert[1] if expert else "0"}
            known = [k.path.replace("{l}", numbers["{l}"]).replace("{e}", numbers["{e}"]) for k in self.kinds]
            raise TapError(f"no tap has the path '{path}'{nearest(path, known)}")
        place = Place(kind, int(layer[1]) if layer else -1, int(expert[1]) if expert else -1)
        self._check(place)
        self._found[path] = place
        return place

    def _check(self, place: Place) -> None:
        scope = self.kinds[place.kind].scope
        if scope == "model":
            return
        self.check_layer(place.layer)
        if place.layer not in self._layers[scope]:
            raise TapError(_absent(scope, place.layer, self._layers[scope]))
        if scope == "expert":
            self.check_expert(place.expert)

    def check_layer(self, layer: int) -> None:
        """Raises TapError unless the model has this layer."""
        count = self.config.num_hidden_layers
        if not 0 <= layer < count:
            raise TapError(f"there is no layer {layer}; layers are 0 to {count - 1}")

    def check_expert(self, expert: int) -> None:
        """Raises TapError unless the model has this expert."""
        if not 0 <= expert < self.config.num_experts:
            raise TapError(f"there is no expert {expert}; experts are 0 to {self.config.num_experts - 1}")


def _absent(scope: str, layer: int, having: Sequence[int]) -> str:
    what = {"shared": "has no shared expert", "dense": "is a MoE layer and has no dense MLP"}.get(
        scope, "is dense and has no experts"
    )
    things = {"shared": "shared expert layers", "dense": "dense layers"}.get(scope, "MoE layers")
    return f"layer {layer} {what}; {things} of this model: {', '.join(map(str, having)) or 'none'}"
