"""Plugin ``transformers``: one model spec for every architecture of transformers."""

from __future__ import annotations

from slime_core import Registration, hookimpl


@hookimpl
def slime_register(add: Registration) -> None:
    """Add the model spec."""
    add.model_spec(
        "transformers",
        "slime_transformers.spec:Transformers",
        architectures={"*"},
        implementation="transformers",
        unsupported="slime_transformers.refusals:unsupported",
    )
