"""Pairs of settings that cannot work together, found before anything loads.

Each check looks at one promise and raises RecipeError where it is broken. What is legal but probably not meant is a
caution: `rlhf show` and `rlhf train` print it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rlhf.errors import RecipeError, nearest
from rlhf.recipe.critic_checks import CRITIC_CAUTIONS, CRITIC_CHECKS, critic_for, estimators_for, written
from rlhf.recipe.effect_checks import EFFECT_CHECKS, TRAINED_CHECKS
from rlhf.recipe.guidance_checks import GUIDANCE_CHECKS
from rlhf.recipe.keys import keys_of, section_in
from rlhf.recipe.level_checks import LEVEL_CAUTIONS, LEVEL_CHECKS
from rlhf.recipe.lora_checks import CALLED_CHECKS, LORA_CHECKS
from rlhf.recipe.loss_checks import LOSS_CAUTIONS, LOSS_CHECKS, policy_gradient_stages, shares_policy
from rlhf.recipe.memory_checks import MEMORY_CHECKS
from rlhf.recipe.opponent_checks import OPPONENT_CAUTIONS, OPPONENT_CHECKS
from rlhf.recipe.renewal_checks import RENEWAL_CAUTIONS, RENEWAL_CHECKS
from rlhf.recipe.role_checks import ROLE_CAUTIONS, ROLE_CHECKS
from rlhf.recipe.sampling_checks import SAMPLING_CAUTIONS, SAMPLING_CHECKS
from rlhf.recipe.seat_checks import SEAT_CAUTIONS, SEAT_CHECKS
from rlhf.recipe.split_checks import SPLIT_CAUTIONS, SPLIT_CHECKS
from rlhf.recipe.stage_checks import STAGE_CHECKS
from rlhf.recipe.start_checks import START_CHECKS
from rlhf.recipe.stopping_checks import STOPPING_CHECKS
from rlhf.recipe.store_checks import STORE_CHECKS
from rlhf.recipe.trainer_checks import TRAINER_CHECKS
from rlhf.recipe.watch_checks import WATCH_CAUTIONS, WATCH_CHECKS
from rlhf.registry import kind_of

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe


def check_pairs(recipe: Recipe, *, is_trained: bool = False) -> None:
    """Raise RecipeError for the first pair of parts that cannot work together.

    A policy that is trained already may be asked by another agent, which calls it in fewer roles: then nothing trains
    on the others, and an adapter that reads nothing changes nothing.
    """
    for check in _CHECKS:
        if not (is_trained and check in _OF_TRAINING):
            check(recipe)


def cautions(recipe: Recipe) -> list[str]:
    """Say what is legal and probably not meant, one sentence each."""
    return [text for caution in _CAUTIONS for text in caution(recipe)]


def supervised_stages(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Give YAML path and settings of each supervised stage."""
    from rlhf.training.stages.supervised import Supervised

    return ((f"stages[{i}]", s) for i, s in enumerate(recipe.stages) if isinstance(s, Supervised))


def advantages(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Give YAML path and settings of each advantage estimator; those that another one holds come before it."""
    for path, stage in policy_gradient_stages(recipe):
        yield from _nested("advantage", f"{path}.advantage", stage.advantage)


def _nested(section: str, path: str, part: Any) -> Iterator[tuple[str, Any]]:
    """Give path and settings of every part of `section` inside `part`, the innermost first, and `part` itself last."""
    for name, key in keys_of(type(part)).items():
        held = getattr(part, name) if section_in(key.annotation) == section else ()
        if isinstance(held, list | tuple):
            for i, inner in enumerate(held):
                yield from _nested(section, f"{path}.{name}[{i}]", inner)
        elif held is not None:
            yield from _nested(section, f"{path}.{name}", held)
    yield path, part


def _check_tools(recipe: Recipe) -> None:
    if getattr(recipe.agent, "needs_tools", False) and not getattr(recipe.environment, "tools", ()):
        raise RecipeError(
            "this agent needs tools and the environment offers none",
            where="agent.kind",
            got=f"{kind_of('agent', recipe.agent)} in {kind_of('environment', recipe.environment)}",
            expected="an environment with an attribute `tools`, or an agent without needs_tools",
            hint="use {kind: chat}, or another environment",
        )


def _check_rewards(recipe: Recipe) -> None:
    learns = any(True for _ in policy_gradient_stages(recipe))
    if not recipe.rewards or (learns and not any(weighted.weight for weighted in recipe.rewards.values())):
        raise RecipeError(
            "there is nothing to score with" if not recipe.rewards else "every reward has weight 0",
            where="rewards",
            got=", ".join(recipe.rewards) or "no rewards",
            expected="at least one reward" + (" with a weight" if recipe.rewards else ""),
            hint="add rewards: {outcome: {kind: outcome}}",
        )


def _check_groups(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        for _, estimator in _nested("advantage", f"{path}.advantage", stage.advantage):
            if stage.group_size < estimator.min_group:
                raise RecipeError(
                    "a group this small has no advantage: every number would be 0",
                    where=f"{path}.group_size",
                    got=str(stage.group_size),
                    expected=f"at least {estimator.min_group} for {kind_of('advantage', estimator)}",
                    hint="attempt each task several times: group_size: 8",
                )


def _check_values(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        found = list(_nested("advantage", f"{path}.advantage", stage.advantage))
        needing = [(where, estimator) for where, estimator in found if estimator.needs_values]
        if stage.critic is None and needing:
            where, estimator = needing[0]
            raise RecipeError(
                "this estimator needs a critic and the stage trains none",
                where=f"{where}.kind",
                got=kind_of("advantage", estimator),
                expected=f"{path}.critic, or an estimator with needs_values = False",
                hint=f"add critic: {written(critic_for(estimator))} to the stage, or use grpo, rloo or gigpo",
            )
        if stage.critic is not None and not needing:
            others = " or ".join(estimators_for(kind_of("critic", stage.critic)))
            why = f"{kind_of('advantage', stage.advantage)} compares with no values: use {others}"
            raise _no_effect(f"{path}.critic", "a critic", why)


def _check_wrapped(recipe: Recipe) -> None:
    for path, outer in advantages(recipe):
        for where, inner in _nested("advantage", path, outer):
            if hasattr(inner, "over_batch") and not hasattr(outer, "over_batch"):
                raise RecipeError(
                    "this estimator compares the groups of a step, and what holds it shows it one group at a time",
                    where=f"{where}.kind",
                    got=f"{kind_of('advantage', inner)} in {kind_of('advantage', outer)}",
                    expected=f"a method {type(outer).__name__}.over_batch",
                    hint="write `over_batch` as rlhf/credit/wrapper.py does, or inherit from its Wrapper",
                )


def _check_step_rewards(recipe: Recipe) -> None:
    from rlhf.credit.contrib.hrpo import HRPO

    for path, estimator in advantages(recipe):
        if isinstance(estimator, HRPO) and estimator.reward not in recipe.trained_rewards:
            raise RecipeError(
                "there is no such reward",
                where=f"{path}.reward",
                got=estimator.reward,
                expected=", ".join(recipe.trained_rewards),
                hint=nearest(estimator.reward, recipe.trained_rewards)
                or "name a key of `rewards` that judges each turn",
            )


def _check_minibatches(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        n_episodes = stage.tasks_per_step * stage.group_size
        if stage.minibatches > n_episodes:
            raise RecipeError(
                "there are more minibatches than trajectories",
                where=f"{path}.minibatches",
                got=str(stage.minibatches),
                expected=f"at most tasks_per_step x group_size = {n_episodes}",
                hint="a trajectory is never cut in two",
            )


def _check_demonstrations(recipe: Recipe) -> None:
    from environments.base import can_demonstrate

    for path, stage in supervised_stages(recipe):
        if stage.attempts is not None:
            continue
        environment, agent = kind_of("environment", recipe.environment), kind_of("agent", recipe.agent)
        if not can_demonstrate(recipe.environment):
            raise RecipeError(
                "this environment cannot demonstrate",
                where=f"{path}.kind",
                got=f"supervised with {environment}",
                expected="an environment with a method `plan(task, taken)`",
                hint="remove the stage and start from a pretrained policy, or write `plan`",
            )
        if not callable(getattr(recipe.agent, "write", None)):
            raise RecipeError(
                "this agent cannot be shown demonstrations",
                where=f"{path}.kind",
                got=f"supervised with {agent}, which lacks write",
                expected="a method `write(shown)` beside `act`",
                hint="remove the stage, or write it as agents.chat.ChatAgent does",
            )
        if stage.unsolved_share == 1 and stage.random_share:
            raise _no_effect(f"{path}.random_share", stage.random_share, "unsolved_share is 1: all actions are random")


def _check_optimizers(recipe: Recipe) -> None:
    found: list[tuple[str, Any]] = [(f"stages[{i}]", stage) for i, stage in enumerate(recipe.stages)]
    found += [(f"{path}.critic", getattr(stage, "critic", None)) for path, stage in found]
    for path, holder in found:
        optimizer: Any = getattr(holder, "optimizer", None)
        if getattr(optimizer, "schedule", None) == "constant" and optimizer.final_lr_share:
            raise _no_effect(f"{path}.optimizer.final_lr_share", optimizer.final_lr_share, "the schedule is constant")


def _check_context(recipe: Recipe) -> None:
    own, limit = getattr(recipe.policy, "max_context", None), recipe.limits.max_context
    if own and limit and limit > own:
        raise RecipeError(
            "the limit is longer than the policy's context",
            where="limits.max_context",
            got=str(limit),
            expected=f"at most policy.max_context = {own}",
            hint="lower it, or raise policy.max_context",
        )
    context = limit or own
    if context and recipe.limits.max_tokens >= context:
        raise RecipeError(
            "one generation would fill the context: no room for a prompt",
            where="limits.max_tokens",
            got=str(recipe.limits.max_tokens),
            expected=f"less than the context of {context}",
            hint="lower it, or give more context",
        )


#: Section, kind, a key and its value, and the keys that mean nothing while it has that value.
_SILENCED: tuple[tuple[str, str, str, object, tuple[str, ...]], ...] = (
    ("agent", "chat", "show_admissible", False, ("max_admissible",)),
    ("advantage", "grpo", "normalize_std", False, ("ddof", "eps")),
    ("advantage", "guided", "normalize_std", False, ("ddof", "eps")),
    ("advantage", "gigpo", "normalize", "mean", ("ddof", "eps")),
    ("advantage", "gigpo", "step_weight", 0, ("gamma", "similarity")),
    ("advantage", "hgpo", "normalize", "mean", ("ddof", "eps")),
    ("advantage", "hgpo", "history", 0, ("alpha",)),
    ("advantage", "hrpo", "step_weight", 0, ("exempt_turns",)),
    ("advantage", "stratified", "alpha", 0, ("calls", "width")),
    ("sampler", "greso", "p_step", 0, ("p_min", "p_max", "easy_target", "hard_target")),
    ("loss", "cpgd", "drift_coef", 0, ("max_drift",)),
    ("loss", "nft", "negative_weight", 0, ("min_negative",)),
    ("loss", "a_lol", "ratio", "none", ("clip_low", "clip_high")),
    ("loss", "kdrl", "teach", "all", ("right_above",)),
)


def _check_silenced(recipe: Recipe) -> None:
    parts = [("agent", "agent", recipe.agent)]
    parts += [("advantage", path, estimator) for path, estimator in advantages(recipe)]
    parts += [("loss", f"{path}.loss", stage.loss) for path, stage in policy_gradient_stages(recipe)]
    parts += [("sampler", f"{path}.sampler", stage.sampler) for path, stage in policy_gradient_stages(recipe)]
    for section, path, part in parts:
        for of_section, kind, by, value, names in _SILENCED:
            if (of_section, kind) != (section, kind_of(section, part)) or getattr(part, by) != value:
                continue
            keys = keys_of(type(part))
            for name in names:
                default = keys[name].make_default
                if default is not None and getattr(part, name) != default():
                    why = f"{by} is {'false' if value is False else value}"
                    raise _no_effect(f"{path}.{name}", getattr(part, name), why)


def _check_correction(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        if shares_policy(recipe) and stage.correction != type(stage)().correction:
            why = "the engine shares the trainer's weights: what it reports is what the trainer computes"
            raise _no_effect(f"{path}.correction", kind_of("correction", stage.correction), why)


def _check_lora(recipe: Recipe) -> None:
    from rlhf.inference.settings import VllmSettings

    engine = recipe.engine
    if isinstance(engine, VllmSettings) and engine.lora != VllmSettings().lora and recipe.policy.lora is None:
        raise _no_effect("engine.lora", engine.lora, "the policy has no adapter, see policy.lora")


def _check_watched(recipe: Recipe) -> None:
    from rlhf.evaluation.evaluate import Evaluation

    if any(stage.evaluate_every for _, stage in policy_gradient_stages(recipe)):
        return
    for name in ("watch_split", "watch_n_tasks"):
        if getattr(recipe.evaluation, name) != getattr(Evaluation(), name):
            raise _no_effect(f"evaluation.{name}", getattr(recipe.evaluation, name), "no stage sets evaluate_every")


def _check_overlong(recipe: Recipe) -> None:
    longest = recipe.limits.max_turns * recipe.limits.max_tokens
    for name, weighted in recipe.rewards.items():
        reward: Any = weighted.reward
        if kind_of("reward", reward) == "overlong" and longest <= reward.max_tokens - reward.buffer:
            why = f"an episode has at most limits.max_turns x limits.max_tokens = {longest} sampled tokens"
            raise _no_effect(f"rewards.{name}.max_tokens", reward.max_tokens, why)


def _no_effect(where: str, value: object, why: str) -> RecipeError:
    return RecipeError(
        "this key has no effect", where=where, got=str(value), expected=f"nothing, because {why}", hint="remove the key"
    )


_CHECKS: tuple[Callable[[Recipe], None], ...] = (
    _check_tools,
    *WATCH_CHECKS,
    *MEMORY_CHECKS,
    *STORE_CHECKS,
    *SEAT_CHECKS,
    _check_rewards,
    _check_groups,
    _check_values,
    _check_wrapped,
    _check_step_rewards,
    *LEVEL_CHECKS,
    _check_minibatches,
    _check_demonstrations,
    _check_optimizers,
    _check_silenced,
    _check_correction,
    *LOSS_CHECKS,
    *SAMPLING_CHECKS,
    *GUIDANCE_CHECKS,
    *CRITIC_CHECKS,
    _check_lora,
    *CALLED_CHECKS,
    *LORA_CHECKS,
    *START_CHECKS,
    *STAGE_CHECKS,
    *STOPPING_CHECKS,
    *TRAINER_CHECKS,
    *RENEWAL_CHECKS,
    *OPPONENT_CHECKS,
    *ROLE_CHECKS,
    _check_watched,
    _check_overlong,
    *SPLIT_CHECKS,
    *EFFECT_CHECKS,
    _check_context,
)


#: What is asked for the sake of training.
_OF_TRAINING = (*CALLED_CHECKS, *ROLE_CHECKS, *TRAINED_CHECKS)


def _caution_warmup(recipe: Recipe) -> Iterator[str]:
    for path, stage in policy_gradient_stages(recipe):
        n_updates = stage.steps * stage.epochs * stage.minibatches
        if stage.optimizer.warmup_steps >= n_updates:
            yield f"{path} makes {n_updates} updates and its optimizer.warmup_steps is {stage.optimizer.warmup_steps}"


def _caution_turns(recipe: Recipe) -> Iterator[str]:
    steps = getattr(recipe.environment, "max_steps", None)
    if isinstance(steps, int) and steps > recipe.limits.max_turns:
        yield f"limits.max_turns {recipe.limits.max_turns} cuts episodes before the environment's {steps} steps"


_CAUTIONS: tuple[Callable[[Recipe], Iterator[str]], ...] = (
    *SPLIT_CAUTIONS,
    _caution_warmup,
    _caution_turns,
    *LOSS_CAUTIONS,
    *SAMPLING_CAUTIONS,
    *CRITIC_CAUTIONS,
    *WATCH_CAUTIONS,
    *LEVEL_CAUTIONS,
    *RENEWAL_CAUTIONS,
    *SEAT_CAUTIONS,
    *OPPONENT_CAUTIONS,
    *ROLE_CAUTIONS,
)
