"""Runs micro-batches through the model with Megatron's own schedule: forward only, or forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from slime_core.learner.loss.log_probs import response_log_probs
from slime_core.learner.loss.objective import Objective
from slime_core.learner.loss.totals import Sums, total
from slime_core.learner.packed.batches import MicroBatch, idle
from slime_core.learner.packed.inputs import handed
from slime_core.learner.refusals import refuse_no_gradient
from slime_core.modeling.layout import ParallelLayout

__all__ = ["backward", "collect", "descend", "fill_up", "log_probs"]

Measure = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, Sums]]
"""From a micro-batch and what the model gave for its row to the loss, with gradient, and the metrics."""


MINIMISED = ("loss", "pg_loss", "value_loss")
"""Metrics that are what is minimised; all others are averages."""

GRADIENT = "has_gradient"
"""Whether a loss needs a gradient, on its way through the largest values over micro-batches and ranks."""


def fill_up(steps: list[list[MicroBatch]], layout: ParallelLayout) -> None:
    """Add idle micro-batches to every optimizer step until Megatron can run it in ``layout``. Collective.

    Interleaved stages take turns in groups of one micro-batch a pipeline rank, so only whole groups will do
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
        step += [idle(step[-1])] * (count + -count % group - len(step))


def log_probs(
    model: Sequence[Any], micro_batches: Sequence[MicroBatch], *, chunk_size: int | None = None
) -> list[torch.Tensor]:
    """Log-probabilities of the response tokens of every micro-batch, without gradient.

    Arguments:
        chunk_size: response tokens whose probabilities are in memory at once; None: all of a micro-batch.

    Returns:
        One float32 [u] a micro-batch on the last pipeline stage; nothing on the others, which do not need them.
    """

    def take(micro: MicroBatch, logits_1TV: torch.Tensor) -> torch.Tensor:
        return response_log_probs(logits_1TV, micro, chunk_size=chunk_size, with_entropy=False)[0]

    return collect(model, micro_batches, take)


def collect(
    model: Sequence[Any], micro_batches: Sequence[MicroBatch], take: Callable[[MicroBatch, torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """What ``take`` makes of the model's output for each micro-batch, without gradient.

    Returns:
        One a micro-batch on the last pipeline stage; nothing on the others.
    """

    def last(micro: MicroBatch, output: torch.Tensor, **_: Any) -> torch.Tensor:
        return take(micro, output)

    with torch.no_grad():
        collected: list[torch.Tensor] = _schedule(model, micro_batches, last, forward_only=True)
    return collected


def backward(
    model: Sequence[Any], micro_batches: Sequence[MicroBatch], objective: Objective, *, chunk_size: int | None = None
) -> dict[str, float]:
    """Gradients of the summed loss of ``micro_batches`` in the model's buffers, finished over all ranks.

    Arguments:
        chunk_size: as for :func:`log_probs`.

    Returns:
        The metrics of the step, summed over all data-parallel ranks, the same on every rank.
    """

    def measure(micro: MicroBatch, logits_1TV: torch.Tensor) -> tuple[torch.Tensor, Sums]:
        how = _of_log_probs if objective.of_logits is None else _of_logits
        return how(objective, logits_1TV, micro, chunk_size)

    return descend(model, micro_batches, measure)


def descend(model: Sequence[Any], micro_batches: Sequence[MicroBatch], measure: Measure) -> dict[str, float]:
    """Gradients of the sum of the losses that ``measure`` finds, otherwise as :func:`backward`.

    Raises:
        RunError: no loss of any rank needs a gradient.
    """

    def loss(micro: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Sums]:
        value, sums = measure(micro, output)
        sums.largest[GRADIENT] = torch.full((), float(value.requires_grad), device=value.device)
        value = value * micro.loss_factor
        sums.sums |= {name: sums.sums[name] * micro.loss_factor for name in MINIMISED if name in sums.sums}
        # The count that Megatron asks for is not used: see optimizer.sum_gradients.
        return value, torch.ones((), dtype=torch.int, device=value.device), sums

    metrics = _reduce(_schedule(model, micro_batches, loss, forward_only=False), device=_device(model))
    refuse_no_gradient(metrics.pop(GRADIENT))
    return metrics


def _of_log_probs(
    objective: Objective, logits_1TV: torch.Tensor, micro: MicroBatch, chunk_size: int | None
) -> tuple[torch.Tensor, Sums]:
    # Nobody reads the logits after their gradient is there: the output layer's backward pass needs its input alone.
    log_probs_U, entropy_U = response_log_probs(logits_1TV, micro, chunk_size=chunk_size, consume=True)
    assert entropy_U is not None
    return objective(log_probs_U, entropy_U if objective.entropy_has_gradient else entropy_U.detach(), micro)


def _of_logits(
    objective: Objective, logits_1TV: torch.Tensor, micro: MicroBatch, chunk_size: int | None
) -> tuple[torch.Tensor, Sums]:
    """The same where the run brings a loss of its own."""
    assert objective.of_logits is not None
    with torch.no_grad():  # before the function has the logits, which it may change in place
        log_probs_U, entropy_U = response_log_probs(logits_1TV, micro, chunk_size=chunk_size)
    assert entropy_U is not None
    micro = objective.distilled(micro, log_probs_U if micro.old_log_probs_U is None else micro.old_log_probs_U)
    loss, metrics = objective.of_logits(logits_1TV.float(), micro)
    measured = objective.measure(loss, log_probs_U, entropy_U, micro)
    return loss, Sums({**metrics, **measured.sums}, measured.largest)


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
    # Megatron would copy bfloat16 logits to float32, all at once.
    as_they_are = {"fp32_output": False} if isinstance(chunk.module, Float16Module) else {}
    given = {**as_they_are, **handed(chunk, micro.inputs, micro.tokens_1T.device)}
    output = chunk(micro.tokens_1T, micro.position_ids_1T, None, packed_seq_params=micro.packed_sequence, **given)
    return output, lambda logits_1TV, **options: last(micro, logits_1TV, **options)


def _reduce(parts: Sequence[Sums], *, device: torch.device) -> dict[str, float]:
    """Over micro-batches and data-parallel ranks; then tell the other pipeline stages."""
    result: list[Any] = [total(parts, parallel_state.get_data_parallel_group(with_context_parallel=True))]
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
