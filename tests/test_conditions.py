"""The language of conditions: against plain Python row by row, unknowns, and errors that point at a column."""

from __future__ import annotations

import ast
import itertools
import math
import operator
import pickle
import random
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from colibri_lab.conditions import NAMES, ConditionError, Expression, parse
from colibri_lab.errors import ArgumentError, TapError


class Here:
    """A scene from a dictionary: names and tap paths; the others do not exist here."""

    def __init__(self, n: int, values: dict[str, Any]) -> None:
        self.n, self.values, self.asked = n, values, list[str]()

    def rows(self) -> np.ndarray:
        return np.arange(self.n) + 10

    def value(self, name: str) -> object | None:
        return self.values.get(name)

    def tap(self, path: str) -> np.ndarray | None:
        self.asked.append(path)
        if not path.startswith(("moe.", "layers.")):
            raise TapError(f"no tap '{path}'; did you mean 'moe.output'?")
        return self.values.get(path)


def hits(condition: str, n: int = 1, /, **values: Any) -> list[bool]:
    found = parse(condition).hits(Here(n, values))
    assert found.dtype == bool and found.shape == (n,)
    return found.tolist()


def value(expression: str, n: int = 1, /, **values: Any) -> Any:
    return parse(expression).value(Here(n, values))


def error(text: Any) -> ConditionError:
    with pytest.raises(ConditionError) as caught:
        parse(text).check_condition()
    return caught.value


# ---- against plain Python, row by row ----------------------------------------------------------------------------

ABSENT = object()
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Eq: operator.eq,
             ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
             ast.GtE: operator.ge, ast.USub: operator.neg}  # fmt: skip


def divide(a: float, b: float) -> float:
    if b:
        return a / b
    return math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1, b)


def negate(a: bool | None) -> bool | None:
    return None if a is None else not a


def conjunction(parts: list[Any]) -> bool | None:
    return False if False in parts else None if None in parts else True


def disjunction(parts: list[Any]) -> bool | None:
    return True if True in parts else None if None in parts else False


def each(function: Any, *parts: Any, strict: bool = True) -> Any:
    """A function of scalars over entries; with `strict` what meets an unknown is unknown."""
    if any(isinstance(part, list) for part in parts):
        size = next(len(part) for part in parts if isinstance(part, list))
        columns = [part if isinstance(part, list) else [part] * size for part in parts]
        return [each(function, *entries, strict=strict) for entries in zip(*columns, strict=True)]
    if any(part is ABSENT for part in parts):
        return ABSENT
    return None if strict and None in parts else function(*parts)


def entries_of(parts: list[Any]) -> list[Any]:
    flat = [entry for part in parts for entry in (part if isinstance(part, list) else [part])]
    return [entry for entry in flat if entry is not ABSENT]


def extreme(function: Any, entries: list[Any]) -> float | None:
    if not entries or None in entries:
        return None
    return math.nan if any(entry != entry for entry in entries) else function(entries)


def statistic(name: str, entries: list[float] | None) -> float | None:
    if not entries:
        return None
    mean = sum(entries) / len(entries)
    return {
        "absmax": lambda: extreme(max, [abs(entry) for entry in entries]),
        "nonfinite": lambda: sum(not math.isfinite(entry) for entry in entries),
        "mean": lambda: mean,
        "std": lambda: math.sqrt(sum((entry - mean) ** 2 for entry in entries) / len(entries)),
        "norm": lambda: math.sqrt(sum(entry**2 for entry in entries)),
        "max": lambda: extreme(max, entries),
        "min": lambda: extreme(min, entries),
        "tap": lambda: entries,
    }[name]()


def plain(node: ast.AST, row: dict[str, Any]) -> Any:
    """The value in one row: a float, str, bool, a list of entries, or None for unknown."""
    match node:
        case ast.Constant(v):
            return float(v) if type(v) in (int, float) else v
        case ast.Name(name):
            return {"inf": math.inf, "nan": math.nan}.get(name, row.get(name))
        case ast.UnaryOp(ast.Not(), a):
            return each(negate, plain(a, row))
        case ast.UnaryOp(ast.USub(), a):
            return each(operator.neg, plain(a, row))
        case ast.BinOp(a, op, b):
            return each(OPERATORS.get(type(op), divide), plain(a, row), plain(b, row))
        case ast.BoolOp(op, parts):
            join = conjunction if isinstance(op, ast.And) else disjunction
            return each(lambda *parts: join(list(parts)), *(plain(part, row) for part in parts), strict=False)
        case ast.Compare(left, ops, rights):
            results, a = [], plain(left, row)
            for op, right in zip(ops, rights, strict=True):
                if isinstance(op, ast.In | ast.NotIn):
                    found = plain_in(a, right, row)
                    results.append(negate(found) if isinstance(op, ast.NotIn) else found)
                else:
                    b = plain(right, row)
                    results.append(each(OPERATORS[type(op)], a, b))
                    a = b
            return each(lambda *parts: conjunction(list(parts)), *results, strict=False)
        case ast.Call(ast.Name(name), [ast.Constant(str(path))]):
            return statistic(name, row.get(path))
        case ast.Call(ast.Name("abs"), [a]):
            return each(abs, plain(a, row))
        case ast.Call(ast.Name(name), arguments):
            entries = entries_of([plain(argument, row) for argument in arguments])
            if name in ("max", "min"):
                return extreme(max if name == "max" else min, entries)
            return (disjunction if name == "any" else conjunction)(entries)
    raise AssertionError(ast.dump(node))


def plain_in(a: Any, right: ast.expr, row: dict[str, Any]) -> bool | None:
    if isinstance(right, ast.Tuple):
        return disjunction([each(operator.eq, a, plain(item, row)) for item in right.elts])
    b = plain(right, row)
    if isinstance(b, str) or b is None:
        return None if a is None or b is None else a in b
    return disjunction(entries_of([each(operator.eq, a, b)]))


WIDTHS = {"experts": 2, "gate": 2, "moe.output": 4, "moe.router_logits": 8}  # powers of two: means are exact
FINITE = [0.0, 0.25, -0.25, 0.5, 1.0, -1.5, 3.0, 5.0]
TEXTS = ["the", " then", "a", "b", ""]


def number(rng: random.Random, depth: int, width: int = 0) -> str:
    """A random number expression: one a row, or with entries of the width 2 or 4."""
    if depth == 0 or rng.random() < 0.3:
        if width and rng.random() < 0.7:
            return rng.choice(["experts", "gate"]) if width == 2 else "tap('moe.output')"
        names = ["token", "layer", "expert", "margin", "entropy", "count", "absmax", "nonfinite", "inf", "nan"]
        return rng.choice([*names, *names, "0", "1", "0.25", "3", "1e3"])
    kind = rng.randrange(5)
    if kind == 0:
        return f"-{number(rng, 0, width)}" if rng.random() < 0.5 else f"abs({number(rng, depth - 1, width)})"
    if kind == 1:
        name = rng.choice(["absmax", "nonfinite", "mean", "std", "norm", "max", "min"])
        return f"{name}('{rng.choice(['moe.output', 'moe.router_logits', 'moe.routed'])}')"
    if kind == 2:
        parts = [number(rng, depth - 1, rng.choice([0, 2, 4])) for _ in range(rng.randint(1, 3))]
        return f"{rng.choice(['max', 'min'])}({', '.join(parts)})"
    return f"({number(rng, depth - 1, width)} {rng.choice('+-*/')} {number(rng, depth - 1, width)})"


def truth(rng: random.Random, depth: int, width: int = 0) -> str:
    """A random yes or no."""
    kind = rng.randrange(9)
    if depth == 0 or kind < 3:
        sides = [number(rng, max(0, depth - 1), width) for _ in range(rng.choice([2, 2, 3]))]
        return "".join(side if i == 0 else f" {rng.choice(['<', '<=', '>', '>=', '==', '!='])} {side}"
                       for i, side in enumerate(sides))  # fmt: skip
    if kind == 3:
        return (
            f"{number(rng, 0)} {rng.choice(['in', 'not in'])} {rng.choice(['experts', '(1, 2)', '(layer, 3)', '()'])}"
        )
    if kind == 4:
        left = rng.choice([*map(repr, TEXTS), "text", "stage"])
        right = rng.choice(["in text", "not in text", "== text", "< stage", "in ('a', 'b')", "in ('router', text)"])
        return f"{left} {right}"
    if kind == 5:
        return f"not ({truth(rng, depth - 1, width)})"
    if kind == 6:
        parts = [truth(rng, depth - 1, rng.choice([0, 2, 4])) for _ in range(rng.randint(1, 2))]
        return f"{rng.choice(['any', 'all'])}({', '.join(parts)})"
    parts = [f"({truth(rng, depth - 1, width)})" for _ in range(rng.randint(2, 3))]
    return rng.choice([" and ", " or "]).join(parts)


def random_scene(rng: random.Random) -> tuple[Here, list[dict[str, Any]]]:
    """A scene, and the same as one dictionary of plain Python values per row."""
    n = rng.randint(0, 4)
    numbers = [*FINITE, math.nan, math.inf, -math.inf]
    values: dict[str, Any] = {"token": np.arange(n), "layer": rng.randrange(4), "stage": rng.choice(["router", "a"])}
    values["text"] = np.array([rng.choice([*TEXTS, None]) for _ in range(n)], dtype=object)
    values["margin"] = np.array([rng.choice(numbers) for _ in range(n)], dtype=np.float32)
    values["entropy"], values["count"] = np.array([rng.choice(FINITE) for _ in range(n)]), np.int64(rng.randrange(4))
    values["absmax"], values["expert"], values["nonfinite"] = 0.5, rng.randrange(6), np.zeros(n, dtype=np.int32)
    values["experts"] = np.array([[rng.choice([-1, 1, 2, 5]) for _ in range(2)] for _ in range(n)], "i4").reshape(n, 2)
    for name in ("gate", "moe.output", "moe.router_logits"):
        drawn = [[rng.choice(numbers if rng.random() < 0.1 else FINITE) for _ in range(WIDTHS[name])] for _ in range(n)]
        values[name] = np.array(drawn, dtype=np.float32).reshape(n, WIDTHS[name])
    values["moe.output"] = values["moe.output"].reshape(n, 2, 2)
    for name in list(values):
        if rng.random() < 0.2:
            del values[name]
    rows = []
    for i in range(n):
        row: dict[str, Any] = {}
        for name, held in values.items():
            picked = held[i] if isinstance(held, np.ndarray) else held
            if isinstance(picked, np.ndarray):
                plain_entries = [float(x) for x in picked.ravel()]
                row[name] = [ABSENT if name == "experts" and x == -1 else x for x in plain_entries]
            else:
                row[name] = picked if isinstance(picked, str) or picked is None else float(picked)
        rows.append(row)
    return Here(n, values), rows


@pytest.mark.parametrize("seed", range(20))
def test_random_conditions_hit_the_rows_that_plain_python_hits(seed: int) -> None:
    """100 conditions a seed, each on 4 scenes with NaN, infinities, unused slots, unknowns and no rows at all."""
    rng, outcomes = random.Random(seed), set[Any]()
    for _ in range(100):
        text = truth(rng, 3)
        tree, expression = ast.parse(text, mode="eval").body, parse(text)
        for _ in range(4):
            scene, rows = random_scene(rng)
            expected = [plain(tree, row) for row in rows]
            assert expression.hits(scene).tolist() == [outcome is True for outcome in expected], (text, scene.values)
            got = expression.value(scene)
            got = got.tolist() if isinstance(got, np.ndarray) else [got] * scene.n
            assert got == expected, (text, scene.values)
            outcomes |= set(expected)
    assert outcomes == {True, False, None}


@pytest.mark.parametrize("seed", range(5))
def test_random_numbers_are_those_of_plain_python(seed: int) -> None:
    rng = random.Random(1000 + seed)
    for _ in range(100):
        text = number(rng, 3)
        tree, expression = ast.parse(text, mode="eval").body, parse(text)
        scene, rows = random_scene(rng)
        expected = [plain(tree, row) for row in rows]
        got = np.broadcast_to(np.array(expression.value(scene), dtype=np.float64), scene.n)
        np.testing.assert_array_equal(got, np.array(expected, dtype=np.float64), err_msg=text)


# ---- unknown -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "b"), list(itertools.product([True, False, None], repeat=2)))
def test_three_valued_truth_tables(a: bool | None, b: bool | None) -> None:
    """Kleene's tables: False decides and, True decides or, not keeps an unknown."""
    spell = {True: "True", False: "False", None: "expert == 1"}
    assert value(f"{spell[a]} and {spell[b]}") is conjunction([a, b])
    assert value(f"{spell[a]} or {spell[b]}") is disjunction([a, b])
    assert value(f"any({spell[a]}, {spell[b]})") is disjunction([a, b])
    assert value(f"all({spell[a]}, {spell[b]})") is conjunction([a, b])
    assert value(f"not ({spell[a]})") is negate(a)


def test_an_unknown_is_never_a_hit() -> None:
    for text in ("margin < 1", "not margin < 1", "margin == margin", "expert in (1, 2)", "expert not in (1, 2)",
                 "'the' in text", "'the' not in text", "5 in experts", "5 not in experts", "nonfinite > 0",
                 "any(tap('moe.router_logits') > 5)", "all(experts < 4)", "max('moe.output') > -inf"):  # fmt: skip
        assert hits(text, 2) == [False, False], text
        assert value(text, 2) is None, text


def test_single_unknown_rows_are_none_or_nan() -> None:
    ids = np.array([[1, 2], [-1, -1]], dtype=np.int32)
    np.testing.assert_array_equal(value("max(experts)", 2, experts=ids), [2.0, np.nan])
    assert value("text == 'a'", 2, text=np.array(["a", None], dtype=object)).tolist() == [True, None]
    assert hits("not text == 'b'", 2, text=["a", None]) == [True, False]


# ---- single rules ------------------------------------------------------------------------------------------------


def test_unused_slots_take_part_in_nothing() -> None:
    ids = np.array([[1, 5], [5, -1], [-1, -1]], dtype=np.int32)
    assert hits("5 in experts", 3, experts=ids) == [True, True, False]
    assert hits("-1 in experts", 3, experts=ids) == [False, False, False]
    assert hits("expert in experts", 3, experts=ids, expert=1) == [True, False, False]
    assert hits("all(experts > 1)", 3, experts=ids) == [False, True, True]
    assert hits("any(experts < 4)", 3, experts=ids) == [True, False, False]
    assert hits("min(experts) == 5", 3, experts=ids) == [False, True, False]
    assert value("experts", 3, experts=ids).tolist() == ids.tolist()


def test_scalars_hold_for_every_row_and_no_rows_give_no_hits() -> None:
    assert hits("layer == 2 and stage == 'router'", 3, layer=2, stage="router") == [True] * 3
    assert hits("True", 3) == [True] * 3
    empty = np.zeros((0, 3), dtype=np.float32)
    for text in ("True", "margin < 1", "any(tap('moe.output') > 1)", "std('moe.output') > 1", "5 in experts"):
        assert hits(text, 0, margin=empty[:, 0], experts=empty, **{"moe.output": empty}) == []
    assert value("mean('moe.output')", 0, **{"moe.output": empty}).shape == (0,)


def test_division_by_zero_is_ieee() -> None:
    assert value("1 / 0") == math.inf and value("-1 / 0") == -math.inf and math.isnan(value("0 / 0"))
    assert hits("0 / 0 == 0 / 0") == [False] and hits("nan != nan") == [True]
    assert hits("inf - inf < 1") == [False]


def test_nan_is_no_number_and_max_hands_it_on() -> None:
    rows = np.array([[1, np.nan], [1, 2]], dtype=np.float32)
    assert hits("max('moe.output') > 0", 2, **{"moe.output": rows}) == [False, True]
    assert hits("not max('moe.output') > 0", 2, **{"moe.output": rows}) == [True, False]
    assert hits("nonfinite('moe.output') == 1", 2, **{"moe.output": rows}) == [True, False]
    assert hits("any(tap('moe.output') == 1)", 2, **{"moe.output": rows}) == [True, True]


def test_statistics_span_all_trailing_axes_in_float64() -> None:
    """float32 would lose the small addends beside 2**24; bfloat16 rows are read as the numbers they are."""
    rows = np.ones((2, 3, 4, 5), dtype=np.float32)
    rows[0, 0, 0, 0] = 2**24
    held = {"moe.output": rows}
    assert value("mean('moe.output') * 60", 2, **held).tolist() == [2**24 + 59, 60]
    np.testing.assert_allclose(value("norm('moe.output')", 2, **held), np.sqrt([2.0**48 + 59, 60]), rtol=1e-15)
    np.testing.assert_allclose(
        value("std('moe.output')", 2, **held), rows.astype("f8").reshape(2, -1).std(1), rtol=1e-15
    )
    assert value("absmax('moe.output')", 1, **{"moe.output": np.array([[-3]], dtype=ml_dtypes.bfloat16)}).tolist() == [
        3
    ]
    assert value("max('moe.output')", 2, **{"moe.output": np.array([3, 4], dtype=np.int32)}).tolist() == [3, 4]
    assert value("tap('moe.output')", 2, **held).shape == (2, 60)
    assert value("mean('moe.output')", 2, **{"moe.output": np.zeros((2, 0))}) is None


def test_numbers_compare_as_python_compares_the_float() -> None:
    margin = np.array([0.1], dtype=np.float32)
    assert hits("margin == 0.1", margin=margin) == [float(margin[0]) == 0.1] == [False]
    assert hits("margin > 0.1", margin=margin) == [float(margin[0]) > 0.1] == [True]
    assert hits("token == 7", token=np.array([7], dtype=np.int32)) == [True]


def test_values_keep_their_type_and_are_copies() -> None:
    rows = np.ones((2, 3), dtype=np.float32)
    shown = value("tap('moe.output')", 2, **{"moe.output": rows})
    assert shown.dtype == np.float32 and not np.shares_memory(shown, rows)
    assert value("layer", layer=np.int64(3)) == 3 and type(value("layer", layer=np.int64(3))) is int
    assert value("stage", stage="router") == "router"


def test_a_decided_and_reads_no_tap() -> None:
    scene = Here(2, {"layer": 3})
    assert not parse("layer == 2 and max('moe.output') > 3").hits(scene).any() and scene.asked == []
    assert parse("layer == 3 or max('moe.output') > 3").hits(scene).all() and scene.asked == []
    parse("layer == 3 and max('moe.output') > 3").hits(scene)
    assert scene.asked == ["moe.output"]


def test_an_expression_tells_the_taps_that_it_names() -> None:
    paths = parse("tap('moe.a') == 1 or max('moe.b') > norm('moe.a') or text == 'moe.c'").paths
    assert paths == ("moe.a", "moe.b")


# ---- errors ------------------------------------------------------------------------------------------------------

WRONG = [  # condition, column, part of the sentence
    ("margn < 2", 0, "did you mean 'margin'?"),
    ("layer == 2 and stag == 'router'", 15, "did you mean 'stage'?"),
    ("layer = 3", 6, "write =="),
    ("layer == 2 && True", 12, "write 'and'"),
    ("(layer == 2) & True", 15, "write 'and'"),
    ("(layer == 2) | True", 15, "write 'or'"),
    ("layer == 2 || True", 12, "write 'or'"),
    ("!True", 0, "write 'not'"),
    ("text < 3", 7, "a text and a number cannot be compared"),
    ("1 < margin < 'a'", 13, "a number and a text"),
    ("token in (1, 'a')", 13, "a number and a text"),
    ("'a' in experts", 7, "a text and a number"),
    ("(margin < 1) == 1", 16, "a yes or no and a number"),
    ("5 in layer", 5, "to the right of 'in'"),
    ("experts in experts", 11, "one number a row"),
    ("1 in (1, 2) in (3,)", 5, "a list ends"),
    ("[1, 2] == 3", 0, "to the right of 'in'"),
    ("layer is 3", 9, "write =="),
    ("margin and True", 0, "'and' and 'or' take a yes or no; this is a number"),
    ("not margin", 4, "'not' takes a yes or no"),
    ("text + 1 > 3", 0, "take a number; this is a text"),
    ("-text == 1", 1, "takes a number"),
    ("any(experts)", 4, "any takes a yes or no"),
    ("max('a', 3) > 1", 4, "max takes a number"),
    ("abs(1, 2) > 1", 7, "abs takes one number"),
    ("abs() > 1", 0, "something in its brackets"),
    ("max > 3", 0, "write max(...)"),
    ("layer(3) == 1", 0, "no function 'layer'"),
    ("nrm('moe.output') > 1", 0, "did you mean 'norm'?"),
    ("tap(layer) > 1", 4, "in quotes"),
    ("mean('moe.output', 'b') > 1", 19, "in quotes"),
    ("max(experts, key=abs) > 1", 13, "no named arguments"),
    ("max(*experts) > 1", 4, "not part of the language"),
    ("margin", 0, "this is a number"),
    ("experts == 3", 0, "write any(...) or all(...)"),
    ("layer == 2 and max(gate) > 1 and tap('moe.output') > 3", 37, "write any(...) or all(...)"),
    ("'é' in text and foo", 16, "no name 'foo'"),
    ("  margin <", 10, "cannot be read"),
    ("layer == (3", 9, "never closed"),
    ("'abc", 0, "unterminated"),
    ("", 0, "not empty"),
    ("   ", 0, "not empty"),
    ("é == 3", 0, "no name 'é'"),
    ("layer ==\n3", 8, "one line"),
    ("layer == 3\x00", 10, "one line"),
    ("text == '\ud800'", 9, "one line"),
]


@pytest.mark.parametrize(("text", "column", "sentence"), WRONG)
def test_an_error_points_at_its_column(text: str, column: int, sentence: str) -> None:
    caught = error(text)
    assert caught.column == column
    assert sentence in str(caught)
    if text:
        _, shown, caret = str(caught).split("\n")
        assert caret.index("^") == column + 2 and caret.strip() == "^"
        assert shown[2:].isprintable() and len(shown) == len(text) + 2


@pytest.mark.parametrize(
    "text",
    [
        "text.__class__", "(1).__class__.__bases__", "__import__('os').system('true')", "eval('1')", "(lambda: 1)()",
        "lambda: True", "[x for x in experts]", "any(x > 1 for x in experts)", "{1: 2}", "{**experts}", "f'{layer}'",
        "(layer := 3)", "b'a' == text", "9**9**9", "layer ** 2 > 1", "layer % 2 == 0", "layer // 2 == 0", "1 << 9999",
        "~layer == 1", "experts[0] == 1", "True if layer else False", "None", "...", "1j == 1", "yield 1",
        "*experts", "layer; token", "import os", "print(1)", "max.__call__(1)", "tap(f'{layer}')", "await layer",
        "1" + "0" * 400 + " > layer", "__builtins__", "layer == 3\n__import__('os')", "@", "\N{BYTE ORDER MARK}True",
    ],
)  # fmt: skip
def test_what_is_outside_the_language_is_refused(text: str) -> None:
    assert 0 <= error(text).column <= len(text)


@pytest.mark.parametrize(
    "text",
    [
        "1" * 5000, "x" * 100_000, "(" * 1000 + "True" + ")" * 1000, "(" * 999, "(" * 150 + "(" * 60 + ")" * 210,
        "[" * 900, "-" * 1500 + "1 < 2", "not " * 400 + "True", "1 + " * 400 + "1 < 2",
        "abs(" * 150 + "1" + ")" * 150 + "<2", "True == (" * 70 + "True" + ")" * 70,
        "f'" * 500, "{" * 500, "lambda:" * 200, "~" * 1900 + "1", "x." * 900 + "x",
        "x if " * 300, "x" * 1999, "'" + "a" * 3000 + "' in text",
    ],
)  # fmt: skip
def test_hostile_sizes_are_a_condition_error(text: str) -> None:
    """No RecursionError, no endless work, and a message of a size that can be read."""
    assert len(str(error(text))) < 600


def test_the_largest_conditions_are_evaluated() -> None:
    """What is accepted is also run: wide ones, deep ones, and chains whose inner sides stand in two comparisons."""
    assert hits(" or ".join(["layer == 9"] * 140), layer=1) == [False]
    assert hits("0" + " <= 0" * 390) == [True]
    assert hits("True == (" * 28 + "True" + ") == True" * 28) == [True]
    assert hits("not " * 60 + "True") == [True]
    assert hits("layer in (" + "1, " * 600 + ")", layer=2) == [False]


def test_a_large_number_is_compared_as_float64() -> None:
    assert hits("1" + "0" * 300 + " > layer", layer=3) == [True]
    assert hits("9007199254740993 == 9007199254740992") == [True]
    assert hits("1e999 == inf") == [True]


def test_odd_spellings_raise_no_warning() -> None:
    """Python warns of these; a condition is read or refused in silence (warnings are errors in these tests)."""
    assert hits("1 <2or 1in (2,)") == [True]
    assert "write ==" in str(error("layer is 3"))
    assert hits("text == '\\q'", text="\\q") == [True]


def test_text_escapes_and_wide_characters_are_characters() -> None:
    assert hits("'\\n' in text", 2, text=["a\n", "a"]) == [True, False]
    assert hits("'好' in text  # 中文", 2, text=["你好", ""]) == [True, False]
    assert hits("text == 'a\\0'", 2, text=["a\0", "a"]) == [True, False]


def test_a_path_that_the_model_does_not_have_is_pointed_at() -> None:
    with pytest.raises(ConditionError, match=r"did you mean 'moe\.output'") as caught:
        hits("layer == 1 and max('moo.output') > 3", layer=1)
    assert caught.value.column == 19


def test_rows_of_different_widths_do_not_go_together() -> None:
    held = {"moe.a": np.zeros((2, 3)), "moe.b": np.zeros((2, 4)), "gate": np.zeros((2, 2))}
    for text in ("any(tap('moe.a') == tap('moe.b'))", "max(tap('moe.a') + tap('moe.b')) > 1",
                 "any(tap('moe.a') < 1 and tap('moe.b') < 1)"):  # fmt: skip
        with pytest.raises(ConditionError, match="different numbers of entries"):
            hits(text, 2, **held)
    with pytest.raises(ConditionError, match="several entries") as caught:
        hits("True and gate > 0.5", 2, **held)
    assert caught.value.column == 9
    assert hits("gate >= 0", 2, gate=np.zeros(2)) == [True, True]


def test_rows_that_do_not_fit_the_scene_are_named() -> None:
    with pytest.raises(ConditionError, match="margin has 3 rows where 2 are looked at"):
        hits("margin < 1", 2, margin=np.zeros(3))


def test_an_error_of_the_scene_passes_through() -> None:
    class Broken(Here):
        def tap(self, path: str) -> np.ndarray | None:
            raise ArgumentError("the pass is closed")

    with pytest.raises(ArgumentError, match="the pass is closed"):
        parse("any(tap('moe.output') + tap('moe.b') > 3)").hits(Broken(1, {}))


def test_an_error_is_an_argument_error_and_survives_pickling() -> None:
    caught = error("margn < 2")
    again = pickle.loads(pickle.dumps(caught))
    assert isinstance(caught, ArgumentError) and (str(again), again.column) == (str(caught), caught.column)


def test_other_things_than_text_are_refused() -> None:
    for thing in (3, None, b"True", ["True"]):
        assert "is a text" in str(error(thing))
    assert isinstance(parse("True"), Expression) and parse(" True ").text == " True "


def test_the_page_names_every_name_and_its_examples_are_conditions() -> None:
    page = (Path(__file__).parent.parent / "docs" / "conditions.md").read_text(encoding="utf-8")
    table = page[page.index("## Names") : page.index("## Operators")]
    assert set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == set(NAMES)
    examples = page.split("```")[1].strip().splitlines()
    assert len(examples) == 7
    for example in examples:
        parse(example).check_condition()
    sentence, shown, caret = page.split("```")[3].strip().splitlines()
    assert str(error(shown.strip())) == f"{sentence}\n{shown}\n{caret}"
