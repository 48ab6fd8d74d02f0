"""The PPO step's mathematics and the two trainers."""
