"""Real episodes of an actor with a critic: the trainer finds the log-probs sampled, whichever role is trained."""

from __future__ import annotations

from typing import Any

import pytest

from agents.chat import ChatAgent
from agents.contrib.critic import ACTOR, CRITIC, REVISE, ActorCritic
from rlhf.batching.samples import make_samples
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.torch import TorchTrainer
from tests.training.tiny import Echoes, collect, ones, policy


class Returning(ActorCritic):
    """Takes whatever the critic says for a comment: a policy that knows no words never says the right one."""

    async def _review(self, *given: Any) -> Any:
        verdict, comment, generation = await super()._review(*given)
        sends_back = sum(generation.token_ids) % 2
        return (REVISE, comment or "omega", generation) if sends_back else (verdict, comment, generation)


@pytest.mark.parametrize("layout", ["trajectory", "generation"])
@pytest.mark.parametrize("roles", [None, (ACTOR,), (CRITIC,)], ids=str)
def test_log_probs_of_actor_and_critic_are_those_sampled(roles: Any, layout: Any) -> None:
    agent = Returning(critic_system="", ask="?", actor=ChatAgent(system=""))
    made = policy(max_context=1024)
    groups = collect(made, environment=Echoes(n_turns=4), agent=agent, n_tasks=8, group_size=2)
    calls = [g for group in groups for t in group.trajectories for g in t.generations]
    reviews = [turn.action.notes.get("review", "") for g in groups for t in g.trajectories for turn in t.turns]
    assert any("revise" in said for said in reviews) and any("unread" in said for said in reviews)
    # Each call has a prompt of its own, and a revision's begins with the proposal that came back.
    assert len({g.prompt.token_ids for g in calls if g.role == ACTOR}) > len(groups)
    samples, _ = make_samples(groups, ones(groups), layout, roles)
    found = TorchTrainer(made, AdamW(), 1).compute_logprobs(samples, temperature=1.0, max_tokens=300)
    pairs = [(s.sampler_logprobs[s.mask], row) for s, row in zip(samples, found, strict=True)]
    assert max(float(abs(sampled - row).max()) for sampled, row in pairs) < 1e-4
    trained = [g for g in calls if g.role in (roles or (ACTOR, CRITIC))]
    assert sum(len(row) for _, row in pairs) == sum(len(g.token_ids) for g in trained)
