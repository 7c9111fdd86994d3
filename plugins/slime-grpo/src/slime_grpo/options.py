"""The settings ``--grpo.std-normalization`` and ``--overlong-...``, in TOML ``[grpo]``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from slime_core import Flag, PluginOptions, UsedBy

__all__ = ["GrpoOptions"]

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SECTION = "rollout"
"""The section of files in which the settings of the transforms stood when they were the core's."""


class GrpoOptions(PluginOptions):
    """What only the group-relative estimators and DAPO's transforms know."""

    std_normalization: bool = True
    """Divide grpo's advantages by the standard deviation of their group's rewards.

    Off: hard and easy prompts weigh by how much their rewards differ. Read by grpo, gspo and cispo; dr_grpo and rloo
    never divide.
    """
    overlong_buffer_len: Annotated[
        Count | None, Flag("--overlong-buffer-len", section=SECTION), UsedBy("punish_overlong")
    ] = None
    """Tokens at the end of rollout_max_response_len in which transform punish_overlong takes ever more off the reward.

    None: a fifth of it.
    """
    overlong_penalty_factor: Annotated[
        Positive, Flag("--overlong-penalty-factor", section=SECTION), UsedBy("punish_overlong")
    ] = 1.0
    """What punish_overlong takes off the reward of a response of the full length."""
