"""Options and micro-batches for the tests of training-side adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slime_core.adapters.options import PathOptions
from slime_core.config.load import load
from slime_core.learner.packed.batches import MicroBatch
from slime_core.plugins.functions import find_function


def options_for(folder: Path, code: str, *, settings: tuple[str, ...] = (), **paths: str) -> PathOptions:
    """The options of a run that names functions of one file: ``options_for(tmp_path, CODE, spec="layers")``."""
    file = folder / "mine.py"
    file.write_text(code)
    sources = {name: (find_function(f"{file}:{function}", setting=name),) for name, function in paths.items()}
    return PathOptions(config=load(settings, check_rules=False).config, sources=sources)


def micro(**columns: Any) -> MicroBatch:
    """Two samples of 3 and 2 tokens: the first with response tokens 0 and 1, the second with token 2; two rollouts."""
    values = {
        "mask_U": [1.0, 1.0, 1.0],
        "weights_U": [0.25, 0.25, 0.5],
        "advantages_U": [2.0, 2.0, -1.0],
        "rollout_log_probs_U": [-1.0, -2.0, -3.0],
        **columns,
    }
    return MicroBatch(
        tokens_1T=torch.tensor([[10, 11, 12, 20, 21]]),
        position_ids_1T=torch.zeros(1, 5, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32),
        max_seqlen=3,
        num_samples=2,
        rows_U=torch.tensor([0, 1, 3]),
        targets_U=torch.tensor([11, 12, 21]),
        samples_U=torch.tensor([0, 0, 1]),
        places_U=torch.arange(3),
        scale=0.5,
        **{name: torch.tensor(column) for name, column in values.items()},
    )
