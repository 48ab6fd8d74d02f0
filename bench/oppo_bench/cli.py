"""`oppo bench`: the benches, each in a module that is imported when it is used."""

from __future__ import annotations

import click

from oppo_cli.main import LazyGroup

BENCHES = {
    "engine": "oppo_bench.engine.command:engine",
    "trl": "oppo_bench.trl.command:trl",
    "scheduler": "oppo_bench.scheduler.command:scheduler",
    "telemetry": "oppo_bench.telemetry.command:telemetry",
    "api": "oppo_bench.api.command:api",
}


@click.group(cls=LazyGroup, lazy=BENCHES)
def bench() -> None:
    """Measure. Every bench runs its variants in turn within one run and writes one format (docs/performance.md)."""
