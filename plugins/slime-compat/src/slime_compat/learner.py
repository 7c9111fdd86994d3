"""slime's functions around Megatron: after its start, before passes without gradients, before optimizer steps, and
between writing and loading weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slime_compat.forms import TRAINING
from slime_compat.paths import PathOptions
from slime_core import TrainStep
from slime_core.provisional import LearnerInfo

__all__ = ["after_weight_write", "before_log_probs", "before_train_step", "learner_start"]

PREFIXES = {"actor": "", "old_actor": "", "reference": "ref_", "teacher": "teacher_"}
"""Role -> prefix of slime's names for the columns that the pass fills."""


def learner_start(options: PathOptions, learner: LearnerInfo) -> None:
    """Import every function that the learner calls; set ``args.rank`` and ``args.world_size``, and call
    ``custom_megatron_init_path`` as ``fn(args)``.

    Raises:
        PluginError: a function cannot be imported, its signature is not accepted, or it failed.
    """
    for setting in sorted(TRAINING):
        options.functions(setting)
    options.arguments.rank, options.arguments.world_size = learner.rank, learner.world_size
    for function in options.functions("custom_megatron_init_path"):
        function(options.arguments)


def before_log_probs(options: PathOptions, learner: LearnerInfo, role: str) -> None:
    """Call ``custom_megatron_before_log_prob_hook_path`` as ``fn(args, model, store_prefix)``."""
    for function in options.functions("custom_megatron_before_log_prob_hook_path"):
        function(options.arguments, list(learner.model), PREFIXES[role])


def before_train_step(options: PathOptions, step: TrainStep) -> None:
    """Call ``custom_megatron_before_train_step_hook_path`` as ``fn(args, rollout_id, step_id, model, optimizer,
    opt_param_scheduler)``."""
    learner = step.learner
    for function in options.functions("custom_megatron_before_train_step_hook_path"):
        model = list(learner.model)
        function(options.arguments, step.rollout, step.step, model, learner.optimizer, learner.schedule)


def after_weight_write(options: PathOptions, folder: Path | None, engine_urls: Sequence[str]) -> None:
    """Call ``custom_update_weight_post_write_path`` as ``fn(args, version_dir, rollout_engines)`` on every rank.

    The function gets the engines' addresses instead of slime's Ray handles. The engines load ``version_dir`` after it
    has returned on all ranks.

    Arguments:
        folder: folder of the weights on rank 0; None on other ranks.
    """
    for function in options.functions("custom_update_weight_post_write_path"):
        written: list[Any] = [None if folder is None else str(folder)]
        dist.broadcast_object_list(written, src=0)
        function(options.arguments, written[0], list(engine_urls))
        dist.barrier()
