"""The critic that is told the answer: its loss, its gradient, what it reads, what it learns, and when."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.credit.contrib.sweet import SWEET
from rlhf.data import ScoredGroup, Task
from rlhf.errors import TrainingError
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.contrib.critics.sweet import SweetCritic, SweetTrainer, pair_loss
from rlhf.training.policy.model import Lora, Policy
from rlhf.training.stages.policy_gradient import PolicyGradient
from tests.batching.batch_parts import generation, group, trajectory
from tests.test_resume import LORA, POLICY_GRADIENT, SHORT, SUPERVISED, assert_equal, run_with_interruptions
from tests.training import runs
from tests.training.critics import AGENTS, assert_same_gradients
from tests.training.tiny import Echoes, collect, parameters, policy

TASKS = [Task(f"echoes/{i}", seed=i, reference=f"the answer {i}") for i in range(8)]


def critic_of(made: Policy, *, moved: bool = True, **settings: Any) -> SweetTrainer:
    """A critic that makes one update of everything; `moved`, it has left what it began as."""
    keys = {"batch_size": 1000, "epochs": 1, "optimizer": AdamW(lr=1e-2, max_grad_norm=None), **settings}
    stage = PolicyGradient(advantage=SWEET(), max_tokens_per_microbatch=300)
    critic = SweetCritic(**keys).start(stage, made, None, 0)
    critic.set_references(TASKS)
    if moved:
        generator = torch.Generator().manual_seed(1)
        for _, parameter in critic.model.kept():
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) / 10)
    return critic


@pytest.fixture(scope="module", params=AGENTS)
def groups(request: pytest.FixtureRequest) -> list[ScoredGroup]:
    return collect(policy(), environment=Echoes(n_turns=4), agent=AGENTS[request.param], n_tasks=3, group_size=3)


# Log-ratios of the better attempt (.1, .1), (.2) and of the worse (−.1, −.2), (−.3), β = .1. By turns: .1 + .2 = .3 and
# −.15 − .3 = −.45, so −log σ(.1 · .75) = .656350. By tokens: .4 / 3 and −.6 / 3, so −log σ(.1 / 3) = .676619.
@pytest.mark.parametrize(
    ("scores", "loss"), [((0.3, -0.45), 0.656350), ((0.4 / 3, -0.2), 0.676619)], ids=["turns", "tokens"]
)
def test_worked_example_of_the_loss(scores: tuple[float, float], loss: float) -> None:
    assert pair_loss(torch.tensor(scores), [1.0, 0.0], 0.1).item() == pytest.approx(loss, abs=1e-6)


def test_attempts_that_earned_as_much_are_no_pair() -> None:
    # Of (1, 0, 1) there are two pairs, the first and the third against the second: differences .5 and −1.
    found = pair_loss(torch.tensor([0.3, -0.2, -1.2]), [1.0, 0.0, 1.0], 1.0)
    assert found.item() == pytest.approx((math.log1p(math.exp(-0.5)) + math.log1p(math.exp(1.0))) / 2)


@pytest.mark.parametrize("over", ["turns", "tokens"])
def test_scores_of_the_worked_example(over: str) -> None:
    critic = critic_of(policy(), moved=False, over=over)
    made = group(trajectory(generation([0], [5, 6]), generation([0, 5, 6, 1], [7]), task_id="echoes/0"))
    [attempt] = critic._attempts([made])
    assert attempt is not None and attempt.tokens_K.tolist() == [2, 1]
    found = critic._score(torch.tensor([0.1, 0.1, 0.2, -0.1, -0.2, -0.3]), [attempt, attempt])
    assert found.tolist() == pytest.approx([0.3, -0.45] if over == "turns" else [0.4 / 3, -0.2])


def ratios(critic: SweetTrainer, live: Any, frozen: Any, told: str, g: Any) -> torch.Tensor:
    """Log-ratios of a generation's tokens: plain forward passes of one row each, what is told first."""
    before = [*critic._tokenizer.encode(told, add_special_tokens=False), *g.full_ids]
    ids, n = torch.tensor([before]), len(g.token_ids)
    both = [m(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1) for m in (live, frozen)]
    now, begun = (x[-n - 1 : -1].gather(-1, ids[0, -n:, None])[:, 0] for x in both)
    return now - begun.detach()


def test_gradient_and_advantages_are_those_of_the_definition(groups: list[ScoredGroup]) -> None:
    critic = critic_of(policy())
    plain, frozen = copy.deepcopy(critic), policy().model
    seen, losses = critic.predict(groups), []
    for made, values in zip(groups, seen.values, strict=True):
        values.check(made)
        told = f"Known in hindsight: the answer {made.task_id[-1]}\n\n"
        scores = []
        for t, actions_NT in zip(made.trajectories, values.actions_GNT or (), strict=True):
            own = [ratios(plain, plain.model.live, frozen, told, g).mean() for g in t.generations]
            for advantage, row in zip(own, actions_NT, strict=True):
                assert len(set(row)) == 1 and row[0] == pytest.approx(advantage.item(), abs=2e-4)
            scores.append(torch.stack(own).sum())
        earned = [score.total for score in made.scores]
        pairs = [
            (a, b) for a, x in zip(scores, earned, strict=True) for b, y in zip(scores, earned, strict=True) if x > y
        ]
        if pairs:
            losses.append(torch.stack([torch.log1p(torch.exp(-0.1 * (a - b))) for a, b in pairs]).mean())
    assert len(losses) == len(seen.attempts) > 1
    loss = torch.stack(losses).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    logged = critic.learn(seen, [], np.random.default_rng(0), 0)
    assert logged["critic/pair_loss"] == pytest.approx(loss.item(), rel=1e-4) and logged["critic/n_updates"] == 1.0
    assert_same_gradients(critic, plain)


@pytest.mark.parametrize("keys", [{}, {"lora": Lora(rank=2)}], ids=["full", "lora"])
def test_it_learns_which_attempts_were_better_and_leaves_the_policy_alone(
    groups: list[ScoredGroup], keys: dict[str, Any]
) -> None:
    made = policy()
    before = parameters(made.model)
    critic = critic_of(made, moved=False, beta=1.0, epochs=12, **keys)
    first = critic.predict(groups)
    assert {x for v in first.values for row in v.actions_GNT or () for turn in row for x in turn} == {0.0}
    logged = critic.learn(first, [], np.random.default_rng(0), 0)
    assert logged["critic/pair_accuracy"] == 0.5 and logged["critic/n_pairs"] > 3
    again = critic.predict(groups)
    assert again.figures["critic/pair_accuracy"] > 0.9
    assert torch.equal(parameters(made.model), before)


def test_frozen_it_learns_in_its_warm_up_and_then_stays(groups: list[ScoredGroup]) -> None:
    critic = critic_of(policy(), frozen=True, warmup_steps=1)
    critic.learn(critic.predict(groups), [], np.random.default_rng(0), 0)
    before = parameters(critic.model)
    told = critic.learn(critic.predict(groups), [], np.random.default_rng(0), 1)
    assert "critic/pair_loss" not in told and torch.equal(parameters(critic.model), before) and critic.n_updates == 1


def test_what_it_is_told_changes_what_it_says(groups: list[ScoredGroup]) -> None:
    critics = [critic_of(policy(), privileged_text=told) for told in ("", "{reference} ")]
    one, other = (critic.predict(groups).values[0].actions_GNT for critic in critics)
    assert one != other
    # A task that begins in the middle of one of the split is told of the whole of it.
    assert critics[1]._prefix("echoes/3@2").tolist() == critics[1]._prefix("echoes/3").tolist() != []


def test_tasks_that_it_could_not_be_told_of_are_refused() -> None:
    critic = critic_of(policy())
    with pytest.raises(TrainingError, match="some tasks have none") as caught:
        critic.set_references([Task("a", reference="x"), Task("b")])
    assert caught.value.where == "critic.privileged_text" and "such as b" in str(caught.value.got)
    with pytest.raises(TrainingError, match="not in the stage's split"):
        critic.predict([group(trajectory(generation([0], [5]), task_id="elsewhere/1"))])
    critic_of(policy(), privileged_text="").set_references([Task("b")])


def test_a_step_without_pairs_or_tokens_teaches_nothing() -> None:
    critic = critic_of(policy())
    seen = critic.predict([group(trajectory(generation([0], []), task_id="echoes/0"))])
    assert seen.values[0].actions_GNT == (((),),) and not seen.attempts
    logged = critic.learn(seen, [], np.random.default_rng(0), 0)
    assert logged["critic/n_updates"] == logged["critic/n_pairs"] == 0.0 and "critic/pair_accuracy" not in logged


def test_keys_without_effect_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lacks \{reference\}"):
        SweetCritic(privileged_text="Think hard.")
    with pytest.raises(ValueError, match="there are none"):
        SweetCritic(frozen=True, warmup_steps=0)


def test_a_stopped_run_equals_one_that_was_not(tmp_path: Path) -> None:
    # Adapters drop out at random, in the critic's updates too.
    critic = {"kind": "sweet", "warmup_steps": 2, "epochs": 3, "lora": LORA,
              "optimizer": {"lr": 1.0e-2, "schedule": "linear"}}  # fmt: skip
    improve = {**POLICY_GRADIENT, "advantage": {"kind": "sweet"}, "critic": critic}
    path = runs.write(
        tmp_path, [SUPERVISED, improve], policy=runs.BASE["policy"] | {"hidden_size": 16},
        evaluation={"n_tasks": 6, "validation_n_tasks": 4},
        rewards={"words": {"kind": "environment"}, "short": SHORT},
    )  # fmt: skip
    runs.run(path, tmp_path / "whole")
    assert run_with_interruptions(path, tmp_path / "stopped", [17, 31]) >= 1
    assert_equal(tmp_path / "stopped", tmp_path / "whole")
    assert runs.curve(tmp_path / "whole", "optimizer/n_updates")[:2] == [0.0, 0.0]
    assert runs.curve(tmp_path / "whole", "critic/n_updates")[-1] >= 4.0
