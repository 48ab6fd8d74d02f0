"""The update half of a PPO step: strategies, several ranks, and what follows a result that is not finite."""
