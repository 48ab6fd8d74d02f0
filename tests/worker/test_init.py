"""`oppo init`: a valid spec from answers, flags, and configurations of TRL and verl; what is not taken over is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from oppo_cli.main import main
from oppo_contract.aliases import TRL, VERL
from oppo_contract.fields import SpecSchema
from oppo_contract.spec import RunSpec
from oppo_contract.spec_errors import SpecError
from oppo_contract.yaml_text import load_yaml

TRL_PPO = """
learning_rate: 3.0e-6
num_ppo_epochs: 2
num_mini_batches: 4
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
kl_coef: 0.03
kl_estimator: k3
cliprange: 0.1
vf_coef: 0.1
response_length: 53
temperature: 0.7
lam: 0.9
sft_model_path: models/sft
reward_model_path: models/reward
max_steps: 40
logging_steps: 10
lr_scheduler_type: polynomial
"""
TRL_GRPO = (
    "{num_generations: 4, per_device_train_batch_size: 16, beta: 0.04, epsilon: 0.2, epsilon_high: 0.28, loss_type: dapo,"
    " top_p: 1.0, top_k: 0, lam: 0.9}"
)
VERL_NESTED = """
defaults:
  - _self_
data: {train_batch_size: 64, max_prompt_length: 128, max_response_length: 256, train_files: gsm8k.parquet}
actor_rollout_ref:
  model: {path: models/base}
  actor:
    _target_: verl.workers.config.ActorConfig
    strategy: ???
    ppo_mini_batch_size: 16
    clip_ratio: 0.2
    use_kl_loss: true
    kl_loss_coef: 0.002
    optim: {lr: 1.0e-6, lr_warmup_steps: -1}
  rollout: {name: hf, n: 8, top_k: -1, temperature: "${data.temperature}"}
algorithm: {adv_estimator: grpo, kl_ctrl: {kl_coef: 0.001}}
trainer: {n_gpus_per_node: 8, nnodes: 2, total_training_steps: 200, experiment_name: gsm8k}
"""


def oppo(*arguments: object, text: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=text)


def converted(folder: Path, text: str, *options: str) -> tuple[RunSpec, str]:
    """The spec and the output."""
    (folder / "theirs.yaml").write_text(text)
    done = oppo("init", folder / "ours.yaml", "--from", folder / "theirs.yaml", "--force", *options)
    assert done.exit_code == 0, done.output
    assert oppo("spec", "check", folder / "ours.yaml").exit_code == 0
    return load_yaml((folder / "ours.yaml").read_text()), done.output


def test_defaults_flags_and_no_overwriting(tmp_path: Path) -> None:
    out = tmp_path / "oppo.yaml"
    assert oppo("init", out, "--yes").exit_code == 0
    assert oppo("spec", "check", out).exit_code == 0
    refused = oppo("init", out, "--yes")
    assert (refused.exit_code, "--force" in refused.output) == (2, True)
    flags = ("--model", "a/b", "--prompts", "p.jsonl", "--reward", "model", "--reward-source", "r", "--full", "--steps", "7")
    assert oppo("init", out, "--yes", "--force", *flags).exit_code == 0
    spec = load_yaml(out.read_text())
    assert (spec.models.actor.path, spec.data.prompts, spec.steps, spec.models.lora) == ("a/b", "p.jsonl", 7, None)
    assert spec.models.reward.model is not None
    assert oppo("init", tmp_path / "bad.yaml", "--yes", "--name", "two\nlines").exit_code == 2
    assert not (tmp_path / "bad.yaml").exists()


def test_questions_show_defaults_and_flags_are_not_asked(tmp_path: Path) -> None:
    done = oppo("init", tmp_path / "a.yaml", "--steps", "5", text="mine\nmodels/a\n\nhttp\nhttps://example.org/score\nn\n")
    assert done.exit_code == 0, done.output
    assert "[PROMPTS.jsonl]" in done.output
    assert "PPO steps" not in done.output
    spec = load_yaml((tmp_path / "a.yaml").read_text())
    assert spec.models.reward.http is not None
    assert (spec.name, spec.steps, spec.models.lora) == ("mine", 5, None)


def test_trl_ppo(tmp_path: Path) -> None:
    spec, said = converted(tmp_path, TRL_PPO)
    assert (spec.ppo.learning_rate, spec.ppo.epochs, spec.ppo.mini_batches, spec.ppo.batch_size) == (3e-6, 2, 4, 32)
    assert (spec.ppo.kl.coefficient, spec.ppo.kl.estimator, spec.ppo.clip_range, spec.ppo.gae_lambda) == (0.03, "k3", 0.1, 0.9)
    assert (spec.rollout.max_new_tokens, spec.rollout.temperature, spec.steps) == (53, 0.7, 40)
    assert spec.models.actor.path == "models/sft"
    text = (tmp_path / "ours.yaml").read_text()
    for line in (
        "not taken over: vf_coef: actor and critic have",
        "not taken over: logging_steps: no setting",
        "polynomial has no equivalent",
        "placeholder: data.prompts",
    ):
        assert line in said
        assert line in text


def test_trl_grpo(tmp_path: Path) -> None:
    spec, said = converted(tmp_path, TRL_GRPO, "--prompts", "mine.jsonl")
    assert (spec.ppo.algorithm, spec.ppo.group_size, spec.ppo.batch_size) == ("grpo", 4, 4)
    assert (spec.ppo.kl.placement, spec.ppo.kl.estimator, spec.ppo.kl.coefficient) == ("loss", "k3", 0.04)
    assert (spec.ppo.clip_range_high, spec.ppo.loss_aggregation, spec.data.prompts) == (0.28, "token_mean", "mine.jsonl")
    assert "not taken over: lam: ppo.gae_lambda" in said


@pytest.mark.parametrize("words", [False, True])
def test_verl(tmp_path: Path, words: bool) -> None:
    from oppo_contract.foreign_config import _flatten, _read

    text = VERL_NESTED
    if words:
        text = "\n".join(f"{name}={value}" for name, value in _flatten(_read(text)) if "$" not in str(value))
    spec, said = converted(tmp_path, text)
    assert (spec.ppo.algorithm, spec.ppo.group_size, spec.ppo.batch_size, spec.ppo.mini_batches) == ("grpo", 8, 64, 4)
    assert (spec.ppo.kl.placement, spec.ppo.kl.coefficient) == ("loss", 0.002)
    assert (spec.resources.devices, spec.resources.nodes, spec.steps, spec.name) == (16, 2, 200, "gsm8k")
    assert (spec.rollout.max_prompt_tokens, spec.rollout.top_k) == (128, None)
    assert spec.data.prompts == "gsm8k.parquet"
    assert "data.train_files" not in said


def test_a_batch_that_is_too_small_for_their_devices_stays_and_the_devices_go(tmp_path: Path) -> None:
    text = "trainer: {n_gpus_per_node: 8, nnodes: 2}\ndata: {train_batch_size: 2, max_prompt_length: 8, max_response_length: 8}"
    spec, said = converted(tmp_path, text)
    assert (spec.ppo.batch_size, spec.resources.devices) == (2, 1)
    assert "not taken over: trainer.nnodes: ppo.batch_size gives a step 2 responses, too few" in said


def test_a_reward_model_that_verl_switches_off_is_not_taken(tmp_path: Path) -> None:
    text = "data: {{train_files: a, val_files: b, prompt_key: question}}\nreward_model: {{enable: {on}, model: {{path: rm}}}}"
    spec, said = converted(tmp_path, text.format(on="true") + "\ntrainer: {test_freq: 7}")
    assert spec.models.reward.model is not None
    assert spec.evaluation is not None
    assert (spec.evaluation.prompt_field, spec.evaluation.every_steps) == ("question", 7)
    assert "reward_model." not in said
    spec, said = converted(tmp_path, text.format(on="false"))
    assert spec.models.reward.rule is not None
    assert "replace the placeholder: models.reward.rule" in said


def test_a_full_verl_configuration_with_an_unused_critic_converts(tmp_path: Path) -> None:
    text = VERL_NESTED + "critic: {model: {path: models/critic}, optim: {lr: 1.0e-5}}\n"
    spec, said = converted(tmp_path, text.replace("experiment_name", "test_freq: 5, experiment_name"))
    assert spec.ppo.algorithm == "grpo"
    assert "not taken over: critic.model.path: models.critic has no effect" in said


def test_an_answer_about_the_reward_replaces_theirs(tmp_path: Path) -> None:
    spec, _ = converted(tmp_path, "reward_model_path: rm", "--reward", "rule", "--reward-source", "math:score")
    assert (spec.models.reward.rule, spec.models.reward.model) == ("math:score", None)


def test_a_reward_without_its_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(TRL_PPO)
    for options in (("--yes", "--reward", "model"), ("--from", tmp_path / "x.yaml", "--reward", "rule")):
        done = oppo("init", tmp_path / "y.yaml", *options)
        assert (done.exit_code, "needs --reward-source" in done.output) == (2, True)
    done = oppo("init", tmp_path / "missing" / "y.yaml", "--yes")
    assert (done.exit_code, "cannot be written: No such file or directory" in done.output) == (2, True)


def test_options_of_a_command_line(tmp_path: Path) -> None:
    spec, _ = converted(tmp_path, "train.py --learning_rate 1e-5 --num_ppo_epochs 4 --top_k -1 --bf16 --seed=3 max_steps=9")
    assert (spec.ppo.learning_rate, spec.ppo.epochs, spec.seed, spec.steps) == (1e-5, 4, 3, 9)
    assert (spec.rollout.top_k, spec.resources.dtype) == (None, "bfloat16")


def test_a_batch_of_auto_is_left_out(tmp_path: Path) -> None:
    spec, _ = converted(tmp_path, "{per_device_train_batch_size: auto, gradient_accumulation_steps: auto, max_steps: 3}")
    assert spec.steps == 3


def test_no_generations_are_refused_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("{num_generations: 0, per_device_train_batch_size: 16}")
    done = oppo("init", tmp_path / "y.yaml", "--from", tmp_path / "x.yaml")
    assert not isinstance(done.exception, ZeroDivisionError), done.output


def test_a_file_without_a_known_setting_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("a: 1")
    done = oppo("init", tmp_path / "y.yaml", "--from", tmp_path / "x.yaml")
    assert (done.exit_code, "has no setting of TRL" in done.output) == (2, True)


@pytest.mark.parametrize(
    ("key", "ours"), [("vf_coef", None), ("kl_coef", "ppo.kl.coefficient"), ("num_generations", "ppo.group_size")]
)
def test_a_spec_with_their_name_is_refused_with_ours(key: str, ours: str | None) -> None:
    with pytest.raises(SpecError) as refused:
        load_yaml(
            f"{{name: a, steps: 1, data: {{prompts: p}}, models: {{actor: {{path: a}}, reward: {{rule: r}}}}, ppo: {{{key}: 1}}}}"
        )
    assert [problem.suggestion for problem in refused.value.problems] == [ours]


def test_every_alias_names_a_setting() -> None:
    schema = SpecSchema(RunSpec.model_json_schema())
    for alias in (*TRL.values(), *VERL.values()):
        assert schema.locate(tuple(alias.path.split("."))).schema, alias.path
