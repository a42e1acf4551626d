"""Trial of verifiers before training or an evaluation: the references themselves, given as answers."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Any

from environments.base import Environment, can_demonstrate, properties_of
from rewards.base import Capabilities
from rewards.combinators.parts import compared_in, with_parts
from rewards.judges.asking import AsksModel
from rlhf.data import Action, Outcome, Task, Trajectory, Turn
from rlhf.errors import RewardError
from rlhf.recipe import Recipe
from rlhf.recipe.suites import Suite
from rlhf.recipe.view import worlds
from rlhf.rollout.limits import Limits
from rlhf.rollout.scoring import Weighted, score_group
from rlhf.rollout.tasks import tasks_of

#: References of a split that are tried, those of a coroutine so many at a time; of a slow reward as many as it manages
#: within some seconds.
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
    are left out.

    Raises:
        RewardError: it fails at them, with an error, NaN, or more than a right answer is worth; or, where rewards alone
            say what is solved, takes none for right.
    """
    for path, seen in worlds(recipe):
        split = next((stage.split for stage in seen.stages if not stage.reads_file), recipe.evaluation.split)
        await _try_rewards(path, seen.rewards, seen.environment, split, seen.limits, say)


async def try_references_of_suite(suite: Suite, say: Callable[[str], None]) -> None:
    """Try the rewards that say what is solved in the parts of a suite, as `try_references` does those of a recipe."""
    for part in suite.parts:
        await _try_rewards(f"parts.{part.name}.", part.rewards, part.environment, part.tasks.split, part.limits, say)


async def _try_rewards(
    path: str,
    rewards: Mapping[str, Weighted],
    world: Environment,
    split: str,
    limits: Limits,
    say: Callable[[str], None],
) -> None:
    for name, weighted in rewards.items():
        if weighted.success_threshold is None or not any(compared_in(name, weighted.reward, None)):
            continue
        asks = any(isinstance(part, AsksModel) for _, part in with_parts("", weighted.reward))
        if not asks and (copied := to_try(weighted)) is not None:
            await _try_reward(f"{path}rewards.{name}", copied, world, split, limits, say)


async def _try_reward(
    path: str, weighted: Weighted, world: Environment, split: str, limits: Limits, say: Callable[[str], None]
) -> None:
    replies = ((task, _right_reply(world, task)) for task in tasks_of(world, split, _N_TRIED))
    drawn = list(replies)
    known = [(task, reply) for task, reply in drawn if reply is not None]
    if not known:
        return
    if without := [task for task, _ in drawn if task.reference is None]:
        say(
            f"caution: {path} compares with a reference, and {len(without)} of the first {len(drawn)} tasks of {split} "
            f"have none, such as {_place(without[0])}: attempts at them are reward errors (limits.max_error_fraction)"
        )
    if not (await _given(known[0][0], _NONSENSE, weighted, limits)).why:
        say(f"caution: {path} takes the reply {_NONSENSE!r} for right: every attempt may count as solved")
    tried, left, until = list[_Tried](), iter(known), time.monotonic() + _ENOUGH_S
    at_a_time = _AT_A_TIME if inspect.iscoroutinefunction(type(weighted.reward).__call__) else 1
    while (some := list(islice(left, at_a_time))) and (not tried or time.monotonic() < until):
        tried += await asyncio.gather(*(_given(task, reply, weighted, limits) for task, reply in some))
    _refuse_failing(path, tried, limits)
    wrong = [one for one in tried if one.why]
    n, n_right = len(tried), len(tried) - len(wrong)
    if not n_right and properties_of(world).judged_by_rewards and limits.max_error_fraction < 1:
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


async def _given(task: Task, answer: str, weighted: Weighted, limits: Limits) -> _Tried:
    """Give an answer in every form, until one is taken for right; else with what was said of the first.

    What is no reference, such as a program in its fence, has its form already.
    """
    first: _Tried | None = None
    for form in _FORMS if answer in (task.reference, _NONSENSE) else _FORMS[:1]:
        said = form.format(answer)
        reply = Trajectory(task.id, 0, "", (Turn(Action(said, said=said), ""),), Outcome.FAILED)
        begun = time.monotonic()
        group = await score_group(task, [reply], {weighted.name: weighted}, timeout_s=limits.reward_timeout_s)
        if group.failures:
            first = first or _Tried(task, answer, " ".join(group.failures[0].message.split()), failed=True)
            if time.monotonic() - begun >= limits.reward_timeout_s:  # it would hang at the other forms too
                return first
        elif group.trajectories[0].solved:
            return _Tried(task, answer)
        else:
            verdict = group.scores[0].parts[weighted.name]
            reason = f", {verdict.why}" if verdict.why else ""
            first = first or _Tried(task, answer, f"worth {verdict.value:g} of {weighted.success_threshold:g}{reason}")
    assert first is not None
    return first


def _refuse_failing(path: str, tried: Sequence[_Tried], limits: Limits) -> None:
    """Raise RewardError where a reward fails at more of the references than attempts may fail."""
    failed = [one for one in tried if one.failed]
    if len(failed) > limits.max_error_fraction * len(tried):
        raise RewardError(
            f"the reward fails at {len(failed)} of the first {len(tried)} references, given as answers",
            where=f"{path}, {failed[0].task.id}",
            got=failed[0].shown,
            expected="from 0 for wrong to 1 for right, or a verdict of that, for every answer",
            hint="fix it, and try it alone, from a file of its own: `rlhf check reward ./FILE.py:NAME`",
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


def to_try(weighted: Weighted) -> Weighted | None:
    """Copy of a reward for a trial, whose state may change; None for one that is not asked."""
    for _, part in with_parts("", weighted.reward):
        if Capabilities(part).reads_tokens or (isinstance(part, AsksModel) and part.url is None):
            return None
    try:
        return deepcopy(weighted)
    except Exception:  # of whatever it holds: a lock, a connection
        return None
