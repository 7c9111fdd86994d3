"""Benchmarks; the docstring of a file has its command, and docs/performance.md and other pages have the tables."""
