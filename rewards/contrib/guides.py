"""Language models as dense-reward guides: paid subgoals, and feedback on replies."""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.judges.asking import Asker, AsksModel, Unreadable, asked, marked, record_of
from rlhf.data import Task, Trajectory, Verdict
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Subgoals(AsksModel):
    """Subgoals that a model names for a task, each paid at the turn that first reaches it.

    The model reads what the agent is told at the beginning and names up to `max_subgoals` subgoals, once for all
    attempts at a task. Then it reads each attempt and says which action reached which of them. A subgoal is worth
    `bonus` / n, with n subgoals; an attempt earns between 0 and `bonus`, however often it does something again.

    What was said is fenced: see docs/learned_rewards.md. A group of G takes 1 + G requests. A model that says nothing,
    names no subgoal, or an action that there was not, is a failure of the reward for all attempts at the task.

    Source: CALM, arXiv 2409.12798.
    """

    bonus: Annotated[float, Field(gt=0)] = 1.0
    """Total reward of all subgoals."""
    max_subgoals: Annotated[int, Field(ge=1)] = 5
    """Most subgoals of a task."""

    async def over_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Name subgoals, and find where each attempt reached them. Raises RewardError where that cannot be done."""
        if not trajectories:
            return []
        told = "\n".join([*(message.content for message in task.messages), trajectories[0].opening])
        [goals] = await self.all_of([self._propose(told[: self.max_chars])])
        found = await self.all_of(self._find(goals, task, t) for t in trajectories)
        return [self._verdict(goals, reached, t) for reached, t in zip(found, trajectories, strict=True)]

    def _propose(self, told: str) -> Callable[[Asker], Awaitable[list[str]]]:
        wanted = (
            f"Name the subgoals that an agent reaches on its way, one to {self.max_subgoals}, in their order, each "
            "something that can be seen to have happened. Reason first. Then write for each a line "
            "SUBGOAL {mark}: subgoal."
        )
        question = asked([("What the agent is told", told)], wanted)
        return lambda asker: asker.verdict(question, lambda reply: named(reply, question.mark)[: self.max_subgoals])

    def _find(
        self, goals: Sequence[str], task: Task, trajectory: Trajectory
    ) -> Callable[[Asker], Awaitable[Mapping[int, int]]]:
        wanted = (
            "Which action reached which subgoal? Reason first. Then write, for each subgoal that was reached, a line "
            "REACHED {mark}: number of the subgoal AT number of the action. Where none was, write REACHED {mark}: NONE."
        )
        listed = "\n".join(f"{i}. {goal}" for i, goal in enumerate(goals, start=1))
        record = record_of(task, trajectory, self.max_chars)
        question = asked([("Subgoals", listed), ("Attempt", record)], wanted)
        n_goals, n_turns = len(goals), len(trajectory.turns)
        return lambda asker: asker.verdict(question, lambda reply: reached(reply, question.mark, n_goals, n_turns))

    def _verdict(self, goals: Sequence[str], found: Mapping[int, int], trajectory: Trajectory) -> Verdict:
        per_turn = [0.0] * len(trajectory.turns)
        for turn in found.values():
            per_turn[turn - 1] += self.bonus / len(goals) if turn > trajectory.n_given else 0.0
        why = ", ".join(f"{goals[goal - 1][:40]!r} at {turn}" for goal, turn in sorted(found.items()))
        return Verdict(math.fsum(per_turn), f"{len(found)} of {len(goals)} subgoals: {why}", tuple(per_turn))


def named(reply: str, mark: str) -> list[str]:
    """Return what the lines SUBGOAL mark: ... say, each once. Raises Unreadable where there are none."""
    lines = re.findall(rf"^\W*SUBGOAL\W+{mark}\W*:[ \t]*(\S.*)$", reply, re.IGNORECASE | re.MULTILINE)
    found = list(dict.fromkeys(line.strip() for line in lines))
    if not found:
        raise Unreadable(f"no line 'SUBGOAL {mark}: ...'")
    return found


def reached(reply: str, mark: str, n_goals: int, n_turns: int) -> dict[int, int]:
    """Subgoal → action of the lines REACHED mark: i AT k, from 1; the earliest of a subgoal.

    Raises:
        Unreadable: there is no such line, nor one that says NONE, or one names what there is not.
    """
    line = rf"^\W*REACHED\W+{mark}\W*:\W*(?:(NONE)|(\d{{1,6}})\W*AT\W*(\d{{1,6}}))\W*$"
    found = re.findall(line, reply, re.IGNORECASE | re.MULTILINE)
    if not found:
        raise Unreadable(f"no line 'REACHED {mark}: ...'")
    at: dict[int, int] = {}
    for none, goal_text, turn_text in found:
        if none:
            continue
        goal, turn = int(goal_text), int(turn_text)
        if not (1 <= goal <= n_goals and 1 <= turn <= n_turns):
            raise Unreadable(f"subgoal {goal} at action {turn}, of {n_goals} subgoals and {n_turns} actions")
        at[goal] = min(turn, at.get(goal, turn))
    return at


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Feedback(AsksModel):
    """Reward from a model that reads the environment's replies: `bonus` for each new one that shows progress.

    Each different reply among the attempts at a task is judged once, by itself, yes or no, and paid on the turns in
    which an attempt hears it for the first time; to hear it again earns nothing. The policy's own words are not shown.
    Where the replies of a task come again in the next step, the same is asked again: to pay for the model once, train a
    `reward_model` stage with this as its reward, and score with what it leaves.

    A model that does not answer, or says no verdict `max_requests` times, is a failure of the reward for all attempts
    at the task, and never a score.

    Source: ONI, arXiv 2410.23022, whose table of labelled messages this is; its distilled reward is the stage.
    """

    question: str = "Does this reply of the environment show that the agent has made progress with its task?"
    """Question to the model about each reply."""
    bonus: Annotated[float, Field(gt=0)] = 0.1
    """Reward of a reply that shows progress."""

    async def over_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Judge all replies of a group. Raises RewardError where that cannot be done."""
        told = "\n".join([*(message.content for message in task.messages), *(t.opening for t in trajectories[:1])])
        replies = list(dict.fromkeys(turn.reply for t in trajectories for turn in t.turns))
        said = await self.all_of(self._call(told[: self.max_chars], reply) for reply in replies)
        helps = dict(zip(replies, said, strict=True))
        return [self._verdict(t, helps) for t in trajectories]

    def _call(self, told: str, reply: str) -> Callable[[Asker], Awaitable[bool]]:
        wanted = (
            f"{self.question}\n\nReason first. Then end with one line, VERDICT {{mark}}: YES or VERDICT {{mark}}: NO."
        )
        shown = [("What the agent was told first", told), ("Reply", reply[: self.max_chars])]
        question = asked(shown, wanted)
        return lambda asker: asker.verdict(question, lambda text: marked(text, question.mark, "YES|NO") == "YES")

    def _verdict(self, trajectory: Trajectory, helps: Mapping[str, bool]) -> Verdict:
        heard: set[str] = set()
        per_turn = []
        for i, turn in enumerate(trajectory.turns):
            is_new = i >= trajectory.n_given and turn.reply not in heard  # what was given is heard, and not paid
            per_turn.append(self.bonus if helps[turn.reply] and is_new else 0.0)
            heard.add(turn.reply)
        n = sum(x > 0 for x in per_turn)
        return Verdict(math.fsum(per_turn), f"{n} replies show progress", tuple(per_turn))
