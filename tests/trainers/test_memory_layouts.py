"""Real episodes under every memory: the trainer finds the log-probs that the engine sampled with, in both layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agents.chat import ChatAgent
from rlhf.batching.samples import make_samples
from rlhf.catalog import CATALOG
from rlhf.data import Credit, ScoredGroup
from rlhf.recipe.builder import build_part
from rlhf.trainers.optimizer import AdamW
from rlhf.trainers.trainer import TorchTrainer
from tests.trainers.tiny import Echoes, collect, policy

#: Small bounds, so that within a few turns each memory forgets, asks and rewrites.
KEYS: dict[str, dict[str, Any]] = {
    "window": {"turns": 1},
    "budget": {"max_tokens": 40, "at_a_time": 1},
    "summary": {"every": 1, "keep": 0},
    "subgoals": {"max_turns": 1},
    "managed": {"n_managed": 1, "n_shown": 1, "ask": "op:"},
}


@pytest.mark.parametrize("layout", ["trajectory", "generation"])
@pytest.mark.parametrize("kind", sorted(CATALOG["memory"]))
def test_recomputed_log_probs_are_those_sampled(kind: str, layout: Any) -> None:
    memory = build_part("memory", {"kind": kind, **KEYS.get(kind, {})}, "agent.memory", base=Path.cwd())
    agent = ChatAgent(system="", memory=memory, think="require" if kind == "constant" else "off")
    made = policy(max_context=1024)
    groups = collect(made, environment=Echoes(n_turns=4), agent=agent, n_tasks=8, group_size=2)
    trajectories = [t for g in groups for t in g.trajectories]
    assert max(len(t.turns) for t in trajectories) >= 3
    asks = kind in ("summary", "subgoals", "managed")
    assert any(g.role == "memory" for t in trajectories for g in t.generations) == asks
    credits = [_ones(group) for group in groups]
    samples, counters = make_samples(groups, credits, layout)
    # An environment whose observations have nothing in common is told in differences as it is.
    assert (counters["batch/n_rewritten_prompts"] > 0) == (kind not in ("full", "diff"))
    found = TorchTrainer(made, AdamW(), 1).score(samples, temperature=1.0, max_tokens=300)
    pairs = [(s.sampler_logprobs[s.mask], row) for s, row in zip(samples, found, strict=True)]
    assert max(float(abs(sampled - row).max()) for sampled, row in pairs) < 1e-4
    assert sum(len(row) for _, row in pairs) == sum(t.n_tokens for t in trajectories)


def _ones(group: ScoredGroup) -> Credit:
    return Credit(tuple(tuple((1.0,) * len(g.token_ids) for g in t.generations) for t in group.trajectories))
