"""Publishing the learner's weights to the engines: the section ``[weights]``, and how far the two may then differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from slime_core.config.bounded import Count, CountOrZero, Positive
from slime_core.config.options import ONE_HALF, Conflicts, Needs
from slime_core.config.section import Section

__all__ = ["PARITY_BOUNDS", "STRICT_PARITY_BOUNDS", "WeightsConfig"]

PARITY_BOUNDS = {"float32": (1e-4, 1e-3), "bfloat16": (0.1, 2.0)}
"""dtype -> largest mean and largest single difference of log-probabilities that the parity gate accepts, in nats.
Measured with a margin by ``bench/parity.py``; the table is in ``docs/metrics.md``."""
STRICT_PARITY_BOUNDS = (1e-5, 1e-4)
"""The same in float32 with ``true_on_policy_mode``: two to four times the worst of that table, which different kernels
reach by rounding alone."""


class WeightsConfig(Section):
    """Publishing the learner's weights to the engines."""

    update_weights_interval: CountOrZero = 1
    """Publish after every so many rollouts. 0: only before the first."""
    update_weight_buffer_size: Count = 512 * 1024**2
    """Bytes of weights sent at once; one larger tensor still goes alone."""
    update_weight_transport: Literal["auto", "distributed", "tensor", "disk"] = "auto"
    """How weights travel: broadcast, shared memory, or files.

    auto: distributed; with colocate tensor on one machine, and disk on several.
    """
    update_weight_disk_dir: Annotated[Path | None, Needs("update_weight_transport", equals="disk")] = None
    """Folder for weights that travel as files; learner and engines must all see it. None: inside the run folder."""
    check_weight_update_equal: Annotated[bool, Conflicts(*ONE_HALF, because="learner and engines do not both run")] = (
        False
    )
    """After the first publication, spoil the engines' weights, publish again, and compare what they hold."""
    parity_interval: CountOrZero = 1
    """Compare log-probs of learner and engines every so many rollouts; stop if they differ. 0: never."""
    parity_mean_tolerance: Annotated[
        Positive | None, Conflicts("parity_interval", equals=0, because="nothing is compared")
    ] = None
    """Largest mean absolute difference of log-probs. None: 1e-4 in float32, 0.1 in bfloat16."""
    parity_max_tolerance: Annotated[
        Positive | None, Conflicts("parity_interval", equals=0, because="nothing is compared")
    ] = None
    """Largest absolute difference of one token's log-probs. None: 1e-3 in float32, 2 in bfloat16."""
