"""Places of keys in a recipe: its own keys, and those of its parts that are most often written a level too high."""

from __future__ import annotations

from collections.abc import Collection, Mapping

#: Every key of a recipe, in the order in which they are written.
KEYS = (
    *("name", "seed", "policy", "environment", "agent", "rewards", "engine", "asynchrony", "cluster", "limits"),
    *("evaluation", "stages", "trackers", "push_to_hub"),
)
_OF_PARTS: Mapping[str, tuple[str, ...]] = {
    "stages.N": (
        *("steps", "tasks_per_step", "group_size", "minibatches", "epochs", "n_demonstrations", "advantage", "loss"),
        *("optimizer", "sampler", "selection", "filters", "critic", "trainer", "correction", "reduction"),
        *("temperature", "evaluate_every", "checkpoint_every", "keep_checkpoints", "patience"),
        "max_tokens_per_microbatch",
    ),
    "stages.N.optimizer": (
        "lr", "betas", "weight_decay", "schedule", "min_lr_ratio", "warmup_steps", "max_grad_norm",
    ),
    "stages.N.loss": ("kl", "kl_coef", "kl_target", "entropy_coef", "clip_low", "clip_high", "dual_clip"),
    "stages.N.advantage": ("gamma", "lam", "normalize_std", "whiten"),
    "stages.N.trainer": ("gradient_checkpointing", "compile", "zero_stage"),
    "limits": (
        *("max_turns", "max_generations_per_turn", "max_tokens", "max_context", "stop_strings", "max_retries"),
        "max_concurrent",
    ),
    "policy": ("path", "lora", "dtype", "template"),
    "policy.lora": ("rank", "target_modules", "quantization"),
    "evaluation": ("n_tasks", "validation_n_tasks"),
    "agent": ("system", "think", "memory"),
    "engine": ("tensor_parallel", "gpu_memory_utilization", "max_sessions"),
    "asynchrony": ("staleness",),
}  # fmt: skip
#: Key of a part: its path from the top of a recipe; `N` is the number of a stage.
NESTED_KEYS: Mapping[str, str] = {key: f"{part}.{key}" for part, keys in _OF_PARTS.items() for key in keys}


def nested_key_hint(key: str) -> str:
    """Hint for a key of a part that stands at the top of a recipe; '' for others."""
    path = NESTED_KEYS.get(key, "")
    counted = ", N counted from 0" if path.startswith("stages.N") else ""
    return f"it is a key of {_named(path.rpartition('.')[0])}: {path}{counted}" if path else ""


def beside(key: str, stage: Collection[str]) -> str:
    """Hint for a key that stands in a stage with the keys `stage`, and belongs to one of its parts or elsewhere."""
    path = NESTED_KEYS.get(key, "")
    own = path.removeprefix("stages.N.")
    part = own.partition(".")[0]
    if part == "loss" and not has_loss(stage):
        return ""
    if own != path:
        return f"it is a key of {part}: write {part}: {{..., {key}: ...}}" if "." in own and part in stage else ""
    return f"it is a key of {part}: {path}" if path and part not in stage else above(key)


def has_loss(stage: Collection[str]) -> bool:
    """True if the key `loss` of a stage with these keys has keys itself; that of a preference stage is a word."""
    return "advantage" in stage


def above(key: str) -> str:
    """Hint for a key of the recipe itself that stands in a part; '' for others, and for what many parts may have."""
    return f"it is a key of the recipe: write {key}: ... at its top" if key in KEYS and key != "name" else ""


def _named(part: str) -> str:
    """Part of a recipe as a message names it: `a stage's loss`."""
    return "a stage" if part == "stages.N" else part.replace("stages.N.", "a stage's ")
