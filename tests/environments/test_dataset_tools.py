"""Functions of a file as tools of a data set: what agents are told, what comes back, and what counts as the answer."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from agents.base import History
from agents.tool_calls import ToolCall, write_calls
from agents.tools import ToolAgent
from environments.base import can_demonstrate
from environments.check import check_environment
from environments.tasks.dataset import Dataset
from environments.tasks.own_tools import load_tools
from rewards.answers.exact import ExactMatch
from rewards.answers.numeric import Numeric
from rewards.answers.text import last_action, last_answer, last_reply
from rewards.judges.majority import Majority
from rewards.verified import Verified
from rlhf.build.reference_trial import try_references
from rlhf.build.train import train
from rlhf.data import Action, Outcome, SamplingParams, Task, Trajectory, Turn
from rlhf.errors import EnvError, RecipeError
from rlhf.inference.scripted import ScriptedEngine
from rlhf.recipe import load
from rlhf.rollout.episode import run_episode
from rlhf.rollout.limits import Limits
from rlhf.rollout.renderer import Renderer
from tests.environments.test_dataset import lines, recipe
from tests.training import runs, tiny

TOOLS = '''
"""Prices and sums."""
from typing import Literal

PRICES = {"cup": 14, "pen": 5}


def price(name: str, unit: Literal["euro", "cent"] = "euro") -> int:
    """What a thing costs.

    It is looked up.

    Args:
        name: of the thing, such as
            `cup`.
        unit (str): of the price.

    Returns:
        the price: a number.
    """
    return PRICES[name] * (100 if unit == "cent" else 1)


async def total(numbers: list[float]) -> dict[str, float]:
    """Adds numbers.

    :param numbers: to be added
    """
    return {"sum": sum(numbers)}


def long() -> str:
    """Says much."""
    return "x" * 5000


def _helper(x):
    return x
'''
ROWS = [{"question": f"What do {n} cups and a pen cost?", "answer": 14 * n + 5} for n in range(60)]


@pytest.fixture
def world(tmp_path: Path) -> Dataset:
    (tmp_path / "shop.py").write_text(TOOLS)
    return Dataset(path=lines(tmp_path / "a.jsonl", ROWS), tools=tmp_path / "shop.py")


ODD = '''
class Mute:
    def __str__(self) -> str:
        raise RuntimeError("no text")

class Wrong(Mute, Exception):
    """Has no text either."""

def given() -> object:
    "Returns what has no text."
    return Mute()

def raised() -> str:
    "Raises what has no text."
    raise Wrong
'''


TYPED = '''
from __future__ import annotations
import datetime
from dataclasses import dataclass
from enum import Enum
from pydantic import BaseModel, Field
from typing_extensions import NotRequired, TypedDict

class Unit(Enum):
    EURO = "euro"
    CENT = "cent"

@dataclass
class Place:
    row: int
    title: str = ""

class Person(BaseModel):
    name: str = Field(description="in full")

class Box(TypedDict):
    w: int
    h: NotRequired[int]

class Tree(BaseModel):
    branches: list[Tree] = []

def put(unit: Unit, place: Place, rows: list[dict[str, int]], who: Person | None = None, box: Box = {"w": 1}) -> object:
    """Puts it.

    As it is told.

    Parameters
    ----------
    unit : Unit
        Of the
        price.
    place, rows : Place
        Where: with a colon.
    who
        Whose.

    Returns
    -------
    object
        what: was put.
    """
    return {"place": place, "unit": unit, "who": who, "day": datetime.date(2020, 1, 2)}

def grow(tree: Tree) -> int:
    "Counts branches."
    return len(tree.branches)

def read() -> Person:
    "Reads one that is broken."
    return Person(name=3)
'''


def call(tool: str, /, **arguments: Any) -> str:
    return ToolCall(tool, arguments).text


def test_docstrings_and_hints_say_what_a_call_takes(world: Dataset) -> None:
    told = {tool["function"]["name"]: tool["function"] for tool in world.tasks("train")[0].info["tools"]}
    assert list(told) == ["price", "total", "long"]
    assert told["price"]["description"] == "What a thing costs. It is looked up."
    parameters = told["price"]["parameters"]
    assert parameters["required"] == ["name"] and parameters["properties"] == {
        "name": {"type": "string", "description": "of the thing, such as `cup`."},
        "unit": {"type": "string", "enum": ["euro", "cent"], "default": "euro", "description": "of the price."},
    }
    assert told["total"]["parameters"]["properties"]["numbers"] == {
        "type": "array", "items": {"type": "number"}, "description": "to be added",
    }  # fmt: skip
    assert told["long"]["parameters"]["properties"] == {}


@pytest.fixture
def typed(tmp_path: Path) -> Dataset:
    (tmp_path / "typed.py").write_text(TYPED)
    return Dataset(path=lines(tmp_path / "a.jsonl", ROWS), tools=tmp_path / "typed.py")


def test_types_of_the_file_stand_where_an_argument_has_them(typed: Dataset) -> None:
    told = {tool["function"]["name"]: tool["function"] for tool in typed.tasks("train")[0].info["tools"]}
    assert told["put"]["description"] == "Puts it. As it is told."
    place = {"row": {"type": "integer"}, "title": {"type": "string", "default": ""}}
    person = {
        "type": "object",
        "properties": {"name": {"type": "string", "description": "in full"}},
        "required": ["name"],
    }
    box = {"type": "object", "properties": {"w": {"type": "integer"}, "h": {"type": "integer"}}, "required": ["w"]}
    rows = {"type": "array", "items": {"type": "object", "additionalProperties": {"type": "integer"}}}
    where = {"description": "Where: with a colon."}
    assert told["put"]["parameters"] == {
        "type": "object",
        "additionalProperties": False,
        "required": ["unit", "place", "rows"],
        "properties": {
            "unit": {"type": "string", "enum": ["euro", "cent"], "description": "Of the price."},
            "place": {"type": "object", "properties": place, "required": ["row"], **where},
            "rows": rows | where,
            "who": {"anyOf": [person, {"type": "null"}], "default": None, "description": "Whose."},
            "box": box | {"default": {"w": 1}},
        },
    }
    assert told["grow"]["parameters"]["properties"]["tree"] == {"$ref": "#/$defs/Tree"}  # which holds itself
    assert "Tree" in told["grow"]["parameters"]["$defs"]


def test_arguments_become_what_the_hints_say_or_the_agent_reads_what_is_wrong(typed: Dataset) -> None:
    async def said(action: str) -> tuple[str, bool]:
        found = await typed.start(typed.tasks("train")[0]).step(action)
        return found.reply, found.valid

    right: dict[str, Any] = {"unit": "cent", "place": {"row": 1}, "rows": [{"a": 1}], "who": {"name": "Mia"}}
    shown = {"place": {"row": 1, "title": ""}, "unit": "cent", "who": {"name": "Mia"}, "day": "2020-01-02"}
    assert asyncio.run(said(call("put", **right))) == (json.dumps(shown), True)
    for key, value, told in (
        ("unit", "CENT", "unit: Input should be 'euro' or 'cent'"),
        ("place", {"row": "x"}, "place.row: Input should be a valid integer"),
        ("rows", ["x"], "rows.0: Input should be a valid dictionary"),
        ("who", {"name": 3}, "who.name: Input should be a valid string"),
        ("box", {}, "box.w: Field required"),
    ):
        reply, valid = asyncio.run(said(call("put", **right | {key: value})))
        assert reply.startswith(f"Error: {told}") and not valid, reply
    reply, valid = asyncio.run(said(call("read")))  # of the tool's own data, not of an argument
    assert "1 validation error for Person" in reply and valid


def test_calls_are_carried_out_and_anything_else_is_the_answer(world: Dataset) -> None:
    task = world.tasks("train")[0]

    async def said(*actions: str) -> list[tuple[str, bool, bool]]:
        episode = world.start(task)
        found = [await episode.step(action) for action in actions]
        return [(one.reply, one.valid, one.terminated) for one in found]

    assert asyncio.run(
        said(
            call("price", name="cup"),
            call("price", name="cup", unit="cent"),
            call("total", numbers=[1, "2.5"]),
            call("price", name="hat"),
            call("total", numbers="many"),
            call("price", name="cup", colour="red"),
            call("long"),
            str(task.reference),
        )
    ) == [
        ("14", True, False),
        ("1400", True, False),
        ('{"sum": 3.5}', True, False),
        ("Error: KeyError: 'hat'", True, False),
        ("Error: numbers: Input should be a valid list", False, False),
        ("Error: colour: Unexpected keyword argument", False, False),
        ("x" * 2000 + "... (5000 characters)", True, False),
        ("", True, True),
    ]
    assert world.plan(task, [call("price", name="cup")]) == (task.reference,) and world.plan(task, ["7"]) is None
    assert asyncio.run(said('{"name": "hat", "arguments": {}}'))[0][2]  # no tool of ours


def test_a_tool_that_exits_is_an_error_that_the_agent_reads(tmp_path: Path) -> None:
    exits = '{}def {}() -> str:\n    "Exits."\n    raise SystemExit({})\n'
    (tmp_path / "exits.py").write_text(exits.format("", "f", 2) + exits.format("async ", "g", "'no'"))
    world = Dataset(path=lines(tmp_path / "a.jsonl", ROWS), tools=tmp_path / "exits.py")

    async def said(*actions: str) -> list[tuple[str, bool, bool]]:
        episode = world.start(world.tasks("train")[0])
        found = [await episode.step(action) for action in actions]
        return [(one.reply, one.valid, one.terminated) for one in found]

    found = asyncio.run(said(call("f"), call("g")))
    assert found == [("Error: SystemExit: 2", True, False), ("Error: SystemExit: no", True, False)]


def test_a_result_or_an_error_that_cannot_be_shown_is_an_error_that_the_agent_reads(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    world = Dataset(path=lines(tmp_path / "a.jsonl", ROWS), tools=tmp_path / "odd.py")

    async def said(action: str) -> tuple[str, bool]:
        found = await world.start(world.tasks("train")[0]).step(action)
        return found.reply, found.valid

    assert asyncio.run(said(call("given"))) == ("Error: the result cannot be shown: RuntimeError: no text", True)
    assert asyncio.run(said(call("raised"))) == ("Error: Wrong", True)


def test_it_keeps_the_contract(world: Dataset) -> None:
    report = check_environment(world)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ("x = 1\n", "tools.py", "no tools"),
        ("def f(x: int):\n    return x\n", "tools.py:1, f", "without a docstring"),
        ('\ndef f(x):\n    "Does."\n', "tools.py:2, f", "without a type hint"),
        ('def f(*x: int):\n    "Does."\n', "f", "named arguments"),
        ('def answer(x: int):\n    "Does."\n', "answer", "name of an answer"),
        ('class Odd: ...\ndef f(x: Odd):\n    "Does."\n', "f", "no form in JSON"),
        ('from __future__ import annotations\ndef f(x: Odd):\n    "Does."\n', "f", "no form in JSON"),
        ("1 / 0\n", "tools.py", "ZeroDivisionError"),
        ("raise SystemExit(3)\n", "tools.py", "SystemExit: 3"),
        ('def f(x: int):\n    "Does."\n    yield x\n', "tools.py:1, f", "generator"),
        ('async def f(x: int):\n    "Does."\n    yield x\n', "tools.py:1, f", "generator"),
    ],
)
def test_a_file_that_does_not_say_what_its_tools_are_is_refused(
    tmp_path: Path, text: str, where: str, says: str
) -> None:
    (tmp_path / "tools.py").write_text(text)
    with pytest.raises(EnvError, match=says) as refused:
        Dataset(path=lines(tmp_path / "a.jsonl", ROWS), tools=tmp_path / "tools.py").tasks("train")
    assert where in str(refused.value.where)
    with pytest.raises(EnvError, match=r"did you mean 'tools\.py'"):
        load_tools(tmp_path / "tool.py")


def test_a_changed_file_is_loaded_again_and_is_another_data_set(world: Dataset) -> None:
    before = world.fingerprint()
    assert world.tools is not None and "shop.py sha256:" in before
    world.tools.write_text(TOOLS + '\n\ndef more() -> str:\n    "More."\n    return "more"\n')
    assert len(world.tasks("train")[0].info["tools"]) == 4 and world.fingerprint() != before


# --- a class ---

CART = '''
"""A cart to fill."""
import asyncio

PRICES = {"cup": 14, "pen": 5}
CLOSED = []


class Cart:
    """What one attempt has put into its cart."""

    def __init__(self) -> None:
        self.held = []

    def reset(self, task):
        self.wanted = task.info["columns"]["wanted"]
        return f"The cart of {self.wanted} is empty."

    def add(self, name: str, n: int = 1) -> list[str]:
        """Puts things into the cart.

        Args:
            name: of the thing.
        """
        PRICES[name]
        self.held += [name] * n
        return self.held

    async def count(self) -> int:
        """Says how many there are."""
        await asyncio.sleep(0.01)
        return len(self.held)

    @staticmethod
    def price(name: str) -> int:
        """Says a price."""
        return PRICES[name]

    @classmethod
    def kind(cls, of: str) -> str:
        """Says what it is."""
        return f"{cls.__name__} {of}"

    def _total(self) -> int:
        return sum(PRICES[name] for name in self.held)

    async def reward(self, answer):
        return (self.held == [self.wanted]) / 2 + (answer == str(self._total())) / 2

    def close(self):
        CLOSED.append(self)
'''
WANTED = [{"question": f"Buy it. ({i})", "wanted": "cup" if i % 2 else "pen"} for i in range(60)]


@pytest.fixture
def cart(tmp_path: Path) -> Dataset:
    (tmp_path / "cart.py").write_text(CART)
    return Dataset(path=lines(tmp_path / "b.jsonl", WANTED), tools=tmp_path / "cart.py:Cart")


def test_methods_of_a_class_are_tools(cart: Dataset) -> None:
    told = {tool["function"]["name"]: tool["function"]["parameters"] for tool in cart.tasks("train")[0].info["tools"]}
    assert list(told) == ["add", "count", "price", "kind"]
    name = {"type": "string", "description": "of the thing."}
    assert told["add"]["properties"] == {"name": name, "n": {"type": "integer", "default": 1}}
    assert told["add"]["required"] == ["name"] and list(told["kind"]["properties"]) == ["of"]
    before = cart.fingerprint()
    (cart.tools.parent / "cart.py").write_text(CART + "\n")  # type: ignore[union-attr]
    assert "cart.py sha256:" in before and cart.fingerprint() != before


def test_attempts_at_the_same_time_share_nothing(cart: Dataset) -> None:
    task = next(t for t in cart.tasks("train") if t.info["columns"]["wanted"] == "cup")
    buy, count = [call("add", name="cup"), call("count")], call("count")
    games = {
        "right": [*buy, "14"],
        "wrong": [*buy, "5"],
        "twice": [call("add", name="cup", n=2), count, "28"],
        "none": [call("price", name="cup"), call("kind", of="cup"), count, "0"],
        "error": [call("add", name="hat"), call("add", name=3), call("add", name="cup", self=1), count, "14"],
    }

    async def play(name: str) -> tuple[list[tuple[str, bool]], float, bool | None]:
        episode = cart.start(task)
        assert episode.opening.reply == f"{task.info['prompt']}\nThe cart of cup is empty."
        said = [await episode.step(action) for action in games[name]]
        await episode.close()
        return [(one.reply, one.valid) for one in said[:-1]], said[-1].reward, said[-1].success

    async def together() -> list[tuple[list[tuple[str, bool]], float, bool | None]]:
        return await asyncio.gather(*map(play, games))

    found = dict(zip(games, asyncio.run(together()), strict=True))
    cups = [('["cup"]', True), ("1", True)]
    assert found["right"] == (cups, 1.0, True) and found["wrong"] == (cups, 0.5, False)
    assert found["twice"] == ([('["cup", "cup"]', True), ("2", True)], 0.5, False)
    assert found["none"] == ([("14", True), ("Cart cup", True), ("0", True)], 0.5, False)
    assert found["error"][0][0] == ("Error: KeyError: 'hat'", True) and found["error"][1:] == (0.0, False)
    assert found["error"][0][1:] == [
        ("Error: name: Input should be a valid string", False),
        ("Error: self: Got multiple values for argument", False),
        ("0", True),
    ]
    [module] = [m for name, m in sys.modules.items() if name.startswith("own_tools_") and hasattr(m, "CLOSED")][-1:]
    assert len(module.CLOSED) == len(set(map(id, module.CLOSED))) == 5
    assert not can_demonstrate(cart)  # the reward may want more than the reply


def test_a_class_that_fails_is_an_error_of_the_attempt(tmp_path: Path) -> None:
    text = 'class A:\n    def f(self) -> int:\n        "Does."\n        return 1\n'
    path, tools = lines(tmp_path / "a.jsonl", ROWS), tmp_path / "a.py"
    for hook, says in (
        ("def reset(self, task):\n        1 / 0", "a.py:6"),
        ("def reward(self, answer):\n        pass", "reward is no finite number"),
        ("def reward(self, answer):\n        return float('nan')", "reward is no finite number"),
        ("async def reward(self, answer):\n        1 / 0", "ZeroDivisionError"),
    ):
        tools.write_text(f"{text}    {hook}\n")
        made = played(Dataset(path=path, tools=tmp_path / "a.py:A"), [call("f"), "7"], 3)
        assert made.outcome is Outcome.ENV_ERROR and says in made.detail, made.detail


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("class Card: ...\n", r"no class is called 'Cart'(.|\n)*did you mean 'Card'"),
        ("Cart = 3\n", "no class is called 'Cart'"),
        ("class Cart: ...\n", "the class Cart has no tools"),
        ('class Cart:\n    def f(self, x): "Does."\n', "without a type hint"),
        ("class Cart:\n    def f(self): ...\n", "without a docstring"),
        ('class Cart:\n    def __init__(self, x): ...\n    def f(self): "Does."\n', r"Cart\(x\)"),
        ('class Cart:\n    def reset(self): ...\n    def f(self): "Does."\n', r"Cart.reset\(self\)"),
        ('class Cart:\n    def reward(self): ...\n    def f(self): "Does."\n', r"Cart.reward\(self\)"),
        ('class Cart:\n    async def reset(self, task): ...\n    def f(self): "Does."\n', "reset cannot be async"),
    ],
)
def test_a_class_that_does_not_say_what_its_tools_are_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "cart.py").write_text(text)
    with pytest.raises(EnvError, match=says):
        Dataset(path=lines(tmp_path / "a.jsonl", ROWS), tools=tmp_path / "cart.py:Cart").tasks("train")


def test_a_class_keeps_the_contract(cart: Dataset) -> None:
    report = check_environment(cart)
    assert report.ok, str(report)


# --- the agent ---


@pytest.mark.parametrize("style", ["json", "hermes", "llama", "mistral", "xml", "python"])
def test_a_reply_without_a_call_is_the_answer_in_every_style(world: Dataset, style: Any) -> None:
    task = world.tasks("train")[0]
    agent, history = ToolAgent(tool_format=style, think="allow"), History(task, "")
    made = write_calls([ToolCall("price", {"name": "cup"})], style)
    assert json.loads(agent.parsed(made, made, history, False).text)["name"] == "price"
    for said in ("It costs 19.", r"So \boxed{19}", "{19}", "f(3) = 19", "[19]", '{"cost": 19}', 'd = {1: "name"}'):
        assert agent.parsed(said, said, history, False).text == said
    for said in (
        'The "name" is 5',
        '{"name": "Mia", "age": 5}',
        'its "parameters" are 3',
        'the "tool" [is] "a hammer"',
    ):
        assert agent.parsed(said, said, history, False).text == said
    for wrong in ('{"name": "find", "arguments": {}}', '{"name": "find", "parameters": {', '{"tool": "price", '):
        refused = agent.parsed(wrong, wrong, history, False)
        assert (refused.error is not None) == (style in ("json", "llama")), wrong
    broken = {"python": "[price(name=]"}.get(style, made[: len(made) // 2])
    for wrong in (broken, "", "  "):
        parsed = agent.parsed(wrong, wrong, history, False)
        assert parsed.error is not None and parsed.text == "", wrong
    other = History(Task("t", info={"tools": task.info["tools"]}), "")  # where an answer is a call too
    assert agent.parsed("It costs 19.", "It costs 19.", other, False).error is not None


def test_what_the_recipe_leaves_out_is_for_tools(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(TOOLS)
    path = recipe(tmp_path, {"right": {"kind": "numeric"}}, tools="shop.py")
    made = load(path)
    assert isinstance(made.agent, ToolAgent) and made.agent.think == "allow" and made.limits.max_turns == 8
    hermes = load(path, ["agent.kind=tools", "agent.tool_format=hermes"]).agent
    assert isinstance(hermes, ToolAgent) and hermes.think == "allow" and hermes.tool_format == "hermes"
    chat = load(path, ["agent.kind=chat"]).agent
    assert type(chat).__name__ == "ChatAgent" and chat.format == "plain"  # type: ignore[attr-defined]
    with pytest.raises(RecipeError, match="this agent writes tool calls, and the environment has no tools"):
        load(recipe(tmp_path, {"right": {"kind": "numeric"}}), ["agent.kind=tools"])


# --- answers ---


def attempt(*actions: str, outcome: Outcome = Outcome.TURN_LIMIT) -> Trajectory:
    turns = tuple(Turn(Action(text, reply_text=f"<think>hm</think>{text}"), "14") for text in actions)
    return Trajectory("t", 0, "", turns, outcome)


def test_an_attempt_that_is_cut_off_after_a_call_has_no_answer() -> None:
    made = call("total", numbers=[19])
    for outcome in (Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT):
        cut = attempt("hm", made, outcome=outcome)
        assert last_action(cut) == last_answer(cut) == last_reply(cut) == ""
        several = Trajectory("t", 0, "", (Turn(Action(f"{made}\n{made}", parts=(made, made)), "14"),), outcome)
        assert last_answer(several) == ""
    task = Task("t", reference="19")
    assert Verified(Numeric())(task, attempt(made)).value == 0  # type: ignore[union-attr]
    assert ExactMatch()(task, attempt(made)).value == 0 and Majority().answer(attempt(made)) is None
    assert Verified(Numeric())(task, attempt(made, outcome=Outcome.FAILED)).value == 1  # type: ignore[union-attr]


def test_what_answers_is_an_answer_however_an_attempt_ends() -> None:
    for said, answer in (("19", "19"), (call("answer", value="19"), "19"), ('{"cost": 19}', '{"cost": 19}')):
        assert last_answer(attempt(said)) == answer
    parts = (call("price", name="cup"), call("answer", value="19"))
    both = Trajectory("t", 0, "", (Turn(Action("\n".join(parts), parts=parts), ""),), Outcome.TURN_LIMIT)
    assert last_answer(both) == "19"


def played(world: Dataset, replies: list[str], max_turns: int) -> Trajectory:
    task = world.tasks("train")[0]
    said, tokenizer = iter(replies), tiny.policy().tokenizer
    engine, agent = ScriptedEngine(lambda prompt: next(said), tokenizer=tokenizer), ToolAgent(think="allow")
    limits = Limits(max_turns=max_turns, max_tokens=200)
    return asyncio.run(run_episode(task, world, agent, engine, Renderer(tokenizer), limits, SamplingParams()))


def test_an_episode_calls_then_answers_or_is_cut_off(world: Dataset) -> None:
    task, made = world.tasks("train")[0], call("price", name="cup")
    whole = played(world, [made, f"It is {task.reference}"], 8)
    assert [turn.reply for turn in whole.turns] == ["14", ""] and whole.outcome is Outcome.FAILED  # before the reward
    assert Verified(Numeric())(task, whole).value == 1  # type: ignore[union-attr]
    cut = played(world, [made, call("total", numbers=[int(str(task.reference))])], 2)
    assert cut.outcome is Outcome.TURN_LIMIT and last_answer(cut) == ""
    assert Verified(Numeric())(task, cut).value == 0  # type: ignore[union-attr]


def test_the_reward_of_a_class_says_what_is_solved_in_a_run(tmp_path: Path) -> None:
    hooks = "    def reset(self, task):\n        self.n = 0\n    def reward(self, answer):\n        return 1 - self.n\n"
    put = '    def put(self) -> int:\n        "Puts."\n        self.n += 1\n        return self.n\n'
    (tmp_path / "box.py").write_text(f"class Box:\n{hooks}{put}")
    path = recipe(tmp_path, {"done": {"kind": "environment"}}, tools="box.py:Box")
    with pytest.raises(RecipeError, match="cannot demonstrate"):
        load(path)
    one = {"kind": "policy_gradient", "steps": 1, "tasks_per_step": 4, "group_size": 4}
    short = ["agent.system=Call.", "policy.max_context=900", f"stages={json.dumps([one])}", "limits.max_turns=2"]
    done = train(load(path, short), tmp_path / "run")
    assert runs.curve(Path(done["run"]), "rollout/success") == [1.0] and done["n_episodes"] == 16
    world: Any = load(tmp_path / "run" / "recipe.yaml").environment
    assert world.tools == tmp_path / "box.py:Box"


def test_a_run_with_tools(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text('def price(name: str) -> int:\n    "A price."\n    return 5\n')
    path = recipe(tmp_path, {"right": {"kind": "numeric"}}, tools="shop.py")
    said: list[str] = []
    asyncio.run(try_references(load(path), said.append))
    assert not [line for line in said if "caution" in line], said
    short = ["agent.system=Call.", "policy.max_context=600", "stages.0.epochs=10", "stages.1.steps=1"]
    done = train(load(path, [*short, "limits.max_turns=2"]), tmp_path / "run")
    [success] = runs.curve(Path(done["run"]), "rollout/success")
    assert done["n_episodes"] == 16 and success > 0  # replies without a call are answers
