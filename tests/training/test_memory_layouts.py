"""Real episodes under every memory and store: the trainer finds the log-probs sampled, in both layouts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.chat import ChatAgent
from agents.memory.window import Window
from agents.stores.kind import ENTRIES, RECALLED, QueriesPolicy
from agents.stores.remembering import Bound, Remembering
from agents.stores.store import Store
from rlhf.batching.samples import make_samples
from rlhf.catalog import CATALOG
from rlhf.data import ScoredGroup
from rlhf.recipe.builder import build_part
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.policy.model import Policy
from tests.agents.spoken import Says
from tests.training.tiny import Echoes, collect, ones, policy

#: Three words after each other.
PAIRS = r"(?P<subject>\w+) (?P<relation>\w+) (?P<object>\w+)"
#: Small bounds, so that within a few turns each memory forgets, asks and rewrites.
KEYS: dict[str, dict[str, Any]] = {
    "window": {"turns": 1},
    "budget": {"max_tokens": 40, "at_a_time": 1},
    "summary": {"every": 1, "keep": 0},
    "subgoals": {"max_turns": 1},
    "managed": {"n_managed": 1, "n_shown": 1, "ask": "op:"},
}
#: `graph` under rules, and asking the policy, which this one cannot answer.
STORES: dict[str, dict[str, Any]] = {
    "graph": {"extractor": {"kind": "pattern", "patterns": [PAIRS]}, "max_tokens": 60},
    "graph asking": {"ask": "facts:", "max_tokens": 60},
    "reflection": {"cite": "cite:"},
}
#: What is said between steps to whoever asks.
SAID = '{"topics": [{"topic": "alpha", "summary": "beta"}], "facts": ["alpha"], "how_to": "beta", "content": "alpha"}'


@contextmanager
def agent_of(section: str, kind: str, folder: Path, made: Policy) -> Iterator[Any]:
    """An agent with a memory, or with a store that holds what an earlier step of the same policy left."""
    values = {"kind": kind.split()[0], **(KEYS if section == "memory" else STORES).get(kind, {})}
    part = build_part(section, values, f"agent.{section}", base=Path.cwd())
    if section == "memory":
        yield ChatAgent(system="", memory=part, think="require" if kind == "constant" else "off")
        return
    agent = Remembering(inner=ChatAgent(system="", memory=Window(turns=1)), store=part)
    with Store(folder / "store.sqlite", split="train") as store, Store(folder / "store.sqlite") as read:
        earlier = collect(made, environment=Echoes(n_turns=4), agent=agent, n_tasks=4, group_size=1)
        groups = [_of_task(group, f"old/{i}") for i, group in enumerate(earlier)]
        with store.transaction():
            if isinstance(part, QueriesPolicy):
                asyncio.run(part.learn_asking(store, groups, "train", Says(SAID)))
            else:
                part.learn(store, groups, "train")
        yield Bound(agent, read)


@pytest.mark.parametrize("layout", ["trajectory", "generation"])
@pytest.mark.parametrize(
    ("section", "kind"),
    [("memory", kind) for kind in sorted(CATALOG["memory"])]
    + [("store", kind) for kind in sorted({*CATALOG["store"], *STORES})],
)
def test_recomputed_log_probs_are_those_sampled(section: str, kind: str, layout: Any, tmp_path: Path) -> None:
    made = policy(max_context=1024)
    with agent_of(section, kind, tmp_path, made) as agent:
        roles = agent.roles if section == "memory" else agent.agent.roles
        groups = collect(made, environment=Echoes(n_turns=4), agent=agent, n_tasks=8, group_size=2)
    trajectories = [t for g in groups for t in g.trajectories]
    assert max(len(t.turns) for t in trajectories) >= 3
    if section == "store" and kind != "graph asking":  # each attempt is shown something of the step before
        assert all(t.turns[0].action.notes[RECALLED] and t.turns[0].action.notes[ENTRIES] for t in trajectories)
    asks = kind in ("summary", "subgoals", "managed", "graph asking")
    assert any(g.role == "memory" for t in trajectories for g in t.generations) == asks == ("memory" in roles)
    credits = ones(groups)
    samples, counters = make_samples(groups, credits, layout)
    # An environment whose observations have nothing in common is told in differences as it is.
    assert (counters["batch/n_rewritten_prompts"] > 0) == (kind not in ("full", "diff"))
    found = TorchTrainer(made, AdamW(), 1).compute_logprobs(samples, temperature=1.0, max_tokens=300)
    pairs = [(s.sampler_logprobs[s.mask], row) for s, row in zip(samples, found, strict=True)]
    assert max(float(abs(sampled - row).max()) for sampled, row in pairs) < 1e-4
    assert sum(len(row) for _, row in pairs) == sum(t.n_tokens for t in trajectories)


def _of_task(group: ScoredGroup, task: str) -> ScoredGroup:
    made = tuple(replace(t, task_id=task) for t in group.trajectories)
    return replace(group, task_id=task, trajectories=made)
