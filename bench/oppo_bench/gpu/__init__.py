"""`python bench/gpu`: gain from overlap on a GPU, measured by one command without a network (docs/benchmarks.md)."""
