"""Filters: what is left out, what stays, and the counters."""

from __future__ import annotations

from batch_parts import constant_credit, generation, group, trajectory

from rlhf.batching.filters import Filters
from rlhf.batching.pack import pack_minibatches
from rlhf.batching.samples import make_samples
from rlhf.data import Outcome
from rlhf.losses.reduction import Reduction

LIMITS = (Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT)


def step(*advantages_and_outcomes):
    """One group per argument, a list of (advantage, outcome) pairs; two rows per trajectory."""
    groups, credits = [], []
    for rows in advantages_and_outcomes:
        made = group(*(trajectory(generation([1], [2]), generation([3], [4]), outcome=o) for _, o in rows))
        groups.append(made)
        credits.append(constant_credit(made, [a for a, _ in rows]))
    return make_samples(groups, credits)[0], groups


SAMPLES, GROUPS = step(
    [(0.0, Outcome.SOLVED), (0.0, Outcome.SOLVED)],
    [(1.0, Outcome.SOLVED), (0.0, Outcome.TURN_LIMIT), (-1.0, Outcome.TOKEN_LIMIT)],
)


def kept(filters):
    samples, counters = filters(SAMPLES, GROUPS)
    assert counters["batch/n_samples"] == len(samples)
    assert counters["batch/n_policy_tokens"] == sum(s.n_policy_tokens for s in samples)
    return [s.sequence for s in samples], counters


def test_by_default_groups_without_any_advantage_go():
    sequences, counters = kept(Filters())
    assert sequences == [2, 2, 3, 3, 4, 4]  # the trajectory with advantage 0 stays: its group has a signal
    assert counters["batch/n_dropped_groups"] == 1
    assert counters["batch/n_dropped_trajectories"] == 0


def test_truncated_trajectories_go_if_asked():
    sequences, counters = kept(Filters(drop_zero_advantage=False, drop_truncated=True))
    assert sequences == [0, 0, 1, 1, 2, 2]
    assert counters["batch/n_dropped_groups"] == 0
    assert counters["batch/n_dropped_trajectories"] == 2


def test_advantages_far_from_the_others_go_if_asked():
    # Mean .166667; the last lies 3.295304 population deviations above it, the others at most .48 below.
    advantages = [0.1, -0.1, 0.05, -0.05, 0.0, 0.1, -0.1, 0.02, -0.02, 0.03, -0.03, 2.0]
    samples, groups = step([(a, Outcome.SOLVED) for a in advantages])
    for max_z, n_left in ((3.2, 11), (3.3, 12), (None, 12)):
        left, counters = Filters(max_advantage_z=max_z)(samples, groups)
        assert [s.sequence for s in left] == [i for i in range(n_left) for _ in "ab"]
        assert counters["batch/n_outliers"] == 12 - n_left
    # Equal advantages have no deviation: nobody is far.
    samples, groups = step([(1.0, Outcome.SOLVED)] * 3)
    assert len(Filters(max_advantage_z=0.5)(samples, groups)[0]) == 6
    assert Filters(max_advantage_z=0.5)([], [])[0] == []


def test_without_filters_everything_stays():
    sequences, counters = kept(Filters(drop_zero_advantage=False))
    assert sequences == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert not counters["batch/n_dropped_groups"]


def test_a_step_can_be_left_with_nothing():
    samples, groups = step([(0.0, Outcome.FAILED)])
    left, counters = Filters()(samples, groups)
    assert left == [] and counters["batch/n_dropped_groups"] == 1
    assert list(pack_minibatches(left, 2, Reduction(), 100)) == []
    assert Filters()([], []) == ([], dict.fromkeys(counters, 0.0))
