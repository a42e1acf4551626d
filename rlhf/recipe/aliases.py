"""Key names of TRL, verl, OpenRLHF and transformers, with ours, for error messages.

A key of theirs is never taken for ours, as many mean something else by a little, such as a batch counted in completions
rather than in tasks. It is refused like every unknown key, and the message names ours.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Of theirs: our key, as a path from the top of a recipe; `N` is the number of a stage.
ALIASES: Mapping[str, str] = {
    # optimizer
    **dict.fromkeys(("learning_rate", "actor_learning_rate", "step_size"), "stages.N.optimizer.lr"),
    **dict.fromkeys(("critic_learning_rate", "critic_lr"), "stages.N.critic.optimizer.lr"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "lr_warmup_style"), "stages.N.optimizer.schedule"),
    **dict.fromkeys(("lr_warmup_steps", "num_warmup_steps"), "stages.N.optimizer.warmup_steps"),
    **dict.fromkeys(("warmup_ratio", "lr_warmup_ratio", "lr_warmup_steps_ratio"), "stages.N.optimizer.warmup_steps"),
    "min_lr_ratio": "stages.N.optimizer.final_lr_share",
    **dict.fromkeys(("adam_betas", "adam_beta1", "adam_beta2"), "stages.N.optimizer.betas"),
    **dict.fromkeys(("adam_epsilon", "adam_eps"), "stages.N.optimizer.eps"),
    **dict.fromkeys(("l2", "adam_weight_decay"), "stages.N.optimizer.weight_decay"),
    **dict.fromkeys(("max_norm", "grad_clip", "clip_grad", "gradient_clipping"), "stages.N.optimizer.max_grad_norm"),
    # how much is attempted, and how it is split
    **dict.fromkeys(("max_steps", "total_training_steps", "num_iterations_total"), "stages.N.steps"),
    **dict.fromkeys(("num_train_epochs", "max_epochs", "ppo_epochs", "num_ppo_epochs"), "stages.N.epochs"),
    **dict.fromkeys(("num_iterations", "num_epochs", "total_epochs", "num_episodes"), "stages.N.steps"),
    **dict.fromkeys(
        ("num_generations", "n_samples_per_prompt", "rollout_n", "num_return_sequences", "n_rollouts"),
        "stages.N.group_size",
    ),
    **dict.fromkeys(
        ("train_batch_size", "rollout_batch_size", "per_device_train_batch_size", "prompts_per_step", "gen_batch_size"),
        "stages.N.tasks_per_step",
    ),
    **dict.fromkeys(("gradient_accumulation_steps", "ppo_mini_batch_size", "num_mini_batches"), "stages.N.minibatches"),
    **dict.fromkeys(
        ("micro_train_batch_size", "micro_batch_size", "ppo_micro_batch_size", "ppo_max_token_len_per_gpu"),
        "stages.N.max_tokens_per_microbatch",
    ),
    "ppo_micro_batch_size_per_gpu": "stages.N.max_tokens_per_microbatch",
    "gradient_checkpointing_enable": "stages.N.trainer.gradient_checkpointing",
    "enable_gradient_checkpointing": "stages.N.trainer.gradient_checkpointing",
    # loss
    **dict.fromkeys(("beta", "init_kl_coef", "kl_loss_coef", "kl_ctrl", "kl_penalty_coef"), "stages.N.loss.kl_coef"),
    **dict.fromkeys(("use_kl_loss", "kl_loss_type", "kl_estimator", "kl_penalty"), "stages.N.loss.kl"),
    **dict.fromkeys(("target_kl", "kl_target_value"), "stages.N.loss.kl_target"),
    **dict.fromkeys(("epsilon", "eps_clip", "clip_ratio", "cliprange", "clip_ratio_low"), "stages.N.loss.clip_low"),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high", "eps_clip_high"), "stages.N.loss.clip_high"),
    **dict.fromkeys(("delta", "clip_ratio_c", "dual_clip_ratio"), "stages.N.loss.dual_clip"),
    **dict.fromkeys(("entropy_coeff", "entropy_bonus", "ent_coef", "entropy_loss_coef"), "stages.N.loss.entropy_coef"),
    **dict.fromkeys(("loss_agg_mode", "loss_type", "loss_aggregation"), "stages.N.reduction.kind"),
    **dict.fromkeys(("vllm_importance_sampling_cap", "tis_imp_ratio_cap"), "stages.N.correction.max_weight"),
    **dict.fromkeys(("mask_truncated_completions", "overlong_filtering"), "stages.N.filters.drop_truncated"),
    # advantage
    **dict.fromkeys(("adv_estimator", "advantage_estimator"), "stages.N.advantage.kind"),
    **dict.fromkeys(
        ("scale_rewards", "norm_adv_by_std_in_grpo", "use_std_normalization"), "stages.N.advantage.normalize"
    ),
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
    # model, engine, run
    **dict.fromkeys(("model_name_or_path", "model_name", "pretrain", "model_path", "base_model"), "policy.path"),
    **dict.fromkeys(("torch_dtype", "bf16", "fp16", "mixed_precision", "precision"), "policy.dtype"),
    **dict.fromkeys(("peft_config", "use_peft", "lora_config"), "policy.lora"),
    **dict.fromkeys(("lora_rank", "lora_r"), "policy.lora.rank"),
    **dict.fromkeys(("use_vllm", "rollout_engine", "backend"), "engine.kind"),
    **dict.fromkeys(("gpu_memory_utilization", "vllm_gpu_memory_utilization"), "engine.gpu_memory_share"),
    **dict.fromkeys(("run_name", "experiment_name", "exp_name"), "name"),
    **dict.fromkeys(("random_seed", "data_seed"), "seed"),
    **dict.fromkeys(("eval_steps", "test_freq", "eval_interval"), "stages.N.evaluate_every"),
    **dict.fromkeys(("save_steps", "save_freq", "save_interval"), "stages.N.checkpoint_every"),
    **dict.fromkeys(("save_total_limit", "max_ckpt_num"), "stages.N.keep_checkpoints"),
    **dict.fromkeys(("reward_fn", "reward_funcs", "reward_function", "reward"), "rewards"),
    **dict.fromkeys(("env", "env_name", "env_id", "train_dataset", "dataset", "data"), "environment"),
    "model": "policy",
}

#: Theirs that count something else, or have no key here: what to know.
_BESIDE: Mapping[str, str] = {
    "per_device_train_batch_size": "which counts tasks; a step has tasks_per_step x group_size attempts",
    "train_batch_size": "which counts tasks; a step has tasks_per_step x group_size attempts",
    "gradient_accumulation_steps": "the updates of a step; gradients are accumulated over micro-batches by themselves",
    "ppo_mini_batch_size": "the number of updates that a step is split into, not their size",
    "warmup_ratio": "which counts steps",
    "lr_warmup_ratio": "which counts steps",
    "num_train_epochs": "passes over the attempts of a step (over demonstrations in a supervised stage)",
    "epsilon": "and loss.clip_high for the other side",
    "clip_ratio": "and loss.clip_high for the other side",
    "eps_clip": "and loss.clip_high for the other side",
    "cliprange": "and loss.clip_high for the other side",
    "beta": "with loss.kl: k3, the estimator",
    "bf16": "bfloat16 or float32",
    "fp16": "bfloat16 or float32",
    "use_vllm": "vllm or transformers",
}


def ours(theirs: str) -> str:
    """Recipe key meant by another toolkit's key; '' where unknown."""
    name = theirs.removeprefix("actor_").removeprefix("algorithm_") if theirs not in ALIASES else theirs
    if name not in ALIASES:
        return ""
    beside = f", {_BESIDE[name]}" if name in _BESIDE else ""
    return f"what other toolkits call {theirs} is {ALIASES[name]} here{beside}"
