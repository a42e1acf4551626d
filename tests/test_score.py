"""`rlhf score` and `rlhf check reward --on`: other rewards about stored attempts, which are only read."""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data import Action, Failure, Outcome, Score, ScoredGroup, Trajectory, Turn, Verdict
from rlhf.evaluation.contrib.rescore import rank_correlation
from rlhf.evaluation.store import TrajectoryWriter
from tests import recipe_parts
from tests.commands import last_json, run

JUDGES = """
def ends_in_zero(answer: str, reference: str) -> float:
    return float(answer.endswith("0"))


def length(task, trajectory):
    return float(len(trajectory.turns[-1].action.text))


def picky(task, trajectory):
    if trajectory.attempt == 1:
        raise ValueError("not this one [sic]")
    return 1.0


def never(task, trajectory):
    raise KeyError(task.id)


class Share:
    def over_group(self, task, trajectories):
        return [1.0 / len(trajectories)] * len(trajectories)
"""
#: Echo asks for the number of the task: 0 to 19 in training, 200 to 219 in the test.
RECIPE = recipe_parts.RECIPE


def group(task: str, says: list[str]) -> ScoredGroup:
    number = task.partition("/")[2]
    trajectories = tuple(
        Trajectory(task, i, "Say it.", (Turn(Action(text), "."),), Outcome.SOLVED if text == number else Outcome.FAILED)
        for i, text in enumerate(says)
    )
    scores = tuple(
        Score({"right": Verdict(float(t.solved))}, (float(t.solved),), float(t.solved)) for t in trajectories
    )
    return ScoredGroup(task, trajectories, scores, (Failure(9, Outcome.ENV_ERROR, "gone"),))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run: at tasks 10 and 11 in training, and 210 in an evaluation."""
    recipe_parts.write(tmp_path)
    (tmp_path / "judges.py").write_text(JUDGES)
    made = tmp_path / "run"
    made.mkdir()
    text = RECIPE.replace("./parts.py", str(tmp_path / "parts.py")).replace("n_tasks: 10", "n_tasks: 10, split: test")
    (made / "recipe.yaml").write_text(text.replace("n_demonstrations", "split: train, n_demonstrations"))
    writer = TrajectoryWriter(made / "trajectories")
    training = [group("echo/10", ["10", "0", "11"]), group("echo/11", ["11", "20"])]
    writer.write_groups("1-policy_gradient", 3, "train", training)
    writer.write_groups("after", 3, "eval", [group("echo/210", ["210"])])
    monkeypatch.chdir(tmp_path)
    return made


def digest(folder: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_before_and_after_as_worked_by_hand(folder: Path) -> None:
    before = digest(folder)
    found = last_json(run("score", folder, "--reward", "./judges.py:ends_in_zero", "--json"))
    [row] = found["rewards"]
    assert (row["name"], row["target"]) == ("ends_in_zero", "./judges.py:ends_in_zero")
    # Stored 1 0 0 | 1 0 | 1, now 1 1 0 | 0 1 | 1: means 3/6 and 4/6, up twice ("0" and "20"), down once ("11").
    assert row["all"]["n"] == 6 and row["all"]["n_failed"] == 0
    assert (row["all"]["before"]["mean"], row["all"]["after"]["mean"]) == (0.5, pytest.approx(4 / 6))
    assert (row["all"]["n_up"], row["all"]["n_down"]) == (2, 1)
    # Of 0/1 values the rank correlation is φ: (2·1 − 1·2) / √(3·3·4·2) = 0.
    assert row["all"]["rank_correlation"] == pytest.approx(0.0, abs=1e-12)
    sets = {(s["stage"], s["phase"]): s for s in row["sets"]}
    assert sets["1-policy_gradient", "train"]["after"]["mean"] == pytest.approx(3 / 5)
    assert sets["after", "eval"]["n"] == 1 and sets["after", "eval"]["rank_correlation"] is None
    flips = {(f["task"], f["attempt"]): (f["before"], f["after"]) for f in row["flipped"]}
    assert flips == {("echo/10", 1): (0, 1), ("echo/11", 0): (1, 0), ("echo/11", 1): (0, 1)}
    first = row["flipped"][0]
    asked = f"--step 3 --task {first['task']} --attempt {first['attempt']}"
    assert first["look"] == f"rlhf trajectories {folder} {asked}"
    [shown] = last_json(run(*first["look"].split()[1:], "--json"))["trajectories"]
    assert (shown["task"], shown["attempt"]) == (first["task"], first["attempt"])
    for attempt, n in ((9, 3), (1, 0)):  # attempt 9 of each of the three groups failed, and no other
        failed = run("trajectories", folder, "--outcome", "env_error", "--attempt", attempt, "--json")
        assert len(last_json(failed)["failures"]) == last_json(failed)["n_found"] == n
    alone = run("trajectories", folder, "--attempt", 9)
    assert "a part failed in every attempt like this: 3 env_error; --outcome env_error shows them" in alone.stdout
    assert digest(folder) == before


def test_what_is_printed(folder: Path) -> None:
    result = run(
        "score", folder, "--reward", "./judges.py:ends_in_zero", "--reward", "{kind: exact_match}", "--limit", "1"
    )
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "ends_in_zero beside the stored score" in words and "exact_match beside the stored score" in words
    assert "after eval 1 1.000" in words and "all 6 0.500" in words and "+2 -1" in words
    assert "1.000 -> 0.000" in words or "0.000 -> 1.000" in words
    assert "and 2 more, see --json" in words
    row = next(line for line in result.stdout.splitlines() if line.startswith("after eval"))
    assert row.count(" to ") == 2 and len(row) <= 80  # intervals are not broken


def test_filters_thresholds_and_what_is_compared_with(folder: Path) -> None:
    options = ("--phase", "train", "--against", "success", "--threshold", "1.5")
    [row] = last_json(run("score", folder, "--reward", "./judges.py:length", *options, "--json"))["rewards"]
    # "10", "0", "11", "11", "20": lengths 2 1 2 2 2, of which four are above 1.5, and no success is.
    assert row["all"]["n"] == 5 and row["all"]["after"]["mean"] == pytest.approx(9 / 5)
    assert (row["all"]["n_up"], row["all"]["n_down"]) == (4, 0)
    [row] = last_json(run("score", folder, "--reward", "outcome", "--against", "right", "--json"))["rewards"]
    assert row["all"]["rank_correlation"] == pytest.approx(1) and not row["flipped"]
    [row] = last_json(run("score", folder, "--reward", "./judges.py:Share", "--phase", "train", "--json"))["rewards"]
    assert row["all"]["after"]["mean"] == pytest.approx((3 / 3 + 2 / 2) / 5)  # whole groups, as they were


def test_everything_goes_to_a_file_outside_the_run(folder: Path) -> None:
    out = folder.parent / "scores.json"
    result = run("score", folder, "--reward", "outcome", "--reward", "outcome", "--out", out)
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert list(written["attempts"]) == ["outcome", "outcome-2"] and len(written["attempts"]["outcome"]) == 6
    for bad, says in ((out, "this file exists"), (folder / "scores.json", "stored trajectories are read-only")):
        again = run("score", folder, "--reward", "outcome", "--out", bad)
        assert again.exit_code == 2 and says in again.stderr


def test_groups_of_one_task_in_one_step_are_told_apart(folder: Path) -> None:
    # The step lies across two orders of the tasks: task 12 comes twice, and both times has attempts 0 and 1. Solved are
    # 0 of the first and 1 of the second. A share is 1/2 in groups of two, and would be 1/4 if they were taken for one.
    twice = [group("echo/12", ["12", "3"]), group("echo/13", ["1"]), group("echo/12", ["4", "12"])]
    TrajectoryWriter(folder / "trajectories").write_groups("1-policy_gradient", 4, "train", twice)
    targets = ("--reward", "exact_match", "--reward", "./judges.py:Share")
    assert run("score", folder, *targets, "--step", "4", "--out", "again.json").exit_code == 0
    scored = json.loads(Path("again.json").read_text("utf-8"))["attempts"]
    same = [(a["before"], a["after"]) for a in scored["exact_match"] if a["task"] == "echo/12"]
    assert same == [(1.0, 1.0), (0.0, 0.0), (0.0, 0.0), (1.0, 1.0)]
    assert [a["after"] for a in scored["Share"] if a["task"] == "echo/12"] == [0.5] * 4


def test_a_reward_that_fails_here_and_there_is_told(folder: Path) -> None:
    result = run("score", folder, "--reward", "./judges.py:picky", "--json")
    [row] = last_json(result)["rewards"]
    assert (row["all"]["n"], row["all"]["n_failed"]) == (4, 2) and "not this one [sic]" in row["failure"]
    assert "could not judge 2 of 6 attempts, which are left out" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--reward", "./judges.py:never"), ["this reward failed on every attempt", "KeyError"]),
        (("--reward", "outcom"), ["did you mean 'outcome'?"]),
        (("--reward", "outcome", "--against", "rigt"), ["score, success, right", "did you mean 'right'?"]),
        (("--reward", "outcome", "--step", "8"), ["no stored attempt matches the filters"]),
        (("--reward", "{kind: numeric, tolerence: 1}"), ["no key 'tolerence'"]),
    ],
)
def test_mistakes_are_named(folder: Path, arguments: tuple[str, ...], says: list[str]) -> None:
    result = run("score", folder, *arguments)
    assert result.exit_code == 2 and all(text in result.stderr for text in says), result.stderr
    nowhere = run("score", folder / "nowhere", "--reward", "outcome")
    assert nowhere.exit_code == 2 and "there are no stored attempts in this folder" in nowhere.stderr


def test_without_the_environment_a_verifier_says_what_it_lacks_and_other_rewards_go_on(folder: Path) -> None:
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("parts.py:Echo", "gone.py:Echo"))
    refused = run("score", folder, "--reward", "numeric")
    assert refused.exit_code == 2
    told = " ".join(refused.stderr.split())
    assert "needs references, and the tasks have none" in told and "the tasks cannot be recreated" in told
    assert "gone.py" in told
    lacking = run("score", folder, "--reward", "exact_match")  # which is given the task, and asks for its reference
    assert (
        lacking.exit_code == 2
        and "this reward failed on every attempt" in lacking.stderr
        and "no reference" in lacking.stderr
    )
    result = run("score", folder, "--reward", "outcome", "--json")
    assert last_json(result)["rewards"][0]["all"]["n"] == 6
    assert "tasks are known by their ids alone" in result.stderr


def test_an_evaluation_is_scored_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe_parts.write(tmp_path)
    (tmp_path / "judges.py").write_text(JUDGES)
    suite = tmp_path / "echo-suite.yaml"
    suite.write_text(
        "parts:\n  all: {environment: {kind: ./parts.py:Echo}, agent: {kind: chat}, tasks: {split: test, n: 8}}\n"
    )
    done = run("evaluate", "random", "--suite", suite, "--out", "evaluated")
    assert done.exit_code == 0, done.output
    [row] = last_json(run("score", "evaluated", "--reward", "exact_match", "--against", "success", "--json"))["rewards"]
    # The environment asks for the word that is the reference, over up to three turns; the last one is compared.
    assert row["all"]["n"] == 8 and row["all"]["rank_correlation"] in (None, pytest.approx(1))
    assert not row["flipped"]


# --- rlhf check reward --on ------------------------------------------------------------------------------------------


def test_check_shows_the_attempts_that_the_environment_contradicts(folder: Path) -> None:
    result = run("check", "reward", "./judges.py:ends_in_zero", "--on", folder, "--worst", "3", "--json")
    found = json.loads(result.stdout.splitlines()[-1])
    # Solved attempts are worth 1, 0, 1 and the others 1, 0, 1: "11" of task 11, solved and worth 0, lies 2/3 below the
    # mean of those that failed; "0" and "20" lie 1/3 above that of the solved.
    assert [(a["task"], a["attempt"]) for a in found["attempts"]] == [("echo/11", 0), ("echo/10", 1), ("echo/11", 1)]
    assert "on 6 attempts of" in result.stdout and "read first" in result.stdout
    assert f"rlhf trajectories {folder} --step 3 --task echo/11" in " ".join(result.stdout.split())
    assert result.exit_code == 2  # it is no verifier: the reference itself does not get full marks
    assert "verifier: full marks for the right answer" in result.stdout


def test_check_says_that_the_environment_contradicts_nothing(folder: Path) -> None:
    result = run("check", "reward", "outcome", "--on", folder, "--json")
    assert "values: rank correlation with success\n            +1.00" in result.stdout
    assert "read first, what the environment contradicts most: none contradicts" in result.stdout
    assert last_json(result)["attempts"] == []


def test_where_all_ended_alike_the_lowest_are_read(folder: Path) -> None:
    file = next((folder / "trajectories").glob("after-*.parquet"))
    result = run("check", "reward", "outcome", "--on", file, "--json")
    assert "read first, the lowest values, as all ended alike:\n  1.000  solved" in result.stdout
    assert len(last_json(result)["attempts"]) == 1


def test_check_names_attempts_that_cannot_be_judged_first(folder: Path) -> None:
    result = run("check", "reward", "./judges.py:picky", "--on", folder)
    assert result.exit_code == 2
    assert "BROKEN  call: judges every attempt" in result.stdout and "not this one [sic]" in result.stdout
    assert result.stdout.index("failed  ") < result.stdout.index("1.000  ")


def test_check_on_one_file_of_a_run(folder: Path) -> None:
    file = next((folder / "trajectories").glob("after-*.parquet"))
    result = run("check", "reward", "outcome", "--on", file, "--json")
    assert "on 1 attempt of" in result.stdout and last_json(result)["ok"]


def test_check_on_answers_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"answer": "It is 7.", "reference": "7"}, {"answer": "8", "reference": "7", "right": False}]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    result = run("check", "reward", "numeric", "--on", "mine.jsonl")
    assert result.exit_code == 0, result.output
    assert "on the answers of mine.jsonl" in result.stdout and "2 cases: 0 false negatives" in result.stdout
    wrong = run("check", "reward", "multiple_choice", "--on", "mine.jsonl")
    assert wrong.exit_code == 2 and "1 false negative, 0 false positives" in wrong.stdout and "line 1" in wrong.stdout


@pytest.mark.parametrize(
    ("what", "target", "text", "says"),
    [
        ("reward", "outcome", '{"answer": "1", "reference": "1"}', "a file of answers is for a verifier"),
        ("reward", "numeric", "[1]", "mine.jsonl, line 1"),
        ("reward", "numeric", '{"answer": "1"}', "got:      no key 'reference'"),
        ("reward", "numeric", '{"answer": 1, "reference": "1"}', "got:      answer: 1\n"),
        (
            "reward",
            "numeric",
            '\n{"answer": "1", "reference": "1", "rigt": true}',
            "line 2: not an answer\n  got:      unknown key 'rigt'\n  expected: {",
        ),
        ("reward", "numeric", "", "there are no answers"),
        ("agent", "chat", "", "only a reward can judge attempts"),
    ],
)
def test_what_cannot_be_checked_on_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, target: str, text: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text(text)
    result = run("check", what, target, "--on", "mine.jsonl")
    assert result.exit_code == 2 and says in result.stderr, result.output


def test_a_file_that_is_not_there_is_told_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "answers.jsonl").write_text('{"answer": "1", "reference": "1"}\n')
    for name in ("answer.jsonl", tmp_path / "anwers.jsonl"):
        missed = run("check", "reward", "numeric", "--on", name)
        assert missed.exit_code == 2 and "a file of answers that ends in .jsonl" in missed.stderr
        assert f"did you mean '{Path(name).parent / 'answers.jsonl'}'?" in missed.stderr
    found = run("check", "reward", "numeric", "--on", "answers.jsonl").stdout
    assert "1 case: 0 false negatives" in found and " 1 cases" not in found
    assert re.search(r"median \S+ ms, longest \S+ ms", found)


def test_a_misspelt_key_of_an_answer_is_told_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text('{"answer": "1", "reference": "1", "rigt": true}\n')
    said = run("check", "reward", "numeric", "--on", "mine.jsonl").stderr
    assert "unknown key 'rigt'" in said and "did you mean 'right'?" in said and "__init__" not in said


# --- ranks -----------------------------------------------------------------------------------------------------------


def test_rank_correlation_as_worked_by_hand() -> None:
    # Ranks 1 2 3 against 1 3 2: 1 − 6 · (0 + 1 + 1) / (3 · 8) = ½.
    assert rank_correlation([5, 6, 9], [1, 30, 2]) == pytest.approx(0.5)
    # With ties, ranks 1.5 1.5 3 against 1 2 3: deviations −.5 −.5 1 and −1 0 1: 1.5 / √(1.5 · 2) = .866025.
    assert rank_correlation([0, 0, 1], [1, 2, 3]) == pytest.approx(0.866025, abs=1e-6)
    assert rank_correlation([1, 1], [1, 2]) is None and rank_correlation([], []) is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30), st.randoms())
def test_rank_correlation_sees_order_alone(values: list[float], draw: Any) -> None:
    others = draw.sample(values, len(values))
    found = rank_correlation(values, others)
    if found is not None:
        assert -1 - 1e-9 <= found <= 1 + 1e-9
        assert rank_correlation(others, values) == pytest.approx(found)
        assert rank_correlation([math.atan(v / 1e6) for v in values], others) == pytest.approx(found, abs=1e-6)
        assert rank_correlation(values, values) == pytest.approx(1)
