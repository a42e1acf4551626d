"""`rlhf compare` on evaluations and runs whose attempts are written by hand."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf.build.record import write_record
from rlhf.data import Action, Failure, Outcome, Score, ScoredGroup, Trajectory, Turn, Verdict
from rlhf.digests import write_listed
from rlhf.evaluation.contrib.leaderboard import title_of
from rlhf.evaluation.judging import differences, judged_by, settings_of
from rlhf.evaluation.paired import holm, mcnemar, n_tasks_needed
from rlhf.evaluation.store import TrajectoryWriter
from rlhf.recipe import load
from rlhf.recipe.model import values_of
from rlhf.viewer.attempts import Attempts
from rlhf.viewer.evaluation_views import paired
from tests.commands import last_json, run
from tests.evaluation.pages import Page


def write(
    folder: Path,
    solved: Mapping[str, Sequence[bool | None]],
    *,
    stage: str = "tasks",
    step: int = 0,
    opening: str = "A door.",
    is_run: bool = False,
) -> Path:
    """Write the evaluation of a policy that solved these attempts; None is an attempt whose environment crashed."""
    groups = []
    for task, found in solved.items():
        turns = (Turn(Action("go"), "ok"),)
        trajectories = [
            Trajectory(task, i, opening, turns, Outcome.SOLVED if ok else Outcome.TURN_LIMIT)
            for i, ok in enumerate(found)
            if ok is not None
        ]
        scores = [Score({"s": Verdict(2.0 * t.solved)}, (2.0 * t.solved,), 2.0 * t.solved) for t in trajectories]
        failures = [Failure(i, Outcome.ENV_ERROR, "crashed") for i, ok in enumerate(found) if ok is None]
        groups.append(ScoredGroup(task, tuple(trajectories), tuple(scores), tuple(failures)))
    TrajectoryWriter(folder / "trajectories").write_groups(stage, step, "eval", groups)
    (folder / ("recipe.yaml" if is_run else "evaluation.yaml")).write_text("")
    return folder


def tasks(solved: Sequence[bool | None], prefix: str = "house/test") -> dict[str, list[bool | None]]:
    return {f"{prefix}/{i}": [x] for i, x in enumerate(solved)}


def test_one_attempt_each_by_hand(tmp_path: Path) -> None:
    # 40 tasks: 20 solved by both, 12 by the second alone, 3 by the first alone, 5 by neither
    first = write(tmp_path / "first", tasks([True] * 20 + [False] * 12 + [True] * 3 + [False] * 5))
    second = write(tmp_path / "second", tasks([True] * 20 + [True] * 12 + [False] * 3 + [False] * 5))
    [row] = last_json(run("compare", first, second, "--json"))["comparisons"]
    assert (row["n_better"], row["n_worse"], row["n_tasks"], row["test"]) == (12, 3, 40, "mcnemar")
    assert row["p_value"] == row["p_holm"] == mcnemar(12, 3)
    assert row["difference"] == pytest.approx(9 / 40)
    # variance of the differences: (15 − 9²/40) / 39
    deviation = ((15 - 81 / 40) / 39) ** 0.5
    assert row["needed"] == {"0.05": n_tasks_needed(deviation, 0.05), "0.225": n_tasks_needed(deviation, 0.225)}
    assert [flip["task"] for flip in row["flipped"]] == sorted(f"house/test/{i}" for i in range(20, 32)) + sorted(
        f"house/test/{i}" for i in (32, 33, 34)
    )
    assert row["flipped"][0]["look"][0] == f"rlhf trajectories {first} --task house/test/20"


def test_the_table_names_flipped_tasks_and_the_tasks_needed(tmp_path: Path) -> None:
    first = write(tmp_path / "first", tasks([True] * 5 + [False] * 15))
    second = write(tmp_path / "second", tasks([False] * 2 + [True] * 18))
    result = run("compare", first, second, "--limit", "1", "--difference", "0.1")
    assert result.exit_code == 0
    words = " ".join(result.stdout.split())
    assert "second against first: success 25.0% → 90.0%, difference +65.0%" in words and "15 better, 2 worse" in words
    assert "to see +10.0%" in words and "and 15 more" in words and "McNemar" in words
    assert "disagree" not in words


def test_a_p_value_and_an_interval_that_disagree_are_explained(tmp_path: Path) -> None:
    # 5 better, none worse, of 20: p is 2^-5, and the interval begins at -3.4%
    first = write(tmp_path / "first", tasks([False] * 20))
    second = write(tmp_path / "second", tasks([True] * 5 + [False] * 15))
    words = " ".join(run("compare", first, second).stdout.split())
    assert "(95% interval -3.4% to" in words and "p 0.0312" in words
    assert "p and the interval disagree: they are of two methods" in words


def test_ids_of_flipped_tasks_are_whole_in_a_narrow_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "textworld_express/cookingworld/numLocations=1,numIngredients=1,includeDoors=0/test"
    first, second = (
        write(tmp_path / name, tasks([ok] * 3, long)) for name, ok in (("before-the-first-step", False), ("b", True))
    )
    for width in ("60", "80", "200"):
        monkeypatch.setenv("COLUMNS", width)
        lines = run("compare", first, second).stdout.splitlines()
        for i in range(3):
            [row] = [line for line in lines if line.startswith(f"{long}/{i} ")]
            assert row.split() == [f"{long}/{i}", "0.0%", "100.0%"]


def test_several_are_corrected_for_their_number(tmp_path: Path) -> None:
    base = write(tmp_path / "base", tasks([False] * 20))
    some = [write(tmp_path / str(n), tasks([True] * n + [False] * (20 - n))) for n in (1, 4, 8)]
    rows = last_json(run("compare", base, *some, "--json"))["comparisons"]
    plain = [mcnemar(n, 0) for n in (1, 4, 8)]
    assert [row["p_value"] for row in rows] == plain
    assert [row["p_holm"] for row in rows] == pytest.approx(holm(plain))


def test_several_attempts_count_once_for_each_task_and_errors_not_at_all(tmp_path: Path) -> None:
    first = write(tmp_path / "first", {f"t/{i}": [i % 2 == 0, None, False] for i in range(10)})
    second = write(tmp_path / "second", {f"t/{i}": [True, None, None] for i in range(12)})
    result = run("compare", first, second, "--json")
    [row] = last_json(result)["comparisons"]
    assert (row["n_tasks"], row["n_unpaired"], row["test"]) == (10, 2, "permutation")
    assert row["difference"] == pytest.approx(0.75)  # 1/2 on five tasks, 1 on the others
    assert (row["n_errors"], row["n_attempts"]) == ([10, 24], [20, 12])
    assert "2 tasks are left out: only one side has an attempt without an error at them" in result.stderr
    [scored] = last_json(run("compare", first, second, "--metric", "score", "--json"))["comparisons"]
    assert scored["difference"] == pytest.approx(1.5)


def test_runs_are_compared_by_their_last_evaluation(tmp_path: Path) -> None:
    a = write(tmp_path / "a" / "run", tasks([False] * 8), stage="before", is_run=True)
    write(a, tasks([True] * 8), stage="after", step=30, is_run=True)
    b = write(tmp_path / "b" / "run", tasks([True] * 5 + [False] * 3))
    [row] = last_json(run("compare", a, b, "--json"))["comparisons"]
    assert (row["n_better"], row["n_worse"]) == (0, 3)
    assert (row["first"], row["second"]) == (str(a), str(b))  # both folders are called run


def begun(folder: Path, stage: str, step: int, n_steps: int) -> None:
    """Make a folder that of a run which logged this step of a stage last."""
    (folder / "recipe.yaml").write_text(f"stages: [{{kind: supervised}}, {{kind: {stage[2:]}, steps: {n_steps}}}]")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": step, "stage": stage, "time": 1.0}) + "\n")


def test_it_says_when_runs_were_measured_and_which_have_not_ended(tmp_path: Path) -> None:
    done = write(tmp_path / "done", tasks([True] * 8), stage="after", step=30, is_run=True)
    half = write(tmp_path / "half", tasks([False] * 8), stage="before", is_run=True)
    begun(half, "1-policy_gradient", 33, 500)
    result = run("compare", done, half)
    assert "measured: done after training, step 30; half before RL, step 0" in result.stdout
    wanted = [
        "half was measured before RL, and its run is not finished, it is at step 33 of 500 of 1-policy_gradient; "
        f"resume it: rlhf train --resume {half}",
        "not measured at the same time of a run: done after training and half before RL",
    ]
    assert result.stderr.splitlines() == [f"caution {text}" for text in wanted]
    other = write(tmp_path / "other", tasks([True] * 8), stage="after", step=30, is_run=True)
    plain = run("compare", half, done, other, "--json")
    row, last = last_json(plain)["comparisons"]
    assert row["cautions"][0] == last["cautions"][0] == wanted[0] and len(row["cautions"]) == 2
    assert plain.stderr.count(wanted[0]) == 1
    assert row["measured"] == [
        {"phase": "before", "step": 0, "is_finished": False},
        {"phase": "after", "step": 30, "is_finished": True},
    ]
    own = write(tmp_path / "own", tasks([True] * 8))
    (own / "summary.json").write_text("{}")
    mixed = run("compare", own, done)
    assert "measured: own by `rlhf evaluate`; done after training, step 30" in mixed.stdout and not mixed.stderr
    assert "measured" not in run("compare", own, own).stdout


JUDGED = {
    "environment": {"kind": "dataset", "path": "/a/rows.jsonl", "train": "a.jsonl", "columns": {"prompt": "q"}},
    "rewards": {"right": {"kind": "math", "weight": 1.0}, "short": {"kind": "turn_cost", "cost": 0.1}},
    "limits": {"max_turns": 3, "max_tokens": 8},
    "evaluation": {"temperature": 1.0, "seed": 20_000, "n_tasks": 10},
}


#: Agent that gives one answer to every question.
SAYS = """
from dataclasses import dataclass

from rlhf.data import Action


@dataclass(frozen=True)
class Says:
    async def act(self, history, policy):
        return Action("3")
"""


def judged_run(folder: Path, solved_by: str | None, code: Mapping[str, str] | None = None, **changes: Any) -> Path:
    """Run with these recipe keys, the reward that decided what it solved, and digests of its files."""
    write(folder, tasks([True, False]), stage="after", step=3, is_run=True)
    (folder / "recipe.yaml").write_text(json.dumps({**JUDGED, **changes}))
    record = {"solved_by": {"tasks": solved_by}, **({"code": code} if code is not None else {})}
    (folder / "versions.json").write_text(json.dumps(record))
    (folder / "result.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("changes", "solved_by", "said"),
    [
        ({}, "right", ""),
        ({"rewards": {"right": {"kind": "exact_match"}}}, "right", "solved_by.kind math and exact_match"),
        (
            {"rewards": {"right": {"kind": "math", "success_threshold": 0.5}}},
            None,
            "solved_by.success_threshold 1.0 and 0.5",
        ),
        ({}, None, "solved_by.kind math and the environment"),
        ({"limits": {"max_turns": 9}}, "right", "limits.max_turns 3 and 9"),
        ({"environment": {**JUDGED["environment"], "columns": {"prompt": "p"}}}, "right", "columns.prompt q and p"),
        ({"evaluation": {"temperature": 0.0}}, "right", "sampling.temperature 1.0 and 0.0"),
        # what it is trained with, limits of the policy, places, and the name of the reward decide nothing
        ({"rewards": {"right": {"kind": "math", "weight": 2.0}, "long": {"kind": "overlong"}}}, "right", ""),
        ({"rewards": {"good": {"kind": "math", "weight": 1.0}}}, "good", ""),
        ({"limits": {"max_turns": 3, "max_tokens": 99}}, "right", ""),
        ({"environment": {**JUDGED["environment"], "path": "/b/rows.jsonl", "train": "b.jsonl"}}, "right", ""),
    ],
)
def test_runs_that_were_not_judged_alike_are_told_and_ranked_apart(
    tmp_path: Path, changes: dict[str, Any], solved_by: str | None, said: str
) -> None:
    runs = judged_run(tmp_path / "a", "right"), judged_run(tmp_path / "b", solved_by, **changes)
    [row] = last_json(run("compare", *runs, "--json"))["comparisons"]
    assert row["cautions"] == [caution for caution in row["cautions"] if "a and b were not judged alike" in caution]
    assert said in " ".join(row["cautions"]) and bool(row["cautions"]) is bool(said)
    boards = last_json(run("leaderboard", *runs, "--json"))["boards"]
    assert len(boards) == 1 + bool(said) and all(bool(board["settings"]) is bool(said) for board in boards)


def test_what_the_recipes_of_two_runs_differ_in_is_told(tmp_path: Path) -> None:
    stages = [{"kind": "policy_gradient", "steps": n, "optimizer": {"lr": lr}} for n, lr in ((4, 3e-4), (6, 1e-3))]
    runs = [judged_run(tmp_path / str(i), "right", name=str(i), seed=i, stages=[stages[i]]) for i in range(2)]
    found = run("compare", *runs)
    assert "recipes: seed 0 and 1; stages.0.steps 4 and 6; stages.0.optimizer.lr 0.0003 and 0.001" in found.output
    [row] = last_json(run("compare", *runs, "--json"))["comparisons"]
    assert row["recipe_differences"]["stages.0.steps"] == [4, 6]
    for name, keys in (("same", {}), ("older", {"key_of_before": 3})):
        other = judged_run(tmp_path / name, "right", seed=0, stages=[stages[0] | keys])
        assert "recipes:" not in run("compare", runs[0], other).output


def test_names_with_dots_in_them_are_keys_of_a_recipe_too(tmp_path: Path) -> None:
    runs = [
        judged_run(tmp_path / name, "math.right", rewards={"math.right": {"kind": "outcome", "weight": weight}})
        for name, weight in (("a", 1.0), ("b", 2.0))
    ]
    assert "recipes: rewards.math.right.weight 1.0 and 2.0" in run("compare", *runs).output


def test_runs_that_do_not_say_what_decided_are_compared_as_far_as_they_say(tmp_path: Path) -> None:
    runs = [judged_run(tmp_path / name, "right") for name in "ab"]
    (runs[1] / "versions.json").unlink()
    (runs[1] / "recipe.yaml").write_text("")
    [row] = last_json(run("compare", *runs, "--json"))["comparisons"]
    assert row["cautions"] == [] and len(last_json(run("leaderboard", *runs, "--json"))["boards"]) == 1
    for name, text in (("recipe.yaml", "rewards: 3"), ("versions.json", "{")):
        (runs[1] / name).write_text(text)
        damaged = run("compare", *runs).stderr
        assert "this file is damaged" in damaged and name in damaged
        (runs[1] / name).write_text("{}")


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"rewards.right.kind": "j.py a"}, {"rewards.right.kind": "j.py a"}, ""),
        ({"rewards.right.kind": "j.py a"}, {"rewards.right.kind": "j.py b"}, "solved_by.code j.py a and j.py b"),
        ({"rewards.right.kind": "j.py a"}, {"rewards.right.reward.kind": "j.py a"}, ""),
        ({"environment.kind": "e.py a"}, {"environment.environment.kind": "e.py b"}, "environment.code e.py a and"),
        # an older version kept no digests; other rewards, agents and programs of agents decide nothing
        ({"rewards.right.kind": "j.py a"}, None, ""),
        ({"rewards.long.kind": "j.py a"}, {"rewards.long.kind": "j.py b"}, ""),
        ({"agent.kind": "g.py a"}, {"agent.kind": "g.py b"}, ""),
        ({"environment.command.0": "g.py a"}, {"environment.command.0": "g.py b"}, ""),
    ],
)
def test_a_verifier_or_environment_whose_file_was_edited_is_told_and_ranked_apart(
    tmp_path: Path, first: dict[str, str], second: dict[str, str] | None, said: str
) -> None:
    runs = judged_run(tmp_path / "a", "right", first), judged_run(tmp_path / "b", "right", second)
    [row] = last_json(run("compare", *runs, "--json"))["comparisons"]
    assert said in " ".join(row["cautions"]) and bool(row["cautions"]) is bool(said)
    assert len(last_json(run("leaderboard", *runs, "--json"))["boards"]) == 1 + bool(said)


def test_evaluations_before_and_after_an_edit_of_the_verifier_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(f'{{"prompt": "is {i}?", "reference": "{i}"}}' for i in range(60)))
    judge, suite = tmp_path / "judge.py", tmp_path / "sums.yaml"
    suite.write_text(
        "rewards: {right: {kind: './judge.py:judge'}}\nlimits: {max_turns: 1, max_tokens: 8}\n"
        "parts: {sums: {environment: {kind: dataset, path: rows.jsonl}}}\n"
    )
    (tmp_path / "says.py").write_text(SAYS)
    folders = [tmp_path / name for name in ("one", "same", "edited")]
    for folder in folders:
        more = "  # of the last word" * (folder.name == "edited")
        judge.write_text(f"def judge(answer, reference):\n    return float(answer == reference){more}\n")
        last_json(run("evaluate", f"{tmp_path / 'says.py'}:Says", "--suite", suite, "--out", folder, "--json"))
    same, edited = last_json(run("compare", *folders, "--json"))["comparisons"]
    assert same["cautions"] == []
    [told] = edited["cautions"]
    assert re.search(r"were not judged alike: \S*solved_by.code judge.py sha256:\w+ and judge.py sha256:\w+", told)
    found = last_json(run("leaderboard", *folders, "--json"))["boards"]
    assert sorted(len(board["rows"]) for board in found) == [1, 2]


def test_files_of_one_name_share_a_board_where_their_tasks_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    for folder in (folders := [tmp_path / name for name in ("one", "same", "other")]):
        folder.mkdir()
        level = 2 if folder.name == "other" else 1  # a column: the ids of the tasks are of prompt and reference alone
        rows = [f'{{"prompt": "is {i}?", "reference": "{i}", "level": {level}}}' for i in range(60)]
        (folder / "rows.jsonl").write_text("\n".join(rows))
        (folder / "sums.yaml").write_text(
            "rewards: {right: {kind: exact_match}}\nlimits: {max_turns: 1, max_tokens: 8}\n"
            f"parts: {{sums: {{environment: {{kind: dataset, path: {folder / 'rows.jsonl'}}}}}}}\n"
        )
        words = ("evaluate", f"{tmp_path / 'says.py'}:Says", "--suite", folder / "sums.yaml", "--out", folder / "out")
        last_json(run(*words, "--json"))
    found = last_json(run("leaderboard", *(folder / "out" for folder in folders), "--json"))["boards"]
    assert sorted(len(board["rows"]) for board in found) == [1, 2]
    assert all("parts.sums.tasks" in board["settings"] for board in found)
    outs = [(folder / "out").rename(tmp_path / f"{folder.name}-out") for folder in folders]
    same, other = last_json(run("compare", *outs, "--json"))["comparisons"]
    assert same["cautions"] == []
    assert other["cautions"] == ["the tasks of sums in one-out and other-out have equal ids and other contents"]
    plan = json.loads((outs[2] / "summary.json").read_text())
    del plan["data"]["sums"]["tasks"]  # as a version wrote it that kept no digest
    write_listed(outs[2] / "summary.json", json.dumps(plan))
    [row] = last_json(run("compare", outs[0], outs[2], "--json"))["comparisons"]
    assert row["cautions"] == []


def questions(folder: Path) -> Path:
    """A recipe on questions of a file, of whose two rewards one compares with the reference."""
    (folder / "rows.jsonl").write_text("\n".join(f'{{"prompt": "is {i}?", "reference": "{i}"}}' for i in range(60)))
    values = {
        "policy": {"kind": "from_scratch"},
        "environment": {"kind": "dataset", "path": "rows.jsonl"},
        "rewards": {"short": {"kind": "turn_cost"}, "right": {"kind": "exact_match"}},
        "limits": {"max_tokens": 4},
        "stages": [{"kind": "policy_gradient"}],
    }
    (path := folder / "own.yaml").write_text(json.dumps(values))
    return path


def test_a_run_records_the_verifier_that_decides_where_no_key_says_so(tmp_path: Path) -> None:
    recipe = load(str(questions(tmp_path)))
    write_record(tmp_path, recipe)
    found = settings_of(tmp_path, is_run=True)
    assert found["parts"]["tasks"]["solved_by"]["kind"] == "exact_match"
    assert found["parts"]["tasks"] == judged_by(values_of(recipe), "right") and found["sampling"] == {
        "temperature": 1.0
    }


def test_a_page_tells_runs_of_one_name_apart_and_leaves_the_command_out(tmp_path: Path) -> None:
    def cautions(*folders: Path) -> list[str]:
        first, second = ((Attempts(folder / "trajectories"), "before") for folder in folders)
        found: list[str] = paired(first, second)["cautions"]
        return found

    a, b, c = (tmp_path / name for name in ("a/coin", "b/coin", "c/other"))
    for folder in (a, b, c):
        begun(write(folder, tasks([True] * 4), stage="before", is_run=True), "0-supervised", 3, 9)
    stands = "was measured before RL, and its run is not finished, it is at step 3 of 0-supervised"
    assert cautions(a, b) == [f"{a} {stands}", f"{b} {stands}"]
    assert cautions(a, c) == [f"coin {stands}", f"other {stands}"]
    begun(write(a, tasks([False] * 4), stage="1-policy_gradient", step=5, is_run=True), "1-policy_gradient", 5, 9)
    late = paired((Attempts(a / "trajectories"), "before"), (Attempts(a / "trajectories"), "1-policy_gradient"))
    assert [text.split(" was ")[0] for text in late["cautions"]] == ["coin"]
    evaluations = [write(tmp_path / name, tasks([True] * 4)) for name in ("d", "e")]
    first, second = ((Attempts(folder / "trajectories"), "") for folder in evaluations)
    again = "is not finished; run its command again to resume it"
    assert paired(first, second)["cautions"] == [f"d {again}", f"e {again}"]


def test_a_run_without_metrics_is_not_finished_either(tmp_path: Path) -> None:
    runs = [write(tmp_path / name, tasks([True] * 8), stage="before", is_run=True) for name in ("a", "b")]
    (runs[0] / "result.json").write_text("{}")
    [row] = last_json(run("compare", *runs, "--json"))["comparisons"]
    [caution] = row["cautions"]
    assert caution.startswith("b was measured before RL, and its run is not finished; resume it")


def test_nothing_follows_the_last_comparison(tmp_path: Path) -> None:
    first, second = (write(tmp_path / name, tasks([i == 0, True])) for i, name in enumerate(("first", "second")))
    printed = run("compare", first, second, first).stdout
    assert printed.count("\n\n") == 1 and not printed.endswith("\n\n")


def test_a_run_alone_is_compared_with_itself_before_training(tmp_path: Path) -> None:
    course = [("before", 0, 4), ("1-policy_gradient", 5, 6), ("after", 9, 9)]
    for stage, step, n in course:
        folder = write(tmp_path / "a", tasks([i < n for i in range(12)]), stage=stage, step=step, is_run=True)
    result = run("compare", folder)
    words = " ".join(result.stdout.split())
    assert "after training against before RL: success 33.3% → 75.0%, difference +41.7%" in words
    assert "5 better, 0 worse" in words
    assert "measured: before RL, step 0; after training, step 9" in words and not result.stderr

    stopped = write(tmp_path / "b", tasks([True]), stage="before", is_run=True)
    assert "a comparison needs two evaluations" in run("compare", stopped).stderr
    write(stopped, tasks([True]), stage="1-policy_gradient", step=5, is_run=True)
    found = run("compare", stopped)
    assert "during 1-policy_gradient against before RL" in found.stdout
    assert found.stderr.count("is not finished") == 1 and "not measured at the same time" not in found.stderr


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "first", tasks([True] * 4))
    other = write(tmp_path / "other", tasks([True] * 4, "flat/test"))
    moved = write(tmp_path / "moved", tasks([True] * 4), opening="A wall.")
    for arguments, message in (
        ([first], "a comparison needs two evaluations"),
        ([first, tmp_path / "nothing"], "there is no evaluation in this folder"),
        ([first, other], "the two evaluations share no task"),
        ([first, moved], "tasks with equal ids differ in content"),
    ):
        result = run("compare", *arguments)
        assert result.exit_code == 2 and message in result.stderr


def test_a_leaderboard_tells_evaluations_of_one_policy_apart(tmp_path: Path) -> None:
    first, second = (write(tmp_path / name, tasks([True] * n + [False] * n)) for name, n in (("one", 4), ("two", 4)))
    other = write(tmp_path / "three", tasks([False] * 8))
    for folder, policy in ((first, "m"), (second, "m"), (other, "random")):
        named = {"suite": "houses", "policy": policy, "attempts": 1, "tokens_mean": None}
        (folder / "summary.json").write_text(json.dumps(named))
    [board] = last_json(run("leaderboard", first, second, other, "--json"))["boards"]
    assert [row["policy"] for row in board["rows"]] == ["m (one)", "m (two)", "random"]
    assert [row["tokens_mean"] for row in board["rows"]] == [None] * 3  # as in the summaries: nobody counted them


def test_a_leaderboard_ranks_what_had_the_same_tasks(tmp_path: Path) -> None:
    weak = write(tmp_path / "weak", tasks([True] * 2 + [False] * 8))
    strong = write(tmp_path / "strong", tasks([True] * 9 + [None]))  # the last environment crashed before its opening
    moved = write(tmp_path / "moved", tasks([True] * 10), opening="A wall.")
    fewer = write(tmp_path / "fewer", tasks([True] * 9))
    for folder in (weak, strong, moved, fewer):
        named = {"suite": "houses", "policy": folder.name, "attempts": 1}
        (folder / "summary.json").write_text(json.dumps(named))
    found = last_json(run("leaderboard", weak, strong, moved, fewer, "--json"))["boards"]
    assert [(b["n_tasks"], [row["policy"] for row in b["rows"]]) for b in found] == [
        (9, ["fewer"]),
        (10, ["strong", "weak"]),
        (10, ["moved"]),
    ]
    [best, second] = found[1]["rows"]
    assert (best["success"], best["n_errors"], second["success"]) == (1.0, 1, 0.2)
    assert found[1]["settings"] == {} and title_of(found[1]) == "houses (10 tasks)"
    settings = {"seed": 2, "parts.a.limits.max_turns": 9, "sampling.temperature": 1.0}
    assert title_of(found[1] | {"settings": settings}) == "houses (10 tasks, seed 2, parts.a.limits.max_turns 9)"
    page = run("leaderboard", weak, strong, "--markdown").stdout
    assert "| policy | success | 95% interval | score | turns | errors |" in page
    assert "| strong | 100.0% |" in page and "| weak | 20.0% |" in page
    html = tmp_path / "board.html"
    assert run("leaderboard", weak, strong, "--html", html).exit_code == 0
    page = Page(html.read_text("utf-8"))
    [board] = page.answers["leaderboard"]["boards"]
    assert [(row["policy"], row["run"]) for row in board["rows"]] == [("strong", "strong"), ("weak", "weak")]
    assert board["title"] == "houses (10 tasks)" and page.fetches_nothing()
    [pair] = [told for path, told in page.answers.items() if path.startswith("compare?")]
    assert abs(pair["difference"]) == pytest.approx(7 / 9) and {p.split("/")[0] for p in page.attempts} == {
        "strong",
        "weak",
    }
    (weak / "summary.json").write_text("{}")
    damaged = run("leaderboard", weak)
    assert damaged.exit_code == 2 and "this file is damaged" in damaged.stderr


def test_a_leaderboard_ranks_by_the_metric_of_the_suite(tmp_path: Path) -> None:
    solves = write(tmp_path / "solves", {"house/test/0": [True, False]})  # half of them, score 1 on average
    scores = write(tmp_path / "scores", {"house/test/0": [False, False]})  # none of them, score 3
    turns, scored = (Turn(Action("go"), "ok"),), Score({"s": Verdict(3.0)}, (3.0,), 3.0)
    attempts = tuple(Trajectory("house/test/0", i, "A door.", turns, Outcome.TURN_LIMIT) for i in range(2))
    shutil.rmtree(scores / "trajectories")
    writer = TrajectoryWriter(scores / "trajectories")
    writer.write_groups("tasks", 0, "eval", [ScoredGroup("house/test/0", attempts, (scored, scored), ())])
    for metric, best in (("success", "solves"), ("score", "scores")):
        for folder in (solves, scores):
            named = {"suite": "houses", "policy": folder.name, "attempts": 2, "metric": metric}
            (folder / "summary.json").write_text(json.dumps(named))
        [board] = last_json(run("leaderboard", solves, scores, "--json"))["boards"]
        assert (board["metric"], board["rows"][0]["policy"]) == (metric, best)
    assert "houses (1 tasks, 2 attempts at each)" in run("leaderboard", solves, scores).stdout
    page = run("leaderboard", solves, scores, "--markdown").stdout  # one of two attempts is solved, and of none
    assert "| policy | success | 95% interval | pass@2 | score |" in page
    assert re.search(r"\| solves \| 50.0% \| [^|]* \| 100.0% \|", page)
    assert re.search(r"\| scores \| 0.0% \| [^|]* \| 0.0% \|", page)
    broken = write(tmp_path / "broken", {"house/test/0": [None, None]})
    shutil.rmtree(solves / "trajectories")
    low = Score({"s": Verdict(-3.0)}, (-3.0,), -3.0)
    writer = TrajectoryWriter(solves / "trajectories")
    writer.write_groups("tasks", 0, "eval", [ScoredGroup("house/test/0", attempts, (low, low), ())])
    (broken / "summary.json").write_text(json.dumps(named | {"policy": "broken"}))
    [board] = last_json(run("leaderboard", broken, solves, scores, "--json"))["boards"]
    assert [row["policy"] for row in board["rows"]] == ["scores", "solves", "broken"]
    page = run("leaderboard", broken, scores, "--markdown").stdout
    assert re.search(r"\| broken \| - \| [^|]* \| - \| - \|", page)  # no attempt of it counts


def test_a_leaderboard_ranks_what_was_measured_alike(tmp_path: Path) -> None:
    limits = {"max_turns": 20, "max_tokens": 64, "max_retries": 1}
    world = {"kind": "keyhole", "rows": 2}
    rewards = {"right": {"kind": "outcome"}}

    def board_of(**changes: Any) -> int:
        """Evaluations on the first board: the one without changes, and the one with them if it was measured alike."""
        for name, changed in (("one", {}), ("two", changes)):
            folder = write(tmp_path / name, tasks([True, False]))
            of_part = {"environment": world, "rewards": rewards, "limits": limits}
            part = {key: changed.get(key, value) for key, value in of_part.items()}
            suite = {"seed": 0, "sampling": {"temperature": changed.get("temperature", 1.0)}, "parts": {"tasks": part}}
            (folder / "evaluation.yaml").write_text(json.dumps({"suite": suite}))
            (folder / "summary.json").write_text(json.dumps({"suite": "houses", "policy": name, "attempts": 1}))
        found = last_json(run("leaderboard", tmp_path / "one", tmp_path / "two", "--json"))["boards"]
        return len(found[0]["rows"])

    assert board_of() == 2
    assert (
        board_of(environment={"kind": "external", "environment": world, "reward": "environment", "command": ["a"]}) == 2
    )
    assert board_of(environment={**world, "url": "http://elsewhere:1"}) == 2
    assert board_of(temperature=0.5) == board_of(limits={**limits, "max_turns": 8}) == 1
    assert board_of(environment={**world, "rows": 3}) == 1
    assert (
        board_of(rewards={"right": {"kind": "outcome", "success_threshold": 1.0}, "quick": {"kind": "turn_cost"}}) == 1
    )
    for place, n in (("/a/judge.py:right", 2), ("/a/other.py:right", 1)):  # of a file its name, wherever it lies
        rewards = {"right": {"kind": "/home/b/judge.py:right"}, "steps": {"kind": "process_model", "path": "/b/m"}}
        assert board_of(rewards={**rewards, "right": {"kind": place}}) == n
        assert board_of(rewards={**rewards, "steps": {"kind": "process_model", "path": "/c/m"}}) == 2
        assert board_of(rewards={**rewards, "steps": {"kind": "process_model", "path": "/b/n"}}) == 1
    rewards = {"right": {"kind": "outcome"}}
    # limits of a policy and of failures, processes that serve a world, and keys that an older version did not know
    assert board_of(limits={"max_turns": 20, "max_tokens": 9, "max_retries": 3}) == 2
    assert board_of(environment={"kind": "worker_processes", "environment": world, "n_workers": 2}) == 2
    assert board_of(environment={"kind": "keyhole"}) == 2
    world = {"kind": "external", "environment": world, "command": ["a.py"], "reward": "environment"}
    assert board_of(environment={**world, "command": ["b.py"]}) == 2
    assert board_of(environment={**world, "reward": "client"}) == 1


@pytest.mark.parametrize(
    ("section", "old", "new", "other"),
    [
        ("limits", {"max_calls": 4}, {"max_generations_per_turn": 4}, {"max_generations_per_turn": 8}),
        (
            "rewards",
            {"right": {"kind": "outcome", "solved_at": 0.5}},
            {"right": {"kind": "outcome", "success_threshold": 0.5}},
            {"right": {"kind": "outcome", "success_threshold": 0.9}},
        ),
        (
            "rewards",
            {"steps": {"kind": "process_model", "path": "m", "credit": "min"}},
            {"steps": {"kind": "process_model", "path": "m", "aggregation": "min"}},
            {"steps": {"kind": "process_model", "path": "m", "aggregation": "sum"}},
        ),
        (
            "rewards",
            {
                "both": {
                    "kind": "combine",
                    "low": 0,
                    "parts": {"a": {"low": 0, "reward": {"kind": "grade", "tries": 2}}},
                }
            },
            {
                "both": {
                    "kind": "combine",
                    "min_value": 0,
                    "parts": {"a": {"min_value": 0, "reward": {"kind": "grade", "max_requests": 2}}},
                }
            },
            {"both": {"kind": "combine", "min_value": 0, "parts": {"a": {"min_value": 1}}}},
        ),
        (
            "environment",
            {"kind": "processes", "environment": {"kind": "external", "world": {"kind": "bandit", "guests": 3}}},
            {"kind": "external", "environment": {"kind": "bandit", "n_contexts": 3}},
            {"kind": "external", "environment": {"kind": "bandit", "n_contexts": 4}},
        ),
        (
            "environment",
            {"kind": "external", "world": {"kind": "bandit"}, "reward": "world"},
            {"kind": "bandit"},
            {"kind": "external", "environment": {"kind": "bandit"}, "reward": "client"},
        ),
    ],
)
def test_old_names_of_keys_say_as_what_an_evaluation_was_judged(
    tmp_path: Path, section: str, old: dict[str, Any], new: dict[str, Any], other: dict[str, Any]
) -> None:
    def settings(keys: dict[str, Any]) -> dict[str, Any]:
        part = {"environment": {"kind": "keyhole"}, "rewards": {}, "limits": {}, section: keys}
        (tmp_path / "evaluation.yaml").write_text(json.dumps({"suite": {"parts": {"tasks": part}}}))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return settings_of(tmp_path, is_run=False, with_score=True)

    assert settings(old) == settings(new)
    assert differences(settings(old), settings(other))


def test_an_evaluation_that_is_not_finished_is_named(tmp_path: Path) -> None:
    half, whole = (write(tmp_path / name, tasks([True, False])) for name in ("half", "whole"))
    (whole / "summary.json").write_text(json.dumps({"suite": "houses", "policy": "whole", "attempts": 1}))
    for result in (run("compare", half, whole), run("leaderboard", half, whole)):
        assert result.exit_code == 0 and "half is not finished" in result.stderr
        assert "whole is not finished" not in result.stderr


def test_a_board_is_readable_in_a_narrow_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "/somewhere/with/many/runs/chain-constant-{}-run/checkpoints/0-supervised-000000"
    folders = [write(tmp_path / f"chain-constant-{i}-untrained", tasks([i > 0, True])) for i in range(2)]
    folders.append(write(tmp_path / "chance", tasks([True, True]), opening="A wall."))
    for i, folder in enumerate(folders):
        named = {"suite": "houses", "policy": long.format(i) if i < 2 else "random", "attempts": 1}
        (folder / "summary.json").write_text(json.dumps(named))
    monkeypatch.setenv("COLUMNS", "80")
    narrow = run("leaderboard", *folders).stdout.splitlines()
    assert max(map(len, narrow)) <= 80 and narrow[1].startswith("evaluation ")
    assert [line.split()[0] for line in narrow[2:4]] == [folders[1].name, folders[0].name]
    assert narrow[4] == "" and narrow[5].startswith("houses") and narrow[6].startswith("policy ")
    assert narrow[7].startswith("random ") and len(narrow) == 8, "no empty line at the end"
    assert run("leaderboard", *folders, "--markdown").stdout.count(long.format(0)) == 1
    monkeypatch.setenv("COLUMNS", "200")
    assert run("leaderboard", *folders).stdout.splitlines()[2].startswith(f"{long.format(1)} ")
    rows = [row for board in last_json(run("leaderboard", *folders, "--json"))["boards"] for row in board["rows"]]
    assert {(row["name"], row["policy"]) for row in rows} >= {(folders[0].name, long.format(0))}
    again = write(tmp_path / "more" / folders[0].name, tasks([False, False]))
    chosen = {"strategy": {"kind": "best_of_n", "n": 8}}
    (again / "summary.json").write_text(json.dumps({**json.loads((folders[0] / "summary.json").read_text()), **chosen}))
    monkeypatch.setenv("COLUMNS", "80")
    same = run("leaderboard", folders[0], again).stdout.splitlines()
    assert [line.split("  ")[0] for line in same[2:]] == [folders[0].name, f"more/{again.name}, best_of_n of 8"]


def test_a_folder_of_evaluations_stands_for_all_of_them(tmp_path: Path) -> None:
    for name, right in (("weak", 2), ("strong", 9)):
        folder = write(tmp_path / "ev" / name, tasks([True] * right + [False] * (10 - right)))
        (folder / "summary.json").write_text(json.dumps({"suite": "houses", "policy": name, "attempts": 1}))
    (tmp_path / "ev" / "notes").mkdir()
    [board] = last_json(run("leaderboard", tmp_path / "ev", "--json"))["boards"]
    assert [row["policy"] for row in board["rows"]] == ["strong", "weak"]
    refused = run("compare", tmp_path / "ev", tmp_path / "ev" / "weak")  # the order of a comparison has to be said
    assert refused.exit_code == 2 and "2 evaluations in folders below it" in refused.stderr
    assert f"name them: {tmp_path / 'ev' / 'strong'} {tmp_path / 'ev' / 'weak'}" in refused.stderr.replace("\n", "")


def test_a_folder_without_evaluations_says_what_it_lacks(tmp_path: Path) -> None:
    write(tmp_path / "ev" / "strong", tasks([True]))
    empty, misspelt = tmp_path / "empty", tmp_path / "ev" / "strnog"
    empty.mkdir()
    for folder, got in ((empty, "no attempts of an evaluation in trajectories/"), (misspelt, "no such folder")):
        refused = run("leaderboard", folder)
        assert refused.exit_code == 2 and "there is no evaluation in this folder" in refused.stderr
        assert got in refused.stderr
    assert f"did you mean '{tmp_path / 'ev' / 'strong'}'?" in run("leaderboard", misspelt).stderr


def test_a_leaderboard_takes_runs(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", tasks([True, False]), stage="after", step=3, is_run=True)
    [board] = last_json(run("leaderboard", folder, "--json"))["boards"]
    assert (board["rows"][0]["policy"], board["rows"][0]["success"]) == ("run", 0.5)


def test_a_board_of_runs_says_what_they_attempted_and_when(tmp_path: Path) -> None:
    for name, right in (("a", True), ("b", False)):
        write(tmp_path / "runs" / name, tasks([right, True]), stage="after", step=3, is_run=True)
    write(tmp_path / "runs" / "c", tasks([True, True]), stage="1-policy_gradient", step=2, is_run=True)
    many = {f"house{i}/test/0": [True] for i in range(5)}
    write(tmp_path / "runs" / "d", many, stage="before", is_run=True)
    found = last_json(run("leaderboard", tmp_path / "runs", "--json"))["boards"]
    assert {board["suite"]: [row["policy"] for row in board["rows"]] for board in found} == {
        "house/test, after training": ["a", "b"],
        "house/test, during 1-policy_gradient": ["c"],
        "house0/test, house1/test, house2/test and 2 more, before RL": ["d"],
    }
    assert "house/test, after training (2 tasks)" in run("leaderboard", tmp_path / "runs").stdout
