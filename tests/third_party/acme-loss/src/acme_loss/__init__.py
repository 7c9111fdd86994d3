"""A policy loss with an option: minus advantage times a ratio that a smooth gate holds near 1."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, Field

from slime_core import Component, PolicyLossTraits, hookimpl


class SoftLossOptions(BaseModel):
    """``--softloss.width``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: float = Field(default=0.3, gt=0, description="How far the log of the ratio goes at most.")


@hookimpl
def slime_register_policy_losses() -> Iterator[Component]:
    yield Component(
        "soft_clip",
        target="acme_loss.loss:SoftClip",
        traits=PolicyLossTraits(reads={"old_log_probs"}),
        summary="Policy gradient with a smooth bound on the ratio",
    )


@hookimpl
def slime_options() -> type[SoftLossOptions]:
    return SoftLossOptions
