"""Extrapolation: worked numbers, what is exact, and models that come of runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from rlhf.build.train import policy_of
from rlhf.cli import app
from rlhf.errors import DataError, ModelError
from rlhf.recipe import load
from rlhf.training.checkpoints.store import every
from rlhf.training.contrib.weight_extrapolation import (
    at_success,
    directions,
    first_direction,
    merged,
    moved,
    rank_one,
    weights_of,
)
from tests.training import runs


def matrix(m: int, n: int, seed: int) -> torch.Tensor:
    return torch.randn(m, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- one checkpoint --------------------------------------------------------------------------------------------------


def test_the_first_direction_is_as_long_as_the_change() -> None:
    # ΔW = diag(3, 4): σ = (4, 3), ‖ΔW‖ = 5, the factor 5/4; share 16/25.
    found = first_direction(torch.diag(torch.tensor([3.0, 4.0])))
    assert rank_one(found).flatten().tolist() == pytest.approx([0, 0, 0, 5])
    assert rank_one(found, 0.5).flatten().tolist() == pytest.approx([0, 0, 0, 2.5])
    assert (found.sigma, found.norm, found.share) == pytest.approx((4, 5, 16 / 25))


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 99))
def test_it_is_that_of_the_singular_value_decomposition(m: int, n: int, seed: int) -> None:
    change = matrix(m, n, seed)
    u, sigma, v = torch.linalg.svd(change)
    found = first_direction(change)
    assert found.sigma == pytest.approx(float(sigma[0])) and found.norm == pytest.approx(float(change.norm()))
    assert torch.allclose(torch.outer(found.u, found.v), sigma[0] * torch.outer(u[:, 0], v[0]), atol=1e-8)
    assert float(rank_one(found, 0.7).norm()) == pytest.approx(0.7 * float(change.norm()))


@pytest.mark.parametrize(("m", "n"), [(3, 5), (5, 3), (4, 1), (1, 4)])
def test_a_change_of_rank_one_is_kept_whole(m: int, n: int) -> None:
    change = torch.outer(matrix(m, 1, 1)[:, 0], matrix(n, 1, 2)[:, 0])
    found = first_direction(change)
    assert torch.allclose(rank_one(found), change) and found.share == pytest.approx(1)


def test_a_vector_is_a_matrix_of_one_column_and_nothing_is_nothing() -> None:
    start = {"norm": torch.tensor([1.0, 2.0]), "same": torch.ones(2, 3)}
    found = directions(start, {"norm": torch.tensor([1.5, 1.0]), "same": torch.ones(2, 3)})
    after = moved(start, {name: rank_one(d, 2.0) for name, d in found.items()})
    assert after["norm"].tolist() == pytest.approx([2.0, 0.0])  # twice the way: 1 + 2 · 0.5, 2 − 2 · 1
    assert torch.equal(after["same"], start["same"]) and found["same"].share == 1.0


def test_the_number_format_stays() -> None:
    start = {"w": torch.ones(2, 2, dtype=torch.bfloat16)}
    found = directions(start, {"w": 2 * start["w"]})
    after = moved(start, {"w": rank_one(found["w"])})
    assert after["w"].dtype == torch.bfloat16 and torch.allclose(after["w"].float(), torch.tensor(2.0))


def test_a_change_below_half_a_spacing_is_not_rounded_away() -> None:
    # Between 1 and 2 bfloat16 numbers are 1/128 apart: a change of a quarter of that moves a quarter of the weights.
    start, change = {"w": torch.ones(64, 64, dtype=torch.bfloat16)}, torch.full((64, 64), 1 / 512)
    after = moved(start, {"w": change})["w"]
    assert after.dtype == torch.bfloat16 and set(after.flatten().tolist()) == {1.0, 1 + 1 / 128}
    assert float((after.double() - 1).mean()) == pytest.approx(1 / 512, rel=0.1)
    assert torch.equal(moved({"w": start["w"].float()}, {"w": change}, torch.bfloat16)["w"], after)


def test_weights_of_another_model_are_refused() -> None:
    with pytest.raises(ModelError, match="different models") as error:
        directions({"w": torch.ones(2, 2)}, {"w": torch.ones(2, 3)})
    assert "(2, 3)" in error.value.got and "(2, 2)" in error.value.expected
    with pytest.raises(ModelError, match="different models"):
        directions({"w": torch.ones(2)}, {"w": torch.ones(2), "v": torch.ones(2)})


# --- several checkpoints ---------------------------------------------------------------------------------------------


def test_the_line_through_the_checkpoints() -> None:
    # σ u = 1, 2 along the first axis at success .2, .4: 5 per unit of success, so 3 at .6; v = (0, 1).
    changes = [torch.tensor([[0.0, length], [0.0, 0.0]]) for length in (1.0, 2.0)]
    found = [first_direction(c) for c in changes]
    assert at_success(found, [0.2, 0.4], 0.6).flatten().tolist() == pytest.approx([0, 3, 0, 0])
    assert at_success(found, [0.2, 0.4], 0.6, 0.5).flatten().tolist() == pytest.approx([0, 1.5, 0, 0])


def test_the_line_is_that_of_least_squares() -> None:
    # Successes 0, .5, 1 of lengths 1, 4, 5: slope (−.5 · 1 + .5 · 5) / .5 = 4 around (.5, 10/3), so 10/3 + 2 at 1.
    found = [first_direction(torch.tensor([[x]])) for x in (1.0, 4.0, 5.0)]
    assert float(at_success(found, [0.0, 0.5, 1.0], 1.0)) == pytest.approx(16 / 3)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 50), st.lists(st.booleans(), min_size=3, max_size=3))
def test_a_change_that_grows_along_one_direction_is_found_whatever_the_signs(
    m: int, n: int, seed: int, turned: list[bool]
) -> None:
    change = torch.outer(matrix(m, 1, seed)[:, 0], matrix(n, 1, seed + 1)[:, 0])
    found = [first_direction(change * x) for x in (0.1, 0.2, 0.3)]
    found = [type(d)(-d.u, -d.v, d.norm) if t else d for d, t in zip(found, turned, strict=True)]
    assert torch.allclose(at_success(found, [0.1, 0.2, 0.3], 0.9), 0.9 * change, atol=1e-9)


def test_a_vector_that_turns_back_is_not_turned_again() -> None:
    # +1, then −1: the line goes on to −3, though −1 is +1 in another sign.
    found = [first_direction(torch.tensor([x])) for x in (1.0, -1.0)]
    assert float(at_success(found, [0.0, 0.5], 1.0)) == pytest.approx(-3)


@pytest.mark.parametrize("successes", [[0.5], [0.5, 0.5], [0.1, 0.2, 0.3]])
def test_no_line(successes: list[float]) -> None:
    found = [first_direction(torch.ones(1, 1))] * min(len(successes), 2)
    with pytest.raises(DataError, match="no line"):
        at_success(found, successes, 0.9)


# --- runs ------------------------------------------------------------------------------------------------------------

SUPERVISED = {"kind": "supervised", "n_demonstrations": 128, "random_share": 0.7, "epochs": 12, "batch_size": 16,
              "optimizer": {"lr": 5.0e-3}}  # fmt: skip
STAGE = {"kind": "policy_gradient", "steps": 10, "tasks_per_step": 8, "group_size": 8, "minibatches": 2, "epochs": 2,
         "evaluate_every": 2, "checkpoint_every": 2, "keep_checkpoints": "all"}  # fmt: skip
#: Of one direction: what is kept of its changes is all of them.
LORA = {"rank": 1, "alpha": 4}


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose policy knows the words and little else."""
    folder = tmp_path_factory.mktemp("weak")
    return runs.run(runs.write(folder, [SUPERVISED]), folder / "run").folder


@pytest.fixture(scope="module", params=[None, LORA], ids=["full", "lora"])
def trained(request: pytest.FixtureRequest, weak: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("extrapolate")
    policy = {"kind": "pretrained", "path": str(runs.newest(weak) / "policy"), "lora": request.param}
    stage = STAGE | {"optimizer": {"lr": 2.0e-2 if request.param else 5.0e-3}}
    return runs.run(runs.write(folder, [stage], policy=policy), folder / "run").folder


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["extrapolate", *map(str, arguments)])


def record(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return values


def success(folder: Path, trained: Path) -> float:
    done = CliRunner().invoke(app, ["evaluate", str(trained), "--checkpoint", str(folder), "--n", "64", "--json"])
    return float(record(done)["success"])


def weights(folder: Path, trained: Path) -> dict[str, torch.Tensor]:
    return weights_of(merged(policy_of(load(str(trained / "recipe.yaml")), folder)))


def test_all_checkpoints_of_the_stage_stay(trained: Path) -> None:
    names = [p.name for p in every(trained / "checkpoints")]
    assert names == [f"0-policy_gradient-{step:06d}" for step in range(0, 11, 2)]


def test_a_run_keeps_its_success_in_one_direction(trained: Path, tmp_path: Path) -> None:
    found = record(run(trained, "--out", tmp_path / "new", "--json"))
    start, end = (trained / "checkpoints" / f"0-policy_gradient-{step:06d}" for step in (0, 10))
    assert found["model"] == str(tmp_path / "new") and found["checkpoints"] == [str(end)]
    before, after, new = (weights(folder, trained) for folder in (start, end, tmp_path / "new"))
    assert set(found["parameters"]) == set(before) == set(new)
    for name in before:
        change, made = (after[name] - before[name]).double(), (new[name] - before[name]).double()
        sigma = float(torch.linalg.matrix_norm(change.reshape(len(change), -1), 2))
        assert found["parameters"][name]["norm"] == pytest.approx(float(change.norm()), rel=1e-4, abs=1e-9)
        assert float(made.norm()) == pytest.approx(float(change.norm()), rel=1e-3, abs=1e-5)
        if float(change.norm()):
            assert found["parameters"][name]["rank_one_share"] == pytest.approx(
                (sigma / float(change.norm())) ** 2, rel=1e-3
            )
            assert made.ndim < 2 or torch.linalg.matrix_rank(made, rtol=1e-2) == 1
    reached, kept = (success(folder, trained) for folder in (end, tmp_path / "new"))
    assert success(start, trained) + 0.1 < reached
    if (end / "policy" / "adapter_config.json").is_file():
        assert kept == reached and found["rank_one_share"] == pytest.approx(1, abs=1e-5)
        assert all(torch.allclose(w, new[name], atol=1e-5) for name, w in after.items())
    else:
        assert 0 <= kept <= 1 and 0.1 < found["rank_one_share"] < 0.99


def test_early_checkpoints_point_to_a_better_policy(trained: Path, tmp_path: Path) -> None:
    early = [trained / "checkpoints" / f"0-policy_gradient-{step:06d}" for step in (2, 4, 6)]
    logged = {line["step"]: line["eval/success"] for line in runs.log(trained) if "eval/success" in line}
    target = str(min(max(logged[step] for step in (2, 4, 6)) + 0.1, 1.0))
    found = record(run(*early, "--target", target, "--out", tmp_path / "new", "--json"))
    assert found["successes"] == [logged[2], logged[4], logged[6]]
    given = [x for s in found["successes"] for x in ("--success", str(s))]
    run(*early, *given, "--target", target, "--out", tmp_path / "given")
    new = weights(tmp_path / "new", trained)
    assert all(torch.equal(w, new[name]) for name, w in weights(tmp_path / "given", trained).items())
    before = success(trained / "checkpoints" / "0-policy_gradient-000000", trained)
    assert success(tmp_path / "new", trained) > before + 0.05


def test_an_adapter_in_16_bits_is_not_drowned_by_the_rounding_of_its_sum_with_the_base(
    weak: Path, tmp_path: Path
) -> None:
    policy = {"kind": "pretrained", "path": str(runs.newest(weak) / "policy"), "dtype": "bfloat16", "lora": LORA}
    stage = STAGE | {"steps": 2, "evaluate_every": 0, "optimizer": {"lr": 1.0e-5}}
    done = runs.run(runs.write(tmp_path / "16", [stage], policy=policy), tmp_path / "run").folder
    found = record(run(done, "--out", tmp_path / "new", "--json"))
    assert found["rank_one_share"] == pytest.approx(1, abs=1e-5), "of rank 1 in each weight"
    made = policy_of(load(str(done / "recipe.yaml")), runs.newest(done))
    layers = [m for m in made.model.modules() if hasattr(m, "lora_magnitude_vector")]
    norms = [float(layer.get_delta_weight("default").double().norm()) for layer in layers]
    assert found["norm"] == pytest.approx(sum(x * x for x in norms) ** 0.5, rel=1e-2)
    assert all(w.dtype == torch.bfloat16 for w in weights(tmp_path / "new", done).values())


def test_of_a_run_all_checkpoints_are_taken(trained: Path, weak: Path, tmp_path: Path) -> None:
    found = record(run(trained, "--target", "1", "--out", tmp_path / "new", "--json"))
    assert [Path(c).name[-2:] for c in found["checkpoints"]] == ["02", "04", "06", "08"], "evaluated on one list"
    shown = run(trained, "--alpha", "0", "--out", tmp_path / "start")
    assert shown.exit_code == 0 and "in rank 1" in shown.stdout and "rlhf evaluate" in shown.stdout
    start = weights(trained / "checkpoints" / "0-policy_gradient-000000", trained)
    assert all(torch.equal(w, start[name]) for name, w in weights(tmp_path / "start", trained).items())
    far = record(
        run(
            trained,
            "--start",
            weak / "checkpoints" / "0-supervised-000000" / "policy",
            "--out",
            tmp_path / "far",
            "--json",
        )
    )
    assert far["norm"] > found["norm"], "from where another run began"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "--out", "{run}"], "the folder exists"),
        (["{run}/checkpoints", "--out", "new"], "this run has no checkpoint|not a checkpoint of a run"),
        (["nowhere", "--out", "new"], "no such folder"),
        (["{run}x", "--out", "new"], "did you mean '.*/run'"),
        (["{c}-000002", "{c}-000004", "--out", "new"], "--target"),
        (["{c}-000002", "{c}-000004", "--target", "1", "--success", ".5", "--out", "new"], "1 for 2 checkpoints"),
        (["{c}-000002", "--target", "1", "--out", "new"], "define no line"),
        (["{c}-000002", "--success", ".5", "--out", "new"], "error --success"),
        (["{run}", "--start", "nowhere", "--out", "new"], "no start checkpoint to extrapolate from"),
        (["{c}-000000", "--out", "new"], "no weight has changed"),
    ],
)
def test_what_cannot_be_extrapolated_is_said(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    import re

    monkeypatch.chdir(tmp_path)
    stage = trained / "checkpoints" / "0-policy_gradient"
    done = run(*(a.format(run=trained, c=stage) for a in arguments))
    assert done.exit_code == 2 and re.search(message, done.output), done.output
    assert not any(tmp_path.iterdir())


def test_a_run_that_stopped_at_its_begin_has_no_way_to_go_along(weak: Path, tmp_path: Path) -> None:
    short, begin = tmp_path / "short", "checkpoints/0-supervised-000000"
    shutil.copytree(weak, short, ignore=shutil.ignore_patterns("checkpoints"))
    shutil.copytree(weak / begin, short / begin)
    for more in ([], ["--target", "0.9", "--success", "0.1"]):
        done = run(short, *more, "--out", tmp_path / "new")
        assert done.exit_code == 2 and "no weight has changed" in done.output, done.output
    assert [path.name for path in tmp_path.iterdir()] == ["short"]
