"""The place of a policy in a game that a person plays: they see what it would see, and reply as it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from agents.base import Agent, Reply
    from rlhf.commands.play import Game
    from rlhf.data import Action, Message


class Seat:
    """The place of a policy: it sees the messages of the chat agent, and its replies are read by that agent."""

    def __init__(self) -> None:
        from agents.chat import ChatAgent
        from rlhf.data import Action

        self._agent: Agent = ChatAgent(show_admissible=True)
        self._chosen = Action("")
        self._n_shown, self._lists = 0, list[tuple[str, ...]]()

    def show(self, game: Game) -> None:
        """Print the messages that are new since the player was last asked."""
        policy = _Asked(None)
        self._act(game, policy)
        new = [m for m in policy.messages[self._n_shown :] if str(m.role) != "assistant"]
        self._n_shown = len(policy.messages)
        for message in new:
            typer.echo(f"--- {message.role}\n{message.content}")
        if new:
            typer.echo("--- your reply")

    def read(self, game: Game, line: str) -> str | None:
        """The action that the agent reads in a reply; a reply that it cannot read is a turn that says so."""
        from rlhf.data import Turn

        action = self._act(game, _Asked(line))
        if action.error is None:
            self._chosen = action
            return action.text
        self._lists.append(game.now.admissible_actions)
        game.turns.append(Turn(action, action.error, state_key=game.now.state_key, valid=False))
        return None

    def took(self, game: Game) -> None:
        """Keep a finished turn, for the messages to come."""
        from rlhf.data import Turn

        before, now = game.results[-2], game.now
        self._lists.append(before.admissible_actions)
        game.turns.append(Turn(self._chosen, now.reply, reward=now.reward, state_key=before.state_key, valid=now.valid))

    def _act(self, game: Game, policy: _Asked) -> Action:
        from dataclasses import replace

        from agents.base import History

        history = History(
            task=replace(game.task, reference=None),
            opening=game.results[0].reply,
            turns=tuple(game.turns),
            admissible_actions=game.now.admissible_actions,
            admissible_before=tuple(self._lists),
        )
        acted: Action = game.called(self._agent.act(history, policy))
        return acted


class _Asked:
    """A policy whose one reply is a line that was typed; without one it only notes what it was shown."""

    def __init__(self, line: str | None) -> None:
        self._line, self.messages = line, list[Any]()

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        role: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Reply:
        """The line."""
        from agents.base import Reply
        from rlhf.data import Finish, Generation, Prompt

        self.messages = list(messages)
        return Reply(self._line or "", Generation(Prompt((0,)), (0,), (0.0,), Finish.STOP, 0))

    def n_tokens(self, messages: Sequence[Message]) -> int:
        """Words, for want of a tokenizer."""
        return sum(len(message.content.split()) for message in messages)
