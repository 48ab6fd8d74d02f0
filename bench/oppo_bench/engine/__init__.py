"""`oppo bench engine`: every way to overlap a PPO step, on the same work."""
