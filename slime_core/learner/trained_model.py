"""A model that trains: its chunks under Megatron's DDP, with optimizer and learning-rate schedule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slime_core.config.described import described
from slime_core.config.schema import OptimizerConfig
from slime_core.errors import ConfigError, SlimeError
from slime_core.learner.loss.objective import Objective
from slime_core.learner.micro_batches import MicroBatch
from slime_core.learner.settings import LearnerSettings
from slime_core.plugins.boundary import boundary

__all__ = ["TrainedModel", "build_chunks"]

Chunks = list[torch.nn.Module]


def build_chunks(spec: Any, *, label: str, settings: LearnerSettings, folder: Path) -> Chunks:
    """The model chunks of this rank with the start weights, before DDP wraps them. Collective.

    Arguments:
        spec: the model spec.
        label: the spec in messages, with its plugin.
        settings: of the rank; its folder's config.json is built.
        folder: Hugging Face folder with the start weights.
    """
    config = described(settings.folder)
    if config is None:
        raise ConfigError(f"{settings.folder / 'config.json'} is no JSON object; name another --hf-checkpoint")
    dtype = torch.bfloat16 if settings.config.model.bf16 else torch.float32
    overrides = {"calculate_per_token_loss": True, **settings.config.megatron.transformer}
    with boundary(label, "building the model", locate=True, passes=(SlimeError,)):
        chunks: Chunks = spec.build(config, dtype=dtype, parallel=settings.layout, overrides=overrides)
    _load_weights(spec, label, chunks, folder)
    return chunks


class TrainedModel:
    """The actor or the critic. Methods are collective over all ranks of the process group.

    Arguments:
        chunks: of :func:`build_chunks`; those of their parameters train that need a gradient.
        spec: the model spec that built them; serves this model alone.
        label: the spec in messages, with its plugin.
        settings: of the rank.
        optimizer: Adam's settings and the schedule's.

    Attributes:
        chunks: what the spec built.
        model: the chunks in DDP; forward and backward passes run through these.
        optimizer, schedule: Megatron's.
    """

    def __init__(
        self, chunks: Chunks, *, spec: Any, label: str, settings: LearnerSettings, optimizer: OptimizerConfig
    ) -> None:
        from slime_core.learner.optimizer import build_optimizer, build_schedule, wrap

        config = settings.config
        bf16 = config.model.bf16
        self._spec = spec
        self._label = label
        self._resets_optimizer = optimizer.reset_optimizer_states
        self._chunk_size = config.learner.log_probs_chunk_size
        self.chunks = chunks
        self.model = wrap(chunks, bf16=bf16)
        self.optimizer = build_optimizer(self.model, optimizer, bf16=bf16, overrides=config.megatron.optimizer)
        self.schedule = build_schedule(self.optimizer, optimizer, num_steps=settings.num_steps)

    def load_weights(self, folder: Path) -> None:
        """Load the weights of the Hugging Face folder ``folder`` into the chunks."""
        _load_weights(self._spec, self._label, self.chunks, folder)

    def begin_rollout(self) -> None:
        """Reset the optimizer's state before the first step of a rollout, if the run does so."""
        from slime_core.learner.optimizer import reset_optimizer_states

        if self._resets_optimizer:
            reset_optimizer_states(self.optimizer)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> dict[str, float]:
        """Gradients of one optimizer step of the policy, and its metrics; see ``forward_backward_policy``."""
        from slime_core.learner.forward_backward import forward_backward_policy

        self.zero_gradients()
        return forward_backward_policy(self.model, micro_batches, objective, chunk_size=self._chunk_size)

    def zero_gradients(self) -> None:
        """Zero Megatron's gradient buffers, to which every backward pass adds."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self) -> dict[str, float]:
        """Take the optimizer step; returns ``grad_norm``, before clipping, and ``lr``, which the step ran at."""
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        _, grad_norm, _ = self.optimizer.step()
        self.schedule.step(increment=1)
        return {"grad_norm": float(grad_norm), "lr": learning_rate}

    def save(self, folder: Path) -> None:
        """Write model, optimizer and schedule into ``folder``, see :func:`slime_core.checkpoint.sharded.save`."""
        from slime_core.checkpoint import sharded

        sharded.save(folder, chunks=self.chunks, optimizer=self.optimizer, schedule=self.schedule)

    def load(self, folder: Path) -> None:
        """Continue from what :meth:`save` wrote, in any layout."""
        from slime_core.checkpoint import sharded

        sharded.load(folder, chunks=self.chunks, optimizer=self.optimizer, schedule=self.schedule)


def _load_weights(spec: Any, label: str, chunks: Chunks, folder: Path) -> None:
    with boundary(label, f"loading weights of {folder}", locate=True, passes=(SlimeError,)):
        spec.load_weights(chunks, folder)
