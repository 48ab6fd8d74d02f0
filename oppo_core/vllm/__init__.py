"""vLLM's engines for decoding and reward models (pinned in pyproject.toml, extra `gpu`); imported only when configured."""
