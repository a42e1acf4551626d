"""What is done about an engine that is off: worked numbers, properties, and the true gradient on a small policy."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlhf.catalog import CATALOG
from rlhf.errors import DataError
from rlhf.losses.importance_correction import (
    Bypass,
    Clipped,
    Correction,
    Criterion,
    Masked,
    Rejection,
    Truncated,
    corrected,
)
from rlhf.losses.mismatch import (
    CorrectionInputs,
    CorrectionOutput,
    divergence,
    effective_share,
    joined,
    joined_outputs,
    mismatch_metrics,
    off_policy_negatives,
    weights_at,
)
from rlhf.losses.ppo_clip import PPOClip
from rlhf.losses.reinforce import Reinforce
from rlhf.registry import resolve
from tests.losses.loss_inputs import gradient, inputs

KINDS = [
    Truncated(),
    Truncated(level="sequence", veto=1e-4, opsm_delta=1e-4, batch_normalize=True),
    Clipped(),
    Clipped(level="geometric"),
    Masked(),
    Masked(level="sequence"),
    Rejection(),
    Rejection(criteria=(Criterion(statistic="k3", over="max", at_most=0.1),), veto=1e-4),
    Bypass(),
]
#: The numbers that the examples are about: one trajectory of four tokens.
W = (0.3, 1.0, 1.8, 6.0)


def tokens(weights=W, sequences=None, advantages=None, sampler=-2.0):
    """Tokens whose importance weights are `weights`."""
    n = len(weights)
    mu = torch.full((n,), sampler, dtype=torch.float64)
    return CorrectionInputs(
        old_logprobs=mu + torch.tensor(weights, dtype=torch.float64).log(),
        sampler_logprobs=mu,
        advantages=torch.ones(n, dtype=torch.float64) if advantages is None else torch.tensor(advantages),
        trajectory_ids=torch.zeros(n, dtype=torch.int64) if sequences is None else torch.tensor(sequences),
    )


# --- worked numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (Truncated(), [0.3, 1, 1.8, 2]),
        # Divided by their mean, 5.1 / 4 = 1.275.
        (Truncated(batch_normalize=True), [0.235294, 0.784314, 1.411765, 1.568627]),
        (Truncated(level="sequence"), [2] * 4),  # .3 · 1 · 1.8 · 6 = 3.24
        (Truncated(level="sequence", max_weight=math.inf), [3.24] * 4),
        (Truncated(level="geometric"), [1.341641] * 4),  # 3.24^(1/4)
        (Clipped(), [0.5, 1, 1.8, 2]),
        (Masked(min_weight=0.5, max_weight=2), [0, 1, 1.8, 0]),
        (Masked(), [0, 1, 1.8, 0]),  # IcePop's .5 and 5
        (Masked(level="sequence"), [3.24] * 4),
        (Masked(level="sequence", max_weight=3), [0] * 4),
        (Bypass(), [1] * 4),
    ],
)
def test_worked_weights(correction, expected):
    output = corrected(correction, tokens())
    assert output.weights.tolist() == pytest.approx(expected, abs=1e-6)
    assert output.kept is None


def test_worked_divergences():
    # w − 1 − ln w: .3 − 1 + 1.203973; 0; 1.8 − 1 − .587787; 6 − 1 − 1.791759; their mean .981107
    log_w = tokens().log_weights()
    assert divergence("k3", log_w).tolist() == pytest.approx([0.503973, 0, 0.212213, 3.208241], abs=1e-6)
    assert divergence("k3", log_w).mean().item() == pytest.approx(0.981107, abs=1e-6)
    assert divergence("k1", log_w).tolist() == pytest.approx([1.203973, 0, -0.587787, -1.791759], abs=1e-6)
    assert divergence("k2", log_w)[0].item() == pytest.approx(1.203973**2 / 2, abs=1e-6)


@pytest.mark.parametrize(
    ("criterion", "expected"),
    [
        (Criterion(over="token", at_least=0.5, at_most=5), [False, True, True, False]),
        (Criterion(over="token", at_most=5), [True, True, True, False]),
        (Criterion(over="sum", at_most=3.2), [False] * 4),  # 3.24
        (Criterion(over="sum", at_most=3.3), [True] * 4),
        (Criterion(over="mean", at_least=0.999, at_most=1.001), [False] * 4),  # 1.341641
        (Criterion(over="mean", at_least=1.34, at_most=1.35), [True] * 4),
        (Criterion(statistic="k3", over="token", at_most=0.5), [False, True, True, False]),
        (Criterion(statistic="k3", over="mean", at_most=0.98), [False] * 4),  # .981107
        (Criterion(statistic="k3", over="mean", at_most=0.99), [True] * 4),
        (Criterion(statistic="k3", over="sum", at_most=3.9), [False] * 4),  # 3.924427
        (Criterion(statistic="k3", over="max", at_most=3.2), [False] * 4),  # 3.208241
        (Criterion(statistic="k3", over="max", at_most=3.3), [True] * 4),
        (Criterion(statistic="k2", over="max", at_most=1.6), [False] * 4),  # 1.791759² / 2 = 1.605200
        (Criterion(statistic="k2", over="max", at_most=1.61), [True] * 4),
    ],
)
def test_worked_criteria(criterion, expected):
    assert criterion(tokens()).tolist() == expected
    assert corrected(Rejection(criteria=(criterion,)), tokens()).kept.tolist() == expected


def test_bounds_of_k1_are_bounds_of_w_and_not_of_its_inverse():
    # verl's "0.5_5" keeps 1/5 ≤ w ≤ 1/0.5: .3 stays and 3 goes. Here the bounds mean what they say.
    within = Criterion(over="token", at_least=0.5, at_most=5)
    assert within(tokens((0.3, 3.0))).tolist() == [False, True]
    assert Criterion(over="token", at_least=1 / 5, at_most=1 / 0.5)(tokens((0.3, 3.0))).tolist() == [True, False]


def test_every_criterion_must_pass():
    both = Rejection(criteria=(Criterion(over="token", at_least=0.5), Criterion(over="token", at_most=5)))
    assert corrected(both, tokens()).kept.tolist() == [False, True, True, False]
    assert corrected(both, tokens()).weights.tolist() == [1] * 4


def test_a_veto_drops_the_whole_trajectory_and_no_other():
    given_ = tokens((1.0, 5e-5, 1.0, 2e-4), sequences=[7, 7, 3, 3])
    output = corrected(Truncated(veto=1e-4), given_)
    assert output.kept.tolist() == [False, False, True, True]
    # What is left out has no part in the mean either: the rest is 1 and .0002, mean .5001.
    output = corrected(Truncated(veto=1e-4, batch_normalize=True), given_)
    assert output.weights[2:].tolist() == pytest.approx([1 / 0.5001, 2e-4 / 0.5001])


def test_off_policy_negatives_are_silent():
    # mean of old − new: (.3 + .2) / 2 = .25 > 1e-4, so tokens with A < 0 go; with δ = .25 they stay.
    old, new = torch.tensor([-1.0, -1.2]).double(), torch.tensor([-1.3, -1.4]).double()
    ids = torch.zeros(2, dtype=torch.int64)
    assert off_policy_negatives(old, new, torch.tensor([-1.0, 1.0]), ids, 1e-4).tolist() == [True, False]
    assert off_policy_negatives(old, new, torch.tensor([-1.0, -1.0]), ids, 0.26).tolist() == [False, False]
    # As a key: old is the engine and new the trainer, so exp(−.3) and exp(−.2) are the weights.
    given_ = CorrectionInputs(new, old, torch.tensor([-1.0, 1.0]), ids)
    output = corrected(Truncated(opsm_delta=1e-4), given_)
    assert output.weights.tolist() == pytest.approx([0, math.exp(-0.2)]) and output.kept is None


def test_trajectories_are_told_apart_however_their_tokens_lie():
    apart = tokens((0.5, 2.0, 0.5, 3.0), sequences=[4, 9, 4, 9])
    assert weights_at("sequence", apart).tolist() == pytest.approx([0.25, 6, 0.25, 6])
    assert weights_at("geometric", apart).tolist() == pytest.approx([0.5, 6**0.5, 0.5, 6**0.5])
    # Each counts once in the mean, as in verl: (.25 + 6) / 2, however long it is.
    longer = corrected(Truncated(level="sequence", max_weight=9, batch_normalize=True), tokens((0.25, 2, 3), [4, 9, 9]))
    assert longer.weights.tolist() == pytest.approx([0.08, 1.92, 1.92])


def test_metrics_of_one_step():
    given_ = tokens((0.5, 1.0, 4.0, 1.0, 9.0), sequences=[0, 0, 1, 1, 2])
    drop = torch.tensor([True, True, True, True, False])
    bounded = torch.tensor([False, False, True, False, True])
    output = CorrectionOutput(torch.tensor([0.5, 0.0, 2.0, 1.0, 2.0]), drop, bounded)
    # gaps ln 2, 0, ln 4, 0, ln 9; their mean (.693147 + 1.386294 + 2.197225) / 5
    # k1: (.693147 − 1.386294 − 2.197225) / 5; k3: (.193147 + 1.613706 + 5.802775) / 5
    # weights .5, 0, 2, 1 of the tokens kept and 0 of the other: 3.5² / (5 · 5.25)
    expected = {
        "loss/sampler_logprob_diff_mean": 0.855333,
        "loss/sampler_logprob_diff_max": math.log(9),
        "loss/sampler_kl_k1": -0.578074,
        "loss/sampler_kl_k3": 1.521926,
        "loss/sampler_ess": 12.25 / 26.25,
        "loss/sampler_weight_mean": 3.5 / 4,
        "loss/sampler_clipped_share": 2 / 5,
        "loss/sampler_masked_share": 1 / 5,
        "loss/sampler_rejected_share": 1 / 5,
        "loss/sampler_dropped_share": 1 / 3,
    }
    assert mismatch_metrics(given_, output) == pytest.approx(expected, abs=1e-6)
    # Bypassed, the ratios are the weights: 15.5² / (5 · (.25 + 1 + 16 + 1 + 81)); no factors, no shares.
    bypassed = mismatch_metrics(given_)
    assert bypassed["loss/sampler_ess"] == pytest.approx(240.25 / 496.25)
    assert set(bypassed) == {n for n in expected if "share" not in n and "weight" not in n}
    parts = [
        CorrectionInputs(*(getattr(given_, name)[cut] for name in CorrectionInputs.__dataclass_fields__))
        for cut in (slice(0, 2), slice(2, 5))
    ]
    outputs = [CorrectionOutput(output.weights[:2]), replace_slice(output, slice(2, 5))]
    assert mismatch_metrics(joined(parts), joined_outputs(outputs)) == pytest.approx(expected, abs=1e-6)


def replace_slice(output: CorrectionOutput, cut: slice) -> CorrectionOutput:
    return replace(output, weights=output.weights[cut], kept=output.kept[cut], bounded=output.bounded[cut])


def test_no_tokens_are_no_trouble():
    empty = tokens((), sequences=[])
    for correction in KINDS:
        output = corrected(correction, empty)
        assert len(output.weights) == 0 and set(mismatch_metrics(empty, output).values()) == {0.0}


# --- properties ------------------------------------------------------------------------------------------------------

log_weight = st.floats(-30, 30)
rows = st.lists(st.tuples(log_weight, st.integers(0, 2), st.sampled_from([-1.0, 0.0, 2.0])), min_size=1, max_size=9)


def of(drawn):
    log_w, sequences, advantages = zip(*drawn, strict=True)
    return CorrectionInputs(
        torch.tensor(log_w, dtype=torch.float64) - 1,
        torch.full((len(drawn),), -1.0, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(sequences),
    )


def test_every_correction_of_the_catalogue_is_tested():
    assert {type(c) for c in KINDS} == {resolve("correction", kind, base=Path()) for kind in CATALOG["correction"]}


@pytest.mark.parametrize("correction", KINDS, ids=repr)
@given(drawn=rows)
def test_an_engine_that_agrees_is_left_alone(correction, drawn):
    agreeing = replace(of(drawn), old_logprobs=of(drawn).sampler_logprobs)
    output = corrected(correction, agreeing)
    assert output.weights.tolist() == [1.0] * len(drawn)
    assert output.kept is None or bool(output.kept.all())
    metrics = mismatch_metrics(agreeing, output)
    whole = {"loss/sampler_ess", "loss/sampler_weight_mean"}
    assert all(value == float(name in whole) for name, value in metrics.items())


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@given(drawn=rows, most=st.floats(0.1, 10))
def test_truncation_never_raises_a_weight(level, drawn, most):
    raw = weights_at(level, of(drawn))
    weights = corrected(Truncated(level=level, max_weight=most), of(drawn)).weights
    assert (weights <= raw).all() and (weights <= most).all()
    assert (weights[raw <= most] == raw[raw <= most]).all()


@pytest.mark.parametrize("correction", KINDS, ids=repr)
@given(drawn=rows)
def test_weights_are_finite_and_never_negative(correction, drawn):
    output = corrected(correction, of(drawn))
    assert torch.isfinite(output.weights).all() and (output.weights >= 0).all()
    metrics = mismatch_metrics(of(drawn), output)
    assert all(math.isfinite(value) for value in metrics.values())
    for name in metrics:
        assert "share" not in name or 0 <= metrics[name] <= 1
    assert 0 <= metrics["loss/sampler_ess"] <= 1 + 1e-12


@pytest.mark.parametrize("correction", KINDS, ids=repr)
@given(drawn=rows, data=st.data())
def test_the_order_of_tokens_does_not_matter(correction, drawn, data):
    order = data.draw(st.permutations(range(len(drawn))))
    straight, mixed = corrected(correction, of(drawn)), corrected(correction, of([drawn[i] for i in order]))
    assert mixed.weights.tolist() == pytest.approx(straight.weights[list(order)].tolist(), rel=1e-9)
    if straight.kept is not None:
        assert mixed.kept.tolist() == straight.kept[list(order)].tolist()


@pytest.mark.parametrize("correction", [c for c in KINDS if getattr(c, "per_token", False)], ids=repr)
@given(drawn=rows, data=st.data())
def test_what_promises_to_be_per_token_is(correction, drawn, data):
    cut = data.draw(st.integers(0, len(drawn) - 1))
    whole = corrected(correction, of(drawn)).weights
    parts = [corrected(correction, of(part)).weights for part in (drawn[:cut], drawn[cut:]) if part]
    assert torch.equal(torch.cat(parts), whole)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=9))
def test_the_effective_share_lies_between_one_token_and_all(weights):
    share = effective_share(torch.tensor(weights, dtype=torch.float64)).item()
    floor = 1 / len(weights) if sum(w * w for w in weights) > 0 else 0.0
    assert floor - 1e-9 <= share <= 1 + 1e-9


@pytest.mark.parametrize("loss", [PPOClip(), Reinforce(), Reinforce(max_weight=2), PPOClip(entropy_coef=0.1)], ids=repr)
@given(drawn=st.lists(st.tuples(st.floats(-3, 0), st.floats(-2, 2), log_weight), min_size=1, max_size=6))
def test_masked_tokens_get_no_gradient_whatever_the_loss(loss, drawn):
    policy, advantages, log_w = zip(*drawn, strict=True)
    given_ = inputs(policy, advantages, entropy=[1.0] * len(drawn))
    weights = corrected(Masked(), tokens([math.exp(x) for x in log_w])).weights
    found = gradient(loss(replace(given_, weights=given_.weights * weights)).loss, given_)
    # dL / dlogp = −A w / N at ratio one: the factor is outside of the clipping.
    assert found == pytest.approx([-a * float(w) / len(drawn) for a, w in zip(advantages, weights, strict=True)])


def test_the_factor_acts_behind_the_clipping():
    # Ratio 1.5 with A = 1 is clipped at 1.28: loss −1.28 and no gradient; a factor of 2 makes it −2.56, still without.
    given_ = inputs([math.log(1.5)], [1.0], old=[0.0])
    doubled = replace(given_, weights=given_.weights * 2)
    assert PPOClip()(doubled).loss.item() == pytest.approx(-2.56)
    assert gradient(PPOClip()(doubled).loss, doubled) == [0.0]


# --- what it is for: the gradient ------------------------------------------------------------------------------------


def true_gradient(logits, rewards):
    """∇ E_π r by the definition, of a softmax policy."""
    leaf = logits.clone().requires_grad_()
    return torch.autograd.grad((leaf.softmax(-1) * rewards).sum(), leaf)[0]


def expected_gradient(logits, rewards, sampler, correction, loss):
    """The exact expectation over tokens of `sampler` of the gradient that `loss` follows, uphill.

    One token of each kind stands for all: its weight is its probability of being sampled.
    """
    leaf = logits.clone().requires_grad_()
    log_p, mu = leaf.log_softmax(-1), sampler.log_softmax(-1)
    baseline = float((logits.softmax(-1) * rewards).sum())
    n = len(logits)
    made = CorrectionInputs(log_p.detach(), mu, rewards - baseline, torch.arange(n))
    weights = mu.exp()
    old = mu
    if not isinstance(correction, Bypass):
        output = corrected(correction, made)
        old, weights = log_p.detach(), weights * output.weights
    given_ = replace(
        inputs(log_p.detach(), (rewards - baseline).tolist(), old=old), policy_logprobs=log_p, weights=weights
    )
    return -torch.autograd.grad(loss(given_).loss, leaf)[0]


@pytest.mark.parametrize("loss", [Reinforce(), PPOClip()], ids=["reinforce", "ppo_clip"])
@given(seed=st.integers(0, 10_000))
def test_unbounded_weights_give_the_true_gradient(loss, seed):
    generator = torch.Generator().manual_seed(seed)
    logits, noise, rewards = torch.randn((3, 7), generator=generator, dtype=torch.float64)
    found = expected_gradient(logits, rewards, logits + noise, Truncated(max_weight=math.inf), loss)
    assert torch.allclose(found, true_gradient(logits, rewards), atol=1e-9)


def test_bypass_is_unbiased_while_its_ratio_is_not_clipped():
    generator = torch.Generator().manual_seed(0)
    logits, noise, rewards = torch.randn((3, 7), generator=generator, dtype=torch.float64)
    sampler, truth = logits + noise, true_gradient(logits, rewards)
    open_ = PPOClip(clip_low=1, clip_high=math.inf, dual_clip=None)
    assert torch.allclose(expected_gradient(logits, rewards, sampler, Bypass(), open_), truth, atol=1e-9)
    clipped = expected_gradient(logits, rewards, sampler, Bypass(), PPOClip())
    assert not torch.allclose(clipped, truth, atol=1e-2)
    # A loss without a ratio is not corrected by it.
    assert not torch.allclose(expected_gradient(logits, rewards, sampler, Bypass(), Reinforce()), truth, atol=1e-2)


# --- bad settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Clipped(min_weight=2, max_weight=0.5), "min_weight: 2.0 is not below max_weight: 0.5"),
        (lambda: Masked(min_weight=5), "min_weight: 5.0 is not below max_weight: 5.0"),
        (lambda: Criterion(at_least=2, at_most=1), "at_least: 2.0 is not below at_most: 1.0"),
        (lambda: Criterion(), "rejects nothing"),
        (lambda: Criterion(statistic="k3", at_least=0.1, at_most=1), "k3 has at_most only"),
        (lambda: Criterion(over="max", at_most=2), "needs statistic: k2 or k3"),
        (lambda: Rejection(criteria=()), "at least 1"),
        (lambda: Truncated(max_weight=0), "greater than 0"),
        (lambda: Truncated(veto=1), "less than 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make, says):
    with pytest.raises(ValidationError, match=says):
        make()


def test_a_strangers_correction_is_held_to_the_contract():
    class Strange:
        def __init__(self, output, per_token=False):
            self.output, self.per_token = output, per_token

        def __call__(self, given_):
            return self.output

    good = CorrectionOutput(torch.ones(4))
    assert isinstance(Strange(good), Correction) and corrected(Strange(good), tokens()) is good
    for output, says in (
        (CorrectionOutput(torch.ones(3)), r"weights torch.float32 \[3\]"),
        (CorrectionOutput(torch.ones(4), torch.ones(4)), r"kept torch.float32 \[4\]"),
        (torch.ones(4), "weights NoneType"),
        (None, "weights NoneType"),
    ):
        with pytest.raises(DataError, match=says):
            corrected(Strange(output), tokens())
    with pytest.raises(DataError, match="not per token"):
        corrected(Strange(CorrectionOutput(torch.ones(4), torch.ones(4, dtype=torch.bool)), True), tokens())
    with pytest.raises(DataError, match="differ in shape"):
        replace(tokens(), advantages=torch.ones(3))
