"""Changes of a run's recipe when it resumes: what may differ, from which step on, and more steps of a finished run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rlhf import processes
from rlhf.build.contamination import refuse_overlap
from rlhf.digests import Mark, mark_of, write_listed
from rlhf.errors import CheckpointError, RecipeError, RlhfError, disk
from rlhf.evaluation.changes import Change, read_changes, write_changes
from rlhf.evaluation.store import list_steps
from rlhf.losses.contrib.kdrl import KDRL
from rlhf.losses.regularized import Regularized
from rlhf.recipe import Recipe, dump, load
from rlhf.recipe.model import differing, values_of
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.checkpoints import store
from rlhf.training.checkpoints.store import State
from rlhf.training.critics.settings import CriticCapabilities
from rlhf.training.hooks.kl_controller import AdaptiveKL
from rlhf.training.stages.policy_gradient import PolicyGradient

T = TypeVar("T")

#: Under which the policy at the end is measured.
_AFTER = "after"
#: Keys that say where updates and attempts are made and how many at a time, not which; given anew at each resume.
OF_TRAINER = (
    "stages.N.trainer", "stages.N.max_tokens_per_microbatch", "stages.N.pairs_per_microbatch",
    "stages.N.gradient_checkpointing", "cluster", "engine.max_sessions", "engine.max_batch_tokens",
    "engine.gpu_memory_utilization", "engine.kv_cache_gb", "engine.sleep",
    "limits.max_concurrent", "stages.N.limits.max_concurrent",
)  # fmt: skip
#: Keys that may get another value from a step on, where they are numbers or null; of the loss, all its numbers.
REVISABLE = (
    "stages.N.steps", "stages.N.evaluate_every", "stages.N.patience", "stages.N.checkpoint_every",
    "stages.N.optimizer.lr", "stages.N.optimizer.weight_decay", "stages.N.optimizer.max_grad_norm",
    "stages.N.critic.optimizer.lr", "stages.N.critic.optimizer.weight_decay",
    "stages.N.critic.optimizer.max_grad_norm", "stages.N.critic.head_lr", "stages.N.loss", "evaluation.n_tasks",
    "evaluation.validation_n_tasks",
)  # fmt: skip


def is_of(key: str, keys: Sequence[str]) -> bool:
    """True if a dotted key is one of `keys`, in which N is any number, or below one of them."""
    plain = re.sub(r"^stages\.\d+", "stages.N", key)
    return any(f"{plain}.".startswith(f"{one}.") for one in keys)


def revisions(mine: Any, theirs: Any) -> dict[str, tuple[Any, Any]]:
    """Return the keys that two recipes, as plain values, differ in and that may change in mid-run, with both values."""
    found = differing(mine, theirs)
    return {key: both for key, both in found.items() if is_of(key, REVISABLE) and all(map(_is_plain, both))}


def _is_plain(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _value(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[int(part)] if isinstance(values, list) else values.get(part)
    return values


# --- before anything is written ---


def changes_of(recipe: Recipe, folder: Path, state: State) -> list[Change]:
    """Return what `recipe` changes in the run in `folder`, whose newest checkpoint has `state`.

    All processes call this together.

    Raises:
        CheckpointError: a finished run is given more steps, and its checkpoint does not hold what they need.
        RecipeError: a value comes too late, or would have no effect.
    """
    return _of_main(lambda: _checked(recipe, folder, state), "the changes of the recipe")


def _of_main(make: Callable[[], T], what: str) -> T:
    """Return in all processes what the first one makes; its error is raised in all."""
    here, found, error = processes.current(), None, None
    if here.is_main:
        try:
            found = make()
        except RlhfError as caught:
            error = caught
    found, error = here.from_main((found, error), what)
    if error is not None:
        raise error
    return found  # type: ignore[return-value]


def _checked(recipe: Recipe, folder: Path, state: State) -> list[Change]:
    mine, last = values_of(load(folder)), len(recipe.stages) - 1
    is_over = state.finished and state.stage == last
    if is_over and state.of_steps:  # which the recipe may not say any more, after a kill
        mine["stages"][last]["steps"] = state.of_steps
    found = revisions(mine, values_of(recipe))
    before, now = found.get(f"stages.{last}.steps", (0, 0))
    is_reopened = is_over and now > before
    if is_reopened:
        _refuse_extension(folder, state)
    n_over = state.stage + (state.finished and not is_reopened)
    for key, (before, now) in found.items():
        stage, _ = _first(key, state, last)
        if stage < n_over and (key.startswith("stages.") or _AFTER in state.results):
            raise RecipeError(
                "this stage is finished, and nothing of it can be changed",
                where=key,
                got=f"{now} instead of {before}",
                expected="changes of the present stage, or of a later one",
                hint=f"rlhf train --resume {folder}, with more steps of a last stage of policy_gradient, or a new run",
            )
        if key.endswith(".steps") and stage == state.stage:
            _refuse_fewer(key, before, now, recipe, state)
        if key == f"stages.{state.stage}.loss.kl_coef":
            _refuse_adapted(key, now, recipe.stages[stage], state)
    if any(key.startswith("evaluation.") or key.endswith(".evaluate_every") for key in found):
        refuse_overlap(recipe)
    return [Change(key, *both, *_first(key, state, last)) for key, both in found.items()]


def _first(key: str, state: State, last: int) -> tuple[int, int]:
    """Return the stage and its first step, counted from 1, that a change of a key made now takes effect in."""
    is_between = state.finished and state.stage < last
    here = (state.stage + 1, 1) if is_between else (state.stage, state.step + 1)
    stage = int(key.split(".")[1]) if key.startswith("stages.") else here[0]
    return here if stage == here[0] else (stage, 1)


def _refuse_fewer(key: str, before: int, now: int, recipe: Recipe, state: State) -> None:
    """Raise RecipeError for fewer steps than are made, or whose attempts are being made."""
    ahead = recipe.asynchrony.steps_ahead + 1 if recipe.asynchrony.is_on else 0
    least = min(before, state.step + ahead)
    if now < least:
        raise RecipeError(
            "a stage cannot end before steps that are made" + (", or whose attempts are made ahead" if ahead else ""),
            where=key,
            got=str(now),
            expected=f"{least} or more: {state.step} are made",
            hint="take an earlier policy from checkpoints/, or evaluate_every and patience in a new run",
        )


def _refuse_adapted(key: str, now: Any, stage: Any, state: State) -> None:
    """Raise RecipeError where the coefficient of the KL term moves by itself, and has moved."""
    if state.kl_coef is not None and isinstance(stage.loss, Regularized) and stage.loss.kl_target is not None:
        raise RecipeError(
            "this coefficient is adapted from step to step: another value for the first has no effect",
            where=key,
            got=str(now),
            expected=f"no change: it is {state.kl_coef:.3g} by now",
            hint="change kl_target, or set it to null, after which kl_coef holds",
        )


def _refuse_extension(folder: Path, state: State) -> None:
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


# --- what is written ---


def revised(recipe: Recipe, folder: Path, state: State, changes: Sequence[Change], say: Callable[[str], None]) -> State:
    """Write `changes` into the recipe and the record of a run; return its state, which more steps may change.

    What a finished run came to goes into a folder of its own if it goes on. All processes call this together.
    """
    state, logs = _of_main(lambda: _revised(recipe, folder, state, changes, say), "the changed run")
    stage = recipe.stages[state.stage]
    if isinstance(stage, PolicyGradient) and AdaptiveKL.of(stage.loss) is None:
        state = replace(state, kl_coef=None)  # or a later kl_target would go on with it
    if logs is not None:
        store.restate(folder / "checkpoints", state, logs)
    return state


def _revised(
    recipe: Recipe, folder: Path, state: State, changes: Sequence[Change], say: Callable[[str], None]
) -> tuple[State, dict[str, Mark] | None]:
    """Write what is changed; return the state, and of a run that is reopened the marks of its logs."""
    known, last = read_changes(folder), len(recipe.stages) - 1
    if not (known or changes):
        return state, None
    own = load(folder)
    record = _record(known, changes, values_of(own), state, last)
    if record != known:
        write_changes(folder, record)
    if not changes:
        return state, None
    write_listed(folder / "recipe.yaml", dump(_with(own, recipe, changes)))
    for change in changes:
        say(f"caution: {change.text}")
        for more in _consequences(own, recipe, change, state):
            say(f"caution: {more}")
    is_over = state.finished and state.stage == last
    is_reopened = is_over and any(change.key == f"stages.{last}.steps" for change in changes)
    return _reopened(folder, state, say) if is_reopened else (state, None)


def _record(known: Sequence[Change], changes: Sequence[Change], values: Any, state: State, last: int) -> list[Change]:
    """Return all changes of a run. They are written before its recipe, whose plain `values` say which were made.

    Steps that were lost are made again: what was changed after them counts from where the run stands now.
    """
    made = list(known)
    for key in {change.key for change in known}:
        while (own := [change for change in made if change.key == key]) and own[-1].now != _value(values, key):
            made.remove(own[-1])
    found: dict[tuple[str, int, int], Change] = {}
    for change in (*made, *changes):
        stage, step = change.stage, change.step
        if stage >= state.stage + state.finished:
            stage, step = min((stage, step), _first(change.key, state, last))
        before = found.get((change.key, stage, step), change).before
        found[change.key, stage, step] = Change(change.key, before, change.now, stage, step)
    return [change for change in found.values() if change.before != change.now]


def _with(own: Recipe, asked: Recipe, changes: Sequence[Change]) -> Recipe:
    """Return a run's own recipe with the parts of another one that changes are in."""
    stages = list(own.stages)
    for change in changes:
        _, *path = change.key.split(".")
        if change.key.startswith("stages."):
            i, name = int(path[0]), path[1]
            stages[i] = replace(stages[i], **{name: getattr(asked.stages[i], name)})
    return replace(own, stages=tuple(stages), evaluation=asked.evaluation)


def _consequences(own: Recipe, asked: Recipe, change: Change, state: State) -> Iterator[str]:
    """Sentences on what else changes with a key."""
    if change.key.startswith("evaluation."):
        yield "evaluations from now on are of other tasks than those before: rlhf compare pairs the tasks in both"
    if change.key == f"stages.{state.stage}.loss.kl_target" and change.now is None and state.kl_coef is not None:
        fixed = _value(values_of(asked), f"stages.{state.stage}.loss.kl_coef")
        yield f"the coefficient of the KL term is kl_coef: {fixed:.3g} from here on, and no longer {state.kl_coef:.3g}"
    if change.key == f"stages.{state.stage}.steps":
        stage, now = own.stages[state.stage], asked.stages[state.stage]
        assert isinstance(stage, PolicyGradient) and isinstance(now, PolicyGradient)  # others have no steps
        before = replace(stage, steps=int(change.before or 0))
        for told in _schedules(before, now, state.n_updates):
            yield f"{told}; the run is not the one that {now.steps} steps would have made from its begin"


def _reopened(folder: Path, state: State, say: Callable[[str], None]) -> tuple[State, dict[str, Mark]]:
    """Return the state before the end of the last stage, without the evaluation after it, and marks of its logs."""
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
    return state, {log.name: _beginning(log, n_logged)} if log.is_file() else {}


def _beginning(path: Path, n_lines: int) -> Mark:
    lines = path.read_bytes().splitlines(keepends=True)[:n_lines]
    return mark_of(path, sum(map(len, lines)))


def _schedules(before: PolicyGradient, now: PolicyGradient, n_updates: int) -> Iterator[str]:
    """Schedules of a policy-gradient stage that depend on its number of steps, and so change with it."""
    steps = f"{now.steps} steps instead of {before.steps}"
    for key, told in scheduled(now):
        rates = [stage.optimizer.lr_at(n_updates, stage.n_updates) for stage in (before, now)]
        rate = f", which was to be {rates[0]:.3g} now and is {rates[1]:.3g}"
        yield f"{told} {steps}{rate * (key == 'optimizer' and now.imitate_failed is None)}"


def scheduled(stage: PolicyGradient) -> Iterator[tuple[str, str]]:
    """Key and beginning of a sentence of each schedule that depends on the number of steps of the stage."""
    for key, settings in (
        ("optimizer", stage.optimizer),
        ("critic.optimizer", CriticCapabilities(stage.critic).optimizer),
    ):
        if isinstance(settings, AdamW) and settings.schedule != "constant":
            yield key, f"the {settings.schedule} schedule of {key} falls over"
    if isinstance(stage.loss, KDRL):
        yield "loss", "the coefficient of the teacher follows"
