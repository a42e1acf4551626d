"""Files of questions as tasks: forms of files, columns, splits held apart, and success by a verifier of the recipe."""

from __future__ import annotations

import asyncio
import csv
import json
import math
import os
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from environments.check import check_environment
from environments.tasks.dataset import Dataset
from rlhf.build import reference_trial
from rlhf.build.reference_trial import try_references
from rlhf.build.train import train
from rlhf.errors import CheckpointError, EnvError, RecipeError, RewardError
from rlhf.recipe import dump, load
from tests.training import runs

SUMS = [{"question": f"What is {a} + {b}?", "answer": a + b} for a in range(12) for b in range(12)]


def lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def all_tasks(world: Dataset) -> dict[str, list[tuple[str, str | None]]]:
    return {s: [(str(t.info["prompt"]), t.reference) for t in world.tasks(s)] for s in world.splits}


CHOICE = {"preset": "multiple_choice"}
ARC = {"text": ["p", "q"], "label": ["1", "2"]}


# --- files ---


def test_all_forms_of_a_file_are_the_same_tasks(tmp_path: Path) -> None:
    plain = [
        {"question": 'One, "two"\nand three?', "answer": "3"},
        *({**row, "answer": str(row["answer"])} for row in SUMS),
    ]
    paths = [lines(tmp_path / "a.jsonl", plain)]
    (tmp_path / "a.json").write_text(json.dumps(plain))
    for name, mark in (("a.csv", ","), ("a.tsv", "\t")):
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, ["question", "answer"], delimiter=mark)
            writer.writeheader()
            writer.writerows(plain)
    pq.write_table(pa.Table.from_pylist(plain), tmp_path / "a.parquet")
    paths += [tmp_path / name for name in ("a.json", "a.csv", "a.tsv", "a.parquet")]
    first, *others = (all_tasks(Dataset(path=path)) for path in paths)
    assert sum(map(len, first.values())) == len(plain) and all(other == first for other in others)


def test_a_folder_of_datasets_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(SUMS).save_to_disk(tmp_path / "kept")
    lines(tmp_path / "a.jsonl", SUMS)
    assert all_tasks(Dataset(path=tmp_path / "kept")) == all_tasks(Dataset(path=tmp_path / "a.jsonl"))
    datasets.DatasetDict(train=datasets.Dataset.from_list(SUMS)).save_to_disk(tmp_path / "both")
    with pytest.raises(EnvError, match="several splits"):
        Dataset(path=tmp_path / "both").tasks("train")
    world = Dataset(train=tmp_path / "both" / "train")
    assert len(world.tasks("train")) == len(SUMS) and world.splits == ("train",)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    world = Dataset(train=lines(tmp_path / "a.jsonl", SUMS[:3]))
    assert len(world.tasks("train")) == 3
    os.utime(lines(tmp_path / "a.jsonl", SUMS[:5]), (0, 0))
    assert len(world.tasks("train")) == 5


# --- columns ---


@pytest.mark.parametrize(
    ("row", "keys", "prompt", "reference"),
    [
        ({"question": "Q", "answer": 7}, {}, "Q", "7"),
        ({"problem": "P", "solution": r"so \boxed{12}"}, {"preset": "math"}, "P", "12"),
        ({"question": "Q", "answer": "2 + 2 = 4\n#### 4"}, {"preset": "gsm8k"}, "Q", "4"),
        ({"q": "Q", "a": "x"}, {"prompt": "q", "reference": "a"}, "Q", "x"),
        ({"q": "How far?", "unit": "m"}, {"prompt": "{q} In {unit}."}, "How far? In m.", None),
        ({"question": "Q", "choices": ["p", "q"], "answer": 1}, CHOICE, "Q\nA. p\nB. q", "B"),
        ({"question": "Q", "choices": ["p", "q"], "answer": "a"}, CHOICE, "Q\nA. p\nB. q", "A"),
        ({"question": "Q", "choices": {"text": ["p", "q"]}, "answer": "q"}, CHOICE, "Q\nA. p\nB. q", "B"),
        ({"question": "Q", "choices": ["1", "2", "3"], "answer": "3"}, CHOICE, "Q\nA. 1\nB. 2\nC. 3", "C"),
        ({"question": "Q", "choices": ARC, "answer": "1"}, CHOICE, "Q\nA. p\nB. q", "A"),
        ({"question": "Q", "choices": ["2", "1"], "answer": "1"}, CHOICE, "Q\nA. 2\nB. 1", "B"),
        ({"question": "Q", "choices": ["2", "1"], "answer": 0}, CHOICE, "Q\nA. 2\nB. 1", "A"),
        ({"question": "Q", "choices": ["0", "1"], "answer": "1"}, CHOICE, "Q\nA. 0\nB. 1", "B"),
        ({"question": "Q", "choices": ["B", "A"], "answer": 1}, CHOICE, "Q\nA. B\nB. A", "B"),
        ({"question": "Q", "choices": {"text": ["B", "A"], "label": ["A", "B"]}, "answer": "A"}, CHOICE,
         "Q\nA. B\nB. A", "A"),
        ({"question": "Q", "choices": ["p", "q"], "answer": -1}, CHOICE, "Q\nA. p\nB. q", None),
        ({"question": "Q", "choices": ["True", "False"], "answer": True}, CHOICE, "Q\nA. True\nB. False", "A"),
        ({"question": "Q", "choices": ["yes", "true"], "answer": True}, CHOICE, "Q\nA. yes\nB. true", "B"),
        ({"question": "Q", "choices": ["p", "q"], "answer": 1.0}, CHOICE, "Q\nA. p\nB. q", "B"),
        ({"question": "Q", "choices": ["1.0", "2.0"], "answer": 1.0}, CHOICE, "Q\nA. 1.0\nB. 2.0", "A"),
        ({"question": "Q", "choices": ["p", "q"], "answer": math.nan}, CHOICE, "Q\nA. p\nB. q", None),
        ({"question": "Q", "answer": ["NYC", "New York"]}, {}, "Q", '["NYC", "New York"]'),
        ({"question": "Q", "golden_answers": ["São Paulo"]}, {}, "Q", "São Paulo"),
        ({"question": "Q", "answer": " "}, {}, "Q", None),
        ({"prompt": [{"role": "user", "content": "Q"}], "reward_model": {"ground_truth": "7"}}, {}, "Q", "7"),
        ({"prompt": "Q", "own": {"final": {"value": 7}}}, {"reference": "own.final.value"}, "Q", "7"),
    ],
)  # fmt: skip
def test_columns_are_found_named_or_made_of_several(
    tmp_path: Path, row: dict[str, Any], keys: dict[str, Any], prompt: str, reference: str | None
) -> None:
    [task] = Dataset(train=lines(tmp_path / "a.jsonl", [row]), **keys).tasks("train")
    assert (task.info["prompt"], task.reference) == (prompt, reference)


def test_chat_messages_come_before_the_question(tmp_path: Path) -> None:
    said = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}]
    [task] = Dataset(train=lines(tmp_path / "a.jsonl", [{"messages": said, "answer": "so"}])).tasks("train")
    assert [m.content for m in task.messages] == ["Be short."] and task.info["prompt"] == "Why?"


@pytest.mark.parametrize(
    ("text", "keys", "where", "says"),
    [
        ('{"question": "a", "answer": 1}\n{"qestion": "b", "answer": 1}', {}, "a.jsonl:2", "rename 'qestion' to"),
        ('{"question": "a"}\n\n[1]', {}, "a.jsonl:3", "no mapping"),
        ('{"question": "a"}\n{"question"', {}, "a.jsonl:2", "no JSON"),
        ('{"question": ""}', {}, "a.jsonl:1", "no question"),
        ('{"question": "a"}\n{"question": null}', {}, "a.jsonl:2", "an empty cell"),
        (json.dumps({"question": "long " * 300_000}), {}, "a.jsonl:1", "1,500,000 characters"),
        ('{"question": "a"}\n{"question": "b", "answer": 0}', {}, "a.jsonl:2", "reference: answer, with answer: null"),
        ('{"question": "a"}\n{"question": "b", "reward_model": {"ground_truth": 1}}', {}, "a.jsonl:2", "has an answer"),
        ("\n", {}, "environment.train", "no rows"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', {}, "a.jsonl:1", "the user's is the last"),
        ('{"question": "a"}', {"prompt": "qestion"}, "environment.prompt", "did you mean 'question'"),
        ('{"question": "a"}', {"prompt": "{questoin}!"}, "environment.prompt", "did you mean 'question'"),
        ('{"question": "a", "answer": {"text": 1}}', {}, "a.jsonl:1", "environment.reference=answer.text"),
        ('{"question": "a", "answer": 1}', {"reference": "anser"}, "environment.reference", "did you mean 'answer'"),
        ('{"text": "a"}', {}, "environment.prompt", "expected: text"),
        ('{"question": "a", "answer": "x"}', {"preset": "gsm8k"}, "a.jsonl:1", "####"),
        ('{"question": "a", "answer": {"x": 1}}', {}, "a.jsonl:1", "one text or number"),
        ('{"question": "a", "answer": [1, 2]}', {}, "a.jsonl:1", "a list of texts"),
        ('{"question": "a", "answer": ["1"]}', {"answer_pattern": "boxed"}, "a.jsonl:1", "one text or number"),
        ('{"question": "a", "choices": ["p", "q"], "answer": true}', CHOICE, "a.jsonl:1", "A to B"),
        ('{"question": "a", "choices": ["p", "q"], "answer": 0.5}', CHOICE, "a.jsonl:1", "A to B"),
        ('{"question": "a", "choices": ["p", "q"], "answer": "r"}', CHOICE, "a.jsonl:1", "A to B"),
        ('{"question": "a", "choices": ["p", "q"], "answer": -5}', CHOICE, "a.jsonl:1", "A to B"),
        ('{"question": "a", "choices": ["A", "O", "B", "AB"], "answer": "B"}', CHOICE, "a.jsonl:1", "B: C or B of"),
        ('{"question": "a", "choices": ["b", "a"], "answer": "a"}', CHOICE, "a.jsonl:1", "a: B or A of"),
        ('{"instruction": "a", "input": "b"}', {}, "environment.prompt", "prompt: '{instruction} {input}'"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_used_is_named(
    tmp_path: Path, text: str, keys: dict[str, Any], where: str, says: str
) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(EnvError) as refused:
        Dataset(train=tmp_path / "a.jsonl", **keys).tasks("train")
    assert where in str(refused.value.where) and says in str(refused.value)


def test_a_later_row_may_have_columns_that_hold_no_answer(tmp_path: Path) -> None:
    rows = [{"question": "a"}, {"question": "b", "answer": None, "label": " ", "level": 2}]
    assert [task.reference for task in Dataset(train=lines(tmp_path / "a.jsonl", rows)).tasks("train")] == [None, None]
    rows = [{"question": "a", "answer": None}, {"question": "b", "answer": 1}, {"question": "c"}]
    found = Dataset(train=lines(tmp_path / "b.jsonl", rows), reference="answer").tasks("train")
    assert [task.reference for task in found] == [None, "1", None]
    rows = [{"question": "a", "answer": 1}, {"question": "b", "answer": 2, "label": "easy"}]
    found = Dataset(train=lines(tmp_path / "c.jsonl", rows)).tasks("train")
    assert [task.reference for task in found] == ["1", "2"]
    tests = {"question": "b", "tests": "assert f() == 1", "answer": "see below"}  # no program
    found = Dataset(train=lines(tmp_path / "d.jsonl", [{**tests, "question": "a"}, tests]), tests="tests")
    assert len(found.tasks("train")) == 2


def test_a_file_that_is_not_there_is_told_with_what_is_like_it(tmp_path: Path) -> None:
    lines(tmp_path / "questions.jsonl", SUMS)
    with pytest.raises(EnvError, match=r"questions\.jsonl"):
        Dataset(path=tmp_path / "question.jsonl").tasks("train")
    (tmp_path / "a.csv").write_text("question,answer\nWhat, then?,3\n")
    with pytest.raises(EnvError, match="this row and the header differ in length") as refused:
        Dataset(path=tmp_path / "a.csv").tasks("train")
    assert str(refused.value.where).endswith("a.csv:2")
    (tmp_path / "twice.tsv").write_text("question\tanswer\tanswer\nWhat?\t3\t4\n")
    with pytest.raises(EnvError, match="two columns have one name") as refused:
        Dataset(path=tmp_path / "twice.tsv").tasks("train")
    assert str(refused.value.where).endswith("twice.tsv:1") and refused.value.expected == "one answer"
    (tmp_path / "unnamed.csv").write_text("question,answer,,\nWhat?,3,,\n")  # as sheets write columns without heads
    assert Dataset(train=tmp_path / "unnamed.csv").tasks("train")[0].reference == "3"
    (tmp_path / "b.csv").write_bytes("question,answer\nOù?,3\n".encode("latin-1"))
    with pytest.raises(EnvError, match="no UTF-8"):
        Dataset(path=tmp_path / "b.csv").tasks("train")
    (tmp_path / "c.csv").write_bytes("question,answer\nOù?,3\n".encode("utf-16"))
    with pytest.raises(EnvError, match="no UTF-8") as refused:
        Dataset(path=tmp_path / "c.csv").tasks("train")
    assert "utf-16" in str(refused.value.hint)
    pq.write_table(pa.table({"question": ["a"], "answer": [b"x"]}), tmp_path / "d.parquet")
    with pytest.raises(EnvError, match="one text or number"):
        Dataset(path=tmp_path / "d.parquet").tasks("train")


def test_other_columns_are_at_hand_for_rewards(tmp_path: Path) -> None:
    rows = [{"question": "Q", "answer": "A", "level": 3, "tags": ["x"]}]
    [task] = Dataset(train=lines(tmp_path / "a.jsonl", rows)).tasks("train")
    assert task.info["columns"] == {"level": 3, "tags": ["x"]}


def test_dates_and_empty_numbers_of_other_columns_are_plain_values(tmp_path: Path) -> None:
    table = {
        "question": ["Q"], "answer": ["A"], "at": [datetime(2026, 1, 2, 3)], "on": [date(2026, 1, 2)],
        "share": [math.nan], "cost": [Decimal("1.50")], "bounds": [[1.5, math.inf]], "image": [b"x"],
    }  # fmt: skip
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    [task] = Dataset(train=tmp_path / "a.parquet").tasks("train")
    assert task.info["columns"] == {
        "at": "2026-01-02T03:00:00", "on": "2026-01-02", "share": None, "cost": "1.50", "bounds": [1.5, None]
    }  # fmt: skip


# --- splits ---


def test_ratios_are_by_content_so_that_no_prompt_is_in_two(tmp_path: Path) -> None:
    rows = [*SUMS, *({"question": " " + str(row["question"]).replace(" ", "  "), "answer": 99} for row in SUMS)]
    found = all_tasks(Dataset(path=lines(tmp_path / "a.jsonl", rows)))
    prompts = [{" ".join(prompt.split()) for prompt, _ in tasks} for tasks in found.values()]
    assert sum(map(len, prompts)) == len(set().union(*prompts)) == len(SUMS)
    assert sum(map(len, found.values())) == 2 * len(SUMS)  # one prompt with two answers is two tasks of a split
    assert 0.65 < len(found["train"]) / len(rows) < 0.95


def test_more_rows_move_no_row_to_another_split(tmp_path: Path) -> None:
    few = all_tasks(Dataset(path=lines(tmp_path / "a.jsonl", SUMS[:70])))
    more = all_tasks(Dataset(path=lines(tmp_path / "b.jsonl", SUMS)))
    assert all(set(few[split]) <= set(more[split]) for split in few)


def test_a_column_or_files_name_the_splits(tmp_path: Path) -> None:
    rows = [{**row, "part": ("train", "validation", "test")[i % 3]} for i, row in enumerate(SUMS)]
    by_column = all_tasks(Dataset(path=lines(tmp_path / "a.jsonl", rows), split_column="part"))
    files = {name: lines(tmp_path / f"{name}.jsonl", SUMS[i::3]) for i, name in enumerate(("train", "dev", "test"))}
    assert by_column == all_tasks(Dataset(**files))
    with pytest.raises(EnvError, match="no such split"):
        Dataset(path=lines(tmp_path / "c.jsonl", [{**rows[0], "part": "trial"}]), split_column="part").tasks("train")


def test_splits_with_prompts_in_common_are_refused_by_line_or_held_apart(tmp_path: Path) -> None:
    files = {"train": lines(tmp_path / "a.jsonl", SUMS[:9]), "test": lines(tmp_path / "b.jsonl", SUMS[8:12])}
    with pytest.raises(EnvError, match=r"a\.jsonl:9 is b\.jsonl:1"):
        Dataset(**files).tasks("train")
    found = all_tasks(Dataset(**files, overlap="drop"))
    assert len(found["train"]) == 8 and len(found["test"]) == 4


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({}, "says where the data is"),
        ({"path": "a.jsonl", "train": "b.jsonl"}, "comes from one place"),
        ({"train": "a.jsonl", "split_column": "part"}, "belongs to path"),
        ({"path": "a.jsonl", "answer_pattern": "(("}, "no regular expression: missing"),
        ({"train": "a.jsonl", "split_ratios": {"train": 0.5, "dev": 0.5}}, "divided already"),
        ({"path": "a.jsonl", "split_column": "part", "split_ratios": {"train": 1.0}}, "divided already"),
        ({"path": "a.jsonl", "split_ratios": {"train": 0.5}}, "add up to 1"),
        ({"path": "a.jsonl", "split_ratios": {"trian": 1.0}}, "not of trian"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, Any], says: str) -> None:
    values = {"policy": {"kind": "from_scratch"}, "environment": {"kind": "dataset", **keys}, "stages": []}
    from rlhf.recipe.model import recipe_of

    with pytest.raises(RecipeError, match=says) as refused:
        recipe_of(values, name="x", base=Path())
    assert refused.value.where.startswith("environment.")
    python = {key: Path(value) if key in ("path", "train") else value for key, value in keys.items()}
    with pytest.raises(RecipeError, match=says) as direct:  # the same, and not as pydantic says it
        Dataset(**python)
    assert f"environment.{direct.value}" == str(refused.value)


def test_it_keeps_the_contract(tmp_path: Path) -> None:
    report = check_environment(Dataset(path=lines(tmp_path / "a.jsonl", SUMS)))
    assert report.ok, str(report)
    assert "plan(): knows a way for some task" in str(report)


@pytest.mark.parametrize("answers", [{}, {"reward_model": {"ground_truth": {"target": 24}}}], ids=["none", "parts"])
def test_rows_without_an_answer_to_give_keep_the_contract(tmp_path: Path, answers: dict[str, Any]) -> None:
    path = lines(tmp_path / "a.jsonl", [{"prompt": f"What is {i} + 1?", **answers} for i in range(40)])
    report = check_environment(Dataset(path=path), other_process=False)
    assert report.ok, str(report)


# --- recipes ---

MINE = "def judge(answer: str, reference: str) -> float:\n    return float(answer.strip().endswith(reference))\n"


def recipe(folder: Path, rewards: dict[str, Any], **keys: Any) -> Path:
    lines(folder / "sums.jsonl", [{"question": f"{a}+{b}", "answer": a + b} for a in range(6) for b in range(6)])
    (folder / "mine.py").write_text(MINE)
    policy = {"kind": "from_scratch", "hidden_size": 32, "n_layers": 1, "n_heads": 2, "max_context": 64}
    stages = [
        {"kind": "supervised", "n_demonstrations": 28, "epochs": 20, "batch_size": 4, "optimizer": {"lr": 5e-3}},
        {"kind": "policy_gradient", "steps": 2, "tasks_per_step": 4, "group_size": 4},
    ]
    values = {
        "policy": policy,
        "environment": {"kind": "dataset", "path": "sums.jsonl", **keys},
        "rewards": rewards,
        "limits": {"max_tokens": 6},
        "evaluation": {"n_tasks": 8},
        "stages": stages,
    }
    (folder / "sums.yaml").write_text(yaml.safe_dump(values))
    return folder / "sums.yaml"


def test_a_reward_that_compares_says_what_is_solved_unless_another_does(tmp_path: Path) -> None:
    short = {"kind": "turn_cost", "cost": 0.1}
    for rewards, success_threshold in (
        ({"right": {"kind": "numeric"}, "short": short}, {"right": 1.0, "short": None}),
        ({"short": short, "right": {"kind": "numeric"}}, {"short": None, "right": 1.0}),
        ({"right": {"kind": "numeric"}, "short": short | {"success_threshold": -0.1}}, {"right": None, "short": -0.1}),
        ({"short": short}, {"short": 1.0}),
    ):
        made = load(recipe(tmp_path, rewards))
        assert {name: w.success_threshold for name, w in made.rewards.items()} == success_threshold
    with pytest.raises(RecipeError, match="no reward defines when an attempt is solved"):
        load(recipe(tmp_path, {"short": short, "brief": short}))
    watched = {"short": short, "right": {"kind": "numeric", "monitor": True}}
    with pytest.raises(RecipeError, match="no other reward compares with the reference") as refused:
        load(recipe(tmp_path, watched))
    assert refused.value.where == "rewards.right" and "weight: 0" in (refused.value.hint or "")
    made = load(recipe(tmp_path, watched | {"right": {"kind": "numeric", "weight": 0}}))
    assert made.rewards["right"].success_threshold == 1.0
    load(recipe(tmp_path, watched | {"short": short | {"success_threshold": -0.1}}))


@pytest.mark.parametrize(
    "reward",
    [
        {"kind": "reward_model", "path": "runs/a/reward_model/0"},
        {"kind": "judge", "path": "a"},
        {"kind": "grade", "path": "a"},
        {"kind": "combine", "parts": {"a": {"reward": {"kind": "outcome_model", "path": "a"}}}},
    ],
    ids=lambda reward: reward["kind"],
)
def test_a_learned_reward_decides_alone_only_from_a_threshold_on(tmp_path: Path, reward: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="does not say when an attempt is solved") as refused:
        load(recipe(tmp_path, {"learned": reward}))
    assert refused.value.where == "rewards.learned" and "weight: 0" in (refused.value.hint or "")
    made = load(recipe(tmp_path, {"learned": reward | {"success_threshold": 0.3}}))
    assert made.rewards["learned"].success_threshold == 0.3
    made = load(recipe(tmp_path, {"learned": reward, "right": {"kind": "numeric", "weight": 0}}))
    assert {name: w.success_threshold for name, w in made.rewards.items()} == {"learned": None, "right": 1.0}


def test_a_judge_that_says_yes_or_no_decides_alone(tmp_path: Path) -> None:
    made = load(recipe(tmp_path, {"learned": {"kind": "grade", "path": "a", "scale": "yes_no"}}))
    assert made.rewards["learned"].success_threshold == 1.0


def test_a_reward_that_decides_in_a_stage_decides_alone(tmp_path: Path) -> None:
    path = recipe(tmp_path, {"right": {"kind": "numeric"}})
    made = load(path, ["stages.1.rewards={strict: {kind: exact_match, success_threshold: 0.5}}"])
    found = made.at(made.stages[1]).rewards
    assert {name: one.success_threshold for name, one in found.items()} == {"right": None, "strict": 0.5}


def test_a_file_in_the_current_folder_is_found_again_from_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe(tmp_path, {"right": {"kind": "numeric"}})
    (tmp_path / "config").mkdir()
    path = path.rename(tmp_path / "config" / "sums.yaml")
    monkeypatch.chdir(tmp_path)
    assert yaml.safe_load(dump(load(path)))["environment"]["path"] == str(tmp_path / "sums.jsonl")


def test_the_whole_reply_is_the_answer_and_there_is_one(tmp_path: Path) -> None:
    path = recipe(tmp_path, {"right": {"kind": "numeric"}})
    made = load(path)
    assert made.agent.format == "text" and made.agent.system == ""  # type: ignore[attr-defined]
    assert made.limits.max_turns == 1
    assert load(path, ["agent.format=tagged"]).agent.format == "tagged"  # type: ignore[attr-defined]
    assert load(path, ["limits.max_turns=2"]).limits.max_turns == 2
    parts = {name: {"environment": {"kind": "dataset", "path": "sums.jsonl"}, "weight": 1} for name in ("a", "b")}
    mixed = yaml.safe_load(path.read_text()) | {"environment": {"kind": "mixed", "parts": parts}}
    path.write_text(yaml.safe_dump(mixed))
    made = load(path)
    assert made.agent.format == "text" and made.rewards["right"].success_threshold == 1.0  # type: ignore[attr-defined]


def test_wrong_uses_of_success_threshold_are_refused(tmp_path: Path) -> None:
    for wrong, says in (
        ({"success_threshold": "1"}, "a number"),
        ({"success_threshold": 1, "monitor": True}, "does not define success"),
    ):
        with pytest.raises(RecipeError, match=says):
            load(recipe(tmp_path, {"right": {"kind": "numeric"}, "other": {"kind": "numeric", **wrong}}))
    two = {name: {"kind": "numeric", "success_threshold": 1} for name in ("a", "b")}
    with pytest.raises(RecipeError, match="only one reward may have success_threshold"):
        load(recipe(tmp_path, two))
    path = recipe(tmp_path, {"right": {"kind": "numeric"}})
    with pytest.raises(RecipeError, match="before rewards are computed"):
        load(path, ["stages.1.rollout={kind: retry, retries: 1}"])
    assert load(path, ["stages.1.rollout={kind: retry, retries: 1, until: end}"])


def test_a_run_learns_from_a_file_and_a_verifier_of_ones_own(tmp_path: Path) -> None:
    done = runs.run(recipe(tmp_path, {"right": {"kind": "./mine.py:judge"}}), tmp_path / "run")
    solved, worth = (runs.curve(done.folder, name) for name in ("rollout/success", "reward/right"))
    assert solved == worth and max(solved) > 0  # what is solved is what the verifier says, and nothing else


def test_a_run_does_not_go_on_with_another_file(tmp_path: Path) -> None:
    path = recipe(tmp_path, {"right": {"kind": "./mine.py:judge"}})
    done = runs.run(path, tmp_path / "run")
    with (tmp_path / "sums.jsonl").open("a") as file:
        file.write('{"question": "7+7", "answer": 14}\n')
    with pytest.raises(CheckpointError, match=r"sums\.jsonl sha256"):
        train(load(done.folder, ["stages.1.steps=3"]), None, resume=done.folder)


def test_a_verifier_that_hangs_is_given_one_form_of_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_trial, "_ENOUGH_S", 0.0)  # one reference, however slow it is
    path, calls = recipe(tmp_path, {"right": {"kind": "./slow.py:judge"}}), tmp_path / "calls"
    (tmp_path / "slow.py").write_text(
        "import time\n\ndef judge(answer: str, reference: str) -> float:\n"
        f"    open({str(calls)!r}, 'a').write('x')\n    time.sleep(2)\n    return 1.0\n"
    )
    with pytest.raises(RewardError, match="the reward fails"):
        asyncio.run(try_references(load(path, ["limits.reward_timeout_s=0.5"]), lambda text: None))
    assert calls.read_text() == "xx", "a reply that is nonsense, and a reference"


def test_a_verifier_may_want_a_form_and_one_that_takes_anything_is_cautioned_of(tmp_path: Path) -> None:
    cases = (
        ("answer == '#### ' + reference", ""),
        ("answer == 'The answer is ' + reference", ""),
        ("True", "nonsense"),
    )
    for name, (right, says) in zip("abc", cases, strict=True):
        path = recipe(tmp_path, {"right": {"kind": f"./{name}.py:judge"}})
        (tmp_path / f"{name}.py").write_text(MINE.replace("answer.strip().endswith(reference)", right))
        said: list[str] = []
        asyncio.run(try_references(load(path), said.append))
        assert said.pop().endswith("for right: 100.0%")
        assert len(said) == bool(says) and says.replace("nonsense", "'colourless green ideas'") in "".join(said), said
