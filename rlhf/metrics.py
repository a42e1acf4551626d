"""Every metric with its unit and meaning, and the names under which earlier releases logged it.

A name that is not in `METRICS` is an error, so that a curve cannot vanish through a misspelling. Names that end in
`/*` are families: `reward/*` admits `reward/format`. Units: `1` is a pure number, `share` lies in [0, 1].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from rlhf.errors import DataError, nearest

#: KL to the reference where there is one, else to the policy that sampled, from which a step's later updates move away.
KLS = ("loss/kl_ref", "loss/approx_kl")
#: Divergence in nats that is rounding: that of a step's only update.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric of the table.

    Attributes:
        name: as it appears in a log line; ends in `/*` for a family.
        unit: unit of the value.
        meaning: one line for the reader of a curve.
    """

    name: str
    unit: str
    meaning: str


_TABLE = """
rollout/success                 | share      | success rate of the episodes, excluding infrastructure errors
rollout/success_low             | share      | lower end of the 95% interval of rollout/success, clustered by task
rollout/success_high            | share      | upper end of the 95% interval of rollout/success, clustered by task
rollout/pass_at_k               | share      | pass@k, k the attempts per task: tasks solved by at least one attempt
rollout/pass_all_k              | share      | pass^k: tasks solved by every attempt, which carry no learning signal
rollout/score_agreement         | share      | pairs of a solved and an unsolved attempt that the score ranks correctly
rollout/return_mean             | 1          | mean return of the episodes
rollout/return_std              | 1          | standard deviation of the return over the episodes
rollout/n_episodes              | episodes   | attempts, including infrastructure errors
rollout/n_groups                | groups     | tasks attempted
rollout/n_generations           | calls      | generations of the policy
rollout/n_turns_mean            | turns      | mean number of turns per episode, excluding given ones
rollout/n_replayed_turns        | turns      | turns replayed because they were given or shared with another attempt
rollout/n_tokens                | tokens     | sampled tokens; tokens shared by several attempts count once
rollout/prompt_tokens_mean      | tokens     | mean prompt length
rollout/prompt_tokens_max       | tokens     | maximum prompt length
rollout/calls_per_turn          | calls      | generations of the policy per turn
rollout/tokens_per_s            | tokens/s   | generation throughput: sampled tokens per second of rollout
rollout/n_truncated_generations | calls      | generations truncated by the limit on new tokens
rollout/n_invalid_actions       | turns      | turns whose action could not be parsed or was invalid
rollout/invalid_share           | share      | share of turns with an invalid action
rollout/n_infra_errors          | attempts   | attempts lost to infrastructure errors, after all retries
rollout/infra_error_share       | share      | share of attempts lost to infrastructure errors
rollout/n_retries               | attempts   | attempts discarded and retried after an infrastructure error
rollout/n_solved                | episodes   | episodes that met the environment's success criterion
rollout/n_failed                | episodes   | episodes that the environment ended without success
rollout/n_turn_limit            | episodes   | episodes truncated by the turn limit
rollout/n_token_limit           | episodes   | episodes truncated because the context was full
rollout/n_timeout               | attempts   | attempts that timed out
rollout/n_env_error             | attempts   | attempts lost to an error of the environment
rollout/n_agent_error           | attempts   | attempts lost to an error of the agent
rollout/n_engine_error          | attempts   | attempts lost to an error of the inference engine
rollout/n_reward_error          | attempts   | attempts lost to an error of a reward
sampling/n_rounds               | rounds     | rounds of tasks sampled for the step
sampling/n_dropped_groups       | groups     | sampled groups that the selection dropped
sampling/advantage_scale_mean   | 1          | mean factor by which the selection scales a group's advantages
sampling/n_empty_steps          | steps      | consecutive steps without training data, including this one
sampling/n_skipped_tasks        | tasks      | tasks skipped because they were unlikely to give a learning signal
sampling/easy_share             | share      | share of attempted tasks that were too easy for a learning signal
sampling/hard_share             | share      | share of attempted tasks that were too hard for a learning signal
sampling/p_easy                 | 1          | base probability of sampling an easy task in the next step
sampling/p_hard                 | 1          | base probability of sampling a hard task in the next step
sampling/level                  | 1          | curriculum level of the step, or mean level of a ladder, from 0
sampling/top_share              | share      | share of ladder tasks sampled at their hardest level
sampling/level_mean             | 1          | mean of the promotion criterion over the level's last tasks
sampling/n_review_tasks         | tasks      | tasks of the step from earlier levels
asynchrony/staleness_mean       | versions   | mean staleness of the trained tokens: updates since their policy
asynchrony/staleness_max        | versions   | maximum staleness of the trained tokens
asynchrony/n_queued_groups      | groups     | finished groups waiting to be trained on, after the step
asynchrony/n_running_groups     | groups     | groups in progress, after the step
asynchrony/max_concurrent_groups | groups     | maximum groups in progress; 0 without rollout workers
asynchrony/n_restarted_groups   | groups     | groups restarted because their rollout worker was lost, in the stage
asynchrony/length_bias          | 1          | mean tokens of trained groups over those of finished groups
tokens_by_staleness/*           | share      | share of trained tokens with this staleness
asynchrony/tokens_generated     | tokens     | tokens sampled in the stage: the sum of the other four
asynchrony/tokens_trained       | tokens     | of these, tokens of trained groups
asynchrony/tokens_queued        | tokens     | of these, tokens of finished groups waiting to be trained on
asynchrony/tokens_running       | tokens     | of these, tokens of groups in progress
asynchrony/tokens_discarded     | tokens     | of these, tokens of failed or restarted attempts
replay/n_replayed               | episodes   | trajectories replayed from earlier steps
replay/n_kept                   | episodes   | trajectories in the replay buffer
replay/age_mean                 | steps      | mean age of the replayed trajectories
reward/self_certainty           | nats       | self-certainty of the policy, mean over attempts
offline_data/n_groups           | groups     | groups of other runs that were trained on
offline_data/n_stored           | groups     | groups that other runs had stored
sampling/prefix_turns_mean      | turns      | mean number of turns in the given prefix of a sampled task
sampling/initial_state_success  | share      | success rate of episodes from the initial state of their task
sampling/start_success          | share      | success rate of episodes from a later start state
sampling/stage                  | 1          | stage of a reverse curriculum; 0 is closest to the goal
sampling/n_stored               | states     | start states in the buffer
sampling/n_evicted              | states     | start states evicted from the buffer
sampling/priority_mean          | 1          | mean score variance, the priority of stored start states
reward/*                        | 1          | mean unweighted value of this reward
monitor/*                       | 1          | mean of this reward, which is monitored and not trained on
monitor_gap/*                   | 1          | mean training reward minus mean of this monitored reward
monitor_correlation/*           | 1          | correlation of training and monitored reward over the attempts
monitor_alarm/*                 | 1          | 1 if the training reward rises while the monitored one falls, else 0
monitor_failures/*              | attempts   | attempts that the monitored reward could not score
episodic_successes/*            | episodes   | successes in this reward's memory
episodic_failures/*             | episodes   | failures in this reward's memory
episodic_exploit/*              | 1          | mean negative distance to stored successes, not normalised
found_subgoals/*                | subgoals   | subgoals discovered: events that predict success
episodic_explore/*              | 1          | mean of 1 minus the largest cosine similarity to a stored failure
success_of/*                    | share      | success rate of tasks whose ids have this prefix, for mixed kinds
agent/n_subgoals_reached        | subgoals   | per episode, subgoals the executor declared done before the next
agent/*                         | 1          | notes of this name per episode (n_), their mean length (chars_)
store/n_entries                 | 1          | entries of the agent's store after the step
store/n_recalled                | 1          | entries retrieved for the attempts of the step, in total
store/retriever_loss            | nats       | mean cross-entropy of predicted helpfulness of retrieved entries
store/n_chars                   | characters | total length of everything the store shows, after the step
store/n_used                    | 1          | retrieved entries that the attempts cited or used
store/used_share                | share      | share of retrieved entries that the attempts cited or used
store/n_facts                   | 1          | facts in the graph
store/n_replaced                | 1          | facts superseded by newer ones
store/n_core                    | 1          | lines of core memory
store/n_episodic                | 1          | attempts in episodic memory
store/n_semantic                | 1          | facts in semantic memory
store/n_procedural              | 1          | procedures in procedural memory
store/n_merged                  | 1          | summaries merged into earlier ones
store/n_refused                 | 1          | replies, or parts of them, that the store could not parse
store/n_evolved                 | 1          | earlier notes whose context or tags were updated
store/n_linked                  | 1          | links requested between notes
custom/*                        | 1          | metric logged by a plugin
credit/n_groups                 | groups     | groups with computed advantages
credit/n_singleton_groups       | groups     | groups of one trajectory: no baseline, no signal
credit/n_zero_std_groups        | groups     | groups with zero score variance: no signal
credit/n_zero_std_steps         | steps      | steps with zero variance of the token advantages: no signal
credit/n_state_groups           | states     | environment states from which several turns of a group started
credit/n_singleton_states       | states     | environment states seen once: no state-level signal
credit/n_turns_without_state    | turns      | turns with unknown environment state: no state-level signal
credit/n_singleton_turns        | turns      | turns without a counterpart in another trajectory: no signal
credit/n_singleton_strata       | strata     | strata of one trajectory: compared with the whole group only
credit/n_small_advantages       | episodes   | trajectories whose advantage was below the threshold
credit/n_task_types             | types      | task types normalised separately
credit/n_untimed_trajectories   | episodes   | trajectories of unknown duration: weight 1
credit/n_options                | options    | options: subgoals pursued, and the turns before the first
credit/n_singleton_options      | options    | options without a counterpart in their group
credit/n_seat_groups            | groups     | groups of one seat of a game, whose attempts were compared
credit/n_reviews                | calls      | proposals reviewed by a critic
credit/right_reviews_share      | share      | share of reviews that accept a success or reject a failure
credit/accepted_reviews_share   | share      | share of accepting reviews; a constant 1 or 0 means no judgement
credit/n_planning_tokens        | tokens     | sampled tokens classified as planning
credit/n_order_bonus_groups     | groups     | questions whose correct answers got a bonus, since order helped
credit/n_trees                  | trees      | trees of several trajectories with the same first generation
credit/n_singleton_trees        | trees      | trajectories with a unique first generation: no tree baseline
credit/n_shared_segments        | segments   | maximal runs of generations shared by the same trajectories
batch/n_samples                 | rows       | rows given to the trainer
batch/n_tokens                  | tokens     | tokens in these rows, excluding padding
batch/n_policy_tokens           | tokens     | tokens trained on, where the loss mask is 1
batch/n_rewritten_prompts       | prompts    | prompts that do not extend the previous one and start a new row
batch/n_dropped_groups          | groups     | groups dropped because they have no learning signal
batch/n_dropped_trajectories    | episodes   | truncated trajectories dropped
batch/n_low_entropy_tokens      | tokens     | sampled tokens masked because of low entropy
batch/n_outliers                | episodes   | trajectories dropped because their advantage is an outlier
batch/n_trajectories_without_tokens | episodes   | trajectories without sampled tokens
batch/n_trained_trajectories    | episodes   | trajectories trained on, including replayed ones
loss/total                      | 1          | total loss
loss/policy                     | 1          | policy-gradient loss
loss/kl_ref                     | nats       | KL to the reference policy per token
loss/kl_clamped_share           | share      | share of tokens without KL gradient because k3 was clamped
reference/n_resets              | resets     | resets of the reference to the policy in the stage, before this step
loss/kl_coef                    | 1          | KL coefficient of the next step, if adaptive
loss/kl_teacher                 | nats       | KL to the teacher per token, k2; 0 on tokens it does not teach
loss/teacher_coef               | 1          | coefficient of the KL to the teacher
loss/teacher_token_share        | share      | share of tokens with a KL to the teacher
loss/off_policy_share           | share      | share of tokens not sampled by the policy
loss/entropy                    | nats       | entropy, or its estimate, over all tokens trained on, sampled or not
loss/clip_high_share            | share      | clip fraction: share of tokens clipped at the upper bound
loss/clip_low_share             | share      | clip fraction: share of tokens clipped at the lower bound
loss/clip_dual_share            | share      | clip fraction: tokens at the dual-clip bound, for negative advantages
loss/approx_kl                  | nats       | approximate KL to the policy that sampled the trajectories, k3
loss/ratio_mean                 | 1          | mean importance-sampling ratio of new to old policy
loss/ratio_max                  | 1          | maximum importance-sampling ratio of new to old policy
loss/sampler_logprob_diff_mean  | nats       | sampler/trainer mismatch: mean absolute difference of their log-probs
loss/sampler_logprob_diff_max   | nats       | sampler/trainer mismatch: maximum absolute difference of log-probs
loss/sampler_kl_k1              | nats       | KL between trainer and engine policy, k1; may be negative
loss/sampler_kl_k3              | nats       | KL between trainer and engine policy, k3
loss/sampler_ess                | share      | effective sample size of the trainer/engine weights, per token
loss/sampler_weight_mean        | 1          | mean trainer/engine importance weight of the kept tokens
loss/sampler_clipped_share      | share      | share of tokens with a truncated or clipped importance weight
loss/sampler_masked_share       | share      | share of tokens of weight 0 that still count in the denominators
loss/sampler_rejected_share     | share      | share of tokens rejected or vetoed, denominators included
loss/sampler_dropped_share      | share      | share of trajectories entirely rejected or vetoed
delivery/canary_gap             | nats       | maximum log-prob difference of engine and trainer on the canary prompt
delivery/canary_tolerance       | nats       | tolerance for canary_gap, from earlier weight deliveries
delivery/canary_moved           | nats       | change of the trainer's canary log-probs since the last delivery
collapse/group_std_mean         | 1          | mean within-group std of the score; falls as attempts become alike
collapse/zero_std_groups_share  | share      | share of groups with zero score variance
collapse/surprisal              | nats       | mean negative log-likelihood of the sampled tokens, estimates the entropy
collapse/echo_share             | share      | share of sampled 4-grams copied from the prompt of their generation
collapse/repeat_share           | share      | share of sampled 4-grams repeated within their generation
collapse/same_reply_share       | share      | share of generations identical to an earlier one of their trajectory
collapse/echo_trap              | 1          | 1 if score std, surprisal and return have all collapsed, else 0
collapse/grad_spike             | 1          | gradient norm over its median of the 20 previous steps
critic/loss                     | 1          | half the squared value error, mean over tokens and updates
critic/explained_variance       | 1          | explained variance of the returns by the values before the updates
critic/value_mean               | 1          | mean value before sampled tokens, before the updates
critic/return_mean              | 1          | mean value target
critic/clipped_share            | share      | clip fraction: share of tokens whose value was clipped, no gradient
critic/grad_norm                | 1          | gradient norm of the critic before clipping
critic/lr                       | 1          | learning rate of the critic's last update; its head's may differ
critic/q_loss                   | 1          | squared error of the two Q-values of a turn, summed, mean over updates
critic/v_loss                   | 1          | squared error of the two values of a state, summed, mean over updates
critic/target_std               | 1          | standard deviation of the Q-targets, mean over updates
critic/n_stored                 | turns      | turns in the critic's replay buffer, including this step's
critic/sum_loss                 | 1          | squared error of the turn contributions, summed, mean over updates
critic/outcome_loss             | 1          | cross-entropy of mean token rewards and outcomes, mean over updates
critic/outcome_accuracy         | share      | attempts whose mean token reward has the outcome's sign, before updates
critic/pair_loss                | 1          | loss of the critic on pairs of attempts at one task, mean over updates
critic/pair_accuracy            | share      | pairs that the critic ranks correctly before updates; ties ½
critic/n_pairs                  | pairs      | pairs of attempts at one task with different scores
critic/n_updates                | updates    | optimizer updates of the critic
critic/n_skipped                | updates    | critic updates skipped because of a non-finite gradient
optimizer/lr                    | 1          | learning rate of the last update
optimizer/grad_norm             | 1          | gradient norm before clipping
optimizer/changed_share         | share      | share of a sample of weights changed by an update, at model precision
routing/changed_share           | share      | replayed expert choices that the current routers would not make
optimizer/n_updates             | updates    | optimizer updates
optimizer/n_skipped             | updates    | updates skipped because of a non-finite gradient
train/tokens_per_s              | tokens/s   | training throughput: tokens of trained rows and epochs per second
train/mfu                       | share      | model FLOPs utilisation of the GPUs on these rows
supervised/loss                 | nats       | cross-entropy per demonstrated token
supervised/held_out_loss        | nats       | cross-entropy per demonstrated token on held-out rows
supervised/n_tokens             | tokens     | demonstrated tokens trained on
supervised/n_demonstrations     | episodes   | demonstrations, or kept attempts, trained on
supervised/n_calibrated         | episodes   | of these, attempts corrected from their first wrong step on
supervised/kept_tasks_share     | share      | share of the round's tasks with a kept attempt
preference/loss                 | 1          | mean loss per pair
preference/accuracy             | share      | share of pairs of which chosen has the higher implicit reward
preference/margin               | 1          | mean reward margin: beta times log-ratio of chosen minus rejected
preference/chosen_logp          | nats       | mean log-prob of the chosen side, summed over compared tokens
preference/rejected_logp        | nats       | mean log-prob of the rejected side, summed over compared tokens
preference/n_pairs              | pairs      | pairs of the stage
preference/kl                   | nats       | KTO's KL baseline z: mean log-ratio of mismatched replies, at least 0
preference/n_desirable          | replies    | KTO: desirable replies
preference/n_undesirable        | replies    | KTO: undesirable replies
preference/n_tasks              | tasks      | tasks of these pairs
preference/score_gap_mean       | 1          | mean score difference of a pair
reward_model/loss               | 1          | mean loss per pair
reward_model/train_accuracy     | share      | training pairs where chosen scored higher than rejected
reward_model/margin             | 1          | mean score margin of chosen minus rejected
reward_model/score_mean         | 1          | mean score of both sides
reward_model/n_held_out         | pairs      | held-out pairs, from tasks not trained on
reward_model/accuracy           | share      | held-out pairs where chosen scored higher than rejected
reward_model/accuracy_low       | share      | lower end of the 95% interval of reward_model/accuracy
reward_model/accuracy_high      | share      | upper end of the 95% interval of reward_model/accuracy
reward_model/n_attempts         | episodes   | labelled attempts, for a pointwise reward model
reward_model/n_labels           | 1          | labels of these attempts, one per attempt or per turn
reward_model/label_mean         | share      | mean of these labels
reward_model/calibration_error  | share      | expected calibration error
reward_refresh/n_refreshes      | 1          | refreshes of the reward model in the stage
reward_refresh/n_new            | 1          | new pairs or attempts since the last refresh, trained on
reward_refresh/n_replayed       | 1          | pairs or attempts of earlier policies, trained on again
reward_refresh/n_held_out       | pairs      | held-out pairs of recent attempts, never trained on
reward_refresh/accuracy_before  | share      | held-out accuracy before the refresh
reward_refresh/accuracy_before_low | share      | lower end of the 95% interval of reward_refresh/accuracy_before
reward_refresh/accuracy_before_high | share      | upper end of the 95% interval of reward_refresh/accuracy_before
reward_refresh/accuracy_after   | share      | held-out accuracy after the refresh
reward_refresh/accuracy_after_low | share      | lower end of the 95% interval of reward_refresh/accuracy_after
reward_refresh/accuracy_after_high | share      | upper end of the 95% interval of reward_refresh/accuracy_after
reward_refresh/loss             | 1          | mean loss per pair or label
reward_refresh/grad_norm        | 1          | mean gradient norm before clipping
reward_refresh/scale            | 1          | scale applied to the model's scores, initially 1
reward_refresh/shift            | 1          | shift added to the scaled scores, initially 0
judge_refresh/audit_accuracy    | share      | audit accuracy: pairs where the judge prefers the right attempt; ties ½
judge_refresh/audit_accuracy_low | share      | lower end of the 95% interval of judge_refresh/audit_accuracy
judge_refresh/audit_accuracy_high | share      | upper end of the 95% interval of judge_refresh/audit_accuracy
judge_refresh/n_audited         | pairs      | audit pairs, one per task
judge_refresh/tie_share         | share      | share of audit pairs that the judge calls a tie
judge_refresh/n_unparsed        | pairs      | audit pairs without a parseable verdict
judge_refresh/n_refreshes       | 1          | times the judge was replaced in the stage
judge_refresh/age               | steps      | steps since the judge's snapshot of the policy, or since the stage began
judge_refresh/audit_failed      | 1          | 1 if a judge failed its audit, which ends its refreshes, else 0
opponents/n_versions            | versions   | past policy versions available as opponents
opponents/share                 | share      | share of games with a past version in a seat
win_rate/*                      | share      | win rate, a draw ½, against a past version, or as first seat (current)
group_demonstrations/n_trajectories | episodes   | demonstrations added to the attempts of the step
group_demonstrations/n_unguided_groups | groups     | groups trained without a demonstration: none solves their task
group_demonstrations/return_mean | 1          | mean return of the added demonstrations
imitate_failed/n_failed_groups  | groups     | groups in which every attempt from the initial state failed
imitate_failed/n_waiting        | tasks      | demonstrated tasks queued for imitation, after the step
imitate_failed/n_imitated       | tasks      | tasks imitated in this step
imitate_failed/loss             | nats       | cross-entropy per token of their demonstrations
imitate_failed/grad_norm        | 1          | gradient norm of that update before clipping
eval/success                    | share      | success rate of the evaluation, excluding infrastructure errors
eval/success_low                | share      | lower end of the 95% interval of eval/success
eval/success_high               | share      | upper end of the 95% interval of eval/success
eval/n_episodes                 | episodes   | evaluation episodes, excluding infrastructure errors
eval/n_errors                   | attempts   | evaluation attempts lost to infrastructure errors
eval/return_mean                | 1          | mean return of the evaluation episodes
eval/n_turns_mean               | turns      | mean number of turns per evaluation episode
eval/version                    | 1          | evaluated policy version: the number of weight deliveries so far
time/rollout_s                  | s          | generating and scoring trajectories; asynchronous: the wait for them
time/trainer_idle_s             | s          | trainer idle, waiting for groups (asynchronous only)
time/rollout_idle_s             | s          | rollout idle, no group in progress (asynchronous only)
time/train_s                    | s          | loss, backward pass and updates
time/critic_s                   | s          | values and updates of the critic, part of time/train_s
time/audit_s                    | s          | auditing a judge, including the attempts it is audited on
time/reward_refresh_s           | s          | refreshing and evaluating the reward model
time/eval_s                     | s          | evaluation
time/publish_s                  | s          | weight delivery to the engine
time/step_s                     | s          | time/rollout_s and time/train_s
memory/rss_gb                   | GB         | resident memory of the process, 1e9 bytes
memory/peak_gb                  | GB         | peak resident memory of the process so far, 1e9 bytes
memory/gpu_peak_gb              | GB         | peak GPU memory allocated by the process's tensors so far, 1e9 bytes
"""

_RENAMED = """
rollout/n_failures rollout/n_infra_errors
rollout/error_share rollout/infra_error_share
rollout/solved_any_share rollout/pass_at_k
rollout/solved_all_share rollout/pass_all_k
asynchrony/age_mean asynchrony/staleness_mean
asynchrony/age_max asynchrony/staleness_max
asynchrony/n_at_once asynchrony/max_concurrent_groups
asynchrony/n_given_back asynchrony/n_restarted_groups
asynchrony/n_stored asynchrony/n_queued_groups
asynchrony/n_running asynchrony/n_running_groups
ledger/generated asynchrony/tokens_generated
ledger/trained asynchrony/tokens_trained
ledger/stored asynchrony/tokens_queued
ledger/running asynchrony/tokens_running
ledger/failed asynchrony/tokens_discarded
refresh/n_fresh reward_refresh/n_new
refresh/n_old reward_refresh/n_replayed
judge/n_unread judge_refresh/n_unparsed
judge/n_renewals judge_refresh/n_refreshes
judge/is_over judge_refresh/audit_failed
collapse/silent_groups_share collapse/zero_std_groups_share
credit/n_single_groups credit/n_singleton_groups
credit/n_state_singletons credit/n_singleton_states
credit/n_turns_alone credit/n_singleton_turns
credit/n_lone_options credit/n_singleton_options
credit/n_single_trees credit/n_singleton_trees
credit/n_single_strata credit/n_singleton_strata
credit/n_sides credit/n_seat_groups
credit/n_order_helped credit/n_order_bonus_groups
credit/n_shared_pieces credit/n_shared_segments
credit/n_flat_steps credit/n_zero_std_steps
sampling/factor_mean sampling/advantage_scale_mean
sampling/n_unused_groups sampling/n_dropped_groups
sampling/n_given_turns_mean sampling/prefix_turns_mean
sampling/beginning_success sampling/initial_state_success
loss/sampler_gap_mean loss/sampler_logprob_diff_mean
loss/sampler_gap_max loss/sampler_logprob_diff_max
loss/sampler_bounded_share loss/sampler_clipped_share
loss/kl_bounded_share loss/kl_clamped_share
loss/taught_share loss/teacher_token_share
preference/n_good preference/n_desirable
preference/n_bad preference/n_undesirable
preference/drift preference/kl
time/refresh_s time/reward_refresh_s
judge/* judge_refresh/*
watch/* monitor/*
watch_gap/* monitor_gap/*
watch_correlation/* monitor_correlation/*
watch_alarm/* monitor_alarm/*
watch_failures/* monitor_failures/*
expert/n_trajectories group_demonstrations/n_trajectories
expert/n_unguided_groups group_demonstrations/n_unguided_groups
expert/return_mean group_demonstrations/return_mean
logged/n_groups offline_data/n_groups
logged/n_stored offline_data/n_stored
refresh/* reward_refresh/*
relift/* imitate_failed/*
tokens_of_age/* tokens_by_staleness/*
"""


def _parse(table: str) -> Mapping[str, Metric]:
    rows = (tuple(cell.strip() for cell in line.split("|", 2)) for line in table.strip().splitlines())
    return MappingProxyType({name: Metric(name, unit, meaning) for name, unit, meaning in rows})


#: Every metric by its name.
METRICS: Mapping[str, Metric] = _parse(_TABLE)
_FAMILIES = tuple(name[:-1] for name in METRICS if name.endswith("/*"))

#: Old name -> present name, of metrics or, with `/*`, of all others below a prefix.
RENAMED_METRICS: Mapping[str, str] = MappingProxyType(dict(line.split() for line in _RENAMED.strip().splitlines()))


@lru_cache(maxsize=4096)
def present_name(name: str) -> str:
    """Present name of a metric that an earlier release may have logged under another.

    >>> [present_name(name) for name in ("judge/is_over", "judge/age", "loss/total")]
    ['judge_refresh/audit_failed', 'judge_refresh/age', 'loss/total']
    """
    prefix, _, rest = name.partition("/")
    new = RENAMED_METRICS.get(name) or RENAMED_METRICS.get(f"{prefix}/*", name)
    return new.replace("*", rest)


def describe(name: str) -> Metric:
    """Return the metric of that name, or the family that admits it.

    Raises:
        DataError: no such metric.
    """
    if name in METRICS and not name.endswith("/*"):
        return METRICS[name]
    for prefix in _FAMILIES:
        if name.startswith(prefix) and len(name) > len(prefix) and name != prefix + "*":
            return METRICS[prefix + "*"]
    raise DataError(
        "no such metric",
        where="metrics",
        got=repr(name),
        expected="a name of rlhf.metrics.METRICS, or custom/<name>",
        hint=nearest(name, METRICS) if (new := present_name(name)) == name else f"it is now called {new}",
    )
