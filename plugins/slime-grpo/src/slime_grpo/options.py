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
    """Divide the advantages of grpo, gspo and cispo by the standard deviation of their group's rewards. False: prompts
    whose rewards differ more weigh more. dr_grpo and rloo never divide."""
    overlong_buffer_len: Annotated[
        Count | None, Flag("--overlong-buffer-len", section=SECTION), UsedBy("punish_overlong")
    ] = None
    """Sample transform punish_overlong: number of tokens before rollout_max_response_len over which the penalty grows
    to its maximum. None: a fifth of rollout_max_response_len."""
    overlong_penalty_factor: Annotated[
        Positive, Flag("--overlong-penalty-factor", section=SECTION), UsedBy("punish_overlong")
    ] = 1.0
    """Sample transform punish_overlong: penalty on the reward of a response of rollout_max_response_len tokens."""
