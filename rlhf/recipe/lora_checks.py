"""What adapters ask of the settings around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rlhf.errors import RecipeError
from rlhf.recipe.loss_checks import policy_gradient_stages
from rlhf.recipe.role_checks import never_called, roles_of
from rlhf.registry import kind_of

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe

#: Stages whose rows know their role, and keys of them that take the policy for one set of weights.
_OF_ROLES = ("supervised", "policy_gradient")
_ONE_SET = ("critic", "reward_refresh", "judge_refresh")

_SHARED_ONE = "plain actions have the adapter that is shared; remove the role"
_UNSAID = "let the agent say in which roles it calls the policy, in an attribute `roles`, or remove the role"


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
        if getattr(critic, "backbone", "") == "own" and getattr(critic, "path", None) is None:
            raise _no_base(
                where, lora, f"{path}.critic, a copy of that base", "critic.path, or critic.backbone: policy"
            )


def _no_base(where: str, lora: Any, whose: str, expected: str) -> RecipeError:
    return RecipeError(
        "a base in 4 bits does not go with this",
        where=where,
        got=f"{lora.quantization} with {whose}",
        expected=expected,
        hint="change that, or remove quantization",
    )


def _check_roles(recipe: Recipe) -> None:
    for path, critic in _adapters(recipe):
        if path != "policy.lora" and critic.roles:
            raise RecipeError(
                "a critic is asked in no role",
                where=f"{path}.roles",
                got=", ".join(critic.roles),
                expected="nothing",
                hint="remove the key",
            )
    lora = recipe.policy.lora
    if lora is None or not lora.roles:
        return
    delivered = getattr(recipe.engine, "lora", "auto")
    if delivered == "merged":
        raise _one_set("engine.lora", delivered, "adapter", "they cannot be merged into one set of weights")
    for i, stage in enumerate(recipe.stages):
        kind = kind_of("stage", stage)
        if kind not in _OF_ROLES:
            raise _one_set(f"stages[{i}].kind", kind, " or ".join(_OF_ROLES), "this stage knows one set of weights")
        if getattr(stage.trainer, "zero", 0) == 3 and kind_of("engine", recipe.engine) != "vllm":
            why = "the embedded engine has a copy then, into which adapters are merged"
            raise _one_set(f"stages[{i}].trainer.zero", "3", "0 to 2, or engine: {kind: vllm}", why)
        for key in _ONE_SET:
            if getattr(stage, key, None) is not None:
                raise _one_set(f"stages[{i}].{key}", "given", "null", "it works with one set of weights")


def _check_called(recipe: Recipe) -> None:
    lora, known = recipe.policy.lora, [role for role in roles_of(recipe) if role]
    for i, role in enumerate(lora.roles if lora is not None else ()):
        if role not in known:
            way_out = _SHARED_ONE if roles_of(recipe) else _UNSAID
            raise never_called(f"policy.lora.roles[{i}]", role, known, way_out)


def _one_set(where: str, got: str, expected: str, why: str) -> RecipeError:
    return RecipeError(
        f"adapters of roles do not go with this: {why}",
        where=where,
        got=f"{got}, with policy.lora.roles",
        expected=expected,
        hint="change that, or remove policy.lora.roles",
    )


LORA_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_dora, _check_quantized, _check_roles)
CALLED_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_called,)
