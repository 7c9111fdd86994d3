"""The rules of the models beside the actor: reference, old actor, teacher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slime_core.config.described import described, differences, start_weights
from slime_core.config.rules.layout import Rule
from slime_core.config.schema import RunConfig

__all__ = ["ROLES", "other_model"]


def _kl_is_used(config: RunConfig) -> Iterator[str]:
    coefficient = config.algorithm.kl_loss_coef
    if coefficient and not config.algorithm.use_kl_loss:
        yield f"kl_loss_coef = {coefficient} has no effect without use_kl_loss; add --use-kl-loss, or leave it out"


def _reference_is_used(config: RunConfig) -> Iterator[str]:
    folder = config.model.ref_load
    if folder is not None and not _has_reference(config):
        yield (
            f"ref_load = {folder} has no effect without use_kl_loss or kl_coef; add --use-kl-loss or --kl-coef, or "
            "leave it out"
        )


def _reference_that_changes_is_used(config: RunConfig) -> Iterator[str]:
    interval = config.algorithm.ref_update_interval
    if interval is not None and not _has_reference(config):
        yield (
            f"ref_update_interval = {interval} has no effect without use_kl_loss or kl_coef: no reference is kept; add "
            "--use-kl-loss or --kl-coef, or leave it out"
        )


def _reference_is_the_same_model(config: RunConfig) -> Iterator[str]:
    if _has_reference(config) and config.model.ref_load is not None:
        yield from _other_model(config, "ref_load", "reference")


def _teacher_is_there_and_used(config: RunConfig) -> Iterator[str]:
    settings = config.algorithm
    folder, coefficient = settings.opd_teacher_load, settings.opd_kl_coef
    if settings.use_opd:
        if folder is None:
            yield "use_opd distils from a teacher, and opd_teacher_load names none; add --opd-teacher-load FOLDER"
        if not coefficient:
            yield "opd_kl_coef = 0 has no effect, and use_opd asks for a teacher; raise it, or leave --use-opd out"
        return
    if folder is not None:
        yield f"opd_teacher_load = {folder} has no effect without use_opd; add --use-opd, or leave it out"
    if coefficient != type(settings).model_fields["opd_kl_coef"].default:
        yield f"opd_kl_coef = {coefficient:g} has no effect without use_opd; add --use-opd, or leave it out"


def _teacher_is_the_same_model(config: RunConfig) -> Iterator[str]:
    if config.algorithm.use_opd and config.algorithm.opd_teacher_load is not None:
        yield from _other_model(config, "opd_teacher_load", "teacher")


def _old_actor_is_used(config: RunConfig) -> Iterator[str]:
    interval = config.weights.update_weights_interval
    if not config.algorithm.keep_old_actor:
        return
    if interval == 1:
        yield (
            "keep_old_actor has no effect with update_weights_interval = 1: the engines serve the actor as it is "
            "before each training; leave it out, or raise --update-weights-interval"
        )
    if config.algorithm.use_rollout_logprobs:
        yield (
            "keep_old_actor computes old log-probs from the weights that the engines served, and use_rollout_logprobs "
            "takes the engines' own; leave one of them out"
        )


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
    _kl_is_used: "kl_loss_coef use_kl_loss",
    _reference_is_used: f"ref_load {_REFERENCE}",
    _reference_that_changes_is_used: f"ref_update_interval {_REFERENCE}",
    _reference_is_the_same_model: f"hf_checkpoint ref_load {_REFERENCE}",
    _teacher_is_there_and_used: "use_opd opd_kl_coef opd_teacher_load",
    _teacher_is_the_same_model: "hf_checkpoint use_opd opd_teacher_load",
    _old_actor_is_used: "keep_old_actor update_weights_interval use_rollout_logprobs",
}
"""Rule -> the settings it reads."""
