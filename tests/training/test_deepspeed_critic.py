"""A critic beside real DeepSpeed in two processes: policy and critic learn as in one process with plain torch."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.batching.pack import pack_minibatches
from rlhf.batching.samples import make_samples
from rlhf.credit.estimator import compute_advantages
from rlhf.credit.gae import GAE
from rlhf.losses.ppo_clip import PPOClip
from rlhf.processes import current
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.replicated import add_gradients
from rlhf.training.backends.settings import DeepSpeed, Torch
from rlhf.training.critics.values import Critic
from rlhf.training.policy.model import Lora
from rlhf.training.stages.policy_gradient import PolicyGradient
from tests.training.alike import assert_alike
from tests.training.tiny import Echoes, collect, parameters, policy
from tests.training.together import together

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

#: Steps of two updates each.
N_STEPS = 10
#: An ε this large makes the step of Adam a smooth function of the gradient, so that rounding stays rounding.
SMOOTH = AdamW(lr=0.02, eps=1e-2, max_grad_norm=0.5)

#: Critic, and the trainer that the policy has beside it.
CASES = {
    "own beside zero 1": (Critic(), DeepSpeed(zero_stage=1)),
    "own beside zero 3": (Critic(), DeepSpeed(zero_stage=3, param_persistence_threshold=0)),
    "adapters beside zero 3": (Critic(lora=Lora(rank=2)), DeepSpeed(zero_stage=3, param_persistence_threshold=0)),
    "head of the policy's beside zero 2": (Critic(backbone="policy"), DeepSpeed(zero_stage=2)),
}

Seen = tuple[list[dict[str, float]], torch.Tensor, torch.Tensor]


def train(critic: Critic, kind: Any) -> Seen:
    """Figures of each step, and the weights of critic and policy at the end."""
    made = policy()
    groups = collect(made, environment=Echoes(n_turns=9), n_tasks=4, group_size=2)
    settings = replace(critic, optimizer=SMOOTH)
    stage = PolicyGradient(
        advantage=GAE(), critic=settings, trainer=kind, optimizer=replace(SMOOTH, lr=0.005), minibatches=2,
        steps=N_STEPS, max_tokens_per_microbatch=150,
    )  # fmt: skip
    live: Any = settings.start(stage, made, None, 0)  # before the trainer, which may take the policy to pieces
    trainer = kind.start(made, stage.optimizer, N_STEPS * stage.epochs * stage.minibatches)
    found = []
    for step in range(N_STEPS):
        seen = live.predict(groups)
        samples, _ = make_samples(groups, compute_advantages(stage.advantage, groups, seen.values))
        values: dict[str, float] = {}
        n_least = trainer.n_processes
        for batches in pack_minibatches(samples, 2, stage.reduction, 150, np.random.default_rng(step), n_least=n_least):
            values |= trainer.update(batches, PPOClip())
        values |= live.learn(seen, samples, np.random.default_rng(step), step)
        found.append({name: value for name, value in values.items() if not name.startswith("time/")})
    assert live.n_updates == 2 * N_STEPS
    trainer.close()
    return found, parameters(live.model), parameters(made.model)


def work(rank: int, folder: Path) -> dict[str, Any]:
    return {"sums": _sums(rank)} | {name: train(*case) for name, case in CASES.items()}


def _sums(rank: int) -> list[list[float]]:
    """Gradients of parameters, of the second of which the second process has none, and of the third nobody."""
    first, second, third = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    second.data = second.data.bfloat16()
    second.grad_dtype = torch.float32  # as beside float32 masters
    first.grad = torch.tensor([1.0, 2.0]) * (rank + 1)
    second.grad = torch.tensor([5.0, 7.0]) if rank == 0 else None
    add_gradients([first, second, third], "a test")
    assert current().n == 2
    return [p.grad.tolist() for p in (first, second, third) if p.grad is not None]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return together(work, tmp_path_factory.mktemp("critic"), timeout_s=300.0)


def test_gradients_of_shares_add_up(seen: list[dict[str, Any]]) -> None:
    # (1, 2) and (2, 4); (5, 7) and none; none and none, which stays none.
    assert [found["sums"] for found in seen] == [[[3.0, 6.0], [5.0, 7.0]]] * 2


def test_one_process_keeps_its_gradients() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    add_gradients([parameter], "a test")
    assert parameter.grad is None


@pytest.mark.parametrize("name", CASES)
def test_policy_and_critic_learn_as_in_one_process(seen: list[dict[str, Any]], name: str) -> None:
    curve, critic, policys = train(CASES[name][0], Torch())
    means = [values["critic/value_mean"] for values in curve]
    assert means[0] == 0 and abs(means[-1]) > 0.01, "it learns"
    for found in seen:
        got, its_critic, its_policy = found[name]
        for values, expected in zip(got, curve, strict=True):
            assert_alike(values, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(its_critic, critic, atol=1e-4, rtol=0)
        torch.testing.assert_close(its_policy, policys, atol=1e-4, rtol=0)
    assert torch.equal(seen[0][name][1], seen[1][name][1]), "no process drifts from the other"
