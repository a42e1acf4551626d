"""What holds of every loss of the catalogue, over tokens of several trajectories and groups."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.catalog import CATALOG
from rlhf.errors import DataError
from rlhf.losses.contrib.a_lol import ALoL
from rlhf.losses.policy_loss import PolicyLoss
from rlhf.losses.reduction import Reduction
from rlhf.losses.reinforce import Reinforce
from rlhf.registry import resolve
from tests.losses.loss_inputs import gradient, inputs

#: Keys that a loss cannot do without.
NEEDED = {"kdrl": {"teacher": "somewhere"}}
KINDS = {kind: partial(resolve("loss", kind, base=Path()), **NEEDED.get(kind, {})) for kind in CATALOG["loss"]}
every_loss = pytest.mark.parametrize("kind", KINDS)
logprob = st.floats(-4, 0)
#: Of right and wrong attempts: what NFT reads its share of right attempts off, within its bounds.
advantage = st.one_of(st.just(0.0), st.floats(0.05, 0.95), st.floats(-0.95, -0.05))

#: A step of three trajectories in two groups: the group of each, and the trajectory of each token.
GROUPS = {7: 0, 8: 0, 3: 1}
LOGPROBS = ("policy", "old", "ref_logprobs", "teacher_logprobs", "mean_logprobs", "old_mean_logprobs")
NORMALIZERS = ("log_normalizers", "ref_log_normalizers")
#: What else is the policy's own where nothing has moved yet: the array, and the one that it equals.
UNMOVED = {
    "ref_logprobs": "policy",
    "ref_log_normalizers": "log_normalizers",
    "old_mean_logprobs": "mean_logprobs",
    "teacher_logprobs": "policy",
}


@st.composite
def tokens(draw):
    """Keyword arguments of `inputs`: tokens in any order, one advantage per trajectory."""
    trajectory_ids = draw(st.lists(st.sampled_from(list(GROUPS)), min_size=1, max_size=8))
    n = len(trajectory_ids)
    of_trajectory = {s: draw(advantage) for s in GROUPS}
    columns = {name: draw(st.lists(logprob, min_size=n, max_size=n)) for name in (*LOGPROBS, *NORMALIZERS)}
    return {
        **columns,
        "advantages": [of_trajectory[s] for s in trajectory_ids],
        "weights": draw(st.lists(st.floats(0, 2), min_size=n, max_size=n)),
        "entropy": draw(st.lists(st.floats(0, 3), min_size=n, max_size=n)),
        "trajectory_ids": trajectory_ids,
        "group_ids": [GROUPS[s] for s in trajectory_ids],
        "token_positions": draw(st.permutations(range(n))),
    }


def policy_term(kind, rows):
    """-∂ loss / ∂ log π per unit of weight, at ratio one."""
    advantages = rows["advantages"]
    if kind == "a_lol":  # what is worse than the baseline is left out
        return [max(a, 0.0) for a in advantages]
    if kind == "min_entropy":
        return [0.0] * len(advantages)
    if kind == "rover":
        return [2 * a for a in advantages]
    if kind == "shiq":  # 2 β G for each error in which the token occurs: its own and those before it
        order = list(zip(rows["trajectory_ids"], rows["token_positions"], strict=True))
        n_so_far = [sum(other[0] == own[0] and other[1] <= own[1] for other in order) for own in order]
        return [2 * 0.1 * n * a for n, a in zip(n_so_far, advantages, strict=True)]
    if kind != "rebel":
        return advantages
    # 4 η G / (G − 1) · (A − mean A of the group), over the trajectories that have tokens here
    present = dict(zip(rows["trajectory_ids"], advantages, strict=True))
    found = []
    for s in rows["trajectory_ids"]:
        peers = [a for other, a in present.items() if GROUPS[other] == GROUPS[s]]
        g = len(peers)
        found.append(4 * g / (g - 1) * (present[s] - sum(peers) / g) if g > 1 else 0.0)
    return found


@every_loss
@given(rows=tokens())
def test_on_policy_the_gradient_is_the_plain_policy_gradient(kind, rows):
    made = inputs(**{**rows, "old": None, **{name: rows[of] for name, of in UNMOVED.items()}})
    loss = KINDS[kind]()(made).loss
    expected = [-w * a for w, a in zip(rows["weights"], policy_term(kind, rows), strict=True)]
    found = gradient(loss, made) if kind != "min_entropy" else [0.0] * len(expected)
    assert found == pytest.approx(expected, abs=1e-9)


#: Without what is no policy term.
BARE = {"cpgd": {"drift_coef": 0.0}, "kdrl": {"teacher_coef": 0.0}}
#: Advantage 0 is something to be regressed on, too.
REGRESSIONS = ("rebel", "shiq", "rover")


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in (*REGRESSIONS, "min_entropy")])
@given(rows=tokens())
def test_advantage_zero_pulls_nowhere(kind, rows):
    made = inputs(**{**rows, "advantages": [0.0] * len(rows["policy"])})
    loss = KINDS[kind](**BARE.get(kind, {}))(made).loss
    assert loss.item() == 0
    assert gradient(loss, made) == [0.0] * len(rows["policy"])


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "min_entropy"])
@given(rows=tokens(), shift=st.floats(-3, 3))
def test_only_ratios_matter(kind, rows, shift):
    # All log-probs of the tokens moved alike: the same ratios, so the same gradient.
    made = inputs(**rows)
    moved = {name: [x + shift for x in rows[name]] for name in ("policy", "old", "ref_logprobs", "teacher_logprobs")}
    other = inputs(**{**rows, **moved})
    expected = gradient(KINDS[kind]()(made).loss, made)
    assert gradient(KINDS[kind]()(other).loss, other) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@every_loss
@given(rows=tokens(), data=st.data())
def test_micro_batches_add_up_to_the_minibatch_in_any_order(kind, rows, data):
    n = len(rows["policy"])
    terms = {} if kind == "min_entropy" else {"entropy_coef": 0.01}
    loss = KINDS[kind](kl="k3", kl_coef=0.1, **terms)
    whole = inputs(**rows, n_minibatch_tokens=n)
    order = data.draw(st.permutations(range(n)))
    cut = data.draw(st.integers(0, n))
    parts = []
    for part in (order[:cut], order[cut:]):
        picked = {name: [values[i] for i in part] for name, values in rows.items()}
        made = inputs(**picked, n_minibatch_tokens=n, trajectories=whole.trajectories, whole=whole.whole)
        parts.append((part, made, loss(made)))
    expected = loss(whole)
    assert sum(out.loss.item() for _, _, out in parts) == pytest.approx(expected.loss.item(), abs=1e-9)
    for name, value in expected.metrics.items():
        assert sum(out.metrics[name].item() for _, _, out in parts) == pytest.approx(value.item(), abs=1e-9)
    for name, value in expected.metrics_max.items():
        assert max(out.metrics_max[name].item() for _, _, out in parts) == pytest.approx(value.item())
    of_whole = gradient(expected.loss, whole)
    for part, made, out in parts:
        if part:
            assert gradient(out.loss, made) == pytest.approx([of_whole[i] for i in part], abs=1e-9)


@every_loss
@given(rows=tokens())
def test_a_token_without_weight_leaves_no_gradient(kind, rows):
    made = inputs(**{**rows, "weights": [0.0] * len(rows["policy"])})
    loss = KINDS[kind](kl="k2", kl_coef=0.1)(made).loss
    assert loss.item() == 0
    assert gradient(loss, made) == [0.0] * len(rows["policy"])


@every_loss
def test_a_loss_keeps_its_contract(kind):
    loss = KINDS[kind](kl="k3", kl_coef=0.1)
    assert isinstance(loss, PolicyLoss)
    nothing = inputs([], [], entropy=[], **{name: [] for name in (*LOGPROBS[2:], *NORMALIZERS)})
    output = loss(nothing)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert all(value.item() == 0.0 for value in (*output.metrics.values(), *output.metrics_max.values()))
    for name in getattr(loss, "reductions", ()):
        Reduction(kind=name, max_tokens=5 if name.endswith("norm") else None)
    assert getattr(loss, "needs_whole", None) in (None, "trajectory", "group", "tokens")


#: What a loss asks for, and the arrays that it is then given.
ASKED = {
    "needs_ref": ("ref_logprobs",),
    "needs_entropy": ("entropy",),
    "needs_log_normalizers": ("log_normalizers", "ref_log_normalizers"),
    "needs_mean_logprobs": ("mean_logprobs",),
    "teacher": ("teacher_logprobs",),
}


@every_loss
@pytest.mark.parametrize("terms", [{}, {"kl": "k3", "kl_coef": 0.1}])
def test_what_a_loss_asks_for_is_enough(kind, terms):
    loss = KINDS[kind](**terms)
    asked = [name for flag, names in ASKED.items() if getattr(loss, flag, None) for name in names]
    made = inputs([-1.0, -2.0], [0.5, -0.5], **{name: [-1.5, -0.5] for name in asked})
    if getattr(loss, "needs_whole", None) is None:
        made = replace(made, trajectories=None, whole=None)
    assert torch.isfinite(loss(made).loss)


@pytest.mark.parametrize(
    ("loss", "fresh"),
    [
        (Reinforce(), True),
        (Reinforce(max_weight=5.0), False),
        (ALoL(ratio="none"), True),
        (ALoL(ratio="token"), False),
        (ALoL(), False),
    ],
    ids=repr,
)
def test_a_loss_that_does_not_see_how_far_the_policy_moved_says_so(loss, fresh):
    moved, unmoved = (inputs([-1.0], [0.5], old=[old]) for old in (-1.3, -1.0))
    same = gradient(loss(moved).loss, moved) == gradient(loss(unmoved).loss, unmoved)
    assert loss.needs_fresh_samples == same == fresh


@every_loss
def test_log_ratios_far_apart_stay_finite(kind):
    rows = {"policy": [-1e4, 0.0, -1.0], "old": [0.0, -1e4, -1.0], "advantages": [0.5, -0.5, -0.5]}
    rows |= {"trajectory_ids": [0, 1, 1], "group_ids": [0, 0, 0], "entropy": [1.0] * 3}
    rows |= dict.fromkeys(("ref_logprobs", "teacher_logprobs", "old_mean_logprobs"), rows["old"])
    rows |= {"mean_logprobs": rows["policy"], "log_normalizers": [1e4, 0.0, 1.0], "ref_log_normalizers": [1.0] * 3}
    made = inputs(**rows)
    output = KINDS[kind]()(made)
    assert all(torch.isfinite(x) for x in (output.loss, *output.metrics.values(), *output.metrics_max.values()))
    if kind != "min_entropy":
        assert all(map(math.isfinite, gradient(output.loss, made)))


@pytest.mark.parametrize("kind", [k for k in KINDS if getattr(KINDS[k](), "needs_whole", None)])
def test_trajectories_that_are_needed_and_not_given_raise(kind):
    with pytest.raises(DataError, match=r"needs (whole )?trajectories"):
        KINDS[kind]()(replace(inputs([-1.0], [0.5], log_normalizers=[0.0]), trajectories=None, whole=None))


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("shiq", "ref_logprobs"),
        ("shiq", "log_normalizers"),
        ("shiq", "ref_log_normalizers"),
        ("rover", "mean_logprobs"),
        ("kdrl", "teacher_logprobs"),
        ("min_entropy", "entropy"),
    ],
)
def test_an_array_that_is_needed_and_not_given_is_named(kind, missing):
    rows = {name: [-1.0] for name in (*LOGPROBS[2:], *NORMALIZERS, "entropy") if name != missing}
    with pytest.raises(DataError, match=f"this loss needs {missing}"):
        KINDS[kind]()(inputs([-1.0], [0.5], **rows))
