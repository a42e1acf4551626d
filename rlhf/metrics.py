"""Every metric with its unit and meaning.

A name that is not in `METRICS` is an error, so that a curve cannot vanish through a misspelling. Names that end in
`/*` are families: `reward/*` admits `reward/format`. Units: `1` is a pure number, `share` lies in [0, 1].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rlhf.errors import DataError, nearest


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
rollout/success                 | share      | episodes whose success criterion was met, failures of parts left out
rollout/solved_any_share        | share      | tasks that an attempt solved: pass@k of as many attempts as a task has
rollout/solved_all_share        | share      | tasks that every attempt solved, which have nothing left to teach
rollout/score_agreement         | share      | pairs of a solved and an unsolved attempt at a task that the score tells
rollout/return_mean             | 1          | mean total score of the episodes
rollout/return_std              | 1          | standard deviation of the total score over the episodes
rollout/n_episodes              | episodes   | attempts, those included that ended by the failure of a part
rollout/n_groups                | groups     | tasks attempted
rollout/n_generations           | calls      | calls of the policy
rollout/n_turns_mean            | turns      | mean turns of an episode, those left out that were given to it
rollout/n_replayed_turns        | turns      | turns replayed because they were given, or shared with another attempt
rollout/n_tokens                | tokens     | sampled tokens; those that several attempts share count once
rollout/prompt_tokens_mean      | tokens     | mean length of a prompt
rollout/prompt_tokens_max       | tokens     | longest prompt
rollout/calls_per_turn          | calls      | calls of the policy per turn
rollout/tokens_per_s            | tokens/s   | sampled tokens per second of rollout
rollout/n_truncated_generations | calls      | generations cut by the limit on new tokens
rollout/n_invalid_actions       | turns      | turns whose action could not be read or was not understood
rollout/invalid_share           | share      | turns with an invalid action among all turns
rollout/n_failures              | attempts   | attempts that ended by the failure of a part, retries exhausted
rollout/error_share             | share      | attempts that ended by the failure of a part among all attempts
rollout/n_retries               | attempts   | attempts thrown away and repeated because a part failed
rollout/n_solved                | episodes   | episodes that met the environment's success criterion
rollout/n_failed                | episodes   | episodes that the environment ended without success
rollout/n_turn_limit            | episodes   | episodes cut by the limit on turns
rollout/n_token_limit           | episodes   | episodes cut because the context was full
rollout/n_timeout               | attempts   | attempts that took longer than allowed
rollout/n_env_error             | attempts   | attempts that ended by a failure of the environment
rollout/n_agent_error           | attempts   | attempts that ended by a failure of the agent
rollout/n_engine_error          | attempts   | attempts that ended by a failure of the engine
rollout/n_reward_error          | attempts   | attempts that ended by a failure of a reward
sampling/n_rounds               | rounds     | rounds of tasks drawn for the step
sampling/n_unused_groups        | groups     | groups drawn that the selection leaves out
sampling/factor_mean            | 1          | mean factor of the selection on the advantages of a group
sampling/n_empty_steps          | steps      | steps in a row, this one included, that had nothing to train on
sampling/n_skipped_tasks        | tasks      | tasks passed over in the step because they would likely teach nothing
sampling/easy_share             | share      | tasks attempted that were too easy to teach anything
sampling/hard_share             | share      | tasks attempted that were too hard to
sampling/p_easy                 | 1          | base of the chance that an easy task is drawn, for the next step
sampling/p_hard                 | 1          | base of the chance that a hard task is drawn, for the next step
sampling/level                  | 1          | level of the curriculum in the step, or mean rung of a ladder, from 0
sampling/top_share              | share      | tasks of a ladder that were drawn at their hardest
sampling/level_mean             | 1          | what the level is judged by, mean over its last tasks
sampling/n_review_tasks         | tasks      | tasks of the step that are of earlier levels
asynchrony/age_mean             | versions   | mean age of the trained tokens: updates since their policy
asynchrony/age_max              | versions   | age of the oldest of them
asynchrony/n_stored             | groups     | groups that are finished and wait to be trained, after the step
asynchrony/n_running            | groups     | groups that are being played, after the step
asynchrony/n_at_once            | groups     | most that may be played at a time; 0 without rollout workers
asynchrony/n_given_back         | groups     | groups begun again because whoever played them was gone, in the stage
asynchrony/length_bias          | 1          | mean tokens of a trained group over those of a finished one
tokens_of_age/*                 | share      | trained tokens that are so many versions old
ledger/generated                | tokens     | sampled in the stage: the sum of the other four
ledger/trained                  | tokens     | of these, of groups that were trained
ledger/stored                   | tokens     | of these, of groups that are finished and wait
ledger/running                  | tokens     | of these, of groups that are being played
ledger/failed                   | tokens     | of these, of attempts that failed or were begun again
replay/n_replayed               | episodes   | trajectories of earlier steps that were trained on again
replay/n_kept                   | episodes   | trajectories of earlier steps that could have been
replay/age_mean                 | steps      | mean age of the replayed trajectories
reward/self_certainty           | nats       | how sure the policy is of what it says, mean over attempts
logged/n_groups                 | groups     | of other runs that were trained on
logged/n_stored                 | groups     | that other runs had stored
sampling/n_given_turns_mean     | turns      | mean turns that a task drawn began with
sampling/beginning_success      | share      | solved episodes of those that began at the beginning of their task
sampling/start_success          | share      | solved episodes of those that began further on
sampling/stage                  | 1          | stage of a reverse curriculum, from 0, which is nearest to the goal
sampling/n_stored               | states     | start states in the buffer
sampling/n_evicted              | states     | start states that left the buffer
sampling/priority_mean          | 1          | mean variance of scores that start states were stored for
reward/*                        | 1          | mean unweighted value of this reward
watch/*                         | 1          | mean of this reward, which is watched and not trained on
watch_gap/*                     | 1          | mean of what is trained on less the mean of this watched reward
watch_correlation/*             | 1          | correlation of the two over the attempts of the step
watch_alarm/*                   | 1          | 1 where the one rises while the watched one falls, else 0
watch_failures/*                | attempts   | attempts that the watched reward could not judge
episodic_successes/*            | episodes   | successes that this reward remembers, as many as its bounds allow
episodic_failures/*             | episodes   | failures that this reward remembers
episodic_exploit/*              | 1          | mean of minus the distance to remembered successes, not normalised
episodic_explore/*              | 1          | mean of 1 less the largest cosine with a remembered failure
success_of/*                    | share      | solved episodes of the tasks whose ids begin so, where several kinds do
agent/n_subgoals_reached        | subgoals   | per episode, called done by the executor before another was named
agent/*                         | 1          | notes of this name per episode (n_), their mean characters (chars_)
store/n_entries                 | 1          | entries of the agent's store after the step
store/n_recalled                | 1          | entries that the attempts of the step were shown, in all
store/retriever_loss            | nats       | mean cross-entropy of how likely these were to help
store/n_chars                   | characters | length of everything that the store shows, after the step
store/n_used                    | 1          | entries of those shown that the attempts cited or used
store/used_share                | share      | of the entries that attempts were shown, those they used
store/n_facts                   | 1          | facts in the graph
store/n_replaced                | 1          | facts that newer ones have replaced
store/n_core                    | 1          | lines of the core
store/n_episodic                | 1          | attempts that are kept
store/n_semantic                | 1          | facts that are kept
store/n_procedural              | 1          | how-tos that are kept
store/n_merged                  | 1          | summaries that were merged into earlier ones
store/n_refused                 | 1          | replies, and parts of them, that a store could make nothing of
store/n_evolved                 | 1          | earlier notes that were given another context or other tags
store/n_linked                  | 1          | links that were asked for between notes
custom/*                        | 1          | figure reported by a plugged-in part
credit/n_groups                 | groups     | groups credit was computed for
credit/n_single_groups          | groups     | groups of one trajectory: no baseline, no signal
credit/n_zero_std_groups        | groups     | groups whose trajectories all scored the same: no signal
credit/n_flat_steps             | steps      | steps whose tokens would all get the same number: no signal
credit/n_state_groups           | states     | environment states that several turns of a group started from
credit/n_state_singletons       | states     | environment states seen once: no state-level signal
credit/n_turns_without_state    | turns      | turns whose environment state is not known: no state-level signal
credit/n_turns_alone            | turns      | turns that no other trajectory has a counterpart of: no signal
credit/n_single_strata          | strata     | strata of one trajectory: compared with the whole group only
credit/n_small_advantages       | episodes   | trajectories whose advantage was too small to count
credit/n_task_types             | types      | types of task that were normalised on their own
credit/n_untimed_trajectories   | episodes   | trajectories whose seconds are not known: weight 1
credit/n_options                | options    | subgoals that were pursued, and what came before the first
credit/n_lone_options           | options    | options that no other of their group is compared with
credit/n_sides                  | groups     | groups cut to one seat of a game, whose attempts were compared
credit/n_reviews                | calls      | proposals that a critic has read
credit/right_reviews_share      | share      | of them, those accepted in an attempt that succeeded, or else sent back
credit/accepted_reviews_share   | share      | of them, those that accept; 1 or 0 for long: it looks no more
credit/n_planning_tokens        | tokens     | sampled tokens taken for planning
credit/n_trees                  | trees      | trees of several trajectories that begin with the same generation
credit/n_single_trees           | trees      | trajectories that begin like no other: not compared within a tree
credit/n_shared_pieces          | pieces     | longest runs of generations that the same several trajectories share
batch/n_samples                 | rows       | rows given to the trainer
batch/n_tokens                  | tokens     | tokens in these rows, padding left out
batch/n_policy_tokens           | tokens     | tokens that are trained on
batch/n_rewritten_prompts       | prompts    | prompts that do not extend the one before: they begin a new row
batch/n_dropped_groups          | groups     | groups left out because nothing can be learned from them
batch/n_dropped_trajectories    | episodes   | trajectories left out because a limit cut them
batch/n_low_entropy_tokens      | tokens     | sampled tokens left out because the policy was sure of them
batch/n_outliers                | episodes   | trajectories left out because their advantage is far from the others'
batch/n_trajectories_without_tokens | episodes | trajectories in which the policy sampled nothing
batch/n_trained_trajectories    | episodes   | trajectories trained on, replayed ones included
loss/total                      | 1          | the number that is minimised
loss/policy                     | 1          | policy-gradient term
loss/kl_ref                     | nats       | divergence from the frozen reference per token
loss/kl_bounded_share           | share      | tokens that k3's bounds leave without a gradient to the reference
reference/n_resets              | resets     | times that the policy became the reference in the stage, before this step
loss/kl_coef                    | 1          | coefficient of that divergence in the next step, where it is adapted
loss/kl_teacher                 | nats       | divergence from the teacher per token, k2; 0 on tokens it does not teach
loss/teacher_coef               | 1          | coefficient of that divergence
loss/taught_share               | share      | tokens that the teacher teaches
loss/off_policy_share           | share      | tokens that another than the policy wrote
loss/entropy                    | nats       | entropy of the policy's next-token distribution
loss/clip_high_share            | share      | tokens whose ratio was clipped from above
loss/clip_low_share             | share      | tokens whose ratio was clipped from below
loss/clip_dual_share            | share      | tokens at the bound for negative advantages
loss/approx_kl                  | nats       | divergence from the policy that made the trajectories, k3
loss/ratio_mean                 | 1          | mean ratio of new to old probability
loss/ratio_max                  | 1          | largest ratio of new to old probability
loss/sampler_gap_mean           | nats       | mean absolute difference of the trainer's and the engine's log-probs
loss/sampler_gap_max            | nats       | largest absolute difference of the trainer's and the engine's log-probs
loss/sampler_kl_k1              | nats       | divergence of the trainer's policy from the engine's, k1; may be negative
loss/sampler_kl_k3              | nats       | divergence of the trainer's policy from the engine's, k3
loss/sampler_ess                | share      | effective sample size of the weights for that difference, per token
loss/sampler_weight_mean        | 1          | mean weight for that difference of a token that is kept
loss/sampler_bounded_share      | share      | tokens whose weight was brought to a bound
loss/sampler_masked_share       | share      | tokens of weight 0 that still count in the denominators
loss/sampler_rejected_share     | share      | tokens left out, denominators included, by rejection or veto
loss/sampler_dropped_share      | share      | trajectories of which rejection or veto left nothing
delivery/canary_gap             | nats       | largest difference of engine and trainer on the canary, after a delivery
delivery/canary_tolerance      | nats       | most that this may be, from what earlier deliveries showed
delivery/canary_moved           | nats       | how far the canary moved in the trainer since the last delivery
collapse/group_std_mean         | 1          | mean deviation of the score within groups; falls as attempts become alike
collapse/silent_groups_share    | share      | groups whose attempts all scored the same
collapse/surprisal              | nats       | mean -log p of the sampled tokens: the policy's entropy, estimated
collapse/echo_share             | share      | sampled 4-grams that stand in the prompt of their generation
collapse/repeat_share           | share      | sampled 4-grams that stand earlier in the same generation
collapse/same_reply_share       | share      | generations equal to an earlier one of their trajectory, token by token
collapse/echo_trap              | 1          | 1 where deviation, surprisal and return have all collapsed, else 0
collapse/grad_spike             | 1          | gradient norm over the median of the 20 steps before
critic/loss                     | 1          | half the squared error of the values, mean over tokens and updates
critic/explained_variance       | 1          | share of the returns' variance that the values told beforehand
critic/value_mean               | 1          | mean value of the states before sampled tokens, before the updates
critic/return_mean              | 1          | mean of what those values should have been
critic/clipped_share            | share      | tokens whose value moved as far as a step allows: no gradient
critic/grad_norm                | 1          | norm of the critic's gradient before clipping
critic/lr                       | 1          | learning rate of the critic's last update; its head's may differ
critic/q_loss                   | 1          | squared error of a turn's two Q-values, their sum, mean over updates
critic/v_loss                   | 1          | squared error of a state's two values, their sum, mean over updates
critic/target_std               | 1          | deviation of what the Q-values should have been, mean over updates
critic/n_stored                 | turns      | turns in the critic's buffer, those of the step included
critic/sum_loss                 | 1          | squared error of what the turns contributed, summed, mean over updates
critic/outcome_loss             | 1          | cross-entropy of mean token rewards and outcomes, mean over updates
critic/outcome_accuracy         | share      | attempts whose mean token reward has the outcome's sign, before it learns
critic/pair_loss                | 1          | loss of the critic on pairs of attempts at one task, mean over updates
critic/pair_accuracy            | share      | pairs of attempts that the critic ranks rightly before it learns; ties ½
critic/n_pairs                  | pairs      | pairs of attempts at one task of which one earned more
critic/n_updates                | updates    | parameter updates of the critic
critic/n_skipped                | updates    | updates of the critic left out because the gradient was not finite
optimizer/lr                    | 1          | learning rate of the last update
optimizer/grad_norm             | 1          | norm of the gradient before clipping
optimizer/changed_share         | share      | sampled weights that an update changed, in the model's number format
optimizer/n_updates             | updates    | parameter updates
optimizer/n_skipped             | updates    | updates left out because the gradient was not finite
train/tokens_per_s              | tokens/s   | tokens of the rows trained on, in each epoch, per second of training
train/mfu                       | share      | model FLOPs of these rows over what the GPUs could do in that time
supervised/loss                 | nats       | cross-entropy per demonstrated token
supervised/held_out_loss        | nats       | cross-entropy per learnt token of rows that are not trained on
supervised/n_tokens             | tokens     | demonstrated tokens trained on
supervised/n_demonstrations     | episodes   | demonstrations, or attempts kept, that were trained on
supervised/n_calibrated         | episodes   | of these, attempts that were corrected from their first bad step on
supervised/kept_tasks_share     | share      | tasks attempted in the round of which an attempt was kept
preference/loss                 | 1          | mean loss of a pair
preference/accuracy             | share      | pairs of which the policy raised the chosen side above the rejected one
preference/margin               | 1          | mean of beta times the log-ratio of chosen less rejected
preference/chosen_logp          | nats       | mean log-prob of the compared tokens of a chosen side, in all
preference/rejected_logp        | nats       | mean log-prob of the compared tokens of a rejected side, in all
preference/n_pairs              | pairs      | pairs of the stage
preference/drift                | nats       | of kto: z, the mean log-ratio of replies to other prompts, at least 0
preference/n_good               | replies    | of kto: replies that are good
preference/n_bad                | replies    | of kto: replies that are bad
preference/n_tasks              | tasks      | tasks that these pairs are of
preference/score_gap_mean       | 1          | mean difference of the scores of a pair
reward_model/loss               | 1          | mean loss of a pair
reward_model/train_accuracy     | share      | pairs of the update of which the chosen side scored higher
reward_model/margin             | 1          | mean score of the chosen side less that of the rejected one
reward_model/score_mean         | 1          | mean score of both sides
reward_model/n_held_out         | pairs      | pairs kept for judging the model, of tasks that it is not trained on
reward_model/accuracy           | share      | held-out pairs of which the chosen side scored higher
reward_model/accuracy_low       | share      | lower end of the 95% interval of reward_model/accuracy
reward_model/accuracy_high      | share      | upper end of the 95% interval of reward_model/accuracy
reward_model/n_attempts         | episodes   | attempts with labels, of a reward model that learns from single attempts
reward_model/n_labels           | 1          | labels of these attempts: one of each, or one of each of its turns
reward_model/label_mean         | share      | mean of these labels
reward_model/calibration_error  | share      | mean gap between how sure the model is and how often it is right
refresh/n_refreshes             | 1          | times that the reward model was trained further in the stage
refresh/n_fresh                 | 1          | pairs or attempts of the steps since the last time, learnt from
refresh/n_old                   | 1          | pairs or attempts of earlier policies, learnt from again
refresh/n_held_out              | pairs      | pairs of attempts of those steps that it is judged by, never taught
refresh/accuracy_before         | share      | held-out pairs that the model ranked rightly before it learnt
refresh/accuracy_before_low     | share      | lower end of the 95% interval of refresh/accuracy_before
refresh/accuracy_before_high    | share      | upper end of the 95% interval of refresh/accuracy_before
refresh/accuracy_after          | share      | the same once it has learnt
refresh/accuracy_after_low      | share      | lower end of the 95% interval of refresh/accuracy_after
refresh/accuracy_after_high     | share      | upper end of the 95% interval of refresh/accuracy_after
refresh/loss                    | 1          | mean loss of a pair, or of a label
refresh/grad_norm               | 1          | mean norm of the gradient before clipping
refresh/scale                   | 1          | factor with which the model's numbers are served, 1 at first
refresh/shift                   | 1          | what is added to them, 0 at first
judge/audit_accuracy            | share      | audited pairs of which a judge prefers the right attempt; ties ½
judge/audit_accuracy_low        | share      | lower end of the 95% interval of judge/audit_accuracy
judge/audit_accuracy_high       | share      | upper end of the 95% interval of judge/audit_accuracy
judge/n_audited                 | pairs      | pairs of the audit, one of each task
judge/tie_share                 | share      | of them, those that the judge finds equal
judge/n_unread                  | pairs      | of them, those on which it gives no verdict
judge/n_renewals                | 1          | times that another became the judge, in the stage
judge/age                       | steps      | steps since the judge was the policy; of the first, since the stage began
judge/is_over                   | 1          | 1 where one failed its audit, so that none is renewed any more, else 0
opponents/n_versions            | versions   | older versions of the policy that could have been played against
opponents/share                 | share      | games in which one of them had a seat
win_rate/*                      | share      | games won, a draw ½, against an older version, or as first seat (current)
expert/n_trajectories           | episodes   | demonstrations that joined the attempts of the step
expert/n_unguided_groups        | groups     | groups trained on without a demonstration: none solves their task
expert/return_mean              | 1          | mean total score of the demonstrations that joined
relift/n_failed_groups          | groups     | groups of which every attempt failed, from the beginning of the task
relift/n_waiting                | tasks      | tasks with a demonstration that wait to be imitated, after the step
relift/n_imitated               | tasks      | tasks imitated in this step
relift/loss                     | nats       | cross-entropy per token of their demonstrations
relift/grad_norm                | 1          | norm of the gradient of that update before clipping
eval/success                    | share      | evaluation episodes whose success criterion was met
eval/success_low                | share      | lower end of the 95% interval of eval/success
eval/success_high               | share      | upper end of the 95% interval of eval/success
eval/n_episodes                 | episodes   | evaluation episodes, failures of parts left out
eval/n_errors                   | attempts   | evaluation attempts that ended by the failure of a part
eval/return_mean                | 1          | mean total score of the evaluation episodes
eval/n_turns_mean               | turns      | mean turns of an evaluation episode
time/rollout_s                  | s          | making trajectories and scoring them
time/trainer_idle_s             | s          | the trainer waiting for groups, where these are played ahead
time/rollout_idle_s             | s          | no group being played, where these are played ahead
time/train_s                    | s          | computing the loss and updating
time/critic_s                   | s          | values of the critic and its updates, a part of time/train_s
time/audit_s                    | s          | auditing a judge, the attempts that it is audited by among it
time/refresh_s                  | s          | training the reward model further, and judging it
time/eval_s                     | s          | evaluating
time/publish_s                  | s          | giving new weights to the engine
time/step_s                     | s          | the whole step
memory/rss_gb                   | GB         | resident memory of the process, 1e9 bytes
memory/peak_gb                  | GB         | highest resident memory of the process so far, 1e9 bytes
memory/gpu_peak_gb              | GB         | most memory of the GPU that tensors of the process took so far, 1e9 bytes
"""


def _parse(table: str) -> Mapping[str, Metric]:
    rows = (tuple(cell.strip() for cell in line.split("|", 2)) for line in table.strip().splitlines())
    return MappingProxyType({name: Metric(name, unit, meaning) for name, unit, meaning in rows})


#: Every metric by its name.
METRICS: Mapping[str, Metric] = _parse(_TABLE)
_FAMILIES = tuple(name[:-1] for name in METRICS if name.endswith("/*"))


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
        hint=nearest(name, METRICS),
    )
