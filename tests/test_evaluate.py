"""`rlhf evaluate` on suites: policies that are no model, folders that go on, figures that come again."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rlhf
from rlhf.digests import write_listed
from rlhf.errors import ModelError, RecipeError
from rlhf.evaluation.attempts import read_attempts
from rlhf.evaluation.folder import set_aside
from rlhf.recipe.evaluation_request import EvaluationRequest
from rlhf.recipe.evaluation_target import contender
from rlhf.recipe.suites import load_suite, values_of_suite
from rlhf.recipe.text import to_text
from rlhf.viewer.attempts import Attempts
from rlhf.viewer.evaluation_views import paired
from tests import recipe_parts
from tests.commands import last_json, run
from tests.environments import troubled
from tests.evaluation.pages import Page
from tests.test_compare import SAYS
from tests.training import runs, tiny

ROOT = Path(__file__).resolve().parent.parent
SUITE = """
# Two small houses
attempts: 2
limits: {max_turns: 8, max_concurrent: 2}
tasks: {split: test, n: 6}
parts:
  small: {environment: {kind: keyhole, rows: 2, columns: 2, loops: 0, max_steps: 8}}
  large: {environment: {kind: keyhole, rows: 3, columns: 2, loops: 1, max_steps: 8}, tasks: {n: 5}}
"""

AGENT = '''
from dataclasses import dataclass
from rlhf.data import Action, Message, Role


@dataclass(frozen=True)
class First:
    """Takes the first action that is possible."""

    async def act(self, history, policy):
        return Action(history.admissible_actions[0])


@dataclass(frozen=True)
class Asks:
    async def act(self, history, policy):
        await policy.generate([Message(Role.USER, history.opening)])
'''


#: Beginning of a file with an environment, whose episodes one action ends.
EPISODE = """
from dataclasses import dataclass
from environments.base import Properties, StepResult
from rlhf.data import Task


class Episode:
    opening = StepResult("go")

    async def step(self, action):
        return StepResult("gone", 1.0, True, success=True)

    async def close(self):
        pass
"""

FAILING = (
    EPISODE
    + '''

@dataclass(frozen=True)
class Failing:
    """The episodes of two tasks cannot be started."""

    @property
    def properties(self):
        return Properties(True, True, True, oracle=True)

    def tasks(self, split):
        return [Task(f"failing/{split}/{i}") for i in range(12)]

    def start(self, task):
        if task.id.endswith(("/8", "/9")):
            raise RuntimeError("stuck")
        return Episode()

    def plan(self, task, taken):
        return ["go"]
'''
)


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "houses.yaml"
    path.write_text(SUITE)
    return path


def test_chance_and_the_oracle_are_policies(suite: Path) -> None:
    chance = last_json(run("evaluate", "random", "--suite", suite, "--json"))["summary"]
    oracle = last_json(run("evaluate", "oracle", "--suite", suite, "--json"))["summary"]
    assert (oracle["success"]["value"], oracle["n_errors"], oracle["n_attempts"]) == (1.0, 0, 22)
    assert 0 < chance["success"]["value"] < 1 and chance["n_tasks"] == 11
    assert {name: found["n_attempts"] for name, found in oracle["parts"].items()} == {"small": 12, "large": 10}
    assert set(oracle["types"]) == {"keyhole-2/2x2+0/test", "keyhole-2/3x2+1/test"}
    assert oracle["turns_mean"] < chance["turns_mean"]
    # the two attempts of chance at one task are two, and say more together
    assert chance["pass"]["2"]["all"]["value"] < chance["success"]["value"] < chance["pass"]["2"]["at"]["value"]
    assert oracle["tokens_mean"] is None and set(oracle["per_solved"]) == {"turns"}


def test_an_oracle_that_takes_its_time_uses_up_none_of_its_episodes(tmp_path: Path) -> None:
    shutil.copy(troubled.__file__, tmp_path / "troubled.py")
    path = tmp_path / "slow.yaml"
    served = "{kind: worker_processes, environment: {kind: './troubled.py:Troubled', plan_s: 0.6}}"
    limits = "{max_turns: 3, max_tokens: 8, max_concurrent: 8, episode_timeout_s: 4.0}"
    part = f"{{environment: {served}, tasks: {{split: test, n: 10}}}}"
    path.write_text(
        f"agent: {{kind: chat}}\nrewards: {{r: {{kind: environment}}}}\nlimits: {limits}\nparts: {{p: {part}}}\n"
    )
    found = last_json(run("evaluate", "oracle", "--suite", path, "--json"))["summary"]
    assert found["n_errors"] == 0 and found["success"]["value"] == 1.0  # 6 s of planning in all


def test_one_command_gives_the_same_files_twice(suite: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        last_json(run("evaluate", "random", "--suite", suite, "--out", tmp_path / name, "--json"))
    summaries = [(tmp_path / name / "summary.json").read_bytes() for name in ("a", "b")]
    assert summaries[0] == summaries[1]
    first, second = (
        [
            (a.task_id, a.number, a.outcome, a.n_turns, a.opening)
            for a in read_attempts(tmp_path / name / "trajectories")
        ]
        for name in ("a", "b")
    )
    assert first == second and len(first) == 22


CHANGING = (
    EPISODE
    + """
import random


@dataclass(frozen=True)
class Changing:
    @property
    def properties(self):
        return Properties(deterministic=IS_FIXED, splits=("test",))

    def tasks(self, split):
        return [Task(f"changing/{split}/{i}") for i in range(3)]

    def start(self, task):
        episode = Episode()
        episode.opening = StepResult(f"go {random.random()}", admissible_actions=("on",))
        return episode
"""
)


@pytest.mark.parametrize("attempts", [1, 2])
def test_tasks_that_begin_otherwise_each_time_are_evaluated_and_compared(tmp_path: Path, attempts: int) -> None:
    (tmp_path / "changing.py").write_text(CHANGING.replace("IS_FIXED", "False"))
    suite = tmp_path / "changing.yaml"
    suite.write_text(f"attempts: {attempts}\nparts: {{p: {{environment: {{kind: './changing.py:Changing'}}}}}}\n")
    for name in "ab":
        words = ("evaluate", "random", "--suite", suite, "--out", tmp_path / name, "--json")
        last_json(run(*words))
        assert json.loads((tmp_path / name / "summary.json").read_text())["data"]["p"]["openings"] is None
    [row] = last_json(run("compare", tmp_path / "a", tmp_path / "b", "--json"))["comparisons"]
    [caution] = row["cautions"]
    assert caution.startswith("3 tasks of a and b began otherwise") and "does not declare deterministic" in caution
    [board] = last_json(run("leaderboard", tmp_path / "a", tmp_path / "b", "--json"))["boards"]
    assert len(board["rows"]) == 2
    pair = [(Attempts(tmp_path / name / "trajectories"), "") for name in "ab"]
    shown = paired(pair[0], pair[1])
    assert shown["n"] == 3 and shown["cautions"] == [caution]
    (tmp_path / "lying.py").write_text(CHANGING.replace("IS_FIXED", "True"))
    suite.write_text(suite.read_text().replace("changing.py", "lying.py"))
    found = run("evaluate", "random", "--suite", suite, "--out", tmp_path / "c")
    assert ("two attempts at one task have different openings" in found.stderr) == (attempts > 1)


def test_an_evaluation_goes_on_where_it_was_interrupted(suite: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        last_json(run("evaluate", "random", "--suite", suite, "--out", folder, "--json"))
    files = sorted((cut / "trajectories").glob("*.parquet"))
    assert len(files) == 4  # blocks of 4 tasks: 6 and 5 tasks are two each
    kept = files[0].stat().st_mtime_ns
    for path in (*files[1:], cut / "summary.json"):
        path.unlink()
    (cut / "trajectories" / f".{files[1].name}.partial").write_bytes(b"PAR1 half a file")
    resumed = run("evaluate", "random", "--suite", suite, "--out", cut, "--json")
    assert last_json(resumed) and files[0].stat().st_mtime_ns == kept
    for name in ("summary.json", "report.html"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()
    # what is there already counts in the interval so far, which ends where the summary is
    share = json.loads((cut / "summary.json").read_text())["success"]["value"]
    [said] = [line for line in resumed.stderr.splitlines() if line.startswith("evaluation 11/11")]
    assert re.search(rf"success {share:.1%} \(\d.*% to \d.*%\)", said)


@pytest.mark.parametrize("strategy", ["", "{kind: self_consistency, n: 3}"])
def test_more_attempts_are_added_to_those_that_are_stored(tmp_path: Path, strategy: str) -> None:
    suite, played = counted_suite(tmp_path)
    words: tuple[str | Path, ...] = ("evaluate", "random", "--suite", suite, "--json")
    words += ("--strategy", strategy) if strategy else ()
    n_each = 3 if strategy else 1
    whole, grown = tmp_path / "whole", tmp_path / "grown"
    last_json(run(*words, "--attempts", "5", "--out", whole))
    last_json(run(*words, "--attempts", "2", "--out", grown))
    played.unlink()
    summary = last_json(run(*words, "--attempts", "3", "--out", grown))["summary"]
    assert summary["pass"].keys() == {"1", "2", "3"} and len(played.read_text()) == 11 * n_each
    set_aside(grown)  # a kill before the plan is written; then the command from before, which has nothing to play
    last_json(run(*words, "--attempts", "3", "--out", grown))
    assert len(played.read_text()) == 11 * n_each
    last_json(run(*words, "--attempts", "5", "--out", grown))
    assert len(played.read_text()) == 33 * n_each
    for name in ("summary.json", "report.html"):
        assert (grown / name).read_bytes() == (whole / name).read_bytes()
    assert sorted(path.name for path in grown.iterdir()) == sorted(path.name for path in whole.iterdir())
    fewer = run(*words, "--attempts", "4", "--out", grown)
    assert fewer.exit_code == 2 and "suite.attempts 5, now 4" in fewer.stderr


def test_more_attempts_go_on_from_a_kill_in_their_midst(tmp_path: Path) -> None:
    suite, played = counted_suite(tmp_path)
    words: tuple[str | Path, ...] = ("evaluate", "random", "--suite", suite, "--json")
    whole, grown = tmp_path / "whole", tmp_path / "grown"
    last_json(run(*words, "--attempts", "6", "--out", whole))
    last_json(run(*words, "--attempts", "2", "--out", grown))
    shutil.copytree(grown, tmp_path / "before")
    last_json(run(*words, "--attempts", "4", "--out", grown))
    # as if killed with one block of four attempts stored, and the other tasks in what was set aside
    shutil.copytree(tmp_path / "before" / "trajectories", grown / "earlier-0" / "trajectories")
    for path in (*sorted((grown / "trajectories").glob("*.parquet"))[1:], grown / "summary.json"):
        path.unlink()
    half = read_attempts(grown / "trajectories")
    played.unlink()
    last_json(run(*words, "--attempts", "6", "--out", grown))
    assert len(played.read_text()) == 66 - 22 - len(half) // 2
    assert (grown / "summary.json").read_bytes() == (whole / "summary.json").read_bytes()
    assert not (grown / "earlier-0").exists()


def test_attempts_that_branch_off_each_other_are_not_added_to(tmp_path: Path) -> None:
    suite, _ = counted_suite(tmp_path)
    words = ("evaluate", "random", "--suite", suite, "--strategy", "reflect_and_retry", "--out", tmp_path / "out")
    last_json(run(*words, "--json"))
    more = run(*words, "--attempts", "2")
    assert more.exit_code == 2 and "suite.attempts 1, now 2" in more.stderr


def counted_suite(folder: Path) -> tuple[Path, Path]:
    """A suite of eleven tasks at which chance succeeds sometimes, and the file with a dot for each episode begun."""
    played = folder / "played.txt"
    (folder / "counted.py").write_text(EPISODE + COUNTED.replace("PLAYED", str(played)))
    path = folder / "counted.yaml"
    path.write_text(
        "rewards: {r: {kind: environment}}\nlimits: {max_turns: 3, max_tokens: 8, max_concurrent: 2}\n"
        "parts: {p: {environment: {kind: './counted.py:Counted'}}}\n"
    )
    return path, played


COUNTED = """

class Open(Episode):
    opening = StepResult("go", admissible_actions=("left", "right", "on"))

    async def step(self, action):
        return StepResult("gone", float(action == "left"), True, success=action == "left")


@dataclass(frozen=True)
class Counted:
    @property
    def properties(self):
        return Properties(True, True, True)

    def tasks(self, split):
        return [Task(f"counted/{split}/{i}") for i in range(11)]

    def start(self, task):
        with open("PLAYED", "a") as file:
            file.write(".")
        return Open()
"""


def _changed(path: Path, text: str) -> str:
    """What is said of an evaluation with another file in the place of its own."""
    path.write_text(text)
    return run("evaluate", "--verify", path.parent).stderr


def test_an_evaluation_can_be_made_again(suite: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    last_json(run("evaluate", "random", "--suite", suite, "--out", out, "--json"))
    again = run("evaluate", "--verify", out)
    assert again.exit_code == 0 and "all 22 attempts came again" in again.stdout
    # written by a version that counted less
    summary = json.loads((out / "summary.json").read_text())
    del summary["parts"]["small"]["truncated"]["reply_limit"]
    write_listed(out / "summary.json", json.dumps(summary))
    assert run("evaluate", "--verify", out).exit_code == 0
    # another version of a package on record, and a suite that was changed since
    record = json.loads((out / "versions.json").read_text())
    record["packages"]["numpy"] = "0.0.1"
    assert "has changed since it was written" in _changed(out / "versions.json", json.dumps(record))
    write_listed(out / "versions.json", json.dumps(record))
    suite.write_text(SUITE.replace("attempts: 2", "attempts: 2\nseed: 3"))
    changed = run("evaluate", "--verify", out, "--json")
    assert changed.exit_code == 2
    found = json.loads(changed.stdout.splitlines()[-1])
    assert found["changed"]["suite.seed"] == [20000, 3] and found["changed"]["versions.packages.numpy"][0] == "0.0.1"
    assert 0 < found["n_changed"] <= 22 and "keyhole-2/" in found["first"] and not found["same"]


def test_results_are_broken_down_by_columns_of_the_data(tmp_path: Path) -> None:
    path = by_subject(tmp_path)
    words = ("evaluate", f"{tmp_path / 'says.py'}:Says", "--suite", path, "--out", tmp_path / "out")
    misspelt = run(*words, "--by", "subjects")
    assert misspelt.exit_code == 2 and "did you mean 'subject'?" in misspelt.stderr and not (tmp_path / "out").exists()
    plain = last_json(run(*words, "--json"))["summary"]
    found = last_json(run(*words, "--by", "subject", "--by", "meta.level", "--json"))["summary"]
    assert "by" not in plain and found == plain | {"by": found["by"]}
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == found
    shares = {name: (one["n_tasks"], one["success"]["value"]) for name, one in found["by"]["subject"].items()}
    assert shares == {"art": (2, 0.5), "law": (4, 0.25)}  # 3 is the answer of one task of each
    assert list(found["by"]["meta.level"]) == ["1", "2", "10"]
    # in words
    lines = run(*words, "--by", "subject").stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("subject"))
    assert " ".join(lines[first].split()) == "subject tasks n success 95% interval score right brief turns errors"
    row = lines[first + 2].split()
    assert row[:4] == ["law", "4", "4", "25.0%"] and row[-4:] == ["0.250", "1.000", "1.0", "0"]
    assert run("evaluate", "--verify", tmp_path / "out").exit_code == 0
    beside = run("evaluate", "--verify", tmp_path / "out", "--by", "subject")
    assert beside.exit_code == 2 and "--by beside --verify" in beside.stderr
    # on the page
    shown = Page((tmp_path / "out" / "report.html").read_text("utf-8")).answers["run/evaluation/evaluation"]
    assert list(shown["by"]["subject"]) == ["art", "law"]
    # from Python
    same = rlhf.evaluate(
        f"{tmp_path / 'says.py'}:Says",
        suite=path,
        out=tmp_path / "python",
        by=["subject", "meta.level"],
        progress=False,
    )
    assert same.summary == found
    told = {(row["of"], row["name"], row["metric"]): row["value"] for row in same.metrics.to_dict("records")}
    assert told["subject", "law", "success"] == 0.25 and told["subject", "law", "reward/brief"] == 1.0
    with pytest.raises(RecipeError, match="wrong value"):
        rlhf.evaluate("random", suite="quick", by=[3])  # type: ignore[list-item]


def by_subject(folder: Path) -> Path:
    """A suite on six questions of two subjects and three levels, with two rewards, and an agent that says 3."""
    rows = [
        {"question": f"is it {i}?", "answer": str(i), "subject": ["law", "art"][i in (3, 5)], "meta": {"level": level}}
        for i, level in enumerate([1, 2, 10, 1, 2, 10])
    ]
    rows[4] |= {"answer": "3"}
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "says.py").write_text(SAYS)
    path = folder / "subjects.yaml"
    path.write_text(
        "rewards: {right: {kind: exact_match}, brief: {kind: './judge.py:brief', weight: 0}}\n"
        "limits: {max_turns: 1, max_tokens: 8}\n"
        "parts: {all: {environment: {kind: dataset, test: rows.jsonl}}}\n"
    )
    (folder / "judge.py").write_text("def brief(answer, reference):\n    return float(len(answer) < 9)\n")
    return path


def test_what_cannot_be_verified_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    words = ["rlhf", "evaluate", "--verify", str(tmp_path / "nothing")]
    code = f"""
import sys
from rlhf.cli import main
sys.argv = {words!r}
try:
    main()
finally:
    print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "no finished evaluation" in done.stderr and done.stdout.strip() == "False"


def test_a_folder_belongs_to_one_evaluation(suite: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    last_json(run("evaluate", "random", "--suite", suite, "--out", out, "--json"))
    page = out / "report.html"
    written = page.read_bytes()
    page.unlink()
    assert last_json(run("report", out, "--json")) == {"report": str(page)} and page.read_bytes() == written
    (out / "summary.json").rename(out / "elsewhere.json")
    unfinished = run("report", out)
    assert unfinished.exit_code == 2 and "no finished evaluation" in unfinished.stderr
    (out / "elsewhere.json").rename(out / "summary.json")
    other = run("evaluate", "oracle", "--suite", suite, "--out", out)
    assert other.exit_code == 2 and "this folder holds another evaluation" in other.stderr
    assert "asked.target random, now oracle" in other.stderr
    fewer = run("evaluate", "random", "--suite", suite, "--n", "2", "--out", out)
    assert fewer.exit_code == 2 and "asked.n None, now 2; suite.parts.large.tasks.n 5, now 2" in fewer.stderr
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    refused = run("evaluate", "random", "--suite", suite, "--out", foreign)
    assert refused.exit_code == 2 and "not empty" in refused.stderr


def test_an_evaluation_does_not_go_on_with_another_model_or_environment(suite: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(ROOT / "base", tmp_path / name)
    stages = [{"kind": "policy_gradient", "steps": 1}]
    recipe = runs.write(tmp_path, stages, policy={"kind": "pretrained", "path": str(tmp_path / "a")})
    command = ("evaluate", recipe, "--suite", suite, "-n", "1", "--out", tmp_path / "out")
    last_json(run(*command, "--json"))
    assert run(*command).exit_code == 0
    runs.write(tmp_path, stages, policy={"kind": "pretrained", "path": str(tmp_path / "b")})
    other = run(*command)
    assert other.exit_code == 2 and f"policy.path {tmp_path / 'a'}, now {tmp_path / 'b'}" in other.stderr
    runs.write(tmp_path, stages, policy={"kind": "pretrained", "path": str(tmp_path / "a")})
    record = json.loads((tmp_path / "out" / "versions.json").read_text())
    write_listed(tmp_path / "out" / "versions.json", json.dumps(record | {"environment": {"small": "keyhole 1"}}))
    other = run(*command)
    assert other.exit_code == 2 and "environment.small keyhole 1, now" in other.stderr


def test_a_failing_part_is_judged_over_all_blocks_of_an_evaluation_that_goes_on(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    path = tmp_path / "failing.yaml"
    path.write_text(
        "agent: {kind: chat}\nrewards: {r: {kind: environment}}\ntasks: {split: test, n: 12}\n"
        "limits: {max_turns: 3, max_tokens: 8, max_concurrent: 1, max_retries: 0, max_error_fraction: 0.3}\n"
        "parts: {p: {environment: {kind: './failing.py:Failing'}}}\n"
    )
    command = ("evaluate", "oracle", "--suite", path, "--out", tmp_path / "out", "--json")
    whole = last_json(run(*command))
    assert (whole["n"], whole["n_errors"]) == (10, 2)
    *_, last = sorted((tmp_path / "out" / "trajectories").glob("*.parquet"))
    for file in (last, tmp_path / "out" / "summary.json"):  # half of this block fails
        file.unlink()
    assert last_json(run(*command))["n_errors"] == 2


def test_a_split_with_fewer_tasks_than_a_suite_asks_for_is_said(suite: Path) -> None:
    suite.write_text(SUITE.replace("columns: 2, loops: 1, max_steps: 8}", "columns: 2, n_test: 3}"))
    found = run("evaluate", "random", "--suite", suite, "--json")
    assert last_json(found)["n"] == 2 * (6 + 3)
    assert "parts.large.tasks: the split 'test' has 3 tasks, fewer than the 5 asked for" in found.stderr
    assert "parts.small" not in found.stderr
    assert "caution" not in run("evaluate", "random", "--suite", suite, "--n", "2", "--json").stderr


@pytest.mark.parametrize("name", ["-n", "--limit"])
def test_the_number_of_tasks_goes_by_the_names_of_other_tools_too(suite: Path, name: str) -> None:
    assert last_json(run("evaluate", "random", "--suite", suite, name, "2", "--json"))["n"] == 2 * (2 + 2)


def test_a_reward_that_compares_with_references_needs_tasks_that_have_them(suite: Path, tmp_path: Path) -> None:
    suite.write_text(SUITE + "rewards: {right: {kind: exact_match}}\n")
    result = run("evaluate", "random", "--suite", suite, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "error parts.small.rewards.right.kind: this reward needs references" in result.stderr
    assert "got:      tasks without reference: 6 of the first 6 of the split 'test', such as keyhole" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "policy", [("random",), ("--endpoint", "http://127.0.0.1:9", "--model", "m")], ids=["random", "endpoint"]
)
def test_a_verifier_is_tried_on_the_references_before_an_evaluation(policy: tuple[str, ...], tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"{i} + 1?", "answer": f"it is {i + 1}"}) for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    suite = tmp_path / "sums.yaml"
    part = "parts: {sums: {environment: {kind: dataset, path: rows.jsonl}, rewards: {right: {kind: KIND}}}}\n"
    suite.write_text(part.replace("KIND", "./never.py:never"))
    (tmp_path / "never.py").write_text("def never(answer, reference):\n    return 0.0\n")
    result = run("evaluate", *policy, "--suite", suite, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "accepts none of the first" in result.stderr, result.stderr
    assert "error parts.sums.rewards.right" in result.stderr and not (tmp_path / "out").exists()
    suite.write_text(part.replace("KIND", "exact_match"))
    if policy == ("random",):
        found = run("evaluate", *policy, "--suite", suite)
        assert "parts.sums.rewards.right takes" in found.stderr and "100.0%" in found.stderr, found.stderr


def test_a_recipe_s_reward_without_references_is_refused_before_there_are_weights(tmp_path: Path) -> None:
    stages = [{"kind": "policy_gradient", "steps": 1}]
    recipe = runs.write(tmp_path, stages, environment={"kind": "bandit"}, rewards={"right": {"kind": "math"}})
    result = run("evaluate", recipe, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "error rewards.right.kind: this reward needs references" in result.stderr, (
        result.stderr
    )
    # As many may lack one as attempts may fail; only then it is found that there are no weights.
    weights = run("evaluate", recipe, "limits.max_error_fraction=1.0")
    assert weights.exit_code == 2 and "error policy.kind: there are no weights" in weights.stderr


@pytest.mark.parametrize("n_short", [0, 3])
def test_prompts_that_fill_the_context_are_no_failure_of_the_policy(n_short: int, tmp_path: Path) -> None:
    rows = [{"prompt": f"say {i} " * (1 if i < n_short else 200), "answer": str(i)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "what", "answer": "that"}))
    recipe = runs.write(
        tmp_path,
        [{"kind": "policy_gradient", "steps": 1}],
        policy={"kind": "pretrained", "path": str(ROOT / "base")},
        environment={"kind": "dataset", "train": "train.jsonl", "test": "rows.jsonl"},
        rewards={"right": {"kind": "exact_match"}},
        limits={"max_turns": 1, "max_tokens": 4, "max_context": 128},
    )
    result = run("evaluate", recipe, "--out", tmp_path / "out")
    said = " ".join(result.stderr.split())
    if n_short:
        assert result.exit_code == 0 and "parts.tasks: 5 of 8 attempts count as failed because their first" in said
    else:
        assert (tmp_path / "out" / "report.html").is_file()
        assert result.exit_code == 2 and "error parts.tasks: every prompt is longer than the context window" in said
        assert "got: 8 of 8 attempts ended at their first prompt" in said
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["n_prompt_too_long"] == 8 - n_short


def test_an_agent_in_a_file_is_a_policy(suite: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(AGENT)
    found = last_json(run("evaluate", f"{tmp_path}/mine.py:First", "--suite", suite, "--json"))
    assert (found["n"], found["n_errors"]) == (22, 0)
    asking = run("evaluate", f"{tmp_path}/mine.py:Asks", "--suite", suite)
    assert asking.exit_code == 2 and "this agent calls a model, and none is given" in asking.stderr


def test_an_evaluation_goes_on_with_the_policy_that_it_was_begun_with(suite: Path, tmp_path: Path) -> None:
    agent, model = tmp_path / "mine.py", tmp_path / "model"
    agent.write_text(AGENT)
    policy = tiny.policy()
    policy.model.save_pretrained(model)
    policy.tokenizer.save_pretrained(model)
    short = ["--suite", suite, "--n", "1", "--attempts", "1"]
    for name, words in (("agent", [f"{agent}:First", *short]), ("model", [model, *short])):
        out = tmp_path / f"{name}-out"
        last_json(run("evaluate", *words, "--out", out, "--json"))
        assert run("evaluate", *words, "--out", out).exit_code == 0
        record = json.loads((out / "versions.json").read_text())
        older = {key: value for key, value in record.items() if key not in ("code", "weights", "solved_by")}
        write_listed(out / "versions.json", json.dumps(older))
        assert json.loads(run("evaluate", "--verify", out, "--json").stdout.splitlines()[-1])["changed"] == {}
        write_listed(out / "versions.json", json.dumps(record))
    agent.write_text(AGENT.replace("[0]", "[-1]"))
    with torch.no_grad():
        next(policy.model.parameters()).mul_(2)
    policy.model.save_pretrained(model)
    other = run("evaluate", f"{agent}:First", *short, "--out", tmp_path / "agent-out")
    assert other.exit_code == 2 and "code.parts.small.agent.kind mine.py sha256" in other.stderr
    other = run("evaluate", model, *short, "--out", tmp_path / "model-out")
    assert other.exit_code == 2 and "weights.base/model.safetensors" in other.stderr


def test_other_tasks_than_those_of_the_hash_are_refused(suite: Path) -> None:
    found = last_json(run("evaluate", "oracle", "--suite", suite, "--json"))["summary"]["data"]["small"]["tasks"]
    text = SUITE.replace("max_steps: 8}}", f"max_steps: 8}}, tasks: {{sha256: {found}}}}}")
    suite.write_text(text)
    assert last_json(run("evaluate", "oracle", "--suite", suite, "--json"))["success"] == 1.0
    suite.write_text(text.replace("n: 6", "n: 7"))
    refused = run("evaluate", "oracle", "--suite", suite)
    assert refused.exit_code == 2 and "the tasks differ from those that the suite was made with" in refused.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("attempts: 2", "atempts: 2", "did you mean 'attempts'?"),
        ("attempts: 2", "attempts: 0", "attempts"),
        ("parts:", "pieces:", "a suite has no key 'pieces'"),
        ("tasks: {n: 5}", "task: {n: 5}", "parts.large.task"),
        ("tasks: {n: 5}", "tasks: {n: 5, sha256: abc}", "parts.large.tasks.sha256"),
        (
            "tasks: {n: 5}",
            "tasks: {n: 5, split: tset}",
            "error parts.large.tasks.split: the environment has no such split",
        ),
        ("split: test", "split: tset", "error tasks.split: the environment has no such split"),
        ("tasks: {n: 5}", "tasks: {ids: [keyhole/nowhere]}", "the split has no such task"),
        ("rows: 3, columns: 2, loops: 1", "rows: 2, columns: 2, loops: 0", "two parts share a task"),
        ("environment: {kind: keyhole, rows: 3", "environment: {kind: keyhol, rows: 3", "did you mean 'keyhole'?"),
    ],
)
def test_a_mistake_in_a_suite(suite: Path, old: str, new: str, message: str) -> None:
    assert old in SUITE
    suite.write_text(SUITE.replace(old, new))
    result = run("evaluate", "random", "--suite", suite)
    assert result.exit_code == 2 and message in result.stderr


def test_the_resolved_suite_is_the_suite(suite: Path, tmp_path: Path) -> None:
    written = tmp_path / "again.yaml"
    written.write_text(to_text(values_of_suite(load_suite(str(suite)))))
    assert load_suite(str(written)) == load_suite(str(suite))


def test_a_program_needs_a_suite_and_takes_no_keys(suite: Path) -> None:
    assert "this target defines no tasks" in run("evaluate", "oracle").stderr
    assert "no effect on the evaluation of random" in run("evaluate", "random", "seed=1", "--suite", suite).stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("random", "--tries", "3"), "--tries: this option has no effect"),
        (("oracle", "--checkpoint", "."), "--checkpoint: this option has no effect"),
        (("random", "--price-in", "1"), "--price-in and --price-out: this option has no effect"),
        (("--endpoint", "127.0.0.1:9", "--model", "m"), "--endpoint http://127.0.0.1:9"),
        (("randm",), "did you mean 'random'?"),
        (("random", "--verify", "."), "POLICY, --suite beside --verify"),
        (("--verify", ".", "--out", "again"), "--out beside --verify"),
        (
            ("--endpoint", "http://h", "--model", "m", "limits.max_tokens=5"),
            "no effect on the evaluation of an endpoint",
        ),
        (("a/b", "policy.path=a/c"), "error policy.path: the model to evaluate is named already"),
        (("a/b", "policy={kind: from_scratch}"), "error policy.kind: the model to evaluate is named already"),
        (("a/b", "policy=null"), "error policy: wrong type"),
        (("a/b", "seed=1"), "error seed: this seed has no effect on the evaluation of trained weights"),
        (("a/b", "sede=1"), "policy.KEY=VALUE or engine.KEY=VALUE"),
    ],
)
def test_what_would_do_nothing_or_is_misspelt_is_refused(suite: Path, words: tuple[str, ...], message: str) -> None:
    refused = run("evaluate", *words, "--suite", suite)
    assert refused.exit_code == 2 and message in refused.stderr


@pytest.mark.parametrize("written", ["{", "[]", "{}"])
def test_an_adapter_that_names_no_base_is_told_and_takes_a_given_one(suite: Path, written: str, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(written)
    asked = EvaluationRequest(target=str(tmp_path / "adapter"), suite=str(suite))
    with pytest.raises(ModelError, match="does not name its base model"):
        contender(asked)
    found = contender(replace(asked, overrides=("policy.path=a/base", "policy.dtype=float32")))
    assert found.recipe is not None and found.checkpoint == tmp_path / "adapter"
    assert (found.recipe.policy.path, found.recipe.policy.dtype) == ("a/base", "float32")


def test_a_run_and_the_model_in_it_are_judged_on_one_suite(tmp_path: Path) -> None:
    recipe = recipe_parts.write(tmp_path)
    last_json(run("train", recipe, "stages.1.steps=1", "seed=3", "--out", tmp_path / "run", "--json"))
    suite = tmp_path / "words.yaml"
    suite.write_text(
        "attempts: 2\nagent: {kind: './parts.py:Parrot'}\nlimits: {max_turns: 1, max_tokens: 8}\n"
        "tasks: {n: 4}\nparts: {echo: {environment: {kind: './parts.py:Echo'}}}\n"
    )
    mine = last_json(run("evaluate", tmp_path / "run", "--suite", suite, "--json"))
    assert (mine["n"], mine["n_errors"]) == (8, 0) and mine["summary"]["tokens_mean"] > 0
    [newest] = [p for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name == Path(mine["checkpoint"]).name]
    model = tmp_path / "model"
    shutil.copytree(newest / "policy", model)
    same = last_json(run("evaluate", model, "--suite", suite, "--json"))
    assert (same["success"], same["n_turns_mean"]) == (mine["success"], mine["n_turns_mean"])
    kept = ("--suite", suite, "--n", "2", "--out", tmp_path / "kept", "--json")
    last_json(run("evaluate", tmp_path / "run", *kept))
    again = last_json(run("evaluate", "--verify", tmp_path / "kept", "--json"))
    assert again == {"same": True, "n_attempts": 4, "n_changed": 0, "first": None, "changed": {}, "figures": {}}
    # what it was trained on does not judge it unless that is wanted
    refused = run("evaluate", tmp_path / "run", "--suite", suite, "--split", "train")
    assert refused.exit_code == 2 and "trained on tasks of this evaluation" in refused.stderr
    assert "4 of 4 tasks are in the split 'train' of stages[0]" in refused.stderr
    assert "error --split: " in refused.stderr
    own = run("evaluate", tmp_path / "run", "--split", "train", "--n", "2")
    assert own.exit_code == 2 and "error --split: the policy was trained on tasks" in own.stderr
    own = run("evaluate", tmp_path / "run", "evaluation.split=train", "evaluation.n_tasks=2")
    assert own.exit_code == 2 and "error evaluation.split: the policy was trained on tasks" in own.stderr
    misspelt = run("evaluate", tmp_path / "run", "--suite", suite, "--split", "trian")
    assert misspelt.exit_code == 2 and "error --split: the environment has no such split" in misspelt.stderr
    assert "did you mean 'train'" in misspelt.stderr
    wanted = ("--split", "train", "--n", "2", "--allow-overlap", "--json")
    assert last_json(run("evaluate", tmp_path / "run", *wanted))["n"] == 2
