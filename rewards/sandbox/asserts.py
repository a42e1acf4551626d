"""Assertions about a program, judged outside it.

`assert add(1, 2) == 3` is taken apart: `add(1, 2)` is called in the sandbox, and what came back as plain values is
compared here. Nothing of the program has a say in the comparison: neither an `__eq__` of its own, nor a `sorted` or
`abs` that it has put in the place of Python's.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rewards.sandbox.calls import FunctionCall
from rlhf.errors import RewardError

#: Functions that are applied here, to plain values. Every other call is one of the tested program.
_OWN: Mapping[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (abs, all, any, bool, dict, float, frozenset, int, len, list, max, min)},
    **{f.__name__: f for f in (round, set, sorted, str, sum, tuple)},
    "math.isclose": math.isclose,
    "math.isnan": math.isnan,
}
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: lambda a, b: a is b,
    ast.IsNot: lambda a, b: a is not b,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_NUMERIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
#: Whole numbers beyond this are not reckoned with: their product could take hours.
_MAX_BITS = 10_000


@dataclass(frozen=True)
class Assertion:
    """Assertion of a test.

    Attributes:
        text: as it was written.
        calls: of the tested program, in the order in which they are met.
    """

    text: str
    calls: tuple[FunctionCall, ...]
    _tree: ast.expr
    _places: Mapping[int, int]

    def holds(self, values: Sequence[Any]) -> bool:
        """True if it holds when `calls` returned `values`; false where that cannot be computed."""
        try:
            return bool(_Reckoner(self._places, values).of(self._tree))
        except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError):
            return False


def parse(text: str, where: str) -> list[Assertion]:
    """Read the assertions of `text`, one statement each.

    Raises:
        RewardError: it holds something else, or an assertion that cannot be judged outside the program.
    """
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise RewardError("invalid Python", where=where, got=f"{error}: {text[:200]}") from error
    found = []
    for statement in statements:
        line = ast.unparse(statement)
        if not isinstance(statement, ast.Assert):
            raise _cannot(where, line, "an assertion")
        finder = _Finder(where, line)
        finder.look(statement.test)
        if not finder.calls:
            raise _cannot(where, line, "a call of the tested program")
        found.append(Assertion(line, tuple(finder.calls), statement.test, finder.places))
    return found


def _name(node: ast.expr) -> str:
    """Return `add`, `math.isclose` or `Solution().add` for such a function; empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        holder = node.value
        if isinstance(holder, ast.Call) and not holder.args and not holder.keywords:
            return f"{inner}().{node.attr}" if (inner := _name(holder.func)) else ""
        return f"{inner}.{node.attr}" if (inner := _name(holder)) else ""
    return ""


class _Finder:
    """Finder of calls of the tested program, refusing what cannot be judged outside it."""

    def __init__(self, where: str, line: str) -> None:
        self.where, self.line = where, line
        self.calls: list[FunctionCall] = []
        self.places: dict[int, int] = {}

    def look(self, node: ast.expr) -> None:
        match node:
            case ast.Call() if _name(node.func) not in _OWN:
                self.places[id(node)] = len(self.calls)
                self.calls.append(self.call(node))
            case ast.Call():
                self._all([*node.args, *(keyword.value for keyword in node.keywords)])
            case ast.Constant():
                pass
            case ast.List() | ast.Tuple() | ast.Set():
                self._all(node.elts)
            case ast.Dict():
                self._all([key for key in node.keys if key is not None] + node.values)
            case ast.Compare():
                self._all([node.left, *node.comparators])
            case ast.BoolOp():
                self._all(node.values)
            case ast.BinOp() if type(node.op) in _NUMERIC:
                self._all([node.left, node.right])
            case ast.UnaryOp() if type(node.op) in _UNARY:
                self.look(node.operand)
            case ast.Subscript():
                self._all([node.value, node.slice])
            case ast.Slice():
                self._all([part for part in (node.lower, node.upper, node.step) if part is not None])
            case _:
                raise _cannot(self.where, self.line, "values, comparisons and calls", ast.unparse(node))

    def call(self, node: ast.Call) -> FunctionCall:
        name = _name(node.func)
        if not name or any(isinstance(a, ast.Starred) for a in node.args) or None in [k.arg for k in node.keywords]:
            raise _cannot(self.where, self.line, "calls by name with plain arguments", ast.unparse(node))
        args = tuple(self.argument(value) for value in node.args)
        return FunctionCall(name, args, {str(k.arg): self.argument(k.value) for k in node.keywords})

    def argument(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Call) and _name(node.func) not in _OWN:
            return self.call(node)
        inner = _Finder(self.where, self.line)
        inner.look(node)
        if inner.calls:
            raise _cannot(self.where, self.line, "calls as whole arguments", ast.unparse(node))
        try:
            return _Reckoner({}, ()).of(node)
        except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise _cannot(self.where, self.line, "arguments that are plain values", str(error)) from error

    def _all(self, nodes: Sequence[ast.expr]) -> None:
        for node in nodes:
            self.look(node)


@dataclass(frozen=True)
class _Reckoner:
    """The value of an expression, with values in the places of calls."""

    places: Mapping[int, int]
    values: Sequence[Any]

    def of(self, node: ast.expr) -> Any:
        match node:
            case ast.Call() if id(node) in self.places:
                return self.values[self.places[id(node)]]
            case ast.Call():
                given = {str(keyword.arg): self.of(keyword.value) for keyword in node.keywords}
                return _OWN[_name(node.func)](*map(self.of, node.args), **given)
            case ast.Compare():
                return self.compare(node)
            case ast.BoolOp():
                return (all if isinstance(node.op, ast.And) else any)(self.of(inner) for inner in node.values)
            case ast.BinOp():
                return _NUMERIC[type(node.op)](_number(self.of(node.left)), _number(self.of(node.right)))
            case ast.UnaryOp():
                return _UNARY[type(node.op)](self.of(node.operand))
            case ast.Subscript():
                return self.of(node.value)[self.of(node.slice)]
            case ast.Slice():
                return slice(*(None if part is None else self.of(part) for part in (node.lower, node.upper, node.step)))
        return self.literal(node)

    def literal(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.List():
                return [self.of(inner) for inner in node.elts]
            case ast.Tuple():
                return tuple(self.of(inner) for inner in node.elts)
            case ast.Set():
                return {self.of(inner) for inner in node.elts}
            case ast.Dict():
                pairs = zip(node.keys, node.values, strict=True)
                return {self.of(key): self.of(value) for key, value in pairs if key is not None}
        raise TypeError(f"{type(node).__name__} has no value here")

    def compare(self, node: ast.Compare) -> bool:
        left = self.of(node.left)
        for comparison, right_node in zip(node.ops, node.comparators, strict=True):
            right = self.of(right_node)
            if not _COMPARE[type(comparison)](left, right):
                return False
            left = right
        return True


def _number(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ValueError("too large a number")
    if not isinstance(value, int | float | complex):
        raise TypeError("no number")
    return value


def _cannot(where: str, line: str, expected: str, got: str = "") -> RewardError:
    return RewardError(
        "this assertion cannot be judged outside the program",
        where=where,
        got=got or line,
        expected=expected,
        hint="write it as `assert function(arguments) == value`, or as a case of `calls`; see docs/sandbox.md",
    )
