"""The worker of one node: an agent, a Celery consumer, and a supervisor for every attempt.

    agent ── heartbeat every 2 s ──▶ platform          the parent of all other processes
      ├── consumer   Celery: forwards launch orders to the agent through a pipe, earlier than the next heartbeat
      └── supervisor one per attempt: claims it, starts the engine, renews the lease, uploads events, reports the outcome
            └── engine `python -m oppo_core`, in its own session; it ends with its supervisor

Guarantee: a supervisor holds the lock of its attempt's folder while it runs, the platform grants each claim once, and events stay
on disk until the platform has acknowledged them. So nothing is lost and nothing runs twice, whichever process is killed.
"""
