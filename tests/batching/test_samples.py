"""Rows: exact ids, folding, rewritten prompts, and bad credit."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from rlhf.batching.samples import Sample, make_samples
from rlhf.data import Credit, ScoredGroup
from rlhf.data.generation import DEMONSTRATED, piece_of
from rlhf.errors import DataError
from tests.batching.batch_parts import constant_credit, generation, group, steps, trajectory


def rows(*generations, layout="trajectory", value=1.0):
    made = group(trajectory(*generations))
    return make_samples([made], [constant_credit(made, [value])], layout)


GROWING = (generation([1, 2], [3], -0.25), generation([1, 2, 3, 9], [4, 5], -0.75))


def test_prompts_that_extend_each_other_share_a_row():
    [row], counters = rows(*GROWING, value=2.0)
    assert row.token_ids.tolist() == [1, 2, 3, 9, 4, 5]
    assert row.mask.tolist() == [False, False, True, False, True, True]
    assert row.sampler_logprobs.tolist() == [0, 0, -0.25, 0, -0.75, -0.75]
    assert row.advantages.tolist() == [0, 0, 2, 0, 2, 2]
    assert dict(counters) == {
        "batch/n_samples": 1,
        "batch/n_tokens": 6,
        "batch/n_policy_tokens": 3,
        "batch/n_rewritten_prompts": 0,
        "batch/n_trajectories_without_tokens": 0,
    }


def test_one_row_per_generation():
    (first, second), counters = rows(*GROWING, layout="generation")
    assert first.token_ids.tolist() == [1, 2, 3] and first.mask.tolist() == [False, False, True]
    assert second.token_ids.tolist() == [1, 2, 3, 9, 4, 5]
    assert second.mask.tolist() == [False] * 4 + [True] * 2
    assert first.sequence == second.sequence
    assert counters["batch/n_rewritten_prompts"] == 0


def test_a_reply_in_pieces_is_one_row_in_either_layout():
    whole = generation([1, 2, 3], [4, 5, 6, 7], -0.25)
    pieces = (piece_of(whole, 0, 1), piece_of(whole, 1, 4), generation([1, 2, 3, 4, 5, 6, 7, 8], [9], -0.5))
    (reply, last), _ = rows(*pieces, layout="generation")
    assert reply.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7] and reply.mask.tolist() == [False] * 3 + [True] * 4
    assert last.mask.tolist() == [False] * 8 + [True]
    assert len(rows(*pieces)[0]) == 1


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 9],  # shorter
        [1, 2],  # the sampled token is gone
        [1, 2, 8, 9],  # another id in place of the sampled one, though it may read the same
        [0, 2, 3, 9],  # the first token differs
    ],
)
@pytest.mark.parametrize("layout", ["trajectory", "generation"])
def test_a_rewritten_prompt_begins_a_row_and_is_counted(prompt, layout):
    (first, second), counters = rows(generation([1, 2], [3]), generation(prompt, [4]), layout=layout)
    assert first.token_ids.tolist() == [1, 2, 3]
    assert second.token_ids.tolist() == [*prompt, 4]
    assert second.mask.tolist() == [False] * len(prompt) + [True]
    assert counters["batch/n_rewritten_prompts"] == 1


def test_a_row_goes_on_after_a_rewritten_prompt():
    generations = (generation([1], [2]), generation([5], [6]), generation([5, 6, 7], [8]))
    (_, second), counters = rows(*generations)
    assert second.token_ids.tolist() == [5, 6, 7, 8]
    assert counters["batch/n_rewritten_prompts"] == 1


def test_a_generation_without_tokens_adds_nothing():
    [row], counters = rows(generation([1], [2]), generation([1, 2, 3], []), generation([1, 2, 3], [4]))
    assert row.token_ids.tolist() == [1, 2, 3, 4]
    [row], _ = rows(generation([1], [2]), generation([1, 2, 3], []))
    assert row.token_ids.tolist() == [1, 2]
    none, counters = rows(generation([1], []))
    assert none == [] and counters["batch/n_trajectories_without_tokens"] == 1


def test_rows_are_numbered_by_group_and_trajectory():
    empty, one, two = trajectory(generation([1], [])), trajectory(*GROWING), trajectory(generation([1], [2]))
    groups = [group(empty, one), ScoredGroup("failed", (), ()), group(two)]
    credits = [constant_credit(g, [0.0] * len(g.trajectories)) for g in groups]
    samples, _ = make_samples(groups, credits, "generation")
    assert [(s.group, s.sequence) for s in samples] == [(0, 1), (0, 1), (2, 2)]


@given(steps())
def test_every_sampled_token_is_in_exactly_one_place_with_its_own_numbers(step):
    groups, credits = step
    expected = [
        (number, token, logprob, advantage)
        for number, (t, credit_NT) in enumerate(
            pair
            for g, c in zip(groups, credits, strict=True)
            for pair in zip(g.trajectories, c.advantages_GNT, strict=True)
        )
        for g, credit_T in zip(t.generations, credit_NT, strict=True)
        for token, logprob, advantage in zip(g.token_ids, g.logprobs, credit_T, strict=True)
    ]
    for layout in ("trajectory", "generation"):
        samples, counters = make_samples(groups, credits, layout)
        got = [
            (s.sequence, int(s.token_ids[i]), pytest.approx(float(s.sampler_logprobs[i])), float(s.advantages[i]))
            for s in samples
            for i in np.flatnonzero(s.mask)
        ]
        assert expected == got
        assert counters["batch/n_policy_tokens"] == len(expected)


@given(steps())
def test_each_row_is_what_the_model_saw(step):
    groups, credits = step
    known = {g.full_ids: g for made in groups for t in made.trajectories for g in t.generations}
    for layout in ("trajectory", "generation"):
        for sample in make_samples(groups, credits, layout)[0]:
            assert tuple(sample.token_ids.tolist()) in known


@pytest.mark.parametrize(
    "tokens_GNT",
    [
        (),  # no trajectory
        (((1.0,),),),  # one generation of two
        (((1.0,), (1.0,)),),  # one number for two tokens: must not be broadcast
        (((1.0,), (1.0, 1.0, 1.0)),),
    ],
)
def test_credit_that_does_not_match_the_tokens_raises(tokens_GNT):
    with pytest.raises(DataError, match="credit does not match"):
        make_samples([group(trajectory(*GROWING))], [Credit(tokens_GNT)])


@pytest.mark.parametrize("layout", ["trajectory", "generation"])
def test_what_a_critic_learns_lies_beside_the_advantages(layout):
    # Two turns of one and two tokens; the returns are those of the tokens, and 0 where nobody sampled.
    made = group(trajectory(*GROWING))
    credit = replace(constant_credit(made, [2.0]), returns_GNT=(((0.5,), (0.25, 1.0)),))
    samples, _ = make_samples([made], [credit], layout)
    expected = [[0, 0, 0.5, 0, 0.25, 1]] if layout == "trajectory" else [[0, 0, 0.5], [0, 0, 0, 0, 0.25, 1]]
    assert [s.returns.tolist() for s in samples] == expected
    assert all(s.returns is None for s in make_samples([made], [constant_credit(made, [2.0])], layout)[0])
    with pytest.raises(DataError, match="returns do not match the sampled tokens"):
        make_samples([made], [replace(credit, returns_GNT=(((0.5,), (0.25,)),))], layout)


@pytest.mark.parametrize("layout", ["trajectory", "generation"])
def test_what_is_not_trained_on_has_no_row(layout):
    made = group(*(trajectory(*GROWING) for _ in range(3)))
    credit = constant_credit(made, (0.5, -0.5, 0.25))
    every, _ = make_samples([made], [credit], layout)
    kept, counters = make_samples([made], [replace(credit, train_mask_G=(True, False, True))], layout)
    assert [s.sequence for s in kept] == [s.sequence for s in every if s.sequence != 1]
    assert counters["batch/n_samples"] == len(kept) and counters["batch/n_trajectories_without_tokens"] == 0
    with pytest.raises(DataError, match="entries of train_mask_G do not match the trajectories"):
        make_samples([made], [replace(credit, train_mask_G=(True,))], layout)


def test_credit_that_is_not_finite_raises():
    made = group(trajectory(*GROWING))
    with pytest.raises(DataError, match="finite"):
        make_samples([made], [constant_credit(made, [math.nan])])


def test_an_observation_token_cannot_carry_an_advantage_or_a_log_prob():
    ids, mask, zeros = np.arange(3), np.array([False, True, False]), np.zeros(3, np.float32)
    poisoned = np.array([0, 0, 1], np.float32)
    Sample(ids, mask, zeros, zeros, 0, 0)
    with pytest.raises(DataError, match="observation token"):
        Sample(ids, mask, zeros, poisoned, 0, 0)
    with pytest.raises(DataError, match="observation token"):
        Sample(ids, mask, poisoned, zeros, 0, 0)
    with pytest.raises(DataError, match="first token"):
        Sample(ids, np.array([True, False, False]), zeros, zeros, 0, 0)


def test_shared_ids_cannot_be_written():
    for row in rows(*GROWING, layout="generation")[0]:
        with pytest.raises(ValueError, match="read-only"):
            row.token_ids[0] = 7


@pytest.mark.parametrize("layout", ["trajectory", "generation"])
def test_tokens_of_demonstrations_are_off_policy(layout):
    shown = replace(generation([1, 2, 3], [4]), policy_version=DEMONSTRATED)
    found, _ = rows(generation([1], [2]), shown, layout=layout)
    said = [[] if s.off_policy is None else s.off_policy.tolist() for s in found]
    one = [False, False, False, True]
    assert said == ([one] if layout == "trajectory" else [[], one])
