"""A reward model that is trained further: what it learns from, its scale, and a run that is stopped and goes on."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rewards.models.model_folder import SCALE, load
from rewards.models.reward_model import OutcomeModelScore, ProcessModelScore, RewardModelScore
from rlhf.data import ScoredGroup, Task
from rlhf.errors import CheckpointError, DataError, RecipeError
from rlhf.evaluation.statistics import success_estimate
from rlhf.recipe import load as load_recipe
from rlhf.recipe.checks import cautions
from rlhf.recipe.compatibility import check_processes
from rlhf.rollout.scoring import WeightedReward
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.checkpoints.store import load_trainer
from rlhf.training.contrib.reward_refresh import RewardRefreshHook
from rlhf.training.contrib.reward_refresh_settings import RewardRefresh, kept_scale
from rlhf.training.contrib.step_labels import Labelled
from rlhf.training.reward_model_training import save, scoring_model
from rlhf.training.stages.pairs import Pair
from tests import test_resume as resume
from tests.training import runs, tiny, words

KINDS: dict[str, Any] = {"pairwise": RewardModelScore, "outcome": OutcomeModelScore, "process": ProcessModelScore}
FAST = AdamW(lr=3e-3)


# --- scale -----------------------------------------------------------------------------------------------------------


def test_a_version_is_served_in_the_scale_of_the_one_before_as_worked_by_hand() -> None:
    # 1 and 3 (mean 2, deviation 1) became 0 and 8 (mean 4, deviation 4): a = 1/4, b = 2 − 4/4 = 1.
    assert kept_scale([1.0, 3.0], [0.0, 8.0]) == pytest.approx((0.25, 1.0))
    # Served before as 2x + 1, so 3 and 7 (mean 5, deviation 2): a = 2/4, b = 5 − 4/2 = 3.
    assert kept_scale([1.0, 3.0], [0.0, 8.0], (2.0, 1.0)) == pytest.approx((0.5, 3.0))
    # Where all are equal there is no deviation to keep.
    assert kept_scale([2.0, 2.0], [0.0, 8.0]) == pytest.approx((1.0, -2.0))
    assert kept_scale([1.0, 3.0], [5.0, 5.0]) == pytest.approx((1.0, -3.0))
    for before, after in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(DataError, match="on the same attempts"):
            kept_scale(before, after)


@given(
    st.lists(st.tuples(st.integers(-50, 50), st.integers(-50, 50)), min_size=2, max_size=9),
    st.floats(0.1, 9),
    st.floats(-9, 9),
)
def test_mean_and_deviation_stay_and_so_does_the_order(numbers: list[tuple[int, int]], a: float, b: float) -> None:
    before, after = ([float(x) for x in side] for side in zip(*numbers, strict=True))
    factor, shift = kept_scale(before, after, (a, b))
    served, then = [factor * x + shift for x in after], [a * x + b for x in before]
    assert factor > 0 and fmean(served) == pytest.approx(fmean(then), abs=1e-6)
    if pstdev(before) and pstdev(after):
        assert pstdev(served) == pytest.approx(pstdev(then), abs=1e-6)


# --- what it learns --------------------------------------------------------------------------------------------------


def model_folder(folder: Path, learns: str) -> str:
    policy = tiny.policy()
    torch.manual_seed(0)
    save(folder, scoring_model(policy, learns), policy.tokenizer)
    return str(folder)


def refresher(folder: Path, learns: str = "pairwise", **settings: Any) -> RewardRefreshHook:
    """Of a new model; `settings` are the recipe keys."""
    reward = KINDS[learns](path=model_folder(folder, learns))
    found = RewardRefreshHook.of(
        RewardRefresh(**{"optimizer": FAST, **settings}), {"r": WeightedReward("r", 1.0, reward)}, "0"
    )
    assert found is not None
    return found


@cache
def attempts(step: int, n_tasks: int = 4) -> list[ScoredGroup]:
    """Attempts at tasks, which an older attempt at one would not be mistaken for."""
    groups = tiny.collect(tiny.policy(seed=step), n_tasks=n_tasks, group_size=4)
    return [_renamed(group, f"{group.task_id}/{step}") for group in groups]


def _renamed(group: ScoredGroup, name: str) -> ScoredGroup:
    trajectories = tuple(replace(t, task_id=name) for t in group.trajectories)
    return replace(group, task_id=name, trajectories=trajectories)


def tasks_of(items: list[Any]) -> set[str]:
    return {item.task_id for item in items}


@pytest.mark.parametrize("learns", KINDS)
def test_it_learns_from_the_present_attempts_and_leaves_the_recipes_model_alone(tmp_path: Path, learns: str) -> None:
    found = refresher(
        tmp_path, learns, every=1, truth="env", success_threshold=0.6, epochs=10, batch_size=8, held_out=0.5
    )
    loaded = load(str(tmp_path))[0]
    before = tiny.parameters(loaded)
    groups = attempts(1, n_tasks=6)
    found.learn(groups, 1)
    assert found.is_due and found.fresh and found.held and not found.old
    assert not tasks_of(found.fresh) & tasks_of(found.held)
    assert tasks_of(found.fresh) | tasks_of(found.held) <= {group.task_id for group in groups}
    kind = Pair if learns == "pairwise" else Labelled
    assert all(isinstance(item, kind) for item in [*found.fresh, *found.held])
    fresh, held, name = list(found.fresh), list(found.held), group_of(groups, found)
    served = [v.value for v in found.live.over_group(Task(name.task_id), name.trajectories)]
    figures = found.refresh(success_estimate)
    assert torch.equal(tiny.parameters(loaded), before)
    assert not torch.equal(tiny.parameters(found.model), before)
    assert found.old == fresh and not found.fresh and not found.held and not found.is_due
    assert figures["reward_refresh/n_new"] == len(fresh) and figures["reward_refresh/n_replayed"] == 0
    assert [v.value for v in found.live.over_group(Task(name.task_id), name.trajectories)] != served
    # It knows by heart what it learnt from, twelve times over, better than what was held out.
    found.held = fresh
    again = found._accuracy("after", success_estimate)["reward_refresh/accuracy_after"]
    assert again > 0.8, (again, figures, held)


def group_of(groups: list[ScoredGroup], found: RewardRefreshHook) -> ScoredGroup:
    return next(group for group in groups if group.task_id in tasks_of(found.fresh))


def test_truth_is_what_the_environment_calls_solved_or_another_reward(tmp_path: Path) -> None:
    [group] = [g for g in attempts(1) if g.task_id == "echoes/0/1"]
    for truth, worth in ((None, [float(t.solved) for t in group.trajectories]), ("env", None)):
        found = refresher(tmp_path, "outcome", truth=truth, success_threshold=0.6, held_out=0.01)
        found.learn([group], 1)
        values = worth or [score.parts["env"].value for score in group.scores]
        items = [item for item in found.fresh if isinstance(item, Labelled)]
        assert [item.right for item in items] == [x >= 0.6 for x in values]
        assert [item.labels for item in items] == [(float(x >= 0.6),) for x in values]


def test_a_share_of_what_is_learnt_from_is_old(tmp_path: Path) -> None:
    found = refresher(tmp_path, "outcome", every=2, truth="env", replay_share=0.25, capacity=30, held_out=0.2)
    counts = []
    for step in range(1, 9):
        found.learn(attempts(step), step)
        assert found.is_due == (step % 2 == 0)
        if found.is_due:
            n = len(found.fresh)
            figures = found.refresh(success_estimate)
            counts.append((n, figures["reward_refresh/n_replayed"]))
    # A quarter of all is a third of what is fresh, once there is so much.
    assert counts[0][1] == 0.0
    assert [old for _, old in counts[1:]] == [float(round(n / 3)) for n, _ in counts[1:]]
    assert len(found.old) == 30 and found.n_seen == sum(n for n, _ in counts) > 40
    steps = {task.rpartition("/")[2] for task in tasks_of(found.old)}
    assert len(steps) >= 5  # what is kept is not what came last
    none = refresher(tmp_path, "outcome", every=1, truth="env", replay_share=0.0)
    for step in (1, 2):
        none.learn(attempts(step), step)
        assert none.refresh(success_estimate)["reward_refresh/n_replayed"] == 0.0


def test_versions_of_a_model_of_pairs_agree_in_scale(tmp_path: Path) -> None:
    found = refresher(tmp_path, every=1, truth="env", epochs=8, batch_size=8, held_out=0.5, optimizer=AdamW(lr=1e-2))
    groups = attempts(1, n_tasks=6)
    found.learn(groups, 1)
    sides = found._sides(found.held)
    before = found._numbers(sides)
    figures = found.refresh(success_estimate)
    a, b = figures["reward_refresh/scale"], figures["reward_refresh/shift"]
    raw = found._numbers(sides)
    assert a != pytest.approx(1.0, abs=0.01) and raw != pytest.approx(before, abs=0.1)
    assert fmean([a * x + b for x in raw]) == pytest.approx(fmean(before), abs=1e-5)
    assert pstdev([a * x + b for x in raw]) == pytest.approx(pstdev(before), abs=1e-5)
    # What is served is scaled, also by the folder that is left.
    group = groups[0]
    rows = [found.reward.rows(t)[0][0] for t in group.trajectories]
    served = [v.value for v in found.live.over_group(Task(group.task_id), group.trajectories)]
    assert served == pytest.approx([a * x + b for x in found._numbers(rows)], abs=1e-5)
    save(tmp_path / "left", found.model, tiny.policy().tokenizer)
    left = RewardModelScore(path=str(tmp_path / "left"))
    assert [v.value for v in left.over_group(Task(group.task_id), group.trajectories)] == pytest.approx(
        served, abs=1e-5
    )
    assert load(str(tmp_path / "left"))[0].config.to_dict()[SCALE] == pytest.approx([a, b])


def test_probabilities_are_left_alone(tmp_path: Path) -> None:
    found = refresher(tmp_path, "outcome", every=1, truth="env", epochs=9)
    found.learn(attempts(1), 1)
    figures = found.refresh(success_estimate)
    assert (figures["reward_refresh/scale"], figures["reward_refresh/shift"]) == (1.0, 0.0)


def test_attempts_that_are_all_alike_teach_nothing(tmp_path: Path) -> None:
    found = refresher(tmp_path, every=1)  # nothing is solved by all, and pairs need two that differ
    [group] = attempts(1, n_tasks=1)
    failed = [i for i, t in enumerate(group.trajectories) if not t.solved]
    alike = replace(
        group,
        trajectories=tuple(group.trajectories[i] for i in failed),
        scores=tuple(group.scores[i] for i in failed),
    )
    before = tiny.parameters(found.model)
    found.learn([alike], 1)
    figures = found.refresh(success_estimate)
    assert (
        figures["reward_refresh/n_new"] == figures["reward_refresh/n_held_out"] == 0.0
        and "reward_refresh/loss" not in figures
    )
    assert torch.equal(tiny.parameters(found.model), before) and found.scale == (1.0, 0.0)


@pytest.mark.parametrize("learns", KINDS)
def test_its_state_goes_on_to_the_bit(tmp_path: Path, learns: str) -> None:
    settings = {"every": 2, "truth": "env", "success_threshold": 0.6, "capacity": 30, "held_out": 0.3}
    one = refresher(tmp_path / "one", learns, **settings)
    for step in (1, 2, 3):
        one.learn(attempts(step), step)
        if one.is_due:
            one.refresh(success_estimate)
    path = tmp_path / "state.pt"
    torch.save(one.state_dict(), path)
    other = refresher(tmp_path / "other", learns, **settings)
    other.load_state_dict(torch.load(path, weights_only=True))
    for found in (one, other):
        found.learn(attempts(4), 4)
    figures = [{k: v for k, v in found.refresh(success_estimate).items() if "time" not in k} for found in (one, other)]
    assert figures[0] == figures[1] and figures[0]["reward_refresh/n_replayed"] > 0
    assert torch.equal(tiny.parameters(one.model), tiny.parameters(other.model)) and one.scale == other.scale
    assert [(i.task_id, getattr(i, "ends", None)) for i in one.old] == [
        (i.task_id, getattr(i, "ends", None)) for i in other.old
    ]


# --- whole runs ------------------------------------------------------------------------------------------------------

#: A truth that differs between the attempts of a policy that knows nothing.
ODD = """
def odd(task, trajectory):
    return float(sum(map(ord, "".join(turn.action.text for turn in trajectory.turns))) % 2)
"""
REFRESH: dict[str, Any] = {"every": 2, "epochs": 2, "batch_size": 4, "held_out": 0.4, "optimizer": {"lr": 3.0e-3}}
STAGE = resume.POLICY_GRADIENT | {"reward_refresh": REFRESH, "group_size": 6}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A policy that solves some tasks, and a folder of a new model of each sort that reads its tokens."""
    from rlhf.training.policy.model import Pretrained

    folder = tmp_path_factory.mktemp("refreshed")
    first = runs.run(runs.write(folder, [resume.SUPERVISED], evaluation={"n_tasks": 2}), folder / "run")
    path = str(runs.newest(first.folder) / "policy")
    policy = Pretrained(path=path).build(0)
    for learns in KINDS:
        torch.manual_seed(1)
        save(folder / learns, scoring_model(policy, learns), policy.tokenizer)
    return {"policy": {"kind": "pretrained", "path": path}, **{learns: str(folder / learns) for learns in KINDS}}


def recipe(folder: Path, start: dict[str, Any], learns: str, stages: list[dict[str, Any]], **changes: Any) -> Path:
    kind = {"pairwise": "reward_model", "outcome": "outcome_model", "process": "process_model"}[learns]
    rewards = {"learned": {"kind": kind, "path": start[learns]}, "truth": {"kind": "./truth.py:odd", "weight": 0}}
    rewards |= changes.pop("rewards", {})
    evaluation = {"n_tasks": 4, "validation_n_tasks": 4}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "truth.py").write_text(ODD)
    return runs.write(folder, stages, policy=start["policy"], rewards=rewards, evaluation=evaluation, **changes)


def test_a_stopped_run_equals_one_that_was_not(start: dict[str, Any], tmp_path: Path) -> None:
    stage = STAGE | {"reward_refresh": REFRESH | {"truth": "truth"}}
    # The second stage goes on with the model that the first one leaves.
    path = recipe(tmp_path, start, "pairwise", [stage, stage | {"steps": 1, "reward_refresh": None}])
    calls: list[int] = []
    with words.on_every_step(path, lambda: calls.append(1)):
        runs.run(path, tmp_path / "whole")
    draw = random.Random(0)
    at = [draw.randrange(1, len(calls) // 3) for _ in range(5)]
    assert resume.run_with_interruptions(path, tmp_path / "stopped", at) >= 3
    resume.assert_equal(tmp_path / "stopped", tmp_path / "whole")
    name = "0-policy_gradient/model.safetensors"
    left = [(tmp_path / run / "reward_model" / name).read_bytes() for run in ("whole", "stopped")]
    assert left[0] == left[1] != Path(start["pairwise"], "model.safetensors").read_bytes()
    assert runs.curve(tmp_path / "whole", "reward_refresh/n_refreshes") == [1.0, 2.0]
    assert sum(runs.curve(tmp_path / "whole", "reward_refresh/n_new")) > 8


def test_a_killed_run_equals_one_that_was_not(start: dict[str, Any], tmp_path: Path) -> None:
    from tests.training import children

    path = recipe(tmp_path, start, "process", [STAGE | {"reward_refresh": REFRESH | {"truth": "truth"}, "steps": 3}])
    whole = children.run(tmp_path, "train", path, "--out", tmp_path / "run")
    assert whole.code == 0, whole.err
    n = children.n_events(whole)
    assert resume.run_with_kills(path, tmp_path / "killed", [2 * n // 3]) == 1
    assert resume.everything(tmp_path / "killed" / "run") == resume.everything(tmp_path / "run")
    assert len(runs.curve(tmp_path / "run", "reward_refresh/loss")) == 1


def test_accuracies_are_logged_and_a_checkpoint_of_another_model_is_refused(
    start: dict[str, Any], tmp_path: Path
) -> None:
    stage = STAGE | {"tasks_per_step": 8, "steps": 3, "reward_refresh": REFRESH | {"truth": "truth"}}
    done = runs.run(recipe(tmp_path, start, "pairwise", [stage]), tmp_path / "run")
    for when in ("before", "after"):
        value, low, high = (
            runs.curve(done.folder, f"reward_refresh/accuracy_{when}{end}") for end in ("", "_low", "_high")
        )
        assert len(value) == 1 and all(0 <= a <= v <= b <= 1 for a, v, b in zip(low, value, high, strict=True))
    checkpoint = done.folder / "checkpoints" / "0-policy_gradient-000002"
    kept = torch.load(checkpoint / "trainer.pt", weights_only=True)["kept"]["refresher"]
    assert kept["n_refreshes"] == 1 and not kept["fresh"] and kept["old"] and kept["optimizer"]["state"]
    policy = tiny.policy()
    save(tmp_path / "other", scoring_model(policy), policy.tokenizer)
    reward = RewardModelScore(path=str(tmp_path / "other"))
    other = RewardRefreshHook.of(RewardRefresh(), {"r": WeightedReward("r", 1.0, reward)}, "0")
    assert other is not None
    with pytest.raises(CheckpointError, match="cannot be used"):
        load_trainer(checkpoint, None, {"refresher": other})


@pytest.mark.parametrize(
    ("settings", "rewards", "says"),
    [
        ({"reward": "lerned"}, {}, ["reward_refresh.reward", "did you mean 'learned'?"]),
        ({"reward": "truth"}, {}, ["reward_refresh.reward", "reward model"]),
        ({}, {"second": "learned"}, ["reward_refresh.reward", "learned, second"]),
        ({"success_threshold": 0.5}, {}, ["reward_refresh.success_threshold", "no effect"]),
        ({"truth": "learned"}, {}, ["reward_refresh.truth"]),
        ({"truth": "truht"}, {}, ["reward_refresh.truth", "did you mean 'truth'?"]),
        ({"truth": "seen"}, {"seen": {"kind": "outcome", "monitor": True}}, ["reward_refresh.truth", "weight: 0"]),
        ({"optimizer": {"schedule": "linear"}}, {}, ["optimizer.schedule", "constant"]),
        ({"replay_share": 1.0}, {}, ["reward_refresh.replay_share"]),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(
    start: dict[str, Any], tmp_path: Path, settings: dict[str, Any], rewards: dict[str, Any], says: list[str]
) -> None:
    learned = {"kind": "reward_model", "path": start["pairwise"]}
    rewards = {name: learned if value == "learned" else value for name, value in rewards.items()}
    path = recipe(tmp_path, start, "pairwise", [STAGE | {"reward_refresh": settings}], rewards=rewards)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert all(text in str(caught.value) for text in says), caught.value


def test_it_needs_one_process_and_says_when_it_would_never_come(start: dict[str, Any], tmp_path: Path) -> None:
    found = load_recipe(recipe(tmp_path, start, "pairwise", [STAGE | {"reward_refresh": {"every": 9}}]))
    with pytest.raises(RecipeError, match="in one process") as caught:
        check_processes(found, 2)
    assert caught.value.where == "stages[0].reward_refresh"
    assert any("reward_refresh.every is 9" in text for text in cautions(found))
