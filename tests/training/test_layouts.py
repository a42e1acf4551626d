"""On a real Qwen3 and trajectories of the real engine: both layouts give the gradient of the definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from agents.chat import ChatAgent
from agents.memory.window import Window
from rlhf.batching.pack import pack_minibatches
from rlhf.batching.samples import make_samples
from rlhf.credit.gigpo import GiGPO
from rlhf.credit.grpo import GRPO
from rlhf.data import Credit, Generation, ScoredGroup, Trajectory
from rlhf.losses.ppo_clip import PPOClip
from rlhf.losses.reduction import Reduction
from rlhf.losses.reinforce import Reinforce
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.policy.model import Policy
from tests.training.tiny import collect, credit, gradient, policy

C = 50
REDUCTIONS = [
    Reduction(kind="token_mean"),
    Reduction(kind="seq_mean_token_mean"),
    Reduction(kind="seq_mean_token_sum"),
    Reduction(kind="seq_mean_token_sum_norm", max_tokens=C),
    Reduction(kind="per_trajectory_mean"),
]
#: Everything is kept, or only the opening and the last reply: then each generation has a prompt of its own.
AGENTS = {"grows": ChatAgent(system=""), "is rewritten": ChatAgent(system="", memory=Window(turns=0))}


@pytest.fixture(scope="module", params=AGENTS)
def groups(request: pytest.FixtureRequest) -> tuple[str, list[ScoredGroup]]:
    made = collect(policy(), agent=AGENTS[request.param], n_tasks=2, group_size=3)
    trajectories = [t for group in made for t in group.trajectories]
    assert len(trajectories) == 6 and len({len(t.turns) for t in trajectories}) > 1, "of different lengths"
    assert max(len(t.turns) for t in trajectories) >= 3
    return request.param, made


def exact() -> Policy:
    """The same policy in float64, so that what differs is the method and not the rounding."""
    made = policy()
    made.model.double()
    return made


def by_layout(groups: list[ScoredGroup], credits: list[Credit], layout: Any, reduction: Reduction, loss: Any) -> Any:
    """Gradient of one update, and the number of rows it was made from."""
    samples, counters = make_samples(groups, credits, layout)
    [batches] = pack_minibatches(samples, 1, reduction, 300)
    made = exact()
    TorchTrainer(made, AdamW(max_grad_norm=None), 1).update(batches, loss)
    return gradient(made.model), counters


def by_definition(groups: list[ScoredGroup], credits: list[Credit], reduction: Reduction) -> torch.Tensor:
    """Gradient of Σ w · (−A log π): one plain forward pass for each generation, no rows, masks or packing."""
    made = exact()
    pairs = [
        p for g, c in zip(groups, credits, strict=True) for p in zip(g.trajectories, c.advantages_GNT, strict=True)
    ]
    total = torch.zeros((), dtype=torch.float64)
    for trajectory, credit_NT in pairs:
        weight = _weight(reduction, trajectory, [t for t, _ in pairs])
        for generation, credit_T in zip(trajectory.generations, credit_NT, strict=True):
            total = total - weight * (torch.tensor(credit_T) * _logprobs(made, generation)).sum()
    total.backward()  # type: ignore[no-untyped-call]
    return gradient(made.model)


def _weight(reduction: Reduction, trajectory: Trajectory, everything: Sequence[Trajectory]) -> float:
    # The table of rlhf.losses.reduction with S trajectories of T tokens each.
    n, n_tokens = len(everything), trajectory.n_tokens
    return {
        "token_mean": 1 / sum(t.n_tokens for t in everything),
        "seq_mean_token_mean": 1 / (n * n_tokens),
        "seq_mean_token_sum": 1 / n,
        "seq_mean_token_sum_norm": 1 / (n * C),
        "per_trajectory_mean": 1 / (n * n_tokens),
    }[reduction.kind]


def _logprobs(made: Policy, generation: Generation) -> torch.Tensor:
    ids = torch.tensor([generation.full_ids])
    begin = len(generation.prompt.token_ids)
    logits = made.model(ids, use_cache=False).logits[0, begin - 1 : -1]
    found: torch.Tensor = logits.log_softmax(-1).gather(1, ids[0, begin:, None])[:, 0]
    return found


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda r: r.kind)
@pytest.mark.parametrize("estimator", [GRPO(), GiGPO()], ids=["grpo", "gigpo"])
def test_both_layouts_give_the_gradient_of_the_definition(
    groups: tuple[str, list[ScoredGroup]], estimator: Any, reduction: Reduction
) -> None:
    context, made = groups
    credits = credit(made, estimator)
    expected = by_definition(made, credits, reduction)
    folded, n_folded = by_layout(made, credits, "trajectory", reduction, Reinforce())
    unfolded, n_unfolded = by_layout(made, credits, "generation", reduction, Reinforce())
    torch.testing.assert_close(folded, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(unfolded, expected, atol=1e-6, rtol=1e-5)
    assert expected.abs().max() > 1e-3
    # Where the context only grows, a trajectory is one row; where it is rewritten, a generation is, and it is counted.
    n_trajectories, n_generations = 6, sum(len(t.generations) for g in made for t in g.trajectories)
    assert n_unfolded["batch/n_samples"] == n_generations
    assert n_folded["batch/n_samples"] == (n_trajectories if context == "grows" else n_generations)
    n_rewritten = 0 if context == "grows" else n_generations - n_trajectories
    assert n_folded["batch/n_rewritten_prompts"] == n_rewritten


@pytest.mark.parametrize("estimator", [GRPO(), GiGPO()], ids=["grpo", "gigpo"])
def test_at_ratio_one_the_clipped_loss_gives_the_plain_gradient(
    groups: tuple[str, list[ScoredGroup]], estimator: Any
) -> None:
    # The ratio is that of the trainer's log-probs to the engine's, which differ in the sixth digit.
    _, made = groups
    credits = credit(made, estimator)
    expected = by_definition(made, credits, Reduction())
    for layout in ("trajectory", "generation"):
        found, _ = by_layout(made, credits, layout, Reduction(), PPOClip())
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_counting_rows_depends_on_the_layout(groups: tuple[str, list[ScoredGroup]]) -> None:
    context, made = groups
    credits = credit(made, GRPO())
    per_row = Reduction(kind="seq_mean_token_mean", per="row")
    folded, unfolded = (by_layout(made, credits, x, per_row, Reinforce())[0] for x in ("trajectory", "generation"))
    assert torch.allclose(folded, unfolded, atol=1e-6) == (context == "is rewritten")
