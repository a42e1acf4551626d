"""Human player in place of a policy: sees its prompts and replies as it would."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlhf.errors import AgentError, RecipeError, boundary
from rlhf.terminal import say

if TYPE_CHECKING:
    from agents.base import Agent, Reply
    from environments.base import StepResult
    from rlhf.data import Action, Message, Task, Turn

_CHECK = "run `rlhf check agent`"


def seat_of(said: str) -> Seat:
    """Seat of the policy in the agent that `--agent` names: a kind, or a mapping with keys.

    The kind `chat` without keys lists the possible actions.

    Raises:
        RecipeError: there is no such agent, or one that recalls what a run has stored.
    """
    from agents.stores.remembering import Remembering
    from rlhf.recipe.builder import build_part
    from rlhf.recipe.text import parse

    values = parse(said, "--agent") if said.lstrip().startswith("{") else {"kind": said}
    values = {"kind": "chat", "show_admissible": True} if values == {"kind": "chat"} else values
    agent = build_part("agent", values, "--agent", base=Path.cwd())
    if isinstance(agent, Remembering):
        raise RecipeError(
            "this agent needs the store of a run, and `rlhf play` has none",
            where="--agent.kind",
            got=said,
            expected="an agent without a store, such as chat, tools, planner, critic, rafa or self_play",
            hint="name its inner agent; `rlhf memory RUN` reads the store of a run",
        )
    return Seat(agent)


class Game(Protocol):
    """The game as its player left it.

    Attributes:
        task: that is played.
        results: what the environment has said, the opening first.
        turns: finished ones.
    """

    task: Task
    results: list[StepResult]
    turns: list[Turn]

    @property
    def now(self) -> StepResult:
        """Return the environment's last result."""

    def called(self, value: Any) -> Any:
        """Result of a call, awaited if it is awaitable."""


class Seat:
    """The place of a policy: it sees each prompt of an agent, which reads its replies.

    An agent that asks several times for one action begins anew with every reply, and is told the replies so far: what
    it asks follows from the history and from these alone.
    """

    def __init__(self, agent: Agent) -> None:
        from rlhf.data import Action

        self._agent, self._chosen = agent, Action("")
        self._said = list[str]()
        self._shown, self._tools = dict[str, Sequence[Any]](), list[str]()
        self._newest = (-1, 0)
        self._lists, self._seats = list[tuple[str, ...]](), list[str]()

    def ask(self, game: Game) -> tuple[str, ...] | None:
        """Actions taken by the agent; None where it asks for a reply, once its new prompt is printed.

        A reply that the agent cannot read is a turn that says so.

        Raises:
            AgentError: the agent failed, or takes no action and does not ask for one.
        """
        from rlhf.data import Turn

        while True:
            try:
                action = self._act(game)
            except _Asks as asked:
                self._print(asked, (len(game.turns), len(self._said)))
                return None
            n_said = len(self._said)
            self._said.clear()
            if action.error is None:
                self._chosen = action
                return action.steps
            if not n_said:
                raise AgentError(
                    "has no action that a person could choose", where="--agent", got=action.error, hint=_CHECK
                )
            self._went_by(game.now)
            game.turns.append(Turn(action, action.error, state_key=game.now.state_key, valid=False))

    def reply(self, line: str) -> None:
        """Answer what was asked."""
        self._said.append(line)

    def took(self, game: Game, n: int) -> None:
        """Keep a finished turn of `n` actions, for the messages to come."""
        from rlhf.data import Turn

        before, after = game.results[-n - 1], game.results[-n:]
        self._went_by(before)
        game.turns.append(
            Turn(
                self._chosen,
                "\n".join(result.reply for result in after),
                reward=sum(result.reward for result in after),
                state_key=before.state_key,
                valid=all(result.valid for result in after),
            )
        )

    def _went_by(self, before: Any) -> None:
        self._lists.append(before.admissible_actions)
        self._seats.append(before.seat)

    def _act(self, game: Game) -> Action:
        from dataclasses import replace

        from agents.base import History

        history = History(
            task=replace(game.task, reference=None),
            opening=game.results[0].reply,
            turns=tuple(game.turns),
            admissible_actions=game.now.admissible_actions,
            admissible_before=tuple(self._lists),
            seats=(*self._seats, game.now.seat),
        )
        with boundary(AgentError, "--agent", _CHECK):
            acted: Action = game.called(self._agent.act(history, _Asked(self._said)))
        return acted

    def _print(self, asked: _Asks, place: tuple[int, int]) -> None:
        """Print what the player has not yet seen of this conversation; `place` counts turns and replies."""
        if place == self._newest:  # a question about the game came between
            return
        self._newest = place
        tools = [json.dumps(tool, ensure_ascii=False) for tool in asked.tools]
        if tools and tools != self._tools:
            say("\n".join(["--- tools", *tools]))
        self._tools = tools or self._tools
        seen, now = self._shown.get(asked.role, ()), asked.messages
        n_same = next((i for i, (a, b) in enumerate(zip(seen, now, strict=False)) if a != b), min(len(seen), len(now)))
        self._shown[asked.role] = now
        for message in now[n_same:]:
            if str(message.role) != "assistant":
                say(f"--- {message.role}\n{message.content}")
        say(f"--- your reply{f' as {asked.role}' if asked.role else ''}")


class _Asks(BaseException):
    """The agent asks for a reply that is still to be typed. No error, so that no agent takes it for one."""

    def __init__(self, messages: Sequence[Message], role: str, tools: Sequence[Mapping[str, Any]]) -> None:
        super().__init__()
        self.messages, self.role, self.tools = tuple(messages), role, tools


class _Asked:
    """A policy whose replies are lines that were typed."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = list(lines)

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        role: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Reply:
        """The next line. Raises _Asks where it is still to come."""
        from agents.base import Reply
        from rlhf.data import Finish, Generation, Prompt

        if not self._lines:
            raise _Asks(messages, role, tools)
        return Reply(self._lines.pop(0), Generation(Prompt((0,)), (0,), (0.0,), Finish.STOP, 0, role=role))

    def n_tokens(self, messages: Sequence[Message]) -> int:
        """Words, for want of a tokenizer."""
        return sum(len(message.content.split()) for message in messages)
