"""An off-policy correction with a flag of its own: a power of the ratio of learner to engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from slime_core import Component, CorrectionTraits, Flag, PluginOptions, UsedBy, hookimpl


class GentleOptions(PluginOptions):
    """``--acme-power``, in TOML ``[gentle]``."""

    power: Annotated[float, Field(ge=0, le=1), Flag("--acme-power"), UsedBy("gentle")] = 0.5
    """Power of the ratio of learner to engine. 0: no correction; 1: plain importance weights."""


@hookimpl
def slime_register_corrections() -> Iterator[Component]:
    yield Component(
        "gentle",
        target="acme_correction.correction:Gentle",
        traits=CorrectionTraits(),
        summary="A power of the importance ratio, at most 2",
    )


@hookimpl
def slime_options() -> type[GentleOptions]:
    return GentleOptions
