from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.verified import Verified
from rlhf.data import Action, Outcome, ScoredGroup, Task, Trajectory, Turn, Verdict
from rlhf.errors import DataError, TrainingError
from rlhf.rollout.limits import Limits
from rlhf.rollout.reward_monitor import RewardMonitor
from rlhf.rollout.scoring import WeightedReward, check_failures, error_fraction, score_group

TASK = Task("t", reference="gold")


def trajectory(rewards=(0.0, 1.0), attempt=0, outcome=Outcome.SOLVED, detail=""):
    turns = tuple(Turn(Action("a"), "b", reward=r) for r in rewards)
    return Trajectory("t", attempt, "", turns, outcome, detail)


def score(trajectories, timeout_s=20.0, **rewards) -> ScoredGroup:
    weighted = {name: WeightedReward(name, *given) for name, given in rewards.items()}
    return asyncio.run(score_group(TASK, trajectories, weighted, timeout_s=timeout_s))


def spread(task, trajectory):
    per_turn = tuple(t.reward for t in trajectory.turns)
    return Verdict(sum(per_turn), per_turn=per_turn)


def test_parts_are_weighted_and_spread_over_the_turns():
    # spread: 2 · (1, 0, 3) = (2, 0, 6); whole: 0.5 · 4 = 2 on the last turn; together (2, 0, 8), total 10.
    group = score([trajectory((1.0, 0.0, 3.0))], spread=(2.0, spread), whole=(0.5, lambda task, t: 4))
    assert group.scores[0].turns == (2.0, 0.0, 8.0)
    assert group.scores[0].total == 10.0
    assert {name: v.value for name, v in group.scores[0].parts.items()} == {"spread": 4.0, "whole": 4.0}


@given(st.lists(st.tuples(st.floats(-9, 9), st.lists(st.floats(-9, 9), max_size=4)), min_size=1, max_size=4))
def test_turns_sum_to_the_total(parts):
    n_turns = 4

    def reward(values):
        padded = tuple(values) + (0.0,) * (n_turns - len(values))
        return lambda task, t: Verdict(sum(padded), per_turn=padded) if values else 1.5

    rewards = {f"r{i}": (weight, reward(values)) for i, (weight, values) in enumerate(parts)}
    got = score([trajectory((0.0,) * n_turns)], **rewards).scores[0]
    assert sum(got.turns) == pytest.approx(got.total, abs=1e-6)


def test_a_monitored_reward_is_asked_and_counts_for_nothing():
    def strict(task, t):
        if t.attempt == 1:
            raise ValueError("no verdict")
        return -7.0

    played = [trajectory(attempt=0), trajectory(attempt=1)]
    group = score(played, whole=(1.0, lambda task, t: 4), strict=(0.0, strict, RewardMonitor()))
    assert [s.total for s in group.scores] == [4.0, 4.0] and [s.turns for s in group.scores] == [(0.0, 4.0)] * 2
    assert [set(s.parts) for s in group.scores] == [{"whole"}] * 2 and not group.failures
    assert [{n: v.value for n, v in s.monitored.items()} for s in group.scores] == [{"strict": -7.0}, {}]
    assert not group.scores[0].monitor_errors and "no verdict" in group.scores[1].monitor_errors["strict"]
    with pytest.raises(DataError, match="nothing to score with"):
        score(played, strict=(0.0, strict, RewardMonitor()))


def test_a_trajectory_without_turns_has_a_total_alone():
    empty = trajectory((), outcome=Outcome.TOKEN_LIMIT)
    got = score([empty], spread=(1.0, spread), whole=(1.0, lambda task, t: -1.0)).scores[0]
    assert (got.turns, got.total) == ((), -1.0)


def test_rewards_see_the_reference():
    assert score([trajectory()], r=(1.0, lambda task, t: float(task.reference == "gold"))).scores[0].total == 1.0


async def _async_reward(task, trajectory):
    await asyncio.sleep(0.001)
    return 2.0


@dataclass(frozen=True)
class _Object:
    inline: ClassVar[bool] = True

    def __call__(self, task, trajectory):
        return float(threading.current_thread() is threading.main_thread())


def test_a_reward_may_be_a_function_an_async_function_or_an_object():
    def plain(task, trajectory):
        return float(threading.current_thread() is not threading.main_thread())

    group = score([trajectory()], a=(1.0, _async_reward), o=(10.0, _Object()), p=(100.0, plain))
    assert group.scores[0].total == 112.0  # the object says it is inline; the plain function runs in a thread


def test_plain_rewards_are_called_one_at_a_time():
    inside, most = [], []

    def reward(task, trajectory):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.002)
        inside.pop()
        return 0

    score([trajectory(attempt=i) for i in range(6)], a=(1.0, reward), b=(1.0, reward))
    assert (len(most), max(most)) == (12, 1)


def _raises(task, t):
    raise ValueError("no such answer")


async def _raises_async(task, t):
    raise ValueError("no such answer")


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (_raises, "ValueError: no such answer (test_score.py:"),
        (_raises_async, "ValueError: no such answer"),
        (lambda task, t: float("nan"), "returned no finite number"),
        (lambda task, t: float("-inf"), "returned no finite number"),
        (lambda task, t: None, "returned no finite number"),
        (lambda task, t: "1.0", "returned no finite number"),
        (lambda task, t: Verdict(float("nan")), "a verdict is not a finite number"),
        (lambda task, t: Verdict(1.0, per_turn=(1.0,)), "per_turn does not match the turns"),
        (lambda task, t: Verdict(1.0, per_turn=(1.0, 1.0)), "per_turn does not sum to the value"),
    ],
)
def test_a_reward_that_goes_wrong_makes_a_failure_and_never_a_zero(reward, message):
    def only_the_second(task, t):
        return reward(task, t) if t.attempt == 1 else 1.0

    group = score([trajectory(attempt=i) for i in range(3)], fine=(1.0, spread), odd=(1.0, only_the_second))
    assert [t.attempt for t in group.trajectories] == [0, 2]
    assert [s.total for s in group.scores] == [2.0, 2.0]
    (failure,) = group.failures
    assert (failure.attempt, failure.outcome, failure.retryable) == (1, Outcome.REWARD_ERROR, False)
    assert message in failure.message
    assert failure.message.startswith("reward odd: ")


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_a_reward_that_hangs_is_cut(is_async):
    released = threading.Event()

    async def waits(task, t):
        await asyncio.sleep(30 * (t.attempt == 0))
        return 1.0

    def blocks(task, t):
        if t.attempt == 0:
            released.wait(30)
        return 1.0

    reward = waits if is_async else blocks
    group = score([trajectory(attempt=i) for i in range(2)], timeout_s=0.4, slow=(1.0, reward))
    released.set()
    assert [f.message for f in group.failures] == ["reward slow: no answer within 0.4 s"]
    assert [t.attempt for t in group.trajectories] == [1]


def test_failed_attempts_become_failures_and_are_not_judged():
    judged = []

    def reward(task, t):
        judged.append(t.attempt)
        return 0.0

    outcomes = [Outcome.FAILED, Outcome.ENV_ERROR, Outcome.TIMEOUT, Outcome.ENGINE_ERROR, Outcome.AGENT_ERROR]
    group = score([trajectory(attempt=i, outcome=o, detail=f"d{i}") for i, o in enumerate(outcomes)], r=(1.0, reward))
    assert judged == [0]
    told = [(f.attempt, f.outcome, f.message, f.retryable) for f in group.failures]
    assert told == [(i, o, f"d{i}", i in (1, 3)) for i, o in enumerate(outcomes)][1:]


def test_no_rewards_and_foreign_trajectories_are_refused():
    with pytest.raises(DataError, match="nothing to score with"):
        score([trajectory()])
    with pytest.raises(DataError, match="another task"):
        score([Trajectory("other", 0, "", (), Outcome.FAILED)], r=(1.0, lambda task, t: 0))
    with pytest.raises(DataError, match="finite"):
        WeightedReward("r", float("nan"), spread)


def test_too_many_failures_stop_the_run_and_say_why():
    fine = [trajectory(attempt=i) for i in range(6)]
    stuck = [trajectory(attempt=i, outcome=Outcome.ENV_ERROR, detail="the door is stuck") for i in range(3)]
    slow = [trajectory(attempt=9, outcome=Outcome.TIMEOUT, detail="slow")]
    groups = [score(some, r=(1.0, spread)) for some in (fine, stuck, slow)]
    assert error_fraction(groups) == 0.4  # 4 of 10
    check_failures(groups, Limits(max_error_fraction=0.4))
    with pytest.raises(TrainingError) as error:
        check_failures(groups, Limits(max_error_fraction=0.39))
    for part in ("40%", "(3 times)", "env_error: the door is stuck", "3 env_error, 1 timeout", "max_error_fraction"):
        assert part in str(error.value)
    assert error_fraction([]) == 0.0
    check_failures([], Limits())


def test_one_reason_at_five_tasks_is_one_and_comes_first():
    def judge(answer, reference):
        return 1.0

    def group(i):
        task, reward = Task(f"levers/{i}"), WeightedReward("right", 1.0, Verified(judge))
        turns = (Turn(Action("a"), "b"),)
        return asyncio.run(score_group(task, [Trajectory(task.id, 0, "", turns, Outcome.SOLVED)], {"right": reward}))

    with pytest.raises(TrainingError) as error:
        check_failures([group(i) for i in range(5)], Limits())
    assert error.value.what.endswith(
        "the most common of 5 failures (5 times): reward_error: the task has no reference to compare with; got: None; "
        "expected: Task.reference; do: use a reward that needs none, or an environment whose tasks have "
        "references (reward right: judge, such as task levers/0)"
    )


class Ranks:
    """Judges a group: 1 for the attempts that are solved, as it is shown them."""

    def __init__(self) -> None:
        self.seen: list[tuple[Outcome, ...]] = []

    def over_group(self, task, trajectories):
        self.seen.append(tuple(t.outcome for t in trajectories))
        return [float(t.solved) for t in trajectories]


def decide(trajectories, solving, ranks, **others) -> ScoredGroup:
    rewards = {
        "ranks": WeightedReward("ranks", 1.0, ranks),
        "right": WeightedReward("right", 1.0, solving, success_threshold=0.5),
    }
    rewards |= {name: WeightedReward(name, 1.0, reward) for name, reward in others.items()}
    return asyncio.run(score_group(TASK, trajectories, rewards, timeout_s=20.0))


def test_a_reward_with_success_threshold_gives_the_outcome_that_all_others_are_shown():
    attempts = [trajectory(attempt=0), trajectory(attempt=1, outcome=Outcome.TURN_LIMIT), trajectory(attempt=2)]
    ranks, worth = Ranks(), (0.0, 0.5, 1.0)
    group = decide(attempts, lambda task, t: worth[t.attempt], ranks, alone=lambda task, t: float(t.solved))
    assert [t.outcome for t in group.trajectories] == [Outcome.FAILED, Outcome.SOLVED, Outcome.SOLVED]
    assert ranks.seen == [(Outcome.FAILED, Outcome.SOLVED, Outcome.SOLVED)]
    assert [s.parts["ranks"].value for s in group.scores] == [s.parts["alone"].value for s in group.scores] == [0, 1, 1]
    assert [list(s.parts) for s in group.scores] == [["ranks", "right", "alone"]] * 3


def test_one_that_judges_the_group_decides_too_and_is_asked_once():
    first, ranks = Ranks(), Ranks()
    group = decide([trajectory(attempt=0), trajectory(attempt=1, outcome=Outcome.FAILED)], first, ranks)
    assert [t.solved for t in group.trajectories] == [True, False]
    assert len(first.seen) == len(ranks.seen) == 1


def test_where_it_fails_that_attempt_is_a_failure_and_a_failed_attempt_is_not_asked():
    def solving(task, t):
        if t.attempt == 0:
            raise KeyError("grade")
        return 1.0

    attempts = [trajectory(attempt=0), trajectory(attempt=1, outcome=Outcome.FAILED)]
    group = decide([*attempts, trajectory(attempt=2, outcome=Outcome.TIMEOUT)], solving, Ranks())
    assert [t.attempt for t in group.trajectories] == [1] and group.trajectories[0].solved
    assert [f.outcome for f in group.failures] == [Outcome.REWARD_ERROR, Outcome.TIMEOUT]
