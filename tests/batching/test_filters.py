"""Filters: what is left out, what stays, and the counters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.batching.filters import Filters, high_entropy
from rlhf.batching.pack import pack_minibatches
from rlhf.batching.samples import make_samples
from rlhf.data import Finish, Outcome
from rlhf.losses.reduction import Reduction
from tests.batching.batch_parts import VOCABULARY, constant_credit, generation, group, steps, trajectory

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
    return [s.sequence for s in samples], counters


def test_by_default_groups_without_any_advantage_go():
    sequences, counters = kept(Filters())
    assert sequences == [2, 2, 3, 3, 4, 4]  # the trajectory with advantage 0 stays: its group has a signal
    assert counters["batch/n_dropped_groups"] == 1
    assert counters["batch/n_dropped_trajectories"] == 0


def test_silent_groups_that_stay_make_the_others_pull_less():
    # As many rows in the silent group as in another of two trajectories: counted, they halve the step.
    samples, groups = step([(0.0, Outcome.SOLVED)] * 2, [(1.0, Outcome.SOLVED), (-1.0, Outcome.SOLVED)])
    pulls = []
    for drop in (True, False):
        rows, _ = Filters(drop_zero_advantage=drop)(samples, groups)
        [[batch]] = pack_minibatches(rows, 1, Reduction(), 1000)
        pulls.append(float((batch.weights * batch.advantages.abs()).sum()))
    assert pulls[0] == 2 * pulls[1]


def test_truncated_trajectories_go_if_asked():
    sequences, counters = kept(Filters(drop_zero_advantage=False, drop_truncated=True))
    assert sequences == [0, 0, 1, 1, 2, 2]
    assert counters["batch/n_dropped_groups"] == 0
    assert counters["batch/n_dropped_trajectories"] == 2


def test_a_reply_that_was_cut_makes_a_trajectory_truncated_whatever_its_outcome():
    cut, whole = (replace(generation([3], [4]), finish=finish) for finish in (Finish.LENGTH, Finish.STOP))
    made = group(
        trajectory(whole, cut), trajectory(cut, whole), trajectory(cut, whole, replace(cut, opponent="opponent"))
    )
    samples, _ = make_samples([made], [constant_credit(made, [1.0, -1.0, 0.5])])
    left, counters = Filters(drop_truncated=True)(samples, [made])
    assert {s.sequence for s in left} == {1, 2} and counters["batch/n_dropped_trajectories"] == 1


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


def rows_with_entropy(step_, layout, entropy):
    """Rows of a step whose tokens have the entropy that `entropy` gives to their ids."""
    samples, _ = make_samples(*step_, layout)
    return [replace(s, entropy=np.where(s.mask, entropy[s.token_ids], 0).astype(np.float32)) for s in samples]


def test_the_tokens_of_highest_entropy_are_kept():
    # Of .1, 2, .3, .05, 1 the .8-quantile is 1.2: token 1 alone reaches it. Of the rest, half: those from .3 up.
    made = group(trajectory(generation([9], [0, 1, 2]), generation([9], [3, 4])))
    entropy = np.array([0.1, 2.0, 0.3, 0.05, 1.0, 0, 0, 0, 0, 0])
    samples = rows_with_entropy(([made], [constant_credit(made, [1.5])]), "trajectory", entropy)
    [row], counters = high_entropy(samples, 0.2)
    assert row.token_ids[row.mask].tolist() == [1] and row.advantages.tolist() == [0, 0, 1.5, 0]
    assert row.sampler_logprobs[row.mask].tolist() == [-0.5] and not row.sampler_logprobs[~row.mask].any()
    assert counters == {"batch/n_low_entropy_tokens": 4.0}
    rows, counters = high_entropy(samples, 0.5)
    assert [int(i) for r in rows for i in r.token_ids[r.mask]] == [1, 2, 4]
    # Ties stay: nothing tells them apart.
    flat = rows_with_entropy(([made], [constant_credit(made, [1.5])]), "trajectory", np.ones(10))
    assert sum(r.n_policy_tokens for r in high_entropy(flat, 0.1)[0]) == 5
    assert high_entropy([], 0.2) == ([], {"batch/n_low_entropy_tokens": 0.0})


@settings(max_examples=40)
@given(made=steps(), share=st.floats(0.01, 0.99), seed=st.integers(0, 9))
def test_which_tokens_are_sure_is_no_matter_of_the_layout(made, share, seed):
    entropy = np.random.default_rng(seed).random(VOCABULARY)
    kept = []
    for layout in ("trajectory", "generation"):
        samples = rows_with_entropy(made, layout, entropy)
        n_tokens = sum(s.n_policy_tokens for s in samples)
        rows, counters = high_entropy(samples, share)
        n_kept = sum(r.n_policy_tokens for r in rows)
        assert n_kept + counters["batch/n_low_entropy_tokens"] == n_tokens
        assert not n_tokens or n_kept >= max(1, int(share * n_tokens))
        assert all(r.mask.any() and not r.advantages[~r.mask].any() for r in rows)
        kept.append(sorted((r.sequence, int(i)) for r in rows for i in r.token_ids[r.mask]))
    assert kept[0] == kept[1]


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
