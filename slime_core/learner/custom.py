"""Where functions that a run names by path take part in training: one adapter a setting, found by its import path.

The adapters are those of slime-compat; what they are called with and what they return is said here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.plugins.discovery import COMPAT

if TYPE_CHECKING:
    import torch

    from slime_core.learner.packed.batches import MicroBatch
    from slime_core.types import TrainBatch

__all__ = ["Columns", "Correct", "Custom", "LogitsLoss", "Reduce", "Written"]

CHECK = "slime_compat.training:check"
"""Loads every function of the learner and refuses one that cannot be called as slime calls it."""

TARGETS: Mapping[str, str] = {
    "custom_loss_function_path": "slime_compat.loss:CustomLoss",
    "custom_tis_function_path": "slime_compat.correction:CustomCorrection",
    "custom_pg_loss_reducer_function_path": "slime_compat.reducer:CustomReducer",
    "rollout_data_postprocess_path": "slime_compat.columns:Postprocess",
    "custom_model_provider_path": "slime_compat.model:CustomProvider",
    "spec": "slime_compat.model:CustomLayers",
    "custom_update_weight_post_write_path": "slime_compat.weights:PostWrite",
}
"""Path setting -> its adapter, a class that takes the options of plugin ``compat``."""


class LogitsLoss(Protocol):
    """``custom_loss_function_path``."""

    def __call__(self, logits_1TV: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """The micro-batch's part of the step's loss, a scalar with gradient, and of its metrics, without."""
        ...


class Correct(Protocol):
    """``custom_tis_function_path``."""

    def __call__(
        self, loss_U: torch.Tensor, log_probs_U: torch.Tensor, mask_U: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor]]:
        """Another policy loss a token, another mask (float32 [u]), and metrics a token.

        Arguments:
            log_probs_U: the trainer's before the first optimizer step of the rollout, without gradient.
            mask_U: what the run's corrections left.
        """
        ...


class Reduce(Protocol):
    """``custom_pg_loss_reducer_function_path``."""

    def __call__(self, loss_U: torch.Tensor, mask_U: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        """The policy loss's part of the step's loss, a scalar with gradient."""
        ...


class Columns(Protocol):
    """``rollout_data_postprocess_path``."""

    def __call__(self, shard: TrainBatch, steps: Sequence[Sequence[MicroBatch]]) -> None:
        """Change the columns of the micro-batches that were cut from ``shard``, in place."""
        ...


class Written(Protocol):
    """``custom_update_weight_post_write_path``."""

    def __call__(self, folder: Path | None, engine_urls: Sequence[str]) -> None:
        """A version of the weights lies in ``folder``, and no engine has read it. Collective.

        Arguments:
            folder: None on ranks that did not write.
        """
        ...


class Custom:
    """The adapters of one rank.

    Arguments:
        options: plugin -> its options object; functions by path are those of plugin ``compat``.

    Raises:
        PluginError: a function is not there, or cannot be called as slime calls it.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options.get(COMPAT)
        if self._options is not None:
            _target(CHECK)(self._options)

    def find(self, setting: str) -> Any:
        """The adapter of ``setting``, made now; None: the run does not give it."""
        if self._options is None or setting not in self._options.sources:
            return None
        return _target(TARGETS[setting])(self._options)


def _target(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
