"""Reward functions of verl's signature: recognised, called with what verl gives, their dictionaries read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from environments.tasks.dataset import Dataset
from rewards.answers.exact import ExactMatch
from rewards.answers.numeric import Numeric
from rewards.check import check_reward
from rewards.combinators.parts import compared_in
from rewards.suite import Case, run
from rewards.trl_function import as_reward
from rewards.verified import Verified, is_verifier
from rlhf.build.reference_trial import _right_reply, _try_rewards
from rlhf.data import Action, Outcome, Task, Trajectory, Turn
from rlhf.errors import RecipeError, RewardError
from rlhf.recipe.rewards import rewards_of
from rlhf.rollout.limits import Limits
from rlhf.rollout.scoring import score_group
from tests import commands

ROW = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "What is 3 + 4?"}],
    "reward_model": {"style": "rule", "ground_truth": "7"},
    "extra_info": {"split": "train", "index": 3},
}
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {BODY}
"""


def scored(tmp_path: Path, reply: str, text: str, truth: Any = "7", **keys: Any) -> Any:
    (tmp_path / "reward.py").write_text(text)
    row = {**ROW, "reward_model": {"style": "rule", "ground_truth": truth}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    task = Dataset(train=tmp_path / "rows.jsonl").tasks("train")[0]
    rewards = rewards_of({"right": {"kind": "./reward.py:compute_score", **keys}}, tmp_path)
    turn = Turn(Action(reply.rpartition(">")[2].strip(), reply_text=reply), "")
    return asyncio.run(score_group(task, [Trajectory(task.id, 0, "", (turn,), Outcome.FAILED)], rewards))


def test_a_function_is_given_the_whole_reply_and_the_columns_of_its_row(tmp_path: Path) -> None:
    seen = "data_source == 'sums' and solution_str == '<think>3 and 4</think> 7' and ground_truth == '7'"
    for parameters in ("", "**others", "async"):
        text = SCORE.replace("{BODY}", f"float({seen} and extra_info['index'] == 3)")
        text = text.replace("extra_info=None", f"extra_info, {parameters}") if parameters == "**others" else text
        (tmp_path / (parameters.strip("*") or "plain")).mkdir()
        text = text.replace("\ndef", "\nasync def") if parameters == "async" else text
        group = scored(tmp_path / (parameters.strip("*") or "plain"), "<think>3 and 4</think> 7", text)
        assert not group.failures and group.scores[0].total == 1.0, parameters


@pytest.mark.parametrize(("result", "value"), [("0.5", 0.5), ("{'score': 0.25, 'acc': True, 'pred': '7'}", 0.25)])
def test_a_result_is_a_number_or_a_dictionary_with_a_score(tmp_path: Path, result: str, value: float) -> None:
    group = scored(tmp_path, "7", SCORE.replace("{BODY}", result))
    assert group.scores[0].parts["right"].value == value


@pytest.mark.parametrize("truth", [{"target": 24, "numbers": [3, 8]}, {"target": ["a", "b"]}, [3, 8]])
def test_a_ground_truth_with_parts_reaches_the_function_as_it_is(tmp_path: Path, truth: Any) -> None:
    group = scored(tmp_path, "3 * 8", SCORE.replace("{BODY}", f"float(ground_truth == {truth!r})"), truth)
    assert not group.failures and group.scores[0].total == 1.0
    world = Dataset(train=tmp_path / "rows.jsonl")
    [task] = world.tasks("train")
    assert json.loads(task.reference or "") == truth
    assert world.plan(task, ()) is None and _right_reply(world, task) is None
    attempt = Trajectory(task.id, 0, "", (Turn(Action("3 * 8", reply_text="3 * 8"), ""),), Outcome.FAILED)
    for reward in (ExactMatch(), Verified(Numeric())):
        with pytest.raises(RewardError, match="for functions of verl's or TRL's signature"):
            reward(task, attempt)
    for_trl = as_reward(lambda completions, ground_truth, answer: [float(ground_truth == answer == [truth])])
    assert for_trl(task, attempt).value == 1.0


@pytest.mark.parametrize("kind", ["exact_match", "math"])
def test_references_with_parts_are_refused_before_training_where_the_reward_cannot_read_them(
    tmp_path: Path, kind: str
) -> None:
    asked = [[{"role": "user", "content": f"What is {n} + 0?"}] for n in range(4)]
    rows = [{"prompt": one, "reward_model": {"ground_truth": {"target": n}}} for n, one in enumerate(asked)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(SCORE.replace("{BODY}", "float(ground_truth['target'] == solution_str)"))
    world = Dataset(train=tmp_path / "a.jsonl")

    def tried(kind: str, limits: Limits) -> None:
        rewards = rewards_of({"right": {"kind": kind, "success_threshold": 1.0}}, tmp_path)
        asyncio.run(_try_rewards("", rewards, world, "train", limits, lambda text: None))

    with pytest.raises(RewardError, match="of the first 4 tasks have parts") as refused:
        tried(kind, Limits())
    assert "row" in refused.value.where and "reward_model.ground_truth.KEY" in refused.value.hint
    tried(kind, Limits(max_error_fraction=1))
    tried("./reward.py:compute_score", Limits())


@pytest.mark.parametrize("result", ["{}", "{'acc': 1.0}", "{'score': None}", "{'score': float('nan')}"])
def test_a_dictionary_without_a_finite_score_is_an_error(tmp_path: Path, result: str) -> None:
    group = scored(tmp_path, "7", SCORE.replace("{BODY}", result))
    assert "returned no finite number" in group.failures[0].message and "`score`" in group.failures[0].message


def test_a_function_of_verl_is_a_verifier_that_needs_the_reference() -> None:
    def compute_score(data_source, solution_str, ground_truth, extra_info):  # type: ignore[no-untyped-def]
        return {"score": float(data_source == "" and extra_info == {} and solution_str == ground_truth)}

    assert is_verifier(compute_score)
    assert list(compared_in("right", as_reward(compute_score), None)) == ["right"]
    report = check_reward(compute_score)
    assert report.ok and report.subject == "verifier compute_score", str(report)
    cases = [Case("a/1", "a", "7", "7", right=True), Case("a/2", "a", "7", "8", right=False)]
    assert [one.value for one in run(compute_score, cases)] == [1.0, 0.0]


def test_of_several_turns_a_function_is_given_all_that_follows_the_prompt() -> None:
    said: list[str] = []

    def compute_score(data_source, solution_str, ground_truth):  # type: ignore[no-untyped-def]
        said.append(solution_str)
        return 1.0

    turns = (
        Turn(Action("look", reply_text="<think>first</think>\nlook"), "a door"),
        Turn(Action("go"), ""),
        Turn(Action("stop"), "over"),
    )
    as_reward(compute_score)(Task("t", reference="7"), Trajectory("t", 0, "where?", turns, Outcome.FAILED))
    assert said == ["<think>first</think>\nlook\na door\ngo\n\nstop"]


def test_a_function_of_three_other_parameters_is_refused_with_both_signatures(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def compute_score(answer, reference, more):\n    return 1.0\n")
    with pytest.raises(RecipeError, match=r"\(data_source, solution_str, ground_truth, \.\.\.\) as verl's"):
        rewards_of({"right": {"kind": "./reward.py:compute_score"}}, tmp_path)


def test_it_is_checked_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(SCORE.replace("{BODY}", "{'score': float(solution_str == ground_truth)}"))
    found = commands.run("check", "reward", f"{tmp_path}/reward.py:compute_score")
    assert found.exit_code == 0, found.output
