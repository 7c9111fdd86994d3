"""A model that trains: chunks in Megatron's DDP, passes through Megatron's schedule, optimizer steps. ``rank.py`` and
``critic.py`` use it.

    TrainedModel              builds DDP, optimizer and learning-rate schedule; takes steps, copies and loads its state
    compute_log_probs         forward only: log-probabilities of the response tokens
    forward_only              the same for another output, such as a critic's values
    forward_backward_policy   gradients and metrics of one optimizer step of the actor
    forward_backward          the same for another loss, such as a critic's

Megatron is imported inside functions, after ``slime_core.modeling.prepare_megatron()``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slime_core.config.learning import OptimizerConfig
from slime_core.config.model_config import described, torch_dist_folder
from slime_core.config.schema import RunConfig
from slime_core.contracts.learning import NamedTensors
from slime_core.errors import ConfigError, RunError, SlimeError
from slime_core.learner import LearnerSettings
from slime_core.learner.checks import require_gradient
from slime_core.learner.micro_batches import PackedMicroBatch, RowInputs, idle_micro_batch, make_micro_batches
from slime_core.learner.objective import MetricSums, Objective, reduce_metrics
from slime_core.learner.rank_load import ComputeClock
from slime_core.modeling.layout import ParallelLayout
from slime_core.ops.log_probs import log_probs_and_entropy, projected_log_probs
from slime_core.types import TrainBatch
from slime_core.user_code.failures import boundary

if TYPE_CHECKING:
    from slime_core.checkpoint.sharded import StateCopy


Chunks = list[torch.nn.Module]

ACTOR, REFERENCE, OLD_ACTOR, TEACHER = "actor", "reference", "old_actor", "teacher"
"""Roles whose weights the actor's model may hold, see :mod:`slime_core.learner.frozen_models`."""


@dataclass(frozen=True, slots=True)
class NamedSpec:
    """A model spec, which serves one model.

    Arguments:
        label: the component and its plugin, in messages.
        inputs: the keyword arguments that the model's forward takes in addition to tokens.
        added: children of a chunk that plugins added, which the spec does not see.
    """

    spec: Any
    label: str
    inputs: AbstractSet[str] = frozenset()
    added: AbstractSet[str] = frozenset()

    def load_weights(self, chunks: Chunks, folder: Path) -> None:
        """Load the weights of ``folder``, Hugging Face or torch_dist, into the chunks."""
        chunks = self._built(chunks)
        if (stored := torch_dist_folder(folder)) is not None:
            from slime_core.checkpoint import sharded

            sharded.load_weights(stored, chunks=chunks)
            return
        with boundary(self.label, f"loading weights of {folder}", locate=True, passes=(SlimeError,)):
            self.spec.load_weights(chunks, folder)

    def export_weights(self, chunks: Chunks) -> NamedTensors:
        """Return an iterator over all weights of the spec, with Hugging Face names, gathered over ranks. Collective."""
        weights: NamedTensors = self.spec.export_weights(self._built(chunks))
        return weights

    def _built(self, chunks: Chunks) -> Chunks:
        """Return views of the chunks without the children that plugins added."""
        return [_without(chunk, self.added) for chunk in chunks] if self.added else chunks

    def require_inputs(self, carried: AbstractSet[str], *, context: int = 1) -> None:
        """Raise RunError unless the model takes every input that samples carry.

        Arguments:
            carried: names of the samples' inputs.
            context: ranks that share a row.
        """
        foreign = ", ".join(sorted(carried - self.inputs))
        if foreign:
            takes = f"takes {', '.join(sorted(self.inputs))}" if self.inputs else "takes tokens only"
            raise RunError(
                f"the samples carry {foreign} in multimodal_train_inputs, and the model of {self.label} {takes}; "
                "training would continue without the inputs of the engine. Use a model spec whose traits declare them "
                "(ModelSpecTraits.inputs), or leave them out of the samples"
            )
        if carried and context > 1:
            raise RunError(
                f"the samples carry {', '.join(sorted(carried))} in multimodal_train_inputs, and context_parallel_size "
                f"= {context} gives a rank parts of a row, and the inputs of these parts are unknown. "
                "Leave --context-parallel-size out"
            )


def _without(chunk: torch.nn.Module, names: AbstractSet[str]) -> torch.nn.Module:
    view = copy.copy(chunk)
    children = {name: child for name, child in chunk.named_children() if name not in names}
    view.__dict__ = {**chunk.__dict__, "_modules": children}
    return view


def build_chunks(spec: NamedSpec, *, settings: LearnerSettings, folder: Path) -> Chunks:
    """Build the model chunks of this rank with the start weights, before DDP wraps them. Collective.

    Arguments:
        settings: of the rank; the config.json of its folder describes the model.
        folder: Hugging Face or torch_dist folder with the start weights.
    """
    config = described(settings.folder)
    if config is None:
        raise ConfigError(f"{settings.folder / 'config.json'} is not a JSON object; name another --hf-checkpoint")
    dtype = torch.bfloat16 if settings.config.model.bf16 else torch.float32
    overrides = {"calculate_per_token_loss": True, **settings.config.megatron.transformer}
    with boundary(spec.label, "building the model", locate=True, passes=(SlimeError,)):
        chunks: Chunks = spec.spec.build(config, dtype=dtype, parallel=settings.layout, overrides=overrides)
    spec.load_weights(chunks, folder)
    return chunks


def choose_kernels(chunks: Chunks, config: RunConfig, *, device: torch.device) -> dict[str, str]:
    """Choose the implementations of this process; return them in words, by the part of the model. Collective.

    Raises:
        ConfigError: one that the settings name cannot be used.
    """
    from slime_core.modeling.kernels import Heads, choose_attention, compile_pointwise
    from slime_core.modeling.layers import WholeModel

    compiles = config.learner.compile_pointwise
    if compiles:
        compile_pointwise()
    dtype = torch.bfloat16 if config.model.bf16 else torch.float32
    heads = Heads.of(chunks[0].config)
    attention = choose_attention(config.learner.flash_attention, heads, device=device, dtype=dtype)
    if config.learner.fp32_lm_head and not can_project(chunks):
        raise ConfigError(
            "fp32_lm_head = true, but the logits of this model are not just a product with its output weights; leave "
            "--fp32-lm-head out"
        )
    first = chunks[0]
    is_fused = any(name.endswith("layer_norm_weight") for chunk in chunks for name, _ in chunk.named_parameters())
    return {
        "layers": first.layers_are if isinstance(first, WholeModel) else "transformer_engine" if is_fused else "local",
        "attention": f"{attention}",
        "rotary embedding and SwiGLU": "compiled" if compiles else "not compiled",
        "logits": "float32" if config.learner.fp32_lm_head else f"{dtype}".removeprefix("torch."),
    }


class TrainedModel:
    """The actor or the critic. Methods are collective over all ranks of the process group.

    Arguments:
        chunks: of :func:`build_chunks`; their parameters that need a gradient train.
        spec: the model spec that built them.
        settings: of the rank.
        optimizer: Adam's settings and the schedule's.
        stores: returns whether a checkpoint holds the weight with this name; None if it holds all.

    Attributes:
        chunks: as the spec built them.
        model: the chunks in DDP; forward and backward passes run through these.
        optimizer, schedule: Megatron's.
        clock: measures the passes that start it, up to the exchange of gradients.
    """

    def __init__(
        self,
        chunks: Chunks,
        *,
        spec: NamedSpec,
        settings: LearnerSettings,
        optimizer: OptimizerConfig,
        stores: Callable[[str], bool] | None = None,
    ) -> None:
        from slime_core.learner.optimizer import build_optimizer, build_schedule, wrap

        config = settings.config
        bf16 = config.model.bf16
        self._spec = spec
        self._stores = stores
        self._resets_optimizer = optimizer.reset_optimizer_states
        self.chunks = chunks
        self.clock = ComputeClock(next(chunks[0].parameters()).device)
        ddp = config.megatron.ddp
        self._overlaps_gather = bool(ddp.get("overlap_param_gather"))
        self.model = wrap(chunks, bf16=bf16, before_exchange=self.clock.stop, overrides=ddp)
        self.optimizer = build_optimizer(self.model, optimizer, bf16=bf16, overrides=config.megatron.optimizer)
        self.schedule = build_schedule(self.optimizer, optimizer, num_steps=settings.num_steps)

    def load_weights(self, folder: Path) -> None:
        """Load the weights of ``folder``, Hugging Face or torch_dist, into the chunks."""
        self._spec.load_weights(self.chunks, folder)

    def begin_rollout(self) -> None:
        """Reset the optimizer's state before the first step of a rollout, if ``reset_optimizer_states`` is on."""
        from slime_core.learner.optimizer import reset_optimizer_states

        if self._resets_optimizer:
            reset_optimizer_states(self.optimizer)

    def zero_gradients(self) -> None:
        """Zero Megatron's gradient buffers, to which every backward pass adds."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self) -> dict[str, float]:
        """Take the optimizer step; return ``grad_norm``, before clipping, and ``lr``, the learning rate of the step.

        With ``overlap_param_gather``, call :meth:`finish_gather` before anything but a pass of the model reads weights.
        """
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        _, grad_norm, _ = self.optimizer.step()
        self.schedule.step(increment=1)
        if self._overlaps_gather:
            for chunk in self.model:
                chunk.start_gather()
        return {"grad_norm": float(grad_norm), "lr": learning_rate}

    def finish_gather(self) -> None:
        """Wait until this rank has all weights of the last step."""
        if self._overlaps_gather:
            for chunk in self.model:
                chunk.finish_gather()

    def copy(self, folder: Path) -> StateCopy:
        """Copy model, optimizer and schedule, see :func:`slime_core.checkpoint.sharded.copy`."""
        from slime_core.checkpoint import sharded

        return sharded.copy(
            folder, chunks=self.chunks, optimizer=self.optimizer, schedule=self.schedule, stores=self._stores
        )

    def load(self, folder: Path) -> None:
        """Continue from a written :meth:`copy`, in any layout."""
        from slime_core.checkpoint import sharded

        sharded.load(folder, chunks=self.chunks, optimizer=self.optimizer, schedule=self.schedule, stores=self._stores)


ComputeLoss = Callable[[PackedMicroBatch, torch.Tensor], tuple[torch.Tensor, MetricSums]]
"""From a micro-batch and the model's output for its row to the loss, with gradient, and the metrics."""

LOSSES = ("loss", "pg_loss", "value_loss")
"""Metrics that are multiplied by the step's loss factor, as the loss is; all others are averages."""

GRADIENT = "has_gradient"
"""1 if the loss of a micro-batch needs a gradient; its maximum over micro-batches and ranks is checked once a step."""


def micro_batches_of_rank(
    shard: TrainBatch,
    layout: ParallelLayout,
    *,
    device: torch.device,
    share: bool = False,
    max_tokens: int | None = None,
) -> list[list[PackedMicroBatch]]:
    """Make the micro-batches of every optimizer step of ``shard`` on this rank; see :func:`make_micro_batches`.

    Idle micro-batches fill a step up to a number that Megatron can run in ``layout``. Interleaved stages run groups of
    one micro-batch per pipeline rank, so the number has to be a multiple of the group
    (pipeline_parallel/schedules.py:995). Ranks that share experts exchange tokens in every layer, so all of them have
    to run the same number. Collective.
    """
    from megatron.core import parallel_state

    rank = parallel_state.get_context_parallel_rank()
    steps = make_micro_batches(
        shard, device=device, layout=layout, context_rank=rank, share=share, max_tokens=max_tokens
    )
    if layout.expert == 1 and layout.virtual_pipeline == 1:
        return steps
    counts = torch.tensor([len(step) for step in steps], device=device)
    if layout.expert > 1:
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    group = layout.pipeline if layout.virtual_pipeline > 1 else 1
    for step, count in zip(steps, counts.tolist(), strict=True):
        step += [idle_micro_batch(step[-1])] * (count + -count % group - len(step))
    return steps


def compute_log_probs(
    model: Sequence[Any],
    micro_batches: Sequence[PackedMicroBatch],
    *,
    chunk_size: int | None = None,
    fp32_logits: bool = False,
) -> list[torch.Tensor]:
    """Compute the log-probabilities of the response tokens of every micro-batch, without gradient.

    Arguments:
        chunk_size: response tokens whose probabilities are in memory at a time; None for all of a micro-batch.
        fp32_logits: multiply by the output weights in float32, a chunk at a time; see :func:`can_project`.

    Returns:
        One float32 [u] per micro-batch on the last pipeline stage; an empty list on other stages, which have no logits.
    """

    def take(micro: PackedMicroBatch, logits: Any) -> torch.Tensor:
        return response_log_probs(logits, micro, chunk_size=chunk_size, with_entropy=False)[0]

    return forward_only(model, micro_batches, take, projects=fp32_logits)


def forward_only(
    model: Sequence[Any],
    micro_batches: Sequence[PackedMicroBatch],
    take: Callable[[PackedMicroBatch, Any], torch.Tensor],
    *,
    projects: bool = False,
) -> list[torch.Tensor]:
    """Apply ``take`` to the model's output for each micro-batch, without gradient.

    Arguments:
        projects: ``take`` gets a :class:`Projection` instead of logits.

    Returns:
        One result per micro-batch on the last pipeline stage; an empty list on other stages.
    """

    def last(micro: PackedMicroBatch, output: Any, **_: Any) -> torch.Tensor:
        return take(micro, output)

    with torch.no_grad():
        collected: list[torch.Tensor] = _schedule(model, micro_batches, last, forward_only=True, projects=projects)
    return collected


def forward_backward_policy(
    model: Sequence[Any],
    micro_batches: Sequence[PackedMicroBatch],
    objective: Objective,
    *,
    chunk_size: int | None = None,
    fp32_logits: bool = False,
) -> dict[str, float]:
    """Compute the gradients of the summed loss of ``micro_batches``, in the model's buffers, reduced over all ranks.

    Arguments:
        chunk_size, fp32_logits: as for :func:`compute_log_probs`; no loss of logits takes float32 logits.

    Returns:
        The metrics of the step, summed over all data-parallel ranks, the same on every rank.
    """

    def compute_loss(micro: PackedMicroBatch, logits_1TV: Any) -> tuple[torch.Tensor, MetricSums]:
        # The backward pass may overwrite the logits, because that of the output layer needs only the layer's input. A
        # loss of logits may change them in place, so the log-probabilities are computed before it.
        with torch.set_grad_enabled(not of_logits):
            log_probs_U, entropy_U = response_log_probs(logits_1TV, micro, chunk_size=chunk_size, consume=not of_logits)
        assert entropy_U is not None
        if of_logits:
            return objective.from_logits(logits_1TV, log_probs_U, entropy_U, micro)
        return objective(log_probs_U, entropy_U if objective.algorithm.entropy_coef else entropy_U.detach(), micro)

    of_logits = objective.parts.of_logits is not None
    return forward_backward(model, micro_batches, compute_loss, all_rows=of_logits, projects=fp32_logits)


def forward_backward(
    model: Sequence[Any],
    micro_batches: Sequence[PackedMicroBatch],
    compute_loss: ComputeLoss,
    *,
    all_rows: bool = False,
    projects: bool = False,
) -> dict[str, float]:
    """Compute the gradients of the summed losses of ``compute_loss``, otherwise as :func:`forward_backward_policy`.

    Arguments:
        all_rows: ``compute_loss`` gets the model's output for every token, not only for those in ``rows_U``.
        projects: it gets a :class:`Projection` instead of logits.

    Raises:
        RunError: no loss of any rank needs a gradient.
    """

    def loss(micro: PackedMicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, MetricSums]:
        value, sums = compute_loss(micro, output)
        sums.largest[GRADIENT] = torch.full((), float(value.requires_grad), device=value.device)
        value = value * micro.loss_factor
        sums.sums |= {name: sums.sums[name] * micro.loss_factor for name in LOSSES if name in sums.sums}
        # Megatron wants a token count, which optimizer.sum_gradients ignores.
        return value, torch.ones((), dtype=torch.int, device=value.device), sums

    passed = _schedule(model, micro_batches, loss, forward_only=False, all_rows=all_rows, projects=projects)
    metrics = _reduce(passed, device=next(model[0].parameters()).device)
    require_gradient(metrics.pop(GRADIENT))
    return metrics


@dataclass(frozen=True, slots=True)
class Projection:
    """The factors of logits, which the output layer would multiply.

    Arguments:
        hidden_1TH: of every token of the row; its gradient is summed over tensor-parallel ranks.
        weight_VH: output weights of this rank's part of the vocabulary.
    """

    hidden_1TH: torch.Tensor
    weight_VH: torch.Tensor


def response_log_probs(
    logits: torch.Tensor | Projection,
    micro: PackedMicroBatch,
    *,
    chunk_size: int | None,
    with_entropy: bool = True,
    consume: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log p(token) of every response token at its sampling temperature, and the entropy; float32 [u].

    Under top-p or top-k sampling p is the distribution over the tokens that were kept; the entropy is that of all.

    Arguments are those of :func:`slime_core.ops.log_probs.log_probs_and_entropy`.
    """
    from megatron.core import parallel_state

    compute: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    if isinstance(logits, Projection):
        compute = partial(projected_log_probs, logits.hidden_1TH.squeeze(0), logits.weight_VH)
    else:  # the gradient of [0] would be a copy in a tensor of zeros
        compute = partial(log_probs_and_entropy, logits.squeeze(0), consume=consume)
    return compute(
        rows_U=micro.rows_U,
        targets_U=micro.targets_U,
        temperature=micro.temperature,
        chunk_size=chunk_size,
        group=parallel_state.get_tensor_model_parallel_group(),
        with_entropy=with_entropy,
        kept_tokens=micro.kept_tokens,
    )


def _schedule(
    model: Sequence[Any],
    micro_batches: Sequence[PackedMicroBatch],
    last: Any,
    *,
    forward_only: bool,
    all_rows: bool = False,
    projects: bool = False,
) -> Any:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    longest = max(micro.num_tokens for micro in micro_batches)
    iterators = [iter(micro_batches) for _ in model]
    return get_forward_backward_func()(
        forward_step_func=partial(_forward_projection if projects else partial(_forward, all_rows), last),
        data_iterator=iterators if len(model) > 1 else iterators[0],
        model=list(model) if len(model) > 1 else model[0],
        num_microbatches=len(micro_batches),
        seq_length=longest,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _forward(
    all_rows: bool, last: Any, micro_batches: Iterator[PackedMicroBatch], chunk: Any
) -> tuple[torch.Tensor, Any]:
    micro = next(micro_batches)
    with nullcontext(micro) if all_rows else _predicting_rows(chunk.module, micro) as selected:
        output = _output(chunk, micro)
    return output, lambda logits_1TV, **options: last(selected, logits_1TV, **options)


def _forward_projection(last: Any, micro_batches: Iterator[PackedMicroBatch], chunk: Any) -> tuple[torch.Tensor, Any]:
    micro = next(micro_batches)
    with _without_product(chunk.module) as weights:
        output = _output(chunk, micro)
    return output, lambda hidden_1TH, **options: last(micro, Projection(hidden_1TH, weights[0]), **options)


def _output(chunk: Any, micro: PackedMicroBatch) -> torch.Tensor:
    from megatron.core.transformer.module import Float16Module

    # Without it Megatron would copy all bfloat16 logits to float32 at once.
    keep_dtype = {"fp32_output": False} if isinstance(chunk.module, Float16Module) else {}
    extra = {**keep_dtype, **model_inputs(chunk, micro.inputs, micro.tokens_1T.device)}
    output: torch.Tensor = chunk(
        micro.tokens_1T, micro.position_ids_1T, None, packed_seq_params=micro.packed_sequence, **extra
    )
    return output


def can_project(chunks: Chunks) -> bool:
    """Return whether the model's logits are the product of hidden states and output weights, and nothing else.

    Chunks of earlier pipeline stages have no logits, so they are no obstacle.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import ColumnParallelLinear

    layers = [getattr(chunk, "output_layer", None) for chunk in chunks]
    plain = [type(layer) is ColumnParallelLinear and layer.bias is None for layer in layers if layer is not None]
    return all(isinstance(chunk, GPTModel) for chunk in chunks) and all(plain)


@contextmanager
def _without_product(module: Any) -> Iterator[list[torch.Tensor]]:
    """Inside the block, let the output layer of ``module`` return its input, for every token of the row, with the
    gradient summed over tensor-parallel ranks.

    Yields a list that gets the output weights when the layer is called. Does nothing on earlier pipeline stages.
    """
    from megatron.core.tensor_parallel import (
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
    )

    layer = getattr(getattr(module, "module", module), "output_layer", None)
    weights: list[torch.Tensor] = []

    def forward(hidden_T1H: torch.Tensor, weight: torch.Tensor | None = None, **_: Any) -> tuple[torch.Tensor, None]:
        assert layer is not None
        weights.append(layer.weight if weight is None else weight)
        gather = (
            gather_from_sequence_parallel_region if layer.sequence_parallel else copy_to_tensor_model_parallel_region
        )
        return gather(hidden_T1H), None

    if layer is not None:
        layer.forward = forward
    try:
        yield weights
    finally:
        if layer is not None:
            del layer.forward


@contextmanager
def _predicting_rows(module: Any, micro: PackedMicroBatch) -> Iterator[PackedMicroBatch]:
    """Inside the block, let the output layer of ``module`` compute only the rows that predict a response token.

    Yields ``micro`` with ``rows_U`` as indices of these rows. It saves the logits of prompts, which are most of them.
    Does nothing if another pipeline stage has the output layer, if every row or no row predicts a response token, or
    if sequence parallelism gives a rank only a part of the rows.
    """
    layer = getattr(getattr(module, "module", module), "output_layer", None)
    rows_R, of_U = torch.unique(micro.rows_U, return_inverse=True)
    if layer is None or module.config.sequence_parallel or not 0 < len(rows_R) < micro.num_tokens:
        yield micro
        return

    def select(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return inputs[0].index_select(0, rows_R), *inputs[1:]

    hook = layer.register_forward_pre_hook(select)
    try:
        yield replace(micro, rows_U=of_U)
    finally:
        hook.remove()


def model_inputs(chunk: Any, inputs: RowInputs, device: torch.device) -> dict[str, torch.Tensor]:
    """Return keyword arguments of ``chunk``'s forward: the row's model inputs, if the chunk embeds tokens.

    Arguments:
        chunk: of a model, as Megatron's schedule calls it.
    """
    from megatron.core.utils import get_attr_wrapped_model

    if not inputs or not get_attr_wrapped_model(chunk, "pre_process"):
        return {}
    return inputs.tensors(device)


def _reduce(parts: Sequence[MetricSums], *, device: torch.device) -> dict[str, float]:
    """Reduce over micro-batches and data-parallel ranks, then broadcast to the other pipeline stages."""
    from megatron.core import parallel_state

    result: list[Any] = [reduce_metrics(parts, parallel_state.get_data_parallel_group(with_context_parallel=True))]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast_object_list(
            result,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
            device=device,
        )
    metrics: dict[str, float] = result[0]
    return metrics
