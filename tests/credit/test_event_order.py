"""Attempts in order against attempts that read the events shuffled: worked numbers, and what is refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.chat import ChatAgent
from environments.tasks.dataset import Dataset
from rlhf.batching.filters import Filters
from rlhf.batching.samples import make_samples
from rlhf.credit.contrib.event_order import EventOrder
from rlhf.credit.dr_grpo import DrGRPO
from rlhf.credit.estimator import compute_advantages
from rlhf.credit.grpo import GRPO
from rlhf.data import SamplingParams, Task
from rlhf.errors import DataError, RecipeError
from rlhf.inference.scripted import ScriptedEngine
from rlhf.recipe import load
from rlhf.rollout.contrib.shuffled_events import ShuffledEvents
from rlhf.rollout.group import run_groups
from rlhf.rollout.renderer import Renderer
from tests import recipe_parts
from tests.credit.credit_groups import outcome_group, per_trajectory
from tests.credit.test_guided import group as demonstrated
from tests.rollout.small_world import Corridor, tokenizer
from tests.rollout.test_group import LIMITS

STORY = "Mia goes to Rome.\nMia goes to Oslo.\nBen goes to Rome.\nWhere is Mia?"


def test_worked_example() -> None:
    order = EventOrder(inner=DrGRPO())
    # In order 1 and 0, p = .5; shuffled 0: .5 >= .8 · 0, the right one is worth 1.3, and the mean of both is .65.
    helped = order(outcome_group([1.0, 0.0, 0.0]))
    assert (
        per_trajectory(helped) == pytest.approx([0.65, -0.65, 0.0])
        and helped.metrics["credit/n_order_bonus_groups"] == 1
    )
    # Shuffled 1: .5 < .8.
    not_helped = order(outcome_group([1.0, 0.0, 1.0]))
    assert per_trajectory(not_helped) == pytest.approx([0.5, -0.5, 0.0])
    assert not_helped.metrics["credit/n_order_bonus_groups"] == 0
    # Two of three groups of three: p = 3/4, p̃ = 1/2, and .75 >= .4. Scores 1.3, 1.3, 1.3, 0, with the mean .975.
    more = order(outcome_group([1.0, 1.0, 1.0, 1.0, 0.0, 0.0]))
    assert per_trajectory(more) == pytest.approx([0.325, 0.325, 0.0, 0.325, -0.975, 0.0])
    # Without a shuffled attempt (it failed, say) nothing is compared.
    assert per_trajectory(order(outcome_group([1.0, 0.0]))) == pytest.approx([0.5, -0.5])


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=9), st.sampled_from([0.3, 0.0]))
def test_it_is_the_inner_estimator_of_those_in_order(returns: list[float], alpha: float) -> None:
    own = [r for i, r in enumerate(returns) if (i + 1) % 3]
    shuffled = returns[2::3]
    helps = bool(own and shuffled) and sum(own) / len(own) >= 0.8 * sum(shuffled) / len(shuffled)
    raised = outcome_group([r * (1 + alpha * helps) for r in own])
    found = per_trajectory(EventOrder(alpha=alpha)(outcome_group(returns)))
    expected = iter(per_trajectory(GRPO()(raised)) if own else [])
    assert found == pytest.approx([0.0 if (i + 1) % 3 == 0 else next(expected) for i in range(len(returns))])


def test_shuffled_attempts_have_no_part_in_the_update() -> None:
    groups = [outcome_group([1.0, 0.0, 0.0]), outcome_group([1.0, 0.0, 1.0, 0.0])]
    samples, _ = make_samples(groups, compute_advantages(EventOrder(), groups))
    rows, _ = Filters()(samples, groups)
    assert [(row.group, row.sequence) for row in rows] == [(0, 0), (0, 1), (1, 3), (1, 4), (1, 6)]


def test_a_demonstration_is_no_shuffled_attempt() -> None:
    credit = EventOrder()(demonstrated([1.0, 0.0], [1.0]))
    assert credit.train_mask_G == (True, True, True)


def test_every_third_attempt_reads_the_events_in_another_order(tmp_path: Path) -> None:
    path = tmp_path / "stories.jsonl"
    path.write_text(json.dumps({"prompt": STORY, "reference": "Oslo"}) + "\n")
    stories, engine = Dataset(train=path), ScriptedEngine("Oslo", tokenizer=tokenizer())
    [task] = stories.tasks("train")
    parts = (stories, ChatAgent(system="", format="text"), engine, Renderer(tokenizer()))
    how = {"group_size": 6, "seed": 1, "grouping": ShuffledEvents()}
    [group] = asyncio.run(run_groups([task], *parts, LIMITS, SamplingParams(), **how))
    assert [t.opening == STORY for t in group] == [True, True, False] * 2
    for shuffled in (group[2].opening, group[5].opening):
        *events, asked = shuffled.split("\n")
        assert asked == "Where is Mia?" and sorted(events) == sorted(STORY.split("\n")[:-1])


def test_an_event_is_the_whole_of_what_the_expression_finds() -> None:
    structure = ShuffledEvents(every=2, event=r"(Mia|Ben) goes to (\w+)")
    task = Task("a", info={"prompt": "Mia goes to Rome, Ben goes to Oslo. Where is Mia?"})
    assert structure.posed(task, 1).info["prompt"] == "Ben goes to Oslo, Mia goes to Rome. Where is Mia?"


def test_events_that_are_all_alike_stay_and_other_worlds_are_refused() -> None:
    [task, *_] = Corridor().tasks("test")
    with pytest.raises(DataError, match="only the events of a question"):
        ShuffledEvents(every=2).posed(task, 1)
    with pytest.raises(ValueError, match="at least every = 3"):
        ShuffledEvents().n_from_start(2)
    with pytest.raises(ValueError, match="regular expression"):
        ShuffledEvents(event="(")


def test_one_goes_with_the_other(tmp_path: Path) -> None:
    path = recipe_parts.write(tmp_path)
    rollout, order = "stages.1.rollout={kind: shuffled_events}", "stages.1.advantage={kind: event_order}"
    load(path, [rollout, order, "stages.1.group_size=4"])
    with pytest.raises(RecipeError, match="the estimator would not tell attempts with shuffled events apart"):
        load(path, [rollout, "stages.1.advantage={kind: grpo}", "stages.1.group_size=4"])
    with pytest.raises(RecipeError, match="in a stage of kind policy_gradient with advantage"):
        load(path, ["stages.1={kind: preference, rollout: {kind: shuffled_events}}"])
    with pytest.raises(RecipeError, match="no attempt has shuffled events"):
        load(path, [order, "stages.1.group_size=4"])
    with pytest.raises(RecipeError, match="the shuffled attempts are not the compared ones"):
        load(path, [rollout, "stages.1.advantage={kind: event_order, every: 2}", "stages.1.group_size=4"])
    with pytest.raises(RecipeError, match="a critic would value"):
        keys = "stages.1.advantage={kind: event_order, inner: {kind: gae}}"
        load(path, [rollout, keys, "stages.1.group_size=4", "stages.1.critic={kind: values}"])
