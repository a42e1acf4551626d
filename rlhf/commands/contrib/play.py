"""`rlhf play`: a person plays an environment in the terminal, line by line."""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf.commands.contrib.human_policy import Seat, seat_of
from rlhf.commands.env_summary import variant
from rlhf.commands.output import AsJson, command, print_json
from rlhf.data.report import counted
from rlhf.errors import EnvError, RecipeError, RlhfError, boundary, nearest
from rlhf.terminal import say

if TYPE_CHECKING:
    from environments.base import StepResult
    from rlhf.data import Task, Turn

#: Actions of one list that is not asked for.
_MOST_SHOWN = 30
#: Longer numbers than this name nothing.
_DIGITS = 12
_CHECK = "run `rlhf check environment`"
#: An action that is a number, and what may stand around it.
_NUMBER, _BRACKETS = re.compile(r"-?\d+"), "[](){}<>\"' "
_QUESTIONS = "hint asks the oracle, actions lists all, state shows the state, quit ends."


@command
def play(
    kind: Annotated[
        str,
        typer.Argument(help="A catalogue name, package.module:Name, ./file.py:Name, or with --from a run folder."),
    ],
    fields: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Its settings.")] = None,
    split: Annotated[str, typer.Option(help="Task split.")] = "test",
    task: Annotated[str, typer.Option(metavar="ID|N", help="Task, by id or by index from 0.")] = "0",
    agent: Annotated[
        str,
        typer.Option(metavar="KIND", help="Play through an agent, in place of the model: chat, '{kind: planner}', ..."),
    ] = "",
    origin: Annotated[
        str,
        typer.Option(
            "--from", metavar="STAGE:PHASE:STEP:ROW", help="Continue a stored attempt of the run or evaluation."
        ),
    ] = "",
    turns: Annotated[
        int | None, typer.Option(min=0, help="Turns of the stored attempt to replay first (default: all but the last).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Play an environment yourself.

    Example: rlhf play keyhole rows=3 --task 4. Actions can be piped; the game ends with the input. `rlhf view` shows
    the command that continues an attempt: rlhf play runs/my-run --from 0-policy_gradient:eval:0:5 --turns 2.
    """
    from environments.base import Capabilities
    from rlhf.recipe.builder import build_environment
    from rlhf.recipe.text import parse_fields

    _read_whatever_comes()
    values = parse_fields(fields or [])
    seat = seat_of(agent) if agent else None
    begun: tuple[str, ...] = ()
    if origin and seat is not None:
        raise RecipeError("--from and --agent exclude each other", where="--agent", got=agent, hint="leave it out")
    if origin:
        environment, task, split, begun = _from(Path(kind), origin, turns)
    else:
        _refuse_recipe(kind)
        environment = build_environment({"kind": kind, **values}, "environment", base=Path.cwd())
    try:
        chosen = _task_of(environment, split, task)
        with asyncio.Runner() as runner:
            game = Game(environment, chosen, runner, seat, "" if origin else variant(kind, values), begun)
            game.play()
    finally:
        with boundary(EnvError, f"{kind}.close", _CHECK):
            Capabilities(environment).close()
    if as_json:
        print_json(game.record())


def _refuse_recipe(kind: str) -> None:
    """Raise RecipeError for a recipe or a run, with the command that plays its environment."""
    from rlhf.catalog import CATALOG
    from rlhf.plugins import brought
    from rlhf.recipe.files import find
    from rlhf.recipe.text import read

    if ":" in kind or kind in CATALOG["environment"] or kind in brought("environment"):
        return
    try:
        path = find(kind)
        given = read(path, [])["environment"]
        command = ["rlhf", "play", given["kind"], *(f"{key}={_flow(given[key])}" for key in given if key != "kind")]
    except (RlhfError, LookupError, TypeError, UnicodeError):  # no recipe: the error of an unknown kind
        return
    is_run = path.name == "recipe.yaml" and (path.parent / "trajectories").is_dir()
    raise RecipeError(
        f"this is a {'run' if is_run else 'recipe'}, and an environment is played",
        where="rlhf play",
        got=kind,
        expected="an environment" + (", or a run with --from STAGE:PHASE:STEP:ROW" if is_run else ""),
        hint=shlex.join(command),
    )


def _flow(value: Any) -> str:
    """A value as it is typed in KEY=VALUE."""
    from rlhf.recipe.text import escaped

    return str(escaped(value)) if isinstance(value, str) else json.dumps(escaped(value))


def _read_whatever_comes() -> None:
    """Bytes that are no text must not end a game."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")


def _from(run: Path, origin: str, turns: int | None) -> tuple[Any, str, str, tuple[str, ...]]:
    """Environment of a run or an evaluation, the task of an attempt, a split that has it, and its first actions."""
    from environments.base import properties_of
    from rlhf.evaluation.rows import decode
    from rlhf.recipe.played import environment_of
    from rlhf.rollout.tasks import tasks_of
    from rlhf.viewer.answers import place_of
    from rlhf.viewer.attempts import Attempts

    stage, phase, step, row = place_of(origin, "--from")
    environment = environment_of(run, stage)
    attempts = Attempts(run / "trajectories")
    record = attempts.record(attempts.find(stage, phase, step), row)
    found = [] if record["turns"] is None else list(decode(record).trajectory.turns)
    n = max(len(found) - 1, 0) if turns is None else turns
    actions = tuple(part for turn in found[:n] if turn.action.error is None for part in turn.action.steps)
    for split in properties_of(environment).splits:
        if any(task.id == record["task_id"] for task in tasks_of(environment, split)):
            return environment, str(record["task_id"]), split, actions
    raise RecipeError(
        "the environment has no such task now",
        where=f"--from {origin}",
        got=str(record["task_id"]),
        expected="a task of one of its splits",
        hint="an attempt that began in a stored state cannot be continued",
    )


def _task_of(environment: Any, split: str, wanted: str) -> Task:
    """The task of a split that has the id `wanted`, or that place in the list."""
    from environments.base import Capabilities
    from rlhf.rollout.tasks import tasks_of

    declared = Capabilities(environment).properties
    if declared is not None and split not in declared.splits:
        raise RecipeError(
            "the environment has no such split",
            where="--split",
            got=split,
            expected=", ".join(declared.splits),
            hint=nearest(split, declared.splits) or f"--split {declared.splits[-1]}",
        )
    is_place = wanted.isascii() and wanted.isdigit() and len(wanted) < _DIGITS
    found = tasks_of(environment, split, int(wanted) + 1) if is_place else []
    if is_place and len(found) == int(wanted) + 1:
        return found[-1]
    found = found or tasks_of(environment, split)
    by_id = {one.id: one for one in found}
    if wanted in by_id:
        return by_id[wanted]
    raise RecipeError(
        "the split has no such task",
        where="--task",
        got=wanted,
        expected=f"0 to {len(found) - 1}, or an id such as {found[0].id}",
        hint=nearest(wanted, by_id) or "--task 0",
    )


@dataclass
class Game:
    """Interactive episode, from the opening to its end or the player's.

    Attributes:
        environment: that is played.
        task: of it.
        runner: of its calls; lines are read between them, so that Ctrl-C is heard.
        seat: where the player sees what a policy would see; None for an ordinary game.
        variant: which of several games it is, and how another is chosen; '' where there is one.
        begun: actions that are done before the player is asked.
    """

    environment: Any
    task: Task
    runner: asyncio.Runner
    seat: Seat | None
    variant: str = ""
    begun: tuple[str, ...] = ()
    taken: list[str] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    @property
    def now(self) -> StepResult:
        """Return the environment's last result."""
        return self.results[-1]

    @property
    def over(self) -> bool:
        """True if the environment has ended the episode."""
        return self.now.terminated or self.now.truncated

    def play(self) -> None:
        """Play to the end."""
        from environments.base import EpisodeCapabilities

        with boundary(EnvError, f"start of {self.task.id}", _CHECK):
            episode = self.called(self.environment.start(self.task))
        try:
            self.results.append(_answer(EpisodeCapabilities(episode).opening, "opening"))
            say(f"Task {self.task.id}", *[f"[{self.variant}]"] * bool(self.variant), self._help, "")
            if self.seat is None:
                say(*(message.content for message in self.task.messages), self.now.reply)
                if not self.begun:
                    self._offer()
            self._do_again(episode)
            while not self.over and (actions := self._next()) is not None:
                self._do(episode, actions)
            say("", f"[{self._ending()}]")
        finally:
            with boundary(EnvError, f"close of {self.task.id}", _CHECK):
                self.called(episode.close())

    def _do_again(self, episode: Any) -> None:
        """Do what was begun with, as the player could have done it."""
        for action in self.begun:
            if self.over:
                break
            say(f"> {action}")
            self._do(episode, (action,))

    def record(self) -> dict[str, Any]:
        """Record of the episode, in plain values."""
        return {
            "task": self.task.id,
            "actions": self.taken,
            "rewards": [result.reward for result in self.results[1:]],
            "score": self._score(),
            "over": self.over,
            "truncated": self.now.truncated,
            "success": self.now.success,
        }

    # --- what the player types -------------------------------------------------------------------------------------

    def _next(self) -> tuple[str, ...] | None:
        """Next action, or all actions of one agent reply; None where the player ends the game."""
        while True:
            if self.seat is not None and (actions := self.seat.ask(self)) is not None:
                return actions
            line = _line()
            if line is None:
                return None
            word, _, rest = line.strip().partition(" ")
            known = line.strip() in self.now.admissible_actions
            if word == "quit" and not rest and not known:
                return None
            if not known and self._answered(word, rest):
                continue
            if not line.strip():
                say(self._help)
                continue
            if self.seat is not None:
                self.seat.reply(line)
            elif (action := self._read(line)) is not None:
                return (action,)

    def _answered(self, word: str, rest: str) -> bool:
        """True if the line was a question about the game, which is then answered."""
        if word == "actions":
            self._offer(rest.strip(), most=None)
        elif rest:
            return False
        elif word == "hint":
            say(f"[{self._hint()}]")
        elif word == "state":
            say(f"[{self._state()}; state key {self.now.state_key!r}]")
        elif word == "help":
            say(self._help)
        else:
            return False
        return True

    @property
    def _help(self) -> str:
        how = "Type an action, or its number" if self.seat is None else "Reply as a policy does"
        return f"[{how}; {_QUESTIONS}]"

    @property
    def _sign(self) -> str:
        """Prefix of list numbers, needed where actions are numbers themselves."""
        return "#" if any(_NUMBER.fullmatch(one.strip(_BRACKETS)) for one in self.now.admissible_actions) else ""

    def _read(self, line: str) -> str | None:
        """The action that a line means: what it says, or what has that number in the list."""
        text, listed, sign = line.strip(), self.now.admissible_actions, self._sign
        if text in listed or not listed:
            return text
        if sign and _NUMBER.fullmatch(text):
            return next((one for one in listed if one.strip(_BRACKETS) == text), text)
        if not text.startswith(sign) or not text.isascii() or not text.removeprefix(sign).isdigit():
            return text
        text = text.removeprefix(sign)
        if len(text) < _DIGITS and 1 <= int(text) <= len(listed):
            return listed[int(text) - 1]
        say(f"[there are actions {sign}1 to {sign}{len(listed)}; `actions` lists them]")
        return None

    def _do(self, episode: Any, actions: Sequence[str]) -> None:
        n_before = len(self.taken)
        for action in actions:
            with boundary(EnvError, f"step {len(self.taken) + 1} of {self.task.id}", _CHECK):
                result = self.called(episode.step(action))
            self.results.append(_answer(result, "step"))
            self.taken.append(action)
            if self.over:
                break
        if self.seat is not None:
            self.seat.took(self, len(self.taken) - n_before)
        if self.seat is None or self.over:
            say("" if self.now.valid else "[that was not understood]", self.now.reply)
        say(f"[{self._state()}]")
        if self.seat is None and not self.over:
            self._offer()

    # --- what the player is told -----------------------------------------------------------------------------------

    def _offer(self, words: str = "", *, most: int | None = _MOST_SHOWN) -> None:
        """List the admissible actions with their numbers; with `words` those that contain them."""
        listed = self.now.admissible_actions
        if not listed:
            say("[actions are not listed here: type what you want to do]")
            return
        sign, width = self._sign, len(f"{self._sign}{len(listed)}")
        found = [(f"{sign}{i}", text) for i, text in enumerate(listed, 1) if words in text]
        say(*(f"  {place:>{width}}  {text}" for place, text in found[:most]))
        if sign and not self.taken:
            say("[actions are numbers here: 4 is the number 4, #4 the fourth of the list]")
        if not found:
            say(f"[none of the {len(listed)} actions contains {words!r}]")
        elif most is not None and len(found) > most:
            say(f"[and {len(found) - most} more: `actions` lists all, `actions WORDS` those with these words]")

    def _hint(self) -> str:
        from environments.base import can_demonstrate

        if not can_demonstrate(self.environment, self.task):
            return "this environment has no oracle"
        with boundary(EnvError, f"plan for {self.task.id}", _CHECK):
            plan = self.environment.plan(self.task, list(self.taken))
        if not plan:
            return "the oracle knows no way on from here"
        return f"the oracle would do: {plan[0]} ({counted(len(plan), 'action')} to the end)"

    def _state(self) -> str:
        from environments.base import Capabilities

        most = Capabilities(self.environment).max_steps
        limit = "" if most is None else f" of {most}"
        return f"step {len(self.taken)}{limit}, reward {self.now.reward:g}, in all {self._score():g}"

    def _ending(self) -> str:
        done = f"{counted(len(self.taken), 'step')}, reward {self._score():g} in all"
        if not self.over:
            return f"left after {done}"
        ended = "the limit of steps is reached" if self.now.truncated and not self.now.terminated else "it is over"
        return f"solved in {done}" if self.now.success else f"not solved: {ended} after {done}"

    def _score(self) -> float:
        return sum(result.reward for result in self.results[1:])

    def called(self, value: Any) -> Any:
        """Result of an environment call; an awaitable one runs on the loop."""
        return self.runner.run(_waited(value)) if inspect.isawaitable(value) else value


async def _waited(value: Any) -> Any:
    return await value


def _answer(result: Any, what: str) -> StepResult:
    from environments.base import StepResult

    if not isinstance(result, StepResult):
        raise EnvError(f"the {what} is not a StepResult", where=what, got=type(result).__name__, hint=_CHECK)
    return result


def _line() -> str | None:
    """Next input line, None at the end; piped lines are echoed."""
    say("> ", end="")
    line = sys.stdin.readline()
    if not line:
        say("")
        return None
    line = line.rstrip("\r\n")
    if not sys.stdin.isatty():
        say(line)
    return line
