"""The critic of token rewards: its loss, its gradient by definition, and what it learns from outcomes."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from agents.chat import ChatAgent
from agents.memory.full import FullHistory
from agents.memory.window import Window
from rlhf.credit.contrib.oreal import OREAL
from rlhf.credit.estimator import compute_advantages
from rlhf.data import Outcome, ScoredGroup
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.contrib.critics.token_rewards import TokenRewards, TokenRewardTrainer, outcome_loss
from rlhf.training.policy.model import Policy
from rlhf.training.stages.policy_gradient import PolicyGradient
from tests.batching.batch_parts import generation, group, trajectory
from tests.training.tiny import Echoes, collect, policy


def critic_of(made: Policy, *, awake: bool = True, **settings: Any) -> TokenRewardTrainer:
    """A critic that makes one update of everything; `awake`, its head says something already."""
    keys = {"batch_size": 1000, "optimizer": AdamW(lr=1e-2, max_grad_norm=None), **settings}
    stage = PolicyGradient(advantage=OREAL(weights="critic"), max_tokens_per_microbatch=300)
    critic = TokenRewards(**keys).start(stage, made, None, 0)
    if awake:
        generator = torch.Generator().manual_seed(1)
        for parameter in critic.model.head.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return critic


@pytest.fixture(scope="module", params=[FullHistory(), Window(turns=0)], ids=["grows", "is rewritten"])
def groups(request: pytest.FixtureRequest) -> list[ScoredGroup]:
    agent = ChatAgent(system="", memory=request.param)
    found = collect(policy(), environment=Echoes(n_turns=3), agent=agent, n_tasks=3, group_size=2)
    # Every other attempt is called right, whatever it did.
    outcomes = (Outcome.SOLVED, Outcome.FAILED)
    return [
        replace(g, trajectories=tuple(replace(t, outcome=o) for t, o in zip(g.trajectories, outcomes, strict=True)))
        for g in found
    ]


def test_worked_example_of_the_loss() -> None:
    # σ(mean of 2 and 0) = .731059, −ln = .313262; one token of reward −1, gone wrong: −ln(1 − .268941) = .313262.
    given = torch.tensor([2.0, 0.0, -1.0])
    assert outcome_loss(given[:2], [2], torch.tensor([1.0])).item() == pytest.approx(0.313262, abs=1e-6)
    assert outcome_loss(given, [2, 1], torch.tensor([1.0, 0.0])).item() == pytest.approx(0.626523, abs=1e-6)


def by_definition(critic: TokenRewardTrainer, prompt: tuple[int, ...], sampled: tuple[int, ...]) -> torch.Tensor:
    """Rewards of sampled tokens: a plain forward pass of one row, read at the state before each."""
    hidden = critic.model.backbone(input_ids=torch.tensor([[*prompt, *sampled]]), use_cache=False).last_hidden_state[0]
    found: torch.Tensor = critic.model.head(hidden.float())[len(prompt) - 1 : -1, 0]
    return found


def test_rewards_and_gradient_are_those_of_the_definition(groups: list[ScoredGroup]) -> None:
    critic = critic_of(policy())
    plain, losses = copy.deepcopy(critic), []
    seen = critic.predict(groups)
    for made, values in zip(groups, seen.values, strict=True):
        values.check(made)
        for t, rewards_NT in zip(made.trajectories, values.values_GNT, strict=True):
            own = [by_definition(plain, g.full_ids[: len(g.full_ids) - g.n_tokens], g.token_ids) for g in t.generations]
            for expected, row in zip(own, rewards_NT, strict=True):
                assert row == pytest.approx(expected.tolist(), abs=1e-4)
            p = torch.cat(own).mean().sigmoid()
            losses.append(-(p if t.solved else 1 - p).log())
    loss = torch.stack(losses).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    logged = critic.learn(seen, [], np.random.default_rng(0), 0)
    for (name, a), (_, b) in zip(critic.model.kept(), plain.model.kept(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=2e-5, rtol=1e-3, msg=lambda text, n=name: f"{n}: {text}")
    assert logged["critic/outcome_loss"] == pytest.approx(loss.item(), rel=1e-4)


def test_it_learns_how_attempts_come_out(groups: list[ScoredGroup]) -> None:
    critic = critic_of(policy(), awake=False, warmup_steps=1, epochs=40)
    assert critic.is_warming(0) and not critic.is_warming(1)
    first = critic.learn(critic.predict(groups), [], np.random.default_rng(0), 0)
    seen = critic.predict(groups)
    told = critic.learn(seen, [], np.random.default_rng(0), 1)
    # It begins at ln 2 and a coin; what was said tells the attempts apart.
    assert told["critic/outcome_loss"] < first["critic/outcome_loss"] < 0.7
    assert told["critic/outcome_accuracy"] == 1.0 and critic.n_updates == 80
    credit = compute_advantages(OREAL(weights="critic"), groups, seen.values)
    assert any(x for c in credit for rows in c.advantages_GNT for row in rows for x in row)


def test_a_step_without_tokens_teaches_nothing() -> None:
    critic = critic_of(policy())
    seen = critic.predict([group(trajectory(generation([0], [])))])
    assert seen.values[0].values_GNT == (((),),) and not seen.attempts
    logged = critic.learn(seen, [], np.random.default_rng(0), 0)
    assert logged["critic/n_updates"] == 0.0 and "critic/outcome_accuracy" not in logged
