"""Benchmarks behind `oppo bench`: each interleaves its variants in one run and writes one format (docs/performance.md)."""
