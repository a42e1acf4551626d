"""Groups of tasks by a column of the data, and the figures of each."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf.data import Outcome, Task
from rlhf.errors import RecipeError
from rlhf.evaluation.attempts import Attempt
from rlhf.evaluation.columns import _order, groups_by
from rlhf.evaluation.summary import summarize


def rows(*columns: dict[str, Any]) -> list[Task]:
    return [Task(f"d/{i}", info={"prompt": "?", "row": i, "columns": one}) for i, one in enumerate(columns)]


def test_numbers_are_in_order() -> None:
    assert sorted(["3", "-5", "1e-3", "0.5", "-10", "nan", "(none)", "+4"], key=_order) == [
        "-10", "-5", "1e-3", "0.5", "3", "+4", "nan", "(none)"
    ]  # fmt: skip


def test_groups_are_in_order_and_tasks_without_a_value_are_last() -> None:
    levels = ["Level 10", None, "Level 2", "", "Level 1.5", "Easy"]
    found = groups_by(rows(*({"level": one, "other": 1} for one in levels)), ["level", "other"])
    assert list(dict.fromkeys(found["level"].values())) == ["Easy", "Level 1.5", "Level 2", "Level 10", "(none)"]
    assert found["level"]["d/1"] == found["level"]["d/3"] == "(none)" and set(found["other"].values()) == {"1"}


def test_values_are_text_also_of_lists_nested_columns_and_falsehoods() -> None:
    tasks = rows({"meta": {"tags": ["a", "b"]}, "hard": False, "n": 0}, {"meta": {}, "hard": True, "n": 12})
    found = groups_by(tasks, ["meta.tags", "hard", "n"])
    assert found["meta.tags"] == {"d/0": "a, b", "d/1": "(none)"}
    assert found["hard"] == {"d/0": "False", "d/1": "True"} and found["n"] == {"d/0": "0", "d/1": "12"}


def test_an_environment_without_rows_has_what_its_tasks_say_of_themselves() -> None:
    tasks = [Task(f"level{i}/x", info={"level": i}) for i in (1, 0)]
    assert groups_by(tasks, ["level"]) == {"level": {"level0/x": "0", "level1/x": "1"}}


@pytest.mark.parametrize(
    ("tasks", "expected", "hint"),
    [
        (rows({"category": "x", "source": "y"}), "category, source", "did you mean 'category'?"),
        ([Task("t")], "tasks whose rows have other columns than prompt and reference", "name a column of the data"),
    ],
)
def test_a_column_that_no_task_has_is_refused(tasks: list[Task], expected: str, hint: str) -> None:
    with pytest.raises(RecipeError, match="no task has this column") as refused:
        groups_by(tasks, ["categroy"])
    assert (refused.value.got, refused.value.expected, refused.value.hint) == ("categroy", expected, hint)


def test_each_group_has_its_figures_by_hand() -> None:
    def tried(task: str, outcome: Outcome, brief: float) -> Attempt:
        score = float(outcome is Outcome.SOLVED)
        return Attempt("p", task, 0, outcome, score, rewards=(("right", score), ("brief", brief)))

    attempts = [tried("d/0", Outcome.SOLVED, 0.5), tried("d/1", Outcome.FAILED, 0.1), tried("d/2", Outcome.SOLVED, 1.0)]
    attempts.append(Attempt("p", "d/3", 0, Outcome.ENV_ERROR))
    groups = groups_by(rows(*({"subject": one} for one in ("law", "law", "art", "art", "unasked"))), ["subject"])
    found = summarize(attempts, by=groups)["by"]["subject"]
    assert list(found) == ["art", "law"]  # none of the tasks of the third was attempted
    assert found["law"] == summarize(attempts[:2])["types"]["d"]
    assert (found["law"]["success"]["value"], found["law"]["success"]["n"], found["law"]["n_tasks"]) == (0.5, 2, 2)
    assert found["law"]["rewards"]["brief"]["value"] == pytest.approx(0.3)
    assert (found["art"]["success"]["value"], found["art"]["n_errors"], found["art"]["n_tasks"]) == (1.0, 1, 2)
    assert "by" not in summarize(attempts)
