"""Chains of attempts: what is tried again, and what the next attempt is told."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from agents.chat import ChatAgent
from rewards.shaping.outcome import Outcome as OutcomeReward
from rlhf.data import Action, Outcome, SamplingParams, Task, Trajectory, Turn
from rlhf.evaluation.answers import select_answers
from rlhf.inference.scripted import ScriptedEngine
from rlhf.rollout.contrib.strategies import ReflectAndRetry, unseen
from rlhf.rollout.group import run_groups
from rlhf.rollout.group_structure import Retry
from rlhf.rollout.renderer import Renderer
from rlhf.rollout.scoring import WeightedReward, score_group
from tests.rollout.small_world import Corridor, tokenizer
from tests.rollout.test_group import LIMITS, told


def tried(number: int, outcome: Outcome = Outcome.FAILED, parent: int | None = None) -> Trajectory:
    return Trajectory("t", number, "A door.", (Turn(Action("push"), "It is locked."),), outcome, parent=parent)


def again(retry: Retry, *group: Trajectory) -> list[int]:
    return [b.parent for b in retry.branches(group, random.Random(0))]


def test_what_failed_is_tried_again_until_it_is_solved() -> None:
    group = [tried(0), tried(1, Outcome.SOLVED), tried(2, Outcome.TURN_LIMIT), tried(3, Outcome.ENV_ERROR)]
    assert again(Retry(), *group) == [0, 2]  # nothing is known of what broke
    assert again(Retry(until="end"), *group) == [0, 1, 2]
    later = [*group, tried(4, parent=0), tried(5, Outcome.SOLVED, parent=2)]
    assert again(Retry(), *later) == [4] and again(Retry(retries=1), *later) == []
    assert again(Retry(), *later, tried(6, parent=4)) == []  # three attempts: the first and two more


def test_the_next_attempt_is_told_of_those_before() -> None:
    retry = Retry(max_shown=1)
    text = "Attempt 1:\nA door.\n> push\nIt is locked.\nThat attempt failed. Begin anew, and go another way."
    assert retry.told([tried(0)]).content == text
    both = replace(retry, max_shown=2).told([tried(0), tried(1)]).content
    assert both.startswith("Attempt 1:") and "\nAttempt 2:\n" in both
    assert retry.told([tried(0), tried(1)]).content.startswith("Attempt 2:")  # the number it had, not the one shown
    assert (
        Retry(until="end").told([tried(0)]).content.endswith("It is locked.\nBegin anew, and do it better if you can.")
    )
    assert Retry(ask="Hm.").told([tried(0)]).content.endswith("\nHm.")
    # 21 characters follow the opening; of a longer transcript the end stays, with its cut marked: 3 + 16 + 21 = 40.
    long = replace(tried(0), opening="A" * 100)
    assert Retry(max_chars=40).told([long]).content.splitlines()[1] == "..." + "A" * 16
    assert len("..." + "A" * 16 + "\n> push\nIt is locked.") == 40


def test_chains_have_whole_groups() -> None:
    assert Retry().n_from_start(6) == 2
    for size in (1, 4):
        with pytest.raises(ValueError, match=r"a multiple of 1 \+ retries = 3"):
            Retry().n_from_start(size)


def _policy():
    """Goes north once it has read of an earlier attempt, and looks around before."""
    return ScriptedEngine(lambda text: "go north" if "Attempt 1" in text else "look", tokenizer=tokenizer())


def _run(grouping, group_size, **kwargs):
    environment = Corridor(length=3)
    tasks = environment.tasks("test")[:2]
    parts = (tasks, environment, ChatAgent(system=""), _policy(), Renderer(tokenizer()))
    limits = replace(LIMITS, max_turns=4, **kwargs)
    return asyncio.run(run_groups(*parts, limits, SamplingParams(), group_size=group_size, seed=1, grouping=grouping))


def test_an_attempt_that_reads_of_another_does_otherwise() -> None:
    groups = _run(Retry(), 6)
    for group in groups:
        assert [t.outcome for t in group] == [Outcome.TURN_LIMIT] * 2 + [Outcome.SOLVED] * 2
        assert [(t.attempt, t.parent, t.n_shared) for t in group] == [(0, None, 0), (1, None, 0), (2, 0, 0), (3, 1, 0)]
        # Every token that it read is in its prompt: what it is trained on is what it saw.
        text = tokenizer().decode(group[2].turns[0].generations[0].prompt.token_ids)
        assert "Attempt 1:" in text and "> look" in text and text.index("> look") < text.rindex(group[2].opening)
        assert not any("Attempt" in turn.reply for turn in group[2].turns)
    assert told(groups) == told(_run(Retry(), 6, max_concurrent=1))
    assert [len(group) for group in _run(Retry(until="end"), 3)] == [3, 3]


def test_the_last_attempt_is_the_answer_and_all_are_counted() -> None:
    strategy = ReflectAndRetry()
    task = Corridor(length=3).tasks("test")[0]
    rewards = {"solved": WeightedReward("solved", 1.0, OutcomeReward())}
    group = asyncio.run(score_group(task, _run(strategy.rollout, 6)[0], rewards))
    made = asyncio.run(select_answers(strategy, task, group, 2, timeout_s=5.0))
    assert [s.chosen for s in made.spent] == [2, 3] and all(t.solved for t in made.group.trajectories)
    assert [s.n_turns for s in made.spent] == [4 + 3, 4 + 3] and made.spent[0].why == "attempt 2 of at most 3"


def test_answers_may_be_voted_on_where_nobody_is_told() -> None:
    said = [Trajectory("t", i, "?", (Turn(Action(a), ""),), Outcome.FAILED) for i, a in enumerate(("4", "5", "4"))]
    vote = ReflectAndRetry(until="end", choose_by="vote")
    assert asyncio.run(vote.choose(*unseen(Task("t"), said))).index == 0
    assert asyncio.run(ReflectAndRetry().choose(*unseen(Task("t"), said[::-1]))).index == 0  # the one with number 2
    with pytest.raises(ValueError, match="all attempts but the last failed"):
        ReflectAndRetry(choose_by="vote")
