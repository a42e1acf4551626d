"""With what each estimator and each loss of the catalogue is used: keys of a `policy_gradient` stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Keys = Mapping[str, Any]

#: Estimators that are tried with every loss of `LOSSES`.
ESTIMATORS = ("grpo", "dr_grpo", "rloo", "gigpo")
#: The others of the catalogue, with the keys they need, each with the loss of several updates that most were made for.
#: Not `duration_aware`, whose numbers follow the clock.
OTHERS: Mapping[str, Keys] = {
    "reinforce_pp": {},
    "reinforce_pp_baseline": {},
    "lite_ppo": {},
    "hgpo": {"episode": True},
    "step_grpo": {},
    "progress": {},
    "hrpo": {"reward": "cost"},
    "stratified": {},
    "loop": {},
    "lightning": {},
    "grpo_lead": {},
    "task_normalised": {"inner": {"kind": "gigpo"}},
    "ktae": {"inner": {"kind": "lite_ppo"}},
}
_TREE = {"rollout": {"kind": "tree", "branches_per_round": 1}}
#: Those that compare by what a stage brings beside them: the keys of such a stage. Not `hicra`, whose planning tokens
#: are of the policy's own tokenizer.
WITH_MECHANISM: Mapping[str, Keys] = {
    "tree_grpo": {**_TREE, "advantage": {"kind": "tree_grpo"}},
    "treerl": {**_TREE, "advantage": {"kind": "treerl"}},
    "guided": {"expert": {}, "advantage": {"kind": "guided"}, "loss": {"kind": "luffy"}},
}
#: Those that are about seats and roles, which this world has not: where they are in a run with their mechanism.
ELSEWHERE: Mapping[str, str] = {
    "seats": "tests/test_self_play.py::test_self_play_learns_to_beat_chance",
    "two_level": "tests/trainers/test_role_adapters.py::test_a_run_trains_both_and_a_resumed_one_ends_where_it_does",
    "reviews": "tests/credit/test_reviews.py",
}
#: Those that compare with the values of a critic: the keys a stage needs to learn with each.
WITH_CRITIC: Mapping[str, Keys] = {"gae": {}, "turn_gae": {}, "bilevel_gae": {}}
#: Those that compare with a critic of turns.
WITH_TURN_CRITIC: Mapping[str, Keys] = {"archer": {}}
#: Those that compare with a critic that knows the answer.
WITH_TOLD_CRITIC: Mapping[str, Keys] = {"sweet": {}}
#: Such a critic that learns as fast as they need on tasks of seconds.
TOLD_CRITIC: Keys = {
    "kind": "sweet", "warmup_steps": 2, "epochs": 12, "beta": 1.0, "optimizer": {"lr": 3.0e-3},
}  # fmt: skip
#: A critic of turns that learns as fast as they need on tasks of seconds.
TURN_CRITIC: Keys = {"kind": "archer", "updates_per_step": 20, "batch_size": 32, "optimizer": {"lr": 1.0e-2}}
#: A critic that learns as fast as they need on tasks of seconds: a model of its own.
CRITIC: Keys = {"optimizer": {"lr": 3.0e-3}}
#: The clipped loss makes several updates of the same samples, so that its ratios leave 1; REINFORCE makes one.
LOSSES: Mapping[str, Keys] = {
    "ppo_clip": {"loss": {"kind": "ppo_clip"}, "minibatches": 2, "epochs": 2, "steps": 12},
    "reinforce": {"loss": {"kind": "reinforce"}, "steps": 22},
}
_CENTRED, _SUMMED = {"advantage": {"kind": "dr_grpo"}}, {"reduction": {"kind": "seq_mean_token_sum"}}
_MEANS = {"reduction": {"kind": "seq_mean_token_mean"}}
#: The others, each with the advantage and reduction that it is defined with, over several updates of the same samples.
#: The default bounds of GSPO are for far lower learning rates. Not `min_entropy`, which looks at no reward.
OTHER_LOSSES: Mapping[str, Keys] = {
    "cispo": {},
    "gspo": {"loss": {"kind": "gspo", "clip_low": 0.1, "clip_high": 0.1}, **_MEANS},
    "cpgd": {},
    "stable_reinforce": {"filters": {"max_advantage_z": 3}},
    "rebel": {**_CENTRED, **_SUMMED, "minibatches": 1, "steps": 20},
    "a_lol": {**_CENTRED, **_SUMMED},
    "nft": {**_CENTRED, "rewards": {"right": {"kind": "outcome"}}},
    "shiq": {
        **_CENTRED,
        **_SUMMED,
        "loss": {"kind": "shiq", "beta": 0.03},
        "minibatches": 1,
        "steps": 16,
        "filters": {"drop_zero_advantage": False},
    },
    "rover": {**_CENTRED, "steps": 18},
    "kdrl": {"loss": {"kind": "kdrl", "teach": "wrong"}, "filters": {"drop_zero_advantage": False}},
    "luffy": {"expert": {}, "advantage": {"kind": "guided"}},
}


def stage_of_loss(loss: str) -> dict[str, Any]:
    """Return the keys of a stage that learns with `loss`; a `rewards` among them belongs to the recipe."""
    if loss in LOSSES:
        return dict(LOSSES[loss])
    return {**LOSSES["ppo_clip"], "loss": {"kind": loss}, **OTHER_LOSSES[loss]}
