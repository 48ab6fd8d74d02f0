"""Other experiment trackers (MLflow, TensorBoard, W&B) that get a run's steps (docs/trackers.md).

    engine ──▶ event log ◀── EventTail, Delivery ──▶ the tracker's own library      a process for each tracker
       ▲                          │
       └──── messages for the run's log

Training never waits for a tracker and never fails because of one: a tracker's process follows the event log, which is a durable
queue, at its own pace. The engine only starts and ends these processes.
"""
