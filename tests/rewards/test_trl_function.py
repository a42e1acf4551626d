"""Reward functions of TRL's signature: recognised, called with what TRL gives, refused where they cannot be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from environments.tasks.dataset import Dataset
from rewards.trl_function import TrlFunction, as_reward
from rewards.verified import Verified, is_verifier
from rlhf.data import Action, Finish, Generation, Outcome, Prompt, Task, Trajectory, Turn
from rlhf.errors import RewardError
from rlhf.recipe.rewards import rewards_of
from rlhf.rollout.scoring import score_group


def attempt(task: Task, *said: str, number: int = 0) -> Trajectory:
    generation = Generation(Prompt((1, 2)), (3, 4), (-0.1, -0.2), Finish.STOP, "x")
    turns = tuple(Turn(Action(text.strip(), (generation,), reply_text=text), f"reply to {text}") for text in said)
    return Trajectory(task.id, number, "What is 3 + 4?", turns, Outcome.FAILED)


def task_of(tmp_path: Path, row: dict[str, Any]) -> Task:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return Dataset(train=path).tasks("train")[0]


class Seen:
    """Keeps what it was called with, and gives each completion its length."""

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        self.columns = {"completions": completions, **columns}
        return [float(len(one)) for one in completions]


def test_a_function_is_given_texts_and_columns(tmp_path: Path) -> None:
    task, seen = task_of(tmp_path, {"prompt": "What is 3 + 4?", "answer": "7", "level": 2}), Seen()
    values = as_reward(seen).over_group(task, [attempt(task, "7"), attempt(task, "<think>no</think> 8", number=1)])
    assert [v.value for v in values] == [1.0, 19.0]
    assert seen.columns["prompts"] == ["What is 3 + 4?"] * 2
    assert seen.columns["completions"] == ["7", "<think>no</think> 8"]  # the whole reply, thoughts and all
    assert seen.columns["completion_ids"] == [[3, 4], [3, 4]]
    assert seen.columns["level"] == [2, 2] and seen.columns["answer"] == ["7", "7"] == seen.columns["solution"]


def test_a_prompt_has_the_name_of_its_column(tmp_path: Path) -> None:
    def score(completions, question, ground_truth):  # type: ignore[no-untyped-def]
        return [float((question[0], ground_truth[0]) == ("What is 3 + 4?", "7"))] * len(completions)

    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"question": "What is 3 + 4?", "answer": "7"}) + "\n")
    for prompt in (None, "{question} In words."):
        task = Dataset(train=path, prompt=prompt).tasks("train")[0]
        assert as_reward(score).over_group(task, [attempt(task, "7")])[0].value == 1.0


def test_columns_that_the_recipe_names_have_their_names(tmp_path: Path) -> None:
    path, seen = tmp_path / "tasks.jsonl", Seen()
    rows = [{"frage": "3 + 4?", "loesung": "#### 7"}, {"frage": "Why?", "loesung": None}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt": "frage", "reference": "loesung", "answer_pattern": "#### (.+)"}
    told, untold = Dataset(train=path, **columns).tasks("train")
    as_reward(seen).over_group(told, [attempt(told, "7")])
    assert seen.columns["frage"] == ["3 + 4?"] and seen.columns["loesung"] == ["7"] == seen.columns["answer"]
    as_reward(seen).over_group(untold, [attempt(untold, "7")])
    assert seen.columns["loesung"] == [None]


def test_a_function_may_take_what_there_is(tmp_path: Path) -> None:
    def every(completions: Sequence[Any], *rest: Any, **columns: Any) -> list[float]:
        return [float(not rest and columns["level"][0])] * len(completions)

    task = task_of(tmp_path, {"prompt": "What is 3 + 4?", "level": 2})
    assert as_reward(every).over_group(task, [attempt(task, "7")])[0].value == 2.0


def test_chat_prompts_have_chat_completions(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "What is 3 + 4?"}]
    task, seen = task_of(tmp_path, {"prompt": chat, "answer": "7"}), Seen()
    as_reward(seen).over_group(task, [attempt(task, "7")])
    assert seen.columns["prompts"] == [chat]
    assert seen.columns["completions"] == [[{"role": "assistant", "content": "7"}]]


def test_several_turns_are_a_conversation() -> None:
    task, seen = Task(id="game/1", info={"map": "a"}), Seen()
    as_reward(seen).over_group(task, [attempt(task, "go", "look")])
    roles = [(m["role"], m["content"]) for m in seen.columns["completions"][0]]
    assert roles == [("assistant", "go"), ("user", "reply to go"), ("assistant", "look")]
    assert seen.columns["map"] == ["a"] and "answer" not in seen.columns


def test_ids_are_those_sampled_and_bytes_of_the_text_where_nobody_sampled() -> None:
    task, seen = Task(id="game/1"), Seen()
    given = Trajectory(
        task.id, 1, "", (Turn(Action("é", reply_text="<é>"), "a"), Turn(Action("b"), "")), Outcome.FAILED
    )
    blank = Trajectory(task.id, 2, "", (Turn(Action(""), ""),), Outcome.FAILED)
    as_reward(seen).over_group(task, [attempt(task, "go", "look"), given, blank])
    # é is 195, 169 in UTF-8; < > b are 60, 62, 98
    assert seen.columns["completion_ids"] == [[3, 4, 3, 4], [60, 195, 169, 62, 98], [32]]


def test_a_function_without_keywords_is_given_what_it_names(tmp_path: Path) -> None:
    def right(completions, ground_truth, log_metric=None):  # type: ignore[no-untyped-def]
        assert log_metric is None
        return [1.0 if said == wanted else None for said, wanted in zip(completions, ground_truth, strict=True)]

    task = task_of(tmp_path, {"prompt": "What is 3 + 4?", "answer": "7"})
    values = as_reward(right).over_group(task, [attempt(task, "7"), attempt(task, "8")])
    assert [v.value for v in values] == [1.0, 0.0]


def test_a_bare_pair_of_trl_is_neither_verifier_nor_riddle() -> None:
    def score(prompts, completions):  # type: ignore[no-untyped-def]
        return [0.5] * len(prompts)

    def judge(answer, reference):  # type: ignore[no-untyped-def]
        return 1.0

    assert not is_verifier(score) and isinstance(as_reward(score), TrlFunction)
    assert isinstance(as_reward(judge), Verified)


def test_async_functions_and_group_scores() -> None:
    async def brief(completions: list[Any], **columns: Any) -> list[float]:
        await asyncio.sleep(0)
        return [1.0 / len(one) for one in completions]

    task, rewards = Task(id="game/1"), rewards_of({"brief": {"kind": f"{__name__}:brief_of_module"}}, Path())
    scored = asyncio.run(score_group(task, [attempt(task, "a", "b")], rewards))
    assert scored.scores[0].total == pytest.approx(1 / 3)
    assert asyncio.run(as_reward(brief)(task, attempt(task, "a"))).value == 1.0


async def brief_of_module(completions: list[Any], **columns: Any) -> list[float]:
    """Found by its name in a recipe."""
    return [1.0 / len(one) for one in completions]


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    def score(completions, levle):  # type: ignore[no-untyped-def]
        return [0.0] * len(completions)

    task = task_of(tmp_path, {"prompt": "What is 3 + 4?", "answer": "7", "level": 2})
    with pytest.raises(RewardError) as caught:
        as_reward(score).over_group(task, [attempt(task, "7")])
    assert caught.value.got == "levle" and "level" in caught.value.expected and "'level'" in caught.value.hint
    with pytest.raises(RewardError, match="this row has no column") as caught:
        as_reward(lambda completions, subject: [0.0]).over_group(task, [attempt(task, "7")])
    assert "subject=None" in caught.value.hint


def test_what_trl_alone_gives_needs_a_default() -> None:
    def score(completions, trainer_state):  # type: ignore[no-untyped-def]
        return [0.0] * len(completions)

    task = Task(id="game/1")
    with pytest.raises(RewardError, match="trainer_state=None"):
        as_reward(score).over_group(task, [attempt(task, "7")])


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_an_array_is_a_list_of_rewards(kind: Any) -> None:
    task = Task(id="game/1")
    reward = as_reward(lambda completions, **columns: kind([0.5, 1.0]))
    verdicts = reward.over_group(task, [attempt(task, "a"), attempt(task, "b")])
    assert [verdict.value for verdict in verdicts] == [0.5, 1.0]


@pytest.mark.parametrize("said", [[1.0], 0.5, None])
def test_another_number_of_rewards_is_an_error(said: Any) -> None:
    task = Task(id="game/1")
    with pytest.raises(RewardError, match="did not return one number per completion"):
        as_reward(lambda completions, **columns: said).over_group(task, [attempt(task, "a"), attempt(task, "b")])
