"""Observations are read and never learnt: poisoned ones leave no trace as something to say.

The poison is a word that is in every observation of the environment and in nothing that the policy samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.batching.pack import PackedBatch, pack_minibatches
from rlhf.batching.samples import Sample, make_samples
from rlhf.data import ScoredGroup
from rlhf.inference.embedded.attention import packed_forward
from rlhf.losses.reduction import Reduction
from rlhf.losses.reinforce import Reinforce
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.policy.model import Policy
from tests.training.tiny import collect, ones, policy


@dataclass(frozen=True)
class Case:
    """Trajectories with poisoned observations, every sampled token of advantage 1: all of them are reinforced."""

    groups: list[ScoredGroup]
    samples: list[Sample]
    poison: int

    @property
    def batch(self) -> PackedBatch:
        [[batch]] = pack_minibatches(self.samples, 1, Reduction(), 100_000)
        return batch


def untied() -> Policy:
    """A policy whose output layer is its own, so that saying a token and reading it are different parameters."""
    made = policy()
    head = made.model.lm_head
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    made.model.config.tie_word_embeddings = False
    return made


@pytest.fixture(scope="module")
def case() -> Case:
    made = untied()
    groups = collect(made, n_tasks=3, group_size=3)
    samples, _ = make_samples(groups, ones(groups), "trajectory")
    sampled = np.concatenate([s.token_ids[s.mask] for s in samples])
    [poison] = [word for word in made.tokenizer.encode(" poison waits") if word not in sampled][:1]
    assert all((s.token_ids == poison).any() for s in samples)
    assert len(samples) == sum(len(g.trajectories) for g in groups), "one row for each trajectory"
    return Case(groups, samples, poison)


def wrong(samples: list[Sample]) -> list[Sample]:
    """The mistake that all this is about: everything is taken for sampled."""
    everything = [np.arange(len(s)) > 0 for s in samples]
    return [replace(s, mask=m, advantages=m.astype(np.float32)) for s, m in zip(samples, everything, strict=True)]


def observed(case: Case) -> list[tuple[int, int]]:
    """(row, position) of every poison token."""
    return [(r, int(i)) for r, s in enumerate(case.samples) for i in np.flatnonzero(s.token_ids == case.poison)]


class Head:
    """What goes into the output layer and comes out of it in one update, with the gradient of what comes out."""

    def __init__(self, made: Policy) -> None:
        self.hidden, self.output = torch.empty(0), torch.empty(0)
        made.model.lm_head.register_forward_hook(self._note)

    def _note(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        self.hidden, self.output = inputs[0][0], output


def test_only_what_was_sampled_has_logits(case: Case) -> None:
    # The positions come from the records: prompt length and number of sampled ids of each generation.
    made = untied()
    head = Head(made)
    TorchTrainer(made, AdamW(), 1).update([case.batch], Reinforce())
    sampled = [token for g in case.groups for t in g.trajectories for x in t.generations for token in x.token_ids]
    assert case.batch.targets.tolist() == sampled
    assert head.output.shape[1] == len(sampled) < sum(map(len, case.samples))
    assert head.output.grad is not None and (head.output.grad[0].abs().sum(-1) > 0).all()


def test_the_gradient_is_zero_where_an_observation_is_predicted(case: Case) -> None:
    # Logits at every position this time; what the loss takes of them is said by the records and not by the mask.
    made = untied()
    lengths = [len(s) for s in case.samples]
    logits = packed_forward(made.model, torch.cat([torch.tensor(s.token_ids) for s in case.samples]), lengths)
    logits.retain_grad()
    starts = np.cumsum([0, *lengths])
    predicts = torch.zeros(len(logits), dtype=torch.bool)
    loss = torch.zeros(())
    trajectories = [t for g in case.groups for t in g.trajectories]
    for begin, trajectory in zip(starts, trajectories, strict=False):
        for generation in trajectory.generations:
            first = int(begin) + len(generation.prompt.token_ids) - 1
            span = slice(first, first + len(generation.token_ids))
            predicts[span] = True
            log_p = logits[span].log_softmax(-1)
            loss = loss - log_p.gather(1, torch.tensor(generation.token_ids)[:, None]).sum()
    (loss / sum(t.n_tokens for t in trajectories)).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert torch.equal(logits.grad.abs().sum(-1) > 0, predicts)
    assert not any(predicts[starts[row] + i - 1] for row, i in observed(case))
    by_records = {name: p.grad.clone() for name, p in made.model.named_parameters() if p.grad is not None}
    trained = untied()
    TorchTrainer(trained, AdamW(max_grad_norm=None), 1).update([case.batch], Reinforce())
    for name, parameter in trained.model.named_parameters():
        torch.testing.assert_close(parameter.grad, by_records[name], atol=1e-5, rtol=1e-4)


def test_a_poisoned_token_is_only_ever_pushed_down(case: Case) -> None:
    # ∂/∂W_v of Σ w A (−log softmax(W h))_y is Σ w A (p_v − [v = y]) h. For a token that is never sampled the second
    # part is absent: its row of the output layer moves against the contexts in which other tokens were reinforced.
    made = untied()
    head, before = Head(made), made.model.lm_head.weight.detach().clone()
    TorchTrainer(made, AdamW(max_grad_norm=None), 1).update([case.batch], Reinforce())
    p = (head.hidden.detach() @ before.T).softmax(-1)[:, case.poison]  # [N]
    expected = (case.batch.weights * case.batch.advantages * p) @ head.hidden.detach()
    found = made.model.lm_head.weight.grad[case.poison]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    # With the mistake, the same row is pulled towards the contexts of the observations.
    spoilt = untied()
    [[batch]] = pack_minibatches(wrong(case.samples), 1, Reduction(), 100_000)
    TorchTrainer(spoilt, AdamW(max_grad_norm=None), 1).update([batch], Reinforce())
    assert (spoilt.model.lm_head.weight.grad[case.poison] - found).norm() > 10 * found.norm()


def poison_logprob(made: Policy, case: Case) -> float:
    """Mean log-prob of the poison where it was observed, in nats."""
    with torch.no_grad():
        rows = [packed_forward(made.model, torch.tensor(s.token_ids), [len(s)]).log_softmax(-1) for s in case.samples]
    return float(torch.stack([rows[row][i - 1, case.poison] for row, i in observed(case)]).mean())


def test_many_updates_do_not_teach_the_poison(case: Case) -> None:
    def after_training(samples: list[Sample]) -> float:
        made = untied()
        begin = poison_logprob(made, case)
        trainer = TorchTrainer(made, AdamW(lr=3e-3), 40)
        [batches] = pack_minibatches(samples, 1, Reduction(), 100_000)
        for _ in range(40):
            trainer.update(batches, Reinforce())
        return poison_logprob(made, case) - begin

    assert after_training(case.samples) < 0.5
    assert after_training(wrong(case.samples)) > 3, "this test can fail"
