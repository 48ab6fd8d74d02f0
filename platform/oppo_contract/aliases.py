"""Names of settings in TRL (PPOConfig, GRPOConfig) and verl (ppo_trainer), and the settings of ours that mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "k3+": "k3+"}
ALGORITHMS = {"gae": "ppo", "grpo": "grpo", "rloo": "rloo"}
LOSS_TYPES = {"grpo": "sequence_mean", "dr_grpo": "token_sum", "dapo": "token_mean", "bnpo": "token_mean"}
AGGREGATIONS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}
GROUP_SCALING = {True: True, "group": True, False: False, "none": False}
NO_TOP_K, NO_TOP_P = {0: None, -1: None}, {1.0: None}


@dataclass(frozen=True, slots=True)
class Alias:
    """Our setting. `values`: theirs → ours; `others`: whether a value that is not among them is kept."""

    path: str
    values: Mapping[Any, Any] | None = None
    others: bool = False


def _same(**paths: str) -> dict[str, Alias]:
    return {name: Alias(path) for name, path in paths.items()}


TRL = _same(
    run_name="name", seed="seed", max_steps="steps", sft_model_path="models.actor.path", model_name_or_path="models.actor.path",
    reward_model_path="models.reward.model.path", learning_rate="ppo.learning_rate", warmup_steps="ppo.warmup_steps",
    weight_decay="ppo.weight_decay", max_grad_norm="ppo.max_grad_norm", num_ppo_epochs="ppo.epochs", num_iterations="ppo.epochs",
    num_mini_batches="ppo.mini_batches", num_generations="ppo.group_size", kl_coef="ppo.kl.coefficient",
    beta="ppo.kl.coefficient",
    cliprange="ppo.clip_range", epsilon="ppo.clip_range", epsilon_high="ppo.clip_range_high", delta="ppo.dual_clip",
    cliprange_value="ppo.value_clip_range", gamma="ppo.gamma", lam="ppo.gae_lambda", whiten_rewards="ppo.whiten_rewards",
    missing_eos_penalty="ppo.missing_eos_penalty", temperature="rollout.temperature", min_p="rollout.min_p",
    response_length="rollout.max_new_tokens", max_completion_length="rollout.max_new_tokens",
    max_prompt_length="rollout.max_prompt_tokens", shuffle_dataset="data.shuffle", save_steps="checkpoints.every_steps",
    save_total_limit="checkpoints.keep",
) | {
    "lr_scheduler_type": Alias("ppo.schedule", SCHEDULES),
    "kl_estimator": Alias("ppo.kl.estimator", KL_ESTIMATORS),
    "loss_type": Alias("ppo.loss_aggregation", LOSS_TYPES),
    "scale_rewards": Alias("ppo.normalize_advantages_by_std", GROUP_SCALING),
    "top_k": Alias("rollout.top_k", NO_TOP_K, others=True),
    "top_p": Alias("rollout.top_p", NO_TOP_P, others=True),
    "use_vllm": Alias("rollout.backend", {True: "vllm", False: "torch"}),
    "bf16": Alias("resources.dtype", {True: "bfloat16", False: "float32"}),
}  # fmt: skip

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
VERL = {
    "trainer.experiment_name": Alias("name"),
    "trainer.total_training_steps": Alias("steps"),
    "trainer.save_freq": Alias("checkpoints.every_steps", {-1: None}, others=True),
    "trainer.test_freq": Alias("evaluation.every_steps", {-1: None}, others=True),
    "trainer.nnodes": Alias("resources.nodes"),
    "data.train_files": Alias("data.prompts"),
    "data.val_files": Alias("evaluation.prompts"),
    "data.prompt_key": Alias("data.prompt_field"),
    "data.shuffle": Alias("data.shuffle"),
    "data.seed": Alias("seed"),
    "data.train_batch_size": Alias("ppo.batch_size"),
    "data.max_prompt_length": Alias("rollout.max_prompt_tokens"),
    "data.max_response_length": Alias("rollout.max_new_tokens"),
    "actor_rollout_ref.model.path": Alias("models.actor.path"),
    "critic.model.path": Alias("models.critic.path"),
    "reward_model.model.path": Alias("models.reward.model.path"),
    f"{ACTOR}ppo_epochs": Alias("ppo.epochs"),
    f"{ACTOR}ppo_max_token_len_per_gpu": Alias("ppo.micro_batch_tokens"),
    f"{ACTOR}optim.lr": Alias("ppo.learning_rate"),
    f"{ACTOR}optim.weight_decay": Alias("ppo.weight_decay"),
    f"{ACTOR}optim.lr_warmup_steps": Alias("ppo.warmup_steps", {-1: 0}, others=True),
    f"{ACTOR}grad_clip": Alias("ppo.max_grad_norm"),
    f"{ACTOR}clip_ratio": Alias("ppo.clip_range"),
    f"{ACTOR}clip_ratio_high": Alias("ppo.clip_range_high"),
    f"{ACTOR}clip_ratio_c": Alias("ppo.dual_clip"),
    f"{ACTOR}entropy_coeff": Alias("ppo.entropy_coefficient"),
    f"{ACTOR}loss_agg_mode": Alias("ppo.loss_aggregation", AGGREGATIONS),
    f"{ROLLOUT}n": Alias("ppo.group_size"),
    f"{ROLLOUT}temperature": Alias("rollout.temperature"),
    f"{ROLLOUT}top_k": Alias("rollout.top_k", NO_TOP_K, others=True),
    f"{ROLLOUT}top_p": Alias("rollout.top_p", NO_TOP_P, others=True),
    f"{ROLLOUT}name": Alias("rollout.backend", {"vllm": "vllm", "hf": "torch"}),
    "critic.optim.lr": Alias("ppo.critic_learning_rate"),
    "critic.cliprange_value": Alias("ppo.value_clip_range"),
    "algorithm.adv_estimator": Alias("ppo.algorithm", ALGORITHMS),
    "algorithm.norm_adv_by_std_in_grpo": Alias("ppo.normalize_advantages_by_std"),
    "algorithm.gamma": Alias("ppo.gamma"),
    "algorithm.lam": Alias("ppo.gae_lambda"),
    "algorithm.kl_penalty": Alias("ppo.kl.estimator", KL_ESTIMATORS),
    "algorithm.kl_ctrl.kl_coef": Alias("ppo.kl.coefficient"),
    "algorithm.kl_ctrl.type": Alias("ppo.kl.controller", {"fixed": "fixed", "adaptive": "adaptive"}),
    "algorithm.kl_ctrl.horizon": Alias("ppo.kl.horizon"),
    "algorithm.kl_ctrl.target_kl": Alias("ppo.kl.target"),
}

# Other names that people try: OpenRLHF's, and short ones. Only suggested, by their last part.
SUGGESTED = {
    "lr": "ppo.learning_rate", "actor_lr": "ppo.learning_rate", "actor_learning_rate": "ppo.learning_rate",
    "critic_lr": "ppo.critic_learning_rate", "bs": "ppo.batch_size", "batch": "ppo.batch_size",
    "batch_size": "ppo.batch_size", "train_batch_size": "ppo.batch_size", "rollout_batch_size": "ppo.batch_size",
    "per_device_train_batch_size": "ppo.batch_size", "micro_train_batch_size": "ppo.micro_batch_tokens",
    "minibatches": "ppo.mini_batches", "init_kl_coef": "ppo.kl.coefficient", "kl_coefficient": "ppo.kl.coefficient",
    "kl_target": "ppo.kl.target", "eps_clip": "ppo.clip_range", "clip": "ppo.clip_range", "clip_ratio": "ppo.clip_range",
    "value_clip": "ppo.value_clip_range", "lambd": "ppo.gae_lambda", "lambda": "ppo.gae_lambda", "max_norm": "ppo.max_grad_norm",
    "grad_clip": "ppo.max_grad_norm", "warmup": "ppo.warmup_steps", "ent_coef": "ppo.entropy_coefficient",
    "entropy_coef": "ppo.entropy_coefficient", "n_samples_per_prompt": "ppo.group_size", "advantage_estimator": "ppo.algorithm",
    "max_length": "rollout.max_new_tokens", "max_tokens": "rollout.max_new_tokens", "max_new_token": "rollout.max_new_tokens",
    "generate_max_len": "rollout.max_new_tokens", "prompt_max_len": "rollout.max_prompt_tokens", "temp": "rollout.temperature",
    "pretrain": "models.actor.path", "model": "models.actor.path", "model_name": "models.actor.path",
    "reward_pretrain": "models.reward.model.path", "reward_model": "models.reward.model.path",
    "critic_pretrain": "models.critic.path", "prompt_data": "data.prompts", "dataset": "data.prompts",
    "dataset_name": "data.prompts", "input_key": "data.prompt_field", "num_steps": "steps", "total_steps": "steps",
    "wandb_run_name": "name", "gpus": "resources.devices", "num_gpus": "resources.devices",
    "n_gpus_per_node": "resources.devices", "num_nodes": "resources.nodes",
}  # fmt: skip

# Why a setting of theirs has none of ours that means the same.
NOT_TAKEN = {
    "vf_coef": "actor and critic have an optimizer each: set ppo.critic_learning_rate",
    "trainer.total_epochs": "training is counted in steps: set steps",
    "num_train_epochs": "training is counted in steps: set steps",
    "total_episodes": "training is counted in steps: set steps to episodes ÷ batch size",
    "reward_funcs": "a Python reward becomes a registered rule: set models.reward.rule",
}


def our_setting(path: str) -> str | None:
    """Our setting for a name of theirs, given alone or below some section; None if no name matches."""
    name = path.rpartition(".")[2]
    alias = VERL.get(path) or TRL.get(name)
    return alias.path if alias is not None else SUGGESTED.get(name)
