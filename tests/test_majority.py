"""Voting: worked numbers, what has no vote, and a policy that learns what it mostly says already."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rewards.check import check_reward
from rewards.judges.majority import Majority
from rlhf.data import Action, Outcome, ScoredGroup, Task, Trajectory, Turn, Verdict
from rlhf.errors import RecipeError
from rlhf.recipe import load
from rlhf.rollout.scoring import WeightedReward, score_group
from tests.training import runs

TASK = Task("t")


def attempts(*answers: str | None) -> list[Trajectory]:
    """One trajectory per answer; None acts not at all."""
    turns = [() if a is None else (Turn(Action("think"), ""), Turn(Action(a), "")) for a in answers]
    return [Trajectory("t", i, "", t, Outcome.FAILED) for i, t in enumerate(turns)]


def votes(*answers: str | None, **settings: Any) -> list[float]:
    return [v.value for v in Majority(**settings).over_group(TASK, attempts(*answers))]


def test_the_commonest_answer_is_right() -> None:
    found = votes("4", "4", "5", "4", "6")
    assert found == [1, 1, 0, 1, 0]
    assert sum(found) / len(found) == pytest.approx(0.6)  # the share that agrees with the majority: 3 of 5


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (("5", "4", "4", "5"), [1, 0, 0, 1]),  # two each: 5 came first
        (("4", "5"), [1, 0]),
        ((None, "", " . ", "7"), [0, 0, 1, 0]),  # marks alone are an answer, and came first
        ((None, "", None, "7"), [0, 0, 0, 1]),  # nothing said does not vote, however common
        ((None, "", " "), [0, 0, 0]),
        (("Paris", " paris.", "London"), [1, 1, 0]),
        (("4",), [1]),
    ],
)
def test_ties_and_attempts_without_an_answer(answers: tuple[str | None, ...], expected: list[float]) -> None:
    assert votes(*answers) == expected


def test_a_pattern_finds_the_answer() -> None:
    said = ("I say 3, no: answer 4", "answer 4", "answer 5", "4")
    assert votes(*said, pattern=r"answer (\d)") == [1, 1, 0, 0]
    assert votes("1 or 2", "2", "1", pattern=r"\d") == [1, 1, 0]  # the last match, without a group the whole of it
    assert votes("ab", "ab", pattern="(x)?b") == [0, 0]  # the group took part in no match


def test_a_pattern_that_takes_for_ever_finds_no_answer_and_holds_nobody_up() -> None:
    longest, done = 0.0, threading.Event()

    def tick() -> None:
        nonlocal longest
        last = time.monotonic()
        while not done.wait(0.01):
            longest, last = max(longest, time.monotonic() - last), time.monotonic()

    (ticking := threading.Thread(target=tick)).start()
    found = votes("a" * 28, "b=", "b =", pattern=r"(\w+\s*)+=")
    done.set()
    ticking.join()
    assert found == [0, 1, 1]
    assert longest < 5  # other threads go on


def test_an_action_that_could_not_be_read_does_not_vote() -> None:
    unread = [Trajectory("t", i, "", (Turn(Action("9", error="no action found"), ""),), Outcome.FAILED) for i in (0, 1)]
    assert [v.value for v in Majority().over_group(TASK, [*unread, *attempts("4")])] == [0, 0, 1]


@given(st.lists(st.one_of(st.none(), st.text(max_size=3)), max_size=8))
def test_it_never_raises_and_one_answer_has_the_votes(answers: list[str | None]) -> None:
    reward = Majority()
    found = reward.over_group(TASK, attempts(*answers))
    assert [v.value in (0.0, 1.0) for v in found] == [True] * len(answers)
    chosen = {reward.answer(t) for t, v in zip(attempts(*answers), found, strict=True) if v.value}
    assert len(chosen) <= 1 and None not in chosen


def test_its_contract_and_its_keys() -> None:
    report = check_reward(Majority(), [(TASK, t) for t in attempts("4", "5", None)])
    assert report.ok, str(report)
    assert pickle.loads(pickle.dumps(Majority(pattern="a"))) == Majority(pattern="a")
    with pytest.raises(ValidationError, match="not a regular expression"):
        Majority(pattern="(")


# --- in a score ------------------------------------------------------------------------------------------------------


def score(trajectories: list[Trajectory], **rewards: Any) -> ScoredGroup:
    weighted = {name: WeightedReward(name, 2.0, reward) for name, reward in rewards.items()}
    return asyncio.run(score_group(TASK, trajectories, weighted))


def test_a_vote_is_a_part_of_the_score_like_any_other() -> None:
    failed = Trajectory("t", 9, "", (), Outcome.ENV_ERROR, "gone")
    group = score([failed, *attempts("4", "5", "4")], vote=Majority(), turns=lambda task, t: len(t.turns))
    assert [s.total for s in group.scores] == [2 * 1 + 2 * 2, 2 * 0 + 2 * 2, 2 * 1 + 2 * 2]
    assert [s.turns for s in group.scores] == [(0.0, 6.0), (0.0, 4.0), (0.0, 6.0)]
    assert [f.outcome for f in group.failures] == [Outcome.ENV_ERROR], "what failed is not shown to the vote"


@dataclass(frozen=True)
class Later:
    async def over_group(self, task: Task, trajectories: Any) -> list[Verdict]:
        await asyncio.sleep(0.001)
        return [Verdict(float(t.attempt)) for t in trajectories]


def test_a_vote_may_be_async() -> None:
    assert [s.total for s in score(attempts("a", "b"), later=Later()).scores] == [0.0, 2.0]


class Broken:
    def __init__(self, said: Any) -> None:
        self.said = said

    def over_group(self, task: Task, trajectories: Any) -> Any:
        if isinstance(self.said, Exception):
            raise self.said
        return self.said


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([1.0], "1 verdicts"),
        (None, "None"),
        (ValueError("dice"), "dice"),
    ],
)
def test_a_vote_that_fails_is_no_zero(said: Any, message: str) -> None:
    group = score(attempts("a", "b"), broken=Broken(said))
    assert not group.trajectories
    assert [f.outcome for f in group.failures] == [Outcome.REWARD_ERROR] * 2
    assert all("broken" in f.message and message in f.message for f in group.failures)


def test_one_verdict_that_is_none_is_a_failure_of_its_attempt_alone() -> None:
    group = score(attempts("a", "b"), broken=Broken([1.0, float("nan")]))
    assert [(t.attempt, s.total) for t, s in zip(group.trajectories, group.scores, strict=True)] == [
        (0, 2.0)
    ]  # at weight 2
    assert [(f.attempt, f.outcome) for f in group.failures] == [(1, Outcome.REWARD_ERROR)]
    assert "no finite number" in group.failures[0].message


# --- in a run --------------------------------------------------------------------------------------------------------

SUPERVISED = {"kind": "supervised", "n_demonstrations": 256, "random_share": 0.5, "epochs": 12, "batch_size": 16,
              "optimizer": {"lr": 5.0e-3}}  # fmt: skip
STAGE = {"kind": "policy_gradient", "steps": 12, "tasks_per_step": 8, "group_size": 8, "minibatches": 2,
         "optimizer": {"lr": 5.0e-3}}  # fmt: skip


def test_a_policy_that_is_mostly_right_learns_from_its_votes(tmp_path: Path) -> None:
    # One word: the commonest answer of a policy that is right oftener than not is the right one.
    path = runs.write(
        tmp_path, [SUPERVISED, STAGE], rewards={"vote": {"kind": "majority"}},
        environment={"kind": "./words.py:Words", "n_turns": 1},
    )  # fmt: skip
    done = runs.run(path, tmp_path / "run")
    agreement = runs.curve(done.folder, "reward/vote")
    assert done.result["success_before"] < 0.75 and done.result["success_after"] > 0.9, agreement
    assert done.result["interval_before"][1] < done.result["interval_after"][0]
    assert agreement[0] < 0.75 and agreement[-1] > 0.8


def test_one_attempt_cannot_vote(tmp_path: Path) -> None:
    stage = STAGE | {"group_size": 1, "advantage": {"kind": "reinforce_pp"}}
    path = runs.write(tmp_path, [stage], rewards={"vote": {"kind": "majority"}})
    with pytest.raises(RecipeError, match="compares the attempts") as error:
        load(path)
    assert error.value.where == "stages[0].group_size" and "rewards.vote, majority" in error.value.expected
