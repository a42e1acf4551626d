"""Training is kept apart from what judges it: by id, by what is in a task, before anything is played."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.build.contamination import _lines_asking, in_both, refuse_trained
from rlhf.data import Message, Role, Task
from rlhf.errors import RecipeError
from rlhf.recipe import load
from rlhf.recipe.evaluation_request import EvaluationRequest
from rlhf.recipe.suites import suite_of_recipe
from tests.commands import last_json, run
from tests.training import runs

STAGES = [{"kind": "supervised", "n_demonstrations": 16, "epochs": 1}]
IMPROVE = {"kind": "policy_gradient", "steps": 2, "tasks_per_step": 2, "group_size": 2, "evaluate_every": 1}


def test_the_same_id_is_the_same_task() -> None:
    assert in_both([Task("a"), Task("b"), Task("c")], [Task("c"), Task("a", seed=5)]) == ["a", "c"]


def test_the_same_task_under_another_name_is_found() -> None:
    trained = [Task("train/1", seed=1), Task("train/2", reference="4", info={"n": [2, 2]})]
    judged = [Task("test/1", info={"n": [2, 2]}, reference="4"), Task("test/2", seed=2), Task("test/3", seed=1)]
    assert in_both(judged, trained) == ["test/1", "test/3"]


def test_what_tells_no_task_apart_makes_none_the_same() -> None:
    # nothing but an id; one reference for many tasks of a list, which are told apart by their ids
    assert in_both([Task("test/0")], [Task("train/0")]) == []
    yes = [Task(f"train/{i}", reference="yes") for i in range(3)]
    assert in_both([Task("test/0", reference="yes")], yes) == []
    assert in_both([Task("test/0", reference="yes"), Task("test/1", reference="yes")], yes[:1]) == []


def test_a_question_is_found_however_often_it_is_asked() -> None:
    def asked(name: str, text: str = "2 + 2?") -> Task:
        return Task(name, info={"prompt": text}, reference="4")

    twice = [asked("train/0"), asked("train/1"), asked("train/2", "3 + 1?")]
    assert in_both([asked("test/0"), asked("test/1", "1 + 3?")], twice) == ["test/0"]
    assert in_both([asked("test/0"), asked("test/1")], twice[:1]) == ["test/0", "test/1"]
    elsewhere = Task("train/0", info={"prompt": "2 + 2?", "row": 7}, reference="4")  # in another line of a file
    assert in_both([asked("test/0")], [elsewhere]) == ["test/0"]
    spaced = Task("train/0", info={"prompt": " 2 +  2?\n", "columns": {"source": "another book"}}, reference="four")
    assert in_both([asked("test/0")], [spaced]) == ["test/0"]
    after = Task("train/0", (Message(Role.SYSTEM, "In base 3."),), info={"prompt": "2 + 2?"}, reference="11")
    assert in_both([asked("test/0")], [after]) == []


def test_a_system_message_of_all_tasks_makes_none_the_same() -> None:
    def maze(name: str) -> Task:
        return Task(name, messages=(Message(Role.SYSTEM, "You walk a maze."),))

    assert in_both([maze("test/0"), maze("test/1")], [maze("train/0"), maze("train/1")]) == []


@pytest.mark.parametrize(
    ("evaluation", "stages", "where", "message"),
    [
        ({"split": "train"}, STAGES, "evaluation.split", "got:      train, which stages[0] draws from"),
        ({"split": "train"}, [*STAGES, IMPROVE], "evaluation.split", "which stages[0] and stages[1] draw from"),
        ({"validation_split": "train"}, [*STAGES, IMPROVE], "stages[0].split", "would be trained on"),
        ({"validation_split": "test"}, [*STAGES, IMPROVE], "evaluation.validation_split", "would be validated on"),
        ({}, [STAGES[0] | {"split": "dev"}, IMPROVE], "stages[0].split", "would be trained on"),
    ],
)
def test_a_run_that_would_train_on_its_judge_is_refused(
    tmp_path: Path, evaluation: dict[str, Any], stages: list[dict[str, Any]], where: str, message: str
) -> None:
    path = runs.write(tmp_path, stages, evaluation={"n_tasks": 6, **evaluation})
    with pytest.raises(RecipeError) as caught:
        runs.run(path, tmp_path / "run")
    assert caught.value.where == where and message in str(caught.value)
    assert "evaluation.allow_overlap" in caught.value.hint
    assert not (tmp_path / "run" / "demonstrations").exists()  # nothing was played


def test_tasks_listed_under_other_names_are_refused_too(tmp_path: Path) -> None:
    path = runs.write(tmp_path, STAGES, evaluation={"n_tasks": 6})
    world = tmp_path / "words.py"
    world.write_text(world.read_text().replace('f"words/{seed}"', 'f"words/{split}/{seed}"').replace("2000", "3"))
    with pytest.raises(RecipeError, match="such as words/test/3") as caught:
        runs.run(path, tmp_path / "run")
    assert "6 of 6 tasks" in caught.value.got


def test_a_split_that_is_trained_on_is_said_once_where_it_was_written(tmp_path: Path) -> None:
    path = runs.write(tmp_path, STAGES, evaluation={"n_tasks": 6})
    refused = run("train", path, "evaluation.split=train", "--out", tmp_path / "run")
    assert refused.exit_code == 2 and "caution" not in refused.stderr and not (tmp_path / "run").exists()
    assert "error evaluation.split: evaluation tasks would be trained on" in refused.stderr
    assert "expected: dev or test" in refused.stderr


def test_what_is_meant_is_allowed(tmp_path: Path) -> None:
    path = runs.write(tmp_path, STAGES, evaluation={"n_tasks": 6, "split": "train", "allow_overlap": True})
    done = run("train", path, "--out", tmp_path / "run", "--json")
    assert last_json(done)["success_after"] is not None and "caution" in done.stderr


def judged_by(recipe: Path, *overrides: str) -> None:
    """Ask the guard about the policy of a run of this recipe, evaluated with overrides."""
    loaded = load(recipe, overrides, is_trained=True)
    asked = EvaluationRequest(target=str(recipe), overrides=overrides)
    refuse_trained(asked, loaded, recipe.parent, suite_of_recipe(loaded).tasks())


def test_a_policy_is_judged_by_what_its_own_recipe_drew_from(tmp_path: Path) -> None:
    for name, first in (("own", 0), ("test", 20), ("new", 40)):
        rows = [json.dumps({"prompt": f"is {i}?", "reference": str(i)}) for i in range(first, first + 8)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    data = {"kind": "dataset", "train": "own.jsonl", "test": "test.jsonl"}
    recipe = runs.write(tmp_path, STAGES, environment=data, rewards={"right": {"kind": "exact_match"}})
    judged_by(recipe)
    judged_by(recipe, "environment.test=new.jsonl")
    with pytest.raises(RecipeError, match="8 of 8 tasks are in the split 'train'"):
        judged_by(recipe, "environment.test=own.jsonl", "environment.train=new.jsonl")
    judged_by(recipe, "environment={kind: ./words.py:Words}", "rewards={words: {kind: environment}}")


def test_tasks_that_are_ids_alone_are_found_in_the_same_environment_with_other_settings(tmp_path: Path) -> None:
    recipe = runs.write(tmp_path, STAGES, evaluation={"n_tasks": 4})
    world = tmp_path / "words.py"
    world.write_text(world.read_text().replace(', seed=seed, reference=" ".join(self.words(seed))', ""))
    judged_by(recipe, "environment.n_turns=3")
    with pytest.raises(RecipeError, match="4 of 4 tasks are in the split 'train'"):
        judged_by(recipe, "environment.n_turns=3", "evaluation.split=train")


def test_questions_in_a_file_that_was_learnt_from_judge_no_policy(tmp_path: Path) -> None:
    asked = [{"prompt": f"is {i}?", "reference": str(i)} for i in range(8)]
    (tmp_path / "test.jsonl").write_text("\n".join(json.dumps(row) for row in asked))
    chats, pairs = tmp_path / "chats.jsonl", tmp_path / "pairs.jsonl"
    chats.write_text("\n".join(json.dumps({"prompt": f"is  {i}?", "completion": "yes"}) for i in range(6, 20)))
    pairs.write_text("\n".join(json.dumps({"prompt": f"is {i}?", "chosen": "y", "rejected": "n"}) for i in range(7, 9)))
    data = {"kind": "dataset", "test": "test.jsonl"}
    parts = {"environment": data, "rewards": {"right": {"kind": "exact_match"}}}
    learnt = {"kind": "supervised", "data": {"path": "chats.jsonl"}, "epochs": 1}
    preferred = {"kind": "preference", "pairs": {"file": "pairs.jsonl"}}
    recipe = runs.write(tmp_path, [learnt], **parts)
    with pytest.raises(RecipeError, match=r"2 of 8 questions are in the file of stages\[0\], line 1, line 2"):
        judged_by(recipe)
    preference = runs.write(
        tmp_path / "p",
        [preferred | {"pairs": {"file": str(pairs)}}],
        **parts | {"environment": data | {"test": str(tmp_path / "test.jsonl")}},
    )
    with pytest.raises(RecipeError, match="1 of 8 questions"):
        judged_by(preference)
    chats.unlink()
    said: list[str] = []
    loaded = load(recipe, is_trained=True)
    asked_for = EvaluationRequest(target=str(recipe))
    refuse_trained(asked_for, loaded, tmp_path, suite_of_recipe(loaded).tasks(), said.append)
    assert len(said) == 1 and said[0].startswith("caution: not checked") and "chats.jsonl" in said[0]


def test_a_question_is_found_within_a_longer_text() -> None:
    question = "Tom has 3 apples and buys 5 more. How many has he?"
    asked = [Task(f"t{i}", info={"prompt": text}) for i, text in enumerate((question, "2 + 2?"))]
    texts = [
        "Tom has 3 apples and buys 5 more. How many have they?",
        f"Answer this question.\n\nQuestion: {question}\nAnswer:".replace("buys 5", "buys\n5"),
        "What is 2 + 2? Think first.",  # too short to be told from part of another question
        f"Tom has 3 apples and {question}",
    ]
    assert [_lines_asking(asked, [(text, 1)]) for text in texts] == [[], [1], [], [1]]
    assert _lines_asking(asked, [(" 2  + 2?", 4), (question, 7)]) == [4, 7]
    for glued in ("<question>{}</question>", '"{}"', "**{}**", "_{}_", "Q:{}", "1.{}", "{}A:"):
        assert _lines_asking(asked, [(glued.format(question), 1)]) == [1], glued
    assert _lines_asking(asked, [(f"Question: {question[:-1]}", 1)]) == [1]


@pytest.mark.parametrize(
    "question",
    [
        "小明有3个苹果，又买了5个，他一共有多少个苹果？",
        "太郎はりんごを3個持っていて、5個買いました。全部で何個ですか？",
    ],
    ids=["Chinese", "Japanese"],
)
def test_a_question_without_spaces_is_found_within_a_longer_text(question: str) -> None:
    asked = [Task("t", info={"prompt": question}), Task("short", info={"prompt": question[:10]})]
    for text in (question, f"Question: {question}\nAnswer:", f"问题：{question}答案：8"):
        assert _lines_asking(asked, [(text, 1)]) == [1], text
    # Other numbers are another question, and one of a few characters may be part of another.
    assert _lines_asking(asked, [(f"问题：{question.replace('5', '6')}", 1)]) == []


@pytest.mark.parametrize(
    "board", ["#####\n#.#.#\n#####", "#..#\n#.#.", "(()())", "🟥🟦🟥🟦", ". O .\n. . ."], ids=lambda board: board[-5:]
)
@pytest.mark.parametrize("form", ["{task}\n{board}", "{board}\n{task}"])
def test_a_question_with_another_board_is_another_question(form: str, board: str) -> None:
    task = "Find the way from the upper left to the lower right"
    asked = [Task("t", info={"prompt": form.format(task=task, board=board)})]
    for other in (board[:-1] + "+", "+" + board[1:], ""):
        assert _lines_asking(asked, [(f"Q: {form.format(task=task, board=other)} A: down", 1)]) == [], other
    assert _lines_asking(asked, [(f"Q: {form.format(task=task, board=board)} A: down", 1)]) == [1]


@pytest.mark.parametrize("edges", ['"{}"', "**{}**", "`{}`", "“{}”"])
def test_punctuation_at_the_ends_of_a_question_does_not_matter(edges: str) -> None:
    question = "Tom has 3 apples and buys 5 more. How many has he"
    asked = [Task("t", info={"prompt": edges.format(f"{question}?")})]
    for text in (f"{question}.", f"Q: {question}<br>A: 8", f"{question} > Answer: 8", f"**{question}** Think first"):
        assert _lines_asking(asked, [(text, 1)]) == [1], text


@pytest.mark.parametrize(
    "more",
    [
        *("{} + 4?", "{}+4?", "{}.5?", "{},500?", "{}4?"),
        *("{} * (4 + 1)?", "{} × 4?", "{} · 4?", "{} ÷ 4?", "{} ** 4?", "{} < 4?", "{} >= 4?"),
    ],
)
def test_a_longer_formula_is_another_question(more: str) -> None:
    begin = "What is the sum of these two numbers: 2 + 3"
    asked = [Task("t", info={"prompt": f"{begin}?"})]
    assert _lines_asking(asked, [(more.format(begin), 1)]) == []
    assert _lines_asking(asked, [(begin.replace("+", "-"), 1)]) == [] != _lines_asking(asked, [(begin, 1)])


def test_a_policy_of_parts_that_are_gone_is_judged_all_the_same(tmp_path: Path) -> None:
    recipe = runs.write(tmp_path, STAGES, environment={"kind": "python:environment"}, evaluation={"n_tasks": 4})
    judged_by(recipe, "environment={kind: ./words.py:Words}")


def test_of_an_adapter_nothing_is_known(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "base"}))
    recipe = load(runs.write(tmp_path / "recipe", STAGES, evaluation={"n_tasks": 4, "split": "train"}), is_trained=True)
    asked = EvaluationRequest(target=str(tmp_path), overrides=("policy.dtype=float32",), suite="words")
    refuse_trained(asked, recipe, tmp_path, suite_of_recipe(recipe).tasks())
