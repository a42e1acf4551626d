"""Callbacks of a Python program: functions that are called with the metrics of each step."""

from __future__ import annotations

import asyncio
import inspect
import io
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlhf import processes
from rlhf.data.untrusted import name_of
from rlhf.errors import RecipeError, RlhfError, TrainingError, raised_at
from rlhf.sinks import LogLine, checked
from rlhf.training.context import LiveStage, RunContext
from rlhf.training.hooks.base import StageHook, Step


@dataclass(frozen=True)
class StepInfo:
    """Line of metrics for callbacks: a step of a stage, or an evaluation after it.

    Attributes:
        run: folder of the run.
        stage: number and kind of the stage, as `1-policy_gradient`.
        step: of that stage, counted from 1; 0 is an evaluation before its first step.
        metrics: by name, as in `metrics.jsonl`; None stands for a value that was not finite.
        stop: ends the run as Ctrl-C does, once all callbacks have been called: its checkpoint is written.
    """

    run: Path
    stage: str
    step: int
    metrics: Mapping[str, float | None]
    stop: Callable[[], None] = field(repr=False, compare=False)


@dataclass
class Callbacks(StageHook):
    """Callback hook: hands logged lines to functions between steps, where checkpoints are whole.

    A line is written before the step's state is: what raised there would lose the step.

    Attributes:
        functions: called with a `StepInfo` each; plain or async.
        hooks: hooks of the program's own, which take part in the steps of policy-gradient stages.
    """

    functions: Sequence[Callable[[StepInfo], Any]]
    hooks: Sequence[StageHook] = ()
    is_stopped: bool = False
    _lines: list[LogLine] = field(default_factory=list)
    _fault: RlhfError | None = None

    @classmethod
    def of(cls, given: Any) -> Callbacks:
        """Tell functions from hooks, several or one alone. Raises RecipeError for anything else."""
        given = given if isinstance(given, Sequence) else [given]
        for i, one in enumerate(given):
            if isinstance(one, type):
                raise RecipeError(
                    "a callback must be an instance or a function, not a class",
                    where=f"callbacks[{i}]",
                    got=one.__name__,
                    expected="a function of a StepInfo, or an instance of a StageHook",
                    hint=f"write {one.__name__}()",
                )
            if not callable(one) and not isinstance(one, StageHook):
                raise RecipeError(
                    "this is not a callback",
                    where=f"callbacks[{i}]",
                    got=repr(one),
                    expected="a function of a StepInfo, or a rlhf.training.hooks.base.StageHook",
                    hint="write def watch(step): print(step.metrics)",
                )
        hooks = [one for one in given if isinstance(one, StageHook)]
        for hook in hooks:
            _check_async(hook)
        return cls([one for one in given if not isinstance(one, StageHook)], hooks)

    # --- a sink ---

    def write(self, line: LogLine) -> None:
        """Keep a line until the step is over."""
        self._lines.append(line)

    def rewind(self, stage: str, step: int, n_lines: int | None = None) -> None:
        """Do nothing: lines are not stored."""

    def close(self) -> None:
        """Nothing is held open."""

    # --- a hook ---

    async def between_steps(self, run: RunContext, parts: LiveStage) -> None:
        """Call the functions with what was logged since."""
        await self.call(run.folder)

    def raise_fault(self) -> None:
        """Raise what a hook raised in the step before."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    async def after_training(
        self,
        hook: StageHook,
        method: Callable[[RunContext, LiveStage, Step], Awaitable[None]],
        run: RunContext,
        parts: LiveStage,
        step: Step,
    ) -> None:
        """Call a hook's method in a step whose updates are made.

        What a hook of the program raises, or logs under a name that is no metric, waits for `raise_fault`: the step
        is finished without what the method logged, so that it can be saved.
        """
        if all(hook is not own for own in self.hooks):
            await method(run, parts, step)
            return
        values, metrics = dict(step.values), dict(step.metrics)
        try:
            await method(run, parts, step)
            checked({**step.values, **step.metrics})
        except Exception as error:
            step.values, step.metrics = values, metrics
            where = f"{_named(hook)}, {step.where}"
            if isinstance(error, RlhfError):
                error.where = f"{where}: {error.where}" if error.where else where
                fault = error
            else:
                fault = _of_hook(error, where)
                fault.__cause__ = error
            self._fault = self._fault or fault

    async def call(self, folder: Path, *, is_last: bool = False) -> None:
        """Call the functions with each line that is kept, in order.

        Args:
            folder: of the run.
            is_last: training has ended: a request to stop is ignored.

        Raises:
            TrainingError: one raised.
            CancelledError: one asked for the end of a run of one process; several agree on it after the step.
        """
        while self._lines:
            line = self._lines.pop(0)
            info = StepInfo(folder, line.stage, line.step, line.values, self._stop)
            for function in self.functions:
                await _called(function, info)
        if self.is_stopped and not is_last and processes.current().n == 1:
            raise asyncio.CancelledError

    def check_states(self, keys: Sequence[str]) -> None:
        """Raise RecipeError if the key of a user's hook is taken, or its state cannot be saved and loaded.

        Args:
            keys: of all parts with a state, these hooks among them.
        """
        for hook in self.hooks:
            where, key = f"callbacks, the hook {type(hook).__name__}", hook.key
            if not key:
                continue
            if keys.count(key) > 1:
                what = "two parts would keep their states under one key"
                raise RecipeError(what, where=where, got=key, expected="a unique key")
            try:
                torch.save(hook.state_dict(), written := io.BytesIO())
                written.seek(0)
                torch.load(written, weights_only=True)
            except Exception as error:
                raise RecipeError(
                    "the state of a hook cannot be saved in a checkpoint",
                    where=f"{where}, state_dict",
                    got=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200],
                    expected="numbers, texts, tensors, and lists and dictionaries of them",
                    hint="write float(x) or x.tolist() for values of NumPy",
                ) from error

    def raise_if_of_hook(self, error: Exception, step: str) -> None:
        """Re-raise an exception of a user's hook as a TrainingError that names the hook."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        owners = (frame.f_locals.get("self") for frame in reversed(frames))
        hook = next((one for one in owners if any(one is own for own in self.hooks)), None)
        if hook is not None and not isinstance(error, RlhfError):
            raise _of_hook(error, f"{_named(hook)}, after {step}") from error

    def _stop(self) -> None:
        self.is_stopped = True
        if processes.current().n > 1:
            processes.current().stops = True


def _named(hook: object) -> str:
    return f"hook {type(hook).__name__}"


def _of_hook(error: Exception, where: str) -> TrainingError:
    return TrainingError(
        "a hook raised",
        where=where,
        got=f"{type(error).__name__}: {error}{raised_at(error)}",
        expected="no exception",
        hint="fix the hook and resume the run: rlhf.train(resume=RUN, callbacks=...)",
    )


def _check_async(hook: StageHook) -> None:
    """Raise RecipeError where a method of a hook is plain and the base's is async, or the other way round."""
    for name, of_base in inspect.getmembers(StageHook, inspect.isfunction):
        is_async = inspect.iscoroutinefunction(of_base)
        own = inspect.unwrap(getattr(hook, name))
        if is_async != inspect.iscoroutinefunction(own):
            raise RecipeError(
                f"this method of a hook must {'be' if is_async else 'not be'} async",
                where=f"callbacks, the hook {type(hook).__name__}",
                got=f"{'def' if is_async else 'async def'} {name}",
                expected=f"{'async def' if is_async else 'def'} {name}{inspect.signature(of_base)}",
            )


async def _called(function: Callable[[StepInfo], Any], info: StepInfo) -> None:
    try:
        said = function(info)
        if inspect.isawaitable(said):
            await said
    except Exception as error:
        raise TrainingError(
            "a callback raised",
            where=f"callback {name_of(function)}, step {info.step} of {info.stage}",
            got=f"{type(error).__name__}: {error}",
            expected="no exception",
            hint=f"fix the callback and resume from the last checkpoint: rlhf.train(resume={str(info.run)!r})",
        ) from error
