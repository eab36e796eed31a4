"""Benchmarks. Run them from the repository's root: ``python -m bench.allreduce --help``."""
