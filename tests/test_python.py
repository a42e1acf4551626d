"""The Python calls `rlhf.train`, `rlhf.start`, `rlhf.evaluate` and `rlhf.compare`, with functions and objects."""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import rlhf
from environments.base import Properties, StepResult
from environments.games.countdown import Countdown
from environments.tasks.dataset import Dataset
from rlhf.api import frames
from rlhf.api.background import Background
from rlhf.api.train import _Work, overrides_of
from rlhf.api.values import Arguments
from rlhf.build.processes import STOP_REQUEST
from rlhf.commands.evaluate import recipe_and_checkpoint
from rlhf.data import Task
from rlhf.errors import CheckpointError, DataError, RecipeError, TrainingError
from rlhf.recipe.builder import build_part
from rlhf.recipe.model import values_of
from rlhf.recipe.text import from_text, parse
from rlhf.sinks import read_metrics
from rlhf.training.hooks.base import StageHook
from rlhf.training.policy.model import Pretrained
from tests.commands import run as command
from tests.test_endpoint import completion, served

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = "".join((DOCS / name).read_text("utf-8") for name in ("python.md", "coming_from.md"))
ROOT = Path(__file__).resolve().parent.parent
SMALL: dict[str, Any] = {
    "policy": {"kind": "from_scratch", "hidden_size": 16, "n_layers": 1, "n_heads": 2, "max_context": 1100},
    "limits": {"max_tokens": 4},
    "evaluation": {"n_tasks": 4},
    "memory_check": False,
    "progress": False,
}
ROWS = [{"prompt": f"largest of {a} {b}", "answer": str(max(a, b))} for a in range(8) for b in range(8)]


def grpo(steps: int = 2) -> dict[str, Any]:
    selection = {"kind": "all"}
    return {"kind": "policy_gradient", "steps": steps, "tasks_per_step": 2, "group_size": 2, "selection": selection}


def length(answer: str, reference: str) -> float:
    """A verifier that can be imported."""
    return min(1.0, len(answer) / 10)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(steps: int = 2, **more: Any) -> rlhf.TrainResult:
    def local(answer: str, reference: str) -> float:
        return min(1.0, len(answer) / 10)

    given = {} if "resume" in more else {**SMALL, "environment": ROWS, "stages": [grpo(steps)]}
    return rlhf.train(**{**given, "rewards": local, "memory_check": False, "progress": False, **more})


def logged(run: Path) -> list[tuple[Any, ...]]:
    """What a run logged, without times and memory."""
    timed = re.compile(r"time/|memory|per_s|_s$|mfu")
    return [
        (line.stage, line.step, {k: v for k, v in line.values.items() if not timed.search(k)})
        for line in read_metrics(run / "metrics.jsonl")
    ]


# --- one run ---------------------------------------------------------------------------------------------------------


def test_a_run_from_python_equals_that_of_its_recipe(folder: Path) -> None:
    found = small(rewards={"length": length}, out="one", name="same")
    assert found.is_finished and found.n_episodes == 2 * 2 * 2 and found.success_after is not None
    kinds = (folder / "one" / "recipe.yaml").read_text()  # with which the command can go on
    assert f"length: {{kind: '{__name__}:length'" in kinds and "'python:" not in kinds
    again = command("train", folder / "one" / "recipe.yaml", "--out", "two", "--no-memory-check")
    assert again.exit_code == 0, again.output
    assert logged(folder / "one") == logged(folder / "two")


def test_metrics_are_a_frame() -> None:
    found = small(out="run")
    lines = read_metrics(found.run / "metrics.jsonl")
    assert len(found.metrics) == len(lines)
    assert list(found.metrics["step"][-2:]) == [2, 2]  # the last step, and the evaluation after it


def test_without_pandas_metrics_are_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "find_spec", lambda name: None)
    table = frames.frame_of([{"step": 1}, {"step": 2, "loss": 0.5}])
    assert table.to_pylist() == [{"step": 1, "loss": None}, {"step": 2, "loss": 0.5}]


def test_runs_follow_each_other_in_one_process() -> None:
    first, second = small(1), small(1, seed=1)
    assert (first.run.name, second.run.name) == (f"{stem(first)}-seed0", f"{stem(first)}-seed1")
    assert logged(first.run) != logged(second.run)


def stem(found: rlhf.TrainResult) -> str:
    """Runs on rows are called by the file that the rows were written to."""
    [path] = (found.run.parent / "tasks").glob("*.jsonl")
    return path.stem


def test_a_recipe_may_be_a_mapping_a_path_or_an_object(folder: Path) -> None:
    values = {"policy": SMALL["policy"], "environment": {"kind": "countdown"}, "stages": [{"kind": "policy_gradient"}]}
    made = rlhf.load({**values, "rewards": {"o": {"kind": "outcome"}}}, **{"stages.0.steps": 7})
    assert made.stages[0].steps == 7 and made.rewards["o"].weight == 1.0
    changed = replace(made, seed=3)
    assert rlhf.load(changed) == changed
    assert rlhf.load("quickstart", seed=2).seed == 2


# --- what is given from Python ---------------------------------------------------------------------------------------


def test_a_local_function_is_named_in_the_recipe_and_asked_for_again(folder: Path) -> None:
    found = small(out="run")
    text = (folder / "run" / "recipe.yaml").read_text()
    assert "python:rewards.local" in text and text.startswith(
        "# Has parts of a Python program: goes on with rlhf.train("
    )
    refused = command("train", "--resume", "run", "steps=3")
    assert refused.exit_code == 2
    assert "rewards.local.kind: this part was passed by a Python program" in refused.output
    assert "rlhf.train(resume=RUN, rewards={'local': ...})" in refused.output
    with pytest.raises(RecipeError, match="this part was passed by a Python program, and cannot be imported"):
        rlhf.train(resume="run", steps=3)
    longer = small(resume=found, **{"stages.0.steps": 3})
    assert longer.is_finished and logged(longer.run)[-1][1] == 3
    assert command("trajectories", "run").exit_code == 0 and command("report", "run").exit_code == 0


def test_several_functions_have_names_and_weights() -> None:
    def right(answer: str, reference: str) -> float:
        return float(answer == reference)

    def brief(completions: list[str], **columns: Any) -> list[float]:
        return [-len(one) / 100 for one in completions]

    rewards: Any = {
        "right": right,
        "brief": {"kind": brief, "weight": 0.5},
        "exact": {"kind": "exact_match", "monitor": True},
    }
    found = small(1, rewards=rewards, out="run")
    assert {"reward/right", "reward/brief"} <= set(found.metrics.columns)
    text = (found.run / "recipe.yaml").read_text()
    assert "brief: {kind: 'python:rewards.brief', weight: 0.5}" in text
    with pytest.raises(RecipeError, match="two rewards have one name"):
        small(1, rewards=[right, right])


@dataclass(frozen=True)
class Echo:
    """An environment whose settings are its fields."""

    word: str = "yes"
    properties = Properties(deterministic=True, replayable=True, inline=True)

    def tasks(self, split: str) -> list[Task]:
        return [Task(id=f"echo/{split}/{i}") for i in range(4)]

    def start(self, task: Task) -> Said:
        return Said(self.word)


class Said:
    """One reply."""

    def __init__(self, word: str) -> None:
        self.word, self.opening = word, StepResult(f"Say {word}.")

    async def step(self, action: str) -> StepResult:
        return StepResult("", terminated=True, success=action == self.word)

    async def close(self) -> None:
        """Nothing is open."""


def test_an_environment_object_is_written_by_its_settings_where_it_has_some(folder: Path) -> None:
    class Live(Echo):
        """Cannot be imported."""

    rest = {"stages": [grpo(1)], "rewards": {"o": {"kind": "outcome"}}, **SMALL}
    rlhf.train(**rest, environment=Countdown(numbers=3), out="known")
    rlhf.train(**rest, environment=Echo("no"), out="own")
    found = rlhf.train(**rest, environment=Live("maybe"), out="live")
    assert rlhf.load("known").environment == Countdown(numbers=3)
    assert f"environment: {{kind: '{__name__}:Echo', word: 'no'}}" in (folder / "own" / "recipe.yaml").read_text()
    assert "environment: {kind: 'python:environment'}" in (folder / "live" / "recipe.yaml").read_text()
    assert rlhf.evaluate(found, environment=Live("maybe"), n=2, progress=False).n == 2
    with pytest.raises(RecipeError, match=r"environment=\.\.\."):
        rlhf.evaluate(found, progress=False)


def test_a_class_takes_keys_as_in_a_recipe() -> None:
    made = rlhf.load(
        {
            "policy": SMALL["policy"],
            "environment": {"kind": Echo, "word": "hello"},
            "rewards": {"o": {"kind": "outcome"}},
            "stages": [{"kind": "policy_gradient"}],
        }
    )
    assert made.environment == Echo("hello") and values_of(made)["environment"]["word"] == "hello"


@pytest.mark.parametrize("given", [ROWS, "rows.jsonl", Path("rows.jsonl"), "frame"])
def test_tasks_may_be_rows_a_file_or_a_frame(given: Any, folder: Path) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    rows = pytest.importorskip("pandas").DataFrame(ROWS) if given == "frame" else given
    rest = {
        "policy": SMALL["policy"],
        "stages": [{"kind": "policy_gradient"}],
        "rewards": {"r": {"kind": "exact_match"}},
    }
    made = rlhf.load(rest, environment=rows)
    assert sum(len(made.environment.tasks(split)) for split in ("train", "dev", "test")) == len(ROWS)


def test_cells_of_a_frame_become_plain_values_or_are_named(folder: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(ROWS).assign(
        steps=[np.array([1, 2])] * len(ROWS), at=[pandas.Timestamp("2026-01-02"), *[pandas.NaT] * (len(ROWS) - 1)]
    )
    made = Arguments(folder).environment(frame)
    first, second, *_ = map(json.loads, Path(made["path"]).read_text().splitlines())
    assert first == {**ROWS[0], "steps": [1, 2], "at": "2026-01-02T00:00:00"} and second["at"] is None
    with pytest.raises(RecipeError, match="no plain value") as refused:
        Arguments(folder).environment(frame.assign(image=b"x"))
    assert refused.value.where == "environment[0], column image"


def test_overrides_from_python_may_be_infinite_and_name_rewards(tmp_path: Path) -> None:
    changed = rlhf.load("quickstart", **{"stages.1.loss": {"kind": "ppo_clip", "clip_high": math.inf}})
    assert changed.stages[1].loss.clip_high == math.inf
    given = overrides_of(
        Arguments(tmp_path), {"rewards": {"x": "exact_match", "y": {"kind": "outcome"}}}, joins_rewards=True
    )
    assert given == ['rewards.x="exact_match"', 'rewards.y.kind="outcome"']
    text = "\U0001f600 \\ud83d\\ude00 \u2028 \x7f"
    [line] = overrides_of(Arguments(tmp_path), {"rewards": {"x": {"text": text}}}, joins_rewards=True)
    assert parse(line.partition("=")[2], "line") == text


def test_a_key_beside_a_whole_part_changes_it(folder: Path) -> None:
    recipe = {"policy": SMALL["policy"], "stages": [grpo()]}
    keys = {"rewards.right.weight": 0.25, "environment.max_rows": 50}
    parts = ({"right": {"kind": "exact_match"}}, ROWS, None)
    loaded = _Work(recipe, *parts, (), None, None, False, False, keys).loaded
    assert loaded.rewards["right"].weight == 0.25 and loaded.environment.max_rows == 50
    given = overrides_of(
        Arguments(folder), {"rewards": {"x": "exact_match"}, "rewards.x.weight": 2}, joins_rewards=True
    )
    assert given == ['rewards.x="exact_match"', "rewards.x.weight=2"]


def test_a_home_folder_is_a_run_in_calls_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    checkpoint = tmp_path / "run" / "checkpoints" / "0-policy_gradient-000002"
    checkpoint.mkdir(parents=True)
    for path in (tmp_path / "run" / "recipe.yaml", checkpoint / "state.json"):
        path.write_text("{}")
    assert recipe_and_checkpoint("~/run", None) == recipe_and_checkpoint(str(tmp_path / "run"), None)
    assert recipe_and_checkpoint("~/run", None)[1] == checkpoint
    assert Pretrained(path="~/model").path == str(tmp_path / "model")


def test_a_model_folder_is_recorded_whole_and_a_hub_name_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "models")
    policies = [Pretrained(path=path) for path in ("mine", "../models/mine", "Qwen/Qwen3-0.6B")]
    assert [policy.path for policy in policies] == [*[str(tmp_path / "models" / "mine")] * 2, "Qwen/Qwen3-0.6B"]


# --- the same strictness ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        {"stage": []},
        {"limits": {"max_token": 4}},
        {"limits": {"max_tokens": "4"}},
        {"rewards": {"r": {"kind": "exact_mach"}}},
        {"seed": -1},
        {"stages": [{"kind": "policy_gradient", "lr": 1e-3}]},
    ],
)
def test_mistakes_have_the_messages_of_the_recipe(changed: Mapping[str, Any], folder: Path) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    values = {
        "policy": SMALL["policy"],
        "environment": {"kind": "dataset", "path": "rows.jsonl"},
        "rewards": {"r": {"kind": "exact_match"}},
        "stages": [{"kind": "policy_gradient"}],
        **changed,
    }
    (folder / "run.yaml").write_text(json.dumps(values))
    with pytest.raises(Exception) as from_file:
        rlhf.load("run.yaml")
    with pytest.raises(type(from_file.value)) as from_python:
        rlhf.load(values)
    assert str(from_python.value) == str(from_file.value)


@pytest.mark.parametrize(
    ("given", "where", "message"),
    [
        ({"recipe": 7}, "rlhf.train", "not a recipe"),
        ({"callbacks": [3]}, "callbacks[0]", "is not a callback"),
        ({"callback": print}, "callback", "did you mean 'callbacks'"),
        ({"limits": {"max_tokens": object()}}, "limits.max_tokens", "an object is not allowed here"),
        ({"rewards": {"r": object()}}, "rewards.r.kind", "lacks __call__"),
        ({"environment": object()}, "environment.kind", "lacks"),
        ({"environment": [{"prompt": {1, 2}}]}, "environment[0], column prompt", "plain value"),
        ({"environment": [*ROWS, "a"]}, f"environment[{len(ROWS)}]", "plain values"),
        ({"environment": []}, "environment", "there are no tasks"),
        ({"rewards": [length, 3]}, "rewards[1]", "this is not a reward"),
        ({"rewards": [length, "exact_match"]}, "rewards[1]", "this is not a reward"),
        ({"rewards": {"r": None}}, "rewards.r", "this is not a reward"),
        ({"rewards": 3}, "rewards", "these are not rewards"),
        ({"out": 5}, "rlhf.train(out=...)", "a folder, as text"),
        ({"recipe": None, "resume": 5}, "rlhf.train(resume=...)", "a folder, as text"),
        ({"memory_check": "no"}, "rlhf.train(memory_check=...)", "True or False"),
    ],
)
def test_objects_that_are_no_parts_are_refused(given: dict[str, Any], where: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        small(**given)
    assert caught.value.where == where and caught.value.hint


@pytest.mark.parametrize(
    ("given", "where", "expected"),
    [
        ({"n": "3"}, "rlhf.evaluate(n=...)", "a whole number, at least 1"),
        ({"n": 0}, "rlhf.evaluate(n=...)", "a whole number, at least 1"),
        ({"n": True}, "rlhf.evaluate(n=...)", "a whole number, at least 1"),
        ({"attempts": 2.5}, "rlhf.evaluate(attempts=...)", "a whole number, at least 1"),
        ({"tries": "x"}, "rlhf.evaluate(tries=...)", "a whole number, at least 1"),
        ({"programs": 0}, "rlhf.evaluate(programs=...)", "a whole number, at least 1"),
        ({"price_in": -1}, "rlhf.evaluate(price_in=...)", "a number, at least 0"),
        ({"out": 5}, "rlhf.evaluate(out=...)", "a folder"),
        ({"checkpoint": 5}, "rlhf.evaluate(checkpoint=...)", "a folder"),
        ({"suite": 5}, "rlhf.evaluate(suite=...)", "text"),
        ({"split": 5}, "rlhf.evaluate(split=...)", "text"),
        ({"strategy": ["best_of_n"]}, "rlhf.evaluate(strategy=...)", "a mapping with a kind"),
        ({"strategy": {"kind": "best_of_n", "n": object()}}, "strategy.n", "a plain value"),
        ({"allow_overlap": "no"}, "rlhf.evaluate(allow_overlap=...)", "True or False"),
        ({"policy": None}, "rlhf.evaluate(policy)", "a result of rlhf.train"),
    ],
)
def test_arguments_of_an_evaluation_have_their_types(given: dict[str, Any], where: str, expected: str) -> None:
    arguments = {"policy": "random", "suite": "quick", "n": 1, **given}
    with pytest.raises(RecipeError) as caught:
        rlhf.evaluate(**arguments)
    assert caught.value.where == where and expected in caught.value.expected
    assert caught.value.got and caught.value.hint


def test_what_is_no_evaluation_is_not_compared(folder: Path) -> None:
    with pytest.raises(RecipeError, match="not an evaluation") as caught:
        rlhf.compare(folder, 2)
    assert caught.value.got == "2" and "rlhf.compare(" in caught.value.hint


# --- callbacks -------------------------------------------------------------------------------------------------------


def test_callbacks_see_each_step_and_evaluation() -> None:
    seen: list[rlhf.StepInfo] = []

    async def later(step: rlhf.StepInfo) -> None:
        seen.append(step)

    found = small(callbacks=[later])
    assert [(s.stage, s.step, s.metrics) for s in seen] == [
        (line.stage, line.step, line.values) for line in read_metrics(found.run / "metrics.jsonl")
    ]
    assert {s.run for s in seen} == {found.run}


def test_callbacks_see_supervised_steps() -> None:
    steps: list[int] = []
    stage = {"kind": "supervised", "n_demonstrations": 8, "epochs": 1, "batch_size": 4, "optimizer": {"lr": 1e-3}}
    small(stages=[stage], callbacks=lambda step: steps.append(step.step))
    assert steps == [1, 2, 2]  # two updates, and the evaluation


def test_a_callback_that_raises_ends_the_run_and_its_checkpoint_stays() -> None:
    def bad(step: rlhf.StepInfo) -> None:
        if step.step == 2:
            raise KeyError("loss")

    with pytest.raises(TrainingError) as caught:
        small(4, callbacks=[bad], out="run")
    assert "bad, step 2 of 0-policy_gradient" in caught.value.where and caught.value.got == "KeyError: 'loss'"
    resumed, whole = small(resume="run"), small(4, out="whole")
    assert resumed.is_finished and logged(resumed.run) == logged(whole.run)


def test_a_callback_that_raises_in_a_supervised_stage_loses_no_update() -> None:
    def bad(step: rlhf.StepInfo) -> None:
        if step.step == 3:
            raise KeyError("loss")

    stage = {"kind": "supervised", "n_demonstrations": 8, "epochs": 2, "batch_size": 4, "optimizer": {"lr": 1e-3}}
    with pytest.raises(TrainingError, match="resume from the last checkpoint"):
        small(stages=[stage], callbacks=[bad], out="run")
    assert Path("run/checkpoints/0-supervised-000003").is_dir()
    resumed, whole = small(resume="run"), small(stages=[stage], out="whole")
    assert logged(resumed.run) == logged(whole.run)


def test_a_callback_may_stop_the_run() -> None:
    found = small(50, callbacks=[lambda step: step.stop() if step.step == 3 else None])
    assert not found.is_finished and logged(found.run)[-1][1] == 3
    assert found.success_before is not None and found.n_episodes > 0 and found.train_s > 0
    with pytest.raises(RecipeError, match=r"rlhf\.train\(resume="):
        small(resume=found, recipe="quickstart")


def test_a_callback_that_stops_at_the_last_evaluation_leaves_a_finished_run() -> None:
    def stop_when_measured(step: rlhf.StepInfo) -> None:
        if "eval/success" in step.metrics and step.step == 2:
            step.stop()

    found = small(2, callbacks=[stop_when_measured])
    assert found.is_finished and found.success_after is not None and (found.run / "result.json").is_file()


def test_a_hook_of_ones_own_takes_part_in_steps() -> None:
    class Counting(StageHook):
        n = 0

        async def on_step_end(self, run: Any, parts: Any, step: Any) -> None:
            self.n += 1

    hook = Counting()
    small(3, callbacks=[hook])
    assert hook.n == 3


def test_a_run_that_fails_while_a_step_is_counted_saves_no_half_of_it() -> None:
    class Watching(StageHook):
        seen: ClassVar[list[tuple[str, bool]]] = []

        async def after_update(self, run: Any, parts: Any, step: Any) -> None:
            self.seen.append(("after_update", parts.is_incomplete))

        async def on_step_end(self, run: Any, parts: Any, step: Any) -> None:
            self.seen.append(("on_step_end", parts.is_incomplete))

        async def between_steps(self, run: Any, parts: Any) -> None:
            self.seen.append(("between_steps", parts.is_incomplete))

    small(1, callbacks=[Watching()])
    assert set(Watching.seen) == {("after_update", False), ("on_step_end", True), ("between_steps", False)}


@pytest.mark.parametrize("method", ["after_update", "on_step_end", "between_steps"])
def test_a_hook_that_raises_is_named_and_what_was_trained_is_saved(method: str) -> None:
    class Bad(StageHook):
        async def fail(self, run: Any, parts: Any, step: Any = None) -> None:
            if (run.state.step if step is None else step.number + 1) == 2:
                raise KeyError("loss")

    setattr(Bad, method, Bad.fail)
    with pytest.raises(TrainingError, match="a hook raised") as caught:
        small(4, callbacks=[Bad()], out="run")
    after = "after " * (method == "between_steps")
    assert f"hook Bad, {after}step 2 of 0-policy_gradient" in caught.value.where
    assert caught.value.got.startswith("KeyError: 'loss' (test_python.py:")
    assert (Path("run") / "checkpoints" / "0-policy_gradient-000002").is_dir()
    resumed, whole = small(resume="run"), small(4, out="whole")
    assert resumed.is_finished and logged(resumed.run) == logged(whole.run)


@pytest.mark.parametrize("place", ["values", "metrics"])
def test_a_hook_that_logs_what_is_no_metric_is_named_and_what_was_trained_is_saved(place: str) -> None:
    class Bad(StageHook):
        async def on_step_end(self, run: Any, parts: Any, step: Any) -> None:
            step.metrics["custom/n"] = 1.0
            if step.number == 1:
                getattr(step, place)["n_long"] = 1.0

    with pytest.raises(DataError, match="no such metric") as caught:
        small(4, callbacks=[Bad()], out="run")
    assert caught.value.where == "hook Bad, step 2 of 0-policy_gradient: metrics" and caught.value.got == "'n_long'"
    resumed, whole = small(resume="run"), small(4, out="whole")
    lines = logged(resumed.run)
    assert [values.pop("custom/n", None) for *_, values in lines if "rollout/success" in values] == [
        1.0,
        None,
        None,
        None,
    ]
    assert resumed.is_finished and lines == logged(whole.run)


def test_hooks_whose_states_a_checkpoint_could_not_give_back_are_refused() -> None:
    class Keeping(StageHook):
        def __init__(self, key: str, kept: Any = 1) -> None:
            self.key, self.kept = key, kept

        def state_dict(self) -> dict[str, Any]:
            return {"kept": self.kept}

    assert small(1, callbacks=[Keeping("mine")]).is_finished
    with pytest.raises(RecipeError, match="under one key"):
        small(1, callbacks=[Keeping("sampler")])
    with pytest.raises(RecipeError, match="under one key"):
        small(1, callbacks=[Keeping("mine"), Keeping("mine")])
    with pytest.raises(RecipeError, match="the hook Keeping, state_dict"):
        small(1, callbacks=[Keeping("mine", object())])
    with pytest.raises(RecipeError, match="a callback must be an instance or a function, not a class"):
        small(1, callbacks=Keeping)


def test_a_run_is_not_resumed_without_a_hook_that_kept_a_state() -> None:
    class Counting(StageHook):
        key, n = "counting", 0

        async def on_step_end(self, run: Any, parts: Any, step: Any) -> None:
            self.n += 1

        def state_dict(self) -> dict[str, Any]:
            return {"n": self.n}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.n = state["n"]

    def stop(step: rlhf.StepInfo) -> None:
        if step.step == 2:
            step.stop()

    small(3, callbacks=[Counting(), stop], out="run")
    with pytest.raises(CheckpointError, match="state of a part") as caught:
        small(resume="run")
    assert caught.value.got == "counting" and "callbacks=[" in caught.value.hint
    again = Counting()
    assert small(resume="run", callbacks=[again]).is_finished and again.n == 3


def test_a_hook_whose_method_is_plain_where_it_should_be_async_is_refused() -> None:
    class Plain(StageHook):
        def on_step_end(self, run: Any, parts: Any, step: Any) -> None:  # type: ignore[override]
            pass

    class Async(StageHook):
        async def open(self, run: Any, parts: Any) -> None:
            pass

    with pytest.raises(RecipeError, match="must be async") as caught:
        small(1, callbacks=Plain())
    assert "the hook Plain" in caught.value.where and caught.value.expected.startswith("async def on_step_end(self")
    with pytest.raises(RecipeError, match="must not be async") as caught:
        small(1, callbacks=Async())
    assert caught.value.got == "async def open"


# --- stopping --------------------------------------------------------------------------------------------------------


def until_trained(handle: rlhf.Handle) -> None:
    end = time.monotonic() + 120
    while handle.run is None or not any("0-policy" in line.stage for line in lines(handle.run)):
        assert handle.is_running and time.monotonic() < end
        time.sleep(0.05)


def lines(run: Path) -> list[Any]:
    return [x for x in read_metrics(run / "metrics.jsonl") if x.step] if (run / "metrics.jsonl").is_file() else []


def test_a_handle_stops_a_run_that_goes_on_elsewhere() -> None:
    handle = rlhf.start(rewards=length, environment=ROWS, stages=[grpo(500)], **SMALL)
    until_trained(handle)
    stopped = handle.stop()
    assert not handle.is_running and not stopped.is_finished
    n = len(lines(stopped.run))
    again = rlhf.start(resume=stopped, rewards={"length": length}, memory_check=False, progress=False)
    while len(lines(stopped.run)) <= n and again.is_running:
        time.sleep(0.05)
    assert again.stop().run == stopped.run and len(lines(stopped.run)) > n


IN_THREAD = """
import signal
import rlhf
handle = rlhf.start({recipe!r}, rewards=lambda answer, reference: float(answer == reference), environment={rows!r},
    out="run", progress=False)
try:
    handle.result()
except rlhf.Stopped:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    print("stopped")
"""


@contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill a process at the end, also where what was expected of it has failed."""
    try:
        yield
    finally:
        process.kill()


def test_rlhf_stop_has_a_run_in_a_thread_write_a_checkpoint() -> None:
    recipe = {key: value for key, value in SMALL.items() if key not in ("memory_check", "progress")}
    code = IN_THREAD.format(recipe={**recipe, "stages": [grpo(5000)]}, rows=ROWS)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    own: dict[str, Any] = {"env": os.environ | {"PYTHONPATH": path}, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **own) as process, ending(process):
        end = time.monotonic() + 120
        while not lines(Path("run")):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        said = command("stop", "run")
        assert said.exit_code == 0 and "stopped at run/checkpoints/0-policy" in said.output, said.output
        assert process.communicate(timeout=60)[0] == "stopped\n" and process.returncode == 0


def test_sigterm_stops_every_call_in_a_thread_and_nothing_of_a_program_that_hears_it_itself() -> None:
    def until_stopped() -> bool:
        while not STOP_REQUEST.get().is_made:  # type: ignore[union-attr]
            time.sleep(0.01)
        return True

    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        calls = [Background(until_stopped), Background(until_stopped)]
        forked = multiprocessing.get_context("fork")
        is_there = forked.Event()
        child = forked.Process(target=lambda: is_there.set() or time.sleep(600), daemon=True)
        child.start()
        assert is_there.wait(60)
        child.terminate()
        child.join(60)
        assert child.exitcode == -signal.SIGTERM and not any(call.is_stopped for call in calls)
        signal.raise_signal(signal.SIGTERM)
        assert all(call.result() for call in calls) and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
        call = Background(until_stopped)
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM] and call.is_running and not call.is_stopped
        call.stop()
        assert call.result()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_control_c_stops_a_run_in_this_thread() -> None:
    def press(step: rlhf.StepInfo) -> None:
        if step.step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(rlhf.Stopped) as caught:
        small(500, callbacks=[press], out="run")
    assert caught.value.hint == "rlhf.train(resume='run', rewards={'local': ...})"
    assert not small(resume="run", callbacks=[lambda step: step.stop()]).is_finished


def test_a_running_loop_is_no_obstacle() -> None:
    async def cell() -> rlhf.TrainResult:
        return small(1)

    assert asyncio.run(cell()).is_finished


def test_a_run_in_a_folder_that_is_taken_is_refused() -> None:
    found = small(1, out="run")
    with pytest.raises(RecipeError, match="not empty"):
        small(1, out=found.run)
    with pytest.raises((RecipeError, CheckpointError)):
        rlhf.train(resume="nowhere")


# --- evaluate and compare --------------------------------------------------------------------------------------------


def test_an_endpoint_or_a_program_is_judged_on_rows_and_rewards_of_ones_own(folder: Path) -> None:
    def right(answer: str, reference: str) -> float:
        return float(answer == reference)

    def brief(answer: str, reference: str) -> float:
        return float(len(answer) < 3)

    def largest(body: dict[str, Any]) -> str:
        return max(re.findall(r"\d", str(body["messages"][-1]["content"])))

    own = {"environment": ROWS, "rewards": right, "progress": False}
    with served(lambda body, _: completion(largest(body))) as (url, _):
        found = rlhf.evaluate(endpoint=url, model="m", n=4, limits={"max_tokens": 5}, price_in=1, out="kept", **own)
        parts = {"a": {"environment": ROWS[:32], "rewards": right}, "b": {"environment": ROWS[32:], "rewards": brief}}
        both = rlhf.evaluate(endpoint=url, model="m", suite={"name": "two", "parts": parts}, n=2, progress=False)
        assert rlhf.evaluate(endpoint=url, model="m", limits={"max_tokens": 5}, **own).n == len(ROWS)
    assert (found.success, found.n, found.suite) == (1.0, 4, "tasks") and found.summary["per_solved"]["cost"] > 0
    assert (
        from_text((folder / "kept" / "evaluation.yaml").read_text(), "plan")["suite"]["parts"]["tasks"]["limits"][
            "max_tokens"
        ]
        == 5
    )
    assert both.suite == "two" and both.success == 1.0 and set(both.summary["parts"]) == {"a", "b"}
    assert list(both.summary["parts"]["b"]["rewards"]) == ["brief"]
    assert rlhf.evaluate("oracle", n=3, **own).success == 1.0


def test_a_model_is_judged_on_all_rows_of_a_program_and_on_the_test_split_of_a_file(folder: Path) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    rest = {"rewards": {"r": {"kind": "exact_match"}}, "progress": False}
    n_unseen = len(Dataset(path=Path("rows.jsonl")).tasks("test"))
    for given in (ROWS, {"kind": "dataset", "path": ROWS}):
        assert rlhf.evaluate("oracle", environment=given, **rest).n == len(ROWS)
    for given in ("rows.jsonl", {"kind": "dataset", "path": "rows.jsonl"}):
        assert rlhf.evaluate("oracle", environment=given, **rest).n == n_unseen < len(ROWS)
    quietly = {"progress": False}
    part = {"environment": ROWS, "rewards": rest["rewards"]}
    assert rlhf.evaluate("oracle", suite={"name": "s", "parts": {"p": part}}, **quietly).n == len(ROWS)
    n_dev = len(Dataset(path=Path("rows.jsonl")).tasks("dev"))
    watched = {"name": "s", "parts": {"p": part | {"tasks": {"split": "dev"}}}}
    assert rlhf.evaluate("oracle", suite=watched, **quietly).n == n_dev < len(ROWS)
    keyed = {"kind": "dataset", "path": ROWS, "split_ratios": {"train": 0.5, "test": 0.5}}
    assert "path" in Arguments(folder).environment(keyed, as_test=True)  # of which the program says what is unseen


def test_evaluations_are_compared(folder: Path) -> None:
    found = small(1, out="run", rewards=length, evaluation={"n_tasks": 4})
    one = rlhf.evaluate(found, out="one", progress=False)
    other = rlhf.evaluate(found, out="other", progress=False)
    assert one.n == 4 and one.success == other.success and one.out == Path("one")
    assert list(one.metrics["metric"][:2]) == ["success", "score"]
    compared = rlhf.compare(one, other, found)
    assert [row.second for row in compared.rows] == ["other", "run"] and compared.rows[0].difference == 0.0
    assert len(compared.metrics) == 2 and len(compared.rows[0].flipped) == 0
    with pytest.raises(RecipeError, match="a comparison needs two evaluations"):
        rlhf.compare(one)
    with pytest.raises(RecipeError, match="this evaluation was not saved"):
        rlhf.compare(one, replace(one, out=None))


# --- the page, as a script and as a notebook -------------------------------------------------------------------------


def files_of_page(folder: Path, *, small: bool) -> str:
    """Write the data of the page; return the job, with fewer steps if wanted."""
    found = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", PAGES, re.DOTALL))
    exec(compile(found["make_questions.py"], "make_questions.py", "exec"), {})
    job = found["job.py"]
    if small:
        job, n = re.subn(r'"n_demonstrations": \d+', '"n_demonstrations": 32', job)
        job, m = re.subn(r'"steps": \d+', '"steps": 2', job)
        job, k = re.subn(r"stages=", 'evaluation={"n_tasks": 4}, stages=', job)
        assert n == m == k == 1
    return job


def script(job: str, folder: Path) -> str:
    (folder / "job.py").write_text(job)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "job.py"], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_job_of_the_page_is_twelve_lines_and_trains_as_a_script(folder: Path) -> None:
    job = files_of_page(folder, small=True)
    assert len([line for line in job.splitlines() if line.strip()]) <= 12
    assert "rollout/success" in script(job, folder)


@pytest.mark.extended
def test_the_job_of_the_page_learns_as_a_script(folder: Path) -> None:
    script(files_of_page(folder, small=False), folder)
    result = json.loads((folder / "runs" / "questions-seed0" / "result.json").read_text())
    assert result["after"]["success"] > result["before"]["success"] + 0.1, result


def test_the_stage_that_the_page_gives_as_trls_has_its_defaults(folder: Path) -> None:
    theirs = pytest.importorskip("trl").GRPOConfig(output_dir=str(folder), use_cpu=True, bf16=False)
    [text] = [text for text in re.findall(r"```yaml\n(.*?)```", PAGES, re.DOTALL) if text.startswith("# trl_defaults")]
    stage = build_part("stage", parse(text, "coming_from.md"), "stages[0]", base=folder)
    assert stage.tasks_per_step * stage.group_size == theirs.generation_batch_size
    assert (stage.group_size, stage.temperature) == (theirs.num_generations, theirs.temperature)
    assert (stage.minibatches, stage.epochs) == (theirs.steps_per_generation, theirs.num_iterations)
    assert (stage.loss.clip_low, stage.loss.clip_high) == (theirs.epsilon, theirs.epsilon_high or theirs.epsilon)
    assert (stage.loss.dual_clip, stage.loss.kl, theirs.beta) == (theirs.delta, None, 0.0)
    assert (stage.reduction.kind, theirs.loss_type) == ("token_mean", "dapo")
    assert (stage.advantage.normalize_std, theirs.scale_rewards) == (True, "group")
    assert stage.filters.drop_truncated == theirs.mask_truncated_completions
    own = stage.optimizer
    assert (own.lr, *own.betas, own.eps) == (
        theirs.learning_rate,
        theirs.adam_beta1,
        theirs.adam_beta2,
        theirs.adam_epsilon,
    )
    assert (own.schedule, own.min_lr_ratio, own.warmup_steps) == (theirs.lr_scheduler_type, 0, theirs.warmup_steps)
    assert (own.weight_decay, own.max_grad_norm) == (theirs.weight_decay, theirs.max_grad_norm)


NOTEBOOK = [
    """
import os, signal
policy = {"kind": "from_scratch", "hidden_size": 16, "n_layers": 1, "n_heads": 2}
job = dict(policy=policy, environment="questions.jsonl", rewards=right, limits={"max_tokens": 4})
def press(step):
    if step.step == 2:
        os.kill(os.getpid(), signal.SIGINT)  # what the stop button sends
try:
    stages = [{"kind": "policy_gradient", "steps": 40, "tasks_per_step": 2}]
    rlhf.train(**job, stages=stages, out="runs/stopped", callbacks=[press])
except rlhf.Stopped as error:
    print("stopped:", error.hint)
""",
    """
again = rlhf.train(resume="runs/stopped", rewards=right, callbacks=[lambda step: step.stop()], progress=False)
print("again:", again.is_finished, again.run)
""",
    """
import asyncio
await asyncio.sleep(0)
print("evaluated:", rlhf.evaluate(run, rewards=right, n=2, progress=False).n)
""",
]


def executed(cells: list[str], folder: Path) -> str:
    """What the cells of a notebook print."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}})
    before, os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH", ""), str(ROOT)
    try:
        client.execute()
    finally:
        os.environ["PYTHONPATH"] = before
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    return "".join(output.get("text") or str(output.get("data", {}).get("text/plain", "")) for output in outputs)


def test_the_job_of_the_page_trains_stops_and_goes_on_in_a_notebook(folder: Path) -> None:
    job = files_of_page(folder, small=True)
    told = executed([job, *NOTEBOOK], folder)
    assert "rollout/success" in told and "evaluated: 2" in told
    assert (
        "stopped: rlhf.train(resume='runs/stopped', rewards={'right': ...})" in told
        and "again: False runs/stopped" in told
    )
