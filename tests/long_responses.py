"""Prompts whose responses have given lengths, so that some are in flight when others are complete."""

from __future__ import annotations

import json
import random
from pathlib import Path

from examples.arithmetic.task import data_files

__all__ = ["long_responses"]


def long_responses(path: Path, longest: int, dice: random.Random) -> list[str]:
    """Writes the prompts of the embedded task to ``path``, each with its own number of tokens, 4 to ``longest``, before
    which no response ends; returns the flags of a run on them."""
    lines = []
    for row in map(json.loads, data_files()["train.jsonl"].splitlines()):
        tokens = dice.randint(4, longest)
        row["metadata"]["sampling_params"] = {"min_new_tokens": tokens, "max_new_tokens": tokens + 1}
        lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines))
    return ["--prompt-data", str(path), "--rollout-max-response-len", str(longest + 1), "--rm-type", "random"]
