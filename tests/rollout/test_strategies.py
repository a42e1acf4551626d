"""Strategies: which candidate is chosen, and that nothing they look at knows which one was right."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.contrib.improvement import Improvement
from rewards.shaping.penalties import TurnCost
from rlhf.data import Action, Finish, Generation, Outcome, Prompt, Task, Trajectory, Turn, Verdict
from rlhf.errors import RecipeError, RewardError
from rlhf.recipe.builder import build_part
from rlhf.recipe.strategy_checks import strategy_said
from rlhf.rollout.contrib.strategies import BestOfN, SelfConsistency, TreeSearch, mean_logprob, unseen

TASK = Task("sums/1", reference="4")


def tried(*answers: str, logprobs: tuple[float, ...] = (), solved: bool = False, attempt: int = 0) -> Trajectory:
    """An attempt that says `answers`, the last of them in one generation with these log-probs."""
    generation = Generation(Prompt((1,)), tuple(range(len(logprobs))), logprobs, Finish.STOP, 0)
    turns = tuple(Turn(Action(a, (generation,) * (a is answers[-1] and bool(logprobs))), "...", 1.0) for a in answers)
    return Trajectory(TASK.id, attempt, "2 + 2?", turns, Outcome.SOLVED if solved else Outcome.TURN_LIMIT)


def chosen(strategy, candidates):
    return asyncio.run(strategy.choose(*unseen(TASK, candidates)))


def test_the_surest_candidate():
    # Means: (−.9 −.1)/2 = −.5; −.2; (−.3 −.3 −2.1)/3 = −.9. Sums would choose the second too, products of five not.
    candidates = [
        tried("a", logprobs=(-0.9, -0.1)),
        tried("b", logprobs=(-0.2,)),
        tried("c", logprobs=(-0.3, -0.3, -2.1)),
    ]
    assert [mean_logprob(t) for t in candidates] == pytest.approx([-0.5, -0.2, -0.9])
    assert chosen(BestOfN(), candidates).index == 1
    # A long attempt is not held against the policy: four tokens of −.1 sum to −.4 and beat the one of −.2.
    assert chosen(BestOfN(), [*candidates, tried("d", logprobs=(-0.1,) * 4)]).index == 3
    # Without tokens an attempt is the last choice, and of equals the first is taken.
    assert mean_logprob(tried("a")) == -math.inf and chosen(BestOfN(), [tried("a"), *candidates[2:]]).index == 1
    assert chosen(BestOfN(), [candidates[0], candidates[0]]).index == 0


def test_a_judge_chooses():
    candidates = [tried("a", "b", "c"), tried("a"), tried("a", "b")]
    found = chosen(BestOfN(judge=TurnCost(cost=0.25)), candidates)
    assert found.index == 1 and found.why == "-0.25 by the judge, of 3"


def test_the_commonest_answer():
    # Answers 5, 4, 4, 6: two of four say 4, first the second. Case and end marks are no difference, nor is what came
    # before the last action.
    candidates = [tried("5"), tried("six", "4."), tried("4"), tried("6")]
    found = chosen(SelfConsistency(), candidates)
    assert (found.index, found.why) == (1, "2 of 4 answer '4'")
    # Equally common: the one that was given first. Nobody has an answer: the first candidate.
    assert chosen(SelfConsistency(), [tried("7"), tried("8")]).index == 0
    assert chosen(SelfConsistency(pattern=r"= (\d+)"), [tried("?"), tried("1 = 3"), tried("so 2 = 3")]).index == 1
    assert chosen(SelfConsistency(pattern=r"= (\d+)"), [tried("?"), tried("!")]).why == "no candidate has an answer"


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=7))
def test_the_chosen_answer_is_as_common_as_any(answers):
    index = chosen(SelfConsistency(), [tried(a) for a in answers]).index
    assert answers.count(answers[index]) == max(map(answers.count, answers))
    assert answers.index(answers[index]) == index


def test_nothing_hidden_is_seen():
    def spy(task, trajectory):
        assert task.reference is None and trajectory.outcome in (Outcome.FAILED, Outcome.TURN_LIMIT)
        assert not trajectory.solved and all(turn.reward == 0 for turn in trajectory.turns)
        return float(trajectory.turns[0].action.text == "b")

    assert chosen(BestOfN(judge=spy), [tried("a", solved=True), tried("b")]).index == 1


def test_a_judge_that_fails_on_one_candidate_leaves_it_out():
    def shy(task, trajectory):
        if trajectory.turns[0].action.text == "a":
            raise RuntimeError("not that one")
        return Verdict(-1.0)

    assert chosen(BestOfN(judge=shy), [tried("a"), tried("b")]).index == 1
    with pytest.raises(RewardError, match=r"fails on every candidate\s+got: .* not that one"):
        chosen(BestOfN(judge=shy), [tried("a")])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"kind": "best_of_n", "judge": {"kind": "outcome"}},
            r"^strategy\.judge: (.|\n)*does not see the environment's verdict\n  do:       remove the key",
        ),
        (
            {"kind": "best_of_n", "judge": {"kind": "math"}},
            r"^strategy\.judge: (.|\n)*compares with the hidden reference",
        ),
        ({"kind": "self_consistency", "n": 0}, r"^strategy\.n: "),
        ({"kind": "retry"}, "'retry' is a kind of rollout; did you mean 'reflect_and_retry'"),
        ({"kind": "tree_search", "judge": {"kind": "environment"}}, "does not see the environment's verdict"),
        ({"kind": "tree_search", "n": 4}, "n is 4, expected a multiple of 1 \\+ rounds"),
        ({"kind": "self_consistency", "pattern": "("}, "not a regular expression"),
        ({"kind": "best_of_m"}, "did you mean 'best_of_n'"),
    ],
)
def test_what_could_not_work_is_refused(values, says):
    with pytest.raises(RecipeError, match=says):
        build_part("strategy", values, "strategy", base=Path())


@pytest.mark.parametrize(
    ("text", "do"),
    [
        ("best_of_n n=3", "'{kind: best_of_n, n: 3}'"),
        ("best_of_n, n: 3", "'{kind: best_of_n, n: 3}'"),
        ("tree_search(n=4, rounds=2)", "'{kind: tree_search, n: 4, rounds: 2}'"),
        ("n=3", "'{kind: ..., n: 3}'"),
        ("kind=best_of_n n=3", "'{kind: best_of_n, n: 3}'"),
    ],
)
def test_keys_beside_a_kind_on_the_command_line_are_told_how_they_are_written(text, do):
    with pytest.raises(RecipeError) as caught:
        strategy_said(text)
    assert (caught.value.where, caught.value.got) == ("--strategy", text)
    assert caught.value.hint == f"write --strategy {do}"


def test_the_command_line_names_a_strategy_by_its_kind_or_with_keys(tmp_path):
    assert strategy_said("best_of_n") == BestOfN() and strategy_said("{kind: best_of_n, n: 3}") == BestOfN(n=3)
    mine = tmp_path / "my n=3.py"
    mine.write_text("from rlhf.rollout.contrib.strategies import BestOfN as Mine\n")
    assert strategy_said(f"{mine}:Mine") == BestOfN()
    with pytest.raises(RecipeError, match="choose_by is vote") as caught:
        strategy_said("{kind: reflect_and_retry, choose_by: vote}")
    assert "strategy={" not in caught.value.hint, "that would be an override of a recipe"


def test_a_judge_compares_an_attempt_with_its_own_parent():
    # Of several answers, this one's candidates are attempts 1 and 3. Two turns and then one: better by 1.
    first, retry = tried("a", "b", attempt=1), replace(tried("a", attempt=3), parent=1)
    assert chosen(BestOfN(judge=Improvement(reward=TurnCost(cost=1))), [first, retry]).index == 1


def test_a_reward_of_whole_groups_can_judge():
    strategy = build_part("strategy", {"kind": "best_of_n", "judge": {"kind": "majority"}}, "strategy", base=Path())
    assert chosen(strategy, [tried("5"), tried("4"), tried("4")]).index == 1
    assert not strategy.needs_tokens and BestOfN().needs_tokens and TreeSearch().needs_tokens
