"""The settings ``--grpo.std-normalization`` and ``--overlong-...``, in TOML ``[grpo]``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from slime_core import Flag, PluginOptions, UsedBy
from slime_core.provisional import AtMost

__all__ = ["GrpoOptions"]

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
BufferFlag = Flag("--overlong-buffer-len", section="rollout")  # the section of older files
PenaltyFlag = Flag("--overlong-penalty-factor", section="rollout")
OfPunishment = UsedBy("punish_overlong")


class GrpoOptions(PluginOptions):
    """Settings of the group-relative estimators and of DAPO's transforms."""

    std_normalization: bool = True
    """Divide the advantages of grpo, gspo and cispo by the standard deviation of their group's rewards. False: prompts
    whose rewards differ more have more weight. dr_grpo and rloo never divide."""
    overlong_buffer_len: Annotated[Count | None, BufferFlag, OfPunishment, AtMost("rollout_max_response_len")] = None
    """Sample transform punish_overlong: number of tokens before rollout_max_response_len over which the penalty grows
    to its maximum. None: a fifth of rollout_max_response_len."""
    overlong_penalty_factor: Annotated[Positive, PenaltyFlag, OfPunishment] = 1.0
    """Sample transform punish_overlong: penalty on the reward of a response of rollout_max_response_len tokens."""
