"""docs/reference/commands.md: commands of `oppo` with arguments and options, from click."""

from __future__ import annotations

from collections.abc import Iterator

import click

from oppo_cli.main import EXIT_STATUSES, main
from scripts.reference.markdown import GENERATED, block, code, linked, paragraphs, table

HEAD = f"""\
# Command line

{GENERATED}. `oppo COMMAND --help` prints the same. A command names a missing package if only some of the extras
`client`, `worker`, `engine` and `platform` are installed.

## Exit status

{table(("status", "means"), ((f"`{status}`", words) for status, words in EXIT_STATUSES.items()))}
Exceptions are listed with the command.
"""
# Options of every command.
COMMON_OPTIONS = {"--help", "--version"}


def page() -> str:
    """The whole page as Markdown."""
    return "\n".join([HEAD, *(_section(path, command) for path, command in commands())])


def commands() -> Iterator[tuple[str, click.Command]]:
    """(`oppo spec check`, its command) of every command and group, in the order of `oppo --help`."""
    yield from _walk("oppo", main)


def _walk(path: str, group: click.Group) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group, info_name=path)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, f"{path} {name} is listed but missing"
        yield f"{path} {name}", command
        if isinstance(command, click.Group):
            yield from _walk(f"{path} {name}", command)


def options(command: click.Command) -> list[click.Option]:
    """Options of the command, without common and hidden ones."""
    own = (param for param in command.params if isinstance(param, click.Option))
    return [option for option in own if not COMMON_OPTIONS & set(option.opts) and not option.hidden]


def _section(path: str, command: click.Command) -> str:
    title = f"{'##' if path.count(' ') == 1 else '###'} `{path}`"
    usage = " ".join([path, *(piece for piece in command.collect_usage_pieces(click.Context(command)) if piece)])
    parts = [title, "", block(usage, "text"), *(f"{linked(text)}\n" for text in paragraphs(command.help or ""))]
    if isinstance(command, click.Group):
        names = command.list_commands(click.Context(command))
        parts.append("Subcommands: " + ", ".join(f"[`{name}`](#{path.replace(' ', '-')}-{name})" for name in names) + ".\n")
    if options(command):
        parts.append(table(("option", "default", "meaning"), map(_row, options(command))))
    return "\n".join(parts)


def _row(option: click.Option) -> tuple[str, str, str]:
    kind = "" if option.is_flag else " " + option.make_metavar(click.Context(click.Command(""))).removesuffix(" RANGE")
    name = ", ".join(option.opts) + kind
    words = option.help or ""
    return code(name), _default(option), linked(words) + _bounds(option) + (" Repeatable." if _repeats(option, words) else "")


def _repeats(option: click.Option, words: str) -> bool:
    return option.multiple and not any(word in words for word in ("epeat", "several times"))


def _default(option: click.Option) -> str:
    if option.required:
        return "**required**"
    if option.is_flag or option.multiple or not option.show_default or option.default is None:
        return ""
    return code(str(option.default))


def _bounds(option: click.Option) -> str:
    kind = option.type
    return f" `{kind._describe_range()}`" if isinstance(kind, click.IntRange | click.FloatRange) else ""
