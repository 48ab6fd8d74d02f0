"""`oppo bench`: the benches, each in a module that is imported when it is used."""

from __future__ import annotations

import click

from oppo_cli.main import LazyGroup

BENCHES = {
    "engine": "oppo_cli.bench_engine:engine",
    "trl": "oppo_cli.bench_trl:trl",
    "scheduler": "oppo_cli.bench_scheduler:scheduler",
    "telemetry": "oppo_cli.bench_telemetry:telemetry",
    "api": "oppo_cli.bench_api:api",
}


@click.group(cls=LazyGroup, lazy=BENCHES)
def bench() -> None:
    """Measure. Every bench runs its variants in turn within one run and writes one format (docs/performance.md)."""
