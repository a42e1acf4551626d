"""Extension of a run by more steps, finished or not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf import processes
from rlhf.digests import Mark, mark_of, write_listed
from rlhf.errors import CheckpointError, RecipeError, RlhfError, disk
from rlhf.evaluation.store import list_steps
from rlhf.losses.contrib.kdrl import KDRL
from rlhf.recipe import Recipe, dump, load
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.checkpoints import store
from rlhf.training.checkpoints.store import State
from rlhf.training.critics.settings import CriticCapabilities
from rlhf.training.stages.policy_gradient import PolicyGradient

#: Under which the policy at the end is measured.
_AFTER = "after"


def extended(recipe: Recipe, folder: Path, state: State, say: Callable[[str], None]) -> State:
    """State of a run extended to the steps of `recipe`, if its last stage has more; else `state`.

    The recipe of the run says so from then on. What a finished run came to goes into a folder of its own. All processes
    call this together.

    Raises:
        CheckpointError: the checkpoint does not hold what more steps need.
        RecipeError: the stage has ended by its patience, and would at once again.
    """
    here, error = processes.current(), None
    if here.is_main:
        try:
            state = _extended(recipe, folder, state, say)
        except RlhfError as caught:
            error = caught
    state, error = here.from_main((state, error), "the extension of the run")
    if error is not None:
        raise error
    return state


def asks_for_more(recipe: Recipe, state: State) -> bool:
    """True if the last stage of a finished run has more steps than it was finished with."""
    stage = recipe.stages[-1]
    return isinstance(stage, PolicyGradient) and stage.steps > (state.of_steps or state.step)


def _extended(recipe: Recipe, folder: Path, state: State, say: Callable[[str], None]) -> State:
    own, stage = load(folder), recipe.stages[-1]
    before: Any = own.stages[-1]
    if not isinstance(stage, PolicyGradient) or not isinstance(before, PolicyGradient):
        return state
    is_over = state.finished and state.stage == len(recipe.stages) - 1
    had = state.of_steps if is_over and state.of_steps else before.steps
    if stage.steps <= had:
        return state
    if is_over:
        _refuse(folder, state)
    if stage.steps > before.steps:
        last = replace(before, steps=stage.steps)
        write_listed(folder / "recipe.yaml", dump(replace(own, stages=(*own.stages[:-1], last))))
    say(f"the last stage has {stage.steps} steps from now on, instead of {had}; {state.step} are made")
    for change in _changes(stage, had, state.n_updates):
        say(f"caution: {change}; the run is not the one that {stage.steps} steps would have made from its begin")
    return _reopened(folder, state, say) if is_over else state


def _refuse(folder: Path, state: State) -> None:
    if not state.of_steps:
        raise CheckpointError(
            "this finished run cannot be extended",
            where=str(folder),
            got="a last checkpoint without the state of the optimiser, as earlier versions wrote it",
            expected="one that was written by this version",
            hint="start a new run from its policy: policy: {kind: pretrained, path: CHECKPOINT/policy}",
        )
    if state.step < state.of_steps:
        raise RecipeError(
            "this run was stopped by the patience of its last stage, and would stop again at once",
            where="stages.N.patience",
            got=f"the end after {state.step} of {state.of_steps} steps",
            expected="a run that made all its steps",
            hint="start a new run from its policy, with another patience",
        )


def _reopened(folder: Path, state: State, say: Callable[[str], None]) -> State:
    """Stand before the end of the last stage again: without the evaluation after it."""
    aside = folder / f"after-{state.step:06d}"
    ends = [folder / "result.json", folder / "report.html"]
    ends += [s.path for s in list_steps(folder / "trajectories") if (s.stage, s.phase) == (_AFTER, "eval")]
    with disk("what the run came to", aside):
        aside.mkdir(exist_ok=True)
        for path in ends:
            if path.is_file():
                os.replace(path, aside / path.name)
    say(f"what it came to after {state.step} steps lies in {aside}")
    results = {name: value for name, value in state.results.items() if name != _AFTER}
    n_logged = state.n_logged - (_AFTER in state.results)
    state = replace(state, finished=False, of_steps=0, results=results, n_logged=n_logged)
    log = folder / "metrics.jsonl"
    logs = {log.name: _beginning(log, n_logged)} if log.is_file() else {}
    store.restate(folder / "checkpoints", state, logs)
    return state


def _beginning(path: Path, n_lines: int) -> Mark:
    lines = path.read_bytes().splitlines(keepends=True)[:n_lines]
    return mark_of(path, sum(map(len, lines)))


def _changes(stage: PolicyGradient, had: int, n_updates: int) -> Iterator[str]:
    """Schedules of a stage that depend on its number of steps, and so change with an extension."""
    optimizers = {"optimizer": stage.optimizer, "critic.optimizer": CriticCapabilities(stage.critic).optimizer}
    a_step = stage.epochs * stage.minibatches
    for name, settings in optimizers.items():
        if isinstance(settings, AdamW) and settings.schedule != "constant":
            before, now = (settings.lr_at(n_updates, n * a_step) for n in (had, stage.steps))
            rate = f", which was to be {before:.3g} now and is {now:.3g}" if name == "optimizer" else ""
            yield f"the {settings.schedule} schedule of {name} falls over {stage.steps} steps instead of {had}{rate}"
    if isinstance(stage.loss, KDRL):
        yield f"the coefficient of the teacher follows {stage.steps} steps instead of {had}"
