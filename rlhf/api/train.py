"""`rlhf.train` and `rlhf.start`: a run from Python, in this thread or in one of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf.api import arguments as checked
from rlhf.api.background import Background, outside_of_loops
from rlhf.api.frames import Frame, frame_of
from rlhf.api.values import PARTS, Arguments
from rlhf.commands.output import Stopped, errors, quiet_libraries
from rlhf.commands.train import recipe_of_run, refuse_before
from rlhf.errors import RecipeError
from rlhf.given_parts import given, how_to_resume
from rlhf.recipe import Recipe, load_values
from rlhf.recipe import load as load_recipe
from rlhf.recipe.describe import given as described
from rlhf.recipe.model import named_parts, values_of
from rlhf.recipe.text import escaped, parse
from rlhf.registry import refuse_import
from rlhf.sinks import read_metrics
from rlhf.terminal import CleanConsole


@dataclass(frozen=True)
class TrainResult:
    """Result of a run.

    Attributes:
        run: run folder.
        report: its HTML report; None if the run was stopped early.
        success_before, success_after: success rates on unseen tasks; None if not measured.
        interval_before, interval_after: their 95% intervals.
        train_s: seconds of training.
        n_episodes: number of training attempts.
        hub: address that the policy was pushed to; empty if none.
        is_finished: whether the run finished; `rlhf.train(resume=result)` resumes one that did not.
    """

    run: Path
    report: Path | None = None
    success_before: float | None = None
    success_after: float | None = None
    interval_before: tuple[float, float] | None = None
    interval_after: tuple[float, float] | None = None
    train_s: float = 0.0
    n_episodes: int = 0
    hub: str = ""
    is_finished: bool = True

    @property
    def metrics(self) -> Frame:
        """Logged metrics, one row a line: a pandas frame where installed, else a pyarrow table."""
        lines = read_metrics(self.run / "metrics.jsonl")
        return frame_of([{"stage": line.stage, "step": line.step, "time": line.time, **line.values} for line in lines])


def load(recipe: str | Path | Mapping[str, Any] | Recipe, **overrides: Any) -> Recipe:
    """Return a recipe as typed settings objects, checked as `rlhf train` checks it.

    Args:
        recipe: name, path, run folder, or a mapping with the contents of the YAML.
        overrides: recipe overrides: `seed=1`, `**{"stages.1.steps": 60}`.
    """
    arguments = Arguments(Path("runs") / "tasks")
    return _loaded(recipe, arguments, overrides_of(arguments, overrides))


def train(
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    *,
    rewards: Any = None,
    environment: Any = None,
    agent: Any = None,
    callbacks: Any = (),
    out: str | Path | None = None,
    resume: str | Path | TrainResult | None = None,
    progress: bool = True,
    memory_check: bool = True,
    **overrides: Any,
) -> TrainResult:
    """Train a policy and wait for the end.

    Ctrl-C, or the stop button of a notebook, writes a checkpoint, from which `resume` continues.

    Args:
        recipe: name, path, a mapping with the contents of the YAML, or a `Recipe`; None if other arguments define it.
        rewards: a function, a list of them, or a mapping of names to functions, reward objects or `{"kind": function,
            "weight": 0.5}`. A function takes (answer, reference), (task, trajectory), or what those of TRL or verl do.
        environment: an environment, a file of tasks, a list of rows, or recipe keys.
        agent: an agent, or recipe keys.
        callbacks: functions that are called with a `StepInfo` after each step, or `StageHook`s; one alone or several.
        out: run folder; runs/NAME-seedN by default.
        resume: run to resume; objects passed from Python are passed again.
        progress: whether to print progress.
        memory_check: whether to fail before training if the estimated memory exceeds what is free.
        overrides: recipe overrides: `seed=1`, `**{"stages.1.steps": 60}`.

    Raises:
        Stopped: the user stopped it.
        RlhfError: any other problem; finished work is saved.
    """
    refuse_import("rlhf.train")
    work = _Work(recipe, rewards, environment, agent, callbacks, out, resume, progress, memory_check, overrides)
    return outside_of_loops(work.run)


def start(recipe: str | Path | Mapping[str, Any] | Recipe | None = None, **arguments: Any) -> Handle:
    """Start training in a thread and return at once; arguments as of `train`, checked before it returns."""
    known = {"callbacks": (), "out": None, "resume": None, "progress": True, "memory_check": True}
    own = {name: arguments.pop(name, default) for name, default in known.items()}
    parts = {name: arguments.pop(name, None) for name in ("rewards", "environment", "agent")}
    return Handle(_Work(recipe, **parts, **own, overrides=arguments))


class Handle:
    """A run in a thread of its own."""

    def __init__(self, work: _Work) -> None:
        self._work, self._thread = work, Background(work.run)

    @property
    def run(self) -> Path | None:
        """Folder of the run, once there is one."""
        return self._work.folder

    @property
    def is_running(self) -> bool:
        """True while the run is in progress."""
        return self._thread.is_running

    def stop(self) -> TrainResult:
        """End the run as Ctrl-C does, with a checkpoint, and return what there is."""
        self._thread.stop()
        try:
            return self.result()
        except Stopped:
            if self._work.folder is None:
                raise
            return _stopped(self._work.loaded, self._work.folder)

    def result(self) -> TrainResult:
        """Wait for the end. Raises what ended the run; KeyboardInterrupt here stops it."""
        return self._thread.result()


@dataclass
class _Work:
    """A run that is ready to begin: its recipe has been checked.

    Attributes:
        folder: of the run, once there is one.
    """

    recipe: Any
    rewards: Any
    environment: Any
    agent: Any
    callbacks: Any
    out: str | Path | None
    resume: str | Path | TrainResult | None
    progress: bool
    memory_check: bool
    overrides: Mapping[str, Any]
    folder: Path | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        from rlhf.training.hooks.callbacks import Callbacks

        resume = self.resume.run if isinstance(self.resume, TrainResult) else self.resume
        self._resume = checked.folder(resume, "rlhf.train", "resume", "runs/quickstart-seed0")
        self._out = checked.folder(self.out, "rlhf.train", "out", "runs/mine")
        checked.flag(self.progress, "rlhf.train", "progress")
        checked.flag(self.memory_check, "rlhf.train", "memory_check")
        self._callbacks = Callbacks.of(self.callbacks)
        self._arguments = Arguments((self._out.parent if self._out else Path("runs")) / "tasks")
        parts = {"rewards": self.rewards, "environment": self.environment, "agent": self.agent}
        texts = overrides_of(self._arguments, {**parts, **self.overrides}, joins_rewards=self._resume is not None)
        with given(self._arguments.parts):
            if self._resume is not None:
                self._refuse_recipe()
                self.loaded = recipe_of_run(self._resume, None, texts, self._out)
            else:
                self.loaded = _loaded(self.recipe, self._arguments, texts)
            if self.loaded.cluster.is_on:
                raise RecipeError(
                    "a run on Ray is started from the command line",
                    where="cluster.rollout_workers",
                    got=str(self.loaded.cluster.rollout_workers),
                    expected="0 in Python",
                    hint="rlhf train RECIPE, or leave cluster out",
                )
            refuse_before(self.loaded, is_resumed=self._resume is not None, memory_check=self.memory_check)

    def run(self) -> TrainResult:
        """Train in this thread. Raises Stopped where that was wanted from outside."""
        from rlhf.build.model_folder import pushed
        from rlhf.build.processes import joined
        from rlhf.build.resume import run_folder
        from rlhf.build.train import train as run
        from rlhf.training.run import Interrupted

        quiet_libraries()
        console = errors() if self.progress else CleanConsole(quiet=True)
        with given(self._arguments.parts):
            try:
                with joined(self.loaded), run_folder(self.loaded, self._out, self._resume) as self.folder:
                    values = run(
                        self.loaded, self.folder, resume=self._resume, console=console, callbacks=self._callbacks
                    )
                    values |= pushed(self.loaded, self.folder, console.print)
            except (Interrupted, asyncio.CancelledError, KeyboardInterrupt) as error:
                if self._callbacks.is_stopped and self.folder is not None:
                    return _stopped(self.loaded, self.folder)
                raise self.stopped(error.what if isinstance(error, Interrupted) else "stopped") from None
        return _result(values)

    def stopped(self, what: str) -> Stopped:
        """Say that the run was stopped, and how to go on with it."""
        folder = str(self.folder) if self.folder and (self.folder / "recipe.yaml").is_file() else ""
        hint = how_to_resume(Path(folder), in_python=True) if folder else ""
        return Stopped(what, where=str(self.folder or "rlhf.train"), hint=hint)

    def _refuse_recipe(self) -> None:
        if self.recipe is not None:
            raise RecipeError(
                "a run resumes with its own recipe",
                where="rlhf.train",
                got="a recipe beside resume",
                expected="one of the two",
                hint=f"rlhf.train(resume={str(self._resume)!r})",
            )


def overrides_of(arguments: Arguments, overrides: Mapping[str, Any], *, joins_rewards: bool = False) -> list[str]:
    """Return `key=value` overrides, as a command line has them: a value in JSON is one in YAML."""
    plain = {
        key: arguments.key(key, value) for key, value in overrides.items() if value is not None or key not in PARTS
    }
    if joins_rewards and "rewards" in plain:  # beside those that the run has besides
        joined: dict[str, Any] = {}
        for name, keys in plain.pop("rewards").items():
            own = {f".{key}": value for key, value in keys.items()} if isinstance(keys, Mapping) else {"": keys}
            joined |= {f"rewards.{name}{key}": value for key, value in own.items()}
        plain = joined | plain  # keys of one of them come after it
    return [f"{key}={checked.yaml_line(value)}" for key, value in plain.items()]


def _loaded(recipe: Any, arguments: Arguments, texts: Sequence[str]) -> Recipe:
    if isinstance(recipe, str | Path):
        with given(arguments.parts):
            return load_recipe(recipe, texts)
    base = Path()
    if isinstance(recipe, Recipe):
        live = {path: part for path, part in named_parts(recipe).items() if arguments.is_live(part, path)}
        arguments.parts = live | arguments.parts
        with given(arguments.parts):
            values: Any = escaped(values_of(recipe))
        base = recipe.base
    else:
        values = _of_mapping(recipe, arguments)
    with given(arguments.parts):
        return load_values(values, texts, name=_name(values, texts), base=base)


def _of_mapping(recipe: Mapping[str, Any] | None, arguments: Arguments) -> dict[str, Any]:
    if recipe is not None and not isinstance(recipe, Mapping):
        raise RecipeError(
            "not a recipe",
            where="rlhf.train",
            got=described(recipe),
            expected="a name, a path, a mapping of keys to values, or a Recipe",
            hint="rlhf.train('quickstart')",
        )
    return {str(key): arguments.key(str(key), value) for key, value in (recipe or {}).items()}


def _name(values: Mapping[str, Any], texts: Sequence[str]) -> str:
    """Return the name of a run without one: that of its file of tasks."""
    environment = next((parse(t.partition("=")[2], "environment") for t in texts if t.startswith("environment=")), None)
    environment = environment or values.get("environment")
    path = environment.get("path") if isinstance(environment, Mapping) else None
    stem = Path(path).stem if isinstance(path, str) else ""
    return stem if stem and stem.replace("-", "").replace("_", "").isalnum() and stem.isascii() else "run"


def _stopped(recipe: Recipe, folder: Path) -> TrainResult:
    """Result of a stopped run, from its newest checkpoint."""
    from rlhf.build.train import result_of
    from rlhf.training.checkpoints import store

    newest = store.latest(folder / "checkpoints")
    if newest is None:
        return TrainResult(folder, is_finished=False)
    return replace(_result(result_of(store.load_state(newest), folder, recipe)), is_finished=False)


def _result(values: Mapping[str, Any]) -> TrainResult:
    before, after = values["interval_before"], values["interval_after"]
    return TrainResult(
        run=Path(values["run"]),
        report=Path(values["report"]) if values["report"] else None,
        success_before=values["success_before"],
        success_after=values["success_after"],
        interval_before=before and (before[0], before[1]),
        interval_after=after and (after[0], after[1]),
        train_s=values["train_s"],
        n_episodes=values["n_episodes"],
        hub=values.get("hub", ""),
    )
