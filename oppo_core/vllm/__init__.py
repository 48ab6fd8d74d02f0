"""Decoding by vLLM (pinned in pyproject.toml, extra `gpu`), which nothing else may import, and only when it is asked for."""
