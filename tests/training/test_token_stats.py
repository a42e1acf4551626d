"""Entropy and gap of single tokens: those that the update of the same step finds, on the tokens it trains on."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest

from rlhf.data import Action, Finish, Generation, Outcome, Prompt, Trajectory, Turn
from rlhf.evaluation.rows import TrajectoryRecord, decode, encode
from rlhf.evaluation.store import read_trajectories
from rlhf.training.contrib.token_stats import TokenStatsHook, TokenStatsSettings
from tests.training import runs

#: Without a coefficient the logged entropy is an estimate from the sampled tokens.
EXACT = {"kind": "ppo_clip", "entropy_coef": 1e-6}


def of_step(folder: Path, step: int) -> list[TrajectoryRecord]:
    return [r for r in read_trajectories(folder / "trajectories") if r.phase == "train" and r.step == step]


def trained(folder: Path, **stage: object) -> Path:
    """A run with two steps of a policy that now and then succeeds; all rows are trained on."""
    start = {"kind": "supervised", "n_demonstrations": 64, "random_share": 0.7, "epochs": 8, "batch_size": 16}
    keys = {"kind": "policy_gradient", "steps": 2, "tasks_per_step": 4, "group_size": 4}
    keys |= {"filters": {"drop_zero_advantage": False}, "loss": EXACT, **stage}
    recipe = runs.write(folder, [{**start, "optimizer": {"lr": 5.0e-3}}, keys], evaluation={"n_tasks": 2})
    return runs.run(recipe, folder / "run").folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, of which the first is measured."""
    return trained(tmp_path_factory.mktemp("measured"), token_stats={"every": 2})


def test_stored_figures_are_those_of_the_update(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    logged = next(line for line in lines if line["step"] == 1 and "loss/entropy" in line)
    records = of_step(folder, 1)
    assert len(records) == 16
    pairs = [
        (entropy, abs(gap))
        for r in records
        for entropies, gaps in zip(r.entropies or (), r.gaps or (), strict=True)
        for entropy, gap in zip(entropies, gaps, strict=True)
    ]
    assert len(pairs) == sum(r.trajectory.n_tokens for r in records) > 20
    assert statistics.fmean(e for e, _ in pairs) == pytest.approx(logged["loss/entropy"], rel=1e-3)
    assert statistics.fmean(g for _, g in pairs) == pytest.approx(logged["loss/sampler_logprob_diff_mean"], rel=0.1)
    assert max(g for _, g in pairs) == pytest.approx(logged["loss/sampler_logprob_diff_max"], rel=0.1)
    assert all(r.entropies is None and r.gaps is None for r in of_step(folder, 2))  # `every` leaves this one out


def test_nothing_else_of_a_run_changes(folder: Path, tmp_path: Path) -> None:
    plain = trained(tmp_path)
    for step in (1, 2):
        for one, other in zip(of_step(plain, step), of_step(folder, step), strict=True):
            assert one.entropies is None
            assert one.advantages == other.advantages
            assert [g.token_ids for g in one.trajectory.generations] == [
                g.token_ids for g in other.trajectory.generations
            ]
    assert any(any(map(any, r.advantages or ())) for r in of_step(plain, 2))
    assert runs.weights(runs.newest(plain)) == runs.weights(runs.newest(folder))


def test_only_roles_that_are_trained_have_figures(tmp_path: Path) -> None:
    keys = {"kind": "policy_gradient", "steps": 1, "tasks_per_step": 1, "group_size": 2}
    keys |= {"token_stats": {}, "train_roles": ["plan"], "layout": "generation"}
    recipe = runs.write(tmp_path, [keys], evaluation={"n_tasks": 2}, agent={"kind": "planner"})
    for record in of_step(runs.run(recipe, tmp_path / "run").folder, 1):
        assert record.entropies is not None
        for g, entropies in zip(record.trajectory.generations, record.entropies, strict=True):
            assert len(entropies) == g.n_tokens
            assert all(math.isnan(e) == (g.role != "plan") for e in entropies)


def test_figures_are_kept_to_three_digits() -> None:
    sampled = Generation(Prompt((1,), (0,)), (4, 5, 6, 7), (-1.0,) * 4, Finish.STOP, 0)
    attempt = Trajectory("t", 0, "", (Turn(Action("a", (sampled,)), ""),), Outcome.SOLVED)
    given = (1e-6, 2.3456789, -0.00123456, math.nan)
    record = decode(encode(TrajectoryRecord(1, "s", "train", "t", attempt, entropies=(given,), gaps=(given,))))
    for kept in (record.entropies, record.gaps):
        assert kept is not None
        np.testing.assert_allclose(kept[0], given, rtol=1e-3, atol=1e-7)


def test_an_attempt_that_has_no_row_has_no_figures() -> None:
    sampled = Generation(Prompt((1,), (0,)), (4, 5), (-1.0,) * 2, Finish.STOP, 0)
    attempt = Trajectory("t", 0, "", (Turn(Action("a", (sampled,)), ""),), Outcome.SOLVED)
    store = TokenStatsHook(TokenStatsSettings())
    assert np.isnan(store._placed(attempt, None)).all()
    assert store._placed(attempt, [(1.0, 2.0), (3.0, 4.0)]) == [[(1.0, 2.0), (3.0, 4.0)]]
