"""Sends a run's steps to experiment trackers: MLflow, TensorBoard, W&B (docs/trackers.md).

    engine ──▶ event log ◀── EventTail, Delivery ──▶ the tracker's library      one process per tracker
       ▲                          │
       └──── messages for the run's log

Training never waits for a tracker and never fails because of one: each tracker's process reads the event log, a durable queue, at
its own pace. The engine only starts and stops these processes.
"""
