"""Prompts to the policy about an attempt for a store, and their parser, which never raises."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agents.base import PolicyHandle
from agents.memory.base import MEMORY
from agents.parsing import split_thoughts
from rlhf.data import Message, Role, ScoredGroup, Trajectory
from rlhf.errors import ContextFull

_MOST_WORDS = 8


async def asked(policy: PolicyHandle, text: str) -> str:
    """Return the policy's answer without its thoughts; nothing where the question is too long for it."""
    try:
        reply = await policy.generate((Message(Role.USER, text),), role=MEMORY)
    except ContextFull:
        return ""
    return split_thoughts(reply.text).answer


def best_attempt(attempts: Sequence[Trajectory]) -> Trajectory | None:
    """The shortest solution, else the last attempt in which something was done; None where nothing was."""
    played = [t for t in attempts if t.turns]
    solved = [t for t in played if t.solved]
    return min(solved, key=lambda t: len(t.turns)) if solved else played[-1] if played else None


def by_task(groups: Sequence[ScoredGroup]) -> dict[str, list[Trajectory]]:
    """All attempts of a step at each task, of which there may be several groups."""
    found: dict[str, list[Trajectory]] = {}
    for group in groups:
        found.setdefault(group.task_id, []).extend(group.trajectories)
    return found


def best_attempts(groups: Sequence[ScoredGroup]) -> list[Trajectory]:
    """The `best_attempt` of a step at each task in which something was done."""
    return [best for attempts in by_task(groups).values() if (best := best_attempt(attempts)) is not None]


def news(groups: Sequence[ScoredGroup], known: Mapping[str, bool]) -> list[Trajectory]:
    """The best attempt at each task that is new, or solved for the first time.

    Args:
        groups: of a finished step.
        known: tasks that are told of already, and whether as solved.
    """
    return [of for of in best_attempts(groups) if of.task_id not in known or (of.solved and not known[of.task_id])]


def transcript(of: Trajectory, max_chars: int) -> str:
    """Transcript of an attempt with its outcome, its last `max_chars` characters."""
    lines = [of.opening]
    for turn in of.turns:
        lines += [f"> {turn.action.text}", turn.reply]
    return "\n".join([*lines, "Solved." if of.solved else "Not solved."])[-max_chars:]


def actions_of(of: Trajectory) -> list[str]:
    """Return the actions of an attempt, without those that could not be read."""
    return [turn.action.text for turn in of.turns if turn.action.error is None]


def how_it_ended(of: Trajectory) -> str:
    """Outcome of an attempt, and its actions."""
    return f"{'Solved by' if of.solved else 'Not solved by'}: {', '.join(actions_of(of))}"


def json_object(said: str) -> dict[str, Any] | None:
    """The object between the first and the last brace of a reply; None where it is none."""
    begin, end = said.find("{"), said.rfind("}")
    try:
        found = json.loads(said[begin : end + 1]) if 0 <= begin < end else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def listed(value: object) -> list[Any]:
    """A list as it is; of anything else an empty one."""
    return value if isinstance(value, list) else []


def words(value: object) -> tuple[str, ...]:
    """The first few texts of a list, each cut to 40 characters."""
    return tuple(short(word, 40) for word in listed(value)[:_MOST_WORDS] if isinstance(word, str) and word.strip())


def short(value: object, max_chars: int) -> str:
    """Text on one line, cut, without lone surrogates, which no file takes; empty for anything else."""
    if not isinstance(value, str):
        return ""
    return " ".join(value.encode("utf-8", "ignore").decode().split())[:max_chars].strip()
