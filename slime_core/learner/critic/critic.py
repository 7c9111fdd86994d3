"""The critic: the actor's architecture with a head that gives one value a token, and its own optimizer.

The value of a response token is predicted where the token itself is: at the position before it, from everything up to
there. So the value of a token does not depend on the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slime_core.checkpoint.folder import critic_part
from slime_core.config.schema import OptimizerConfig, RunConfig
from slime_core.learner.checks import require_finite_metrics, require_finite_weights, require_loss_weight
from slime_core.learner.critic.value_head import replace_output_layer
from slime_core.learner.loss.metric_sums import MetricSums
from slime_core.learner.micro_batches import MicroBatch
from slime_core.learner.same_model import require_same_model
from slime_core.learner.settings import LearnerSettings
from slime_core.learner.trained_model import TrainedModel, build_chunks
from slime_core.ops.values import clipped_value_loss

__all__ = ["Critic", "critic_optimizer"]

EXPLAINED = ("returns", "returns^2", "errors", "errors^2")
"""Means that are summed over ranks and then replaced by ``explained_variance``."""

_FLAT = 1e-12
"""Variance of returns, in the reward's unit squared, below which ``explained_variance`` is 0."""


class Critic:
    """A model that predicts the return at every response token. Methods are collective over all ranks.

    Arguments:
        spec: a model spec of its own; it builds the actor's architecture.
        label: the spec in messages, with its plugin.
        settings: of the rank; the optimizer's are those of :func:`critic_optimizer`.

    Attributes:
        trained: the model, its optimizer and schedule.
    """

    def __init__(self, spec: Any, *, label: str, settings: LearnerSettings) -> None:
        """Build the model with the start weights.

        Raises:
            ConfigError: ``critic_load`` describes another model than the actor's, or it has no output layer.
            CheckpointError: the weights do not fit the model.
        """
        config = settings.config
        folder = config.critic.critic_load or settings.folder
        if folder != settings.folder:
            why = "is built as the actor is, its head aside"
            remote = config.model.trust_remote_code
            require_same_model(folder, settings.folder, role="critic", why=why, trust_remote_code=remote)
        self._value_clip = config.critic.value_clip
        chunks = build_chunks(spec, label=label, settings=settings, folder=folder)
        replace_output_layer(chunks)
        self.trained = TrainedModel(
            chunks, spec=spec, label=label, settings=settings, optimizer=critic_optimizer(config)
        )

    def save(self, folder: Path) -> None:
        """Write this rank's part into ``folder/critic``.

        Raises:
            CheckpointError: it cannot be written.
        """
        (folder / "critic").mkdir(exist_ok=True)
        self.trained.save(folder / "critic")

    def load(self, folder: Path) -> None:
        """Continue from what :meth:`save` wrote, in any layout, on the actor's ranks or separate ones.

        Raises:
            CheckpointError: it is of another model, or of a run without a critic.
        """
        self.trained.load(critic_part(folder))

    def fill_values(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Begin a rollout: fill the values of the response tokens of every micro-batch, on the last pipeline stage."""
        from slime_core.learner.forward_backward import forward_only

        self.trained.begin_rollout()
        found = forward_only(self.trained.model, micro_batches, _response_values)
        for micro, values_U in zip(micro_batches, found, strict=False):  # earlier stages have none
            micro.values_U = values_U

    def step(self, micro_batches: Sequence[MicroBatch], *, rollout: int) -> dict[str, float]:
        """One optimizer step along the value loss; the loss of a token is weighted as its policy loss is.

        Returns:
            The metrics of the step, the same on every rank. ``values``, ``returns`` and ``explained_variance`` are
            those of before the first step of the rollout, ``critic_grad_norm`` is that before clipping.

        Raises:
            NonFiniteError: the loss or a gradient is NaN or infinite.
        """
        from slime_core.learner.forward_backward import forward_backward

        self.trained.zero_gradients()
        metrics = _explained(forward_backward(self.trained.model, micro_batches, self._value_loss))
        require_finite_metrics(metrics, rollout, of="critic_")
        require_loss_weight(metrics.pop("weight"), rollout)
        metrics |= {f"critic_{name}": value for name, value in self.trained.step().items()}
        require_finite_metrics(metrics, rollout, of="critic_")
        return metrics

    def require_finite_weights(self, rollout: int) -> None:
        """Look at every weight of this rank; after the last step of a rollout.

        Raises:
            NonFiniteError: one holds NaN or infinity.
        """
        require_finite_weights(self.trained.chunks, rollout=rollout, of="critic_")

    def _value_loss(self, micro: MicroBatch, output_1T1: torch.Tensor) -> tuple[torch.Tensor, MetricSums]:
        old_U, returns_U = micro.values_U, micro.returns_U
        assert old_U is not None, "values are there before the critic learns"
        assert returns_U is not None, "returns are there before the critic learns them"
        found = clipped_value_loss(
            _response_values(micro, output_1T1), old_values_T=old_U, returns_T=returns_U, value_clip=self._value_clip
        )
        # A masked token may hold anything, an infinity included; 0 x inf would poison the sum.
        trained_U = micro.mask_U != 0
        loss = (found.loss_T.where(trained_U, 0.0) * micro.weights_U).sum()
        exact_U = returns_U.double()
        errors_U = exact_U - old_U
        per_token = {
            "value_clip_fraction": found.clipped_T,
            "values": old_U,
            **dict(zip(EXPLAINED, (exact_U, exact_U.square(), errors_U, errors_U.square()), strict=True)),
        }
        sums = {name: (column_U.where(trained_U, 0.0) * micro.weights_U).sum() for name, column_U in per_token.items()}
        return loss, MetricSums({"value_loss": loss.detach(), "weight": micro.weights_U.sum(), **sums})


def critic_optimizer(config: RunConfig) -> OptimizerConfig:
    """The actor's optimizer settings with the critic's overrides; all weights of the critic train."""
    critic = config.critic
    own = {
        "lr": critic.critic_lr,
        "lr_warmup_iters": critic.critic_lr_warmup_iters,
        "weight_decay": critic.critic_weight_decay,
        "clip_grad": critic.critic_clip_grad,
    }
    given = {name: value for name, value in own.items() if value is not None}
    whole: dict[str, Any] = {"only_train_params_name_list": (), "freeze_params_name_list": ()}
    return config.optimizer.model_copy(update=given | whole)


def _response_values(micro: MicroBatch, output_1T1: torch.Tensor) -> torch.Tensor:
    """The value of each response token, from the row that predicts it: float32 [u]."""
    return output_1T1[0].index_select(0, micro.rows_U).squeeze(-1).float()


def _explained(metrics: dict[str, float]) -> dict[str, float]:
    """Replace the means of returns R and values V by 1 - Var(R - V) / Var(R), 0 where R is constant."""
    weight = metrics["weight"] or 1.0  # no token is trained, and everything is 0
    returns, squares, errors, squared_errors = (metrics.pop(name) / weight for name in EXPLAINED)
    variance = squares - returns**2
    explained = 0.0 if variance < _FLAT else 1 - (squared_errors - errors**2) / variance
    return {**metrics, "returns": returns, "explained_variance": explained}
