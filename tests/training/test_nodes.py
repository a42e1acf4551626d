"""Turns merged into nodes: rows with a mark, labels, the trees that compression makes, and a model that reads them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rewards.models.model_folder import NODES, logits, nodes_of
from rewards.models.reward_model import ProcessModelScore
from rewards.models.step_rows import StepRow, cut, node_row, step_rows
from rlhf.data import Action, Finish, Generation, Outcome, Prompt, Score, ScoredGroup, Task, Trajectory, Turn
from rlhf.errors import ModelError, RecipeError
from rlhf.recipe import load
from rlhf.training.contrib.node_labels import compressions, labelled_nodes
from rlhf.training.contrib.node_merging import Merging
from rlhf.training.contrib.step_labels import passing
from rlhf.training.reward_model_training import save, scoring_model
from tests.training import runs, tiny
from tests.training.test_attempts import START

MARK = 0


def said(prompt: tuple[int, ...], *ids: int) -> Turn:
    return Turn(Action("x", (Generation(Prompt(prompt), ids, (0.0,) * len(ids), Finish.STOP, 0),)), "")


def group(*attempts: tuple[Turn, ...], right: list[bool]) -> ScoredGroup:
    made = tuple(Trajectory("t", i, "", turns, Outcome.FAILED) for i, turns in enumerate(attempts))
    scores = tuple(Score({}, (0.0,) * len(t), float(x)) for t, x in zip(attempts, right, strict=True))
    return ScoredGroup("t", made, scores)


def fan(*right: bool) -> ScoredGroup:
    """Attempts that say 5, then each something else: 6, 7, 8 and so on."""
    first = said((1,), 5)
    return group(*((first, said((1, 5, 2), 6 + i)) for i in range(len(right))), right=list(right))


def labels(made: ScoredGroup, seed: int = 0, **keys: Any) -> list[tuple[tuple[int, ...], float]]:
    """What is read, the mark included, with its label; each once."""
    draw, merging = random.Random(seed), Merging(**keys)
    rows = labelled_nodes([made], merging, success_threshold=1.0, eta=0.0, mark=MARK, draw=draw)
    return list(dict.fromkeys((row.token_ids, row.labels[0]) for row in rows))


# --- rows ------------------------------------------------------------------------------------------------------------


def test_a_node_is_what_was_before_a_mark_and_its_own_turns() -> None:
    # 1 2 | 3 4, then 5 is read and 6 said.
    [row] = step_rows(group((said((1, 2), 3, 4), said((1, 2, 3, 4, 5), 6)), right=[True]).trajectories[0])
    assert row.begins == (2, 5)
    assert node_row(row, 1, 1, MARK) == ((1, 2, 3, 4, 5, MARK, 6), 6)
    assert node_row(row, 0, 1, MARK) == ((1, 2, MARK, 3, 4, 5, 6), 6)
    assert node_row(row, 0, 0, MARK) == ((1, 2, MARK, 3, 4), 4)


def test_a_turn_of_several_calls_begins_with_the_first_that_its_ids_hold() -> None:
    calls = [Generation(Prompt(p), (t,), (0.0,), Finish.STOP, 0) for p, t in (((1,), 2), ((1, 2, 3), 4))]
    [row] = step_rows(Trajectory("t", 0, "", (Turn(Action("x", tuple(calls)), ""),), Outcome.FAILED))
    assert row.begins == (1,)
    rewritten = [Generation(Prompt(p), (t,), (0.0,), Finish.STOP, 0) for p, t in (((1,), 2), ((9, 9), 4))]
    [row] = step_rows(Trajectory("t", 0, "", (Turn(Action("x", tuple(rewritten)), ""),), Outcome.FAILED))
    assert row.begins == (2,)


@given(st.integers(0, 9), st.integers(1, 4))
def test_every_step_is_in_one_node(n_steps: int, n: int) -> None:
    nodes = cut(n_steps, n)
    assert [i for first, last in nodes for i in range(first, last + 1)] == list(range(n_steps))
    assert all(last - first + 1 == n for first, last in nodes[:-1])


# --- labels ----------------------------------------------------------------------------------------------------------


def test_each_turn_is_learnt_alone_and_with_the_one_before_it() -> None:
    # After 5 two of four are right, so .5; each end is its own; the pair has the label of its later turn.
    found = labels(fan(True, True, False, False), max_turns=2, compress=0.0)
    ends = [1.0, 1.0, 0.0, 0.0]
    alone = [((1, 5, 2, MARK, 6 + i), x) for i, x in enumerate(ends)]
    pairs = [((1, MARK, 5, 2, 6 + i), x) for i, x in enumerate(ends)]
    assert sorted(found) == sorted([((1, MARK, 5), 0.5), *alone, *pairs])


def test_a_turn_that_is_merged_with_a_child_is_worth_what_became_of_the_others() -> None:
    found = labels(fan(True, True, False, False), max_turns=1, compress=1.0)
    [child] = [ids[-1] - 6 for ids, _ in found if ids[1] == MARK and len(ids) > 3]
    was_right = child < 2
    # .5 as it was; without a right child 1 of 3, without a wrong one 2 of 3. The node has the label of the child.
    again = [x for ids, x in found if ids == (1, MARK, 5)]
    assert again == [0.5, pytest.approx(1 / 3 if was_right else 2 / 3)]
    assert [x for ids, x in found if ids == (1, MARK, 5, 2, 6 + child)] == [float(was_right)]
    # Nothing else is there than without.
    assert set(labels(fan(True, True, False, False), max_turns=1, compress=0.0)) < set(found) and len(found) == 5 + 2


def test_few_children_are_left_alone() -> None:
    few = fan(True, False, False)
    assert labels(few, max_turns=1, compress=1.0) == labels(few, max_turns=1, compress=0.0)
    assert labels(few, max_turns=1, compress=1.0, min_children=3) != labels(few, max_turns=1, compress=0.0)


def test_attempts_that_end_where_others_go_on_keep_their_own_label() -> None:
    made = fan(True, True, False)
    stopped = Trajectory("t", 3, "", made.trajectories[0].turns[:1], Outcome.FAILED)
    whole = ScoredGroup("t", (*made.trajectories, stopped), (*made.scores, Score({}, (0.0,), 0.0)))
    [merge] = compressions(passing(whole), Merging(compress=1.0, min_children=3), random.Random(1))
    assert merge.turn == 0 and merge.child == 1 and 3 in merge.others and len(merge.others) == 3
    rows = labelled_nodes(
        [whole], Merging(max_turns=1, compress=1.0, min_children=3), success_threshold=1.0, eta=0.0, mark=MARK,
        draw=random.Random(1),
    )  # fmt: skip
    of_stopped = [row for row in rows if row.attempt == 3]
    assert [(row.labels, row.is_last) for row in of_stopped] == [((0.0,), True)]


def test_nothing_is_merged_where_the_context_was_rewritten() -> None:
    turns = (said((1, 2), 3), said((9,), 4), said((9, 4, 8), 5))
    found = labels(group(turns, right=[True]), max_turns=3, compress=1.0, min_children=2)
    assert [ids for ids, _ in found] == [(1, 2, MARK, 3), (9, MARK, 4), (9, MARK, 4, 8, 5), (9, 4, 8, MARK, 5)]


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(0, 99), st.integers(1, 3), st.floats(0, 1))
def test_each_attempt_ends_once_and_one_draw_gives_one_set_of_rows(
    right: list[bool], seed: int, longest: int, compress: float
) -> None:
    merging = Merging(max_turns=longest, compress=compress, min_children=2)

    def rows() -> list[Any]:
        draw = random.Random(seed)
        return list(labelled_nodes([fan(*right)], merging, success_threshold=1.0, eta=1.0, mark=MARK, draw=draw))

    found = rows()
    assert found == rows()
    assert [row.right for row in found if row.is_last] == right
    assert all(0 <= row.labels[0] <= 1 and row.ends == (len(row.token_ids) - 1,) for row in found)
    assert all(row.token_ids.count(MARK) == 1 for row in found)


# --- as a reward -----------------------------------------------------------------------------------------------------


def model_of(folder: Path, longest: int | None) -> tuple[Any, ScoredGroup]:
    """A model of steps, or of nodes up to `longest`, in a folder, and a group it can read."""
    policy = tiny.policy()
    [made] = tiny.collect(policy, n_tasks=1, group_size=2)
    torch.manual_seed(0)
    model = scoring_model(policy, "process")
    if longest:
        setattr(model.config, NODES, {"mark": policy.tokenizer.pad_token_id, "longest": longest})
    save(folder, model, policy.tokenizer)
    return model, made


def probabilities(model: Any, rows: list[Any]) -> list[float]:
    return [1 / (1 + math.exp(-x)) for values in logits(model, rows, 1) for x in values]


def test_a_model_of_nodes_is_asked_with_a_mark_and_earns_where_they_end(tmp_path: Path) -> None:
    model, made = model_of(tmp_path / "m", longest=2)
    mark = tiny.policy().tokenizer.pad_token_id
    assert nodes_of(str(tmp_path / "m")) == (mark, 2)
    reward = ProcessModelScore(path=str(tmp_path / "m"), node=2)
    reward.check_policy(tiny.policy().tokenizer)
    for trajectory, verdict in zip(made.trajectories, reward.over_group(Task("t"), made.trajectories), strict=True):
        [row] = step_rows(trajectory)
        assert len(row.turns) in (3, 4)
        last = len(row.turns) - 1  # so the second node is one turn or two
        marked = [node_row(row, *node, mark) for node in ((0, 1), (2, last))]
        first, second = probabilities(model, [(ids, (end,)) for ids, end in marked])
        earned = {1: first, last: second - first}
        assert verdict.per_turn == pytest.approx([earned.get(k, 0.0) for k in range(last + 1)], abs=1e-5)
        assert verdict.value == pytest.approx(second, abs=1e-5)


def test_a_model_that_knows_no_mark_is_asked_where_nodes_end(tmp_path: Path) -> None:
    model, made = model_of(tmp_path / "m", longest=None)
    assert nodes_of(str(tmp_path / "m")) is None and nodes_of(str(tmp_path / "none")) is None
    least = ProcessModelScore(path=str(tmp_path / "m"), node=2, aggregation="min")
    for trajectory, verdict in zip(made.trajectories, least.over_group(Task("t"), made.trajectories), strict=True):
        row: StepRow
        [row] = step_rows(trajectory)
        p = probabilities(model, [(row.token_ids, row.ends)])
        assert verdict.value == pytest.approx(min(p[1], p[-1]), abs=1e-5)


def test_longer_nodes_than_were_learnt_are_refused(tmp_path: Path) -> None:
    model_of(tmp_path / "m", longest=2)
    with pytest.raises(ModelError, match="not trained on nodes") as refused:
        ProcessModelScore(path=str(tmp_path / "m"), node=3).check_policy(tiny.policy().tokenizer)
    assert refused.value.expected.startswith("at most 2")


def test_a_model_of_nodes_is_not_trained_further_on_turns(tmp_path: Path) -> None:
    model_of(tmp_path / "m", longest=2)
    rewards = {"learned": {"kind": "process_model", "path": str(tmp_path / "m")}, "solved": {"kind": "outcome"}}
    stage = {"kind": "policy_gradient", "steps": 2, "reward_refresh": {"every": 1}}
    with pytest.raises(RecipeError, match="cannot be trained further") as refused:
        load(runs.write(tmp_path / "r", [START, stage], rewards=rewards))
    assert refused.value.where == "stages[1].reward_refresh"


# --- whole runs ------------------------------------------------------------------------------------------------------

STAGE: dict[str, Any] = {
    "kind": "reward_model", "objective": "process", "pairs": {"tasks": 48, "group_size": 10}, "eta": 0.0, "epochs": 2,
    "rollout": {"kind": "tree", "branches_per_round": 1, "continuations": 4}, "batch_size": 16,
    "merge": {"min_children": 3}, "optimizer": {"lr": 3.0e-3, "schedule": "linear"},
}  # fmt: skip


def test_a_stage_learns_nodes_and_leaves_a_folder_that_says_so(tmp_path: Path) -> None:
    stages = [START | {"random_share": 0.5}, STAGE]
    changes: dict[str, Any] = {"policy": runs.BASE["policy"] | {"n_layers": 2}, "evaluation": {"n_tasks": 4}}
    rewards = {"solved": {"kind": "outcome"}}
    done = runs.run(runs.write(tmp_path, stages, rewards=rewards, **changes), tmp_path / "run")
    folder = done.folder / "reward_model" / "1-reward_model"
    assert json.loads((folder / "config.json").read_text())[NODES]["longest"] == 2
    [accuracy] = runs.curve(done.folder, "reward_model/accuracy")
    assert accuracy > 0.7, accuracy
    [n_labels], [n_attempts] = (runs.curve(done.folder, f"reward_model/n_{x}") for x in ("labels", "attempts"))
    assert n_labels > 2 * n_attempts  # two words: two turns, their pair, and what compression adds


@pytest.mark.parametrize("learns", ["pairwise", "outcome"])
def test_only_a_model_of_steps_has_nodes(tmp_path: Path, learns: str) -> None:
    stage = {"kind": "reward_model", "objective": learns, "merge": {"max_turns": 3}}
    with pytest.raises(RecipeError) as refused:
        load(runs.write(tmp_path, [START, stage]))
    assert refused.value.where == "stages[1].merge" and learns in str(refused.value)
