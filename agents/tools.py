"""The tool agent: replies are calls of tools, in the form of the model's family."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import History
from agents.chat import PASSED_ON, ChatAgent, passed_on
from agents.memory.base import Exchange
from agents.parsing import Parsed
from agents.tool_calls import Style, ToolCall, Unreadable, function_of, how_to_call, is_attempt, read_calls, write_calls
from rlhf.checking import CheckContext, Problem
from rlhf.data import Action, Message, Role
from rlhf.settings import STRICT

#: Place of the tool definitions in a prompt.
ToolDefinitions = Literal["system_prompt", "chat_template"]
#: Name in `Task.info` of the tools of a task: OpenAI's definitions of functions, as JSON values.
TOOLS = "tools"
#: Name in `Task.info` of what says that a reply without a call is the answer.
PLAIN = "plain_answer"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ToolAgent(ChatAgent):
    """Tool agent: shows the tools and parses calls; the environment receives each call as JSON.

    A call looks as `tool_format` has it (see `agents.tool_calls`) and reaches the environment as
    `{"name": ..., "arguments": {...}}`. Several calls of one reply are carried out in order, in one turn. What is no
    call, calls an unknown tool, lacks an argument or goes beyond a limit is an error that the policy reads next; the
    environment is then not stepped.

    An environment says in `Task.info["tools"]` which tools a task has, as a list of JSON schemas of functions. Where it
    does not, its observations have to, and any name is passed on. With `Task.info["plain_answer"]` a reply that has no
    call is the answer, and is passed on as it is. Of the environments that come along those with an
    attribute `offers_tools` take calls, and a recipe with any other is refused.
    """

    system: str = "You solve tasks by calling tools."
    """Opening instruction; the tools and how to call them are added. Empty: no system message at all."""
    tool_format: Style = "json"
    """Format of a call: `json`, `hermes`, `llama`, `mistral`, `xml` or `python`."""
    tool_definitions: ToolDefinitions = "system_prompt"
    """Place of the tool definitions: the system prompt, or the model's own chat template, which has to know `tools`;
    replies of the environment to calls are then messages of the role `tool`."""
    max_calls_per_reply: Annotated[int, Field(ge=1)] = 4
    """Most calls of one reply."""
    max_calls_per_tool: Mapping[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """Maximal calls of a tool in an episode, by its name; unlimited where it is not named."""
    max_action_chars: Annotated[int, Field(ge=1)] = 4000
    """Longest call."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse environments that take no calls; a plug-in environment may leave it undeclared."""
        recipe = context.recipe
        for where, world in recipe.without_tools():
            yield Problem(
                "this agent writes tool calls, and the environment has no tools",
                where="agent.kind",
                got=f"{context.kind_of('agent', recipe.agent)} in {context.kind_of('environment', world)} ({where})",
                expected="an environment that takes calls, as tools and mcp do",
                do="use agent: {kind: chat}; an environment of your own with tools sets offers_tools = True",
            )

    def past(self, history: History) -> tuple[Exchange, ...]:
        """Past of a chat, with a tool's answers as tool messages where the template writes them."""
        past = super().past(history)
        if self.tool_definitions == "system_prompt":
            return past
        names = {function_of(tool).get("name") for tool in self.tools(history)}
        called = (False, *(_has_called(turn.action, names) for turn in history.turns))
        return tuple(e.as_from(Role.TOOL) if was else e for e, was in zip(past, called, strict=True))

    def instructions(self, history: History) -> tuple[Message, ...]:
        """The instruction, with the tools of the task."""
        tools = self.tools(history)
        if not self.system:
            return ()
        text = [self.system]
        if tools and self.tool_definitions == "system_prompt":
            text += ["Tools:", *(json.dumps(tool, ensure_ascii=False) for tool in tools)]
        text += [how_to_call(self.tool_format)] if self.tool_definitions == "system_prompt" else []
        text += filter(None, [self._thinking(), passed_on(history)])
        return (Message(Role.SYSTEM, "\n".join(text)),)

    def tools(self, history: History) -> Sequence[Mapping[str, Any]]:
        """The definitions of the task's tools; none where the environment does not say."""
        return tuple(history.task.info.get(TOOLS, ()))

    def offered(self, history: History) -> Sequence[Mapping[str, Any]]:
        """The tools that the chat template is to show."""
        return self.tools(history) if self.tool_definitions == "chat_template" else ()

    def parsed(self, text: str, answer: str, history: History, was_cut: bool) -> Parsed:
        """Read the calls in `answer`."""
        if problem := self._problem_of_thoughts(text, was_cut):
            return Parsed("", f"No tool was called: {problem}.")
        try:
            calls = read_calls(answer, self.tool_format, self.tools(history))
            self._check(calls, history)
        except Unreadable as error:
            if self._is_answer(answer, history):
                return Parsed(answer.strip())
            cut = "your reply was cut off: " if was_cut else ""
            return Parsed("", f"No tool was called: {cut}{error}")
        texts = tuple(call.text for call in calls)
        return Parsed("\n".join(texts), parts=texts if len(texts) > 1 else ())

    def _is_answer(self, answer: str, history: History) -> bool:
        """True if a reply whose call cannot be read is no call, where such a reply is taken."""
        if answer.strip(" .!\r\n").casefold() in history.task.info.get(PASSED_ON, ()):
            return True
        names = [str(function_of(tool).get("name")) for tool in self.tools(history)]
        return bool(history.task.info.get(PLAIN) and answer.strip()) and not is_attempt(answer, self.tool_format, names)

    def written(self, action: str) -> str:
        """Action as the policy writes it; one that is no call stays as it is."""
        try:
            return write_calls(read_calls(action, "json"), self.tool_format)
        except Unreadable:
            return action

    def _check(self, calls: Sequence[ToolCall], history: History) -> None:
        if len(calls) > self.max_calls_per_reply:
            raise Unreadable(f"your reply has {len(calls)} calls, at most {self.max_calls_per_reply} are allowed")
        known = {function_of(tool).get("name"): function_of(tool) for tool in self.tools(history)}
        steps = [step for turn in history.turns if turn.action.error is None for step in turn.action.steps]
        used = [call.name for call in _calls_of(steps)]
        for i, call in enumerate(calls):
            if known and call.name not in known:
                raise Unreadable(f"there is no tool '{call.name[:80]}'; there are {', '.join(map(str, known))}")
            if len(call.text) > self.max_action_chars:
                raise Unreadable(f"a call has {len(call.text)} characters, at most {self.max_action_chars} are allowed")
            needed = (function_of(known.get(call.name, {})).get("parameters") or {}).get("required") or ()
            if missing := [name for name in needed if name not in call.arguments]:
                raise Unreadable(f"the call of '{call.name}' lacks {', '.join(missing)}")
            most = self.max_calls_per_tool.get(call.name)
            n = used.count(call.name) + sum(c.name == call.name for c in calls[: i + 1])
            if most is not None and n > most:
                raise Unreadable(f"'{call.name}' may be called {most} times in all")


def _has_called(action: Action, names: Collection[Any]) -> bool:
    """True if a tool of these names was called, or any where there are none; else a user replies to an answer."""
    calls = _calls_of(action.steps) if action.error is None else []
    return any(call.name in names or not names for call in calls)


def _calls_of(steps: Sequence[str]) -> list[ToolCall]:
    """Calls that were made; what was none, in a turn that another played, counts for nothing."""
    found: list[ToolCall] = []
    for step in steps:
        try:
            found += read_calls(step, "json")
        except Unreadable:
            continue
    return found
