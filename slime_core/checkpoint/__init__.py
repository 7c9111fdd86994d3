"""Run state on disk, atomically; and folders in Megatron's torch_dist format.

    folder     files of a checkpoint and their atomic replacement; the newest checkpoint; when a run saves, and which
               checkpoints it keeps
    sharded    model, optimizer and schedule in Megatron's torch_dist format

The rule between them: all files are written into a draft folder, which is renamed once it is complete.

PUBLIC are the names below, for programs that read and write torch_dist folders; the files are not. ``StoredTensors``,
``save_weights`` and ``sharded_tensors`` load torch and Megatron at their first use, so call
:func:`slime_core.modeling.prepare_megatron` before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core.checkpoint.folder import replacing
from slime_core.config.model_config import CARRIED, config_folder, torch_dist_folder

if TYPE_CHECKING:
    from slime_core.checkpoint.sharded import StoredTensors as StoredTensors
    from slime_core.checkpoint.sharded import save_weights as save_weights
    from slime_core.checkpoint.sharded import sharded_tensors as sharded_tensors

__all__ = [
    "CARRIED",
    "StoredTensors",
    "config_folder",
    "replacing",
    "save_weights",
    "sharded_tensors",
    "torch_dist_folder",
]


def __getattr__(name: str) -> object:
    if name not in ("StoredTensors", "save_weights", "sharded_tensors"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from slime_core.checkpoint import sharded

    return getattr(sharded, name)
