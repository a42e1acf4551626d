"""Each broken agent is caught, with the finding that names what it broke; a sound one passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from agents.base import History, PolicyHandle, Reply
from agents.check import check_agent
from rlhf.data import Action, Message, Role
from rlhf.errors import RlhfError
from rlhf.gateway.agent import ExternalAgent


@dataclass(frozen=True)
class Plain:
    """Shows the whole conversation and takes the first line of the reply for its action."""

    def messages(self, history: History) -> list[Message]:
        said = [Message(Role.USER, history.opening)]
        for turn in history.turns:
            ids = turn.generations[-1].token_ids
            said += [Message(Role.ASSISTANT, turn.action.text, ids), Message(Role.USER, turn.reply)]
        return said

    def read(self, reply: Reply) -> Action:
        line = next((line.strip() for line in reply.text.splitlines() if line.strip()), "")
        return Action(line, (reply.generation,), None if line else "Say what to do on one line.")

    async def act(self, history: History, policy: PolicyHandle) -> Action:
        return self.read(await policy.generate(self.messages(history)))


class ThinksTwice(Plain):
    """Two calls per turn; both generations are kept."""

    async def act(self, history: History, policy: PolicyHandle) -> Action:
        thought = await policy.generate(self.messages(history))
        messages = [*self.messages(history), thought.message, Message(Role.USER, "And now act.")]
        action = self.read(await policy.generate(messages))
        return replace(action, generations=(thought.generation, *action.generations))


class Summarises(Plain):
    """Rewrites the history in words of its own, which carry no ids."""

    def messages(self, history: History) -> list[Message]:
        return [Message(Role.USER, f"{len(history.turns)} turns ago: {history.opening}\nNow: {history.observation}")]


@pytest.mark.parametrize("agent", [Plain(), ThinksTwice(), Summarises()])
def test_sound_agents_pass(agent: Plain) -> None:
    report = check_agent(agent)
    assert report.ok, str(report)


# --- agents that break a promise -----------------------------------------------------------------------------------


class DropsAGeneration(ThinksTwice):
    async def act(self, history: History, policy: PolicyHandle) -> Action:
        action = await super().act(history, policy)
        return replace(action, generations=action.generations[-1:])


class SwapsGenerations(ThinksTwice):
    async def act(self, history: History, policy: PolicyHandle) -> Action:
        action = await super().act(history, policy)
        return replace(action, generations=action.generations[::-1])


class ForgetsIds(Plain):
    def messages(self, history: History) -> list[Message]:
        return [replace(message, token_ids=None) for message in super().messages(history)]


class EncodesAgain(Plain):
    def messages(self, history: History) -> list[Message]:
        def encode(message: Message) -> Message:
            return replace(message, token_ids=tuple(message.content.encode())) if message.token_ids else message

        return [encode(message) for message in super().messages(history)]


class GivesIdsToTheUser(Plain):
    def messages(self, history: History) -> list[Message]:
        return [replace(message, token_ids=message.token_ids or (1,)) for message in super().messages(history)]


class TrustsThePolicy(Plain):
    def read(self, reply: Reply) -> Action:
        return Action(reply.text.split()[0], (reply.generation,))


class SilentError(Plain):
    def read(self, reply: Reply) -> Action:
        action = super().read(reply)
        return replace(action, error="") if action.error else action


class SaysNothing(Plain):
    def read(self, reply: Reply) -> Action:
        return replace(super().read(reply), error=None)


class GivesText(Plain):
    async def act(self, history: History, policy: PolicyHandle) -> Any:
        return (await super().act(history, policy)).text


class AsksWithNothing(Plain):
    def messages(self, history: History) -> list[Message]:
        return []


class SwallowsFailures(Plain):
    async def act(self, history: History, policy: PolicyHandle) -> Action:
        try:
            return await super().act(history, policy)
        except RlhfError:
            return Action("look")


class RenamesFailures(Plain):
    async def act(self, history: History, policy: PolicyHandle) -> Action:
        try:
            return await super().act(history, policy)
        except RlhfError as error:
            raise ValueError("no answer") from error


class AsksUntilItLikesTheAnswer(Plain):
    async def act(self, history: History, policy: PolicyHandle) -> Action:
        while True:
            action = await super().act(history, policy)
            if action.error is None:
                return action


class Synchronous(Plain):
    def act(self, history: History, policy: PolicyHandle) -> Any:
        return Action("look")


@dataclass(frozen=True)
class Remembers(Plain):
    notes: list[str] = field(default_factory=list)

    def messages(self, history: History) -> list[Message]:
        self.notes.append(history.observation)
        return [Message(Role.USER, "\n".join(self.notes))]


@dataclass(frozen=True)
class Unpicklable(Plain):
    reader: Callable[[str], str] = lambda text: text


class Thawed:
    act, messages, read = Plain.act, Plain.messages, Plain.read


@pytest.mark.parametrize(
    ("agent", "promise", "got"),
    [
        (DropsAGeneration(), "Action.generations: every generation as sampled, in order", "2 sampled, 1 kept"),
        (SwapsGenerations(), "Action.generations: every generation as sampled, in order", "another order"),
        (ForgetsIds(), "prompt: the policy's words come back with their ids", "'look' with ids None"),
        (EncodesAgain(), "prompt: ids come back as sampled", "with ids (108, 111, 111, 107)"),
        (GivesIdsToTheUser(), "prompt: only the policy's own words carry ids", "user 'You are in a hall.'"),
        (TrustsThePolicy(), "act(): raises nothing", "the policy says '': IndexError"),
        (SilentError(), "Action.error: says what could not be read", "the policy says '': ''"),
        (SaysNothing(), "Action: either text or an error", "neither text nor error"),
        (GivesText(), "act(): gives an Action", "'look'"),
        (AsksWithNothing(), "prompt: a non-empty list of messages", "()"),
        (SwallowsFailures(), "act(): lets EngineError through", "swallowed it and gave Action(text='look'"),
        (RenamesFailures(), "act(): lets EngineError through", "ValueError: no answer"),
        (AsksUntilItLikesTheAnswer(), "act(): raises nothing", "200 calls"),
        (Synchronous(), "act(): is async", "at once"),
        (Remembers(), "act(): same history, same prompts", "keep nothing on self"),
        (Unpicklable(), "class: can be pickled", "pickle"),
        (Thawed(), "class: is a frozen dataclass", "@dataclass(frozen=True)"),
    ],
)
def test_broken_agents_are_caught(agent: Any, promise: str, got: str) -> None:
    report = check_agent(agent)
    details = [finding.detail for finding in report.broken if finding.promise == promise]
    assert details, str(report)
    assert got in details[0]


def test_an_agent_that_hangs_is_named() -> None:
    class Hangs(Plain):
        async def act(self, history: History, policy: PolicyHandle) -> Action:
            await asyncio.sleep(20)
            return Action("look")

    report = check_agent(Hangs(), call_limit_s=0.3)
    assert report.broken[-1].promise == "act(): returns"


def test_an_agent_outside_is_held_to_what_needs_no_program() -> None:
    report = check_agent(ExternalAgent())
    assert report.ok, str(report)
    assert not any(finding.promise.startswith("act(): raises") for finding in report.findings)
