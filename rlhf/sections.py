"""Recipe sections: default kinds, required members of a part, and the types of sections."""

from __future__ import annotations

from collections.abc import Mapping

#: What is used where a recipe gives a section but no kind, or leaves the section out.
DEFAULT_KIND: Mapping[str, str] = {"agent": "chat", "engine": "transformers", "trainer": "torch", "critic": "values"}

#: Members that a part of each section must have; the contracts say what they do.
REQUIRED_MEMBERS: Mapping[str, tuple[str, ...]] = {
    "environment": ("tasks", "start"),
    "agent": ("act",),
    "memory": ("recall",),
    "store": ("recollect", "learn"),
    "extractor": ("__call__", "replaces"),
    "reward": ("__call__",),
    "advantage": ("__call__", "needs_values", "min_group"),
    "critic": ("start",),
    "loss": ("__call__",),
    "correction": ("__call__",),
    "trainer": ("start",),
    "rollout": ("n_rounds", "n_from_start", "branches"),
    "strategy": ("choose", "rollout"),
    "sampler": ("start",),
    "selection": ("__call__",),
    "tracker": ("begin", "end"),
}

#: A field with one of these types is a section of its own: its value has a kind.
SECTION_OF_TYPE: Mapping[str, str] = {
    "environments.base:Environment": "environment",
    "agents.base:Agent": "agent",
    "agents.memory.base:Memory": "memory",
    "agents.stores.kind:StoreKind": "store",
    "agents.stores.contrib.facts:Extractor": "extractor",
    "rewards.base:Reward": "reward",
    "rewards.base:GroupReward": "reward",
    "rlhf.credit.estimator:AdvantageEstimator": "advantage",
    "rlhf.training.critics.settings:CriticKind": "critic",
    "rlhf.losses.policy_loss:PolicyLoss": "loss",
    "rlhf.losses.importance_correction:Correction": "correction",
    "rlhf.training.backends.settings:TrainerKind": "trainer",
    "rlhf.rollout.group_structure:GroupStructure": "rollout",
    "rlhf.rollout.contrib.strategies:Strategy": "strategy",
    "rlhf.tasks.sampler:TaskSampler": "sampler",
    "rlhf.tasks.selection:GroupSelection": "selection",
    "rlhf.training.trackers:Tracker": "tracker",
}
