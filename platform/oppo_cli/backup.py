"""`oppo backup`, `oppo restore` and `oppo kept-databases`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from oppo_cli.home import Failure, Home, Refusal
from oppo_cli.platform_commands import platform_servers, set_up_django


def _print_progress(line: str) -> None:
    click.echo(line, err=True)


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise errors of backup and database as `Refusal` or `Failure`."""
    import psycopg

    from oppo_platform.backup import BackupError, BackupRefused

    try:
        yield
    except BackupRefused as error:
        raise Refusal(str(error)) from error
    except BackupError as error:
        raise Failure(str(error)) from error
    except psycopg.Error as error:
        raise Failure(f"The database failed: {str(error).strip()}") from error


@click.command()
@click.argument("file_or_folder", type=click.Path(path_type=Path))
@click.option(
    "--with-keys",
    is_flag=True,
    help="Include the secret key and the keys of team secrets; store the backup as safely as these keys.",
)
@click.option("--with-checkpoints", is_flag=True, help="Include checkpoint files that are on this machine.")
def backup(file_or_folder: Path, with_keys: bool, with_checkpoints: bool) -> None:
    """Write a backup of the platform to a file, or to a folder under a name with the time. The platform may run meanwhile.

    Contains a consistent snapshot of the database, a list of all checkpoints, and a manifest with checksums. `oppo restore`
    restores it, `oppo restore --check` verifies it.
    """
    with platform_servers(), _translate_errors():
        set_up_django()
        from oppo_platform.backup.create import create_backup

        result = create_backup(_url(), file_or_folder, _print_progress, with_keys=with_keys, with_checkpoints=with_checkpoints)
    click.echo(f"{result.file}: {result.bytes:,} bytes, everything as of {result.manifest['made_at'][:19]} UTC.")
    click.echo("\n".join(missing_parts(result.manifest)))


def _url() -> str:
    return os.environ["DATABASE_URL"]


def missing_parts(manifest: dict[str, Any]) -> list[str]:
    """Lines about data that a backup does not contain and that must be saved separately."""
    checkpoints, lines = manifest["checkpoints"], []
    if not manifest["keys"]["included"]:
        lines += [
            "NOT INCLUDED: the keys. Without them team secrets cannot be decrypted, and all tokens become invalid.",
            "  Save secret_key and secrets_keys of OPPO_HOME (or OPPO_SECRET_KEY, OPPO_SECRETS_KEYS) separately, or --with-keys.",
        ]
    if left := checkpoints["registered"] - checkpoints["included"]:
        lines.append(
            f"NOT INCLUDED: files of {left} of {checkpoints['registered']} checkpoints. "
            "Copy the artifact root, or --with-checkpoints."
        )
    return lines


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--check", is_flag=True, help="Only verify the backup and list its content.")
@click.option("--replace", is_flag=True, help="Replace a database that has runs; the old one is kept under another name.")
@click.option(
    "--nothing-since",
    is_flag=True,
    help="Nothing has changed since the backup (a move, an upgrade): running runs continue, links stay valid, ids continue.",
)
def restore(file: Path, check: bool, replace: bool, nothing_since: bool) -> None:
    """Verify a backup and replace the platform's database by it. The platform must be stopped.

    Fills a new database, migrates it, ends the attempts that were running, and swaps it for the old one, which is kept under
    another name. Nothing is changed until the swap.
    """
    with _translate_errors():
        if check:
            _check(file)
        else:
            _restore(file, replace, nothing_since)


def _check(file: Path) -> None:
    from oppo_platform.backup.archive import check_complete, open_archive

    with open_archive(file, _print_progress) as archive:
        check_complete(archive)
        manifest = archive.manifest
    made_at = manifest["made_at"][:19]
    click.echo(f"{file} is intact: OPPO {manifest['platform_version']}, PostgreSQL {manifest['postgres']}, made {made_at} UTC.")
    rows = manifest["rows"]
    click.echo(f"{rows.get('public.runs_run', 0)} runs, {sum(rows.values())} rows in {len(rows)} tables.")
    click.echo("\n".join(missing_parts(manifest)))


def _restore(file: Path, replace: bool, nothing_since: bool) -> None:
    from oppo_platform.backup.archive import open_archive
    from oppo_platform.backup.databases import connect_server

    with open_archive(file, _print_progress) as archive, _locked_home() as home, connect_server(_url()) as server:
        set_up_django()
        from oppo_platform.backup.restore import restore as restore_archive

        result = restore_archive(
            archive, server, home.path, file.name, _print_progress, replace=replace, nothing_since=nothing_since
        )
    click.echo(f"Restored the platform as of {archive.manifest['made_at'][:19]} UTC, with {result.runs} runs.")
    click.echo("\n".join(_report(result, nothing_since)))


@contextmanager
def _locked_home() -> Iterator[Home]:
    """Lock the home against `oppo up` and set DATABASE_URL."""
    home = Home.from_environment()
    with home.locked(), platform_servers(locked=True):
        yield home


def _report(result: Any, nothing_since: bool) -> list[str]:
    lines = []
    if result.kept:
        lines.append(f"The previous database is kept as {result.kept}. To delete it: oppo kept-databases --drop {result.kept}")
    if result.migrated:
        lines.append(f"Migrated: {', '.join(result.migrated)}.")
    lines += result.keys
    lines += [f"CANNOT BE DECRYPTED with the keys here, set it again: {item}" for item in result.undecryptable]
    lines += [f"MISSING checkpoint: {item}" for item in result.missing.lost]
    lines += [f"HELD until its files are there: {item}" for item in result.held]
    if result.missing.gone_before:
        lines.append(
            f"{result.missing.gone_before} checkpoints had been deleted before the backup: runs keep their latest and best."
        )
    if result.missing.elsewhere:
        lines.append(
            f"{result.missing.elsewhere} checkpoints are not accessible here: they are on nodes' disks or in another store."
        )
    if not nothing_since:
        lines.append(
            f"{result.attempts_ended} attempts were running then; they were ended, their runs are queued with checkpoints."
        )
        lines.append(
            "Links, invites, join tokens and sessions of then are invalid. TOKENS REVOKED SINCE ARE VALID AGAIN: review them."
        )
    return lines


@click.command("kept-databases")
@click.option("--drop", metavar="NAME", help="Delete this one permanently.")
@click.option("--put-back", metavar="NAME", help="Make this one the platform's database again; the current one is set aside.")
def kept_databases(drop: str | None, put_back: str | None) -> None:
    """List the databases that `oppo restore` replaced, delete one, or undo a restore. The platform must be stopped."""
    from oppo_platform.backup.databases import connect_server

    with _translate_errors(), _locked_home(), connect_server(_url()) as server:
        if drop is not None:
            server.drop_kept(drop)
        if put_back is not None:
            aside = server.swap_kept(put_back, datetime.now(UTC))
            click.echo(f"{put_back} is the platform's database again; the previous one is now {aside}.")
        click.echo("\n".join(server.kept()) or "No database is set aside.")
