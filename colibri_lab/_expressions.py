"""Reads the nodes of Python's grammar that `colibri_lab.conditions` allows, and makes of each a function of a scene."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from colibri_lab import _cells
from colibri_lab._cells import Cells
from colibri_lab.errors import ArgumentError, TapError, nearest

MAX_DEPTH = 60  # of brackets and operators in one another; also the terms of one sum

NUMBER, TEXT, TRUTH = "a number", "a text", "a yes or no"

NAMES = {
    "token": NUMBER, "text": TEXT, "layer": NUMBER, "stage": TEXT, "expert": NUMBER, "experts": NUMBER, "gate": NUMBER,
    "margin": NUMBER, "entropy": NUMBER, "absmax": NUMBER, "nonfinite": NUMBER, "count": NUMBER,
}  # fmt: skip
"""The names that a scene gives a value, and the kind of each."""

_CONSTANTS = {"inf": np.inf, "nan": np.nan}
_STATISTICS: dict[str, Callable[[NDArray[np.float64]], NDArray[Any]]] = {
    "absmax": lambda rows: np.abs(rows).max(axis=1),
    "nonfinite": lambda rows: (~np.isfinite(rows)).sum(axis=1),
    "mean": lambda rows: rows.mean(axis=1),
    "std": lambda rows: rows.std(axis=1),
    "norm": lambda rows: np.sqrt(np.square(rows).sum(axis=1)),
}
_JOINS = {  # function -> the kind it takes, what it does
    "max": (NUMBER, _cells.largest),
    "min": (NUMBER, _cells.smallest),
    "any": (TRUTH, _cells.some),
    "all": (TRUTH, _cells.every),
}
_FUNCTIONS = sorted({"abs", "tap", *_JOINS, *_STATISTICS})
_ARITHMETIC: dict[type[ast.operator], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_LISTS = (ast.Tuple, ast.List, ast.Set)


class ConditionError(ArgumentError):
    """A condition that cannot be read; the message shows its text with a caret under the column."""

    column: int = 0
    """Where, in characters from 0."""


class Scene(Protocol):
    """What an expression looks at: some token rows at one place of a run."""

    def rows(self) -> NDArray[np.int64]:
        """(n,) absolute token rows."""

    def value(self, name: str) -> object | None:
        """The value of one of NAMES: a scalar, (n,) or (n, m); None when there is no such thing here."""

    def tap(self, path: str) -> NDArray[Any] | None:
        """(n, ...) rows of a tap; None when it is not there now. Raises TapError for a path the model does not have."""


@dataclass(frozen=True)
class Node:
    """A checked part of an expression."""

    kind: str
    entries: tuple[int, int]
    """Whether a row has several: 0 no, 1 at some places, 2 yes; and the column of what brings them."""
    run: Callable[[Scene], Cells]


def error_at(sentence: str, text: str, column: int) -> ConditionError:
    """The error whose message shows the 100 characters around the column."""
    start, stop = max(0, column - 60), column + 40
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[start:stop])
    before, after = "…" * (start > 0), "…" * (stop < len(text))
    caret = " " * (len(before) + column - start) + "^"
    error = ConditionError(f"{sentence}\n  {before}{shown}{after}\n  {caret}" if text else sentence)
    error.column = column
    return error


class Reader:
    """Turns the nodes of Python's grammar that belong to the language into checked ones, and refuses the others."""

    def __init__(self, text: str, indent: int) -> None:
        self.text, self.indent = text, indent
        self.bytes = text.lstrip().encode()
        self.paths: list[str] = []

    def column(self, node: ast.AST) -> int:
        """Python counts bytes; people count characters."""
        return self.indent + len(self.bytes[: getattr(node, "col_offset", 0)].decode())

    def error(self, sentence: str, node: ast.AST) -> ConditionError:
        return error_at(sentence, self.text, self.column(node))

    def read(self, node: ast.expr, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise self.error(f"more than {MAX_DEPTH} levels in one another", node)
        match node:
            case ast.Constant():
                return self.constant(node)
            case ast.Name():
                return self.name(node)
            case ast.Call():
                return self.call(node, depth + 1)
            case ast.BoolOp(op, values):
                return self.logic(op, [self.of(TRUTH, value, depth + 1, "'and' and 'or' take") for value in values])
            case ast.UnaryOp(ast.Not(), operand):
                a = self.of(TRUTH, operand, depth + 1, "'not' takes")
                return Node(TRUTH, a.entries, lambda scene: _cells.negate(a.run(scene)))
            case ast.UnaryOp(ast.USub(), operand):
                return self.arithmetic(operator.neg, self.of(NUMBER, operand, depth + 1, "- takes"))
            case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
                a, b = (self.of(NUMBER, side, depth + 1, "+ - * / take") for side in (left, right))
                return self.arithmetic(_ARITHMETIC[type(op)], a, b)
            case ast.Compare():
                return self.comparisons(node, depth + 1)
            case ast.BinOp(op=ast.BitAnd()):
                raise self.error("& is not part of the language: write 'and'", node.right)
            case ast.BinOp(op=ast.BitOr()):
                raise self.error("| is not part of the language: write 'or'", node.right)
            case ast.Tuple() | ast.List() | ast.Set():
                raise self.error("a list stands only to the right of 'in'", node)
        raise self.outside(node)

    def outside(self, node: ast.AST) -> ConditionError:
        parts = "names, numbers, 'texts', comparisons, in, and, or, not, + - * / and the functions"
        return self.error(f"this is not part of the language: it has {parts} {', '.join(_FUNCTIONS)}", node)

    def of(self, kind: str, node: ast.expr, depth: int, who: str) -> Node:
        """The node, which must be of a kind."""
        read = self.read(node, depth)
        if read.kind != kind:
            raise self.error(f"{who} {kind}; this is {read.kind}", node)
        return read

    # ---- leaves --------------------------------------------------------------------------------------------------

    def constant(self, node: ast.Constant) -> Node:
        value = node.value
        if isinstance(value, bool):
            kind = TRUTH
        elif isinstance(value, str):
            kind = TEXT
        elif isinstance(value, int | float):
            kind = NUMBER
            try:
                value = float(value) if abs(value) > 2**53 else value  # as all numbers are compared
            except OverflowError:
                raise self.error("this number is beyond float64; there is inf", node) from None
        else:
            raise self.outside(node)
        cells = _cells.from_value(value, text=kind == TEXT)
        return Node(kind, (0, 0), lambda scene: cells)

    def name(self, node: ast.Name) -> Node:
        name = node.id
        if name in _CONSTANTS:
            cells = _cells.from_value(_CONSTANTS[name])
            return Node(NUMBER, (0, 0), lambda scene: cells)
        if name not in NAMES:
            if name in _FUNCTIONS:
                raise self.error(f"{name} is a function: write {name}(...)", node)
            hint = nearest(name, [*NAMES, *_FUNCTIONS, *_CONSTANTS], 1) or f"; the names are {', '.join(NAMES)}"
            raise self.error(f"no name {name!r:.60}{hint}", node)
        kind, column = NAMES[name], self.column(node)

        def run(scene: Scene) -> Cells:
            value = scene.value(name)
            cells = _cells.from_value(value, text=kind == TEXT, slots=name == "experts")
            return self.rows(scene, cells, name, column)

        return Node(kind, ({"experts": 2, "gate": 1}.get(name, 0), column), run)

    def rows(self, scene: Scene, cells: Cells, name: str, column: int) -> Cells:
        n = len(scene.rows())
        if cells.values.ndim and len(cells.values) != n:
            raise error_at(f"{name} has {len(cells.values)} rows where {n} are looked at", self.text, column)
        return cells

    def tap(self, node: ast.Constant) -> Node:
        path, column = str(node.value), self.column(node)
        self.paths.append(path)

        def run(scene: Scene) -> Cells:
            try:
                rows = scene.tap(path)
            except TapError as error:
                raise error_at(str(error), self.text, column) from None
            entries = rows[:, None] if rows is not None and rows.ndim == 1 else rows
            return self.rows(scene, _cells.from_value(entries), path, column)

        return Node(NUMBER, (2, column), run)

    # ---- operators -----------------------------------------------------------------------------------------------

    def fitting(self, operation: Callable[..., Cells], entries: tuple[int, int]) -> Callable[..., Cells]:
        """The operation on cells, with an error of this text where rows of different lengths meet."""

        def checked(*cells: Cells) -> Cells:
            try:
                return operation(*cells)
            except ValueError:
                sentence = "rows of different numbers of entries do not go together"
                raise error_at(sentence, self.text, entries[1]) from None

        return checked

    def arithmetic(self, operation: Callable[..., Any], *parts: Node) -> Node:
        entries = max(part.entries for part in parts)
        apply = self.fitting(partial(_cells.arithmetic, operation), entries)
        return Node(NUMBER, entries, lambda scene: apply(*(part.run(scene) for part in parts)))

    def logic(self, op: ast.boolop, parts: list[Node]) -> Node:
        entries = max(part.entries for part in parts)
        join, decided = (_cells.both, False) if isinstance(op, ast.And) else (_cells.either, True)
        join = self.fitting(join, entries)

        def run(scene: Scene) -> Cells:
            cells = parts[0].run(scene)
            for part in parts[1:]:
                if entries[0] == 0 and (cells.known & (cells.values == decided)).all():
                    return cells  # decided in all rows: taps are not read for nothing
                cells = join(cells, part.run(scene))
            return cells

        return Node(TRUTH, entries, run)

    def comparisons(self, node: ast.Compare, depth: int) -> Node:
        """A chain; each side is read and run once, however many links it takes part in."""
        first = left = self.read(node.left, depth)
        links: list[tuple[Callable[..., Cells], list[Node]]] = []
        entries = (0, 0)
        for op, right in zip(node.ops, node.comparators, strict=True):
            operation, rights, spread = self.link(left, op, right, depth)
            links.append((self.fitting(operation, spread), rights))
            entries = max(entries, spread)
            *_, left = left, *rights
            if isinstance(right, _LISTS) and right is not node.comparators[-1]:
                raise self.error("a list ends a comparison", right)
        join = self.fitting(_cells.both, entries)

        def run(scene: Scene) -> Cells:
            left, results = first.run(scene), []
            for operation, parts in links:
                rights = [part.run(scene) for part in parts]
                results.append(operation(left, *rights))
                *_, left = left, *rights
            return reduce(join, results)

        return Node(TRUTH, entries, run)

    def link(
        self, left: Node, op: ast.cmpop, right: ast.expr, depth: int
    ) -> tuple[Callable[..., Cells], list[Node], tuple[int, int]]:
        """One comparison: what it does with the cells of its sides, its right sides, and the entries of its result."""
        if isinstance(op, ast.NotIn):
            found, rights, spread = self.link(left, ast.In(), right, depth)
            return lambda *cells: _cells.negate(found(*cells)), rights, spread
        if isinstance(op, ast.In) and isinstance(right, _LISTS):
            rights = [self.read(item, depth) for item in right.elts]
            for item, side in zip(right.elts, rights, strict=True):
                self.comparable(left, side, item)
            return _cells.is_one_of, rights, max(side.entries for side in [left, *rights])
        if isinstance(op, ast.Is | ast.IsNot):
            raise self.error("'is' is not part of the language: write == or !=", right)
        side = self.read(right, depth)
        self.comparable(left, side, right)
        if type(op) in _COMPARISONS:
            operation = partial(_cells.compare, _COMPARISONS[type(op)])
            return operation, [side], max(left.entries, side.entries)
        if side.kind == TEXT:
            return _cells.contains, [side], (0, 0)
        if side.kind == TRUTH or side.entries[0] == 0:
            raise self.error("to the right of 'in' stands a list such as (1, 2), experts, a tap or a text", right)
        if left.entries[0] == 2:
            raise self.error("'in' looks for one number a row; to the left are several", right)
        return _cells.is_in, [side], (0, 0)

    def comparable(self, a: Node, b: Node, right: ast.expr) -> None:
        if a.kind != b.kind:
            raise self.error(f"{a.kind} and {b.kind} cannot be compared", right)

    # ---- functions -----------------------------------------------------------------------------------------------

    def call(self, node: ast.Call, depth: int) -> Node:
        if not isinstance(node.func, ast.Name):
            raise self.outside(node)
        name = node.func.id
        if name not in _FUNCTIONS:
            hint = nearest(name, _FUNCTIONS, 1) or f"; the functions are {', '.join(_FUNCTIONS)}"
            raise self.error(f"no function {name!r:.60}{hint}", node)
        if node.keywords:
            raise self.error(f"{name} takes no named arguments", node.keywords[0])
        if not node.args:
            raise self.error(f"{name}() takes something in its brackets", node)
        path = node.args[0] if isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str) else None
        if name in ("tap", *_STATISTICS):
            if path is None or len(node.args) > 1:
                wrong = node.args[0 if path is None else 1]
                raise self.error(f"{name} takes the path of a tap in quotes: {name}('moe.output')", wrong)
            return self.of_tap(name, path)
        if name in ("max", "min") and path is not None and len(node.args) == 1:
            return self.joined(_JOINS[name][1], [self.tap(path)])
        kind, join = _JOINS.get(name, (NUMBER, None))
        parts = [self.of(kind, argument, depth, f"{name} takes") for argument in node.args]
        if join is not None:
            return self.joined(join, parts)
        if len(parts) > 1:
            raise self.error("abs takes one number", node.args[1])
        return self.arithmetic(np.abs, *parts)

    def of_tap(self, name: str, path: ast.Constant) -> Node:
        tap = self.tap(path)
        if name == "tap":
            return tap
        return Node(NUMBER, (0, 0), lambda scene: _cells.statistic(_STATISTICS[name], tap.run(scene)))

    def joined(self, join: Callable[..., Cells], parts: list[Node]) -> Node:
        return Node(parts[0].kind, (0, 0), lambda scene: join(*(part.run(scene) for part in parts)))
