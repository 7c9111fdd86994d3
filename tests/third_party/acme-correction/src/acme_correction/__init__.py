"""An off-policy correction with an option: a power of the ratio of learner to engine."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, Field

from slime_core import Component, CorrectionTraits, hookimpl


class GentleOptions(BaseModel):
    """``--gentle.power``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    power: float = Field(default=0.5, ge=0, le=1, description="0: no correction; 1: plain importance weights.")


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
