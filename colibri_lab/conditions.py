"""Conditions: a small language for "stop where this holds", read and checked here and never run as Python.

    parse("layer == 3 and margin < 0.05").hits(scene)       # (n,) bool, one per token row that is looked at
    parse("absmax('moe.output')").value(scene)              # for watches: a scalar or an array

It is spelled like Python: `and or not`, comparisons also in chains (`0.1 < margin < 0.5`), `in` and `not in`,
`+ - * /`, unary minus, numbers, `inf`, `nan`, 'texts', True and False.

Names, each of the place where the run stands: `token` (number of the row), `text` (of the token), `layer`, `stage`
('router', 'expert', ...), `expert` (the number, at an expert's stage), `experts` (the chosen ids, several a row),
`gate`, `margin`, `entropy` (nats), `absmax`, `nonfinite`, `count`.

`in`: `expert in (1, 2)`, `5 in experts`, `'the' in text`. A slot that was given no expert (id -1) takes part in
nothing.

Functions: `tap('moe.output')` is the row of a tap, of the present layer or by its whole path; `abs(x)` of each entry;
`max`, `min`, `any`, `all` join the entries of a row, or of several arguments, to one value a row. Of a tap's row in one
step: `absmax('moe.output')`, `nonfinite`, `mean`, `std` (of the population), `norm` (Euclidean length), `max`, `min`,
worked out in float64.

What has several entries a row is not yet a condition: write `any(experts == 3)`, `max(abs(tap('moe.output'))) > 3`.

Unknown: a name or tap that does not exist at a place (the margin before the router, say) is unknown there. It spreads
like NULL in SQL: a comparison with it is unknown, so is `not` of that; `and` with something False is False, `or` with
something True is True. Only what is True is a hit. NaN compares as in IEEE 754: it equals nothing and is neither less
nor more; `max` and `min` hand it on. Division by zero gives an infinity or NaN.
"""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab import _cells
from colibri_lab._cells import Cells
from colibri_lab._expressions import NAMES, TRUTH, ConditionError, Node, Reader, Scene, error_at

__all__ = ["NAMES", "ConditionError", "Expression", "Scene", "parse"]

MAX_LENGTH = 2000
"""Characters of a condition."""

_INSTEAD = {  # what people of other languages write -> what to write here
    "=": "to compare, write ==", "&": "write 'and'", "|": "write 'or'", "!": "write 'not' or !=",
}  # fmt: skip


@dataclass(frozen=True)
class Expression:
    """A checked expression; `parse` makes it."""

    text: str
    paths: tuple[str, ...]
    """The taps that it names."""
    _root: Node = field(repr=False, compare=False)

    def hits(self, scene: Scene) -> NDArray[np.bool_]:
        """(n,) whether the expression is True in each row; unknown counts as no.

        Raises ConditionError when it is no yes or no, has several entries a row, or names a tap that the model does not
        have.
        """
        self.check_condition()
        cells = self._evaluate(scene)
        if cells.values.ndim == 2:
            raise self._several()
        return np.broadcast_to(cells.values & cells.known, scene.rows().shape).copy()

    def value(self, scene: Scene) -> Any:
        """The value: a scalar, or a new array (n,) or (n, m); None when nothing of it is known. Unknown rows are NaN
        among numbers and None among texts and truths. Raises ConditionError as `hits` for the taps.
        """
        return _cells.to_value(self._evaluate(scene))

    def check_condition(self) -> None:
        """Raises ConditionError for a value that no place could hit, such as `margin` or `experts == 3`."""
        if self._root.kind != TRUTH:
            raise error_at(f"a condition is a yes or no such as margin < 0.05; this is {self._root.kind}", self.text, 0)
        if self._root.entries[0] == 2:
            raise self._several()

    def _several(self) -> ConditionError:
        return error_at("this has several entries a row: write any(...) or all(...)", self.text, self._root.entries[1])

    def _evaluate(self, scene: Scene) -> Cells:
        with np.errstate(all="ignore"):
            return self._root.run(scene)


def parse(text: str) -> Expression:
    """The expression that `text` spells; the module's docstring tells the language.

    Raises ConditionError, with the column, for anything else: unknown names, kinds that cannot be compared, calls and
    attributes outside the language, texts of more than 2,000 characters or 60 levels.
    """
    if not isinstance(text, str):
        raise error_at(f"a condition is a text such as 'margin < 0.05', not {type(text).__name__}", "", 0)
    if len(text) > MAX_LENGTH:
        raise error_at(f"a condition has at most {MAX_LENGTH:,} characters, this one {len(text):,}", text, MAX_LENGTH)
    for column, character in enumerate(text):
        if not character.isprintable():
            raise error_at(f"a condition is one line of printable characters; this is {character!a}", text, column)
    if not text.strip():
        raise error_at("a condition is not empty; an example is margin < 0.05", text, 0)
    indent = len(text) - len(text.lstrip())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text.lstrip(), mode="eval")
    except SyntaxError as error:
        column = min(indent + error.offset - 1, len(text)) if error.offset else len(text)
        raise error_at(_INSTEAD.get(text[column : column + 1], f"cannot be read: {error.msg}"), text, column) from None
    except (ValueError, MemoryError, RecursionError):
        raise error_at("cannot be read: too deeply nested", text, 0) from None
    reader = Reader(text, indent)
    root = reader.read(tree.body, 0)
    return Expression(text, tuple(dict.fromkeys(reader.paths)), root)
