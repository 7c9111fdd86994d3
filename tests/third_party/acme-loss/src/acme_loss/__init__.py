"""A policy loss with a flag without the plugin's name: minus advantage times a ratio that stays near 1."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from slime_core import Flag, PluginOptions, Registration, UsedBy, hookimpl


class SoftLossOptions(PluginOptions):
    """``--acme-width``, in TOML ``[softloss]``."""

    width: Annotated[float, Field(gt=0), Flag("--acme-width"), UsedBy("soft_clip")] = 0.3
    """Bound on the log of the ratio."""


@hookimpl
def slime_register(add: Registration) -> None:
    add.policy_loss("soft_clip", "acme_loss.loss:SoftClip")
    add.options(SoftLossOptions)
