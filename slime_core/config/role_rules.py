"""The rules of the models beside the actor: reference, old actor, teacher."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core.config.layout_rules import Rule
from slime_core.config.schema import RunConfig

__all__ = ["ROLES"]


def _kl_is_used(config: RunConfig) -> Iterator[str]:
    coefficient = config.algorithm.kl_loss_coef
    if coefficient and not config.algorithm.use_kl_loss:
        yield f"kl_loss_coef = {coefficient} has no effect without use_kl_loss; add --use-kl-loss, or leave it out"


def _reference_is_used(config: RunConfig) -> Iterator[str]:
    folder = config.model.ref_load
    if folder is not None and not config.algorithm.use_kl_loss and not config.algorithm.kl_coef:
        yield (
            f"ref_load = {folder} has no effect without use_kl_loss or kl_coef; add --use-kl-loss or --kl-coef, or "
            "leave it out"
        )


ROLES: dict[Rule, str] = {
    _kl_is_used: "kl_loss_coef use_kl_loss",
    _reference_is_used: "ref_load use_kl_loss kl_coef",
}
"""Rule -> the settings it reads."""
