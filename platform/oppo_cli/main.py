"""The command `oppo`; subcommands are imported when used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points, version

import click

FAILED = 1
REFUSED = 2
# Of every command; part of docs/reference/commands.md.
EXIT_STATUSES = {
    0: "Success.",
    FAILED: "Failure: an error, a timeout, or a run that was waited for and did not succeed.",
    REFUSED: "Rejected: invalid command line, configuration, spec or token, or something was not found.",
}

COMMANDS = {
    "up": "oppo_cli.up:up",
    "demo": "oppo_cli.demo:demo",
    "example": "oppo_cli.examples:example",
    "train": "oppo_cli.train:train",
    "login": "oppo_cli.client_commands:login",
    "submit": "oppo_cli.client_commands:submit",
    "runs": "oppo_cli.client_commands:runs",
    "watch": "oppo_cli.client_commands:watch",
    "logs": "oppo_cli.client_commands:logs",
    "cancel": "oppo_cli.client_commands:cancel",
    "compare": "oppo_cli.client_commands:compare",
    "pull": "oppo_cli.client_commands:pull",
    "init": "oppo_cli.init:init",
    "spec": "oppo_cli.spec_commands:spec",
    "trace": "oppo_cli.trace:trace",
    "export": "oppo_cli.export:export",
    "convert": "oppo_cli.convert:convert",
    "simulate": "oppo_cli.simulate:simulate",
    "admin": "oppo_cli.platform_commands:admin",
    "login-link": "oppo_cli.platform_commands:login_link",
    "manage": "oppo_cli.platform_commands:manage",
    "migrate": "oppo_cli.platform_commands:migrate",
    "backup": "oppo_cli.backup:backup",
    "restore": "oppo_cli.backup:restore",
    "doctor": "oppo_cli.doctor:doctor",
    "kept-databases": "oppo_cli.backup:kept_databases",
    "web": "oppo_cli.platform_commands:web",
    "scheduler": "oppo_cli.platform_commands:scheduler",
    "housekeeper": "oppo_cli.platform_commands:housekeeper",
    "worker": "oppo_cli.worker_commands:worker",
}

# Entry point group of further commands: `oppo bench` and `oppo cluster` (pyproject.toml).
COMMAND_GROUP = "oppo.commands"

OWN_PACKAGES = frozenset({"oppo_cli", "oppo_client", "oppo_contract", "oppo_platform", "oppo_core", "oppo_bench", "worker"})

ENGINE_PACKAGES = frozenset({"torch", "transformers", "tokenizers", "safetensors", "peft"})


class LazyGroup(click.Group):
    """A group whose commands are given as `module:attribute` and imported when used."""

    def __init__(self, lazy: Mapping[str, str], **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in documentation order."""
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        if cmd_name not in self._lazy:
            return None
        module, _, name = self._lazy[cmd_name].partition(":")
        try:
            command = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as missing:
            return _unavailable_command(cmd_name, missing)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; a missing package raises a message with the extra that installs it."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as missing:
            raise _missing_package(missing) from missing


class CommandLine(LazyGroup):
    """`oppo`: the commands of this package, then those that other installed packages register in `COMMAND_GROUP`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in documentation order."""
        return list(dict.fromkeys([*super().list_commands(ctx), *sorted(entry_points(group=COMMAND_GROUP).names)]))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        if cmd_name not in self._lazy:
            self._lazy = {**self._lazy, **{entry.name: entry.value for entry in entry_points(group=COMMAND_GROUP)}}
        return super().get_command(ctx, cmd_name)


def _unavailable_command(name: str, missing: ModuleNotFoundError) -> click.Command:
    """A command that is listed but fails with the missing package when used."""
    error = _missing_package(missing)

    def refuse() -> None:
        raise error

    any_arguments = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(name, callback=refuse, short_help=f"(needs {missing.name})", context_settings=any_arguments)


def _missing_package(missing: ModuleNotFoundError) -> click.ClickException:
    """An error that names the extra to install. Raises `missing` if it is one of our own modules."""
    package = (missing.name or "").partition(".")[0]
    if not package or package in OWN_PACKAGES:
        raise missing
    extra = "engine" if package in ENGINE_PACKAGES else "platform"
    return click.ClickException(
        f"This command needs {package}, which is not installed here. The extras `client`, `worker`, `engine` and `platform`"
        f" install what their commands need; in a checkout: pip install '.[{extra}]'"
    )


@click.group(cls=CommandLine, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("oppo-platform"), message="oppo %(version)s")
def main() -> None:
    """PPO-based RLHF with overlapped stages: a training engine, a queue and live dashboards.

    Start with `oppo demo` (the platform on this machine and two runs compared) or `oppo up` (the platform alone).
    Exit status: 0 success, 1 failure, 2 rejected command line or spec.
    """
