"""From candidates to answers: whose candidate is whose, what they took, and what an evaluation keeps of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from rlhf.data import Action, Failure, Finish, Generation, Outcome, Prompt, Score, ScoredGroup, Task, Trajectory, Turn
from rlhf.evaluation.answers import SamplingCost, select_answers, spent_on
from rlhf.evaluation.attempts import read_attempts
from rlhf.evaluation.store import read_trajectories
from rlhf.rollout.contrib.strategies import Choice, ReflectAndRetry
from rlhf.rollout.group_structure import GroupStructure, Independent, Tree
from rlhf.training.policy.tokenizer import train_tokenizer
from rlhf.training.reward_model_training import save, scoring_model
from tests.commands import last_json, run
from tests.test_evaluate import EPISODE
from tests.training import tiny

TASK = Task("door/1")


@dataclass(frozen=True)
class Last:
    """Takes the last candidate."""

    n: int = 2
    rollout: GroupStructure = field(default_factory=Independent)

    async def choose(self, task: Task, candidates: Sequence[Trajectory], *, timeout_s: float = 1.0) -> Choice:
        return Choice(len(candidates) - 1, "it is the last")


def turn(n_prompt: int, n_sampled: int, usage: tuple[int, int] | None = None) -> Turn:
    ids = tuple(range(n_sampled))
    generation = Generation(Prompt((7,) * n_prompt), ids, (-1.0,) * n_sampled, Finish.STOP, 0, usage=usage)
    return Turn(Action("go", (generation,)), "...")


def tried(number: int, *turns: Turn, parent: int | None = None, n_shared: int = 0, solved: bool = False) -> Trajectory:
    outcome = Outcome.SOLVED if solved else Outcome.FAILED
    return Trajectory(TASK.id, number, "A door.", turns, outcome, parent=parent, n_shared=n_shared)


def group(*found: Trajectory | Failure) -> ScoredGroup:
    made = [t for t in found if isinstance(t, Trajectory)]
    scores = tuple(Score({}, (0.0,) * len(t.turns), float(t.attempt)) for t in made)
    return ScoredGroup(TASK.id, tuple(made), scores, tuple(f for f in found if isinstance(f, Failure)))


def answered(strategy: Any, found: ScoredGroup, attempts: int):
    return asyncio.run(select_answers(strategy, TASK, found, attempts, timeout_s=1.0))


def test_each_attempt_has_candidates_of_its_own() -> None:
    made = answered(Last(n=3), group(*(tried(i, turn(5, 2)) for i in range(6))), 2)
    # Candidates 0, 1, 2 are of the first attempt and 3, 4, 5 of the second.
    assert [s.chosen for s in made.spent] == [2, 5] and [t.attempt for t in made.group.trajectories] == [0, 1]
    assert [s.total for s in made.group.scores] == [2.0, 5.0] and {s.why for s in made.spent} == {"it is the last"}


def test_branches_belong_to_the_attempt_of_their_tree() -> None:
    # Two attempts of one tree each, of three leaves: 2 and 3 leave from 0, 4 from 3, which makes it the first's too.
    a, b, (c, d, e) = turn(5, 2), turn(9, 3), (turn(20, 4) for _ in range(3))
    found = group(
        tried(0, a, b), tried(1, a), tried(2, a, c, parent=0, n_shared=1), tried(3, a, d, parent=0, n_shared=1),
        tried(4, a, d, e, parent=3, n_shared=2), tried(5, a, parent=1),
    )  # fmt: skip
    made = answered(Last(n=3, rollout=Tree(branches_per_round=1, rounds=2)), found, 2)
    assert [s.chosen for s in made.spent] == [4, 5] and [s.n_candidates for s in made.spent] == [4, 2]
    assert all(t.parent is None and t.n_shared == 0 for t in made.group.trajectories)
    # Of the first: a and b of 0, c of 2, d of 3, e of 4: 2 + 3 + 4 + 4 + 4 sampled and 5 + 9 + 3 · 20 read.
    first = made.spent[0]
    assert (first.n_turns, first.n_tokens, first.n_prompt_tokens) == (5, 17, 74)


def test_what_a_server_counts_is_what_was_spent() -> None:
    counted = spent_on([tried(0, turn(5, 2, (50, 20))), tried(1, turn(5, 2, (60, 30)), solved=True)], 0, "")
    assert counted == SamplingCost(0, "", 2, 1, 2, 50, 110, True)
    half = spent_on([tried(0, turn(5, 2, (50, 20))), tried(1, turn(6, 3))], 0, "")
    assert (half.n_tokens, half.n_prompt_tokens, half.is_counted) == (5, 11, False)


def test_an_attempt_fails_where_all_of_its_candidates_do() -> None:
    crash = [Failure(i, Outcome.ENV_ERROR, f"crash {i}") for i in (0, 2, 3)]
    made = answered(Last(), group(tried(1, turn(5, 2)), *crash), 2)
    assert [s.chosen for s in made.spent] == [1]
    assert made.group.failures == (Failure(1, Outcome.ENV_ERROR, "crash 2"),)


def test_a_chain_that_a_part_cut_off_is_no_failure_of_the_policy() -> None:
    crash = Failure(2, Outcome.ENV_ERROR, "crash")
    made = answered(ReflectAndRetry(n=2), group(tried(0, turn(5, 2)), tried(1, turn(5, 2), solved=True), crash), 2)
    assert made.group.failures == (Failure(0, Outcome.ENV_ERROR, "crash"),)
    assert [(t.attempt, t.solved) for t in made.group.trajectories] == [(1, True)]
    never_told = answered(ReflectAndRetry(n=2, until="end"), group(tried(0, turn(5, 2)), replace(crash, attempt=1)), 1)
    assert len(never_told.group.trajectories) == 1  # the last attempt that there is, which nobody calls a failure


def test_a_chain_whose_first_attempt_was_not_scored_is_whole() -> None:
    unscored = Failure(0, Outcome.REWARD_ERROR, "no verdict")
    made = answered(ReflectAndRetry(n=2), group(tried(1, turn(5, 2), parent=0), unscored), 1)
    assert [s.chosen for s in made.spent] == [1] and not made.group.failures
    made = answered(ReflectAndRetry(n=3), group(tried(1, turn(5, 2), parent=0), unscored), 1)
    assert made.group.failures == (Failure(0, Outcome.ENV_ERROR, "a retry ended with an infrastructure error"),)


SUITE = """
# Small houses
attempts: 2
limits: {max_turns: 6, max_concurrent: 2}
tasks: {split: test, n: 6}
strategy: {kind: best_of_n, n: 3, judge: {kind: turn_cost}}
parts:
  small: {environment: {kind: keyhole, rows: 2, columns: 2, loops: 0, max_steps: 6}}
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "houses.yaml"
    path.write_text(SUITE)
    return path


def test_an_evaluation_with_a_strategy(suite: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    summary = last_json(run("evaluate", "random", "--suite", suite, "--out", out, "--json"))["summary"]
    assert summary["strategy"]["kind"] == "best_of_n" and summary["n_attempts"] == 12
    attempts = read_attempts(out / "trajectories")
    candidates = read_attempts(out / "candidates")
    assert len(candidates) == 36 and all(a.n_candidates == 3 for a in attempts)
    for a in attempts:
        own = [c for c in candidates if c.task_id == a.task_id and c.number // 3 == a.number]
        # The quickest of its three, which in these houses is the one that found a way, if any did.
        assert a.n_turns == min(c.n_turns for c in own) and a.n_spent_turns == sum(c.n_turns for c in own)
        assert a.any_solved == any(c.solved for c in own) and (a.solved or not a.any_solved)
    assert summary["candidates_mean"] == 3 and summary["any_candidate"]["value"] == summary["success"]["value"]
    n_turns = sum(c.n_turns for c in candidates)
    assert summary["per_solved"]["turns"] == n_turns / sum(a.solved for a in attempts)
    # Intervals count tasks, not candidates.
    assert summary["success"]["n"] == 12 and summary["success"]["high"] - summary["success"]["low"] > 0.2
    [record] = read_trajectories(out / "trajectories", task_id=attempts[0].task_id, attempt=0)
    assert record.spent is not None and record.spent.why.endswith("by the judge, of 3")

    [board] = last_json(run("leaderboard", out, "--json"))["boards"]
    assert [row["policy"] for row in board["rows"]] == ["random, best_of_n of 3"]

    listed = last_json(run("trajectories", out, "--candidates", "--limit", "99", "--json"))["trajectories"]
    assert len(listed) == 36 and not any("spent" in t for t in listed)
    [told] = last_json(run("trajectories", out, "--limit", "1", "--json"))["trajectories"]
    assert told["spent"]["n_candidates"] == 3 and told["parent"] is None

    # Interrupted and gone on with, it is the same; and made again, it comes again.
    before = (out / "summary.json").read_bytes()
    sorted((out / "trajectories").iterdir())[-1].unlink()
    last_json(run("evaluate", "random", "--suite", suite, "--out", out, "--json"))
    assert (out / "summary.json").read_bytes() == before
    assert json.loads(run("evaluate", "--verify", out, "--json").stdout.splitlines()[-1])["same"]


def test_the_command_line_names_another_strategy(suite: Path) -> None:
    found = last_json(run("evaluate", "random", "--suite", suite, "--strategy", "self_consistency", "--json"))[
        "summary"
    ]
    assert found["strategy"] == {"kind": "self_consistency", "n": 8, "pattern": None} and found["candidates_mean"] == 8
    grown = "{kind: tree_search, n: 3, judge: {kind: turn_cost}}"
    tree = last_json(run("evaluate", "random", "--suite", suite, "--strategy", grown, "--json"))["summary"]
    assert tree["candidates_mean"] == 3 and tree["strategy"]["rollout"]["kind"] == "tree"


HALF = (
    EPISODE
    + '''
from collections import Counter
from pathlib import Path

begun = Counter()


@dataclass(frozen=True)
class Half:
    """Every second episode of the tasks in a file cannot be started."""

    @property
    def properties(self):
        return Properties(True, True, True, oracle=True)

    def tasks(self, split):
        return [Task(f"half/{split}/{i}") for i in range(12)]

    def start(self, task):
        begun[task.id] += 1
        stuck = Path(__file__).with_name("stuck.txt").read_text().split()
        if task.id.rpartition("/")[2] in stuck and begun[task.id] % 2 == 0:
            raise RuntimeError("stuck")
        return Episode()

    def plan(self, task, taken):
        return ["go"]
'''
)


def test_candidates_that_crash_count_in_the_share_of_errors(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(HALF)
    (stuck := tmp_path / "stuck.txt").write_text("8 9")
    path = tmp_path / "half.yaml"
    path.write_text(
        "agent: {kind: chat}\nrewards: {r: {kind: environment}}\ntasks: {split: test, n: 12}\n"
        "limits: {max_turns: 3, max_tokens: 8, max_concurrent: 1, max_retries: 0, max_error_fraction: 0.1}\n"
        "strategy: {kind: best_of_n, n: 2, judge: {kind: turn_cost}}\n"
        "parts: {p: {environment: {kind: './half.py:Half'}}}\n"
    )
    command = ("evaluate", "oracle", "--suite", path, "--out", tmp_path / "out", "--json")
    assert last_json(run(*command))["n_errors"] == 0  # 2 of 24 candidates, of tasks that have another one
    *_, last = sorted((tmp_path / "out" / "trajectories").glob("*.parquet"))
    for file in (last, tmp_path / "out" / "summary.json"):
        file.unlink()
    stuck.write_text("8 9 10")  # 3 of 24, two of which are stored
    refused = run(*command)
    assert refused.exit_code == 2 and "rollout: 12% of the attempts ended with infrastructure errors" in refused.stderr


def test_a_judge_that_fails_at_every_task_ends_the_evaluation(suite: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def bad(task, trajectory):\n    raise RuntimeError('no verdict')\n")
    judged = f"{{kind: best_of_n, n: 2, judge: {{kind: '{tmp_path}/bad.py:bad'}}}}"
    found = run("evaluate", "random", "--suite", suite, "--strategy", judged)
    assert found.exit_code == 2 and "no verdict" in found.stderr
    assert "100% of the attempts ended with infrastructure errors" in found.stderr


def test_candidates_are_only_there_where_there_was_a_choice(tmp_path: Path) -> None:
    (tmp_path / "trajectories").mkdir()
    found = run("trajectories", tmp_path, "--candidates")
    assert found.exit_code == 2 and "this folder holds no candidates" in found.stderr


def test_what_a_strategy_needs_is_asked_before_anything_is_played(suite: Path, tmp_path: Path) -> None:
    sure = run("evaluate", "random", "--suite", suite, "--strategy", "best_of_n")
    assert sure.exit_code == 2 and "the log-probs of this policy are unknown" in sure.stderr
    suite.write_text(SUITE.replace("keyhole, rows: 2, columns: 2, loops: 0, max_steps: 6", "./still.py:Still"))
    (tmp_path / "still.py").write_text(
        "class Still:\n    def tasks(self, split):\n        return []\n    def start(self, task):\n        ...\n"
    )
    grown = "{kind: tree_search, n: 3, judge: {kind: turn_cost}}"
    reading = "{kind: best_of_n, judge: {kind: outcome_model, path: nowhere}}"
    blind = run("evaluate", "random", "--suite", suite, "--strategy", reading)
    assert blind.exit_code == 2 and "this judge reads token ids" in blind.stderr
    suite.write_text(SUITE + "rewards: {quick: {kind: turn_cost, success_threshold: 0.0}}\n")
    told = run("evaluate", "random", "--suite", suite, "--strategy", "reflect_and_retry")
    assert told.exit_code == 2 and "retries stop before rewards are computed" in told.stderr
    assert "got:      solved, which the reward quick of parts.small says" in told.stderr
    end = "{kind: reflect_and_retry, n: 2, until: end}"
    assert last_json(run("evaluate", "random", "--suite", suite, "--strategy", end, "--json"))["n_errors"] == 0
    suite.write_text(SUITE.replace("keyhole, rows: 2, columns: 2, loops: 0, max_steps: 6", "./still.py:Still"))
    still = run("evaluate", "random", "--suite", suite, "--strategy", grown)
    assert still.exit_code == 2 and "is not replayable" in still.stderr


def test_a_judge_that_reads_other_tokens_is_refused(suite: Path, tmp_path: Path) -> None:
    policy = tiny.policy()
    policy.model.save_pretrained(tmp_path / "policy")
    policy.tokenizer.save_pretrained(tmp_path / "policy")
    other = train_tokenizer(["something else entirely"] * 9, vocab_size=300, max_context=64)
    save(tmp_path / "judge", scoring_model(policy), other)
    judged = f"{{kind: best_of_n, n: 2, judge: {{kind: reward_model, path: {tmp_path / 'judge'}}}}}"
    found = run("evaluate", tmp_path / "policy", "--suite", suite, "--strategy", judged)
    assert found.exit_code == 2 and "the reward model does not fit the policy" in found.stderr
    found = run("evaluate", tmp_path / "policy", "--suite", suite, "--strategy", judged.replace("judge}", "nowhere}"))
    assert found.exit_code == 2 and "the reward model cannot be loaded" in found.stderr
