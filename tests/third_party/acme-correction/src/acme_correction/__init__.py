"""An off-policy correction with a flag without the plugin's name: a power of the ratio of learner to engine."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from slime_core import Flag, PluginOptions, Registration, UsedBy, hookimpl


class GentleOptions(PluginOptions):
    """``--acme-power``, in TOML ``[gentle]``."""

    power: Annotated[float, Field(ge=0, le=1), Flag("--acme-power"), UsedBy("gentle")] = 0.5
    """Power of the ratio of learner to engine. 0: no correction; 1: plain importance weights."""


@hookimpl
def slime_register(add: Registration) -> None:
    add.correction("gentle", "acme_correction.correction:Gentle")
    add.options(GentleOptions)
