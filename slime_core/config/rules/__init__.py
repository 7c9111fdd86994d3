"""Rules that settings cannot declare as conditions: arithmetic on several values, and looks at files.

    sizes    batches, optimizer steps, learning-rate schedules, staleness; prompts, responses, context of the model
    models   ranks, devices, heads, layers and experts divide; one ``config.json`` against another, or against what a
             setting needs of the model
    engines  groups of engines, auxiliary models, flags of the engines
    files    files and folders that a run reads and writes

Those of evaluations are in :mod:`slime_core.config.eval_sets`.

A rule yields a message for each mistake: what was given, what is wrong, what is accepted, the next step. Rules import
nothing heavy, because they run before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from slime_core.config.schema import RunConfig

Rule = Callable[[RunConfig], Iterator[str]]
"""Yields a message for each mistake in a configuration."""
