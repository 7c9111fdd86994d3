"""The settings of a learner rank, written by the driver; so nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_core.config.schema import RunConfig
from slime_core.modeling.layout import ParallelLayout
from slime_core.plugins.construction import run_view
from slime_core.plugins.contracts import RunView

__all__ = ["LearnerSettings"]


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """The settings of one rank of the learner or of a separate critic.

    Arguments:
        config: the run's settings.
        folder: Hugging Face folder with the start weights.
        architecture: the checkpoint's architecture string; a plugin's model spec fits it.
        policy_loss: name of the policy loss component.
        options: plugin name -> its options object.
        num_steps: optimizer steps of the whole run, for the schedule.
        rank, world_size: of the process among the learner's.
        address: ``host:port`` where rank 0 listens for the others.
        num_threads: threads of one operation on a CPU; 0: torch decides.
        run_folder: of the run; None: there is none.
        resumed_step: training steps done when this start of the run began.
    """

    config: RunConfig
    folder: Path
    architecture: str
    policy_loss: str
    options: dict[str, Any]
    num_steps: int
    rank: int = 0
    world_size: int = 1
    address: str = "127.0.0.1:29500"
    num_threads: int = 0
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    run_folder: Path | None = None
    resumed_step: int = 0

    @property
    def run(self) -> RunView:
        """The view of the run that the rank's components get."""
        return run_view(
            self.config,
            self.options,
            model_folder=self.folder,
            folder=self.run_folder,
            resumed_step=self.resumed_step,
        )
