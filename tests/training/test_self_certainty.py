"""Self-certainty: worked numbers, what the trainer computes, and a run whose scores hold it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.inference.embedded.attention import packed_forward
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.contrib.self_certainty import SelfCertainty, SelfCertaintyHook
from tests.training import runs, tiny


def test_worked_numbers() -> None:
    # π = (.7, .2, .1): the mean of log π is −1.422899, the entropy .801819, log 3 = 1.098612.
    log_pi = [math.log(x) for x in (0.7, 0.2, 0.1)]
    entropy = -sum(math.exp(x) * x for x in log_pi)
    assert SelfCertainty().value(sum(log_pi) / 3, 3) == pytest.approx(0.324287, abs=1e-6)
    assert SelfCertainty(direction="policy").value(entropy, 3) == pytest.approx(0.296794, abs=1e-6)
    assert SelfCertainty().value(-math.log(3), 3) == SelfCertainty(direction="policy").value(math.log(3), 3) == 0


@pytest.mark.parametrize("of", ["uniform", "policy"])
def test_it_is_the_mean_over_the_sampled_tokens(of: Any) -> None:
    policy = tiny.policy()
    groups = tiny.collect(policy, n_tasks=2, group_size=2)
    settings = SelfCertainty(direction=of)
    found = SelfCertaintyHook(settings).means(TorchTrainer(policy, AdamW(), 1), groups, 1.0, 64)
    expected = []
    for t in (t for g in groups for t in g.trajectories):
        each = []
        for g in t.generations:
            ids = torch.tensor(g.full_ids)
            places = torch.arange(g.prompt.n_tokens - 1, len(ids) - 1)
            log_pi = packed_forward(policy.model, ids, [len(ids)], places).log_softmax(-1).double()
            uniform = torch.full_like(log_pi, -math.log(log_pi.shape[-1]))
            gap = (uniform - log_pi) if of == "uniform" else (log_pi - uniform)
            each += ((uniform if of == "uniform" else log_pi).exp() * gap).sum(-1).tolist()
        expected.append(sum(each) / len(each))
    assert found == pytest.approx(expected, rel=1e-4)


def test_it_is_part_of_the_score(tmp_path: Path) -> None:
    stage = {
        "kind": "policy_gradient",
        "steps": 1,
        "tasks_per_step": 2,
        "group_size": 2,
        "self_certainty": {"weight": 2.0},
    }
    done = runs.run(runs.write(tmp_path, [stage], evaluation={"n_tasks": 2}), tmp_path / "run")
    from rlhf.evaluation.store import read_trajectories

    records = list(read_trajectories(done.folder / "trajectories", phase="train"))
    for record in records:
        assert record.score is not None
        own = record.score.parts["self_certainty"].value
        assert own > 0 and record.score.total == pytest.approx(record.score.parts["words"].value + 2 * own)
    [mean] = runs.curve(done.folder, "reward/self_certainty")
    assert mean == pytest.approx(sum(r.score.parts["self_certainty"].value for r in records if r.score) / 4)
