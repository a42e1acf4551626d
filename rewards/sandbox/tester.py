"""Tester inside a sandbox of its own: runs the text of a task's tests, without the tested program.

A function of the program is a remote call here: its arguments go out, the program makes it in another sandbox, and the
text is run again with the result in its place. Only plain values come in, so the tests alone decide what holds here.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import random
import sys
from types import ModuleType

TYPE_CHECKING = False  # without importing typing: this runs anew for every program
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, NoReturn

if TYPE_CHECKING or __package__:
    from rewards.sandbox.harness import decode, encode
else:  # in the sandbox, where it lies beside this
    from harness import decode, encode

#: Questions of one run: a text that goes on asking has no end.
_MOST_ASKED = 2_000
_SHOWN = 200
_ENDS_OF_ITERATION = ("StopIteration", "StopAsyncIteration")


class UnresolvedValue(BaseException):
    """A test uses a value that is not computed yet; no `except Exception` of a test catches it."""


class Failed(Exception):
    """The program has no value for a call."""


def _unknown(*given: object, **named: object) -> NoReturn:
    raise UnresolvedValue


class DeferredValue:
    """Result of a call that is not computed yet: it can be stored, and any use raises UnresolvedValue."""

    __slots__ = ()
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _unknown
    __bool__ = __len__ = __iter__ = __next__ = __contains__ = __getitem__ = __call__ = _unknown
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _unknown
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __and__ = __rand__ = _unknown
    __or__ = __ror__ = __xor__ = __rxor__ = __neg__ = __pos__ = __abs__ = __round__ = __invert__ = _unknown
    __int__ = __float__ = __index__ = __complex__ = __hash__ = __str__ = __repr__ = __format__ = _unknown
    __getattr__ = __setattr__ = __delattr__ = __setitem__ = __delitem__ = __reversed__ = __bytes__ = _unknown


class ProgramProxy:
    """The tested program as the tests see it: calls of its functions, and the result of each assertion."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self.known = known
        self.calls: dict[str, Any] = {}
        self.events: list[list[str]] = []
        self._met: list[str] = []

    def function(self, name: str) -> Callable[..., Any]:
        """Stand-in for a function of the program."""

        def ask(*args: Any, **kwargs: Any) -> Any:
            named = {key: _coded(value) for key, value in kwargs.items()}
            call = {"name": name, "args": [_coded(value) for value in args], "kwargs": named}
            key = json.dumps(call)
            if key not in self.known:
                self.calls[key] = call
                if len(self.calls) > _MOST_ASKED:
                    raise Failed(f"the tests ask for more than {_MOST_ASKED} calls")
                return DeferredValue()
            coded, wrong = self.known[key]
            if wrong:
                self._met.append(wrong)
                raise _raised(wrong)
            value = decode(coded)
            self._met.append(f"returned {_shown(value)}")
            return value

        return ask

    def judge(self, holds: Callable[[], Any], text: str) -> None:
        """Do one assertion; the next ones are done whatever becomes of it."""
        n = len(self._met)
        try:
            right, why = bool(holds()), ""
        except UnresolvedValue:
            return
        except Exception as error:
            right, why = False, _said(error)
        # What the assertion itself has asked for, or what was asked for last before it.
        met = why or next(iter(self._met[n:] or self._met[-1:]), "it does not hold")
        self.events.append([text[:_SHOWN], "" if right else met])
        self._met.clear()

    def run_test(self, name: str, function: Callable[[], Any]) -> None:
        """Call a function with assertions, which are one test; the next ones are called whatever becomes of it."""
        begin, ended = len(self.events), ""
        try:
            function()
        except UnresolvedValue:
            pass
        except (Exception, SystemExit) as error:
            ended = _said(error)
        own = self.events[begin:]
        text, why = next((event for event in own if event[1]), ["", ended])
        if own or ended:
            self.events[begin:] = [[f"{name}: {text}" if text else name, why]]


class _Program(ModuleType):
    """The program as module `solution`: whatever a test imports from it is a stand-in."""

    def __init__(self, asked: ProgramProxy) -> None:
        super().__init__("solution")
        self._asked = asked

    def __getattr__(self, name: str) -> Any:
        """The function of this name."""
        if name.startswith("__"):  # such as __path__, by which Python tells packages
            raise AttributeError(name)
        return self._asked.function(name)


def _coded(value: Any) -> Any:
    try:
        return encode(value)
    except TypeError as error:
        if str(error).startswith(DeferredValue.__name__):  # in a list, say
            raise UnresolvedValue from None
        raise


def _raised(wrong: str) -> Exception:
    """Raise again what the program raised, where it is an exception of Python's own: a test may expect it.

    What ends an iteration is none of these: `all(map(f, xs))` in a test would take it for the end of `xs`.
    """
    name, _, text = wrong.partition(": ")
    kind = vars(builtins).get(name) if name not in _ENDS_OF_ITERATION else None
    try:
        return kind(text) if isinstance(kind, type) and issubclass(kind, Exception) else Failed(wrong)
    except TypeError:  # one that takes more
        return Failed(wrong)


def _shown(value: Any) -> str:
    try:
        return repr(value)[:_SHOWN]
    except (ValueError, RecursionError):  # a number of too many digits, lists in lists in lists
        return "what cannot be shown"


def _said(error: BaseException) -> str:
    return str(error)[:_SHOWN] if isinstance(error, Failed) else f"{type(error).__name__}: {error}"[:_SHOWN]


class _Judged(ast.NodeTransformer):
    """Assertions as calls of `ProgramProxy.judge`, and functions `test_...` that say when they are called."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        """`def test_x(): ...` becomes `def test_x(): called("test_x"); ...`."""
        self.generic_visit(node)
        if node.name.startswith("test_"):
            called = ast.Call(ast.Name("__called__", ast.Load()), [ast.Constant(node.name)], [])
            node.body.insert(0, ast.copy_location(ast.Expr(called), node))
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        """`assert x` becomes `judge(lambda: x, "x")`; `assert True` tests nothing."""
        if isinstance(node.test, ast.Constant) and node.test.value:
            return node
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        given: list[ast.expr] = [ast.Lambda(nothing, node.test), ast.Constant(ast.unparse(node.test))]
        made = ast.Expr(ast.Call(ast.Name("__judge__", ast.Load()), given, []))
        return ast.copy_location(made, node)


def free_names(tree: ast.AST) -> set[str]:
    """Names that a text uses and neither binds nor finds in Python: functions of the program."""
    used, bound = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return used - bound - set(dir(builtins)) - {"__name__"}


def _tests_in(tree: ast.Module) -> list[str]:
    """Names of the functions `test_...` that need no arguments, as pytest calls them, in order."""
    found = dict[str, None]()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            given, n_more = node.args, len(node.args.posonlyargs) + len(node.args.args) - len(node.args.defaults)
            if not n_more and None not in given.kw_defaults:
                found[node.name] = None
    return list(found)


def modules_meant(tree: ast.AST, names: set[str]) -> set[str]:
    """Those of the names that stand for a module of Python's own, as `math` in `math.isclose`."""
    parts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    holders = {part.id for part in parts if isinstance(part, ast.Name)}
    return names & holders & sys.stdlib_module_names


def run(text: str, entry_point: str, own: Sequence[str], known: Mapping[str, Any]) -> dict[str, Any]:
    """Run the tests with the values that are known.

    Args:
        text: assertions, and what they need, which may import from `solution`; a function `check` is called with the
            one that is tested, and functions `test_...` without required parameters where the text does not call them.
        entry_point: name of that function; may be empty.
        own: names of Python's own that are functions of the program here.
        known: coded value and failure of each call that has been made, by the call as JSON.

    Returns:
        `calls` to be made, `events` with the text of each assertion that was done and why it fails, and the `error`
        that ended the text before its end, if one did.
    """
    asked, error, called = ProgramProxy(known), "", set[str]()
    tree = ast.parse(text)
    tests = _tests_in(tree)
    calls_check = any(isinstance(s, ast.Expr) and ast.unparse(s.value).startswith("check(") for s in tree.body)
    free = free_names(tree)
    names: dict[str, Any] = {name: asked.function(name) for name in (*free, *own)}
    # Such tests are run where the program has imported it, in other places.
    names |= {name: importlib.import_module(name) for name in modules_meant(tree, free)}
    names |= {"__judge__": asked.judge, "__called__": called.add, "__name__": "tests"}
    code = compile(ast.fix_missing_locations(_Judged().visit(tree)), "tests.py", "exec")
    random.seed(0)
    sys.modules["solution"] = _Program(asked)
    try:
        exec(code, names)
        check = names.get("check")
        if entry_point and not calls_check and check is not None:
            check(asked.function(entry_point))
        for name in tests:
            if name not in called:
                asked.run_test(name, names[name])
    except UnresolvedValue:
        pass
    except (Exception, SystemExit) as ended:
        error = _said(ended)
    finally:
        sys.modules.pop("solution", None)
    return {"calls": list(asked.calls.values()), "events": asked.events, "error": error}


def main() -> None:
    """Run the tests of the order on standard input, and write what came of it as one line."""
    order = json.load(sys.stdin)
    channel = os.dup(1)
    os.dup2(2, 1)  # what the tests print is no result
    found = run(order["tests"], order["entry_point"], order["own"], order["known"])
    with os.fdopen(channel, "w") as out:
        out.write(json.dumps(found))


if __name__ == "__main__":
    main()
