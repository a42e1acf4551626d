"""The critic of contributions: its loss, what it learns, and when."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.credit.contrib.progress import Progress
from rlhf.credit.estimator import compute_advantages
from rlhf.data import ScoredGroup
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.contrib.critics.contributions import Contributions, ContributionTrainer, sum_loss
from rlhf.training.policy.model import Lora, Policy
from rlhf.training.stages.policy_gradient import PolicyGradient
from tests.batching.batch_parts import generation, group, trajectory
from tests.test_resume import LORA, POLICY_GRADIENT, SHORT, SUPERVISED, assert_equal, run_with_interruptions
from tests.training import runs
from tests.training.critics import AGENTS, assert_same_gradients
from tests.training.tiny import Echoes, collect, parameters, policy


def critic_of(made: Policy, *, awake: bool = True, lr: float = 1e-2, **settings: Any) -> ContributionTrainer:
    """A critic that makes one update of everything; `awake`, its head says something already."""
    keys = {"batch_size": 1000, "optimizer": AdamW(lr=lr, max_grad_norm=None), **settings}
    stage = PolicyGradient(advantage=Progress(contributions="critic"), max_tokens_per_microbatch=300)
    critic = Contributions(**keys).start(stage, made, None, 0)
    if awake:
        generator = torch.Generator().manual_seed(1)
        for parameter in critic.model.head.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return critic


@pytest.fixture(scope="module", params=AGENTS)
def groups(request: pytest.FixtureRequest) -> list[ScoredGroup]:
    return collect(policy(), environment=Echoes(n_turns=9), agent=AGENTS[request.param], n_tasks=3, group_size=2)


def test_worked_example_of_the_loss() -> None:
    # (.1 + .2 + .5 − 1)² = .04; and of one turn of .3 where the score was 0: .09.
    given = torch.tensor([0.1, 0.2, 0.5, 0.3])
    assert sum_loss(given[:3], [3], torch.tensor([1.0])).item() == pytest.approx(0.04)
    assert sum_loss(given, [3, 1], torch.tensor([1.0, 0.0])).item() == pytest.approx(0.13)


def by_definition(critic: ContributionTrainer, ids: tuple[int, ...]) -> torch.Tensor:
    """What the turn that ends these ids contributed: a plain forward pass of one row."""
    hidden = critic.model.backbone(input_ids=torch.tensor([list(ids)]), use_cache=False).last_hidden_state[0, -1]
    found: torch.Tensor = critic.model.head(hidden.float())[0]
    return found


def test_gradient_and_contributions_are_those_of_the_definition(groups: list[ScoredGroup]) -> None:
    critic = critic_of(policy())
    plain, errors = copy.deepcopy(critic), []
    seen = critic.predict(groups)
    for made, values in zip(groups, seen.values, strict=True):
        values.check(made)
        for t, score, actions_NT in zip(made.trajectories, made.scores, values.actions_GNT or (), strict=True):
            own = [by_definition(plain, g.full_ids) for g in t.generations]
            for contributed, row in zip(own, actions_NT, strict=True):
                assert len(set(row)) == 1 and row[0] == pytest.approx(contributed.item(), abs=1e-4)
            errors.append(torch.stack(own).sum() - score.total)
    loss = torch.stack(errors).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    logged = critic.learn(seen, [], np.random.default_rng(0), 0)
    assert_same_gradients(critic, plain)
    assert logged["critic/sum_loss"] == pytest.approx(loss.item(), rel=1e-4)


def test_it_learns_in_its_warm_up_and_then_stays(groups: list[ScoredGroup]) -> None:
    critic = critic_of(policy(), awake=False, warmup_steps=2, epochs=15)
    first, second = (critic.learn(critic.predict(groups), [], np.random.default_rng(0), step) for step in (0, 1))
    assert first["critic/explained_variance"] == 0.0 and first["critic/value_mean"] == 0.0
    assert second["critic/sum_loss"] < 0.3 * first["critic/sum_loss"] and second["critic/n_updates"] == 30.0
    seen, before = critic.predict(groups), parameters(critic.model)
    told = critic.learn(seen, [], np.random.default_rng(0), 2)
    assert told["critic/explained_variance"] > 0.5 and "critic/sum_loss" not in told
    assert torch.equal(parameters(critic.model), before) and critic.n_updates == 30
    assert any(
        x
        for c in compute_advantages(Progress(contributions="critic"), groups, seen.values)
        for x in flat(c.advantages_GNT)
    )
    goes_on = critic_of(policy(), awake=False, warmup_steps=0, frozen=False)
    goes_on.learn(goes_on.predict(groups), [], np.random.default_rng(0), 7)
    assert goes_on.n_updates == 1


def flat(tokens: Any) -> list[float]:
    return [x for rows in tokens for row in rows for x in row]


@pytest.mark.parametrize("keys", [{}, {"lora": Lora(rank=2)}, {"backbone": "policy"}], ids=["own", "lora", "policy"])
def test_the_policy_is_none_of_its_business(groups: list[ScoredGroup], keys: dict[str, Any]) -> None:
    made = policy()
    before = parameters(made.model)
    critic = critic_of(made, **keys)
    critic.learn(critic.predict(groups), [], np.random.default_rng(0), 0)
    assert torch.equal(parameters(made.model), before) and critic.n_updates == 1


def test_a_step_without_tokens_teaches_nothing() -> None:
    critic = critic_of(policy())
    made = [group(trajectory(generation([0], [])))]
    seen = critic.predict(made)
    assert seen.values[0].actions_GNT == (((),),) and not seen.episodes
    logged = critic.learn(seen, [], np.random.default_rng(0), 0)
    assert logged["critic/n_updates"] == 0.0 and "critic/value_mean" not in logged


def test_keys_without_effect_are_refused() -> None:
    with pytest.raises(ValueError, match="there are none"):
        Contributions(warmup_steps=0)
    assert replace(Contributions(), warmup_steps=0, frozen=False).frozen is False


def test_a_stopped_run_equals_one_that_was_not(tmp_path: Path) -> None:
    # Adapters drop out at random, in the critic's updates too.
    critic = {"kind": "contributions", "warmup_steps": 2, "batch_size": 5, "lora": LORA,
              "optimizer": {"lr": 1.0e-2, "schedule": "linear"}}  # fmt: skip
    improve = {**POLICY_GRADIENT, "advantage": {"kind": "progress", "contributions": "critic"}, "critic": critic}
    path = runs.write(
        tmp_path, [SUPERVISED, improve], policy=runs.BASE["policy"] | {"hidden_size": 16},
        evaluation={"n_tasks": 6, "validation_n_tasks": 4},
        rewards={"words": {"kind": "environment"}, "short": SHORT},
    )  # fmt: skip
    runs.run(path, tmp_path / "whole")
    assert run_with_interruptions(path, tmp_path / "stopped", [17, 31]) >= 1
    assert_equal(tmp_path / "stopped", tmp_path / "whole")
    # 12 trajectories in each of two steps, 5 at a time; then it is frozen.
    assert runs.curve(tmp_path / "whole", "critic/n_updates") == [3.0, 6.0, 6.0, 6.0, 6.0]
    assert runs.curve(tmp_path / "whole", "optimizer/n_updates")[:2] == [0.0, 0.0]
