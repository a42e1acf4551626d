"""Recipe keys of supervised training on data: a file of chats, or the attempts of another run."""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from agents.chat import ChatAgent
from rlhf.checking import CheckContext, Problem, unused
from rlhf.settings import STRICT


def _refuse_no_template(prompt: str) -> None:
    """Raise ValueError where the template of a prompt cannot be filled in."""
    try:
        formats = [spec or conversion for _, _, spec, conversion in string.Formatter().parse(prompt)]
    except ValueError as error:
        raise ValueError(
            f"prompt is no template: {error}; write {{{{ and }}}} for the characters themselves"
        ) from error
    if any(formats):
        raise ValueError("prompt: columns are in braces, without a format")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Chats:
    """SFT on chats of a file, or attempts of another run or evaluation, instead of demonstrations.

    The form of a file is found at its first row: chat messages (`role` and `content`, or ShareGPT's `from` and
    `value`), with calls of tools; a prompt and a completion; or plain text, of which every token is learnt. Of a chat
    the assistant's messages are learnt, each as the policy would sample it, so that the chat template needs no
    `generation` part; `observation_weight: 1` learns the others too.
    """

    path: Path | None = None
    """JSON lines, JSON, CSV, TSV or Parquet, or a folder of the package `datasets`."""
    from_run: Path | None = None
    """Folder of a run or evaluation, of any policy or endpoint, on tasks of this environment: SFT on its attempts, in
    the format of the recipe's agent."""
    messages: str | None = None
    """Column of the messages; null finds `messages`, `conversations`, ..."""
    prompt: str | None = None
    """Column of the prompt, as text or messages, or a template of columns in braces; null finds `prompt`,
    `instruction`, ..."""
    completion: str | None = None
    """Column of the reply to the prompt; null finds `completion`, `response`, ..."""
    text: str | None = None
    """Column of plain text, trained on in full without a chat template; null finds `text`."""
    tools: str = "tools"
    """Column of the tools of a chat, if any: a list, or the same in JSON."""
    max_rows: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of rows, the first ones."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """Rows longer than the policy's context: `refuse` before training starts, or `drop`."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the prompts, or of the tasks of `from_run`, whose rows are held out; their loss is measured after each
    epoch."""
    min_score: float | None = None
    """Minimum score of an attempt of `from_run`; null takes solved ones."""
    unsolved_system: str | None = None
    """Return-conditioned training: system message for unsolved attempts of `from_run`, while solved ones keep the
    agent's own (arXiv 2403.04642). Null excludes unsolved attempts."""
    max_per_task: Annotated[int, Field(ge=1)] | None = None
    """Maximum attempts per task, the best first."""

    @model_validator(mode="after")
    def _one_source(self) -> Chats:
        if (self.path is None) == (self.from_run is None):
            raise ValueError("data is a path of a file, or from_run, a run's folder; give one of the two")
        if self.prompt and "{" in self.prompt:
            _refuse_no_template(self.prompt)
        if self.messages and (self.prompt or self.completion):
            raise ValueError("give either messages, or prompt and completion")
        if self.text and (self.messages or self.prompt or self.completion):
            raise ValueError("text excludes messages, prompt and completion: remove one of them")
        return self

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse keys of the other source."""
        blank = Chats(path=self.path, from_run=self.from_run)
        of_run = ("min_score", "max_per_task", "unsolved_system")
        names = of_run if self.path else ("messages", "prompt", "completion", "text", "tools")
        source = "path" if self.path else "from_run"
        yield from unused(self, names, context.path, f"the data is that of {context.at(source)}", default=blank)
        if self.unsolved_system is not None:
            why = f"{context.at('unsolved_system')} takes every attempt"
            yield from unused(self, ("min_score",), context.path, why, default=blank)
        agent = context.recipe.agent
        if self.unsolved_system is not None and not isinstance(agent, ChatAgent):
            yield Problem(
                "this agent has no system message to replace",
                where=context.at("unsolved_system"),
                got=context.kind_of("agent", agent),
                expected="agent: {kind: chat}",
                do="remove the key",
            )
        elif self.unsolved_system is not None and self.unsolved_system == agent.system:
            yield Problem(
                "solved and unsolved attempts would be given the same prompt",
                where=context.at("unsolved_system"),
                got=self.unsolved_system,
                expected="another message than agent.system",
                do="ask for a failure here, and for a success there",
            )
