"""Timings, each with the command that prints it; docs/performance.md and its neighbours hold their tables."""
