"""Policies that say what a test has written, for agents to ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from agents.base import Reply
from rlhf.data import Finish, Generation, Message, Prompt, Role


class Says:
    """A policy that says one thing, or what a function makes of the role and the messages; a word is a token.

    Attributes:
        shown: of each call, its role and its messages.
        tools: of the last call.
        replies: of each call; no two have the same ids.
    """

    def __init__(self, say: str | Callable[[str, tuple[Message, ...]], str], finish: Finish = Finish.STOP) -> None:
        self._say, self._finish = say, finish
        self.shown: list[tuple[str, tuple[Message, ...]]] = []
        self.tools: Sequence[Any] = ()
        self.replies: list[Reply] = []

    async def generate(
        self, messages: Sequence[Message], *, max_tokens: int | None = None, role: str = "", tools: Sequence[Any] = ()
    ) -> Reply:
        self.shown.append((role, tuple(messages)))
        self.tools = tools
        text = self._say if isinstance(self._say, str) else self._say(*self.shown[-1])
        ids = (100 + len(self.shown), 7)
        self.replies.append(Reply(text, Generation(Prompt((1,)), ids, (0.0, 0.0), self._finish, 0, role=role)))
        return self.replies[-1]

    def n_tokens(self, messages: Sequence[Message]) -> int:
        return sum(len(m.content.split()) for m in messages)

    @property
    def asked(self) -> list[tuple[str, str]]:
        """Of each call, its role and its last message."""
        return [(role, messages[-1].content) for role, messages in self.shown]

    @property
    def told(self) -> list[tuple[str, list[str]]]:
        """Of each call, its role and its messages; `> ` stands before what the policy said itself."""
        return [(role, texts(messages)) for role, messages in self.shown]


class Speaks(Says):
    """A policy that says `acts` in order, and the lines of a role where one is named; an error among them is raised.

    Args:
        acts: said to roles without lines of their own.
        last: said for ever once lines have run out; without it that fails.
        lines: of each role.
    """

    def __init__(self, acts: Iterable[Any], *, last: str | None = None, **lines: Iterable[Any]) -> None:
        super().__init__(self._next)
        self.acts, self._last = list(acts), last
        self._lines = {role: list(said) for role, said in lines.items()}

    def _next(self, role: str, messages: tuple[Message, ...]) -> str:
        lines = self._lines.get(role, self.acts)
        said = self._last if self._last is not None and not lines else lines.pop(0)
        if isinstance(said, Exception):
            raise said
        return str(said)


def texts(messages: Iterable[Message]) -> list[str]:
    """What each message says; `> ` stands before what the policy said itself."""
    return [f"> {m.content}" if m.role is Role.ASSISTANT else m.content for m in messages]
