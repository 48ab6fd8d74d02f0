"""A published language model, SmolLM2-135M-Instruct, with three tasks: sentiment, a learned reward model, and arithmetic."""
