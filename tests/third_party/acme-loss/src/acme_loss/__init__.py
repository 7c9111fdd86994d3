"""A policy loss with a flag of its own: minus advantage times a ratio that a smooth gate holds near 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from slime_core import Component, Flag, PluginOptions, PolicyLossTraits, UsedBy, hookimpl


class SoftLossOptions(PluginOptions):
    """``--acme-width``, in TOML ``[softloss]``."""

    width: Annotated[float, Field(gt=0), Flag("--acme-width"), UsedBy("soft_clip")] = 0.3
    """How far the log of the ratio goes at most."""


@hookimpl
def slime_register_policy_losses() -> Iterator[Component]:
    yield Component(
        "soft_clip",
        target="acme_loss.loss:SoftClip",
        traits=PolicyLossTraits(reads={"advantages", "old_log_probs"}),
        summary="Policy gradient with a smooth bound on the ratio",
    )


@hookimpl
def slime_options() -> type[SoftLossOptions]:
    return SoftLossOptions
