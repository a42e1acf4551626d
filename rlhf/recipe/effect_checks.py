"""Parts without the part that they are about: estimators, losses, agents and rewards that would do nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from agents.chat import ChatAgent
from agents.contrib.critic import CRITIC
from agents.tools import ToolAgent
from rewards.answers.search import ToolUse
from rewards.answers.tags import Format
from rewards.combinators.parts import with_parts
from rlhf.catalog import CATALOG
from rlhf.errors import RecipeError
from rlhf.recipe.keys import keys_of
from rlhf.recipe.loss_checks import policy_gradient_stages, shares_policy
from rlhf.registry import kind_of

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe

#: Keys of losses that say what happens where the ratio of new to old probability is not 1.
_RATIO_KEYS = (
    "clip_low", "clip_high", "dual_clip", "max_weight", "max_log_ratio", "drift_coef", "max_drift", "min_negative",
    "ratio", "next_weight", "clip",
)  # fmt: skip


def _check_estimators(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        for where, estimator in with_parts(f"{path}.advantage", stage.advantage):
            why, hint = _missing(recipe, stage, estimator)
            if why:
                raise RecipeError(
                    "this estimator would be without what it is about",
                    where=f"{where}.kind",
                    got=f"{kind_of('advantage', estimator)}, and {why}",
                    expected="the part that it compares by",
                    hint=hint,
                )


def _missing(recipe: Recipe, stage: Any, estimator: Any) -> tuple[str, str]:
    """Missing part of an estimator and the remedy; empty where nothing is missing."""
    from rlhf.credit.contrib.actor_critic_agents import Reviews
    from rlhf.credit.contrib.tree_grpo import TreeGRPO
    from rlhf.credit.contrib.treerl import TreeRL
    from rlhf.credit.contrib.with_demonstrations import Guided
    from rlhf.credit.two_level import TwoLevel

    agent = kind_of("agent", recipe.agent)
    if isinstance(estimator, TwoLevel) and isinstance(recipe.agent, ChatAgent):
        return f"an agent of kind {agent} names no subgoals", "use agent: {kind: planner}, or another estimator"
    if isinstance(estimator, Reviews) and CRITIC not in getattr(recipe.agent, "roles", ()):
        return f"an agent of kind {agent} has no critic", "use agent: {kind: critic}, or its inner estimator alone"
    if isinstance(estimator, TreeGRPO | TreeRL) and kind_of("rollout", stage.rollout) in ("independent", "retry"):
        return "attempts do not branch", "add rollout: {kind: tree}, or use grpo"
    if isinstance(estimator, Guided) and stage.expert is None:
        same = "grpo" if estimator.normalize_std else "dr_grpo"
        return "the stage brings no demonstrations", f"set expert: {{per_group: 1}}, or use {same}, which it then is"
    return "", ""


def _check_demonstrated(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        if kind_of("loss", stage.loss) == "luffy" and stage.expert is None:
            raise RecipeError(
                "this loss is for demonstrations among the attempts, and the stage brings none",
                where=f"{path}.loss.kind",
                got="luffy without expert",
                expected="demonstrations to weigh: without them it is -A ratio",
                hint="set expert: {per_group: 1}, or use loss: {kind: ppo_clip}",
            )


def _check_retries(recipe: Recipe) -> None:
    """Refuse retries until solved where a reward says what is solved: they are chosen before any reward is asked."""
    solving = next((name for name, weighted in recipe.rewards.items() if weighted.solved_at is not None), None)
    for path, stage in policy_gradient_stages(recipe):
        if solving and kind_of("rollout", stage.rollout) == "retry" and stage.rollout.until == "solved":
            raise RecipeError(
                "whether to retry is decided before rewards are asked",
                where=f"{path}.rollout.until",
                got=f"solved, which rewards.{solving}.solved_at says",
                expected="end",
                hint="write until: end, or use rollout: {kind: independent}",
            )


def _check_ratio_of_one(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        bypassed = kind_of("correction", stage.correction) == "bypass" and not shares_policy(recipe)
        is_old = bypassed or stage.replay is not None  # tokens of a policy of before
        if stage.epochs * stage.minibatches > 1 or is_old or kind_of("loss", stage.loss) not in CATALOG["loss"]:
            continue
        defaults = {name: key.make_default for name, key in keys_of(type(stage.loss)).items() if name in _RATIO_KEYS}
        for name, default in defaults.items():
            if default and getattr(stage.loss, name) != default():
                raise RecipeError(
                    "this key has no effect",
                    where=f"{path}.loss.{name}",
                    got=str(getattr(stage.loss, name)),
                    expected="nothing, because the stage makes one update per step, in which every ratio is 1",
                    hint="remove the key, or set minibatches or epochs above 1",
                )


def _check_called(recipe: Recipe) -> None:
    """Refuse an agent that calls tools where the environment takes no calls; a stranger's world may say nothing."""
    if any(isinstance(part, ToolAgent) for _, part in with_parts("agent", recipe.agent)):
        for where, world in _without_tools("environment", recipe.environment):
            raise RecipeError(
                "this agent writes calls of tools, and the environment has none to call",
                where="agent.kind",
                got=f"{kind_of('agent', recipe.agent)} in {kind_of('environment', world)} ({where})",
                expected="an environment that takes calls, as tools and mcp do",
                hint="use agent: {kind: chat}; a world of your own that takes calls says offers_tools = True",
            )


def _without_tools(path: str, world: Any) -> Iterator[tuple[str, Any]]:
    """Give path and settings of each environment that takes no calls, those within another in its place."""
    inner = list(_held(path, world))
    for where, held in inner:
        yield from _without_tools(where, held)
    named = kind_of("environment", world) in CATALOG["environment"]
    if not inner and not getattr(world, "offers_tools", not named):
        yield path, world


def _held(path: str, world: Any) -> Iterator[tuple[str, Any]]:
    members = getattr(world, "members", None)
    if callable(members):
        yield from ((f"{path}[{i}]", member) for i, member in enumerate(members()))
    elif getattr(world, "environment", None) is not None:
        yield f"{path}.environment", world.environment


def _check_forms(recipe: Recipe) -> None:
    """Refuse rewards whose form the agent never writes, and bonuses for tools that nobody names."""
    agents = [part for _, part in with_parts("agent", recipe.agent) if isinstance(part, ChatAgent)]
    for path, reward in with_parts("rewards", {name: weighted.reward for name, weighted in recipe.rewards.items()}):
        silent = next((a for a in agents if a.think == "off"), None)
        if isinstance(reward, Format) and reward.demands_thoughts and silent is not None:
            raise RecipeError(
                "this form begins with thoughts, and the agent is not let think: no attempt could keep it",
                where=f"{path}.then",
                got=f"'': {', '.join(reward.then[''])}",
                expected="agent.think: require or allow",
                hint="set agent.think, or leave out `then`: by default thoughts are the agent's to demand",
            )
        if isinstance(reward, ToolUse) and not reward.tools and any(_without_tools("environment", recipe.environment)):
            raise RecipeError(
                "the environment names no tools, so that nothing could earn the bonus",
                where=f"{path}.tools",
                got="no names",
                expected="names of calls, such as those of search_qa",
                hint="write tools: [search]",
            )


#: What is asked for the sake of training; a trained policy may be asked by another agent.
TRAINED_CHECKS: tuple[Callable[[Recipe], None], ...] = (
    _check_estimators,
    _check_demonstrated,
    _check_retries,
    _check_ratio_of_one,
    _check_forms,
)
EFFECT_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_called, *TRAINED_CHECKS)
