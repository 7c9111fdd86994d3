"""Tensor mathematics that knows nothing of engines, processes or files: torch only."""
