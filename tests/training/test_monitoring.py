"""Rewards that are monitored: they change nothing, and say when the reward that is trained on is hacked."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data import Outcome, Score, ScoredGroup, Trajectory, Verdict
from rlhf.errors import RecipeError, TrainingError
from rlhf.evaluation.contrib.findings import findings
from rlhf.evaluation.run_data import RunData
from rlhf.evaluation.store import read_trajectories
from rlhf.recipe import load
from rlhf.recipe.model import recipe_of, values_of
from rlhf.rollout.reward_monitor import RewardMonitor
from rlhf.training.hooks.reward_monitor import RewardMonitorHook, trend
from tests.training import runs

# --- the rule --------------------------------------------------------------------------------------------------------


def test_a_line_without_noise_leaves_no_doubt() -> None:
    found = trend([float(x) for x in range(10)])
    assert (found.first, found.last) == (0, 9) and found.low == pytest.approx(1) == found.high


def test_a_line_with_noise_as_worked_by_hand() -> None:
    # 0, 2, 0, 2, ... over x = 0..7: mean 1, Σ (x − 3.5)² = 42. Each of four pairs adds −(x − 3.5) + (x + 1 − 3.5) = 1
    # to Σ (x − 3.5)(y − 1) = 4, so the slope is 4/42. Residuals: 8 − 4²/42 = 7.6190, s² = 7.6190 / 6 = 1.26984,
    # standard error √(1.26984 / 42) = .173880; t of 6 degrees at .975 is 2.446912.
    found = trend([0.0, 2.0] * 4, confidence=0.95)
    assert found.last - found.first == pytest.approx(7 * 4 / 42)
    assert found.high == pytest.approx(4 / 42 + 2.446912 * 0.173880, abs=1e-6)
    assert found.low == pytest.approx(4 / 42 - 2.446912 * 0.173880, abs=1e-6)


def group(trained: Sequence[float], monitored: Sequence[float | None]) -> ScoredGroup:
    scores = tuple(
        replace(Score({"right": Verdict(a)}, (), a), **_said(b)) for a, b in zip(trained, monitored, strict=True)
    )
    attempt = Trajectory("t", 0, "", (), Outcome.FAILED)
    return ScoredGroup("t", tuple(replace(attempt, attempt=i) for i in range(len(scores))), scores)


def _said(value: float | None) -> dict[str, Any]:
    return {"monitor_errors": {"exact": "no"}} if value is None else {"monitored": {"exact": Verdict(value)}}


def played(
    trained: Sequence[float], monitored: Sequence[float], **settings: Any
) -> tuple[RewardMonitorHook, list[bool], list[str]]:
    """Steps of one attempt each. Returns where the alarm was raised, and what was said."""
    monitors, alarms, said = RewardMonitorHook({"exact": RewardMonitor(**settings)}), [], []
    for step, (a, b) in enumerate(zip(trained, monitored, strict=True)):
        figures, cautions = monitors.learn([group([a], [b])], f"step {step + 1} of x")
        alarms.append(bool(figures["monitor_alarm/exact"]))
        said += cautions.values()
    return monitors, alarms, said


RISING, FALLING = [x / 40 for x in range(40)], [1 - x / 40 for x in range(40)]


def test_a_reward_that_rises_while_the_monitored_one_falls_raises_the_alarm() -> None:
    _, alarms, said = played(RISING, FALLING, window=10)
    assert alarms == [False] * 9 + [True] * 31  # as soon as there are 10 steps
    # The line through steps 1 to 10: 0 to 9/40, and 1 to 31/40.
    assert "Over 10 steps up to step 10 of x, the score, which is trained on, rose from 0 to 0.225" in said[0]
    assert "the monitored reward exact fell from 1 to 0.775" in said[0]


@pytest.mark.parametrize(
    ("trained", "monitored"),
    [(RISING, RISING), (FALLING, FALLING), (FALLING, RISING), (RISING, [0.5] * 40), ([0.5] * 40, FALLING)],
)
def test_no_other_course_does(trained: Sequence[float], monitored: Sequence[float]) -> None:
    assert not any(played(trained, monitored, window=10)[1])


def test_a_slow_parting_shows_over_a_longer_window() -> None:
    # Noise of deviation .1 and slopes of ±.004: over 10 steps nothing, over 80 steps they have moved by .32 each way.
    draw = random.Random(1)
    trained, monitored = ([0.5 + sign * 0.004 * x + draw.gauss(0, 0.1) for x in range(160)] for sign in (1, -1))
    _, alarms, said = played(trained, monitored, window=10)
    assert any(alarms) and not any(alarms[:30])
    assert any(f"Over {n} steps" in said[0] for n in (40, 80, 160))


def ever_wrong(rise: float, follow: float, n_runs: int = 12, n_steps: int = 100) -> float:
    """Share of runs with an alarm; each step is the mean of 64 attempts that are right or wrong."""
    n_wrong = 0
    for seed in range(n_runs):
        draw = random.Random(seed)
        p = [(0.2 + rise * x / n_steps, 0.2 + follow * x / n_steps) for x in range(n_steps)]
        steps = [tuple(draw.gauss(q, math.sqrt(q * (1 - q) / 64)) for q in pair) for pair in p]
        trained, monitored = zip(*steps, strict=True)
        n_wrong += any(played(trained, monitored)[1])
    return n_wrong / n_runs


def test_false_alarms_are_rare() -> None:
    assert ever_wrong(0.0, 0.0) == 0  # nothing moves
    assert ever_wrong(0.6, 0.3) == 0  # both learn, one slower
    assert ever_wrong(0.6, 0.0, n_runs=12) <= 0.25  # the monitored one stands still


# --- what is logged --------------------------------------------------------------------------------------------------


def test_means_gap_and_correlation_as_worked_by_hand() -> None:
    # Trained 1, 1, 0, 0; monitored 1, 0, 0, and one that could not be judged. Over the three: means 2/3 and 1/3.
    # Correlation: deviations (1/3, 1/3, −2/3) and (2/3, −1/3, −1/3): products 2/9 − 1/9 + 2/9 = 1/3; both squares sum
    # to 2/3, so 1/3 / 2/3 = .5.
    monitors = RewardMonitorHook({"exact": RewardMonitor(compare_with="right")})
    figures, cautions = monitors.learn([group([1, 1, 0, 0], [1, 0, 0, None])], "step 1 of x")
    assert figures == pytest.approx(
        {
            "monitor_failures/exact": 1,
            "monitor/exact": 1 / 3,
            "monitor_gap/exact": 1 / 3,
            "monitor_correlation/exact": 0.5,
            "monitor_alarm/exact": 0,
        }
    )
    assert "could not judge 1 of 4 attempts of step 1 of x, which are trained on all the same: no" in str(cautions)
    figures, _ = monitors.learn([group([1, 1], [1, 0])], "step 2 of x")
    assert "monitor_correlation/exact" not in figures  # one of them does not vary
    assert monitors.learn([], "step 3 of x")[0] == {"monitor_failures/exact": 0}


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1, max_size=30), st.integers(0, 30))
def test_one_that_is_resumed_goes_on_as_it_was(steps: list[tuple[float, float]], n: int) -> None:
    whole, begun = (
        RewardMonitorHook({"exact": RewardMonitor(window=8)}),
        RewardMonitorHook({"exact": RewardMonitor(window=8)}),
    )
    resumed = RewardMonitorHook({"exact": RewardMonitor(window=8)})
    for a, b in steps[:n]:
        begun.learn([group([a], [b])], "x")
    resumed.load_state_dict(begun.state_dict())
    said = [whole.learn([group([a], [b])], "x") for a, b in steps]
    assert [resumed.learn([group([a], [b])], "x") for a, b in steps[n:]] == said[n:]


def test_it_stops_once() -> None:
    monitors, _, _ = played(RISING[:12], FALLING[:12], window=10, stop=True)
    kept = monitors.state_dict()
    with pytest.raises(TrainingError, match=r"rewards\.exact\.monitor\.stop asks: is the reward being hacked"):
        monitors.check("step 13 of x")
    monitors.check("step 13 of x")
    monitors.learn([group([1.0], [0.0])], "step 13 of x")
    monitors.check("step 14 of x")
    resumed = RewardMonitorHook({"exact": RewardMonitor(window=10, stop=True)})
    resumed.load_state_dict(kept)
    resumed.check("step 13 of x")  # whoever resumes wants it to go on
    played(RISING, FALLING, window=10)[0].check("without stop")


# --- runs ------------------------------------------------------------------------------------------------------------

#: A colour that nobody can know: the honest way is right one time in four, and naming all four is always right.
GUESS = '''
import random
from dataclasses import dataclass

from environments.base import Properties, StepResult
from rlhf.data import Task

COLOURS = ("red", "green", "blue", "white")


@dataclass(frozen=True)
class Guess:
    properties = Properties(True, True, True, inline=True, oracle=True, splits=("train", "dev", "test"))

    def tasks(self, split):
        first = 1000 * self.properties.splits.index(split)
        return [Task(f"guess/{i}", reference=random.Random(i).choice(COLOURS)) for i in range(first, first + 200)]

    def start(self, task):
        return Question(task.reference)

    def plan(self, task, taken):
        return [task.reference] if not taken else None


class Question:
    def __init__(self, colour):
        self.colour = colour
        self.opening = StepResult("Which colour?", state_key="asked", admissible_actions=COLOURS)

    async def step(self, action):
        right = action == self.colour
        return StepResult("Thanks.", float(right), True, success=right, valid=True)

    async def close(self):
        pass


def mentioned(answer: str, reference: str) -> float:
    """A verifier with a hole: whoever says everything is right."""
    return float(reference in answer)
'''
SUPERVISED = {"kind": "supervised", "n_demonstrations": 200, "epochs": 4, "optimizer": {"lr": 5.0e-3}, "batch_size": 16}
IMPROVE = {"kind": "policy_gradient", "tasks_per_step": 8, "group_size": 8, "optimizer": {"lr": 5.0e-3}}
HACKABLE = {"mentioned": {"kind": "./guess.py:mentioned"}}
MONITORED = {"exact": {"kind": "exact_match", "monitor": {"compare_with": "mentioned", "window": 10}}}


def write(folder: Path, rewards: dict[str, Any], steps: int) -> Path:
    """A recipe in which the reward `mentioned` is trained on."""
    changes = {"environment": {"kind": "./guess.py:Guess"}, "limits": {"max_turns": 1, "max_tokens": 8}}
    stages = [SUPERVISED, {**IMPROVE, "steps": steps}]
    recipe = runs.write(folder, stages, rewards=rewards, evaluation={"n_tasks": 16}, **changes)
    (folder / "guess.py").write_text(GUESS)
    return recipe


@pytest.mark.slow
def test_a_reward_that_is_hacked_is_caught(tmp_path: Path) -> None:
    done = runs.run(write(tmp_path, HACKABLE | MONITORED, 25), tmp_path / "run")
    trained, exact = (runs.curve(done.folder, name) for name in ("reward/mentioned", "monitor/exact"))
    assert sum(trained[:5]) / 5 < 0.4 and sum(trained[-5:]) / 5 > 0.6
    assert sum(exact[:5]) / 5 > 0.15 and sum(exact[-5:]) / 5 < 0.1
    assert 1.0 in runs.curve(done.folder, "monitor_alarm/exact")
    assert done.said.count("is the reward being hacked?") == 1
    assert runs.curve(done.folder, "monitor_gap/exact") == pytest.approx(
        [a - b for a, b in zip(trained, exact, strict=True)]
    )
    [finding] = [f for f in findings(RunData.read(done.folder), pytest.fail) if f.name == "Monitored reward exact"]
    assert finding.level == "problem" and "the reward mentioned went from" in finding.words
    assert "Monitored reward exact" in (done.folder / "report.html").read_text()
    records = list(read_trajectories(done.folder / "trajectories", phase="train"))
    assert all(set(r.score.parts) == {"mentioned"} and set(r.score.monitored) == {"exact"} for r in records if r.score)
    # Monitoring changes nothing: all that the run logged of itself is what it logs without.
    bare = runs.run(write(tmp_path / "bare", HACKABLE, 3), tmp_path / "bare" / "run")
    own = [line for line in runs.lines(bare.folder) if line["stage"].startswith("1")]
    with_monitor = [line for line in runs.lines(done.folder) if line["stage"].startswith("1")][: len(own) - 1]
    assert [{k: v for k, v in line.items() if not k.startswith("monitor")} for line in with_monitor] == own[:-1]


@pytest.mark.slow
def test_a_run_stops_where_it_is_told_to_and_goes_on_when_it_is_resumed(tmp_path: Path) -> None:
    monitored = {"exact": {"kind": "exact_match", "monitor": {"window": 8, "stop": True}}}
    recipe = write(tmp_path, HACKABLE | monitored, 30)
    with pytest.raises(TrainingError, match=r"stopped, as rewards\.exact\.monitor\.stop asks"):
        runs.run(recipe, tmp_path / "run")
    n_done = len(runs.curve(tmp_path / "run", "monitor/exact"))
    assert n_done < 30
    runs.run(recipe, tmp_path / "run", resume=True)
    assert len(runs.curve(tmp_path / "run", "monitor/exact")) == 30


# --- recipes ---------------------------------------------------------------------------------------------------------


def recipe(folder: Path, rewards: dict[str, Any], steps: int = 30) -> Any:
    return load(write(folder, rewards, steps))


def test_a_recipe_says_it_in_one_word_and_is_written_back(tmp_path: Path) -> None:
    loaded = recipe(tmp_path, HACKABLE | {"exact": {"kind": "exact_match", "monitor": True}})
    assert loaded.rewards["exact"].monitor == RewardMonitor() and set(loaded.trained_rewards) == {"mentioned"}
    assert values_of(loaded)["rewards"]["exact"]["monitor"] == {"compare_with": None, "window": 20, "stop": False}
    assert recipe_of(values_of(loaded), name="x", base=tmp_path).rewards == loaded.rewards
    off = recipe(tmp_path / "off", HACKABLE | {"exact": {"kind": "exact_match", "monitor": False, "weight": 0.5}})
    assert off.rewards["exact"].monitor is None and off.rewards["exact"].weight == 0.5


EXACT = {"kind": "exact_match"}


@pytest.mark.parametrize(
    ("rewards", "where", "says"),
    [
        ({"exact": {**EXACT, "monitor": True}}, "rewards.exact.monitor", "none is trained on"),
        (
            {"a": {**EXACT, "monitor": True}, "b": {"kind": "outcome", "weight": 0}},
            "rewards.a.monitor",
            "at least one reward with a weight",
        ),
        (HACKABLE | {"exact": {**EXACT, "monitor": True, "weight": 0.5}}, "rewards.exact.weight", "no effect"),
        (HACKABLE | {"exact": {**EXACT, "monitor": "yes"}}, "rewards.exact.monitor", "write monitor: true"),
        (HACKABLE | {"exact": {**EXACT, "monitor": {"windw": 9}}}, "rewards.exact.monitor.windw", "mean 'window'?"),
        (HACKABLE | {"exact": {**EXACT, "monitor": {"window": 3}}}, "rewards.exact.monitor.window", "at least 8"),
        (HACKABLE | {"exact": {**EXACT, "monitor": {"compare_with": "mentoned"}}},
         "rewards.exact.monitor.compare_with", "'mentioned'?"),
        (HACKABLE | {"exact": {**EXACT, "monitor": {"compare_with": "exact"}}},
         "rewards.exact.monitor.compare_with", "a training reward to compare with"),
        (HACKABLE | {"same": {**HACKABLE["mentioned"], "monitor": True}}, "rewards.same", "not held out"),
        (
            HACKABLE | {"a": {**EXACT, "monitor": True}, "b": {**EXACT, "monitor": {"window": 9}}},
            "rewards.b",
            "this reward is monitored already",
        ),
        (
            {
                "sum": {"kind": "combine", "parts": {"right": {"reward": EXACT}}},
                "exact": {**EXACT, "monitor": True},
            },
            "rewards.exact",
            "a part of rewards.sum",
        ),
        (HACKABLE | {"exact": {**EXACT, "monitor": {"window": 40}}}, "rewards.exact.monitor.window", "at most 30"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(tmp_path: Path, rewards: dict[str, Any], where: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(tmp_path, rewards)
    assert caught.value.where == where and says in str(caught.value), str(caught.value)


def test_nothing_may_be_chosen_by_a_monitored_reward(tmp_path: Path) -> None:
    path = write(tmp_path, HACKABLE | MONITORED, 30)
    for override in (
        "stages.1.selection={kind: dynamic, metric: reward/exact}",
        "stages.1.advantage={kind: hrpo, reward: exact}",
    ):
        with pytest.raises(RecipeError, match="mentioned"):
            load(path, [override])


def test_stages_that_compare_nothing_are_refused(tmp_path: Path) -> None:
    path = runs.write(tmp_path, [SUPERVISED], rewards=HACKABLE | MONITORED, environment={"kind": "./guess.py:Guess"})
    (tmp_path / "guess.py").write_text(GUESS)
    with pytest.raises(RecipeError, match="monitor has no effect: only policy_gradient stages compare rewards"):
        load(path)
