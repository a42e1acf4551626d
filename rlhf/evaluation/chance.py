"""Random baseline of an evaluation: actions drawn from the possible ones, observations unread."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agents.base import History, PolicyHandle
from environments.base import Environment, can_demonstrate
from environments.core.composite_properties import CompositeEnvironment
from environments.workers.pool import Processes
from rlhf.data import Action, Message, Role, Task
from rlhf.errors import AgentError, EnvError
from rlhf.rollout.env_session import EnvSession, EpisodeEnded
from rlhf.rollout.episode import executor_for
from rlhf.rollout.executors import CallError, CallExecutor, CallTimeout
from rlhf.rollout.limits import Limits

#: Tasks of an environment whose oracle's actions are borrowed, the first of those judged.
N_BORROWED = 20


@dataclass(frozen=True)
class RandomAgent:
    """Takes one of the possible actions, each as likely as any other. Its policy is `RandomSeedEngine`.

    Where none are listed, because actions are written, it takes one that the oracle takes in another task: what
    somebody may answer who knows what answers are like, and not what was asked.

    Attributes:
        environment: what it acts in.
        borrowed: member of the environment -> task -> what the oracle does in it.
    """

    environment: Environment
    borrowed: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)

    async def prepare(self, tasks: Iterable[Task], limits: Limits) -> None:
        """Ask the oracle before episodes begin, where the first task opens without a list of actions.

        Of an environment that is made of several, each is asked for itself.

        Args:
            tasks: those that are judged.
            limits: of the calls; a plan may take as long as an episode.

        Raises:
            EnvError: the oracle failed. To go on without its plan would draw something else when that works again.
        """
        by_member: dict[str, list[Task]] = {}
        for task in tasks:
            by_member.setdefault(member_of(self.environment, task), []).append(task)
        executor = executor_for(self.environment)
        try:
            for name, own in by_member.items():
                if can_demonstrate(self.environment, own[0]) and not await self._lists(own[0], limits, executor):
                    self.borrowed[name] = await self._plans(own[:N_BORROWED], limits, executor)
        finally:
            await executor.close()

    async def act(self, history: History, policy: PolicyHandle) -> Action:
        """Choose.

        Raises:
            AgentError: the environment neither lists what is possible nor has an oracle.
        """
        possible = history.admissible_actions or self._borrowed(history.task)
        if not possible:
            raise AgentError(
                "the random baseline has no actions to choose from",
                where=history.task.id,
                got="no admissible actions, and no oracle actions of other tasks",
                expected="an environment that lists admissible actions",
                hint="needed: StepResult.admissible_actions, or an environment with a method `plan(task, taken)`",
            )
        reply = await policy.generate((Message(Role.USER, "draw"),))
        choice = random.Random(reply.generation.token_ids[0]).choice(possible)
        return Action(choice, (reply.generation,))

    def _borrowed(self, task: Task) -> tuple[str, ...]:
        plans = self.borrowed.get(member_of(self.environment, task), {})
        return tuple(action for other, plan in plans.items() if other != task.id for action in plan)

    async def _lists(self, task: Task, limits: Limits, executor: CallExecutor) -> bool:
        """True if `task` opens with a list of actions; also where it fails to open, as its episodes will report."""
        live = EnvSession(self.environment, task, limits, executor.open())
        try:
            return bool((await live.start()).admissible_actions)
        except EpisodeEnded:
            return True
        finally:
            await live.close([])

    async def _plans(self, tasks: Sequence[Task], limits: Limits, executor: CallExecutor) -> dict[str, tuple[str, ...]]:
        planner: Any = self.environment
        lane, plans = executor.open(), {}
        try:
            for task in tasks:
                found = await lane.call(planner.plan, task, [], timeout_s=limits.episode_timeout_s)
                plans[task.id] = tuple(found or ())
        except (CallError, CallTimeout) as error:
            raise EnvError(
                "the oracle that provides actions for the random baseline failed",
                where=task.id,
                got=str(error),
                expected="a plan, or None where there is none",
                hint="this environment lists no admissible actions; `rlhf check environment` runs its oracle alone",
            ) from error
        finally:
            await lane.leave()
        return plans


def member_of(environment: Environment, task: Task) -> str:
    """Member of a composite environment that a task belongs to; empty for a single one."""
    inner = environment.environment if isinstance(environment, Processes) else environment
    if not isinstance(inner, CompositeEnvironment):
        return ""
    member, own = inner.own(task)
    number = next(i for i, one in enumerate(inner.members()) if one is member)
    return f"{number}/{member_of(member, own)}"
