"""Writes what one rank trains of a rollout to a file: safetensors with the packing as metadata.

Per-sample and per-token columns stand in the order of the shard. A rank writes only what it holds: NaN stands where
another context-parallel rank holds a token, and a column that no pass computed is left out, such as ``old_log_probs_U``
in a rollout of one optimizer step, where the current log-probabilities are the old ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save

from slime_core.learner.micro_batches import MicroBatch
from slime_core.learner.settings import LearnerSettings
from slime_core.track.record import write_atomically
from slime_core.types import TrainBatch

__all__ = ["save_train_data", "trained_columns"]

FORMAT, VERSION = "slime train data", "1"

LEFT_OUT = frozenset({"rows_U", "targets_U", "samples_U", "places_U", "fresh_U"})
"""Indices into the row, which the shard holds already, and which tokens parity compares, which depends on engines."""


def save_train_data(
    template: Path, shard: TrainBatch, steps: Sequence[Sequence[MicroBatch]], settings: LearnerSettings
) -> Path:
    """Write what this rank trains of ``shard``; the file holds all of it, or what it held before.

    Arguments:
        template: ``{rollout_id}`` and ``{rank}`` stand for their numbers.
        steps: the micro-batches of each optimizer step, with every column that the run computes.
    """
    name = f"{template}".replace("{rollout_id}", f"{shard.rollout}").replace("{rank}", f"{settings.rank}")
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "rollout": f"{shard.rollout}",
        "rank": f"{settings.rank}",
        "world_size": f"{settings.world_size}",
        "temperature": repr(float(shard.temperature)),
        "inputs": json.dumps({name: given.dtype for name, given in shard.inputs.items()}),
        "steps": json.dumps([asdict(step) for step in shard.steps]),
    }
    return write_atomically(Path(name), save(trained_columns(shard, steps), metadata=metadata))


def trained_columns(shard: TrainBatch, steps: Sequence[Sequence[MicroBatch]]) -> dict[str, np.ndarray]:
    """Every column of ``shard``, and every per-token column of its micro-batches, float32 [u] in the shard's order."""
    own = {one.name: getattr(shard, one.name) for one in fields(shard)}
    found = {name: np.ascontiguousarray(values) for name, values in own.items() if isinstance(values, np.ndarray)}
    for name, given in shard.inputs.items():
        found |= {f"inputs/{name}": given.values}
        found |= {f"inputs/{name}/starts_B": given.starts_B, f"inputs/{name}/counts_B": given.counts_B}
    found |= {f"{name}_B": np.ascontiguousarray(values) for name, values in shard.columns_B.items()}
    # An idle micro-batch repeats another one without weight, to complete a schedule.
    for micro in (micro for step in steps for micro in step if micro.scale):
        for name, values_U in _per_token(micro).items():
            column_U = found.setdefault(f"trained/{name}", np.full(shard.loss_mask_U.shape, np.nan, np.float32))
            column_U[micro.places_U.cpu().numpy()] = values_U.detach().float().cpu().numpy()
    return found


def _per_token(micro: MicroBatch) -> dict[str, torch.Tensor]:
    values = {one.name: getattr(micro, one.name) for one in fields(micro) if one.name.endswith("_U")}
    return {n: v for n, v in values.items() if isinstance(v, torch.Tensor) and n not in LEFT_OUT}
