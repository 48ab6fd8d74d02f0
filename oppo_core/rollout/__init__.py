"""Rollout: prompts, the pool of B+Δ sequences, and continuous-batching decoders."""
