"""`oppo backup` and `oppo restore`: everything that the platform keeps in its database, in one file, and back."""

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


def _tell(line: str) -> None:
    click.echo(line, err=True)


@contextmanager
def _in_words() -> Iterator[None]:
    """Failures of the backup's modules as the command line's."""
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
    """Write a backup of the platform, while it runs or not, to a file, or into a folder under a name with the time.

    It holds the whole database as of one instant, a list of every checkpoint, and a manifest with checksums; nothing else
    unless asked for. `oppo restore` puts it back, `oppo restore --check` verifies it.
    """
    with platform_servers(), _in_words():
        set_up_django()
        from oppo_platform.backup.create import create_backup

        made = create_backup(_url(), file_or_folder, _tell, with_keys=with_keys, with_checkpoints=with_checkpoints)
    click.echo(f"{made.file}: {made.bytes:,} bytes, everything as of {made.manifest['made_at'][:19]} UTC.")
    click.echo("\n".join(not_in_it(made.manifest)))


def _url() -> str:
    return os.environ["DATABASE_URL"]


def not_in_it(manifest: dict[str, Any]) -> list[str]:
    """What a backup does not hold and must be kept apart, in lines."""
    told, lines = manifest["checkpoints"], []
    if not manifest["keys"]["included"]:
        lines += [
            "NOT INCLUDED: the keys. Without them team secrets cannot be decrypted, and all tokens become invalid.",
            "  Save secret_key and secrets_keys of OPPO_HOME (or OPPO_SECRET_KEY, OPPO_SECRETS_KEYS) separately, or --with-keys.",
        ]
    if left := told["registered"] - told["included"]:
        lines.append(
            f"NOT INCLUDED: files of {left} of {told['registered']} checkpoints. Copy the artifact root, or --with-checkpoints."
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
    """Put a backup in the place of the platform's database, once all of it has been verified. The platform must stand still.

    Fills a new database, brings it up to date, ends what the backup took for running, and swaps it for the old one, which is
    kept under another name. Until then nothing is changed.
    """
    with _in_words():
        if check:
            _check(file)
        else:
            _restore(file, replace, nothing_since)


def _check(file: Path) -> None:
    from oppo_platform.backup.archive import check_complete, open_archive

    with open_archive(file, _tell) as archive:
        check_complete(archive)
        told = archive.manifest
    click.echo(
        f"{file} is intact: OPPO {told['platform_version']}, PostgreSQL {told['postgres']}, made {told['made_at'][:19]} UTC."
    )
    click.echo(f"{told['rows'].get('public.runs_run', 0)} runs, {sum(told['rows'].values())} rows in {len(told['rows'])} tables.")
    click.echo("\n".join(not_in_it(told)))


def _restore(file: Path, replace: bool, nothing_since: bool) -> None:
    from oppo_platform.backup.archive import open_archive
    from oppo_platform.backup.databases import connect_server

    with open_archive(file, _tell) as archive, _standing_still() as home, connect_server(_url()) as server:
        set_up_django()
        from oppo_platform.backup.restore import restore as put_back

        done = put_back(archive, server, home.path, file.name, _tell, replace=replace, nothing_since=nothing_since)
    click.echo(f"Restored the platform as of {archive.manifest['made_at'][:19]} UTC, with {done.runs} runs.")
    click.echo("\n".join(_report(done, nothing_since)))


@contextmanager
def _standing_still() -> Iterator[Home]:
    """The home, in which no `oppo up` runs or starts meanwhile, and DATABASE_URL set."""
    home = Home.from_environment()
    with home.locked(), platform_servers(locked=True):
        yield home


def _report(done: Any, nothing_since: bool) -> list[str]:
    lines = []
    if done.kept:
        lines.append(f"The previous database is kept as {done.kept}. To delete it: oppo kept-databases --drop {done.kept}")
    if done.migrated:
        lines.append(f"Migrated: {', '.join(done.migrated)}.")
    lines += done.keys
    lines += [f"CANNOT BE DECRYPTED with the keys here, set it again: {what}" for what in done.undecryptable]
    lines += [f"MISSING checkpoint: {what}" for what in done.missing.lost]
    if done.missing.gone_before:
        lines.append(
            f"{done.missing.gone_before} checkpoints had been deleted before the backup: runs keep their latest and best."
        )
    if done.missing.elsewhere:
        lines.append(
            f"{done.missing.elsewhere} checkpoints are not accessible here: they are on nodes' disks or in another store."
        )
    if not nothing_since:
        lines.append(
            f"{done.attempts_ended} attempts were running then; they were ended, their runs are queued with checkpoints."
        )
        lines.append(
            "Links, invites, join tokens and sessions of then are invalid. TOKENS REVOKED SINCE ARE VALID AGAIN: review them."
        )
    return lines


@click.command("kept-databases")
@click.option("--drop", metavar="NAME", help="Delete this one permanently.")
@click.option("--put-back", metavar="NAME", help="Make this one the platform's database again; the current one is set aside.")
def kept_databases(drop: str | None, put_back: str | None) -> None:
    """List the databases that `oppo restore` has put aside, delete one, or undo a restore. The platform must stand still."""
    from oppo_platform.backup.databases import connect_server

    with _in_words(), _standing_still(), connect_server(_url()) as server:
        if drop is not None:
            server.drop_kept(drop)
        if put_back is not None:
            aside = server.swap_kept(put_back, datetime.now(UTC))
            click.echo(f"{put_back} is the platform's database again; the previous one is now {aside}.")
        click.echo("\n".join(server.kept()) or "No database is set aside.")
