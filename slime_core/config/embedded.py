"""The settings of the embedded arithmetic run: defaults that apply when neither a model nor prompts are named.

They make ``slime run --plugin grpo`` learn something visible within minutes on two CPU cores. Anything that a plugin, a
file or a flag says goes before them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["ARITHMETIC", "EMBEDDED_DEFAULTS", "OF_EVALUATIONS"]

ARITHMETIC: Final = Path(__file__).resolve().parent.parent / "builtin" / "arithmetic"
"""Folder of the embedded task: ``model/`` is a Hugging Face folder, ``data/`` holds the prompt files."""

EMBEDDED_DEFAULTS: Final[dict[str, object]] = {
    "num_rollout": 80,
    "lr": 3e-4,
    "lr_decay_style": "linear",
    "weight_decay": 0.0,
    "adam_beta2": 0.95,
    "lr_warmup_iters": 5,
    "rollout_max_response_len": 8,
    "apply_chat_template": True,
    "eval_interval": 20,
    "eval_prompt_data": (("arithmetic", ARITHMETIC / "data" / "held_out.jsonl"),),
}
"""Setting to value; the unit of each is that of its field."""

OF_EVALUATIONS: Final = frozenset({"eval_interval", "eval_prompt_data"})
"""Those that ask for evaluations."""
