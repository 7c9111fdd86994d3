"""Runs micro-batches through the model with Megatron's own schedule.

    compute_log_probs         forward only: log-probabilities of the response tokens
    forward_only              the same for another output, such as a critic's values
    forward_backward_policy   gradients and metrics of one optimizer step of the actor
    forward_backward          the same for another loss, such as a critic's

Megatron is imported here, so the module is imported inside functions, after ``slime_core.cpu.megatron.install()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from slime_core.learner.checks import require_gradient
from slime_core.learner.loss.metric_sums import MetricSums, reduce_metrics
from slime_core.learner.loss.objective import Objective
from slime_core.learner.micro_batches import MicroBatch, RowInputs, idle_micro_batch
from slime_core.modeling.layout import ParallelLayout
from slime_core.ops.log_probs import log_probs_and_entropy

__all__ = [
    "add_idle_micro_batches",
    "compute_log_probs",
    "forward_backward",
    "forward_backward_policy",
    "forward_only",
    "model_inputs",
    "response_log_probs",
]

ComputeLoss = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, MetricSums]]
"""From a micro-batch and the model's output for its row to the loss, with gradient, and the metrics."""

LOSSES = ("loss", "pg_loss", "value_loss")
"""Metrics that are multiplied by the step's loss factor, as the loss is; all others are averages."""

GRADIENT = "has_gradient"
"""1 if the loss of a micro-batch needs a gradient; its maximum over micro-batches and ranks is checked once a step."""


def add_idle_micro_batches(steps: list[list[MicroBatch]], layout: ParallelLayout) -> None:
    """Add idle micro-batches to every optimizer step until Megatron can run it in ``layout``. Collective.

    Interleaved stages run groups of one micro-batch a pipeline rank, so the number has to divide into groups
    (pipeline_parallel/schedules.py:995). Ranks that share experts exchange tokens in every layer, so all of them have
    to run equally many.
    """
    if layout.expert == 1 and layout.virtual_pipeline == 1:
        return
    counts = torch.tensor([len(step) for step in steps], device=steps[0][0].tokens_1T.device)
    if layout.expert > 1:
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    group = layout.pipeline if layout.virtual_pipeline > 1 else 1
    for step, count in zip(steps, counts.tolist(), strict=True):
        step += [idle_micro_batch(step[-1])] * (count + -count % group - len(step))


def compute_log_probs(
    model: Sequence[Any], micro_batches: Sequence[MicroBatch], *, chunk_size: int | None = None
) -> list[torch.Tensor]:
    """Log-probabilities of the response tokens of every micro-batch, without gradient.

    Arguments:
        chunk_size: response tokens whose probabilities are in memory at once; None: all of a micro-batch.

    Returns:
        One float32 [u] a micro-batch on the last pipeline stage; an empty list on the others, which have no logits.
    """

    def take(micro: MicroBatch, logits_1TV: torch.Tensor) -> torch.Tensor:
        return response_log_probs(logits_1TV, micro, chunk_size=chunk_size, with_entropy=False)[0]

    return forward_only(model, micro_batches, take)


def forward_only(
    model: Sequence[Any], micro_batches: Sequence[MicroBatch], take: Callable[[MicroBatch, torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """The result of ``take`` on the model's output for each micro-batch, without gradient.

    Returns:
        One a micro-batch on the last pipeline stage; an empty list on the others.
    """

    def last(micro: MicroBatch, output: torch.Tensor, **_: Any) -> torch.Tensor:
        return take(micro, output)

    with torch.no_grad():
        collected: list[torch.Tensor] = _schedule(model, micro_batches, last, forward_only=True)
    return collected


def forward_backward_policy(
    model: Sequence[Any], micro_batches: Sequence[MicroBatch], objective: Objective, *, chunk_size: int | None = None
) -> dict[str, float]:
    """Gradients of the summed loss of ``micro_batches``, in the model's buffers and reduced over all ranks.

    Arguments:
        chunk_size: as for :func:`compute_log_probs`.

    Returns:
        The metrics of the step, summed over all data-parallel ranks, the same on every rank.
    """

    def compute_loss(micro: MicroBatch, logits_1TV: torch.Tensor) -> tuple[torch.Tensor, MetricSums]:
        if objective.of_logits is None:
            return _loss_of_log_probs(objective, logits_1TV, micro, chunk_size)
        return _loss_of_logits(objective, logits_1TV, micro, chunk_size)

    return forward_backward(model, micro_batches, compute_loss)


def forward_backward(
    model: Sequence[Any], micro_batches: Sequence[MicroBatch], compute_loss: ComputeLoss
) -> dict[str, float]:
    """Gradients of the sum of the losses of ``compute_loss``, otherwise as :func:`forward_backward_policy`.

    Raises:
        RunError: no loss of any rank needs a gradient.
    """

    def loss(micro: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, MetricSums]:
        value, sums = compute_loss(micro, output)
        sums.largest[GRADIENT] = torch.full((), float(value.requires_grad), device=value.device)
        value = value * micro.loss_factor
        sums.sums |= {name: sums.sums[name] * micro.loss_factor for name in LOSSES if name in sums.sums}
        # Megatron wants a token count, which optimizer.sum_gradients ignores.
        return value, torch.ones((), dtype=torch.int, device=value.device), sums

    metrics = _reduce(_schedule(model, micro_batches, loss, forward_only=False), device=_device(model))
    require_gradient(metrics.pop(GRADIENT))
    return metrics


def response_log_probs(
    logits_1TV: torch.Tensor,
    micro: MicroBatch,
    *,
    chunk_size: int | None,
    with_entropy: bool = True,
    consume: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log p(token) of every response token at the temperature that sampled it, and the entropy there; float32 [u].

    Under top-p or top-k sampling p is the distribution over the tokens that were kept; the entropy is that of all.

    Arguments are those of :func:`slime_core.ops.log_probs.log_probs_and_entropy`.
    """
    return log_probs_and_entropy(
        logits_1TV[0],
        rows_U=micro.rows_U,
        targets_U=micro.targets_U,
        temperature=micro.temperature,
        chunk_size=chunk_size,
        group=parallel_state.get_tensor_model_parallel_group(),
        with_entropy=with_entropy,
        consume=consume,
        kept=micro.kept,
    )


def _loss_of_log_probs(
    objective: Objective, logits_1TV: torch.Tensor, micro: MicroBatch, chunk_size: int | None
) -> tuple[torch.Tensor, MetricSums]:
    # The backward pass may overwrite the logits: that of the output layer needs only its input.
    log_probs_U, entropy_U = response_log_probs(logits_1TV, micro, chunk_size=chunk_size, consume=True)
    assert entropy_U is not None
    return objective(log_probs_U, entropy_U if objective.entropy_has_gradient else entropy_U.detach(), micro)


def _loss_of_logits(
    objective: Objective, logits_1TV: torch.Tensor, micro: MicroBatch, chunk_size: int | None
) -> tuple[torch.Tensor, MetricSums]:
    """The same where a plugin gives the whole loss as a function of the logits."""
    assert objective.of_logits is not None
    with torch.no_grad():  # before the function has the logits, which it may change in place
        log_probs_U, entropy_U = response_log_probs(logits_1TV, micro, chunk_size=chunk_size)
    assert entropy_U is not None
    micro = objective.subtract_teacher_kl(
        micro, log_probs_U if micro.old_log_probs_U is None else micro.old_log_probs_U
    )
    loss, metrics = objective.of_logits(logits_1TV.float(), micro)
    measured = objective.measure(loss, log_probs_U, entropy_U, micro)
    return loss, MetricSums({**metrics, **measured.sums}, measured.largest)


def _schedule(model: Sequence[Any], micro_batches: Sequence[MicroBatch], last: Any, *, forward_only: bool) -> Any:
    longest = max(micro.num_tokens for micro in micro_batches)
    iterators = [iter(micro_batches) for _ in model]
    return get_forward_backward_func()(
        forward_step_func=partial(_forward, last),
        data_iterator=iterators if len(model) > 1 else iterators[0],
        model=list(model) if len(model) > 1 else model[0],
        num_microbatches=len(micro_batches),
        seq_length=longest,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _forward(last: Any, micro_batches: Iterator[MicroBatch], chunk: Any) -> tuple[torch.Tensor, Any]:
    micro = next(micro_batches)
    # Without it Megatron would copy all bfloat16 logits to float32 at once.
    keep_dtype = {"fp32_output": False} if isinstance(chunk.module, Float16Module) else {}
    extra = {**keep_dtype, **model_inputs(chunk, micro.inputs, micro.tokens_1T.device)}
    output = chunk(micro.tokens_1T, micro.position_ids_1T, None, packed_seq_params=micro.packed_sequence, **extra)
    return output, lambda logits_1TV, **options: last(micro, logits_1TV, **options)


def model_inputs(chunk: Any, inputs: RowInputs, device: torch.device) -> dict[str, torch.Tensor]:
    """Keyword arguments of ``chunk``'s forward: the row's model inputs, if the chunk embeds tokens.

    Arguments:
        chunk: of a model, as its schedule calls it.
    """
    from megatron.core.utils import get_attr_wrapped_model

    if not inputs or not get_attr_wrapped_model(chunk, "pre_process"):
        return {}
    return inputs.tensors(device)


def _reduce(parts: Sequence[MetricSums], *, device: torch.device) -> dict[str, float]:
    """Reduce over micro-batches and data-parallel ranks, then broadcast to the other pipeline stages."""
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


def _device(model: Sequence[Any]) -> torch.device:
    device: torch.device = next(model[0].parameters()).device
    return device
