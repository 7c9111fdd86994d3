"""What lifecycle hooks are handed, made without a run: every setting at its default."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.config.schema import RunConfig
from slime_core.config.settings import core_values
from slime_core.plugins.contracts import LearnerInfo, Optimizer, RunInfo

if TYPE_CHECKING:
    import torch

__all__ = ["learner_info", "run_info"]


def run_info(folder: Path, *, step: int = 0, num_rollout: int = 2) -> RunInfo:
    """What ``slime_run_start`` and ``slime_run_end`` get.

    Arguments:
        folder: of the run; has to exist.
        step: training steps done when it started.
        num_rollout: training steps that it will have done at its end.
    """
    return RunInfo(folder, core_values(RunConfig()), step=step, num_rollout=num_rollout)


def learner_info(
    rank: int, world_size: int, *, model: Sequence[torch.nn.Module] = (), optimizer: Optimizer | None = None
) -> LearnerInfo:
    """What the hooks of learner rank ``rank`` of ``world_size`` get.

    Arguments:
        model: the chunks of the model on this rank; empty: it is not built yet.
        optimizer: None: it is not built yet.
    """
    return LearnerInfo(rank, world_size, core_values(RunConfig()), model=tuple(model), optimizer=optimizer)
