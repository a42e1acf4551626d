"""Scoring: rewards of finished attempts, weighted and spread over the turns.

A reward that raises, hangs or returns no number makes its attempt a failure. It never makes it a zero.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from rewards.base import Capabilities, GroupReward
from rewards.validation import checked_verdict, earned, total_of
from rlhf.data import Failure, Outcome, Score, ScoredGroup, Task, Trajectory, Verdict
from rlhf.data.clock import CALL_CLOCK, Clock
from rlhf.data.untrusted import shown
from rlhf.errors import DataError, EnvError, RewardError, TrainingError
from rlhf.rollout.blocking import Watchdog
from rlhf.rollout.episode import UNDECIDED
from rlhf.rollout.executors import CallError, CallExecutor, CallTimeout, InlineLane, Lane
from rlhf.rollout.group import RETRYABLE
from rlhf.rollout.limits import Limits
from rlhf.rollout.reward_monitor import RewardMonitor

_TIMEOUT_S = Limits().reward_timeout_s
#: Owner of the thread in which rewards are called, whichever group they score.
_REWARDS = object()
#: What rewards of whole groups said of one attempt, by their names.
_Shared = Mapping[str, Verdict | RewardError]


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """A reward under its name in the recipe.

    Attributes:
        name: key of the part in scores and metrics.
        weight: factor in the total.
        reward: called with (task, trajectory), or with (task, trajectories) by its method `over_group`; plain or async.
        monitor: for a reward that is no part of the score: it is asked, and nothing is trained or chosen by it.
        success_threshold: an attempt is solved where this reward is worth at least so much, whatever the environment
            says; None leaves that to the environment. At most one reward of a recipe has it.
        max_value: a value above it is an error, where nobody has said what a right answer is worth; None is no bound.
    """

    name: str
    weight: float
    reward: Callable[[Task, Trajectory], Verdict | float | Awaitable[Verdict | float]] | GroupReward
    monitor: RewardMonitor | None = None
    success_threshold: float | None = None
    max_value: float | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise DataError("a weight is not a finite number", where=f"reward {self.name}", got=repr(self.weight))


def deciding_reward(rewards: Mapping[str, WeightedReward]) -> str | None:
    """Name of the reward that says what is solved; None where the environment does."""
    return next((name for name, weighted in rewards.items() if weighted.success_threshold is not None), None)


async def score_group(
    task: Task,
    trajectories: Sequence[Trajectory],
    rewards: Mapping[str, WeightedReward],
    *,
    timeout_s: float = _TIMEOUT_S,
) -> ScoredGroup:
    """Score the attempts at one task.

    An async reward runs on the present event loop. A plain one runs in a worker thread, one call at a time, unless it
    has the attribute `inline = True`, by which it says that it is quick and cannot hang. A reward with a method
    `over_group` judges all attempts in one call, those left out that ended with an infrastructure error; when that call
    fails, all of them are failures of the reward, and where one of its verdicts is none, that attempt is. A reward that
    is monitored is asked in the same way, and where it fails, the attempt counts without it.

    Args:
        task: with its reference, for the rewards.
        trajectories: attempts, failed ones included; those become failures of the group.
        rewards: parts of the score, and rewards that are monitored beside it.
        timeout_s: limit of each call.

    Returns:
        The group, in the order of `trajectories`. The total of a trajectory is Σ weight · value over the parts. A part
        with per-turn values counts on those turns, any other on the last turn; a trajectory without turns, which holds
        no token to train on, has a total alone. Turns that were given to the policy earn nothing: the values of these
        turns are 0, and the value of the part is the sum of the others.

    Raises:
        DataError: no rewards, or an attempt at another task.
    """
    if all(weighted.monitor for weighted in rewards.values()):
        raise DataError("nothing to score with", where=task.id, got="0 rewards", expected="at least 1")
    executor = CallExecutor(shared=True, name="reward", owner=_REWARDS)
    scorer = _Scorer(task, rewards, executor.open(), timeout_s)
    try:
        with Watchdog():
            trajectories, decided = await scorer.decide(trajectories)
            others = await scorer.together(trajectories, [n for n, w in rewards.items() if w.success_threshold is None])
            shared = [{**first, **then} for first, then in zip(decided, others, strict=True)]
            judged = await asyncio.gather(*map(scorer.judge, trajectories, shared))
    finally:
        await executor.close()
    pairs = [(t, s) for t, s in zip(trajectories, judged, strict=True) if isinstance(s, Score)]
    return ScoredGroup(
        task_id=task.id,
        trajectories=tuple(t for t, _ in pairs),
        scores=tuple(s for _, s in pairs),
        failures=tuple(f for f in judged if isinstance(f, Failure)),
    )


def error_fraction(groups: Sequence[ScoredGroup], before: tuple[int, int] = (0, 0)) -> float:
    """Share of attempts that ended with infrastructure errors; 0 where there are no attempts.

    Args:
        groups: attempts.
        before: number of failures, and of attempts, of earlier groups that count too.
    """
    n_failed = sum(len(g.failures) for g in groups)
    n_attempts = before[1] + n_failed + sum(len(g.trajectories) for g in groups)
    return (before[0] + n_failed) / n_attempts if n_attempts else 0.0


def check_failures(groups: Sequence[ScoredGroup], limits: Limits, before: tuple[int, int] = (0, 0)) -> None:
    """Raise TrainingError, with the commonest reason, where more than `max_error_fraction` of the attempts failed.

    `before` is that of `error_fraction`.
    """
    fraction = error_fraction(groups, before)
    failures = [f for g in groups for f in g.failures]
    if not failures or fraction <= limits.max_error_fraction:
        return
    count, text = commonest_failure(groups)
    kinds = Counter(f.outcome.value for f in failures)
    raise TrainingError(
        f"{fraction:.0%} of the attempts ended with infrastructure errors; the most common of {len(failures)} "
        f"failures ({count} times): {text}",
        where="rollout",
        got=", ".join(f"{n} {kind}" for kind, n in kinds.most_common()),
        expected=f"at most {limits.max_error_fraction:.0%} (limits.max_error_fraction)",
        hint="fix the part that fails (`rlhf check` finds more), or raise the limit",
    )


def commonest_failure(groups: Sequence[ScoredGroup]) -> tuple[int, str]:
    """Count of the most frequent reason of failure, and that reason, kind first.

    `reward r: judge, task a/1: no reference` and the same of task a/2 are one: `reward_error: no reference (reward r:
    judge, such as task a/1)`.
    """
    counts, texts = Counter[tuple[Outcome, str]](), dict[tuple[Outcome, str], str]()
    for group in groups:
        own = re.compile(rf"(?<!\w){re.escape(group.task_id)}(?!\w)")
        for failure in group.failures:
            key = failure.outcome, own.sub("", failure.message)
            counts[key] += 1
            texts.setdefault(key, f"{failure.outcome.value}: {_reason(failure.message, group.task_id)}")
    key, count = counts.most_common(1)[0]
    return count, texts[key]


def _reason(message: str, task_id: str) -> str:
    """Put a message on one line: what went wrong, got, expected and do, and then where."""
    first, *rest = (" ".join(line.split()) for line in message.splitlines() or [""])
    where, task, what = first.rpartition(f"task {task_id}: ")
    return "; ".join([what, *rest]) + f" ({where if task else ''}such as task {task_id})"


@dataclass(frozen=True, slots=True)
class _Scorer:
    """Settings that the attempts of one group have in common."""

    task: Task
    rewards: Mapping[str, WeightedReward]
    threads: Lane
    timeout_s: float

    async def decide(self, trajectories: Sequence[Trajectory]) -> tuple[Sequence[Trajectory], Sequence[_Shared]]:
        """Apply the reward that decides success; returns attempts with that outcome, and its verdicts."""
        name = deciding_reward(self.rewards)
        if name is None:
            return trajectories, [{} for _ in trajectories]
        weighted, shared = self.rewards[name], await self.together(trajectories, [name])
        said = await asyncio.gather(*(self._said(weighted, t, s) for t, s in zip(trajectories, shared, strict=True)))
        after = [_decided(t, v, weighted.success_threshold) for t, v in zip(trajectories, said, strict=True)]
        return after, [{} if verdict is None else {name: verdict} for verdict in said]

    async def _said(
        self, weighted: WeightedReward, trajectory: Trajectory, shared: _Shared
    ) -> Verdict | RewardError | None:
        if trajectory.outcome.is_infrastructure_error:
            return None
        try:
            return await self._verdict(weighted, trajectory, shared)
        except RewardError as error:
            return error

    async def together(self, trajectories: Sequence[Trajectory], names: Sequence[str]) -> Sequence[_Shared]:
        """Ask those of the rewards that look at the whole group; the result is aligned with `trajectories`."""
        shared: list[dict[str, Verdict | RewardError]] = [{} for _ in trajectories]
        judged = [i for i, t in enumerate(trajectories) if not t.outcome.is_infrastructure_error]
        for name in names:
            weighted = self.rewards[name]
            if Capabilities(weighted.reward).over_group is not None and judged:
                found = await self._over_group(weighted, tuple(trajectories[i] for i in judged))
                for i, verdict in zip(judged, found, strict=True):
                    shared[i][name] = verdict
        return shared

    async def judge(self, trajectory: Trajectory, shared: _Shared) -> Score | Failure:
        """Score one attempt, or say why it cannot be."""
        outcome = trajectory.outcome
        if outcome.is_infrastructure_error:
            return Failure(trajectory.attempt, outcome, trajectory.detail, outcome in RETRYABLE, trajectory)
        parts: dict[str, Verdict] = {}
        monitored: dict[str, Verdict] = {}
        errors: dict[str, str] = {}
        for name, weighted in self.rewards.items():
            try:
                verdict = earned(await self._verdict(weighted, trajectory, shared), trajectory.n_given)
            except RewardError as error:
                if weighted.monitor is None:
                    return Failure(trajectory.attempt, Outcome.REWARD_ERROR, str(error), trajectory=trajectory)
                errors[name] = str(error)
            else:
                (parts if weighted.monitor is None else monitored)[name] = verdict
        try:
            score = _total(parts, self.rewards, len(trajectory.turns))
        except RewardError as error:
            return Failure(trajectory.attempt, Outcome.REWARD_ERROR, str(error), trajectory=trajectory)
        return replace(score, monitored=monitored, monitor_errors=errors)

    async def _verdict(self, weighted: WeightedReward, trajectory: Trajectory, shared: _Shared) -> Verdict:
        found = shared.get(weighted.name)
        if isinstance(found, RewardError):
            raise found
        if found is not None:
            return _bounded(found, weighted)
        said = await self._call(weighted, weighted.reward, trajectory)
        return _bounded(checked_verdict(said, f"reward {weighted.name}", len(trajectory.turns)), weighted)

    async def _over_group(
        self, weighted: WeightedReward, trajectories: Sequence[Trajectory]
    ) -> Sequence[Verdict | RewardError]:
        where = f"reward {weighted.name}.over_group"
        try:
            said = await self._call(weighted, cast(GroupReward, weighted.reward).over_group, trajectories)
            if type(said) not in (list, tuple) or len(said) != len(trajectories):
                got = f"{len(said)} verdicts" if type(said) in (list, tuple) else shown(said)
                raise RewardError(
                    "did not return one verdict per attempt",
                    where=where,
                    got=got,
                    expected=f"{len(trajectories)} verdicts",
                )
        except RewardError as error:
            return [error] * len(trajectories)
        return [_verdict_or_error(v, where, len(t.turns)) for v, t in zip(said, trajectories, strict=True)]

    async def _call(self, weighted: WeightedReward, method: Any, argument: Any) -> Any:
        is_async = inspect.iscoroutinefunction(method) or inspect.iscoroutinefunction(type(method).__call__)
        where, clock = f"reward {weighted.name}", Clock(self.timeout_s)
        before = CALL_CLOCK.set(clock)
        try:
            if is_async or Capabilities(weighted.reward).inline:
                lane = InlineLane(where, weighted.reward)
                return await lane.call(method, self.task, argument, timeout_s=self.timeout_s, clock=clock)
            return await self.threads.call(method, self.task, argument, timeout_s=self.timeout_s)
        except (CallTimeout, CallError, EnvError) as error:
            raise RewardError(str(error), where=where) from error
        finally:
            CALL_CLOCK.reset(before)


def _verdict_or_error(said: object, where: str, n_turns: int) -> Verdict | RewardError:
    try:
        return checked_verdict(said, where, n_turns)
    except RewardError as error:
        return error


def _bounded(verdict: Verdict, weighted: WeightedReward) -> Verdict:
    """Return `verdict`. Raises RewardError where it is worth more than a right answer is taken to be."""
    if weighted.max_value is None or verdict.value <= weighted.max_value + 1e-6:
        return verdict
    raise RewardError(
        "the value exceeds the presumed value of a correct answer; success_threshold sets it",
        where=f"reward {weighted.name}",
        got=f"{verdict.value:g}",
        expected=f"from 0 for wrong to {weighted.max_value:g} for right",
        hint=f"write rewards.{weighted.name}.success_threshold with the value of a correct answer, or divide by it",
    )


def _decided(trajectory: Trajectory, verdict: Verdict | RewardError | None, least: float | None) -> Trajectory:
    """Attempt marked solved where the verdict is at least `least`; unchanged without one."""
    if least is None or not isinstance(verdict, Verdict):
        return trajectory
    detail = "" if trajectory.detail == UNDECIDED else trajectory.detail
    if (verdict.value >= least) != trajectory.solved:
        return replace(trajectory, outcome=Outcome.FAILED if trajectory.solved else Outcome.SOLVED, detail=detail)
    return replace(trajectory, detail=detail) if detail != trajectory.detail else trajectory


def _total(parts: Mapping[str, Verdict], rewards: Mapping[str, WeightedReward], n_turns: int) -> Score:
    turns = [0.0] * n_turns
    for name, verdict in parts.items():
        weight = rewards[name].weight
        if verdict.per_turn is not None:
            turns = [turn + weight * x for turn, x in zip(turns, verdict.per_turn, strict=True)]
        elif turns:
            turns[-1] += weight * verdict.value
    weighted, where = (rewards[name].weight * verdict.value for name, verdict in parts.items()), "the weighted rewards"
    total_of(tuple(turns), where)  # that of each turn may overflow where the total does not
    return Score(parts, tuple(turns), total_of(tuple(weighted), where))
