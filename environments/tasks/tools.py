"""Questions that take tools: look-ups, a calculator, and a sandbox for Python, called in JSON.

    What do 3 cups and 2 pens cost?
    > {"tool": "lookup", "arguments": {"name": "cup"}}
    cup: 14
    > {"tool": "lookup", "arguments": {"name": "pen"}}
    pen: 5
    > {"tool": "calculator", "arguments": {"expression": "3 * 14 + 2 * 5"}}
    52
    > {"tool": "answer", "arguments": {"value": 52}}
    Right.

What cannot be read as a call, or fails, is answered with what is wrong and costs a step. Nothing that a policy writes
is evaluated in this process: the calculator reads the syntax tree of a sum, and programs run in the sandbox.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from environments.base import Properties, StepResult
from environments.core.normalise import words
from environments.core.procedural import Attempt, PlansByReplay, digest, draw_for
from environments.core.seed_splits import Seeded
from rewards.sandbox.level import Level, LevelName
from rewards.sandbox.probe import probe_isolation
from rewards.sandbox.run import Bounds, Finished, run
from rlhf.data import Task
from rlhf.settings import STRICT

Kind = Literal["price", "bill", "program"]

_GOODS = words("bag ball book bowl cake coat cup desk fan hat jar key lamp map pan pen ring rug shoe toy")
_MOST_CALL, _MOST_SUM, _MOST_EXPONENT, _MOST_DIGITS = 20_000, 200, 64, 40

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}

#: Tool -> its one argument.
TOOLS: Mapping[str, str] = {"lookup": "name", "calculator": "expression", "python": "code", "answer": "value"}

_WHAT = {
    "lookup": "Tells what a thing costs.",
    "calculator": "Works out a sum with + - * / // % ** and brackets.",
    "python": "Runs a program and returns what it prints.",
    "answer": "Gives the final answer, a number.",
}
_TYPES = {key: {"type": "string"} for key in TOOLS} | {"answer": {"type": "number"}}


@plain_dataclass(frozen=True, slots=True)
class Problem:
    """Random draw of one task.

    Attributes:
        text: the question.
        prices: of everything that can be looked up.
        calls: tool and argument, of a way to the answer.
        answer: the number.
    """

    text: str
    prices: tuple[tuple[str, int], ...]
    calls: tuple[tuple[str, str], ...]
    answer: int


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Tools(PlansByReplay, Seeded):
    """Tool tasks on prices, bills and programs: JSON calls of look-ups, a calculator, a Python sandbox."""

    offers_tools: ClassVar[bool] = True

    questions: Annotated[tuple[Kind, ...], Field(min_length=1)] = ("price", "bill")
    """Kinds of questions, in turn: `price` takes a look-up, `bill` several and a sum, `program` a program."""
    n_goods: Annotated[int, Field(ge=1, le=8)] = 2
    """Different things on a bill."""
    python: bool = False
    """Offer a tool that runs programs, in the sandbox of the machine (see the page on rewards that run programs)."""
    max_steps: Annotated[int, Field(ge=2)] = 12
    """Maximum steps per episode; longer ones are truncated."""
    max_output: Annotated[int, Field(ge=20, le=10_000)] = 300
    """Characters of a program's output that are shown."""
    cpu_s: Annotated[float, Field(gt=0, le=600)] = 4.0
    """Processor time of a program."""
    wall_s: Annotated[float, Field(gt=0, le=600)] = 8.0
    """Time of a program."""
    memory_mb: Annotated[int, Field(ge=32)] = 512
    """Memory of a program."""
    min_level: LevelName = "rlimits"
    """Programs are refused on a machine whose sandbox does not reach this: `rlimits`, `namespaces`, `bubblewrap`."""

    @model_validator(mode="after")
    def _agrees(self) -> Tools:
        """Refuse programs without the tool for them, and bills that take more steps than there are."""
        if "program" in self.questions and not self.python:
            raise ValueError("questions that take a program need python: true")
        if "bill" in self.questions and self.max_steps < self.n_goods + 2:
            raise ValueError(f"a bill takes {self.n_goods + 2} steps, and max_steps is {self.max_steps}")
        return self

    @property
    def properties(self) -> Properties:
        """Properties of the environment; a program may print the time, or take some."""
        fixed = not self.python
        return replace(super().properties, deterministic=fixed, replayable=fixed, inline=fixed)

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of a split, each with its answer as `reference`. Raises EnvError for an unknown split."""
        prefix = f"tools-2/{'+'.join(self.questions)}-{self.n_goods}/{split}"
        return [
            Task(
                id=f"{prefix}/{seed}",
                seed=seed,
                reference=str(self._problem(seed).answer),
                info={"tools": definitions(self.python)},
            )
            for seed in self.seeds(split)
        ]

    def start(self, task: Task) -> ToolsEpisode:
        """Begin one attempt."""
        return ToolsEpisode(self._problem(task.seed), self)

    def _problem(self, seed: int) -> Problem:
        return _drawn(seed, self.questions[seed % len(self.questions)], self.n_goods)


@lru_cache(maxsize=8192)
def _drawn(seed: int, kind: Kind, n_goods: int) -> Problem:
    # Prices of what is not asked for are not seen, so they do not make another task.
    return draw_for("tools", seed, lambda rng: draw(rng, kind, n_goods), lambda made: (made.text, made.answer))


def draw(rng: random.Random, kind: Kind, n_goods: int) -> Problem:
    """Draw prices and a question of a kind."""
    prices = tuple((name, rng.randint(2, 60)) for name in _GOODS)
    own = dict(prices)
    if kind == "program":
        text, program, answer = rng.choice((_squares, _multiples, _digits))(rng)
        return Problem(text, prices, (("python", program),), answer)
    wanted = rng.sample(_GOODS, 1 if kind == "price" else n_goods)
    looked_up = tuple(("lookup", name) for name in wanted)
    if kind == "price":
        return Problem(f"What does 1 {wanted[0]} cost?", prices, looked_up, own[wanted[0]])
    counts = [rng.randint(2, 9) for _ in wanted]
    listed = [f"{n} {name}s" for n, name in zip(counts, wanted, strict=True)]
    text = " and ".join(filter(None, [", ".join(listed[:-1]), listed[-1]]))
    expression = " + ".join(f"{n} * {own[name]}" for n, name in zip(counts, wanted, strict=True))
    answer = sum(n * own[name] for n, name in zip(counts, wanted, strict=True))
    return Problem(f"What do {text} cost?", prices, (*looked_up, ("calculator", expression)), answer)


def _squares(rng: random.Random) -> tuple[str, str, int]:
    n = rng.randint(20, 4000)
    text = f"What is the sum of the squares of the whole numbers from 1 to {n}?"
    return text, f"print(sum(i * i for i in range(1, {n + 1})))", sum(i * i for i in range(1, n + 1))


def _multiples(rng: random.Random) -> tuple[str, str, int]:
    n, (a, b) = rng.randint(50, 5000), rng.sample(range(3, 20), 2)
    text = f"How many of the whole numbers from 1 to {n} can be divided by {a} or by {b}?"
    program = f"print(sum(i % {a} == 0 or i % {b} == 0 for i in range(1, {n + 1})))"
    return text, program, sum(i % a == 0 or i % b == 0 for i in range(1, n + 1))


def _digits(rng: random.Random) -> tuple[str, str, int]:
    base, power = rng.randint(2, 30), rng.randint(20, 200)
    text = f"What is the sum of the digits of {base} to the power of {power}?"
    return text, f"print(sum(map(int, str({base} ** {power}))))", sum(map(int, str(base**power)))


class ToolsEpisode(Attempt):
    """Attempt at a question, which an answer ends.

    The key of a state tells the problem and which calls have been understood. No action is listed: what a sum or a
    program may be has no end.
    """

    def __init__(self, problem: Problem, settings: Tools) -> None:
        super().__init__(settings.max_steps)
        self._problem, self._settings, self._name = problem, settings, digest(repr(problem))
        self._prices = dict(problem.prices)
        self._called: set[tuple[str, str]] = set()
        self._output = ""
        self._offered = [tool for tool in TOOLS if tool != "python" or settings.python]
        told = ", ".join(f"{tool}({TOOLS[tool]})" for tool in self._offered)
        example = '{"tool": "lookup", "arguments": {"name": "cup"}}'
        self.opening = self.opened(f"{problem.text}\nTools: {told}. A call: {example}")

    async def step(self, action: str) -> StepResult:
        """Do one call; a program runs before, in the sandbox."""
        self._output = ""
        call = read_call(action)
        if not isinstance(call, str) and call[0] == "python" and self._settings.python and not self.over:
            settings = self._settings
            isolation = probe_isolation().at_least(Level.named(settings.min_level), "environment.min_level")
            bounds = Bounds(cpu_s=settings.cpu_s, wall_s=settings.wall_s, memory_mb=settings.memory_mb)
            files = {"main.py": str(call[1]).encode("utf-8", "replace")}
            self._output = shown(
                await run(("python", "main.py"), files=files, bounds=bounds, isolation=isolation), settings
            )
        return self.act(action)

    def do(self, action: str) -> tuple[str, bool]:
        """Read a call and carry it out."""
        call = read_call(action)
        if isinstance(call, str):
            return f"Error: {call}", False
        tool, argument = call
        if tool not in self._offered:
            return f"Error: no tool is called {tool[:40]!r}; there are {', '.join(self._offered)}.", False
        if tool == "answer":
            self.done, self.solved = True, same_number(argument, self._problem.answer)
            self.score = float(self.solved)
            return "Right." if self.solved else "Wrong.", True
        said = str(argument).strip()
        self._called.add((tool, said))
        if tool == "lookup":
            name = said.lower()
            name = name if name in self._prices else name.removesuffix("s")
            return f"{name}: {self._prices[name]}" if name in self._prices else "Error: nothing of that name.", True
        return self._output if tool == "python" else calculated(said), True

    def way_out(self) -> tuple[str, ...] | None:
        """Give the calls that are still to be made, and the answer."""
        if self.done:
            return () if self.solved else None
        calls = [
            written(tool, argument) for tool, argument in self._problem.calls if (tool, argument) not in self._called
        ]
        actions = (*calls, written("answer", self._problem.answer))
        return actions if len(actions) <= self.steps_left else None

    def state(self) -> str:
        """Return the problem, the calls made, and whether it is answered."""
        return f"{self._name}/{digest(repr(sorted(self._called)))}{'/answered' if self.done else ''}"

    def possible(self) -> tuple[str, ...]:
        """Nothing can be listed."""
        return ()


def definitions(python: bool) -> list[dict[str, Any]]:
    """The tools as JSON schemas of functions, as agents and chat templates take them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool,
                "description": _WHAT[tool],
                "parameters": {"type": "object", "properties": {name: _TYPES[tool]}, "required": [name]},
            },
        }
        for tool, name in TOOLS.items()
        if tool != "python" or python
    ]


def written(tool: str, argument: object) -> str:
    """Write a call."""
    return json.dumps({"tool": tool, "arguments": {TOOLS[tool]: argument}})


def read_call(text: str) -> tuple[str, object] | str:
    """Tool and argument of the first JSON object in a text, or what is wrong with it.

    The tool may also be called `name`, as some models write it, and `arguments` may be `parameters`, JSON in a text, or
    left out, with the argument beside the tool.
    """
    begin = text.find("{") if len(text) <= _MOST_CALL else -1
    if begin < 0:
        return f"no JSON object. Write {written('answer', 1)}"
    try:
        found, _ = json.JSONDecoder().raw_decode(text[begin:])
        given = found.get("arguments", found.get("parameters", found))
        given = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        return f"no valid JSON: {str(error)[:80]}"
    tool = found.get("tool", found.get("name"))
    if not isinstance(tool, str) or not isinstance(given, dict):
        return f"the object lacks `tool` or `arguments`. Write {written('answer', 1)}"
    key = TOOLS.get(tool, "")
    if key and not isinstance(given.get(key), str | int | float):
        return f"{tool} takes one argument, `{key}`."
    return tool, given.get(key)


def same_number(said: object, wanted: int) -> bool:
    """True if a number, or a text that is nothing else, is the wanted number."""
    if isinstance(said, bool) or not isinstance(said, int | float | str):
        return False
    try:  # as a decimal: floats of large numbers are equal to their neighbours
        number = Decimal(said.replace(",", "").strip() if isinstance(said, str) else said)
        return number.is_finite() and number.adjusted() < _MOST_DIGITS and abs(number - wanted) <= Decimal("1e-6")
    except InvalidOperation:
        return False


def calculated(expression: str) -> str:
    """Value of an arithmetic expression (+ - * / // % ** and brackets), or its error."""
    if len(expression) > _MOST_SUM:
        return f"Error: a sum has at most {_MOST_SUM} characters."
    try:
        value = _value(ast.parse(expression.replace("^", "**").replace(" x ", " * "), mode="eval").body)
    except ZeroDivisionError:
        return "Error: division by zero."
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return "Error: no sum of numbers, or one with numbers that are too large."
    return str(int(value)) if value == int(value) else f"{value:.10g}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value: Any = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = -_value(node.operand) if isinstance(node.op, ast.USub) else _value(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > _MOST_EXPONENT:
            raise ValueError("the exponent is too large")
        value = _BINARY[type(node.op)](left, right)
    else:
        raise ValueError("no sum of numbers")
    if isinstance(value, complex) or not math.isfinite(value) or abs(value) >= 10**_MOST_DIGITS:
        raise ValueError("the number is too large")
    return value  # type: ignore[no-any-return]


def shown(finished: Finished, settings: Tools) -> str:
    """Return what an agent reads of a program: its output, or the last line of its complaint."""
    if finished.ok:
        text = finished.stdout.decode(errors="replace").strip() or "(no output)"
    else:
        complaint = finished.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        text = f"Error: {finished.ending}. {complaint}".strip()
    return text if len(text) <= settings.max_output else f"{text[: settings.max_output]}..."
