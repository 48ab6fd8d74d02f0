"""A run that trains, for the tests of alerts."""

from __future__ import annotations

import pytest

from oppo_platform.alerts.evaluator import evaluate_runs


@pytest.fixture
def training(world, events):
    """(world, run, tell): a run that trains; `tell(step, **metrics)` tells one more step and looks after the runs."""
    worker = world.worker()
    run, attempt_id = world.start(worker)
    seq = iter(range(1, 10_000))
    worker.send_events(attempt_id, [events.started(next(seq))])

    def tell(*steps, look=True, **metrics):
        named = {name.replace("__", "/"): value for name, value in metrics.items()}
        batch = [
            events.step(next(seq), step, **{key: value(step) if callable(value) else value for key, value in named.items()})
            for step in steps
        ]
        assert worker.send_events(attempt_id, batch).status_code == 200
        return evaluate_runs() if look else 0

    tell.worker, tell.attempt_id = worker, attempt_id
    return world, run, tell
