"""The update half of a PPO step: update strategies, gathering the batch of all ranks, and non-finite steps."""
