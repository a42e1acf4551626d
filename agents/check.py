"""Contract checker for agents: reports each violated rule and the call that violated it.

    print(check_agent(MyAgent()))

The policy is scripted: it returns fixed texts, with token ids that do not encode them, and records every prompt it was
given. So it detects an agent that re-tokenises text, drops a generation or swallows an engine error.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from agents.base import Capabilities, History, Reply
from rlhf.data import Action, Finish, Generation, Message, Prompt, Role, Task, Turn
from rlhf.data.report import ContractChecker, Report, is_frozen, shorten
from rlhf.errors import EngineError

_MOST_CALLS = 200
_ACTIONS = ("go north", "go south", "look", "take lamp")
_SAYINGS = (
    "look",
    "go north",
    "<think>North may be best.</think>\ngo south",
    "<action>take lamp</action>",
    "I will now look around.\nAction: look",
)
_GARBAGE = (
    "",
    " \n\t ",
    "<think>and then",
    "</think></think><action>",
    "<action></action>",
    "\x00\x1b[2J\u202e\ufffd 🙂",
    '{"name": "go", "arguments": {',
    "{0} %s {x} \\1",
    "look\nlook\nlook",
    "blah " * 5_000,
)


class ScriptedPolicy:
    """A policy handle that says `sayings` in order, over and over.

    Attributes:
        replies: what it has said, in order.
        prompts: the messages of each call, in order.
    """

    def __init__(self, sayings: Sequence[str]) -> None:
        self._sayings = sayings
        self.replies: list[Reply] = []
        self.prompts: list[tuple[Message, ...]] = []

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        role: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Reply:
        """Say the next text. Raises EngineError after 200 calls, so that an agent that never decides is stopped."""
        if len(self.replies) >= _MOST_CALLS:
            raise EngineError("the script is at its end", where="scripted policy", got=f"{_MOST_CALLS} calls")
        n = len(self.replies)
        # The ids differ from call to call even where the text does not, so that none can be mistaken for another.
        ids = (1000 + n, *range(2000, 2000 + n % 5), 7)
        prompt = Prompt(tuple(range(1, 4 + len(messages))))
        generation = Generation(prompt, ids, (-0.5,) * len(ids), Finish.STOP, policy_version=0, role=role)
        self.prompts.append(tuple(messages))
        self.replies.append(Reply(self._sayings[n % len(self._sayings)], generation))
        return self.replies[-1]

    def n_tokens(self, messages: Sequence[Message]) -> int:
        """Count a word as a token."""
        return sum(len(message.content.split()) for message in messages)


class _BrokenPolicy:
    called = False

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        role: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Reply:
        self.called = True
        raise EngineError("the engine has stopped", where="scripted policy")

    def n_tokens(self, messages: Sequence[Message]) -> int:
        return len(messages)


def check_agent(agent: Any, *, n_turns: int = 5, call_limit_s: float = 30.0) -> Report:
    """Hold `agent` to the contract of `agents.base`.

    Args:
        agent: the object, as a recipe would build it.
        n_turns: turns of each scripted episode.
        call_limit_s: a call that takes longer has hung; the walk ends there.

    Returns:
        one finding per promise; what the agent raises is a finding, never raised.
    """
    checker = ContractChecker(f"agent {type(agent).__name__}", call_limit_s)
    return checker.run(lambda: _check(checker, agent, n_turns))


async def _check(checker: ContractChecker, agent: Any, n_turns: int) -> None:
    checker.note(is_frozen(agent), "class: is a frozen dataclass", "declare it @dataclass(frozen=True)")
    ok, stored = await checker.call("class: can be pickled", pickle.dumps, agent)
    if ok:
        await checker.call("class: can be pickled", pickle.loads, stored)
    if Capabilities(agent).is_outside:  # no script can stand in for the program of an attempt
        return
    policy = await _episode(checker, agent, _SAYINGS, n_turns, _ACTIONS)
    again = await _episode(checker, agent, _SAYINGS, n_turns, _ACTIONS)
    got = "the second episode with the same agent object was prompted otherwise: keep nothing on self"
    checker.note(policy.prompts == again.prompts, "act(): same history, same prompts", got)
    await _episode(checker, agent, _SAYINGS, n_turns, ())
    for text in _GARBAGE:
        await _episode(checker, agent, (text,), 3, _ACTIONS)
    await _engine_failure(checker, agent)


async def _episode(
    checker: ContractChecker, agent: Any, sayings: Sequence[str], n_turns: int, admissible: tuple[str, ...]
) -> ScriptedPolicy:
    """Run the agent for `n_turns` on a growing history, checking its prompts and actions."""
    policy = ScriptedPolicy(sayings)
    task = Task(id="scripted", messages=(Message(Role.USER, "Find the lamp."),))
    turns: tuple[Turn, ...] = ()
    for i in range(n_turns):
        history = History(task, "You are in a hall.", turns, admissible, (admissible,) * i)
        n_before, during = len(policy.replies), f"turn {i}, the policy says {shorten(sayings[0], 40)}"
        ok, action = await checker.call("act(): raises nothing", _act, checker, agent, history, policy, during=during)
        if not ok or not checker.note(
            isinstance(action, Action), "act(): gives an Action", f"{during}: {shorten(action)}"
        ):
            break
        _look_over(checker, action, policy.replies[n_before:], during)
        reply = f"Error: {action.error}" if action.error is not None else f"You see room {i}."
        turns = (*turns, Turn(action, reply, state_key=str(i), valid=action.error is None))
    _look_at_prompts(checker, policy)
    return policy


def _act(checker: ContractChecker, agent: Any, history: History, policy: ScriptedPolicy) -> Any:
    pending = agent.act(history, policy)
    checker.note(inspect.isawaitable(pending), "act(): is async", f"gave {shorten(pending)} at once")
    return pending


def _look_over(checker: ContractChecker, action: Action, said: Sequence[Reply], during: str) -> None:
    checker.note(isinstance(action.text, str), "Action.text: is text", f"{during}: {shorten(action.text)}")
    sampled = tuple(reply.generation for reply in said)
    got = f"{during}: {len(sampled)} sampled, {len(action.generations)} kept"
    if len(sampled) == len(action.generations) and sampled != action.generations:
        got = f"{during}: other ids or another order than sampled"
    checker.note(action.generations == sampled, "Action.generations: every generation as sampled, in order", got)
    message = action.error is None or (isinstance(action.error, str) and bool(action.error.strip()))
    checker.note(message, "Action.error: says what could not be read", f"{during}: {shorten(action.error)}")
    readable = action.error is not None or (isinstance(action.text, str) and bool(action.text.strip()))
    checker.note(readable, "Action: either text or an error", f"{during}: neither text nor error")


def _look_at_prompts(checker: ContractChecker, policy: ScriptedPolicy) -> None:
    """Check that sampled replies return in prompts with their ids or rewritten, never re-tokenised."""
    for call, messages in enumerate(policy.prompts):
        well = bool(messages) and all(isinstance(m, Message) for m in messages)
        if not checker.note(well, "prompt: a non-empty list of messages", f"call {call}: {shorten(messages)}"):
            return
        said = policy.replies[:call]
        for message in messages:
            got = (
                f"call {call}: {message.role} {shorten(message.content, 40)} with ids {shorten(message.token_ids, 40)}"
            )
            if message.role is not Role.ASSISTANT:
                checker.note(message.token_ids is None, "prompt: only the policy's own words carry ids", got)
            elif message.token_ids is None:
                verbatim = any(reply.text == message.content for reply in said)
                checker.note(not verbatim, "prompt: the policy's words come back with their ids", got)
            else:
                known = any(reply.generation.token_ids == message.token_ids for reply in said)
                checker.note(known, "prompt: ids come back as sampled", got)


async def _engine_failure(checker: ContractChecker, agent: Any) -> None:
    """Let the engine fail: that says nothing about the policy and must reach the rollout."""
    history, policy = History(Task(id="scripted"), "You are in a hall.", (), _ACTIONS), _BrokenPolicy()
    promise = "act(): lets EngineError through"

    async def act() -> Any:
        try:
            return await agent.act(history, policy)
        except EngineError as error:
            return error

    ok, given = await checker.call(promise, act)
    if ok:
        passed = isinstance(given, EngineError) or not policy.called
        checker.note(passed, promise, f"swallowed it and gave {shorten(given)}")
