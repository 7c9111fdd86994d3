"""A model that trains: its chunks under Megatron's DDP, with optimizer and learning-rate schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slime_core.config.described import described
from slime_core.config.schema import OptimizerConfig
from slime_core.errors import ConfigError, SlimeError
from slime_core.learner.packed.batches import MicroBatch
from slime_core.learner.settings import LearnerSettings
from slime_core.plugins.boundary import boundary

__all__ = ["TrainedModel"]

Chunks = list[torch.nn.Module]


class TrainedModel:
    """The actor, or a critic that shares its process. Methods are collective over all ranks of the process group.

    Arguments:
        spec: the model spec that builds it; serves this model alone.
        builder: the spec in messages, with its plugin.
        settings: of the rank.
        folder: Hugging Face folder with the start weights.
        optimizer: Adam's settings and the schedule's.
        adapt: changes the chunks once they hold the start weights, before anything wraps them; None: nothing does.

    Attributes:
        chunks: what the spec built.
        model: the same in DDP; what runs forward and backward.
        optimizer, schedule: Megatron's.
    """

    def __init__(
        self,
        spec: Any,
        *,
        builder: str,
        settings: LearnerSettings,
        folder: Path,
        optimizer: OptimizerConfig,
        adapt: Callable[[Chunks], None] | None = None,
    ) -> None:
        from slime_core.learner.optimizer import build_optimizer, build_schedule, wrap

        self._spec, self._builder, self._forgets = spec, builder, optimizer.reset_optimizer_states
        config = settings.config
        self._chunk_size = config.learner.log_probs_chunk_size
        bf16 = config.model.bf16
        self.chunks = self._build(settings, {"calculate_per_token_loss": True, **config.megatron.transformer})
        self.load_weights(folder)
        if adapt is not None:
            adapt(self.chunks)
        self.model = wrap(self.chunks, bf16=bf16)
        self.optimizer = build_optimizer(self.model, optimizer, bf16=bf16, overrides=config.megatron.optimizer)
        self.schedule = build_schedule(self.optimizer, optimizer, num_steps=settings.num_steps)

    def _build(self, settings: LearnerSettings, overrides: Mapping[str, Any]) -> Chunks:
        config = described(settings.folder)
        if config is None:
            raise ConfigError(f"{settings.folder / 'config.json'} is no JSON object; name another --hf-checkpoint")
        dtype = torch.bfloat16 if settings.config.model.bf16 else torch.float32
        with boundary(self._builder, "building the model", locate=True, passes=(SlimeError,)):
            chunks: Chunks = self._spec.build(config, dtype=dtype, parallel=settings.layout, overrides=overrides)
        return chunks

    def load_weights(self, folder: Path) -> None:
        """The chunks hold the weights of ``folder``."""
        with boundary(self._builder, f"loading weights of {folder}", locate=True, passes=(SlimeError,)):
            self._spec.load_weights(self.chunks, folder)

    def begin_rollout(self) -> None:
        """Before the first optimizer step of a rollout: the optimizer forgets what it has to."""
        from slime_core.learner.optimizer import forget

        if self._forgets:
            forget(self.optimizer)

    def backward(self, micro_batches: Sequence[MicroBatch], objective: Any) -> dict[str, float]:
        """Fresh gradients of one optimizer step; returns what :func:`slime_core.learner.passes.backward` returns."""
        from slime_core.learner.passes import backward

        self.forget_gradients()
        return backward(self.model, micro_batches, objective, chunk_size=self._chunk_size)

    def forget_gradients(self) -> None:
        """The gradient is zero, so that the next backward pass makes that of its step alone."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def update(self) -> dict[str, float]:
        """Step along the gradients; returns ``grad_norm``, before clipping, and ``lr``, which the step ran at."""
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
