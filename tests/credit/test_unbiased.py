"""Is the expected gradient the true one? Every group of a small task is enumerated; nothing is sampled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest

from rlhf.credit.dr_grpo import DrGRPO
from rlhf.credit.estimator import AdvantageEstimator
from rlhf.credit.gigpo import GiGPO
from rlhf.credit.grpo import GRPO
from rlhf.credit.rloo import RLOO
from tests.credit.credit_groups import group, per_turn

#: Trajectories of a task of one or two turns: at the gate, left ends the episode; right leads to the yard, where left
#: or right ends it. States and actions (1 is right); what each earns is set by the test.
PATHS: tuple[tuple[tuple[str, int], ...], ...] = (
    (("gate", 0),),
    (("gate", 1), ("yard", 0)),
    (("gate", 1), ("yard", 1)),
)
CHANCES = {"gate": 0.3, "yard": 0.6}  # of right; the parameters are their logits


def expected_gradient(estimator: AdvantageEstimator, earns: Sequence[float], n: int) -> dict[str, float]:
    """E of the mean over a group of n of Σ_k A_k ∂log π(a_k | s_k), exactly: every group is enumerated.

    ∂log π(a | s) to the logit of s is a − P(right | s).
    """
    total = dict.fromkeys(CHANCES, 0.0)
    for chosen in itertools.product(range(len(PATHS)), repeat=n):
        chance = math.prod(CHANCES[s] if a else 1 - CHANCES[s] for i in chosen for s, a in PATHS[i])
        rewards = [[0.0] * (len(PATHS[i]) - 1) + [earns[i]] for i in chosen]
        credit = per_turn(estimator(group(rewards, [[s for s, _ in PATHS[i]] for i in chosen])))
        for i, advantages in zip(chosen, credit, strict=True):
            for (state, action), advantage in zip(PATHS[i], advantages, strict=True):
                total[state] += chance * advantage * (action - CHANCES[state]) / n
    return total


def true_gradient(earns: Sequence[float]) -> dict[str, float]:
    """∂J for J = (1 − p) r₀ + p ((1 − q) r₁ + q r₂), with ∂p/∂logit = p (1 − p)."""
    p, q = CHANCES["gate"], CHANCES["yard"]
    yard = (1 - q) * earns[1] + q * earns[2]
    return {"gate": p * (1 - p) * (yard - earns[0]), "yard": p * q * (1 - q) * (earns[2] - earns[1])}


def factors(estimator: AdvantageEstimator, earns: Sequence[float], n: int) -> tuple[float, float]:
    """Expected over true gradient, at the gate and in the yard."""
    found, true = expected_gradient(estimator, earns, n), true_gradient(earns)
    return found["gate"] / true["gate"], found["yard"] / true["yard"]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("earns", [(0.0, 0.0, 1.0), (0.4, -0.2, 1.0)])
def test_group_baselines_are_unbiased_over_episodes_of_unequal_length(n: int, earns: tuple[float, ...]) -> None:
    assert factors(RLOO(), earns, n) == pytest.approx((1.0, 1.0))
    # The group mean holds the attempt itself, which shrinks every component by the same (n − 1) / n.
    assert factors(DrGRPO(), earns, n) == pytest.approx(((n - 1) / n,) * 2)
    assert factors(GRPO(normalize_std=False), earns, n) == pytest.approx(((n - 1) / n,) * 2)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_dividing_by_the_deviation_keeps_the_direction_where_scores_are_binary(n: int) -> None:
    gate, yard = factors(GRPO(), (0.0, 0.0, 1.0), n)
    assert gate == pytest.approx(yard) and gate > 0
    gate, yard = factors(GRPO(), (0.4, -0.2, 1.0), n)  # with three different scores it does not
    assert abs(gate - yard) > 0.01 or n == 2


@pytest.mark.parametrize("n", [2, 3, 4])
def test_comparing_states_keeps_the_direction_at_each_state(n: int) -> None:
    earns = (0.4, -0.2, 1.0)
    states_only = expected_gradient(GiGPO(normalize="mean", gamma=1.0), earns, n)
    episodes = expected_gradient(GiGPO(normalize="mean", gamma=1.0, step_weight=0.0), earns, n)
    true = true_gradient(earns)
    # All n attempts pass the gate: factor (n − 1) / n, as for whole episodes. The yard is compared among the m attempts
    # that reach it: E[max(m − 1, 0)] / E[m] for m ~ Binomial(n, p), where E[m] = n p and
    # E[max(m − 1, 0)] = n p − 1 + (1 − p)^n.
    p = CHANCES["gate"]
    expected = {"gate": (n - 1) / n, "yard": (n * p - 1 + (1 - p) ** n) / (n * p)}
    for state in CHANCES:
        assert episodes[state] / true[state] == pytest.approx((n - 1) / n)
        assert (states_only[state] - episodes[state]) / true[state] == pytest.approx(expected[state])


def test_counting_long_trajectories_more_is_biased() -> None:
    # What `statistics: turn` does and the default does not: the baseline then depends on the attempt's own length.
    gate, yard = factors(GiGPO(normalize="mean", step_weight=0.0, statistics="turn"), (0.4, -0.2, 1.0), 3)
    assert abs(gate - yard) > 0.05
