"""slime's three functions around Megatron: after its start, before passes without gradients, before optimizer steps."""

from __future__ import annotations

from typing import Any

from slime_compat.check import load_checked
from slime_compat.options import PathOptions
from slime_compat.training import TRAINING_FORMS
from slime_core import TrainStep, boundary
from slime_core.provisional import LearnerInfo

__all__ = ["before_log_probs", "before_train_step", "learner_start"]

PREFIXES = {"actor": "", "old_actor": "", "reference": "ref_", "teacher": "teacher_"}
"""Role -> prefix of slime's names for the columns that the pass fills."""


def learner_start(options: PathOptions, learner: LearnerInfo) -> None:
    """Call ``custom_megatron_init_path`` as ``fn(args)``; sets ``args.rank`` and ``args.world_size`` first."""
    options.arguments.rank, options.arguments.world_size = learner.rank, learner.world_size
    _call(options, "custom_megatron_init_path", options.arguments)


def before_log_probs(options: PathOptions, learner: LearnerInfo, role: str) -> None:
    """Call ``custom_megatron_before_log_prob_hook_path`` as ``fn(args, model, store_prefix)``."""
    setting = "custom_megatron_before_log_prob_hook_path"
    _call(options, setting, options.arguments, list(learner.model), PREFIXES[role])


def before_train_step(options: PathOptions, step: TrainStep) -> None:
    """Call ``custom_megatron_before_train_step_hook_path`` as ``fn(args, rollout_id, step_id, model, optimizer,
    opt_param_scheduler)``."""
    learner = step.learner
    _call(
        options,
        "custom_megatron_before_train_step_hook_path",
        options.arguments,
        step.rollout,
        step.step,
        list(learner.model),
        learner.optimizer,
        learner.schedule,
    )


def _call(options: PathOptions, setting: str, *arguments: Any) -> None:
    if setting in options.sources:
        loaded = load_checked(options, setting, TRAINING_FORMS)
        with boundary(loaded.source, "calling it", locate=True):
            loaded.function(*arguments)
