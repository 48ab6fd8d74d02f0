"""The update half of a PPO step: update strategies, update overlap, and non-finite steps."""
