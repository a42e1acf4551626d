"""Loads the policy to evaluate: a model, an endpoint, or a baseline."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from agents.tools import ToolAgent
from rewards.models.model_folder import stage_of
from rlhf.build.engine import make_publisher
from rlhf.build.memory_store import agent_of
from rlhf.build.pair_data import check_parts
from rlhf.build.preflight import check_template
from rlhf.build.train import device, make_runner, policy_of
from rlhf.chat_api import ChatServer
from rlhf.evaluation.baselines import (
    MessageIdRenderer,
    OracleAgent,
    OracleEnvironment,
    RandomSeedEngine,
    RandomSeedRenderer,
    RefusingEngine,
)
from rlhf.evaluation.chance import RandomAgent
from rlhf.evaluation.endpoint import EndpointEngine
from rlhf.gateway.agent import ExternalAgent
from rlhf.gateway.environment import External
from rlhf.progress import RichProgress
from rlhf.recipe import Recipe
from rlhf.recipe.evaluation_request import BASELINES
from rlhf.recipe.evaluation_target import EvaluationTarget
from rlhf.recipe.suites import Part
from rlhf.rollout.contrib.strategies import StrategyCapabilities
from rlhf.rollout.runner import RolloutRunner
from rlhf.rollout.scoring import WeightedReward
from rlhf.training.policy.model import Policy, restore
from rlhf.training.reward_model_training import left_by


@asynccontextmanager
async def at_play(found: EvaluationTarget, progress: RichProgress) -> AsyncIterator[Callable[[Part], RolloutRunner]]:
    """Load what is evaluated; gives the runner of each part of the suite."""
    if found.kind == "model":
        async with _model_at_play(found, progress) as runner_of:
            yield runner_of
        return
    renderer = RandomSeedRenderer() if found.kind == "random" else MessageIdRenderer()
    engines: dict[str, Any] = {}

    def engine_of(agent: Any) -> Any:
        style = agent.tool_format if isinstance(agent, ToolAgent | ExternalAgent) else "hermes"
        if style not in engines:
            engines[style] = RandomSeedEngine() if found.kind == "random" else RefusingEngine()
            if found.kind == "endpoint":
                engines[style] = EndpointEngine(found.endpoint, found.model, renderer, found.patience, style)
        return engines[style]

    def runner_of_part(part: Part) -> RolloutRunner:
        environment: Any = OracleEnvironment(part.environment) if found.kind == "oracle" else part.environment
        agent: Any = part.agent
        if found.kind in BASELINES:
            agent = OracleAgent(environment) if found.kind == "oracle" else RandomAgent(environment)
        return RolloutRunner(
            environment=environment,
            agent=agent,
            rewards=part.rewards,
            engine=engine_of(part.agent),
            renderer=renderer,
            limits=part.limits,
            seed=found.suite.seed,
            on_progress=progress.rollout,
        )

    if found.kind == "endpoint":
        progress.say(f"asking {found.model} at {found.endpoint}")
        await ChatServer(found.endpoint, found.model).reach()
    try:
        yield runner_of_part
    finally:
        for engine in engines.values():
            await engine.close()
        _end_programs(found)
        if found.kind == "endpoint" and (n := sum(engine.n_refused for engine in engines.values())):
            last = next(engine.last_refusal for engine in engines.values() if engine.last_refusal)
            progress.say(f"{n:,} requests to {found.endpoint} failed, and were asked again up to --tries times: {last}")


@asynccontextmanager
async def _model_at_play(
    found: EvaluationTarget, progress: RichProgress
) -> AsyncIterator[Callable[[Part], RolloutRunner]]:
    recipe = found.recipe
    assert recipe is not None
    policy = _weights(recipe, found.checkpoint)
    strategy = found.suite.strategy
    left = {part.name: _left(part.rewards, found.checkpoint) for part in found.suite.parts}
    asked = [weighted.reward for rewards in left.values() for weighted in rewards.values()]
    check_parts([*asked, StrategyCapabilities(strategy).judge], policy.tokenizer)
    policy.model.to(device())
    runner = await make_runner(recipe, policy, progress)
    try:
        for part in found.suite.parts:
            check_template(part.agent, runner.renderer)
        await make_publisher(recipe, policy, runner.engine).publish()
        yield lambda part: replace(
            runner,
            environment=part.environment,
            agent=agent_of(part, found.checkpoint, found.name),
            rewards=left[part.name],
            limits=part.limits,
            seed=found.suite.seed,
        )
    finally:
        await runner.engine.close()
        _end_programs(found)


def _end_programs(found: EvaluationTarget) -> None:
    """End the programs and gateways of outside agents."""
    for part in found.suite.parts:
        if isinstance(part.environment, External):
            part.environment.close()


def _left(rewards: Mapping[str, WeightedReward], checkpoint: Path | None) -> dict[str, WeightedReward]:
    """Rewards that use the models trained by a checkpoint's run; without those not yet trained."""
    if checkpoint is None:
        return dict(rewards)
    run = checkpoint.parent.parent
    found = {name: replace(w, reward=left_by(stage_of(w.reward), w.reward, run)) for name, w in rewards.items()}
    return {name: w for name, w in found.items() if stage_of(w.reward) is None}


def _weights(recipe: Recipe, checkpoint: Path | None) -> Policy:
    """The policy of a recipe and a checkpoint, or of an adapter without a run around it."""
    if checkpoint is not None and (checkpoint / "adapter_config.json").is_file():
        return restore(recipe.policy, checkpoint, checkpoint)
    return policy_of(recipe, checkpoint)
