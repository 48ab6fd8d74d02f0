"""Networks of the four roles (built-in transformer, Hugging Face decoders), KV caches, incremental prefill, and pass budgets."""
