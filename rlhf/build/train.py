"""Training from a recipe: builds the live objects; the only place that picks an engine or a device."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlhf import locks, processes
from rlhf.build.contamination import refuse_overlap
from rlhf.build.engine import context_of, make_publisher, start_engine
from rlhf.build.logged_data import logged_runs
from rlhf.build.memory_store import make_store_keeper
from rlhf.build.own_code import caution_changed_code
from rlhf.build.pair_data import check_parts, check_sources, stored_groups
from rlhf.build.preflight import check_template, refuse_without_references, tell_few_tasks, try_once, try_samplers
from rlhf.build.processes import check_alike, joined, sharded_load, stopped_by_term, stopping_together
from rlhf.build.record import programs_record, write_record
from rlhf.build.reference_trial import try_references
from rlhf.build.resume import (
    begin_of,
    check_data_unchanged,
    check_environments,
    is_finished,
    run_folder,
    say_finished,
    telling_what_is_there,
)
from rlhf.build.revise import changes_of, revised
from rlhf.build.rollout_workers import OnRay, learner_log, output_to
from rlhf.build.stage_demonstrations import play_all, shown_stages, texts
from rlhf.build.supervised_data import check_data, data_stages, digests, rows_of
from rlhf.build.task_summary import refuse_long_prompts, tell_splits
from rlhf.digests import Manifest, write_listed
from rlhf.errors import RecipeError
from rlhf.evaluation.evaluate import EvaluationResult
from rlhf.evaluation.evaluate import evaluate as run_evaluation
from rlhf.evaluation.groups import pack_groups, unpack_groups
from rlhf.evaluation.statistics import success_estimate
from rlhf.evaluation.store import TrajectoryWriter
from rlhf.finite import finite
from rlhf.inference.role_adapters import adapter_names
from rlhf.inference.settings import TransformersSettings
from rlhf.progress import RichProgress
from rlhf.recipe import Recipe
from rlhf.recipe.builder import build_part
from rlhf.recipe.compatibility import check_seated
from rlhf.recipe.model import values_of
from rlhf.recipe.text import read
from rlhf.recipe.view import shards_parameters
from rlhf.rollout.renderer import Renderer
from rlhf.rollout.runner import RolloutRunner
from rlhf.rollout.tasks import tasks_of
from rlhf.sinks import JsonlSink, Metrics, Sink, TensorboardSink
from rlhf.terminal import CleanConsole
from rlhf.training.checkpoints.store import State
from rlhf.training.contrib.profiling import profiler_of
from rlhf.training.contrib.teacher import check_teachers
from rlhf.training.critics.value_model import check_contexts
from rlhf.training.hooks.callbacks import Callbacks
from rlhf.training.loop import train as run_stages
from rlhf.training.policy.model import FromScratch, Policy, Pretrained, restore
from rlhf.training.policy.model import resume as resume_policy
from rlhf.training.rollouts_ahead import Lookahead
from rlhf.training.run import Run
from rlhf.training.stages.demonstrations import Demonstration
from rlhf.training.stages.policy_gradient import PolicyGradient
from rlhf.training.trackers import sinks_of
from rlhf.viewer.report import write_report


def device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def train(
    recipe: Recipe,
    out: Path | None,
    *,
    resume: Path | None = None,
    console: CleanConsole | None = None,
    profile: int | None = None,
    callbacks: Callbacks | None = None,
    on_ray: bool = False,
) -> dict[str, Any]:
    """Train a recipe, or resume the run in folder `resume`; profile `profile` steps if given.

    With `on_ray` this is a learner in an actor of Ray, see `rlhf.build.cluster`.

    Returns:
        plain values: success before and after with intervals, times, counts, the folder and the report.

    Raises:
        RlhfError: any problem; what was finished is saved.
    """
    with joined(recipe) as here, run_folder(recipe, out, resume) as folder:
        if on_ray:
            output_to(learner_log(folder, here.rank))
        here.begin(folder)
        console = (console or CleanConsole(stderr=True)) if here.is_main else CleanConsole(quiet=True)
        try:
            progress = RichProgress(console)
            return asyncio.run(
                _train(recipe, folder, resume is not None, progress, profile, callbacks or Callbacks(()), on_ray)
            )
        except BaseException as error:
            here.record_failure(error)
            raise


async def _train(
    recipe: Recipe,
    folder: Path,
    is_resumed: bool,
    progress: RichProgress,
    profile: int | None,
    callbacks: Callbacks,
    on_ray: bool,
) -> dict[str, Any]:
    # Ctrl-C cancels this task at its next await, and a second one stops it wherever it is: asyncio.run sees to both.
    telling = telling_what_is_there(folder, progress.say, is_resumed=is_resumed)
    with progress, stopped_by_term(), stopping_together(), telling:
        for note in locks.notes(folder):
            progress.say(note)
        found, state = begin_of(folder, is_resumed, progress.say)
        changes = changes_of(recipe, folder, state) if is_resumed else []
        if is_resumed and (changes or not is_finished(recipe, state)):
            check_environments(folder, recipe)
            check_data_unchanged(folder, digests(recipe))
            if processes.current().is_main:
                caution_changed_code(folder, recipe, progress.say)
        if is_resumed:  # after what may be refused: it changes the record of the run
            state = revised(recipe, folder, state, changes, progress.say)
        profiler = None if profile is None else profiler_of(recipe.stages, profile, folder, state)
        if is_finished(recipe, state):
            say_finished(state, found, progress.say)
            return finish(state, folder, recipe)
        async with AsyncExitStack() as stack:
            actors = await stack.enter_async_context(aclosing(OnRay(recipe, folder))) if on_ray else None
            run = await prepare(recipe, folder, is_resumed, progress, found, state, stack, callbacks, actors)
            run.profiler = profiler if processes.current().is_main else None
            if run.store_keeper:
                stack.callback(run.store_keeper.close)
            stack.push(lambda kind, *_: run.metrics.close(has_failed=kind is not None))
            stack.callback(run.writer.join)
            await run_stages(run, shown_stages(recipe, run.demonstrations))
            await callbacks.call(folder, is_last=True)
            run.metrics.close()
            return finish(run.state, folder, recipe)


async def prepare(
    recipe: Recipe,
    folder: Path,
    is_resumed: bool,
    progress: RichProgress,
    found: Path | None,
    state: State,
    stack: AsyncExitStack,
    callbacks: Callbacks | None = None,
    actors: OnRay | None = None,
) -> Run:
    """Every live object of a run: new, or as checkpoint `found` has it; `stack` closes the engine."""
    here = processes.current()
    if not is_resumed:
        await _preflight(recipe, folder, progress)
    policy, runner, played = await _start(recipe, folder, found, state, progress, actors)
    stack.push_async_callback(runner.engine.close)
    recipe = actors.recipe if actors else recipe
    keeper = make_store_keeper(recipe, folder, found)
    runner = replace(runner, agent=keeper.bound) if keeper else runner
    callbacks = callbacks or Callbacks(())
    metrics = Metrics(_sinks(recipe, folder, callbacks, progress) if here.is_main else [])
    if is_resumed:
        metrics.rewind(state.label if found else "", state.step, state.n_logged)
    writer = TrajectoryWriter(folder / "trajectories")
    if is_resumed and here.is_main:
        writer.rewind(state.label if found else "", state.step)

    async def measure(name: str, full: bool) -> EvaluationResult:
        settings = recipe.evaluation
        split, n = (
            (settings.split, settings.n_tasks) if full else (settings.validation_split, settings.validation_n_tasks)
        )
        result = await run_evaluation(run.evaluation_runner, settings, split=split, n_tasks=n)
        if full and here.is_main:
            writer.write_groups(name, run.state.step, "eval", result.collected.groups)
        return result

    run = Run(
        folder=folder,
        seed=recipe.seed,
        policy=policy,
        runner=runner,
        stage_environments={i: recipe.at(stage) for i, stage in enumerate(recipe.stages) if stage.differs},
        publisher=make_publisher(recipe, policy, runner.engine),
        metrics=metrics,
        record=writer.write_groups if here.is_main else lambda *_: None,
        evaluate=measure,
        progress=progress,
        state=state,
        demonstrations=played | stored_groups(recipe) | dict(logged_runs(recipe)),
        estimate=success_estimate,
        evaluates_before=recipe.evaluation.before,
        store_keeper=keeper,
        callbacks=callbacks,
        lookahead=_lookahead(recipe, policy, runner, actors),
        background_evaluation=await actors.evaluations(policy) if actors else None,
    )
    return run


async def _preflight(recipe: Recipe, folder: Path, progress: RichProgress) -> None:
    """Try everything that can fail before a new run takes time, and write its record."""
    refuse_overlap(recipe)
    try_samplers(recipe)
    check_seated(recipe)
    check_sources(recipe, progress.say)
    check_data(recipe, progress.say)
    refuse_without_references(recipe)
    if processes.current().is_main:
        tell_few_tasks(recipe, progress.say)
        await refuse_long_prompts(recipe)
        await try_references(recipe, progress.say)
        await try_once(recipe, progress.say)
        write_record(folder, recipe)


def _sinks(recipe: Recipe, folder: Path, callbacks: Callbacks, progress: RichProgress) -> list[Sink]:
    """Everything that metrics go to."""
    sinks: list[Sink] = [JsonlSink(folder / "metrics.jsonl"), TensorboardSink(folder / "tensorboard")]
    sinks += [callbacks] if callbacks.functions else []
    return [*sinks, *sinks_of(recipe.trackers, recipe.name, folder, values_of(recipe), progress.say)]


def _lookahead(recipe: Recipe, policy: Policy, runner: RolloutRunner, actors: OnRay | None) -> Lookahead | None:
    if not recipe.asynchrony.is_on:
        return None
    remote = None
    if actors is not None:
        remote = partial(actors.controller, policy=policy, runner=runner)
    return Lookahead(recipe.asynchrony, pack_groups, unpack_groups, remote)


async def _start(
    recipe: Recipe,
    folder: Path,
    found: Path | None,
    state: State,
    progress: RichProgress,
    actors: OnRay | None = None,
) -> tuple[Policy, RolloutRunner, dict[int, Any]]:
    """Build policy, engine and what is imitated; that last, unless the tokenizer is made of it."""
    waits = found is None and recipe.policy.needs_texts
    played = await play_all(recipe, folder, progress) if waits else {}
    policy = await make_policy(recipe, folder, found, state, played, progress)
    learning = [(i, s) for i, s in enumerate(recipe.stages) if isinstance(s, PolicyGradient) and i >= state.stage]
    longest = context_of(recipe, policy)
    check_teachers([stage.loss for _, stage in learning], policy, longest)
    critics = {
        f"stages[{i}].critic": (stage.critic, partial(tasks_of, recipe.at(stage).environment, stage.split))
        for i, stage in learning
    }
    check_contexts(critics, policy.tokenizer, longest)
    recipe = await actors.with_servers(policy) if actors else recipe
    runner = await make_runner(recipe, policy, progress, folder / "engine.log")
    try:
        if found is None and processes.current().is_main:
            await tell_splits(recipe, runner.renderer, context_of(recipe, policy), progress.say)
        played = played if waits else await play_all(recipe, folder, progress)
        for index, _ in data_stages(recipe):
            played[index] = await rows_of(recipe, index, played[index], runner.renderer, policy.max_context)
        return policy, runner, played
    except BaseException:
        await runner.engine.close()
        raise


async def make_policy(
    recipe: Recipe,
    folder: Path,
    found: Path | None,
    state: State,
    played: dict[int, list[Demonstration]],
    progress: RichProgress,
) -> Policy:
    """The policy of the checkpoint that was found, else a new one; the same in every process."""
    here = processes.current()
    shared = sharded_load(recipe, found)
    loading: dict[str, Any] = {"loader": shared.loader} if shared else {}
    if found:
        progress.say(f"resuming from {found}")
        policy = resume_policy(recipe.policy, found / "policy", folder, **loading)
        policy.version = state.policy_version
    else:
        found_texts = await texts(recipe, played, progress) if here.is_main else []
        policy = recipe.policy.build(recipe.seed, here.from_main(found_texts, "the tokenizer's texts"), **loading)
        policy.save_base(folder)
        if here.is_main:
            Manifest(folder).record_all("base")
    if shared:
        shared.fill(policy)
    check_alike(policy)
    if not shards_parameters(recipe):  # else the trainer moves it piece by piece
        policy.model.to(device())
    return policy


def finish(state: State, folder: Path, recipe: Recipe) -> dict[str, Any]:
    """Write what the run came to, and the report."""
    report: Path | None = None
    if processes.current().is_main:
        write_listed(folder / "result.json", json.dumps(finite(dict(state.results)), indent=1))
        report = write_report(folder)
    processes.current().gather(None, "the report")
    return result_of(state, folder, recipe) | {"report": str(report or "")}


def result_of(state: State, folder: Path, recipe: Recipe) -> dict[str, Any]:
    """Summary of a run from its state: success with intervals to four digits, time and episodes; no report."""
    before, after = (state.results.get(name) or None for name in ("before", "after"))  # empty without rewards
    return {
        "name": recipe.name,
        "seed": recipe.seed,
        "success_before": before and before["success"],
        "success_after": after and after["success"],
        "interval_before": before and [round(before[end], 4) for end in ("low", "high")],
        "interval_after": after and [round(after[end], 4) for end in ("low", "high")],
        "train_s": round(state.train_s, 1),
        "n_episodes": state.n_episodes,
        "run": str(folder),
        "report": "",
    }


def policy_of(recipe: Recipe, folder: Path | None) -> Policy:
    """The policy of a checkpoint or model folder, else the recipe's own.

    Raises:
        RecipeError: there is neither.
    """
    if folder is None:
        if recipe.policy.needs_texts:
            raise RecipeError(
                "there are no weights yet: this recipe creates its policy from scratch",
                where="policy.kind",
                got="from_scratch",
                expected="a run folder, a checkpoint, or a pretrained policy",
                hint="name a run, as runs/NAME, or give --checkpoint FOLDER",
            )
        policy: Policy = recipe.policy.build(recipe.seed)
        return policy
    inner = folder / "policy" if (folder / "policy").is_dir() else folder
    return restore(recipe.policy, inner, folder.parent.parent)


async def make_runner(recipe: Recipe, policy: Policy, progress: RichProgress, log: Path | None = None) -> RolloutRunner:
    """Engine, renderer and the recipe's environment, agent and rewards, tied together."""
    rewards = [weighted.reward for weighted in recipe.all_rewards.values()]
    estimators = [stage.advantage for stage in recipe.stages if isinstance(stage, PolicyGradient)]
    check_parts([*rewards, *estimators], policy.tokenizer)
    if record := programs_record(recipe.all_rewards):
        progress.say(f"sandbox of rewards' programs: level {record['sandbox']['level']}")
    renderer = Renderer(
        policy.tokenizer,
        chat_template_kwargs=policy.chat_template_kwargs,
        generation_config=policy.model.generation_config,
        adapters=adapter_names(policy.model),
    )
    check_template(recipe.agent, renderer)
    is_embedded, begin = isinstance(recipe.engine, TransformersSettings), time.perf_counter()
    if not is_embedded:
        progress.say(f"waiting for the engine{f' (log: {log})' if log else ''}")
    with progress.apart():
        engine = await start_engine(recipe, policy, log=log, tell=progress.say)
    if not is_embedded:
        progress.say(f"the engine is ready after {time.perf_counter() - begin:.0f} s")
    return RolloutRunner(
        environment=recipe.environment,
        agent=recipe.agent,
        rewards=recipe.rewards,
        engine=engine,
        renderer=renderer,
        limits=recipe.limits,
        seed=recipe.seed,
        on_progress=progress.rollout,
    )


def policy_settings_of(run_folder: Path) -> FromScratch | Pretrained:
    """Policy settings of a run; its other parts are not made, which a program may have given.

    Raises:
        CheckpointError: the recipe is not what was written.
    """
    path = run_folder / "recipe.yaml"
    Manifest(run_folder).require(path, "undo the change: what a run was made with stays")
    found: FromScratch | Pretrained = build_part(
        "policy", read(path, ())["policy"], "policy", base=path.resolve().parent
    )
    return found
