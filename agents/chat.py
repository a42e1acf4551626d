"""Chat agent: a message per observation, an action per reply, and a memory that selects the context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import History, PolicyHandle
from agents.memory.base import MEMORY, DemonstrationInputs, Exchange, Memory, MemoryBase, MemoryCapabilities
from agents.memory.full import FullHistory
from agents.parsing import Parsed, how_to_answer, parse_action, split_thoughts
from rlhf.checking import IgnoredKeys
from rlhf.data import Action, Finish, Generation, Message, Role, Turn
from rlhf.data.generation import calls_of, joined
from rlhf.settings import STRICT

#: Name in `Task.info` of replies, casefolded, that an agent around this one takes for itself, each with its meaning:
#: `{"done": "the subgoal is reached"}`.
PASSED_ON = "rlhf: passed on"
_THINK_ABOUT = {
    "off": "",
    "allow": "You may think first, inside <think>...</think>.",
    "require": "Think first, inside <think>...</think>.",
}


def passed_on(history: History) -> str:
    """Sentences on the replies that an agent around this one takes for itself."""
    return " ".join(f"Reply {word} when {when}." for word, when in history.task.info.get(PASSED_ON, {}).items())


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ChatAgent:
    """Shows what its memory keeps of the conversation and reads one action from the reply.

    What is shown is a function of the history alone, so the messages of a later turn begin with those of an earlier
    one as long as nothing is forgotten: caches are reused and an episode is one row for the trainer.

    With an empty `system` nothing is said but the observations, which suits small models made from scratch.
    """

    ignored_keys: ClassVar[tuple[IgnoredKeys, ...]] = (IgnoredKeys("show_admissible", False, ("max_admissible",)),)

    system: str = "You act in a text environment. Read each observation and answer with your next action."
    """Opening instruction; sentences about format and thinking are added. Empty: no system message at all."""
    show_admissible: bool = False
    """List the possible actions after each observation, where the environment knows them."""
    max_admissible: Annotated[int, Field(ge=1)] = 50
    """Most actions of one list."""
    memory: Memory = Field(default_factory=FullHistory)
    """Memory that selects what of the past is shown."""
    format: Literal["plain", "tagged", "text"] = "plain"
    """The action alone on a line, inside `<action>...</action>`, or `text`: the whole reply."""
    think: Literal["off", "allow", "require"] = "off"
    """Thinking in replies: a `<think>...</think>` block at the start is off, allowed or required. An empty block is
    always fine."""
    parse: Literal["tolerant", "strict"] = "tolerant"
    """Tolerance of small format errors; see `agents.parsing.parse_action`."""
    max_action_chars: Annotated[int, Field(ge=1)] = 200
    """Longest action; anything longer is taken for chatter. Of no account with `format: text`."""

    def __post_init__(self) -> None:
        """Refuse a memory that this agent gives no room."""
        if self._memory.needs_thoughts and self.think != "require":
            name = type(self.memory).__name__
            raise ValueError(f"think is '{self.think}', expected 'require': {name} writes its memory there")

    @property
    def _memory(self) -> MemoryBase:
        """The hooks of the memory; a memory without any reads and writes nothing."""
        return self.memory if isinstance(self.memory, MemoryBase) else MemoryBase()

    @property
    def needs(self) -> tuple[str, ...]:
        """Inputs of a demonstration besides actions."""
        return self._memory.needs

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that its calls can have."""
        return ("", MEMORY) if MemoryCapabilities(self.memory).asks else ("",)

    async def act(self, history: History, policy: PolicyHandle) -> Action:
        """Ask and read the reply; what cannot be read becomes an error that the policy sees next."""
        return await self.act_on(self.past(history), history, policy)

    async def act_on(self, past: Sequence[Exchange], history: History, policy: PolicyHandle) -> Action:
        """Action as of `act`, with another past than that of `history`."""
        generations: list[Generation] = []
        notes: dict[str, str] = {}
        while True:
            recalled = await self.memory.recall(past, policy, notes)
            notes |= recalled.notes
            messages = (*self.instructions(history), *history.task.messages, *recalled.messages)
            tools = self.offered(history)
            reply = await (policy.generate(messages, tools=tools) if tools else policy.generate(messages))
            generations += [*recalled.generations, reply.generation]
            read = self._memory.read(split_thoughts(reply.text).answer, past, notes)
            notes |= read.notes
            if not read.again:
                break
        was_cut = reply.generation.finish is Finish.LENGTH
        parsed = self.parsed(reply.text, read.text, history, was_cut)
        return Action(parsed.text, tuple(generations), parsed.error, notes, parsed.parts, reply.text)

    def past(self, history: History) -> tuple[Exchange, ...]:
        """Everything that was said, from the opening to the observation that waits for an answer."""
        lists = (*history.admissible_before, history.admissible_actions)
        texts = (history.opening, *(turn.reply for turn in history.turns))
        shown = [self._observation(text, lists[i] if i < len(lists) else ()) for i, text in enumerate(texts)]
        finished = (
            Exchange(shown[i], texts[i], self._reply(turn), turn.action.text, turn.action.notes)
            for i, turn in enumerate(history.turns)
        )
        return (*finished, Exchange(shown[-1], texts[-1]))

    def read(self, text: str, admissible: tuple[str, ...] = (), *, was_cut: bool = False) -> Parsed:
        """Read the action in a whole reply. Never raises."""
        return self._read(text, split_thoughts(text).answer, admissible, was_cut)

    def parsed(self, text: str, answer: str, history: History, was_cut: bool) -> Parsed:
        """Read the action in `answer`, which is what the memory has left of `text`."""
        return self._read(text, answer, history.admissible_actions, was_cut)

    def offered(self, history: History) -> Sequence[Mapping[str, Any]]:
        """The tools that the chat template is to show."""
        return ()

    def _read(self, text: str, answer: str, admissible: tuple[str, ...], was_cut: bool) -> Parsed:
        if problem := self._problem_of_thoughts(text, was_cut):
            return Parsed("", f"No action was taken: {problem}. {self._how_to_answer()}")
        if self.format == "text":
            whole = answer.strip()
            return Parsed(whole, None if whole else "The reply is empty.")
        return parse_action(
            answer,
            admissible,
            is_tagged=self.format == "tagged",
            is_strict=self.parse == "strict",
            was_cut=was_cut,
            max_chars=self.max_action_chars,
        )

    def _problem_of_thoughts(self, text: str, was_cut: bool) -> str:
        """Error in the thoughts of a reply; empty if there is none."""
        thoughts = split_thoughts(text)
        if self.think == "off" and thoughts.thought:
            return "<think> is not allowed here"
        if not thoughts.is_finished:
            return "your reply was cut off before </think>" if was_cut else "</think> is missing"
        if self.think == "require" and thoughts.thought is None:
            return "<think>...</think> is missing before the action"
        return ""

    def write(self, shown: DemonstrationInputs) -> str:
        """Write the reply that a demonstration gives; `read` understands it as the demonstrated action."""
        if shown.role == MEMORY:
            return self._memory.remembered(shown)
        text = self._memory.write(self.written(shown.action), shown)
        thought = shown.recall if self._memory.needs_thoughts else ""
        return f"<think>\n{thought}\n</think>\n\n{text}" if self.think == "require" else text

    def written(self, action: str) -> str:
        """Return an action of the environment as the policy writes it."""
        return f"<action>{action}</action>" if self.format == "tagged" else action

    def _how_to_answer(self) -> str:
        how = "" if self.format == "text" else how_to_answer(self.format == "tagged")
        return " ".join(filter(None, [_THINK_ABOUT[self.think], how, self._memory.instruction]))

    def _thinking(self) -> str:
        return " ".join(filter(None, [_THINK_ABOUT[self.think], self._memory.instruction]))

    def instructions(self, history: History) -> tuple[Message, ...]:
        """System message, if there is one."""
        said = filter(None, [self.system, self._how_to_answer(), passed_on(history)])
        return (Message(Role.SYSTEM, " ".join(said).strip()),) if self.system else ()

    def _reply(self, turn: Turn) -> Message:
        if turn.generations:
            said = joined(calls_of(turn.generations)[-1])
            return Message(Role.ASSISTANT, turn.action.text, said.token_ids)
        return Message(Role.ASSISTANT, self.write(DemonstrationInputs(turn.action.text)))

    def _observation(self, text: str, admissible: tuple[str, ...]) -> str:
        if not self.show_admissible or not admissible:
            return text
        lines = [f"- {action}" for action in admissible[: self.max_admissible]]
        more = len(admissible) - self.max_admissible
        lines += [f"- ... and {more} more"] if more > 0 else []
        return "\n".join([text, "", "Possible actions:", *lines])
