"""`oppo bench`: each benchmark is a module that is imported on use."""

from __future__ import annotations

import click

from oppo_cli.main import LazyGroup

BENCHES = {
    "all": "oppo_bench.everything:everything",
    "engine": "oppo_bench.engine.command:engine",
    "trl": "oppo_bench.trl.command:trl",
    "scheduler": "oppo_bench.scheduler.command:scheduler",
    "telemetry": "oppo_bench.telemetry.command:telemetry",
    "api": "oppo_bench.api.command:api",
}


@click.group(cls=LazyGroup, lazy=BENCHES)
def bench() -> None:
    """Benchmarks. Each runs its variants interleaved in one run and writes one JSON format (docs/benchmarks.md)."""
