"""Benchmarks behind `oppo bench`: each interleaves its variants in one run and writes one format (docs/benchmarks.md)."""
