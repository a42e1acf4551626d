"""With what each estimator and each loss of the catalogue is used: keys of a `policy_gradient` stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.catalog import CATALOG

Keys = Mapping[str, Any]

#: Estimators that are tried with every loss of `LOSSES`.
ESTIMATORS = ("grpo", "dr_grpo", "rloo", "gigpo")
#: The others of the catalogue, with the keys they need, each with the loss of several updates that most were made for.
#: Those that need none are not listed: `OTHERS` has every kind of the catalogue that stands nowhere else here.
_KEYS: Mapping[str, Keys] = {
    "hgpo": {"episode": True},
    "hrpo": {"reward": "cost"},
    "task_normalised": {"inner": {"kind": "gigpo"}},
    "ktae": {"inner": {"kind": "lite_ppo"}},
}
_TREE = {"rollout": {"kind": "tree", "branches_per_round": 1}}
#: Those that compare by what a stage brings beside them: the keys of such a stage. Not `hicra`, whose planning tokens
#: are of the policy's own tokenizer.
WITH_MECHANISM: Mapping[str, Keys] = {
    "tree_grpo": {**_TREE, "advantage": {"kind": "tree_grpo"}},
    "treerl": {**_TREE, "advantage": {"kind": "treerl"}},
    "guided": {"group_demonstrations": {}, "advantage": {"kind": "guided"}, "loss": {"kind": "luffy"}},
}
#: Those that are about seats, roles and stories, which this world has not: where they learn.
ELSEWHERE: Mapping[str, str] = {
    "seats": "tests/test_self_play.py::test_self_play_learns_to_beat_chance",
    "two_level": "tests/test_roles_learn.py::test_a_planner_and_an_executor_learn",
    "reviews": "tests/test_roles_learn.py::test_an_actor_and_a_critic_learn",
    "event_order": "tests/test_event_order_learns.py::test_where_a_story_ends_is_learnt_in_order",
}
#: Those that compare with the values of a critic: the keys a stage needs to learn with each.
WITH_CRITIC: Mapping[str, Keys] = {"gae": {}, "turn_gae": {}, "bilevel_gae": {}}
#: Those that compare with a critic of turns.
WITH_TURN_CRITIC: Mapping[str, Keys] = {"archer": {}}
#: Those that compare with a critic that knows the answer.
WITH_TOLD_CRITIC: Mapping[str, Keys] = {"sweet": {}}
#: Those with a test of their own: numbers of `duration_aware` follow the clock.
_APART = ("duration_aware", "hicra")
OTHERS: Mapping[str, Keys] = {
    kind: _KEYS.get(kind, {})
    for kind in CATALOG["advantage"]
    if not any(
        kind in table
        for table in (ESTIMATORS, WITH_MECHANISM, ELSEWHERE, WITH_CRITIC, WITH_TURN_CRITIC, WITH_TOLD_CRITIC, _APART)
    )
}
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
    "luffy": {"group_demonstrations": {}, "advantage": {"kind": "guided"}},
}
#: A figure of the log, and a number or another figure that it is above in some step.
Proof = tuple[str, float | str]
_COMPARED: Proof = ("credit/n_groups", "credit/n_zero_std_groups")
_MOVED: Proof = ("loss/ratio_max", 1.0)
_CLIPPED: Proof = ("loss/clip_high_share", 0.0)
_EXPLAINED: Proof = ("critic/explained_variance", 0.0)
#: What proves, of a run that learns, that what an estimator is about was there and acted.
ACTS: Mapping[str, Proof] = {
    **dict.fromkeys(OTHERS, _COMPARED),
    "grpo": _COMPARED,
    "dr_grpo": _COMPARED,
    "rloo": _COMPARED,
    "gigpo": ("credit/n_state_groups", 0.0),
    "reinforce_pp": ("credit/n_groups", "credit/n_zero_std_steps"),
    "hgpo": ("credit/n_state_groups", 0.0),
    "loop": ("credit/n_small_advantages", 0.0),
    "gae": _EXPLAINED,
    "turn_gae": _EXPLAINED,
    "bilevel_gae": _EXPLAINED,
    "archer": _EXPLAINED,
    "sweet": ("critic/pair_accuracy", 0.5),
    "tree_grpo": ("credit/n_trees", 0.0),
    "treerl": ("credit/n_shared_segments", 0.0),
    "guided": ("loss/off_policy_share", 0.0),
    "task_normalised": ("credit/n_task_types", 1.0),
    "duration_aware": ("credit/n_groups", "credit/n_untimed_trajectories"),
    "two_level": ("credit/n_options", "credit/n_singleton_options"),
    "seats": ("credit/n_seat_groups", 0.0),
    "reviews": ("credit/n_reviews", 0.0),
    "hicra": ("credit/n_planning_tokens", 0.0),
    "event_order": ("credit/n_order_bonus_groups", 0.0),
}
#: The same of the losses. Those that regress or imitate have no case in which they do not act: there the policy moved
#: away from the one that sampled.
LOSS_ACTS: Mapping[str, Proof] = {
    "ppo_clip": _CLIPPED,
    "reinforce": ("optimizer/n_updates", 0.0),
    "cispo": _CLIPPED,
    "gspo": _CLIPPED,
    "cpgd": _CLIPPED,
    "stable_reinforce": _CLIPPED,
    "rebel": _MOVED,
    "a_lol": _MOVED,
    "nft": _MOVED,
    "shiq": _MOVED,
    "rover": _MOVED,
    "kdrl": ("loss/teacher_token_share", 0.0),
    "luffy": ("loss/off_policy_share", 0.0),
    "min_entropy": ("loss/entropy", 0.0),
}


def stage_of_loss(loss: str) -> dict[str, Any]:
    """Return the keys of a stage that learns with `loss`; a `rewards` among them belongs to the recipe."""
    if loss in LOSSES:
        return dict(LOSSES[loss])
    return {**LOSSES["ppo_clip"], "loss": {"kind": loss}, **OTHER_LOSSES[loss]}
