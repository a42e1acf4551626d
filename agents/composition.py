"""Agents within agents: the history that an inner one is shown, and which kinds can stand there.

Source: intrinsic functions that compose, Pangu-Agent, arXiv 2312.14878.
"""

from __future__ import annotations

from dataclasses import replace

from agents.base import Agent, Capabilities, History
from agents.chat import ChatAgent
from agents.memory.base import DemonstrationInputs
from rlhf.errors import AgentError


def refuse_outermost(key: str, agent: Agent) -> None:
    """Raise ValueError for an agent that acts in no other: one with a store, a program outside, one for all seats."""
    can = Capabilities(agent)
    if can.is_outermost or can.is_outside or can.plays_seats:
        raise ValueError(
            f"{key} is {type(agent).__name__}, expected an agent that can be nested: wrap it around the other one"
        )


def view_of(agent: Agent) -> ChatAgent:
    """Return what tells an outer agent its own past: `agent` where it is a chat agent, else a plain one."""
    return agent if isinstance(agent, ChatAgent) else ChatAgent()


def since(history: History, first: int, opening: str) -> History:
    """History from turn `first` on, that begins with `opening`."""
    return replace(
        history,
        opening=opening,
        turns=history.turns[first:],
        admissible_before=history.admissible_before[first:],
        seats=history.seats[first:],
    )


def with_observation(history: History, text: str) -> History:
    """History whose newest observation is `text`."""
    if not history.turns:
        return replace(history, opening=text)
    return replace(history, turns=(*history.turns[:-1], replace(history.turns[-1], reply=text)))


def written(key: str, agent: Agent, shown: DemonstrationInputs) -> str:
    """Reply that a demonstration gives to an inner agent. Raises AgentError where it takes none."""
    write = Capabilities(agent).write
    if write is None:
        raise AgentError(
            "this agent cannot be shown demonstrations", where=key, got=type(agent).__name__, expected="chat"
        )
    return str(write(shown))
