"""Evaluation on held-out prompts, which `rollout/held_out.py` decodes."""
