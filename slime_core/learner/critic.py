"""The critic: the actor's architecture with a head that gives one value per token, and a separate optimizer.

    Critic       on the actor's ranks, or as the model of a CriticRank
    CriticRank   one process of a separate critic, which has a separate process group and parallel layout
    ValueHead    replaces the output layer

The value of a response token is computed at the position that predicts the token: the one before it. So the value does
not depend on the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slime_core import contracts
from slime_core.checkpoint.folder import critic_part
from slime_core.config.learning import OptimizerConfig
from slime_core.config.model_config import described, forward_flops
from slime_core.config.schema import RunConfig
from slime_core.errors import ConfigError
from slime_core.learner import LearnerSettings
from slime_core.learner.advantages import in_shard_order
from slime_core.learner.checks import (
    require_finite_metrics,
    require_finite_weights,
    require_loss_weight,
    require_same_model,
)
from slime_core.learner.critic_reshard import SampleIndex, TokenValues, gather_tokens, reshard
from slime_core.learner.micro_batches import PackedMicroBatch
from slime_core.learner.objective import MetricSums, average_metrics
from slime_core.learner.process import leave_process_groups, prepare_process
from slime_core.learner.trained_model import (
    NamedSpec,
    TrainedModel,
    build_chunks,
    choose_kernels,
    forward_backward,
    forward_only,
    micro_batches_of_rank,
)
from slime_core.modeling import prepare_megatron
from slime_core.ops.losses import clipped_value_loss
from slime_core.ops.packing import row_budget
from slime_core.plugins.lifecycle import Hooks
from slime_core.plugins.registry import Registry
from slime_core.types import TrainBatch

if TYPE_CHECKING:
    from slime_core.checkpoint.sharded import StateCopy

EXPLAINED = ("returns", "returns^2", "errors", "errors^2")
"""Means that are summed over ranks and then replaced by ``explained_variance``."""

_FLAT = 1e-12
"""Variance of returns, in the reward's unit squared, below which ``explained_variance`` is 0."""


class Critic:
    """A model that predicts the return at every response token. Methods are collective over all ranks.

    Arguments:
        spec: an instance for the critic alone; builds the actor's architecture.
        settings: of the rank; the optimizer's are those of :func:`critic_optimizer`.

    Attributes:
        trained: the model, its optimizer and schedule.
    """

    def __init__(self, spec: NamedSpec, *, settings: LearnerSettings) -> None:
        """Build the model with the start weights.

        Raises:
            ConfigError: ``critic_load`` describes another model than the actor's, or the model has no output layer.
            CheckpointError: the weights do not fit the model.
        """
        config = settings.config
        folder = config.critic.critic_load or config.model.initial_megatron_checkpoint or settings.folder
        if config.critic.critic_load is not None and folder != settings.folder:
            why = "is built as the actor is, its head aside"
            remote = config.model.trust_remote_code
            require_same_model(folder, settings.folder, role="critic", why=why, trust_remote_code=remote)
        self._value_clip = config.critic.value_clip
        chunks = build_chunks(spec, settings=settings, folder=folder)
        replace_output_layer(chunks)
        self.trained = TrainedModel(chunks, spec=spec, settings=settings, optimizer=critic_optimizer(config))

    def copy(self, folder: Path) -> StateCopy:
        """Copy this rank's part, for ``folder/critic``."""
        return self.trained.copy(folder / "critic")

    def load(self, folder: Path) -> None:
        """Continue from a written :meth:`copy`, in any layout, on the actor's ranks or separate ones.

        Raises:
            CheckpointError: the checkpoint is of another model, or of a run without a critic.
        """
        self.trained.load(critic_part(folder))

    def fill_values(self, micro_batches: Sequence[PackedMicroBatch]) -> None:
        """Start a rollout: fill the values of all micro-batches' response tokens, on the last pipeline stage."""
        self.trained.begin_rollout()
        results = forward_only(self.trained.model, micro_batches, _response_values)
        for micro, values_U in zip(micro_batches, results, strict=False):  # earlier stages have none
            micro.values_U = values_U

    def step(self, micro_batches: Sequence[PackedMicroBatch], *, rollout: int) -> dict[str, float]:
        """Take one optimizer step on the value loss; a token has the same weight as in the policy loss.

        Returns:
            The metrics of the step, the same on every rank. ``values``, ``returns`` and ``explained_variance`` are from
            before the first step of the rollout; ``critic_grad_norm`` is from before clipping.

        Raises:
            NonFiniteError: the loss or a gradient is NaN or infinite.
        """
        self.trained.zero_gradients()
        metrics = _explained(forward_backward(self.trained.model, micro_batches, self._value_loss))
        require_finite_metrics(metrics, rollout, of="critic_")
        require_loss_weight(metrics.pop("weight"), rollout)
        metrics |= {f"critic_{name}": value for name, value in self.trained.step().items()}
        require_finite_metrics(metrics, rollout, of="critic_")
        return metrics

    def _value_loss(self, micro: PackedMicroBatch, output_1T1: torch.Tensor) -> tuple[torch.Tensor, MetricSums]:
        old_U, returns_U = micro.values_U, micro.returns_U
        assert old_U is not None, "values are there before the critic learns"
        assert returns_U is not None, "returns are there before the critic learns them"
        value = clipped_value_loss(
            _response_values(micro, output_1T1), old_values_T=old_U, returns_T=returns_U, value_clip=self._value_clip
        )
        # A masked token may hold anything, an infinity included; 0 x inf would poison the sum.
        trained_U = micro.mask_U != 0
        loss = (value.loss_T.where(trained_U, 0.0) * micro.weights_U).sum()
        exact_U = returns_U.double()
        errors_U = exact_U - old_U
        per_token = {
            "value_clip_fraction": value.clipped_T,
            "values": old_U,
            **dict(zip(EXPLAINED, (exact_U, exact_U.square(), errors_U, errors_U.square()), strict=True)),
        }
        sums = {name: (column_U.where(trained_U, 0.0) * micro.weights_U).sum() for name, column_U in per_token.items()}
        return loss, MetricSums({"value_loss": loss.detach(), "weight": micro.weights_U.sum(), **sums})


def critic_optimizer(config: RunConfig) -> OptimizerConfig:
    """Return the actor's optimizer settings with the critic's overrides; all weights of the critic train."""
    critic = config.critic
    overrides = {
        "lr": critic.critic_lr,
        "lr_warmup_iters": critic.critic_lr_warmup_iters,
        "weight_decay": critic.critic_weight_decay,
        "clip_grad": critic.critic_clip_grad,
    }
    update: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
    update |= {"only_train_params_name_list": (), "freeze_params_name_list": ()}
    return config.optimizer.model_copy(update=update)


def _response_values(micro: PackedMicroBatch, output_1T1: torch.Tensor) -> torch.Tensor:
    """Return the value of each response token, from the row that predicts it: float32 [u]."""
    return output_1T1.squeeze(0).index_select(0, micro.rows_U).squeeze(-1).float()


def _explained(metrics: dict[str, float]) -> dict[str, float]:
    """Replace the means of returns R and values V by 1 - Var(R - V) / Var(R), 0 where R is constant."""
    weight = metrics["weight"] or 1.0  # no token is trained, and everything is 0
    returns, squares, errors, squared_errors = (metrics.pop(name) / weight for name in EXPLAINED)
    variance = squares - returns**2
    explained = 0.0 if variance < _FLAT else 1 - (squared_errors - errors**2) / variance
    return {**metrics, "returns": returns, "explained_variance": explained}


class ValueHead(torch.nn.Module):
    """Output layer with one number per token, float32, from the hidden states of the last layer.

    Weight and bias start at 0, so that the first advantages are rewards alone. Every tensor-parallel rank has a copy.
    With sequence parallelism each rank computes the values of its tokens and gathers all values. Its gradient is that
    of its tokens, and the mark ``sequence_parallel`` makes Megatron sum it over the ranks
    (distributed/finalize_model_grads.py:354). Otherwise every rank has the whole gradient.

    Arguments:
        config: Megatron's TransformerConfig.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._shares_tokens = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, hidden_T1H: torch.Tensor, weight: None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Return the values, float32 [t, 1, 1], of all tokens of the row; called as Megatron calls an output layer.

        Arguments:
            hidden_T1H: [t, 1, hidden], under sequence parallelism this rank's share of the tokens.
            weight: of tied embeddings; there are none.
            runtime_gather_output: values are never split over the vocabulary.
        """
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        assert weight is None, "a critic's head shares no weight with its embedding"
        values_T11 = torch.nn.functional.linear(hidden_T1H.float(), self.weight.float(), self.bias.float())
        if self._shares_tokens:
            # Every rank continues with all tokens and has their whole gradient, and takes only its share of it back.
            values_T11 = gather_from_sequence_parallel_region(values_T11, tensor_parallel_output_grad=False)
        return values_T11, None


def replace_output_layer(chunks: Sequence[torch.nn.Module]) -> None:
    """Replace the output layer of the last chunk by a value head, and untie every embedding from it.

    Raises:
        ConfigError: the model has no output layer.
    """
    from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes

    for chunk in chunks:
        model: Any = chunk
        _untie(model)
        if not model.post_process:
            continue
        if not hasattr(model, "output_layer"):
            raise ConfigError(
                f"a critic needs a value head instead of the output layer, and a {type(model).__name__} has no "
                "attribute output_layer; build the model from Megatron's GPTModel, or choose an advantage estimator "
                "without a critic"
            )
        device = next(model.parameters()).device
        model.output_layer = ValueHead(model.config).to(device)
        for parameter in model.output_layer.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)


def _untie(model: Any) -> None:
    # Megatron would add the gradients of the head to those of the embedding, over the pipeline's two ends.
    model.share_embeddings_and_output_weights = False
    if model.pre_process:
        model.embedding.word_embeddings.weight.shared_embedding = False


# --- A separate critic ------------------------------------------------------------------------------------------------


def reports_shard() -> bool:
    """Return whether this rank, of the ranks that share a copy of the model, reports the numbers of a shard."""
    from megatron.core import parallel_state

    is_first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
    return is_first and bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))


def reshard_for_critic(
    settings: LearnerSettings, shards: Sequence[TrainBatch]
) -> list[tuple[TrainBatch, list[SampleIndex]]]:
    """Divide the ``shards`` of the actor's ranks for the critic's layout, by the sampler's rules.

    Raises:
        RunError: an optimizer step has fewer samples than there are ranks.
    """
    learner, layout = settings.config.learner, settings.layout
    return reshard(
        shards,
        num_ranks=layout.data_size(settings.world_size),
        max_tokens=row_budget(learner.max_tokens_per_gpu, context=layout.context, multiple=layout.row_multiple),
        micro_batch_size=learner.micro_batch_size,
        cost=forward_flops(described(settings.folder) or {}).of if learner.balance_by_flops else int,
    )


class CriticRank:
    """One rank of the critic. Methods are collective over all its ranks."""

    def __init__(self, settings: LearnerSettings, registry: Registry) -> None:
        """Join the process group and build the critic; raises as :class:`~slime_core.learner.rank.LearnerRank` does."""
        prepare_megatron()
        from slime_core.learner.components import build_model_spec

        self._settings = settings
        self._device = prepare_process(settings)
        where = f"critic rank {settings.rank}"
        hooks = Hooks(registry, place=contracts.Place.RANK, options=settings.options, where=where)
        self._spec = build_model_spec(registry, settings, hooks=hooks)
        self.critic = Critic(self._spec, settings=settings)
        choose_kernels(self.critic.trained.chunks, settings.config, device=self._device)
        self._steps: list[list[PackedMicroBatch]] = []
        self._shards: Sequence[TrainBatch] = ()
        self._places: list[SampleIndex] = []

    def values(self, shards: Sequence[TrainBatch]) -> TokenValues | None:
        """Compute the values of the response tokens of this rank's share of ``shards``.

        Returns:
            None on ranks that do not report their share, see :func:`reports_shard`.

        Raises:
            RunError: the samples carry inputs that the model does not take.
        """
        from megatron.core import parallel_state

        settings = self._settings
        self._spec.require_inputs(shards[0].inputs.keys(), context=settings.layout.context)
        shares = reshard_for_critic(settings, shards)
        share, self._places = shares[settings.layout.data_rank(settings.rank, world_size=settings.world_size)]
        self._shards, self._steps = shards, micro_batches_of_rank(share, settings.layout, device=self._device)
        micro_batches = self._micro_batches()
        self.critic.fill_values(micro_batches)
        if micro_batches[0].values_U is None:
            return None
        context_group = parallel_state.get_context_parallel_group() if settings.layout.context > 1 else None
        parts, count = [micro.values_U for micro in micro_batches], len(share.loss_mask_U)
        values_U = in_shard_order(micro_batches, parts, count=count, context_group=context_group)
        if not reports_shard():
            return None
        return TokenValues(self._places, share.response_lengths_B, values_U.cpu().numpy())

    def fit(self, returns_U: Sequence[np.ndarray]) -> dict[str, float]:
        """Run every optimizer step of the rollout whose values were computed last.

        Arguments:
            returns_U: of each shard, float32, one number per response token.

        Returns:
            ``train/...`` metrics, averaged over the steps; the same on every rank.

        Raises:
            NonFiniteError: a loss, a gradient or a weight is NaN or infinite.
        """
        mine_U = torch.from_numpy(gather_tokens(returns_U, self._shards, self._places)).to(self._device)
        for micro in self._micro_batches():
            micro.returns_U = mine_U[micro.places_U]
        rollout = self._shards[0].rollout
        results = average_metrics([self.critic.step(step, rollout=rollout) for step in self._steps])
        self.critic.trained.finish_gather()
        require_finite_weights(self.critic.trained.chunks, rollout=rollout, of="critic_")
        self._steps, self._shards = [], ()
        return {f"train/{name}": value for name, value in results.items()}

    def close(self) -> None:
        """Leave the process group."""
        leave_process_groups()

    def _micro_batches(self) -> list[PackedMicroBatch]:
        return [micro for step in self._steps for micro in step]
