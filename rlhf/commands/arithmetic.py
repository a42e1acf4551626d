"""What a recipe comes to: episodes, turns, tokens, updates, parameters and memory, before anything runs.

Figures that depend on what the policy does are upper bounds and named so. Memory is in bytes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.errors import ModelError
from rlhf.evaluation.statistics import wilson_interval
from rlhf.recipe.checks import supervised_stages
from rlhf.recipe.loss_checks import policy_gradient_stages

if TYPE_CHECKING:
    from rlhf.recipe import Recipe
    from rlhf.trainers.policy import FromScratch, Pretrained
    from rlhf.trainers.value_model import Critic

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def arithmetic(recipe: Recipe) -> dict[str, Any]:
    """Return the batch arithmetic of `recipe` as plain values."""
    try:
        model, config = meta_model(recipe.policy)
    except ModelError as error:
        # A name on a hub that cannot be reached now is no mistake in the recipe; a folder that is not there is one.
        if looks_local(str(getattr(recipe.policy, "path", "."))):
            raise
        model, config, unknown = None, None, error.got
    else:
        unknown = ""
    context = f"{config.max_position_embeddings} tokens" if config else "its size"
    return {
        "stages": [
            *({"stage": path, **_supervised(stage)} for path, stage in supervised_stages(recipe)),
            *({"stage": path, **_policy_gradient(stage, recipe)} for path, stage in policy_gradient_stages(recipe)),
        ],
        "policy": _policy(model) if model else {"unknown": unknown},
        "memory_bytes": _memory(recipe, model, config) if model else None,
        "evaluation": _evaluation(recipe),
        "cuts": _cuts(recipe, context),
    }


def meta_model(policy: FromScratch | Pretrained) -> tuple[Any, Any]:
    """Return the policy's model without memory for its parameters, adapters included, and its configuration.

    A from-scratch model has at most so many parameters: its tokenizer may learn fewer tokens than it is allowed to.

    Raises:
        ModelError: the configuration of a pretrained model cannot be read.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = _config(policy)
    with torch.device("meta"):
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config)
        if policy.lora is not None:
            model = policy.lora.wrap(model)
    return model, config


def _config(policy: FromScratch | Pretrained) -> Any:
    from rlhf.trainers.policy import FromScratch

    if isinstance(policy, FromScratch):
        return _from_scratch_config(policy)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(policy.path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            "the model's configuration cannot be read",
            where=f"policy.path {policy.path}",
            got=str(error).splitlines()[0] if str(error) else type(error).__name__,
            expected="a folder with config.json, or a name on a hub that can be reached",
            hint="give the folder of a saved model, or a hub name such as Qwen/Qwen3-0.6B",
        ) from error


def looks_local(path: str) -> bool:
    """Whether `path` means a folder rather than a name on a hub."""
    return path.startswith((".", "/", "~")) or Path(path).exists()


def _from_scratch_config(policy: FromScratch) -> Any:
    from transformers import LlamaConfig, Qwen3Config

    kind = Qwen3Config if policy.family == "qwen3" else LlamaConfig
    return kind(
        vocab_size=policy.vocab_size,
        hidden_size=policy.hidden_size,
        intermediate_size=policy.intermediate_size or 3 * policy.hidden_size,
        num_hidden_layers=policy.n_layers,
        num_attention_heads=policy.n_heads,
        num_key_value_heads=policy.n_kv_heads or policy.n_heads,
        head_dim=policy.head_dim,
        max_position_embeddings=policy.max_context,
        tie_word_embeddings=True,
    )


def _supervised(stage: Any) -> dict[str, Any]:
    """Of attempts that are imitated, the most: as many tasks may have nothing to keep."""
    source = stage.attempts
    n = source.tasks_per_round * source.max_per_task if source else stage.n_demonstrations
    rounds = source.rounds if source else 1
    return {
        "kind": "supervised",
        "n_demonstrations": rounds * n,
        "n_updates": rounds * stage.epochs * -(-n // stage.batch_size),
        "n_episodes": rounds * source.tasks_per_round * source.group_size if source else 0,
    }


def _policy_gradient(stage: Any, recipe: Recipe) -> dict[str, Any]:
    episodes = stage.tasks_per_step * stage.group_size
    rounds = getattr(stage.selection, "max_rounds", 1)
    turns = episodes * rounds * recipe.limits.max_turns
    n_updating = stage.steps - (stage.critic.warmup_steps if stage.critic else 0)
    branches = episodes - stage.tasks_per_step * stage.rollout.n_from_start(stage.group_size)
    return {
        "kind": "policy_gradient",
        "n_steps": stage.steps,
        "episodes_per_step": episodes,
        "max_rounds_per_step": rounds,
        "branches_per_step": branches,
        "max_turns_per_step": turns,
        "max_shared_turns_per_step": branches * (recipe.limits.max_turns - 1),
        "max_sampled_tokens_per_step": turns * recipe.limits.max_tokens,
        "max_samples_per_step": episodes if stage.layout == "trajectory" else turns // rounds,
        "updates_per_step": stage.epochs * stage.minibatches,
        "episodes_per_update": episodes / stage.minibatches,
        "n_episodes": stage.steps * episodes,
        "n_updates": n_updating * stage.epochs * stage.minibatches,
    }


def _policy(model: Any) -> dict[str, Any]:
    return {
        "n_parameters": sum(p.numel() for p in model.parameters()),
        "n_trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def _memory(recipe: Recipe, model: Any, config: Any) -> dict[str, Any]:
    from rlhf.rollout.engines import kv_bytes_per_token

    size = _BYTES[getattr(recipe.policy, "dtype", "float32")]
    counts = _policy(model)
    lora = recipe.policy.lora is not None
    reference = any(getattr(stage.loss, "needs_ref", False) for _, stage in policy_gradient_stages(recipe)) and not lora
    micro = max((getattr(stage, "max_tokens_per_microbatch", 0) for stage in recipe.stages), default=0)
    text = config.get_text_config()
    parts = {
        "weights": counts["n_parameters"] * size,
        "gradients": counts["n_trainable"] * size,
        "adam": 2 * counts["n_trainable"] * size,
        "reference": counts["n_parameters"] * 4 if reference else 0,
        "critic": max((_critic(recipe, stage.critic, size) for _, stage in policy_gradient_stages(recipe)), default=0),
        "engine": _engine_weights(recipe, counts["n_parameters"], size),
    }
    per_token = kv_bytes_per_token(text, _engine_bytes(recipe, size))
    context = recipe.limits.max_context or text.max_position_embeddings
    sessions = min(recipe.engine.max_sessions, recipe.limits.max_concurrent)
    return {
        **parts,
        "training_total": sum(parts.values()),
        "max_kv_cache": _kv_cache(recipe, per_token * context * sessions),
        # Logits, their log-softmax and its gradient in float32, were every token of a micro-batch a policy token.
        "max_logits": 3 * 4 * text.vocab_size * micro,
    }


def _critic(recipe: Recipe, critic: Critic | None, size: int) -> int:
    """Bytes of a critic: its own trunk, and gradient and moments of all that it trains; the head is next to nothing."""
    from rlhf.trainers.policy import Pretrained
    from rlhf.trainers.value_model import trunk_of

    if critic is None:
        return 0
    shares = critic.trunk == "policy"
    policy = recipe.policy if shares else replace(recipe.policy, lora=critic.lora)
    try:
        model, _ = meta_model(Pretrained(path=critic.path, lora=critic.lora) if critic.path else policy)
    except ModelError:  # not to be had now: as large as the policy
        model, _ = meta_model(policy)
    parameters = list(trunk_of(model).parameters())
    n_trained = sum(p.numel() for p in parameters if p.requires_grad and critic.trains_trunk)
    # A shared trunk keeps gradients in the policy's place, one after the other, and moments of its own.
    return 2 * n_trained * size if shares else (sum(p.numel() for p in parameters) + 3 * n_trained) * size


def _engine_weights(recipe: Recipe, n_parameters: int, size: int) -> int:
    """Bytes of the engine's own copy of the weights: the embedded one has none, that of servers lies with them."""
    from rlhf.rollout.engines import VllmSettings

    engine = recipe.engine
    is_here = isinstance(engine, VllmSettings) and not engine.servers
    return n_parameters * _engine_bytes(recipe, size) if is_here else 0


def _engine_bytes(recipe: Recipe, size: int) -> int:
    """Bytes of one number in the engine, where the policy's have `size`."""
    return _BYTES.get(getattr(recipe.engine, "dtype", ""), size)


def _kv_cache(recipe: Recipe, needed: int) -> int:
    """Most bytes of keys and values here, where `needed` holds every live episode, were each to fill its context."""
    engine = recipe.engine
    if getattr(engine, "servers", ()):
        return 0
    given = getattr(engine, "kv_cache_gb", None)
    return needed if given is None else int(given * 1e9)


def _evaluation(recipe: Recipe) -> dict[str, Any]:
    # Attempts at one task are not independent: the tasks are what the interval can be counted on.
    n_tasks = recipe.evaluation.n_tasks
    low, high = wilson_interval(n_tasks / 2, n_tasks)
    n_episodes = n_tasks * recipe.evaluation.attempts
    return {"split": recipe.evaluation.split, "n_episodes": n_episodes, "half_width_at_half": (high - low) / 2}


def _cuts(recipe: Recipe, model_context: str) -> dict[str, str]:
    """Which settings cut something short, and what they cut."""
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
    steps = getattr(recipe.environment, "max_steps", None)
    if steps is not None:
        cuts["environment.max_steps"] = f"an episode at {steps} steps, by the environment"
    return cuts
