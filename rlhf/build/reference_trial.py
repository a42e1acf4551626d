"""Trial of verifiers before training or an evaluation: the references themselves, given as answers."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from environments.base import Environment, can_demonstrate, properties_of
from rewards.base import Capabilities
from rewards.combinators.parts import compared_in, with_parts
from rewards.judges.asking import AsksModel
from rewards.trl_function import TrlFunction
from rewards.verified import takes_data_source
from rlhf.build.alone import check_alone
from rlhf.data import Action, Outcome, Task, Trajectory, Turn
from rlhf.errors import RewardError
from rlhf.recipe import Recipe
from rlhf.recipe.rewards import as_named
from rlhf.recipe.suites import Suite
from rlhf.recipe.view import environments_of_run
from rlhf.rollout.limits import Limits
from rlhf.rollout.scoring import WeightedReward, score_group
from rlhf.rollout.tasks import tasks_of

#: References of a split that are tried, those of a coroutine so many at a time; of a slow reward as many as it manages
#: within some seconds, of which forms of nonsense take up to a quarter.
_N_TRIED, _AT_A_TIME, _ENOUGH_S = 512, 16, 20.0
#: References taken for wrong that are shown.
_N_SHOWN = 3
#: A reply that solves nothing.
_NONSENSE = "colourless green ideas"
#: Ways to write an answer, of which one that is taken for right is enough.
_FORMS = ("{}", r"\boxed{{{}}}", "<answer>{}</answer>", "#### {}", "The answer is {}")


@dataclass(frozen=True)
class _Tried:
    """Reference that was given as an answer.

    Attributes:
        task: that it is of.
        reply: what was given.
        why: it was not taken for right; empty where it was.
        failed: whether the reward itself failed.
    """

    task: Task
    reply: str
    why: str = ""
    failed: bool = False

    @property
    def shown(self) -> str:
        """Reply and place for a message."""
        return f"{self.reply[:80]!r} ({_place(self.task)}): {self.why[:300]}"


def _place(task: Task) -> str:
    """Task with the row of a file that it is of."""
    return f"{task.id}, row {task.info['row']}" if "row" in task.info else task.id


async def try_references(recipe: Recipe, say: Callable[[str], None]) -> None:
    """Try the reward that says what is solved on references as replies, and say how many it takes for right.

    Each is given plain, in a box, in answer tags and behind phrases; one form that is taken for right is enough. Where
    the environment makes a reply of the reference, such as a program of its tests, it is that. Rewards that ask a model
    are left out. A function of TRL's signature need not compare with the reference: what is refused of a verifier is a
    caution of it. Any other reward, of (task, trajectory), is tried on a reply that solves nothing alone.

    Raises:
        RewardError: it fails at them, with an error, NaN, or more than a right answer is worth; cannot read references
            with parts; or, where rewards alone say what is solved, takes none for right.
    """
    for path, seen in environments_of_run(recipe):
        split = next((stage.split for stage in seen.stages if not stage.reads_file), recipe.evaluation.split)
        await _try_rewards(path, seen.rewards, seen.environment, split, seen.limits, say)


async def try_references_of_suite(suite: Suite, say: Callable[[str], None]) -> None:
    """Try the rewards that say what is solved in the parts of a suite, as `try_references` does those of a recipe."""
    for part in suite.parts:
        await _try_rewards(f"parts.{part.name}.", part.rewards, part.environment, part.tasks.split, part.limits, say)


async def _try_rewards(
    path: str,
    rewards: Mapping[str, WeightedReward],
    world: Environment,
    split: str,
    limits: Limits,
    say: Callable[[str], None],
) -> None:
    for name, weighted in rewards.items():
        if weighted.success_threshold is None:
            continue
        compares = any(compared_in(name, weighted.reward, None))
        asks = any(isinstance(part, AsksModel) for _, part in with_parts("", weighted.reward))
        on_references = compares or isinstance(weighted.reward, TrlFunction)
        is_tried = (on_references or properties_of(world).judged_by_rewards) and not asks
        if is_tried and (copied := to_try(weighted)) is not None:
            trial = _Trial(f"{path}rewards.{name}", copied, compares, limits, say)
            if on_references:
                await _try_reward(trial, world, split)
            else:
                for task in tasks_of(world, split, 1):
                    await _try_nonsense(trial, task)


@dataclass
class _Trial:
    """One reward that is tried.

    Attributes:
        path: its place in the recipe.
        weighted: the reward.
        compares: whether it is known to compare with the reference.
        limits: of an attempt.
        say: is told what is found.
        calls_s: seconds that each call took.
    """

    path: str
    weighted: WeightedReward
    compares: bool
    limits: Limits
    say: Callable[[str], None]
    calls_s: list[float] = field(default_factory=list)

    def note_call(self, took_s: float) -> None:
        """Take down what a call took, and say once that the reward is slow; the first call may load what it needs."""
        self.calls_s.append(took_s)
        if len(self.calls_s) != 2:
            return
        parts = (part for _, part in with_parts("", as_named(self.weighted.reward)))
        expected_s = max(float(Capabilities(part).slow_s) for part in parts)
        if min(self.calls_s) > expected_s:
            self.say(
                f"caution: {self.path} is slow: {sum(self.calls_s) / 2:.1f} s per call, for every attempt (expected: "
                f"under {expected_s:g} s); it is tried for {_ENOUGH_S:g} s"
            )


async def _try_nonsense(trial: _Trial, task: Task) -> None:
    """Say that a reward takes a reply for right that solves nothing, where it does."""
    found = await _given(task, _NONSENSE, trial, time.monotonic() + _ENOUGH_S / 4)
    if found is not None and not found.why:
        trial.say(f"caution: {trial.path} takes the reply {_NONSENSE!r} for right: every attempt may count as solved")


async def _try_reward(trial: _Trial, world: Environment, split: str) -> None:
    path, limits, say = trial.path, trial.limits, trial.say
    replies = ((task, _right_reply(world, task)) for task in tasks_of(world, split, _N_TRIED))
    drawn = list(replies)
    known = [(task, reply) for task, reply in drawn if reply is not None]
    if trial.compares and (parted := [task for task, _ in drawn if task.info.get("structured")]):
        await _refuse_parts(trial, parted, len(drawn))
    if not known:
        return
    if trial.compares and (without := [task for task, _ in drawn if task.reference is None]):
        say(
            f"caution: {path} compares with a reference, and {len(without)} of the first {len(drawn)} tasks of {split} "
            f"have none, such as {_place(without[0])}: attempts at them are reward errors (limits.max_error_fraction)"
        )
    until = time.monotonic() + _ENOUGH_S
    await _try_nonsense(trial, known[0][0])
    found, left = list[_Tried | None](), iter(known)
    at_a_time = _AT_A_TIME if inspect.iscoroutinefunction(type(trial.weighted.reward).__call__) else 1
    while (some := list(islice(left, at_a_time))) and (not found or time.monotonic() < until):
        found += await asyncio.gather(*(_given(task, reply, trial, until) for task, reply in some))
    tried = [one for one in found if one is not None]
    if not tried:
        say(
            f"caution: {path} was given no reference in every form within {_ENOUGH_S:g} s, so none is known to be right"
        )
        return
    if trial.compares:
        _refuse_failing(trial, tried)
    wrong = [one for one in tried if one.why]
    n, n_right = len(tried), len(tried) - len(wrong)
    must = trial.compares and properties_of(world).judged_by_rewards and limits.max_error_fraction < 1
    if not n_right and must:
        raise _none_right(path, tried)
    say(f"{path} takes {n_right} of the first {n} references of {split} for right: {n_right / n:.1%}")
    for one in wrong[:_N_SHOWN]:
        say(f"caution: {path} takes a reference for wrong: {one.shown}")
    if wrong:
        many = len(wrong) > limits.max_error_fraction * n
        cut = "cut the answer out of the reference: else few attempts may ever be solved" if many else "these rows"
        say(f"caution: fix {path}, or {cut}")


def _right_reply(environment: Any, task: Task) -> str | None:
    """Reply that the environment takes for right, the reference or what it makes of it; None where it knows none."""
    is_judged = properties_of(environment).judged_by_rewards
    if task.reference is None or not (is_judged and can_demonstrate(environment, task)):
        return task.reference
    plan = environment.plan(task, ())
    return plan[-1] if plan else None


async def _given(task: Task, answer: str, trial: _Trial, until: float) -> _Tried | None:
    """Give an answer in every form, until one is taken for right; else with what was said of the first.

    What is no reference, such as a program in its fence, has its form already. None where the time, `until` which
    another form is given, ends before.
    """
    weighted, timeout_s = trial.weighted, trial.limits.reward_timeout_s
    first: _Tried | None = None
    for form in _FORMS if answer in (task.reference, _NONSENSE) else _FORMS[:1]:
        if first is not None and time.monotonic() >= until:
            return None
        said = form.format(answer)
        reply = Trajectory(task.id, 0, "", (Turn(Action(said, reply_text=said), ""),), Outcome.FAILED)
        begun = time.monotonic()
        group = await score_group(task, [reply], {weighted.name: weighted}, timeout_s=timeout_s)
        trial.note_call(took_s := time.monotonic() - begun)
        if group.failures:
            first = first or _Tried(task, answer, " ".join(group.failures[0].message.split()), failed=True)
            if took_s >= timeout_s:  # it would hang at the other forms too
                return first
        elif group.trajectories[0].solved:
            return _Tried(task, answer)
        else:
            verdict = group.scores[0].parts[weighted.name]
            reason = f", {verdict.why}" if verdict.why else ""
            first = first or _Tried(task, answer, f"worth {verdict.value:g} of {weighted.success_threshold:g}{reason}")
    assert first is not None
    return first


async def _refuse_parts(trial: _Trial, tasks: Sequence[Task], n: int) -> None:
    """Raise RewardError for a reward, but of verl's signature, that fails at `tasks`, of `n`, for their references.

    These have parts and are no replies, so what is given is a reply that solves nothing.
    """
    if any(takes_data_source(part) for _, part in with_parts("", trial.weighted.reward)):
        return
    found = await _given(tasks[0], _NONSENSE, trial, time.monotonic() + _ENOUGH_S / 4)
    if found is not None and found.failed and len(tasks) > trial.limits.max_error_fraction * n:
        raise RewardError(
            f"the references of {len(tasks)} of the first {n} tasks have parts, and the reward fails at them",
            where=f"{trial.path}, {_place(tasks[0])}",
            got=found.why,
            expected="a reward that reads them, such as a function of verl's signature",
            hint="use compute_score of the data, or name a key: environment.reference=reward_model.ground_truth.KEY",
        )


def _refuse_failing(trial: _Trial, tried: Sequence[_Tried]) -> None:
    """Raise RewardError where a reward fails at more of the references than attempts may fail."""
    failed = [one for one in tried if one.failed]
    if len(failed) > trial.limits.max_error_fraction * len(tried):
        raise RewardError(
            f"the reward fails at {len(failed)} of the first {len(tried)} references, given as answers",
            where=f"{trial.path}, {failed[0].task.id}",
            got=failed[0].shown,
            expected="from 0 for wrong to 1 for right, or a verdict of that, for every answer",
            hint=f"fix it, and try it {check_alone('reward', trial.weighted.reward)}",
        )


def _none_right(path: str, tried: Sequence[_Tried]) -> RewardError:
    return RewardError(
        f"the reward accepts none of the first {len(tried)} references: no attempt could be solved",
        where=path,
        got="; ".join(one.shown for one in tried[:_N_SHOWN]),
        expected="full marks for a reference, plain, in a box, in answer tags, or after `The answer is`",
        hint="fix the reward, lower its success_threshold, or cut the answer out of the reference, as "
        "answer_pattern does in a data set; limits.max_error_fraction: 1 starts anyway",
    )


def to_try(weighted: WeightedReward) -> WeightedReward | None:
    """Copy of a reward for a trial, whose state may change; None for one that is not asked."""
    for _, part in with_parts("", weighted.reward):
        if Capabilities(part).reads_tokens or (isinstance(part, AsksModel) and part.url is None):
            return None
    try:
        return deepcopy(weighted)
    except Exception:  # of whatever it holds: a lock, a connection
        return None
