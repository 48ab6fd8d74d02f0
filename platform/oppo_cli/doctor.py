"""`oppo doctor`: checks this installation and says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import click

from oppo_cli.home import Failure, Refusal
from oppo_cli.platform_commands import set_up_django, use_running_platform

MARKS = {"ok": "ok", "warning": "WARNING", "failed": "FAILED", "skipped": "skipped"}


@click.command()
@click.option(
    "--bundle", type=click.Path(dir_okay=False, path_type=Path), help="Write findings, versions, settings and logs here."
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(bundle: Path | None, as_json: bool) -> None:
    """Check database, broker, services, clocks, disks, TLS, mail, proxy, live updates and workers.

    Each finding says what to do. The bundle is for a report of a problem: it contains no secrets. Exit status 1: a check failed.
    """
    if bundle is not None and bundle.exists():
        raise Refusal(f"{bundle} exists; name a new file.")
    use_running_platform()
    set_up_django()
    from oppo_platform.diagnosis.bundle import write_bundle
    from oppo_platform.diagnosis.checks import run_checks

    findings = []
    for finding in run_checks():
        findings.append(finding)
        if not as_json:
            click.echo(f"{MARKS[finding.status]:8} {finding.check}: {finding.detail}")
            if finding.advice:
                click.echo(f"{'':8} → {finding.advice}")
    if as_json:
        click.echo(json.dumps([finding.as_dict() for finding in findings], indent=1))
    if bundle is not None:
        write_bundle(bundle, findings)
        click.echo(f"{bundle} has what a report needs. Look into it before you send it.", err=True)
    failed = sum(finding.status == "failed" for finding in findings)
    if failed:
        raise Failure(f"{failed} check{'s' if failed > 1 else ''} failed.")
