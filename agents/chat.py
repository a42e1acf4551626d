"""The chat agent: one message per observation, one action per reply."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import History, PolicyHandle
from agents.parsing import Parsed, how_to_answer, parse_action, split_thoughts
from rlhf.data import Action, Finish, Message, Role, Turn
from rlhf.settings import STRICT

_THINK_ABOUT = {
    "off": "",
    "allow": "You may think first, inside <think>...</think>.",
    "require": "Think first, inside <think>...</think>.",
}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ChatAgent:
    """Shows the conversation so far and reads one action from the reply.

    The messages are a function of the history alone, so the messages of a later turn begin with those of an earlier
    one as long as nothing is forgotten: caches are reused and an episode is one row for the trainer.

    With an empty `system` nothing is said but the observations, which suits small models made from scratch.
    """

    system: str = "You act in a text environment. Read each observation and answer with your next action."
    """Opening instruction; sentences about format and thinking are added. Empty: no system message at all."""
    show_admissible: bool = False
    """List the possible actions after each observation, where the environment knows them."""
    max_admissible: Annotated[int, Field(ge=1)] = 50
    """Most actions of one list."""
    history: Annotated[int, Field(ge=0)] | None = None
    """How many of the last turns are shown, after the opening; all where none is given."""
    format: Literal["plain", "tagged"] = "plain"
    """The action alone, or inside `<action>...</action>`."""
    think: Literal["off", "allow", "require"] = "off"
    """Whether a reply may, or must, begin with `<think>...</think>`. An empty block is always fine."""
    parse: Literal["tolerant", "strict"] = "tolerant"
    """Whether small slips of format are forgiven; see `agents.parsing.parse_action`."""
    max_action_chars: Annotated[int, Field(ge=1)] = 200
    """Longest action; anything longer is taken for chatter."""

    async def act(self, history: History, policy: PolicyHandle) -> Action:
        """Ask once and read the reply; what cannot be read becomes an error that the policy sees next."""
        reply = await policy.generate(self.messages(history))
        was_cut = reply.generation.finish is Finish.LENGTH
        parsed = self.read(reply.text, history.admissible_actions, was_cut=was_cut)
        return Action(parsed.text, (reply.generation,), parsed.error)

    def messages(self, history: History) -> tuple[Message, ...]:
        """Everything the policy is shown before its next action."""
        shown = (*history.admissible_before, history.admissible_actions)
        turns = history.turns
        kept = len(turns) if self.history is None else min(self.history, len(turns))
        first = len(turns) - kept
        opening = history.opening
        if first:
            opening = f"{opening}\n...\n{turns[first - 1].reply}"
        said = [Message(Role.USER, self._observation(opening, _at(shown, first)))]
        for i, turn in enumerate(turns[first:], start=first):
            said.append(self._reply(turn))
            said.append(Message(Role.USER, self._observation(turn.reply, _at(shown, i + 1))))
        return (*self._instructions(), *history.task.messages, *said)

    def read(self, text: str, admissible: tuple[str, ...] = (), *, was_cut: bool = False) -> Parsed:
        """Read the action in a whole reply. Never raises."""
        thoughts = split_thoughts(text)
        problem = ""
        if self.think == "off" and thoughts.thought:
            problem = "<think> is not allowed here"
        elif not thoughts.is_finished:
            problem = "your reply was cut off before </think>" if was_cut else "</think> is missing"
        elif self.think == "require" and thoughts.thought is None:
            problem = "<think>...</think> is missing before the action"
        if problem:
            return Parsed("", f"No action was taken: {problem}. {self._how_to_answer()}")
        return parse_action(
            thoughts.answer,
            admissible,
            is_tagged=self.format == "tagged",
            is_strict=self.parse == "strict",
            was_cut=was_cut,
            max_chars=self.max_action_chars,
        )

    def write(self, action: str) -> str:
        """Write a reply that `read` understands as `action`, for demonstrations."""
        text = f"<action>{action}</action>" if self.format == "tagged" else action
        return f"<think>\n\n</think>\n\n{text}" if self.think == "require" else text

    def _how_to_answer(self) -> str:
        return " ".join(filter(None, [_THINK_ABOUT[self.think], how_to_answer(self.format == "tagged")]))

    def _instructions(self) -> tuple[Message, ...]:
        return (Message(Role.SYSTEM, f"{self.system} {self._how_to_answer()}"),) if self.system else ()

    def _reply(self, turn: Turn) -> Message:
        if turn.generations:
            return Message(Role.ASSISTANT, turn.action.text, turn.generations[-1].token_ids)
        return Message(Role.ASSISTANT, self.write(turn.action.text))

    def _observation(self, text: str, admissible: tuple[str, ...]) -> str:
        if not self.show_admissible or not admissible:
            return text
        lines = [f"- {action}" for action in admissible[: self.max_admissible]]
        more = len(admissible) - self.max_admissible
        lines += [f"- ... and {more} more"] if more > 0 else []
        return "\n".join([text, "", "Possible actions:", *lines])


def _at(shown: tuple[tuple[str, ...], ...], turn: int) -> tuple[str, ...]:
    """Actions shown with the observation before `turn`; none where the history does not say."""
    return shown[turn] if turn < len(shown) else ()
