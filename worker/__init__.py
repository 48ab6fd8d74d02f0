"""The worker of one node: an agent, a Celery consumer, and a supervisor for every attempt.

    agent ── heartbeat every 2 s ──▶ platform          the agent is the parent of everything on the node
      ├── consumer   Celery; passes launch orders on to the agent through a pipe, and so only shortens the wait
      └── supervisor one an attempt: claims it, starts the engine, renews the lease, ships events, reports the outcome
            └── engine `python -m oppo_core`, in a session of its own; it dies with its supervisor

The law: a supervisor holds the lock of its attempt's folder for as long as it lives, the platform hands an attempt out once,
and what the engine wrote stays on disk until the platform has acknowledged it. So nothing is lost and nothing runs twice,
whoever is killed when.
"""
