"""Other experiment trackers (MLflow, TensorBoard, W&B) that are told what the journal is told (docs/trackers.md).

    journal ──▶ Trackers ──▶ Feed: bounded queue ─ pipe ─▶ process: Courier ──▶ Sink: the tracker's own library
       ▲            │                                          │
       └── log ◀────┴────────────── what it has to say ◀───────┘

Law: training never waits for a tracker and never ends because of one. Each has a process of its own, so that neither a library
that hangs nor one that dies touches the engine; what it cannot take in time is thinned out, counted and told.
"""
