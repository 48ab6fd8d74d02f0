"""`oppo spec`: validate a spec, print its schema or an example."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oppo_cli.examples import SPECS
from oppo_cli.home import Failure, Refusal
from oppo_contract.presets import example_text

if TYPE_CHECKING:
    from oppo_contract import RunSpec
    from oppo_core.engine.preflight import Findings

GIB = 2**30


@click.group()
def spec() -> None:
    """Work with run specs."""


@spec.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--deep", is_flag=True, help="Also check models, prompts, reward, memory and disk on this machine.")
@click.option(
    "--root",
    "roots",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Root folder of model and prompt ids, for --deep. Repeatable.",
)  # fmt: skip
@click.option(
    "--device-gib",
    type=click.FloatRange(min=0, min_open=True),
    help="For --deep: estimate for GPUs with this much memory, which are elsewhere. Default: the GPUs here, or where there are"
    " none, for a run on GPUs, 80.",
)  # fmt: skip
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="For --deep: write the figures to this file."
)  # fmt: skip
def check(file: Path, deep: bool, roots: tuple[Path, ...], device_gib: float | None, json_file: Path | None) -> None:
    """Validate a spec FILE. Models and prompts are only checked with --deep and at submit.

    With --device-gib what this machine lacks is reported, and only memory that does not fit makes the command fail.
    """
    if not deep and (device_gib is not None or json_file is not None):
        raise click.UsageError("--device-gib and --json need --deep.")
    spec = read_spec(file)
    if deep:
        _check_deep(spec, list(roots), device_gib, json_file)
    click.echo(f"{file}: valid. {spec.name}: {spec.steps} steps, batch {spec.ppo.batch_size}.")


def _check_deep(spec: RunSpec, roots: list[Path], device_gib: float | None, json_file: Path | None) -> None:
    """Print memory and disk use. Raises Refusal with all errors that prevent the first step."""
    from oppo_contract.machine import mib
    from oppo_core.engine.preflight import error_text, preflight

    findings = preflight(spec, roots, Path(), round((device_gib or 0) * GIB))
    for device in findings.memory:
        for item in device.items:
            click.echo(f"{item.name:32} {mib(item.size):>14}  = {item.arithmetic}")
        total = "total memory" + (f", {device.device or device.planned.group}" if len(findings.memory) > 1 else "")
        where = "free" if device.device is not None else "elsewhere"
        click.echo(f"{total:32} {mib(device.needed):>14}  of {mib(device.available)} {where}")
    if findings.memory:
        click.echo(f"{'a checkpoint':32} {mib(findings.checkpoint):>14}  on disk")
    if findings.longest_prompt:
        tokens, limit = f"{findings.longest_prompt} tokens", spec.rollout.max_prompt_tokens
        click.echo(f"{'longest prompt':32} {tokens:>14}  of {limit} (rollout.max_prompt_tokens)")
    problems = [error_text(error) for error in findings.errors]
    if json_file is not None:
        _write_figures(json_file, deep_figures(findings) | {"problems": problems, "remedy": findings.remedy})
    listed = "\n".join(f"- {problem}" for problem in problems)
    if problems and (device_gib is None or not all(device.fits for device in findings.memory)):
        raise Refusal(f"This run could not train its first step here:\n{listed}")
    if problems:
        click.echo(f"On this machine it could not:\n{listed}")


def deep_figures(findings: Findings) -> dict[str, Any]:
    """Figures of the estimate by name, in GiB (docs/models.md, "How large a model may be"); without those that are unknown."""
    figures: dict[str, Any] = {}
    for device in findings.memory:
        planned, group = device.planned, f"memory/{device.planned.group}"
        figures |= {
            f"{group}/devices": planned.count,
            f"{group}/gib": _gib(planned.needed - planned.vllm),
            f"{group}/vllm_gib": _gib(planned.vllm),
            f"{group}/available_gib": _gib(device.available),
        }
        figures |= {f"{group}/items/{item.name}": _gib(item.size) for item in planned.items}
    if findings.memory:
        own = [device.planned.needed - device.planned.vllm for device in findings.memory]
        fits = all(device.fits for device in findings.memory)
        figures |= {"memory/largest_gib": _gib(max(own)), "memory/fits": fits, "checkpoint/gib": _gib(findings.checkpoint)}
    return figures


def _gib(size: int) -> float:
    return round(size / GIB, 4)


def _write_figures(file: Path, figures: dict[str, Any]) -> None:
    try:
        file.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise Failure(f"{file} cannot be written: {error.strerror}.") from error


@spec.command()
def schema() -> None:
    """Print the JSON schema of a spec."""
    from oppo_contract import RunSpec

    click.echo(json.dumps(RunSpec.model_json_schema(), indent=2, ensure_ascii=False))


@spec.command()
@click.argument("name", type=click.Choice(SPECS), default="oppo")
def example(name: str) -> None:
    """Print an example spec."""
    try:
        click.echo(example_text(name), nl=False)
    except OSError as error:
        raise Refusal(f"The example {name} is not installed: {error}") from error


def read_spec(file: Path) -> RunSpec:
    """A valid spec. Raises Refusal (exit status 2) with one line per problem."""
    from oppo_contract import SpecError
    from oppo_contract.spec import MAX_SPEC_BYTES
    from oppo_contract.yaml_text import load_yaml

    try:
        with file.open("rb") as content:
            text = content.read(MAX_SPEC_BYTES + 1).decode()
        if len(text.encode()) > MAX_SPEC_BYTES:
            raise Refusal(f"{file} is {file.stat().st_size:,} bytes long; the limit is {MAX_SPEC_BYTES:,}.")
        return load_yaml(text)
    except OSError as error:
        raise Refusal(f"{file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise Refusal(f"{file} is not UTF-8 text.") from error
    except SpecError as error:
        raise Refusal(f"{file} is invalid:\n" + "\n".join(f"  {problem}" for problem in error.problems)) from error
