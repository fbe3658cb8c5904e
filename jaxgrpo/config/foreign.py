"""Keys that people bring from TRL and ms-swift, and what they are called here."""

from __future__ import annotations

# The same thing under another name.
RENAMED: dict[str, str] = {
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.epsilon",
    "advantage_estimator": "objective.advantage",
    "beta": "objective.kl_coef",
    "bf16": "model.compute_dtype",
    "chat_template_kwargs": "data.chat_template_options",
    "data_seed": "seed",
    "dataset": "data.train",
    "dataset_name": "data.train",
    "dataset_shuffle": "data.shuffle",
    "delta": "objective.eps_dual",
    "epsilon_high": "objective.eps_high",
    "eval_dataset": "data.eval",
    "eval_steps": "eval.every_steps",
    "external_plugins": "plugins",
    "fp16": "model.compute_dtype",
    "gradient_checkpointing": "model.remat",
    "importance_sampling_level": "objective.ratio",
    "log_completions": "logging.completions",
    "lr": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.schedule",
    "mask_truncated_completions": "objective.drop_truncated",
    "log_rollout_offpolicy_metrics": "objective.sampler_diagnostics",
    "max_completion_length": "rollout.max_completion_tokens",
    "max_length": "data.max_prompt_tokens",
    "max_new_tokens": "rollout.max_completion_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_seq_length": "model.max_context",
    "model_id": "model.path",
    "model_name_or_path": "model.path",
    "multi_turn_scheduler": "rollout.scheduler",
    "num_generations_eval": "eval.num_generations",
    "num_train_epochs": "epochs",
    "off_policy_sequence_mask_delta": "objective.off_policy_mask_delta",
    "optim": "optimizer.name",
    "overlong_filter": "objective.drop_truncated",
    "project": "logging.wandb_project",
    "response_length": "rollout.max_completion_tokens",
    "rollout_importance_sampling_mode": "objective.sampler_correction",
    "rollout_importance_sampling_threshold": "objective.sampler_correction_threshold",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "scale_rewards": "objective.scale",
    "shuffle_dataset": "data.shuffle",
    "stop_words": "rollout.sampling.stop",
    "system": "data.system_prompt",
    "torch_dtype": "model.compute_dtype",
    "train_dataset": "data.train",
    "val_dataset": "data.eval",
    "vllm_importance_sampling_cap": "objective.sampler_correction_threshold",
    "vllm_importance_sampling_mode": "objective.sampler_correction",
}

_BATCH = (
    "batches are counted in prompts here: a step draws `rollout.prompts_per_step` prompts with "
    "`rollout.num_generations` completions each, `learner.updates_per_step` splits them into updates, and "
    "`learner.micro_batch_tokens` only bounds memory"
)
_ENGINE = "`rollout.engine` names the sampler; the default, `jax`, runs in the learner's process"
_REWARDS = "`rewards` is a list with one entry a function: `- {name: last_number, weight: 1.0}`"
_KIND = (
    "`objective.preset` picks a named objective, `objective.aggregation` how token losses are averaged, "
    "`objective.policy_loss` the loss itself"
)
_LOSS_OPTIONS = "options of a policy loss go into `objective.policy_loss_options`; see docs/losses.md"
_DEVICES = "`learner.mesh` says how parameters and rows are split over devices"
_EACH_OR_ALL = (
    "`rollout.max_completion_tokens` limits all turns together, `rollout.max_turn_tokens` each turn; set either or both"
)
_CLIP = (
    "the clip range is `objective.eps_low` below and `objective.eps_high` above; set both "
    "(Adam's epsilon is `optimizer.epsilon`)"
)
_STEP = (
    "`steps` counts steps: each draws completions and makes `learner.updates_per_step` × `learner.num_iterations` "
    "updates"
)
_SINKS = "`logging.tensorboard` is on by default; `logging.wandb_project` names a Weights & Biases project"

# No single key does the same; what to do instead.
EXPLAINED: dict[str, str] = {
    "batch_size": _BATCH,
    "completion_length_limit_scope": _EACH_OR_ALL,
    "deepspeed": _DEVICES,
    "dynamic_sample": "groups are not drawn again; one whose rewards are all equal costs no time in the update",
    "epsilon": _CLIP,
    "eval_strategy": "`eval.every_steps` says how often; with `data.eval` it also happens before and after training",
    "fipo_clip_range": _LOSS_OPTIONS,
    "fipo_decay_rate": _LOSS_OPTIONS,
    "fsdp_config": _DEVICES,
    "generation_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "logging_steps": "every update is logged; leave the key out",
    "loss_type": _KIND,
    "max_steps": _STEP,
    "mini_batch_size": _BATCH,
    "per_device_eval_batch_size": "the sampler fills `rollout.slots` by itself; leave the key out",
    "per_device_train_batch_size": _BATCH,
    "real_tau": _LOSS_OPTIONS,
    "report_to": _SINKS,
    "resume_from_checkpoint": "start the same command with --resume",
    "reward_funcs": _REWARDS,
    "reward_weights": _REWARDS,
    "rlhf_type": _KIND,
    "save_strategy": "`checkpoint.every_steps` says how often",
    "steps_per_generation": _BATCH,
    "tau_neg": _LOSS_OPTIONS,
    "tau_pos": _LOSS_OPTIONS,
    "train_batch_size": _BATCH,
    "use_vllm": _ENGINE,
    "vllm_mode": _ENGINE,
    "warmup_ratio": "`optimizer.warmup_steps` counts updates; the plan that --check prints gives their total",
}
