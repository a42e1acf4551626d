"""Demonstrations of the stages, and the texts of a from-scratch tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf import processes
from rlhf.build.supervised_data import data_stages, texts_of
from rlhf.digests import Manifest
from rlhf.errors import EnvError
from rlhf.progress import RichProgress
from rlhf.recipe import Recipe
from rlhf.recipe.view import environments_of_run
from rlhf.rollout.tasks import tasks_of
from rlhf.tasks.sampler import DemonstratedSampler
from rlhf.training.stages import demonstrations
from rlhf.training.stages.demonstrations import Demonstration
from rlhf.training.stages.policy_gradient import PolicyGradient
from rlhf.training.stages.supervised import Supervised

#: Episodes played at random for the tokenizer of a from-scratch policy when no stage demonstrates.
N_TEXT_EPISODES = 256


async def play_all(recipe: Recipe, folder: Path, progress: RichProgress) -> dict[int, Any]:
    """Demonstrations by stage index: played once and kept in the run folder, or read from data."""
    played: dict[int, Any] = {index: texts_of(recipe, index) for index, _ in data_stages(recipe)}
    for index, stage in enumerate(recipe.stages):
        if index in played:
            continue
        imitates = isinstance(stage, Supervised)
        wants: Any = stage.sampler if isinstance(stage, PolicyGradient) else stage
        if not (wants.rejection_sampling is None if imitates else isinstance(wants, DemonstratedSampler)):
            continue
        seen = recipe.at(stage)
        path = folder / "demonstrations" / f"{index}.jsonl"
        here = processes.current()
        if here.is_main and not (path.exists() and Manifest(folder).check(path)):
            tasks = tasks_of(seen.environment, stage.split, wants.n_demonstrations)
            n = wants.n_demonstrations if imitates else len(tasks)
            progress.stage("demonstrations", n, 0)
            found = await demonstrations.play(
                seen.environment,
                [tasks[i % len(tasks)] for i in range(n)],
                random_share=wants.random_share if imitates else 0.0,
                unsolved_share=wants.unsolved_share if imitates else 0.0,
                limits=seen.limits,
                seed=recipe.seed,
                needs=demonstrations.needs_of(recipe.agent),
                on_progress=lambda done, total: progress.advance(""),
                say=progress.say,
            )
            if not found:
                raise EnvError(
                    "there are no demonstrations to imitate",
                    where=f"stages[{index}]",
                    got=f"no demonstration of {n} tasks of {type(seen.environment).__name__}",
                    expected="an oracle that has a plan for some of them",
                    hint="set an easier level or more steps of the environment, or imitate `data`",
                )
            demonstrations.save(path, found)
            Manifest(folder).record(path)
        here.gather(None, "the demonstrations")
        played[index] = demonstrations.load(path)
    return played


def shown_stages(recipe: Recipe, played: Mapping[int, Sequence[Demonstration]]) -> list[Any]:
    """Stages whose samplers have their demonstrations; each sampler is started once as a check."""
    stages: list[Any] = []
    for index, stage in enumerate(recipe.stages):
        if isinstance(stage, PolicyGradient) and isinstance(stage.sampler, DemonstratedSampler):
            sampler = stage.sampler.shown([d.trajectory for d in played[index]])
            sampler.start(tasks_of(recipe.at(stage).environment, stage.split), recipe.seed)
            stage = replace(stage, sampler=sampler)
        stages.append(stage)
    return stages


async def texts(recipe: Recipe, played: dict[int, list[Demonstration]], progress: RichProgress) -> list[str]:
    """Text to train a tokenizer on: what is demonstrated to supervised stages, else episodes played at random."""
    if not recipe.policy.needs_texts:
        return []
    found = [d for index, demos in played.items() if isinstance(recipe.stages[index], Supervised) for d in demos]
    if not found:
        for _, seen in environments_of_run(recipe):
            split = next((stage.split for stage in seen.stages if not stage.reads_file), recipe.evaluation.split)
            found += await demonstrations.play(
                seen.environment,
                tasks_of(seen.environment, split, N_TEXT_EPISODES),
                random_share=1.0,
                unsolved_share=1.0,
                limits=seen.limits,
                seed=recipe.seed,
                say=progress.say,
            )
    return [text for d in found for text in d.texts]
