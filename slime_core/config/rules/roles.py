"""The rules of the models beside the actor: reference, old actor, teacher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slime_core.config.described import described, differences, start_weights
from slime_core.config.rules.layout import Rule
from slime_core.config.schema import RunConfig

__all__ = ["ROLES", "other_model"]


def _reference_is_the_same_model(config: RunConfig) -> Iterator[str]:
    if _has_reference(config) and config.model.ref_load is not None:
        yield from _other_model(config, "ref_load", "reference")


def _teacher_is_the_same_model(config: RunConfig) -> Iterator[str]:
    if config.algorithm.use_opd and config.algorithm.opd_teacher_load is not None:
        yield from _other_model(config, "opd_teacher_load", "teacher")


def _has_reference(config: RunConfig) -> bool:
    return config.algorithm.use_kl_loss or config.algorithm.kl_coef > 0


def _other_model(config: RunConfig, setting: str, role: str) -> Iterator[str]:
    """What keeps the weights of ``setting`` from playing in the actor's model, as far as config.json says."""
    folder = config.model.ref_load if setting == "ref_load" else config.algorithm.opd_teacher_load
    yield from other_model(config, setting, folder, why=f"the {role} takes turns with the actor in one model")


def other_model(config: RunConfig, setting: str, folder: Path | None, *, why: str) -> Iterator[str]:
    """That ``folder`` of ``setting`` describes another model than the actor's, as far as both config.json say.

    Arguments:
        why: they have to be the same, in words.
    """
    theirs, ours = described(folder) if folder is not None else None, described(start_weights(config))
    if theirs is None or ours is None:
        return  # another rule says so
    found = differences(theirs, ours)
    if found:
        yield (
            f"{setting} = {folder}: {why}, and its config.json describes another one than that of "
            f"{start_weights(config)}: {'; '.join(found)}; give a model of the same architecture, sizes and vocabulary"
        )


_REFERENCE = "use_kl_loss kl_coef"

ROLES: dict[Rule, str] = {
    _reference_is_the_same_model: f"hf_checkpoint ref_load {_REFERENCE}",
    _teacher_is_the_same_model: "hf_checkpoint use_opd opd_teacher_load",
}
"""Rule -> the settings it reads."""
