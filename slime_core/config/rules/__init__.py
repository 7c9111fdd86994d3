"""Rules that settings cannot declare as conditions: arithmetic on several values, and looks at files.

    steps       batches, optimizer steps, learning-rate schedules, staleness
    lengths     prompts, responses and the context of the model
    layout      ranks, devices, heads, layers and experts divide
    engines     groups of engines, auxiliary models, flags of the engines
    evaluation  evaluation sets
    models      one ``config.json`` against another, or against what a setting needs of the model
    files       files and folders that a run reads and writes

A rule yields a message for each mistake: what was given, what is wrong, what is accepted, the next step. Rules import
nothing heavy, because they run before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from slime_core.config.schema import RunConfig

__all__ = ["Rule"]

Rule = Callable[[RunConfig], Iterator[str]]
"""Yields a message for each mistake in a configuration."""
