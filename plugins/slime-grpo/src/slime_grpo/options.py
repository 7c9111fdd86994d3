"""The settings ``--grpo.*``, in TOML ``[grpo]``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["GrpoOptions"]


class GrpoOptions(BaseModel):
    """What only the group-relative estimators know."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    std_normalization: bool = Field(
        default=True,
        description="Divide grpo's advantages by the standard deviation of their group's rewards. Off: hard and easy "
        "prompts weigh by how much their rewards differ. Read by grpo, gspo and cispo; dr_grpo and rloo never divide.",
    )
