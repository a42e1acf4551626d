"""Function calls as a model writes them, read without running anything.

The benchmark's own tools build a line of Python from the model's text and evaluate it. Here the text becomes a syntax
tree, the tree becomes names and plain values, and what is neither is no call. The rules by which text counts as calls
are the benchmark's, so that a turn ends here where it ends there:

- backticks and line breaks around it do not count, and square brackets around it may be left out;
- every element must be a call; one sentence beside the calls, and nothing is a call;
- arguments without a name are dropped, a bare name counts as text, and a call among the arguments is made first.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_MOST_LETTERS = 50_000
_MOST_DEPTH = 40
_LARGEST = 10**15
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, slots=True)
class BfclCall:
    """A call as it was written.

    Attributes:
        name: of the function, with dots where there are some.
        arguments: by name; plain values, or a `BfclCall` that is made first.
    """

    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={_written(value)}' for name, value in self.arguments.items())})"


class NoCall(ValueError):
    """The text is not a list of calls."""


def decode(text: str) -> tuple[BfclCall, ...]:
    """Return the calls in `text`; empty where it is an empty list. Raises NoCall."""
    if len(text) > _MOST_LETTERS:
        raise NoCall(f"{len(text)} letters")
    line = text.strip("`\n ")
    line = line if line.startswith("[") else "[" + line
    line = line if line.endswith("]") else line + "]"
    try:
        tree = ast.parse(line.strip().strip("'"), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise NoCall(str(error)) from None
    if not isinstance(tree, ast.List):
        raise NoCall(f"{type(tree).__name__}, expected a list of calls")
    return tuple(_call(element) for element in tree.elts)


def _call(node: ast.expr, depth: int = 0) -> BfclCall:
    if not isinstance(node, ast.Call):
        raise NoCall(f"{type(node).__name__}, expected a call")
    parts: list[str] = []
    function = node.func
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if not isinstance(function, ast.Name):
        raise NoCall("what is called has no name")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise NoCall("unpacked arguments")
        arguments[keyword.arg] = _value(keyword.value, depth + 1)
    return BfclCall(".".join([function.id, *reversed(parts)]), arguments)


def _value(node: ast.expr, depth: int) -> Any:
    """Return the plain value that `node` writes down."""
    if depth > _MOST_DEPTH:
        raise NoCall("nested too deeply")
    if isinstance(node, ast.Constant):
        return "..." if node.value is Ellipsis else node.value
    if isinstance(node, ast.List):
        return [_value(one, depth + 1) for one in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_value(one, depth + 1) for one in node.elts)
    if isinstance(node, ast.Dict):
        return _dictionary(node, depth)
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Call) and node.keywords:
        return _call(node, depth + 1)
    if isinstance(node, ast.Call | ast.Subscript):
        return ast.unparse(node)
    return _number(node, depth)


def _dictionary(node: ast.Dict, depth: int) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        if key is None:
            raise NoCall("an unpacked dictionary")
        name = _value(key, depth + 1)
        try:
            made[name] = _value(value, depth + 1)
        except TypeError:
            raise NoCall("a key that cannot be one") from None
    return made


def _number(node: ast.expr, depth: int) -> Any:
    """Work out a minus and small sums, and nothing that could take long."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand, depth + 1)
        if isinstance(value, int | float):
            return -value
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = _value(node.left, depth + 1), _value(node.right, depth + 1)
        if all(isinstance(one, int | float) and abs(one) < _LARGEST for one in (left, right)):
            try:
                return _ARITHMETIC[type(node.op)](left, right)
            except ArithmeticError as error:
                raise NoCall(str(error)) from None
    raise NoCall(f"{type(node).__name__} is no plain value")


def _written(value: Any) -> str:
    return str(value) if isinstance(value, BfclCall) else repr(value)
