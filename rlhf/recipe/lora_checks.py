"""What adapters ask of the settings around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rlhf.errors import RecipeError
from rlhf.kinds import kind_of
from rlhf.recipe.loss_checks import policy_gradient_stages

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe


def _adapters(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Give path and settings of the policy's adapters and of those of critics."""
    if recipe.policy.lora is not None:
        yield "policy.lora", recipe.policy.lora
    for path, stage in policy_gradient_stages(recipe):
        lora = getattr(stage.critic, "lora", None)
        if lora is not None:
            yield f"{path}.critic.lora", lora


def _check_dora(recipe: Recipe) -> None:
    lora, engine = recipe.policy.lora, recipe.engine
    if lora is None or not lora.dora:
        return
    if kind_of("engine", engine) == "vllm" and getattr(engine, "lora", "") == "adapter":
        raise RecipeError(
            "vLLM cannot hold DoRA adapters beside the base",
            where="engine.lora",
            got="adapter, with policy.lora.dora",
            expected="merged",
            hint="set engine.lora: merged, or use plain LoRA",
        )
    for i, stage in enumerate(recipe.stages):
        if getattr(stage.trainer, "zero", 0) == 3:
            raise RecipeError(
                "DoRA looks at whole weights of the base, which ZeRO 3 has in pieces",
                where=f"stages[{i}].trainer.zero",
                got="3 with policy.lora.dora",
                expected="zero: 0, 1 or 2",
                hint="lower trainer.zero, or use plain LoRA",
            )


def _check_quantized(recipe: Recipe) -> None:
    for path, lora in _adapters(recipe):
        if lora.quantization is not None and path != "policy.lora":
            raise _no_base(f"{path}.quantization", lora, "a critic", "a base in its own number format")
    lora = recipe.policy.lora
    if lora is None or lora.quantization is None:
        return
    where = "policy.lora.quantization"
    if recipe.policy.needs_texts:
        raise _no_base(where, lora, "a policy made from scratch", "policy: {kind: pretrained}")
    if kind_of("engine", recipe.engine) == "vllm":
        raise _no_base(where, lora, "vLLM, whose base would not be in 4 bits", "engine: {kind: transformers}")
    for i, stage in enumerate(recipe.stages):
        if kind_of("trainer", stage.trainer) == "deepspeed":
            raise _no_base(where, lora, f"DeepSpeed in stages[{i}]", "trainer: {kind: torch}")
    for path, stage in policy_gradient_stages(recipe):
        critic = stage.critic
        if getattr(critic, "trunk", "") == "own" and getattr(critic, "path", None) is None:
            raise _no_base(where, lora, f"{path}.critic, a copy of that base", "critic.path, or critic.trunk: policy")


def _no_base(where: str, lora: Any, whose: str, expected: str) -> RecipeError:
    return RecipeError(
        "a base in 4 bits does not go with this",
        where=where,
        got=f"{lora.quantization} with {whose}",
        expected=expected,
        hint="change that, or remove quantization",
    )


LORA_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_dora, _check_quantized)
