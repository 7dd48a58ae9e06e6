"""Benchmarks and the demo; run from a checkout of the repository."""
