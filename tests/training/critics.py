"""Attempts, recipes and comparisons that the tests of several critics share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from agents.chat import ChatAgent
from agents.memory.window import Window
from rlhf.data import Outcome, ScoredGroup
from tests.test_resume import POLICY_GRADIENT, SHORT, SUPERVISED
from tests.training import runs
from tests.training.tiny import Echoes, collect, policy

#: Everything is kept, or only the opening and the last reply: then each generation has a prompt of its own.
AGENTS = {"grows": ChatAgent(system=""), "is rewritten": ChatAgent(system="", memory=Window(turns=0))}


def ended_and_cut(agent: str) -> list[ScoredGroup]:
    """Trajectories of up to four turns; some end by themselves, some are cut."""
    made = collect(policy(), environment=Echoes(n_turns=9), agent=AGENTS[agent], n_tasks=4, group_size=2)
    outcomes = {t.outcome for g in made for t in g.trajectories}
    assert Outcome.TURN_LIMIT in outcomes and len(outcomes) > 1
    return made


def assert_same_gradients(found: Any, expected: Any, *, atol: float = 2e-5) -> None:
    """Compare the gradients of what two critics train."""
    for (name, a), (_, b) in zip(found.model.kept(), expected.model.kept(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=atol, rtol=1e-3, msg=lambda text, n=name: f"{n}: {text}")


def recipe(
    folder: Path, advantage: str, critic: dict[str, Any], lora: dict[str, Any] | None = None, **stage: Any
) -> Path:
    """Two stages, the second with a critic; a run of a second."""
    model = runs.BASE["policy"] | {"hidden_size": 16} | ({"lora": lora} if lora else {})
    improve = {**POLICY_GRADIENT, "advantage": {"kind": advantage}, "critic": critic, **stage}
    return runs.write(
        folder, [SUPERVISED, improve], policy=model, evaluation={"n_tasks": 6, "validation_n_tasks": 4},
        rewards={"words": {"kind": "environment"}, "short": SHORT},
    )  # fmt: skip


class StepCounter:
    """Counts the steps of an environment."""

    n_steps = 0

    def __call__(self) -> None:
        self.n_steps += 1
