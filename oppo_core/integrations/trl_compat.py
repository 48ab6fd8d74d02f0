"""Checks that a TRL trainer can be overlapped with the same result as its own steps."""

from __future__ import annotations

import importlib.metadata
import inspect
from typing import Any

from oppo_contract.model_folder import ModelFolderError
from oppo_core.models import supported

TRL_VERSION = "1.12"
# Arguments of the replaced functions.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "batch_generation": ("model", "queries", "local_rollout_forward_batch_size", "pad_token_id", "generation_config"),
    "selective_log_softmax": ("logits", "index"),
    "get_reward": ("model", "query_responses", "pad_token_id", "context_length"),
}
# Settings of the policy's generation_config that change sampling, but not the log-probs that TRL computes.
SAMPLING_CHANGES = (
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "sequence_bias", "min_p", "typical_p",
    "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty",
    "num_beams", "guidance_scale", "watermarking_config", "stop_strings",
)  # fmt: skip
NEUTRAL = (None, 0, 1)
READABLE = ("sdpa", "eager")


class OverlapError(ValueError):
    """A trainer that cannot be overlapped, with the reason."""


def check_trainer(trainer: Any) -> dict[str, Any]:
    """Check a trainer. Returns the namespace in which its `train` looks up TRL's functions.

    Raises:
        OverlapError: the trainer, its models or the installed TRL are not supported.
    """
    functions = _namespace(trainer)
    for applies, reason in (*_process_checks(trainer), *_model_checks(trainer)):
        if applies:
            raise OverlapError(f"this trainer cannot be overlapped: {reason}")
    for model in (trainer.policy_model, trainer.reward_model):
        try:
            supported.refuse_unsupported(model.config, model.config.name_or_path)
        except ModelFolderError as error:
            raise OverlapError(str(error)) from None
    return functions


def check_amounts(trainer: Any, overcommit: int, chunk: int, max_age: int) -> None:
    """Raises OverlapError for a value out of range."""
    batch = trainer.args.local_batch_size
    if not 0 <= overcommit <= batch:
        raise OverlapError(f"overcommit is {overcommit}; it may be 0 to the batch's {batch} answers")
    for name, value in (("chunk", chunk), ("max_age", max_age)):
        if value < 1:
            raise OverlapError(f"{name} is {value}; it is at least 1")


def _namespace(trainer: Any) -> dict[str, Any]:
    installed = _version()
    if not f"{installed}.".startswith(f"{TRL_VERSION}."):
        raise OverlapError(f"trl {installed} is installed; the overlap supports {TRL_VERSION} only")
    train = getattr(type(trainer), "train", None)
    asked = getattr(getattr(train, "__code__", None), "co_names", ())
    if not set(FUNCTIONS) <= set(asked):
        raise OverlapError(f"{type(trainer).__name__}.train is not that of trl.experimental.ppo.PPOTrainer")
    functions: dict[str, Any] = getattr(train, "__globals__", {})
    for name, expected in FUNCTIONS.items():
        if hasattr(functions[name], "__self__"):
            raise OverlapError("another trainer is already overlapped; end its block first")
        result = tuple(inspect.signature(functions[name]).parameters)
        if result != expected:
            raise OverlapError(f"TRL's {name} takes {', '.join(result)}; the overlap supports {', '.join(expected)}")
    return functions


def _version() -> str:
    try:
        return importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        return "(none)"


def _process_checks(trainer: Any) -> list[tuple[bool, str]]:
    """Pairs of (whether it applies to this trainer, reason of refusal)."""
    processes = trainer.accelerator.num_processes
    return [
        (processes > 1, f"it trains in {processes} processes; only one process is supported"),
        (trainer.is_deepspeed_enabled, "DeepSpeed shards the policy's weights; train without it"),
        (trainer.is_fsdp_enabled, "FSDP shards the policy's weights; train without it"),
        (trainer.is_peft_model, "its policy has PEFT adapters; merge them, or train with models.lora in OPPO Platform"),
    ]


def _model_checks(trainer: Any) -> list[tuple[bool, str]]:
    policy, reward = trainer.policy_model, trainer.reward_model
    trained = {id(parameter) for parameter in trainer.model.parameters()}
    kinds = sorted({model.config._attn_implementation for model in (policy, reward)} - set(READABLE))
    return [
        (
            trainer.processing_class.pad_token_id is None,
            "its tokenizer has no pad token, which TRL needs to find a response's end",
        ),
        (
            any(id(parameter) in trained for parameter in reward.parameters()),
            "its reward model shares weights with a trained model, so streamed scores would be stale",
        ),
        (
            bool(kinds),
            f"attention of kind {', '.join(kinds)} cannot prefill in chunks; load the models with sdpa or eager",
        ),
        *_sampling_changes(policy.generation_config),
    ]


def _sampling_changes(generation: Any) -> list[tuple[bool, str]]:
    given = {name: getattr(generation, name, None) for name in SAMPLING_CHANGES}
    changed = {
        name: value for name, value in given.items() if value is not None and (name.endswith("_id") or value not in NEUTRAL)
    }
    return [
        (True, f"its policy's generation_config has {name} {value!r}, which PPO's log-probs do not include")
        for name, value in changed.items()
    ]
