"""Section [eval]: measuring on held-out prompts."""

from __future__ import annotations

from pathlib import Path

from slime_core.config.bounded import Count, Name, PositiveOrZero
from slime_core.config.section import Section

__all__ = ["EvalConfig"]


class EvalConfig(Section):
    """Measuring on held-out prompts."""

    eval_prompt_data: tuple[tuple[Name, Path], ...] = ()
    """Named files of prompts to evaluate on: NAME FILE. Empty: no evaluation."""
    eval_interval: Count | None = None
    """Evaluate after every so many rollouts, and at the end. None: only before the first."""
    skip_eval_before_train: bool = False
    """Do not evaluate the start weights."""
    n_samples_per_eval_prompt: Count = 1
    """Responses an evaluation prompt; the score is their mean."""
    eval_temperature: PositiveOrZero = 0.0
    """Sampling temperature of evaluation. 0: greedy."""
    eval_max_response_len: Count | None = None
    """Longest evaluation response in tokens. None: rollout_max_response_len."""
