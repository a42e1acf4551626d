"""Key names of TRL, verl, OpenRLHF and transformers, with ours, for error messages.

A key of theirs is never taken for ours, as many mean something else by a little, such as a batch counted in completions
rather than in tasks. It is refused like every unknown key, and the message names ours.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rlhf.recipe.places import has_loss

#: Our key, as a path from the top of a recipe, `N` the number of a stage: theirs.
_OURS = """
stages.N.optimizer.lr: learning_rate actor_learning_rate step_size actor_lr
stages.N.critic.optimizer.lr: critic_learning_rate critic_lr
stages.N.optimizer.schedule: lr_scheduler_type lr_scheduler lr_warmup_style
stages.N.optimizer.warmup_steps: lr_warmup_steps num_warmup_steps warmup warmup_ratio lr_warmup_ratio
  lr_warmup_steps_ratio
stages.N.sft_coef: rpo_alpha nll_loss_coef
stages.N.optimizer.betas: adam_betas adam_beta1 adam_beta2
stages.N.optimizer.eps: adam_epsilon adam_eps
stages.N.optimizer.weight_decay: l2 adam_weight_decay
stages.N.optimizer.max_grad_norm: max_norm grad_clip clip_grad gradient_clipping
stages.N.steps: max_steps total_training_steps num_iterations_total total_steps train_steps n_steps num_steps
  iterations n_iterations num_train_epochs num_epochs total_epochs num_episodes
stages.N.epochs: max_epochs ppo_epochs num_ppo_epochs num_iterations
stages.N.group_size: num_generations n_samples_per_prompt rollout_n num_return_sequences n_rollouts
stages.N.tasks_per_step: train_batch_size rollout_batch_size per_device_train_batch_size prompts_per_step
  gen_batch_size batch_size global_batch_size rollout_batch prompts_per_batch
stages.N.minibatches: gradient_accumulation_steps gradient_accumulation grad_accum ppo_mini_batch_size
  num_mini_batches mini_batch_size minibatch_size
stages.N.max_tokens_per_microbatch: micro_train_batch_size micro_batch_size ppo_micro_batch_size
  ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu
stages.N.trainer.gradient_checkpointing: gradient_checkpointing_enable enable_gradient_checkpointing
stages.N.loss.kl_coef: beta init_kl_coef kl_loss_coef kl_ctrl kl_penalty_coef kl_beta kl_coeff kl_weight kl_coef
stages.N.loss.kl: use_kl_loss kl_loss_type kl_estimator kl_penalty
stages.N.loss.kl_target: target_kl kl_target_value
stages.N.loss.clip_low: epsilon eps_clip clip_ratio cliprange clip_ratio_low clip_eps clip_epsilon clip_range clip
  epsilon_low
stages.N.critic.clip: cliprange_value value_clip clip_range_vf
stages.N.loss.clip_high: epsilon_high clip_ratio_high eps_clip_high
stages.N.loss.dual_clip: delta clip_ratio_c dual_clip_ratio
stages.N.loss.entropy_coef: entropy_coeff entropy_bonus ent_coef entropy_loss_coef
stages.N.reduction.kind: loss_agg_mode loss_type loss_aggregation
stages.N.correction.max_weight: vllm_importance_sampling_cap tis_imp_ratio_cap
stages.N.filters.drop_truncated: mask_truncated_completions overlong_filtering
stages.N.advantage.kind: adv_estimator advantage_estimator algorithm algo
stages.N.advantage.normalize_std: scale_rewards norm_adv_by_std_in_grpo use_std_normalization normalize_advantages
stages.N.advantage.whiten: whiten_advantages
stages.N.advantage.lam: gae_lambda lambd lambda
stages.N.advantage.gamma: discount discount_factor
stages.N.critic: use_critic critic_model value_model
stages.N.advantage.step_weight: step_advantage_w
limits.max_tokens: max_completion_length max_new_tokens max_response_length generate_max_len response_length
limits.max_context: max_prompt_length prompt_max_len max_length max_seq_length max_model_len max_seq_len
limits.stop_strings: stop stop_sequences
limits.max_turns: max_tool_calling_iterations max_assistant_turns max_interactions
stages.N.temperature: rollout_temperature
agent.system: system_prompt system_message
policy.path: model_name_or_path model_name pretrain model_path base_model
policy.dtype: torch_dtype bf16 fp16 mixed_precision precision
policy.lora: peft_config use_peft lora_config
policy.lora.rank: lora_rank lora_r
policy.lora.alpha: lora_alpha
policy.lora.dropout: lora_dropout
policy.lora.target_modules: lora_target_modules
policy.lora.quantization: load_in_4bit load_in_8bit quantization_config
policy.template: chat_template chat_template_path
engine.kind: use_vllm rollout_engine backend vllm
engine.tensor_parallel: tensor_parallel_size tensor_model_parallel_size vllm_tensor_parallel_size
stages.N.trainer.kind: deepspeed fsdp strategy_type
asynchrony.staleness: max_staleness off_policy_steps
engine.gpu_memory_utilization: vllm_gpu_memory_utilization
name: run_name experiment_name exp_name
seed: random_seed data_seed
stages.N.evaluate_every: eval_steps test_freq eval_interval
stages.N.checkpoint_every: save_steps save_freq save_interval
stages.N.keep_checkpoints: save_total_limit max_ckpt_num
evaluation.n_tasks: max_eval_samples n_eval eval_size
trackers: report_to log_with logger use_wandb wandb tensorboard project_name wandb_project
push_to_hub: hub_model_id hub_repo
rewards: reward_fn reward_funcs reward_function reward
environment: env env_name env_id train_dataset dataset data
environment.train: train_file train_files prompt_data
environment.test: eval_dataset val_dataset val_files eval_data test_dataset
rewards.NAME.weight: reward_weights
policy: model
"""
#: Of theirs: our key.
ALIASES: Mapping[str, str] = {
    theirs: ours
    for ours, names in (line.split(":") for line in _OURS.replace("\n  ", " ").strip().split("\n"))
    for theirs in names.split()
}

_TASKS = "which counts tasks; a step has tasks_per_step x group_size attempts (a supervised stage has batch_size)"
_UPDATES = "the updates of a step; gradients are accumulated over micro-batches by themselves"
_NUMBER = "the number of updates that a step is split into, not their size"
_PASSES = "which counts steps; stages.N.epochs are the passes over the attempts of one step, or over demonstrations"
_CONTEXT = "which is the prompt and the generation together"
_OTHER_SIDE = "and loss.clip_high for the other side"
_TRACKERS = "a list: trackers: [{kind: wandb, project: NAME}]"
#: Theirs that count something else: what to know.
_BESIDE: Mapping[str, str] = {
    **dict.fromkeys(("per_device_train_batch_size", "train_batch_size", "batch_size", "global_batch_size"), _TASKS),
    **dict.fromkeys(("gradient_accumulation_steps", "gradient_accumulation", "grad_accum"), _UPDATES),
    **dict.fromkeys(("ppo_mini_batch_size", "mini_batch_size", "minibatch_size"), _NUMBER),
    **dict.fromkeys(("warmup_ratio", "lr_warmup_ratio", "lr_warmup_steps_ratio"), "which counts steps"),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "total_epochs", "num_episodes"), _PASSES),
    "num_iterations": "passes over the attempts of a step; the number of steps is stages.N.steps",
    **dict.fromkeys(("max_prompt_length", "prompt_max_len", "max_length", "max_seq_length", "max_seq_len"), _CONTEXT),
    **dict.fromkeys(("max_completion_length", "max_response_length", "max_new_tokens"), "of one generation of a turn"),
    **dict.fromkeys(("epsilon", "clip_ratio", "eps_clip", "cliprange"), _OTHER_SIDE),
    **dict.fromkeys(("clip_eps", "clip_epsilon", "clip_range", "clip"), _OTHER_SIDE),
    **dict.fromkeys(("beta", "kl_beta", "kl_coeff"), "with loss.kl: k3, the estimator"),
    **dict.fromkeys(("scale_rewards", "normalize_advantages"), "of grpo; gigpo calls it normalize"),
    **dict.fromkeys(("bf16", "fp16"), "bfloat16 or float32"),
    **dict.fromkeys(("use_vllm", "vllm"), "vllm or transformers"),
    **dict.fromkeys(("deepspeed", "fsdp"), "torch, deepspeed or fsdp"),
    **dict.fromkeys(("report_to", "log_with", "logger", "use_wandb", "wandb", "project_name"), _TRACKERS),
}

_OUT = "the folder of a run is no key: rlhf train RECIPE --out FOLDER, or rlhf.train(..., out=FOLDER)"
_PROCESSES = (
    "processes are no key: rlhf train RECIPE --nproc N, with trainer: {kind: fsdp} or {kind: deepspeed} in stages"
)
_WHOLE = (
    "not supported in training: attempts are sampled from the full softmax, so that the sampler's log-probs are the "
    "trainer's; temperature is a key of stages and of evaluation"
)
_REFERENCE = (
    "the reference of the KL term is the policy at the start of a stage: stages.N.loss: {..., kl: k3, kl_coef: ...}"
)
#: Theirs that no recipe has: what there is instead.
_INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("output_dir", "save_dir", "save_path", "ckpt_path", "default_local_dir", "out"), _OUT),
    **dict.fromkeys(("num_gpus", "n_gpus", "n_gpus_per_node", "nnodes", "num_processes", "nproc"), _PROCESSES),
    **dict.fromkeys(("top_p", "top_k", "min_p", "repetition_penalty"), _WHOLE),
    **dict.fromkeys(("ref_model", "reference_model", "ref_policy"), _REFERENCE),
    **dict.fromkeys(
        ("tokenizer", "tokenizer_name_or_path", "processing_class"), "the tokenizer is that of policy.path"
    ),
    **dict.fromkeys(("vf_coef", "value_coef"), "a critic has its own optimizer: stages.N.critic.optimizer"),
    **dict.fromkeys(("optim", "optimizer_type"), "the optimizer is AdamW; its keys are those of stages.N.optimizer"),
    **dict.fromkeys(("logging_steps", "log_freq", "log_interval"), "remove the key: every step is logged"),
    "packing": "remove the key: rows are packed, up to max_tokens_per_microbatch",
    **dict.fromkeys(
        ("completion_only_loss", "assistant_only_loss"), "remove the key: only what an agent says is trained"
    ),
    **dict.fromkeys(("resume", "resume_from_checkpoint"), "a run is resumed by: rlhf train --resume RUN"),
}

#: Key of a policy-gradient stage: what other kinds of stages call it.
IN_OTHER_STAGES: Mapping[str, tuple[str, ...]] = {
    "tasks_per_step": ("batch_size",),
    "group_size": ("rejection_sampling.group_size",),
    "steps": ("epochs",),
    "minibatches": ("max_tokens_per_microbatch", "pairs_per_microbatch"),
    "max_tokens_per_microbatch": ("pairs_per_microbatch",),
    "trainer.gradient_checkpointing": ("gradient_checkpointing",),
    "loss.kl_coef": ("beta",),
}
_FITTING = "what fits a forward pass; gradients are accumulated by themselves until there are batch_size"
_COUNTS: Mapping[str, str] = {
    "batch_size": "what one update learns from",
    "epochs": "passes over the data of the stage",
    **dict.fromkeys(("max_tokens_per_microbatch", "pairs_per_microbatch"), _FITTING),
}


def alias_hint(theirs: str, stage: Collection[str] | None = None) -> str:
    """Hint for a key of another toolkit, '' where unknown; `stage` has the keys of the stage in which it stands."""
    name = theirs.removeprefix("actor_").removeprefix("algorithm_") if theirs not in ALIASES else theirs
    if stage is not None and "pairs" in stage and ALIASES.get(name) == "limits.max_context":
        return "rows of pairs may be as long as the policy's context, policy.max_context: take longer ones out"
    if name in _INSTEAD:
        own = stage is not None and "reference" in stage and _INSTEAD[name] == _REFERENCE
        return "the reference is stages.N.reference: start, base or none" if own else _INSTEAD[name]
    if name not in ALIASES:
        return ""
    path, beside = ALIASES[name], _BESIDE.get(name, "")
    if stage is not None and path.startswith("stages.N."):
        path, beside = _in_stage(path, beside, stage)
    return f"what other toolkits call {theirs} is {path} here{f', {beside}' if beside else ''}"


def _in_stage(path: str, beside: str, stage: Collection[str]) -> tuple[str, str]:
    """Path and note in a stage with these keys, which may call it otherwise or have nothing of the kind."""
    own = path.removeprefix("stages.N.")
    if own.partition(".")[0] in stage and (has_loss(stage) or not own.startswith("loss.")):
        return path, beside
    other = next((key for key in IN_OTHER_STAGES.get(own, ()) if key.partition(".")[0] in stage), None)
    return (path, "in policy_gradient stages only") if other is None else (f"stages.N.{other}", _COUNTS.get(other, ""))
