"""Key names of TRL, verl, OpenRLHF and transformers, with ours, for error messages.

A key of theirs is never taken for ours, as many mean something else by a little, such as a batch counted in completions
rather than in tasks. It is refused like every unknown key, and the message names ours.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rlhf.recipe.places import has_loss

#: Of theirs: our key, as a path from the top of a recipe; `N` is the number of a stage.
ALIASES: Mapping[str, str] = {
    # optimizer
    **dict.fromkeys(("learning_rate", "actor_learning_rate", "step_size", "actor_lr"), "stages.N.optimizer.lr"),
    **dict.fromkeys(("critic_learning_rate", "critic_lr"), "stages.N.critic.optimizer.lr"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "lr_warmup_style"), "stages.N.optimizer.schedule"),
    **dict.fromkeys(("lr_warmup_steps", "num_warmup_steps", "warmup"), "stages.N.optimizer.warmup_steps"),
    **dict.fromkeys(("warmup_ratio", "lr_warmup_ratio", "lr_warmup_steps_ratio"), "stages.N.optimizer.warmup_steps"),
    **dict.fromkeys(("rpo_alpha", "nll_loss_coef"), "stages.N.sft_coef"),
    **dict.fromkeys(("adam_betas", "adam_beta1", "adam_beta2"), "stages.N.optimizer.betas"),
    **dict.fromkeys(("adam_epsilon", "adam_eps"), "stages.N.optimizer.eps"),
    **dict.fromkeys(("l2", "adam_weight_decay"), "stages.N.optimizer.weight_decay"),
    **dict.fromkeys(("max_norm", "grad_clip", "clip_grad", "gradient_clipping"), "stages.N.optimizer.max_grad_norm"),
    # how much is attempted, and how it is split
    **dict.fromkeys(("max_steps", "total_training_steps", "num_iterations_total"), "stages.N.steps"),
    **dict.fromkeys(
        ("total_steps", "train_steps", "n_steps", "num_steps", "iterations", "n_iterations"), "stages.N.steps"
    ),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "total_epochs", "num_episodes"), "stages.N.steps"),
    **dict.fromkeys(("max_epochs", "ppo_epochs", "num_ppo_epochs", "num_iterations"), "stages.N.epochs"),
    **dict.fromkeys(
        ("num_generations", "n_samples_per_prompt", "rollout_n", "num_return_sequences", "n_rollouts"),
        "stages.N.group_size",
    ),
    **dict.fromkeys(
        ("train_batch_size", "rollout_batch_size", "per_device_train_batch_size", "prompts_per_step", "gen_batch_size"),
        "stages.N.tasks_per_step",
    ),
    **dict.fromkeys(
        ("batch_size", "global_batch_size", "rollout_batch", "prompts_per_batch"),
        "stages.N.tasks_per_step",
    ),
    **dict.fromkeys(("gradient_accumulation_steps", "gradient_accumulation", "grad_accum"), "stages.N.minibatches"),
    **dict.fromkeys(("ppo_mini_batch_size", "num_mini_batches"), "stages.N.minibatches"),
    **dict.fromkeys(("mini_batch_size", "minibatch_size"), "stages.N.minibatches"),
    **dict.fromkeys(
        ("micro_train_batch_size", "micro_batch_size", "ppo_micro_batch_size", "ppo_max_token_len_per_gpu"),
        "stages.N.max_tokens_per_microbatch",
    ),
    "ppo_micro_batch_size_per_gpu": "stages.N.max_tokens_per_microbatch",
    "gradient_checkpointing_enable": "stages.N.trainer.gradient_checkpointing",
    "enable_gradient_checkpointing": "stages.N.trainer.gradient_checkpointing",
    # loss
    **dict.fromkeys(("beta", "init_kl_coef", "kl_loss_coef", "kl_ctrl", "kl_penalty_coef"), "stages.N.loss.kl_coef"),
    **dict.fromkeys(("kl_beta", "kl_coeff", "kl_weight", "kl_coef"), "stages.N.loss.kl_coef"),
    **dict.fromkeys(("use_kl_loss", "kl_loss_type", "kl_estimator", "kl_penalty"), "stages.N.loss.kl"),
    **dict.fromkeys(("target_kl", "kl_target_value"), "stages.N.loss.kl_target"),
    **dict.fromkeys(("epsilon", "eps_clip", "clip_ratio", "cliprange", "clip_ratio_low"), "stages.N.loss.clip_low"),
    **dict.fromkeys(("clip_eps", "clip_epsilon", "clip_range", "clip", "epsilon_low"), "stages.N.loss.clip_low"),
    **dict.fromkeys(("cliprange_value", "value_clip", "clip_range_vf"), "stages.N.critic.clip"),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high", "eps_clip_high"), "stages.N.loss.clip_high"),
    **dict.fromkeys(("delta", "clip_ratio_c", "dual_clip_ratio"), "stages.N.loss.dual_clip"),
    **dict.fromkeys(("entropy_coeff", "entropy_bonus", "ent_coef", "entropy_loss_coef"), "stages.N.loss.entropy_coef"),
    **dict.fromkeys(("loss_agg_mode", "loss_type", "loss_aggregation"), "stages.N.reduction.kind"),
    **dict.fromkeys(("vllm_importance_sampling_cap", "tis_imp_ratio_cap"), "stages.N.correction.max_weight"),
    **dict.fromkeys(("mask_truncated_completions", "overlong_filtering"), "stages.N.filters.drop_truncated"),
    # advantage
    **dict.fromkeys(("adv_estimator", "advantage_estimator", "algorithm", "algo"), "stages.N.advantage.kind"),
    **dict.fromkeys(
        ("scale_rewards", "norm_adv_by_std_in_grpo", "use_std_normalization", "normalize_advantages"),
        "stages.N.advantage.normalize_std",
    ),
    "whiten_advantages": "stages.N.advantage.whiten",
    **dict.fromkeys(("gae_lambda", "lambd", "lambda"), "stages.N.advantage.lam"),
    **dict.fromkeys(("discount", "discount_factor"), "stages.N.advantage.gamma"),
    **dict.fromkeys(("use_critic", "critic_model", "value_model"), "stages.N.critic"),
    "step_advantage_w": "stages.N.advantage.step_weight",
    # sampling and limits
    **dict.fromkeys(
        ("max_completion_length", "max_new_tokens", "max_response_length", "generate_max_len", "response_length"),
        "limits.max_tokens",
    ),
    **dict.fromkeys(
        ("max_prompt_length", "prompt_max_len", "max_length", "max_seq_length", "max_model_len", "max_seq_len"),
        "limits.max_context",
    ),
    **dict.fromkeys(("stop", "stop_sequences"), "limits.stop_strings"),
    **dict.fromkeys(("max_tool_calling_iterations", "max_assistant_turns", "max_interactions"), "limits.max_turns"),
    "rollout_temperature": "stages.N.temperature",
    **dict.fromkeys(("system_prompt", "system_message"), "agent.system"),
    # model, engine, run
    **dict.fromkeys(("model_name_or_path", "model_name", "pretrain", "model_path", "base_model"), "policy.path"),
    **dict.fromkeys(("torch_dtype", "bf16", "fp16", "mixed_precision", "precision"), "policy.dtype"),
    **dict.fromkeys(("peft_config", "use_peft", "lora_config"), "policy.lora"),
    **dict.fromkeys(("lora_rank", "lora_r"), "policy.lora.rank"),
    "lora_alpha": "policy.lora.alpha",
    "lora_dropout": "policy.lora.dropout",
    "lora_target_modules": "policy.lora.target_modules",
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization_config"), "policy.lora.quantization"),
    **dict.fromkeys(("chat_template", "chat_template_path"), "policy.template"),
    **dict.fromkeys(("use_vllm", "rollout_engine", "backend", "vllm"), "engine.kind"),
    **dict.fromkeys(
        ("tensor_parallel_size", "tensor_model_parallel_size", "vllm_tensor_parallel_size"), "engine.tensor_parallel"
    ),
    **dict.fromkeys(("deepspeed", "fsdp", "strategy_type"), "stages.N.trainer.kind"),
    **dict.fromkeys(("max_staleness", "off_policy_steps"), "asynchrony.staleness"),
    "vllm_gpu_memory_utilization": "engine.gpu_memory_utilization",
    **dict.fromkeys(("run_name", "experiment_name", "exp_name"), "name"),
    **dict.fromkeys(("random_seed", "data_seed"), "seed"),
    **dict.fromkeys(("eval_steps", "test_freq", "eval_interval"), "stages.N.evaluate_every"),
    **dict.fromkeys(("save_steps", "save_freq", "save_interval"), "stages.N.checkpoint_every"),
    **dict.fromkeys(("save_total_limit", "max_ckpt_num"), "stages.N.keep_checkpoints"),
    **dict.fromkeys(("max_eval_samples", "n_eval", "eval_size"), "evaluation.n_tasks"),
    **dict.fromkeys(("report_to", "log_with", "logger", "use_wandb", "wandb", "tensorboard"), "trackers"),
    **dict.fromkeys(("project_name", "wandb_project"), "trackers"),
    **dict.fromkeys(("hub_model_id", "hub_repo"), "push_to_hub"),
    **dict.fromkeys(("reward_fn", "reward_funcs", "reward_function", "reward"), "rewards"),
    **dict.fromkeys(("env", "env_name", "env_id", "train_dataset", "dataset", "data"), "environment"),
    **dict.fromkeys(("train_file", "train_files", "prompt_data"), "environment.train"),
    **dict.fromkeys(("eval_dataset", "val_dataset", "val_files", "eval_data", "test_dataset"), "environment.test"),
    "reward_weights": "rewards.NAME.weight",
    "model": "policy",
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
