"""The node agent, the attempt supervisor and the outbox. It starts the engine as a process of its own."""
