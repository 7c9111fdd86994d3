"""The settings of the embedded arithmetic run: defaults that apply when no model is named, those of its task only when
no prompts are named either.

They make ``slime run --plugin grpo`` learn something visible within minutes on two CPU cores. Anything that a plugin, a
file or a flag says goes before them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["ARITHMETIC", "EMBEDDED_DEFAULTS", "OF_EVALUATIONS", "OF_THE_MODEL"]

ARITHMETIC: Final = Path(__file__).resolve().parent.parent / "builtin" / "arithmetic"
"""Folder of the embedded task: ``model/`` is a Hugging Face folder, ``data/`` holds the prompt files."""

OF_THE_MODEL: Final[dict[str, object]] = {
    "lr": 3e-4,
    "lr_decay_style": "linear",
    "weight_decay": 0.0,
    "adam_beta2": 0.95,
    "lr_warmup_iters": 5,
    "rollout_max_response_len": 8,
    "apply_chat_template": True,
}
"""Setting to value; the unit of each is that of its field. They hold for the built-in model with any prompts."""

EMBEDDED_DEFAULTS: Final[dict[str, object]] = {
    **OF_THE_MODEL,
    "num_rollout": 80,
    "eval_interval": 20,
    "eval_prompt_data": (("arithmetic", ARITHMETIC / "data" / "held_out.jsonl"),),
}
"""The same with those of the built-in task."""

OF_EVALUATIONS: Final = frozenset({"eval_interval", "eval_prompt_data"})
"""Those that ask for evaluations."""
