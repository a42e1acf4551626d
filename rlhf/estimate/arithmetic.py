"""Size of a recipe before it runs: episodes, turns, tokens, updates, parameters and memory.

Figures that depend on what the policy does are upper bounds and named so. Memory is in bytes.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from environments.base import Capabilities, properties_of
from rlhf.asynchrony.settings import Asynchrony
from rlhf.checking import is_local_model
from rlhf.errors import ModelError, RlhfError
from rlhf.estimate.memory import estimates, largest, most_calls
from rlhf.estimate.meta import count, meta_model, parameters_of
from rlhf.losses.importance_correction import Bypass
from rlhf.recipe.view import stages_of
from rlhf.registry import kind_of
from rlhf.rollout.tasks import tasks_of
from rlhf.stats import share_interval
from rlhf.tasks.selection import SelectionCapabilities
from rlhf.training.policy.model import Pretrained
from rlhf.training.rollouts_ahead import places_of
from rlhf.training.stages.pair_settings import PairStage
from rlhf.training.stages.policy_gradient import PolicyGradient
from rlhf.training.stages.reward_model import RewardModel
from rlhf.training.stages.supervised import Supervised

if TYPE_CHECKING:
    from rlhf.recipe import Recipe


def arithmetic(recipe: Recipe, n_processes: int = 1) -> dict[str, Any]:
    """Return the batch arithmetic of `recipe` as plain values; memory is that of each of `n_processes`."""
    policy, memory, context = _sized(recipe, n_processes)
    return {
        "stages": [
            *({"stage": path, **_supervised(stage)} for path, stage in stages_of(recipe, Supervised)),
            *({"stage": path, **_paired(stage, recipe.at(stage))} for path, stage in stages_of(recipe, PairStage)),
            *(
                {"stage": path, **_policy_gradient(stage, recipe.at(stage))}
                for path, stage in stages_of(recipe, PolicyGradient)
            ),
        ],
        "policy": policy,
        "memory_bytes": memory,
        "evaluation": _evaluation(recipe),
        "cuts": _cuts(recipe, context),
    }


def _sized(recipe: Recipe, n_processes: int) -> tuple[dict[str, Any], dict[str, Any] | None, str]:
    """The policy's size, the memory of the stage that needs most, and the context, in words."""
    try:
        model, config = meta_model(recipe.policy)
    except ModelError as error:
        # A name on a hub that cannot be reached now is no mistake in the recipe; a folder that is not there is one.
        if not isinstance(recipe.policy, Pretrained) or is_local_model(recipe.policy.path):
            raise
        return {"unknown": error.got}, None, "its size"
    n, n_trained = count(parameters_of(model))
    memory = largest(estimates(recipe, n_processes)).values()
    context = config.max_position_embeddings
    return {"n_parameters": n, "n_trainable": n_trained, "max_context": context}, memory, f"{context} tokens"


def _supervised(stage: Any) -> dict[str, Any]:
    """Upper bound of imitated attempts, as tasks may have none to keep; None for data not yet read."""
    if stage.data is not None:
        return {"kind": "supervised", "n_demonstrations": None, "n_updates": None, "n_episodes": 0}
    source = stage.rejection_sampling
    n = source.tasks_per_round * source.max_per_task if source else stage.n_demonstrations
    rounds = source.rounds if source else 1
    return {
        "kind": "supervised",
        "n_demonstrations": rounds * n,
        "n_updates": rounds * stage.epochs * -(-n // stage.batch_size),
        "n_episodes": rounds * source.tasks_per_round * source.group_size if source else 0,
    }


def _paired(stage: Any, recipe: Recipe) -> dict[str, Any]:
    """Upper bound of pairs, as equal scores give none; None where a file or run determines it.

    A reward model that learns from single attempts passes over these.
    """
    source, is_single = stage.pairs, isinstance(stage, RewardModel) and stage.objective != "pairwise"
    n_groups = source.tasks * (recipe.limits.max_turns if source.level == "expert" else 1)
    n_pairs = n_groups * (source.group_size if is_single else source.max_per_task) if source.is_attempted else None
    return {
        "kind": kind_of("stage", stage),
        "counted": "attempt" if is_single else "pair",
        "max_pairs": n_pairs,
        "n_updates": n_pairs and stage.epochs * -(-n_pairs // stage.batch_size),
        "n_episodes": n_groups * source.group_size if source.is_attempted else 0,
    }


def _policy_gradient(stage: Any, recipe: Recipe) -> dict[str, Any]:
    n_tasks = stage.tasks_per_step if stage.offline_data is None or stage.offline_data.sample else 0
    episodes = n_tasks * stage.group_size
    rounds = SelectionCapabilities(stage.selection).max_rounds
    turns = episodes * rounds * recipe.limits.max_turns
    calls = turns * most_calls(recipe)
    n_updating = stage.steps - (stage.critic.warmup_steps if stage.critic else 0)
    branches = episodes - n_tasks * stage.rollout.n_from_start(stage.group_size)
    return {
        "kind": "policy_gradient",
        "n_steps": stage.steps,
        "episodes_per_step": episodes,
        "max_rounds_per_step": rounds,
        "branches_per_step": branches,
        "max_turns_per_step": turns,
        "max_shared_turns_per_step": branches * (recipe.limits.max_turns - 1),
        "max_sampled_tokens_per_step": calls * recipe.limits.max_tokens,
        "max_samples_per_step": episodes if stage.layout == "trajectory" else calls // rounds,
        "updates_per_step": stage.epochs * stage.minibatches,
        "episodes_per_update": episodes / stage.minibatches,
        "n_episodes": stage.steps * episodes,
        "n_updates": n_updating * stage.epochs * stage.minibatches,
        **({"asynchrony": _ahead(stage, recipe.asynchrony)} if recipe.asynchrony.is_on else {}),
        **({"cluster": _on_cluster(stage, recipe)} if recipe.cluster.is_on else {}),
    }


def _on_cluster(stage: Any, recipe: Recipe) -> dict[str, Any]:
    """Processes, and how many groups each rollout worker plays at a time."""
    cluster = recipe.cluster
    places = places_of(recipe.environment, recipe.limits, stage.group_size, cluster.rollout_workers)
    return {
        "n_learners": cluster.learners,
        "n_rollout_workers": cluster.rollout_workers,
        "n_servers": cluster.servers or len(recipe.engine.servers),  # type: ignore[union-attr]
        "n_eval_servers": cluster.eval_servers,
        "n_cpus": cluster.n_cpus,
        "groups_of_a_worker": places,
    }


def _ahead(stage: Any, asynchrony: Asynchrony) -> dict[str, Any]:
    """Asynchrony figures: maximal lag, groups in flight, and the importance correction."""
    is_corrected = not isinstance(stage.correction, Bypass)
    return {
        "max_age": asynchrony.steps_ahead if asynchrony.order == "in_order" else asynchrony.staleness,
        "max_groups": (asynchrony.steps_ahead + 1) * stage.tasks_per_step,
        "correction": kind_of("correction", stage.correction) if is_corrected else "the ratio of the loss",
        "weight_update": asynchrony.weight_update,
        "checkpoint": asynchrony.checkpoint,
    }


def _evaluation(recipe: Recipe) -> dict[str, Any]:
    # Attempts at one task are not independent: the tasks are what the interval can be counted on.
    n_tasks = _n_tasks(recipe)
    low, high = share_interval(n_tasks / 2, n_tasks)
    n_episodes = n_tasks * recipe.evaluation.attempts
    return {"split": recipe.evaluation.split, "n_episodes": n_episodes, "half_width_at_half": (high - low) / 2}


def _n_tasks(recipe: Recipe) -> int:
    """Tasks of the evaluation: of a data set no more than the split has."""
    wanted = recipe.evaluation.n_tasks
    if properties_of(recipe.environment).judged_by_rewards:
        with suppress(RlhfError):  # what is wrong with the file is told by training
            return len(tasks_of(recipe.environment, recipe.evaluation.split, wanted))
    return wanted


def _cuts(recipe: Recipe, model_context: str) -> dict[str, str]:
    """Settings that truncate, with what each truncates."""
    limits = recipe.limits
    cuts = {
        "limits.max_tokens": f"a generation at {limits.max_tokens} tokens",
        "limits.max_turns": f"an episode at {limits.max_turns} turns",
        "limits.episode_timeout_s": f"an episode at {limits.episode_timeout_s:g} s",
    }
    if limits.max_context is not None:
        cuts["limits.max_context"] = f"an episode when prompt and generation reach {limits.max_context} tokens"
    else:
        cuts["the policy's context"] = f"an episode when prompt and generation reach {model_context}"
    steps = Capabilities(recipe.environment).max_steps
    if steps is not None:
        cuts["environment.max_steps"] = f"an episode at {steps} steps, by the environment"
    return cuts
