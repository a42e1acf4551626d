"""Parts without the part that they are about are refused at load, and ids of no token with the policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.build.pair_data import check_parts
from rlhf.credit.contrib.hicra import HICRA
from rlhf.credit.contrib.task_normalised import TaskNormalised
from rlhf.errors import RecipeError
from rlhf.recipe import load
from tests.rollout.small_world import tokenizer

ADVANTAGE = "stages.1.advantage="
SEARCH, TOOLS, CALLS = "environment={kind: search_qa}", "environment={kind: tools}", "agent={kind: tools}"
MIXED = "environment={kind: mixed, parts: {a: {environment: {kind: tools}}, b: {environment: {kind: wordle}}}}"
FORM = "rewards.form={kind: format, transitions: {'': [think], think: [answer], answer: []}, replies: false}"


@pytest.mark.parametrize(
    ("overrides", "where", "says"),
    [
        ([ADVANTAGE + "{kind: two_level}"], "stages[1].advantage.kind", "names no subgoals"),
        ([ADVANTAGE + "{kind: reviews}"], "stages[1].advantage.kind", "has no critic"),
        ([ADVANTAGE + "{kind: seats}"], "stages[1].advantage.kind", "compares by seats"),
        ([ADVANTAGE + "{kind: tree_grpo}"], "stages[1].advantage.kind", "do not branch"),
        ([ADVANTAGE + "{kind: treerl}"], "stages[1].advantage.kind", "rollout: {kind: tree}"),
        ([ADVANTAGE + "{kind: guided}"], "stages[1].advantage.kind", "or use dr_grpo"),
        ([ADVANTAGE + "{kind: guided, normalize_std: true}"], "stages[1].advantage.kind", "or use grpo"),
        ([ADVANTAGE + "{kind: ktae, inner: {kind: seats}}"], "stages[1].advantage.inner.kind", "compares by seats"),
        (["limits.stop_strings=['.']", "stages.1.rollout={kind: tree, at: token}", "stages.1.group_size=3"],
         "stages[1].rollout.at", "write at: turn"),
        (["stages.1.loss={kind: luffy}"], "stages[1].loss.kind", "group_demonstrations: {per_group: 1}"),
        (["stages.1.loss={kind: ppo_clip, clip_high: 0.3}"], "stages[1].loss.clip_high", "every ratio is 1"),
        (["environment={kind: keyhole}", CALLS], "agent.kind", "tools in keyhole"),
        (
            [MIXED, CALLS],
            "agent.kind",
            "tools in wordle (environment[1])",
        ),
        (["environment={kind: worker_processes, environment: {kind: sokoban}}", CALLS], "agent.kind", "in sokoban"),
        ([SEARCH, FORM], "rewards.form.transitions", "agent.think: require"),
        ([SEARCH, "rewards.t={kind: combine, parts: {a: {reward: {kind: tool_use}}}}"],
         "rewards.t.parts.a.reward.tools", "write tools: [search]"),
    ],
)  # fmt: skip
def test_what_would_do_nothing_is_refused(echo: Path, overrides: list[str], where: str, says: str) -> None:
    chat = [] if any(o.startswith("agent=") for o in overrides) else ["agent={kind: chat}"]
    with pytest.raises(RecipeError) as caught:
        load(echo, [*chat, *overrides])
    assert caught.value.where == where and says in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [ADVANTAGE + "{kind: two_level}", "agent={kind: planner}"],
        [ADVANTAGE + "{kind: reviews}", "agent={kind: critic}"],
        [
            ADVANTAGE + "{kind: tree_grpo}",
            "stages.1.rollout={kind: tree, branches_per_round: 1}",
            "stages.1.group_size=4",
        ],
        ["limits.stop_strings=['.']", "stages.1.rollout={kind: tree}", "stages.1.group_size=3"],
        ["stages.1.loss={kind: ppo_clip, clip_high: 0.3}", "stages.1.minibatches=2"],
        [TOOLS, CALLS],
        [TOOLS, CALLS, "rewards.t={kind: tool_use}"],
        ["environment={kind: worker_processes, environment: {kind: tools}}", CALLS],
        [CALLS],  # a stranger's world may take calls and say nothing of it
        [SEARCH, "rewards.t={kind: tool_use, tools: [search]}"],
        [SEARCH, FORM, "agent={kind: chat, think: require}"],
    ],
)
def test_with_that_part_it_is_not(echo: Path, overrides: list[str]) -> None:
    chat = [] if any(o.startswith("agent=") for o in overrides) else ["agent={kind: chat}"]
    load(echo, [*chat, *overrides])


def test_ids_beyond_the_vocabulary_are_refused_with_the_policy() -> None:
    names = tokenizer()
    check_parts([HICRA(grams=((5, len(names) - 1),))], names)
    for bad in (
        HICRA(grams=((5, len(names)),)),
        HICRA(plan_start_ids=(-1,)),
        HICRA(plan_start_ids=(3,), plan_end_ids=(10**6,)),
    ):
        with pytest.raises(RecipeError, match="no such token"):
            check_parts([TaskNormalised(inner=bad)], names)
