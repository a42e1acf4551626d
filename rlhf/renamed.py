"""Recipe keys that changed their name or are gone, read for one release."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlhf.errors import RecipeError, RenamedWarning

_CRITICS = (
    "rlhf.training.critics.values:Critic",
    "rlhf.training.contrib.critics.archer:ArcherCritic",
    "rlhf.training.contrib.critics.contributions:Contributions",
)

_TOOL_PLACES = {"text": "system_prompt", "template": "chat_template"}

#: A class, and its keys that changed: old=new, or old= where the key had no effect.
_KEYS = """
rlhf.training.stages.policy_gradient:PolicyGradient judge_renewal=judge_refresh relift=imitate_failed
  token_figures=token_stats expert=group_demonstrations logged=offline_data trains=train_roles
rlhf.training.stages.supervised:Supervised attempts=rejection_sampling
rlhf.training.stages.preference:Preference good_weight=desirable_weight imitation_weight=sft_coef
rlhf.training.backends.optimizer:AdamW final_lr_share=min_lr_ratio
rlhf.credit.contrib.two_level:TwoLevel high=planner low=executor low_reward=executor_reward
rlhf.credit.contrib.ktae:KTAE top=max_bonus
rlhf.credit.contrib.hicra:HICRA begin=plan_start_ids end=plan_end_ids
rlhf.credit.contrib.actor_critic_agents:Reviews above=correct_above
rlhf.training.policy.lora:Lora targets=target_modules
rlhf.training.backends.settings:DeepSpeed zero=zero_stage keep_whole_below=param_persistence_threshold
rlhf.inference.settings:VllmSettings gpu_memory_share=gpu_memory_utilization
rlhf.asynchrony.settings:Asynchrony depth=max_steps_ahead schedule=weight_update
rlhf.rollout.limits:Limits max_calls=max_generations_per_turn
rlhf.evaluation.evaluate:Evaluation watch_split=validation_split watch_n_tasks=validation_n_tasks
agents.tools:ToolAgent style=tool_format through=tool_definitions max_calls=max_calls_per_reply
  max_uses=max_calls_per_tool
rlhf.gateway.agent:ExternalAgent style=tool_format through=tool_definitions max_calls=max_calls_per_reply
rlhf.training.contrib.reference_reset:ReferenceReset kl_above=max_kl
rlhf.training.contrib.judge_refresh_settings:JudgeRefresh least=min_accuracy enough=success_threshold
  solved_at=success_threshold
rlhf.training.contrib.node_merging:Merging longest=max_turns least_children=min_children
rlhf.training.contrib.reward_refresh_settings:RewardRefresh enough=success_threshold solved_at=success_threshold
  old_share=replay_share
rlhf.training.stages.reward_model:RewardModel enough=success_threshold solved_at=success_threshold learns=objective
rlhf.losses.contrib.kdrl:KDRL right_above=correct_above
rlhf.gateway.environment:External at_once=max_concurrent world=environment solved_at=success_threshold
rlhf.rollout.contrib.budgets:Budgets say=prompt
environments.contrib.bandit:Bandit guests=n_contexts solved_at=success_threshold
environments.contrib.matrix_game:MatrixGame solved_at=success_threshold
environments.contrib.reasoning_gym:ReasoningGym solved_at=success_threshold
environments.contrib.textarena.environment:TextArena solved_at=success_threshold
environments.contrib.remote.openenv:OpenEnv success_from=success_threshold
rlhf.training.contrib.critics.sweet:SweetCritic told=privileged_text
rlhf.training.stages.chat_settings:Chats least=min_score
rlhf.rollout.reward_monitor:RewardMonitor of=compare_with
rewards.answers.tags:Format then=transitions
rewards.combinators.combine:Combine closed=gated_score low=min_value high=max_value
rewards.combinators.combine:Part low=min_value high=max_value
rewards.sandbox.container:Container at_once=max_concurrent
rewards.answers.pattern:Pattern of=match_in
rewards.contrib.episodic_memory:EpisodicMemory of=success_reward above=correct_above
rewards.contrib.fluency:LanguageConsistency enough=min_share
rewards.contrib.guides:Feedback show_reference=
rewards.contrib.guides:Subgoals most=max_subgoals show_reference=
rewards.contrib.page_action:PageAction least=min_score
rewards.contrib.proxy_answer:ProxyAnswer show_reference=
rewards.contrib.search:CostAware kept=format_score c=cost_weight low=min_sqrt_cost high=max_sqrt_cost
rewards.contrib.search:Called least=min_calls
rewards.contrib.found_subgoals:FoundSubgoals most=max_subgoals
rewards.contrib.search:SearchEfficiency tried=searched_wrong_score
rewards.judges.asking:AsksModel tries=max_requests concurrent=max_concurrent request_s=request_timeout_s
  max_characters=max_chars
rewards.models.reward_model:ProcessModelScore credit=aggregation
rewards.judges.judge:Principles most=max_difference
rewards.shaping.length:Concise enough=min_correct
agents.contrib.critic:ActorCritic again=revision_message
agents.stores.contrib.facts:Pattern single=exclusive
agents.stores.cases:Cases own=include_same_task
agents.stores.contrib.graph:Graph own=include_same_task
agents.stores.contrib.reflection:Reflection own=include_same_task
agents.stores.contrib.typed:Typed own=include_same_task asks=ask_policy
rlhf.training.critics.values:Critic trunk=backbone
rlhf.training.contrib.critics.archer:ArcherCritic trunk=backbone
rlhf.training.contrib.critics.contributions:Contributions trunk=backbone
"""
#: By the class whose keys they are, or a base of it: old name -> new name; None where the key had no effect.
RENAMED_KEYS: Mapping[str, Mapping[str, str | None]] = {
    cls: {old: new or None for old, new in (pair.split("=") for pair in pairs)}
    for cls, *pairs in map(str.split, _KEYS.strip().replace("\n  ", " ").split("\n"))
}

#: By class and key: old value -> new value.
RENAMED_VALUES: Mapping[tuple[str, str], Mapping[str, str]] = {
    **{(critic, "gradient"): {"trunk": "backbone"} for critic in _CRITICS},
    ("rlhf.asynchrony.settings:Asynchrony", "weight_update"): {"clock": "immediate", "fixed": "deterministic"},
    ("rlhf.asynchrony.settings:Asynchrony", "checkpoint"): {"now": "restart"},
    ("rlhf.training.stages.reward_model:RewardModel", "objective"): {"pairs": "pairwise", "steps": "process"},
    ("rlhf.gateway.environment:External", "reward"): {"posted": "client", "world": "environment"},
    ("agents.tools:ToolAgent", "tool_definitions"): _TOOL_PLACES,
    ("rlhf.gateway.agent:ExternalAgent", "tool_definitions"): _TOOL_PLACES,
}


#: By section: old kind -> new kind.
RENAMED_KINDS: Mapping[str, Mapping[str, str]] = {
    "environment": {"processes": "worker_processes"},
    "sampler": {"exit": "exploratory_iteration"},
    "selection": {"uncertain": "variance_filter"},
}

#: Keys of every reward, whose class knows nothing of them: old name -> new name.
RENAMED_OF_REWARDS: Mapping[str, str] = {"watch": "monitor", "solved_at": "success_threshold"}


@contextmanager
def without_warnings() -> Iterator[None]:
    """Context in which old names are read silently: those of a record, which nobody is to change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RenamedWarning)
        yield


def with_new_keys(cls: type, values: Mapping[Any, Any], path: str) -> Mapping[Any, Any]:
    """Return `values` under the present names of its keys, with a warning for each old one.

    Raises:
        RecipeError: a key is given under both names.
    """
    names = [f"{base.__module__}:{base.__qualname__}" for base in cls.__mro__]
    new_keys = {old: new for name in names for old, new in RENAMED_KEYS.get(name, {}).items()}
    found = under_new_names(values, new_keys, path)
    for (name, key), values_of in RENAMED_VALUES.items():
        if name in names and isinstance(value := found.get(key), str) and value in values_of:
            found[key] = values_of[value]
            _warn(f"{path}.{key}: {value}".lstrip("."), found[key], value)
    return found


def with_new_kind(section: str, kind: str, path: str) -> str:
    """Return the present name of a kind, with a warning where it is another one."""
    new = RENAMED_KINDS.get(section, {}).get(kind, kind)
    if new != kind:
        _warn(f"{path}.kind: {kind}".lstrip("."), new, kind)
    return new


def under_new_names(values: Mapping[Any, Any], new_keys: Mapping[str, str | None], path: str) -> dict[Any, Any]:
    """Return `values` with its keys renamed as `new_keys` says, with a warning for each old one.

    Raises:
        RecipeError: a key is given under both names.
    """
    renamed = {old: new for old, new in new_keys.items() if old in values}
    for old, new in renamed.items():
        where = f"{path}.{old}" if path else old
        if new is None:
            warnings.warn(f"{where} has no effect; the next release refuses it", RenamedWarning, stacklevel=2)
            continue
        if new in values:
            raise RecipeError(
                "a key is given under both its old and its new name",
                where=where,
                got=f"{old} and {new}",
                expected=f"{new} alone",
                hint=f"remove {old}: it is now called {new}",
            )
        _warn(where, new, old)
    return {renamed.get(key, key): value for key, value in values.items() if renamed.get(key, key) is not None}


def other_names(name: str) -> Iterator[str]:
    """Yield the names that a key of this name has, in some class, after or before a renaming."""
    for keys in (*RENAMED_KEYS.values(), RENAMED_OF_REWARDS):
        for old, new in keys.items():
            if new is not None and name in (old, new):
                yield new if name == old else old


def _warn(where: str, new: str, old: str) -> None:
    warnings.warn(f"{where} is now called {new}; the next release no longer reads {old}", RenamedWarning, stacklevel=4)
