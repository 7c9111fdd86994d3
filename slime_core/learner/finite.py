"""Refuses weights that are not finite, before anything is published or saved."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from slime_core.errors import NonFiniteError

__all__ = ["refuse_non_finite_weights"]


def refuse_non_finite_weights(chunks: Sequence[torch.nn.Module], *, rollout: int, of: str = "") -> None:
    """Look at every parameter of this rank, once a rollout: one pass over the weights, one wait for the device.

    A gradient that is finite does not make the step finite: a learning rate may be too large for the dtype.

    Arguments:
        of: whose weights they are, where not the actor's, ``"critic_"``; stands before the setting that could help.

    Raises:
        NonFiniteError: one holds NaN or infinity.
    """
    named = [(name, parameter.detach()) for chunk in chunks for name, parameter in chunk.named_parameters()]
    largest = torch.nn.utils.get_total_norm([parameter for _, parameter in named], math.inf)
    if math.isfinite(largest.item()):
        return
    bad = sorted(name for name, parameter in named if not bool(parameter.isfinite().all()))
    whose = f"the {of.removesuffix('_')} on " if of else ""
    setting = f"--{of}lr".replace("_", "-")
    raise NonFiniteError(
        f"rollout {rollout}: the optimizer left NaN or infinity in {len(bad)} weights of {whose}this rank, "
        f"{bad[0]} among them. Nothing of this rollout was published or saved. Lower {setting}, or resume from the "
        "last checkpoint with --load."
    )
