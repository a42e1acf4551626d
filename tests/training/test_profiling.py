"""Profiled steps: where their time went, what their traces hold, and that they change nothing."""

from __future__ import annotations

import gzip
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.build.train import train
from rlhf.errors import CheckpointError, RecipeError
from rlhf.recipe import load
from rlhf.spans import heard_by, span
from rlhf.terminal import CleanConsole
from rlhf.training.checkpoints.store import State
from rlhf.training.contrib import profiling
from rlhf.training.contrib.profiling import Profiler, StepClock, profiler_of
from tests import commands
from tests.test_resume import POLICY_GRADIENT, SUPERVISED, assert_equal, recipe
from tests.training import runs

#: Every step makes updates and asks the reference, also where no attempt scores better than another.
STAGE = {
    **POLICY_GRADIENT,
    "loss": {"kind": "ppo_clip", "kl": "k3", "kl_coef": 0.1},
    "filters": {"drop_zero_advantage": False},
}


def profiled(path: Path, out: Path, n: int | None, *, resume: bool = False) -> str:
    """Train in this process; returns what was shown."""
    shown = io.StringIO()
    console = CleanConsole(file=shown, width=500)
    train(load(path), out, resume=out if resume else None, console=console, profile=n)
    return shown.getvalue()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, str]]:
    """The folders of a run that was not profiled and of one that was, and what the latter showed."""
    folder = tmp_path_factory.mktemp("profiled")
    path = recipe(folder, "grpo", None, stages=[SUPERVISED, STAGE])
    plain, seen = folder / "plain", folder / "seen"
    profiled(path, plain, None)
    yield plain, seen, profiled(path, seen, 3)


def trace_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def test_a_profiled_run_equals_one_that_is_not_to_the_bit(both: tuple[Path, Path, str]) -> None:
    plain, seen, _ = both
    assert_equal(seen, plain)
    assert not (plain / "profile").exists()


def test_the_parts_of_the_table_add_up_to_the_wall_clock(both: tuple[Path, Path, str]) -> None:
    _, seen, said = both
    found = json.loads((seen / "profile" / "table.json").read_text())
    assert found["stage"] == "1-policy_gradient" and found["is_warm"]
    assert [one["step"] for one in found["steps"]] == [2, 3, 4]
    for one in found["steps"]:
        assert sum(one["seconds"].values()) == pytest.approx(one["wall_s"], rel=0.02)
        assert {"rollout", "scoring", "credit", "reference", "forward", "backward", "optimiser", "delivery"} < {
            *one["seconds"]
        }
        assert "checkpoint" in one["seconds"] and "other" in one["seconds"]
        assert ("evaluation" in one["seconds"]) == (one["step"] % 2 == 0)
    assert sum(found["seconds"].values()) == pytest.approx(found["wall_s"], rel=0.02)
    assert sum(found["shares"].values()) == pytest.approx(1, abs=0.02)
    text = (seen / "profile" / "table.txt").read_text()
    assert text.strip() in said and "steps 2 to 4 of 1-policy_gradient" in text
    assert "wall clock" in text and "backward" in text


def test_the_parts_agree_with_what_each_step_logs(both: tuple[Path, Path, str]) -> None:
    _, seen, _ = both
    found = json.loads((seen / "profile" / "table.json").read_text())
    logged = {
        line["step"]: line for line in runs.log(seen) if line["stage"] == "1-policy_gradient" and "time/train_s" in line
    }
    for one in found["steps"]:
        seconds, line = one["seconds"], logged[one["step"]]
        assert line["time/rollout_s"] / 10 < seconds["rollout"] + seconds["scoring"] <= line["time/rollout_s"]
        parts = ("credit", "forward", "reference", "backward", "optimiser")
        assert sum(seconds[part] for part in parts) <= line["time/train_s"]
        assert line["time/step_s"] + line["time/publish_s"] <= one["wall_s"]
        assert line["train/tokens_per_s"] > 0 and "train/mfu" not in line


def test_a_trace_opens_and_has_the_ranges(both: tuple[Path, Path, str]) -> None:
    _, seen, _ = both
    for step in (2, 3, 4):
        events = trace_of(seen / "profile" / f"1-policy_gradient-{step:06d}.json.gz")
        ranges = [e for e in events if e.get("cat") == "user_annotation"]
        whole = next(e for e in ranges if e["name"] == f"step {step}")
        names = {e["name"] for e in ranges}
        assert {"rollout", "scoring", "credit", "reference", "forward", "backward", "optimiser", "delivery"} <= names
        for e in ranges:
            assert whole["ts"] <= e["ts"] and e["ts"] + e["dur"] <= whole["ts"] + whole["dur"] + 1
        operators = [e for e in events if e.get("cat") == "cpu_op"]
        assert any(e["name"].startswith("aten::") for e in operators)
        for part, has in (("forward", True), ("optimiser", True), ("rollout", False), ("delivery", False)):
            spans = [(e["ts"], e["ts"] + e["dur"]) for e in ranges if e["name"] == part]
            inside = [o for o in operators for a, b in spans if a <= o["ts"] and o["ts"] + o["dur"] <= b]
            assert bool(inside) == has, part


def test_a_resumed_run_is_profiled_and_its_first_step_warms_up(both: tuple[Path, Path, str], tmp_path: Path) -> None:
    plain, _, _ = both
    path = recipe(tmp_path, "grpo", None, stages=[SUPERVISED, STAGE])
    out = tmp_path / "run"
    runs.stop(path, out, "1-policy_gradient-000002")
    profiled(path, out, 2, resume=True)
    found = json.loads((out / "profile" / "table.json").read_text())
    assert [one["step"] for one in found["steps"]] == [4, 5]
    assert runs.weights(runs.newest(out)) == runs.weights(runs.newest(plain))
    with pytest.raises(RecipeError, match="a run with steps left"):
        profiled(path, out, 1, resume=True)


@pytest.mark.parametrize("attempts", [None, {"rounds": 2, "tasks_per_round": 16, "group_size": 8, "keep": "best"}])
def test_a_supervised_stage_is_profiled_by_its_updates_or_rounds(attempts: Any, tmp_path: Path) -> None:
    stages = [SUPERVISED] if attempts is None else [SUPERVISED, {"kind": "supervised", "rejection_sampling": attempts}]
    path = recipe(tmp_path, "grpo", None, stages=stages, evaluation={"n_tasks": 6})
    profiled(path, tmp_path / "run", 2)
    found = json.loads((tmp_path / "run" / "profile" / "table.json").read_text())
    assert [one["step"] for one in found["steps"]] == ([2, 3] if attempts is None else [1, 2])
    assert found["is_warm"] == (attempts is None)
    for one in found["steps"]:
        assert {"forward", "backward", "optimiser"} < {*one["seconds"]}
        assert ("rollout" in one["seconds"]) == (attempts is not None)
        assert sum(one["seconds"].values()) == pytest.approx(one["wall_s"], rel=0.02)
    lines = [line for line in runs.log(tmp_path / "run") if "supervised/loss" in line]
    assert lines and all(line["train/tokens_per_s"] > 0 for line in lines)


@pytest.mark.parametrize("n", [0, -1])
def test_a_number_of_steps_below_one_is_an_error_in_four_parts(n: int) -> None:
    result = commands.run("train", "quickstart", "--profile", n)
    assert result.exit_code == 2
    for part in ("--profile: ", f"got:      {n}", "expected: a number of steps, 1 or more", "do:       --profile 3"):
        assert part in result.output


def test_more_steps_than_are_left_are_an_error_and_leave_nothing(tmp_path: Path) -> None:
    path = recipe(tmp_path, "grpo", None)
    result = commands.run("train", path, "--out", tmp_path / "run", "--profile", 6)
    assert result.exit_code == 2
    for part in (
        "--profile 6: ",
        "got:      6 steps",
        "expected: 1 to 5, the remaining steps of stages.1",
        "--profile 5",
    ):
        assert part in result.output
    assert not (tmp_path / "run").exists()


def test_which_steps_are_profiled(tmp_path: Path) -> None:
    both = load(recipe(tmp_path / "both", "grpo", None)).stages
    state = State(0, "", 0, False, 0)
    assert profiler_of(both, 4, tmp_path, state) == Profiler(tmp_path / "profile", 1, 1, 4, True)
    assert profiler_of(both, 5, tmp_path, state) == Profiler(tmp_path / "profile", 1, 0, 5, False)
    later = State(1, "policy_gradient", 3, False, 0)
    assert profiler_of(both, 1, tmp_path, later) == Profiler(tmp_path / "profile", 1, 4, 1, True)
    over = State(1, "policy_gradient", 5, True, 0)
    with pytest.raises(RecipeError, match="a run with steps left"):
        profiler_of(both, 1, tmp_path, over)
    with pytest.raises(RecipeError, match="no stage of the recipe"):
        profiler_of([], 1, tmp_path, state)


# --- the clock alone --------------------------------------------------------------------------------------------------


def test_seconds_belong_to_the_innermost_span_and_evaluations_keep_theirs() -> None:
    before, clock, begun = time.perf_counter(), StepClock(), time.perf_counter()
    with heard_by(clock):
        with span("forward"):
            time.sleep(0.02)
            with span("reference"):
                time.sleep(0.04)
        with span("evaluation"), span("rollout"):
            time.sleep(0.01)
        with pytest.raises(ValueError, match="raised"), span("backward"):
            raise ValueError("raised")
        time.sleep(0.01)
    least = time.perf_counter() - begun
    clock.turn()
    most = time.perf_counter() - before
    found = clock.seconds
    assert {*found} == {"forward", "reference", "evaluation", "backward", "other"}
    assert found["forward"] >= 0.02 and found["reference"] >= 0.04
    assert found["evaluation"] >= 0.01 and found["other"] >= 0.01
    assert least <= sum(found.values()) <= most and sum(found.values()) == pytest.approx(clock.wall_s)


def test_without_a_listener_a_span_is_nothing() -> None:
    assert span("forward") is span("rollout")


def test_a_failed_step_is_not_kept_and_leaves_the_profiler_off(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path / "profile", 0, 0, 2, False)
    with pytest.raises(ValueError, match="raised"), profiler.at(0, "s", 0, print), span("rollout"):
        raise ValueError("raised")
    assert not profiler.steps and not (tmp_path / "profile").exists()
    with profiler.at(0, "s", 1, print):
        torch.ones(2).sum()
    assert [e["name"] for e in trace_of(tmp_path / "profile" / "s-000002.json.gz") if e["name"] == "aten::sum"]
    with profiler.at(0, "s", 2, print), profiler.at(1, "s", 0, print):
        pass
    assert len(profiler.steps) == 1


def test_a_trace_has_operators_of_the_first_ranges_and_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "MAX_WITH_OPERATORS", 3)

    def traced(folder: Path) -> list[dict[str, Any]]:
        with Profiler(folder, 0, 0, 1, False).at(0, "s", 0, lambda text: None):
            for _ in range(5):
                with span("forward"):
                    torch.ones(2).cumsum(0)
        return trace_of(folder / "s-000001.json.gz")

    names = [e["name"] for e in traced(tmp_path / "a")]
    assert names.count("forward") == 5 and names.count("aten::cumsum") == 3
    monkeypatch.setattr(profiling, "MAX_BYTES", 4000)
    names = [e["name"] for e in traced(tmp_path / "b")]
    assert names.count("forward") == 5 and names.count("step 1") == 1
    assert len(gzip.decompress((tmp_path / "b" / "s-000001.json.gz").read_bytes())) < 6000


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file")
    profiler = Profiler(tmp_path / "profile", 0, 0, 1, False)
    with pytest.raises(CheckpointError, match="the profile cannot be written"), profiler.at(0, "s", 0, print):
        pass
