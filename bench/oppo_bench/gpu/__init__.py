"""`python bench/gpu`: what overlap is worth on a GPU, measured by one command without a network (docs/performance.md)."""
