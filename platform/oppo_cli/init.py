"""`oppo init`: writes a spec from a few answers, or from a configuration of TRL or verl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from oppo_cli.home import Refusal

REWARDS = ("rule", "model", "http")
REWARD_PATHS = {"rule": "models.reward.rule", "model": "models.reward.model.path", "http": "models.reward.http.url"}
DEFAULTS: dict[str, Any] = {
    "name": "first run", "model": "MODEL", "prompts": "PROMPTS.jsonl", "reward": "rule", "reward_source": "letters:score",
    "lora": True, "steps": 100,
}  # fmt: skip
QUESTIONS = {
    "name": "Name of the run",
    "model": "Actor: a folder, or an id of the platform's catalogue",
    "prompts": "Prompts: a file or folder (JSON Lines, Parquet or Arrow), or an id of the catalogue",
    "reward": "Kind of reward",
    "reward_source": "The rule's name, the reward model's folder or id, or the service's URL",
    "lora": "Train low-rank adapters instead of all weights",
    "steps": "PPO steps",
}


@click.command()
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path), default=Path("oppo.yaml"))
@click.option("--from", "source", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="TRL's or verl's settings.")
@click.option("--name", help="Name of the run.")
@click.option("--model", help="Actor: a folder, or an id of the platform's catalogue.")
@click.option("--prompts", help="Prompts: a file or folder (JSON Lines, Parquet or Arrow), or an id of the catalogue.")
@click.option("--reward", type=click.Choice(REWARDS), help="Kind of reward.")
@click.option("--reward-source", help="The rule's name, the reward model's folder or id, or the service's URL.")
@click.option("--lora/--full", default=None, help="Train low-rank adapters, or all weights.")
@click.option("--steps", type=click.IntRange(1), help="PPO steps.")
@click.option("--yes", is_flag=True, help="Take the defaults; ask nothing.")
@click.option("--force", is_flag=True, help="Overwrite OUT.")
def init(out: Path, source: Path | None, yes: bool, force: bool, **given: Any) -> None:
    """Write a spec to OUT (default oppo.yaml), from a few questions or from a configuration of TRL or verl.

    --from reads arguments of TRL's PPOConfig or GRPOConfig, or verl's ppo_trainer, as YAML, JSON or options of a command line,
    and lists what it did not take over.
    """
    if out.exists() and not force:
        raise Refusal(f"{out} exists already. Use --force to overwrite it, or name another file.")
    answers = {name: value for name, value in given.items() if value is not None}
    if "reward" in answers and "reward_source" not in answers and (source is not None or (yes and answers["reward"] != "rule")):
        raise Refusal(f"--reward {answers['reward']} needs --reward-source: {QUESTIONS['reward_source'].lower()}.")
    text = _converted(source, answers) if source is not None else _answered(answers if yes else _ask(answers))
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Refusal(f"{out} cannot be written: {error.strerror}.") from None
    click.echo(f"{out} is written. Next: oppo spec check {out}")


def _ask(answers: dict[str, Any]) -> dict[str, Any]:
    """The answers; prompts for those that are missing."""
    asked = dict(answers)
    for name, question in QUESTIONS.items():
        if name in asked:
            continue
        kind = click.Choice(REWARDS) if name == "reward" else None
        default = DEFAULTS[name] if name != "reward_source" or asked["reward"] == "rule" else None
        asked[name] = click.confirm(question, default) if name == "lora" else click.prompt(question, default=default, type=kind)
    return asked


def _answered(answers: dict[str, Any]) -> str:
    """A spec from answers and defaults, as YAML."""
    from oppo_contract.foreign_config import Converted

    return _as_yaml(Converted(settings=_settings(DEFAULTS | answers)))


def _converted(source: Path, answers: dict[str, Any]) -> str:
    """A spec from another framework's configuration, with comments about what was not taken over; prints the same."""
    from oppo_contract import SpecError
    from oppo_contract.foreign_config import convert

    try:
        result = convert(source.read_text(encoding="utf-8"), _settings(answers))
    except (SpecError, UnicodeDecodeError) as error:
        raise Refusal(f"{source} cannot be converted: {error}") from None
    notes = [f"not taken over: {name}: {reason}" for name, reason in sorted(result.left_out.items())]
    notes += [f"replace the placeholder: {path}" for path in result.placeholders]
    for note in notes:
        click.echo(note)
    return "".join(f"# {' '.join(note.split())}\n" for note in notes) + _as_yaml(result)


def _settings(answers: dict[str, Any]) -> dict[str, Any]:
    """Settings by dotted path of the answers that are given."""
    paths = {"name": "name", "model": "models.actor.path", "prompts": "data.prompts", "steps": "steps"}
    settings = {paths[name]: value for name, value in answers.items() if name in paths}
    if "reward_source" in answers:
        settings[REWARD_PATHS[answers.get("reward", "rule")]] = answers["reward_source"]
    if answers.get("lora"):
        settings["models.lora.rank"] = 16
    return settings


def _as_yaml(result: Any) -> str:
    """The settings as YAML. Raises Refusal if they are no valid spec."""
    from oppo_contract import SpecError, load_spec
    from oppo_contract.yaml_text import dump_yaml

    try:
        load_spec(result.tree())
    except SpecError as error:
        raise Refusal(str(error)) from None
    return dump_yaml(result.tree())
