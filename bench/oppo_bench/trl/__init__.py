"""`oppo bench trl`: the engine against TRL's PPOTrainer."""
