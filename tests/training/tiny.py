"""Tiny policies, and trajectories that the real engine makes with them in a small environment."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass
from typing import Any

import torch

from agents.chat import ChatAgent
from environments.base import Properties, StepResult
from rewards.shaping.outcome import EnvironmentReward
from rlhf.credit.estimator import AdvantageEstimator, compute_advantages
from rlhf.data import Credit, SamplingParams, ScoredGroup, Task
from rlhf.inference.embedded.engine import TransformersEngine
from rlhf.inference.role_adapters import adapter_names
from rlhf.rollout.limits import Limits
from rlhf.rollout.opponent_engine import OpponentSampler
from rlhf.rollout.renderer import Renderer
from rlhf.rollout.runner import RolloutRunner
from rlhf.rollout.scoring import WeightedReward
from rlhf.training.policy.model import FromScratch, Policy

SAID = ("alpha beta gamma", "the poison waits", "omega")


@dataclass(frozen=True)
class Echoes:
    """Whatever the agent says, it is told how long it was; the reward is what two words of it have in common."""

    n_turns: int = 3
    opening: str = SAID[0]
    answer: str = SAID[1]

    properties = Properties(inline=True)

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"echoes/{i}", seed=i) for i in range(8)]

    def start(self, task: Task) -> EchoesEpisode:
        return EchoesEpisode(self, task.seed)


class EchoesEpisode:
    def __init__(self, settings: Echoes, seed: int) -> None:
        self.settings, self.seed, self.n_steps = settings, seed, 0
        self.opening = StepResult(f"{settings.opening} {seed}", state_key="start")

    async def step(self, action: str) -> StepResult:
        self.n_steps += 1
        # A reward that differs between attempts and turns, and a length that hangs on what was said.
        reward = (sum(map(ord, action)) % 7) / 7
        over = self.n_steps >= self.settings.n_turns or sum(map(ord, action)) % 5 == 0
        key = f"{self.n_steps}/{sum(map(ord, action)) % 2}"
        return StepResult(
            f"{self.settings.answer} {len(action)}", reward, over, state_key=key, success=reward > 0.5 if over else None
        )

    async def close(self) -> None:
        pass


def policy(seed: int = 0, **settings: Any) -> Policy:
    """A Qwen3 of some 20 thousand parameters whose next-token distributions are far from uniform."""
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "n_layers": 2,
        "n_heads": 2,
        "head_dim": 8,
        "max_context": 256,
        "vocab_size": 300,
        "initializer_range": 0.3,
    }
    return FromScratch(**{**shape, **settings}).build(seed, SAID * 10)


def collect(
    made_by: Policy,
    *,
    environment: Any = None,
    agent: Any = None,
    n_tasks: int = 2,
    group_size: int = 3,
    temperature: float = 1.0,
    max_tokens: int = 6,
    opponents: OpponentSampler | None = None,
) -> list[ScoredGroup]:
    """Scored groups of one rollout."""
    engine = TransformersEngine(made_by.model, max_context=made_by.max_context)
    collector = RolloutRunner(
        environment=environment or Echoes(),
        agent=agent or ChatAgent(system=""),
        rewards={"env": WeightedReward("env", 1.0, EnvironmentReward())},
        engine=engine,
        renderer=Renderer(made_by.tokenizer, adapters=adapter_names(made_by.model)),
        limits=Limits(max_turns=4, max_tokens=max_tokens),
        seed=0,
    )
    tasks = collector.environment.tasks("train")
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)

    async def go() -> list[ScoredGroup]:
        try:
            drawn = list(tasks)[:n_tasks]
            found = await collector.collect(
                drawn, group_size=group_size, sampling=sampling, step=0, opponents=opponents
            )
        finally:
            await engine.close()
        return list(found.groups)

    return asyncio.run(go())


def credit(groups: list[ScoredGroup], estimator: AdvantageEstimator) -> list[Credit]:
    return compute_advantages(estimator, groups)


def ones(groups: list[ScoredGroup]) -> list[Credit]:
    """Credit of 1 for every token."""
    return [
        Credit(tuple(tuple((1.0,) * len(g.token_ids) for g in t.generations) for t in group.trajectories))
        for group in groups
    ]


def gradient(model: torch.nn.Module) -> torch.Tensor:
    """Gradients of all trained parameters, flat."""
    return torch.cat([p.grad.detach().flatten().double() for p in model.parameters() if p.grad is not None])


def parameters(model: torch.nn.Module) -> torch.Tensor:
    """All trained parameters, flat; a copy."""
    return torch.cat([p.detach().flatten().clone() for p in model.parameters() if p.requires_grad])


class OldForward(torch.nn.Module):
    """A trainer's model that publishes its weights and computes with those it began with."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.module, self._old = model, [copy.deepcopy(model)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._old[0](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)
