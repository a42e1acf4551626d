"""The multi-turn tasks of the Berkeley Function Calling Leaderboard, version 4: a user asks, functions are called.

    BFCL(category="base")

The user's turns are written down. Within a turn the agent calls functions, reads what they return, and calls more; text
that is no call ends the turn, and the next begins. At the end the objects must be in the state that the reference calls
leave them in, after each turn, and every answer of the reference must have been seen: the benchmark's own criterion.

It is a public test set: there is nothing to train on.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.base import Properties, StepResult, after_end
from environments.contrib.bfcl.apis import DISTRIBUTION, EXTRA, Apis, missing
from environments.contrib.bfcl.calls import BfclCall, NoCall, decode
from environments.core.seed_splits import of_another
from environments.packages import content_hash, import_from, version_of
from rlhf.data import Task
from rlhf.errors import EnvError
from rlhf.settings import STRICT

Category = Literal["base", "miss_func", "miss_param", "long_context"]

CATEGORIES: tuple[Category, ...] = ("base", "miss_func", "miss_param", "long_context")

_PARTS = (
    "bfcl_eval/data/BFCL_v4_multi_turn",
    "bfcl_eval/data/multi_turn_func_doc",
    "bfcl_eval/data/possible_answer/BFCL_v4_multi_turn",
    "bfcl_eval/eval_checker/multi_turn_eval",
)
_DOCUMENTS: Mapping[str, str] = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
_HINT_OF_LANGUAGE = " Note that the provided function is in Python 3 syntax."
_TURN_IS_OVER = "Done."


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BFCL:
    """BFCL multi-turn tasks of one category, or all four; 200 tasks each, none for training."""

    category: Category | Literal["all"] = "base"
    """base; miss_func: functions that are needed come later; miss_param: the user forgets to say something;
    long_context: the functions return much more than is asked for; all: the four, alternating."""
    steps_per_turn: Annotated[int, Field(ge=1)] = 20
    """An agent that still calls functions after so many steps of one turn has failed."""

    @property
    def properties(self) -> Properties:
        """Properties of the environment. Raises MissingPackageError when bfcl-eval is not installed."""
        return Properties(
            deterministic=True,
            replayable=True,
            oracle=True,
            splits=("test",),
            package=f"bfcl-eval {version_of(DISTRIBUTION, EXTRA)}",
            isolated=True,
            interleaves=True,
        )

    @property
    def max_steps(self) -> int:
        """Maximal steps of an episode: eight turns, each with one step more than its limit."""
        return 8 * (self.steps_per_turn + 1)

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of `test`, which is all there is.

        Raises:
            EnvError: another split; the benchmark has no tasks to train on.
            MissingPackageError: bfcl-eval is not installed.
        """
        if split != "test":
            raise EnvError(
                "the benchmark has test tasks only, none for training or selection",
                where="BFCL.tasks",
                got=repr(split),
                expected="test, the only split",
                hint="train on another environment, and evaluate on this one",
            )
        prefix = _prefix()
        chosen = CATEGORIES if self.category == "all" else (self.category,)
        pairs = [(name, i) for i in range(len(_entries(chosen[0]))) for name in chosen]
        return [Task(id=f"{prefix}/{name}/test/{i}", seed=i, info={"category": name}) for name, i in pairs]

    def start(self, task: Task) -> BFCLEpisode:
        """Begin one attempt.

        Raises:
            DataError: `task` is of another environment or package version.
            MissingPackageError: bfcl-eval is not installed.
        """
        category = self._category_of(task)
        entry, answer = _entries(category)[task.seed]
        return BFCLEpisode(entry, answer, category == "long_context", self.steps_per_turn)

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Reference calls, one list a turn, and the end of the turn; None where they no longer help.

        After other actions than these, the reference calls of the turn in progress and of those to come are tried.
        """
        whole = _reference(self._category_of(task), task.seed)
        flat = [action for turn in whole for action in turn]
        done = list(taken)
        if done == flat[: len(done)]:
            return flat[len(done) :]
        episode = self.start(task)
        for action in done:
            if episode.act(action).terminated:
                return None
        rest = [action for turn in whole[episode.turn :] for action in turn]
        for n, action in enumerate(rest, 1):
            result = episode.act(action)
            if result.terminated:
                return rest if n == len(rest) and result.success else None
        return None

    def _category_of(self, task: Task) -> Category:
        chosen = CATEGORIES if self.category == "all" else (self.category,)
        for name in chosen:
            if task.id == f"{_prefix()}/{name}/test/{task.seed}":
                return name
        among = f"<{' or '.join(chosen)}>" if len(chosen) > 1 else chosen[0]
        raise of_another(task, "BFCL", f"{_prefix()}/{among}/test/<number>: test is the only split, to evaluate on")


class BFCLEpisode:
    """Conversation of an episode.

    The key of a state covers all that the objects remember, the turn, how many steps of it are taken, and whether the
    turns before it were right.
    """

    def __init__(
        self, entry: Mapping[str, Any], answer: Sequence[Sequence[str]], long_context: bool, steps_per_turn: int
    ) -> None:
        self._entry, self._answer, self._steps_per_turn = entry, answer, steps_per_turn
        classes, beginning = entry["involved_classes"], entry["initial_config"]
        self._apis = Apis(classes, beginning, long_context=long_context)
        self._wanted = Apis(classes, beginning, long_context=long_context)
        self._told: list[str] = []
        self._n_steps, self._right, self._over = 0, True, False
        self.turn = 0
        opening = f"{_instructions(entry)}\n\n{self._question()}"
        self.opening = StepResult(opening, state_key=self._key())

    async def step(self, action: str) -> StepResult:
        """Make the calls of `action`, or end the turn where it holds none. Raises EnvError at the end."""
        return self.act(action)

    async def close(self) -> None:
        """End the conversation; the objects go with it."""
        self._over = True

    def act(self, action: str) -> StepResult:
        """Do a step."""
        if self._over:
            raise after_end("BFCL step", action)
        try:
            calls = decode(action)
        except NoCall:
            calls = ()
        if not calls:
            return self._end_of_turn()
        results = [(str(call), self._apis.run(call)) for call in calls]
        self._told.extend(result for _, result in results)
        self._n_steps += 1
        reply = repr([{"role": "tool", "name": name, "content": result} for name, result in results])
        if self._n_steps > self._steps_per_turn:
            self._over = True
            return StepResult(f"{reply}\nToo many steps.", terminated=True, success=False, state_key=self._key())
        return StepResult(reply, state_key=self._key())

    def _end_of_turn(self) -> StepResult:
        self._right = self._right and self._turn_is_right()
        self.turn, self._n_steps = self.turn + 1, 0
        if self.turn < len(self._answer):
            return StepResult(self._question(), state_key=self._key())
        self._over = True
        return StepResult(
            "The conversation is over.",
            reward=float(self._right),
            terminated=True,
            success=self._right,
            state_key=self._key(),
        )

    def _turn_is_right(self) -> bool:
        """True if state and answers match the reference calls; a turn without any is not judged."""
        reference = [_positional(text, self._wanted) for text in self._answer[self.turn]]
        if not reference:
            return True
        wanted = [self._wanted.run(call) for call in reference]
        return self._n_steps > 0 and self._apis.same_state(self._wanted) and not missing(self._told, wanted)

    def _question(self) -> str:
        """User message of this turn; where functions come late, their descriptions."""
        late = self._entry.get("missed_function", {}).get(str(self.turn))
        if late is not None:
            prompts = import_from("bfcl_eval.constants.default_prompts", DISTRIBUTION, EXTRA)
            found = [one for name in late for one in _functions(self._entry) if one["name"] == name]
            return str(prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING.format(functions=found))
        return "\n".join(message["content"] for message in self._entry["question"][self.turn])

    def _key(self) -> str:
        return f"{self._apis.digest()}-{self.turn}-{self._n_steps}-{int(self._right)}-{len(self._told)}"


def _positional(text: str, apis: Apis) -> BfclCall:
    """Read a call of the reference, whose arguments may be given by position."""
    node = ast.parse(text.strip(), mode="eval").body
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    given = [ast.literal_eval(one) for one in node.args]
    named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    return BfclCall(node.func.id, {**apis.keywords(node.func.id, given), **named})


@lru_cache(maxsize=1024)
def _reference(category: Category, number: int) -> tuple[tuple[str, ...], ...]:
    """Actions of each turn: one list of calls, if any, and the end of the turn."""
    entry, answer = _entries(category)[number]
    apis = Apis(entry["involved_classes"], entry["initial_config"], long_context=False)
    turns = [[f"[{', '.join(str(_positional(text, apis)) for text in turn)}]"] if turn else [] for turn in answer]
    return tuple((*turn, _TURN_IS_OVER) for turn in turns)


@cache
def _entries(category: Category) -> tuple[tuple[Mapping[str, Any], Sequence[Sequence[str]]], ...]:
    name = f"BFCL_v4_multi_turn_{category}.json"
    answers = {entry["id"]: entry["ground_truth"] for entry in _lines(f"possible_answer/{name}")}
    return tuple((entry, answers[entry["id"]]) for entry in _lines(name))


def _lines(name: str) -> list[dict[str, Any]]:
    folder = Path(import_from("bfcl_eval", DISTRIBUTION, EXTRA).__file__).parent / "data"
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines() if line.strip()]


@cache
def _documents(name: str) -> tuple[dict[str, Any], ...]:
    return tuple(_lines(f"multi_turn_func_doc/{_DOCUMENTS[name]}.json"))


def _functions(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Descriptions of all functions of a task, as the benchmark gives them."""
    late = {name for names in entry.get("missed_function", {}).values() for name in names}
    return [
        {**one, "description": one["description"] + ("" if one["name"] in late else _HINT_OF_LANGUAGE)}
        for name in entry["involved_classes"]
        for one in _documents(name)
    ]


def _instructions(entry: Mapping[str, Any]) -> str:
    """The benchmark's default system prompt, put together from the package's own texts."""
    prompts = import_from("bfcl_eval.constants.default_prompts", DISTRIBUTION, EXTRA)
    style = prompts.PROMPT_STYLE_TEMPLATES["classic"]
    late = {name for names in entry.get("missed_function", {}).values() for name in names}
    shown = [one for one in _functions(entry) if one["name"] not in late]
    text = prompts.PROMPT_TEMPLATE_MAPPING["plaintext"].format(
        persona=style["persona"],
        task=style["task"],
        tool_call_format=style["tool_call_no_tag"].format(
            output_format=prompts.OUTPUT_FORMAT_MAPPING["python"], param_types=prompts.PARAM_TYPE_MAPPING["python"]
        ),
        multiturn_behavior=style["multiturn_behavior"],
        available_tools=style["available_tools"].format(format="json", functions=json.dumps(shown, indent=4)),
    )
    return str(text)


def _prefix() -> str:
    return f"bfcl-{version_of(DISTRIBUTION, EXTRA)}-{content_hash(DISTRIBUTION, EXTRA, *_PARTS)}"
