"""Builds Megatron's DDP, optimizer and learning-rate schedule around the model chunks, for ``trained_model.py``.

Gradients are *summed* over samples and ranks: every divisor is already in the shard's loss weights. Megatron calls that
``calculate_per_token_loss``; :func:`sum_gradients` leaves out its division by a token count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module

from slime_core.config.learning import OptimizerConfig as OptimizerSettings
from slime_core.learner.data_parallel import OverlappingDDP

OFFLOADING = (
    "optimizer_cpu_offload",
    "use_precision_aware_optimizer",
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
)
"""Fields of Megatron's OptimizerConfig that move Adam's state, and its work, from a GPU to the host."""


def wrap(
    chunks: list[torch.nn.Module],
    *,
    bf16: bool,
    before_exchange: Callable[[], None] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Wrap the chunks in Megatron's DDP, with fp32 gradient reduction and gradients summed over ranks.

    Arguments:
        before_exchange: called when a rank has computed its gradients, before it waits for those of other ranks.
        overrides: further fields of Megatron's DistributedDataParallelConfig.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        check_for_nan_in_grad=False,
        average_in_collective=False,
        **(overrides or {}),
    )
    config: Any = chunks[0].config
    config.calculate_per_token_loss = True
    config.finalize_model_grads_func = partial(sum_gradients, before_exchange=before_exchange)
    inner = [Float16Module(config, chunk) if bf16 else chunk for chunk in chunks]
    overlaps = settings.overlap_grad_reduce or settings.overlap_param_gather
    of = OverlappingDDP if overlaps else DistributedDataParallel
    model = [
        of(config=config, ddp_config=settings, module=module, disable_bucketing=position > 0)
        for position, module in enumerate(inner)
    ]
    if settings.overlap_grad_reduce:
        # Until its last micro-batch a step only adds up gradients.
        config.no_sync_func = [chunk.no_sync for chunk in model] if len(model) > 1 else model[0].no_sync
    return model


def sum_gradients(
    model: list[Any],
    num_tokens: torch.Tensor | None = None,
    *,
    before_exchange: Callable[[], None] | None = None,
    **options: Any,
) -> None:
    """Sum the gradients of a step over data-parallel ranks, and those of shared and replicated parameters.

    Without it every rank would step on its samples alone, and nothing would report it. ``num_tokens`` is ignored: see
    the module.
    """
    if before_exchange is not None:
        before_exchange()
    finalize_model_grads(model, None, **options)


def build_optimizer(
    model: list[Any], settings: OptimizerSettings, *, bf16: bool, overrides: Mapping[str, Any] | None = None
) -> Any:
    """Build Adam with decoupled weight decay, fp32 master weights, gradient clipping, sharded over data-parallel ranks.

    Without Apex and TransformerEngine Megatron takes torch's Adam, whose fused kernel is used here: one pass over
     the state, and no copies of it (``python -m bench.adam``).

    Arguments:
        overrides: further fields of Megatron's OptimizerConfig. Those of :data:`OFFLOADING` are left out if the
            model is in host memory already.
    """
    fields = {"optimizer_offload_fraction": 1.0, **(overrides or {})}  # 1.0: of Megatron's own command line
    if not next(model[0].parameters()).is_cuda:
        fields = {name: value for name, value in fields.items() if name not in OFFLOADING}
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        clip_grad=settings.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=True,
        **fields,
    )
    optimizer = get_megatron_optimizer(config, model)
    # A part of which no weight trains on any rank cannot be saved (optimizer/optimizer.py:1401).
    optimizer.chained_optimizers = [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]
    for adam in (part.optimizer for part in optimizer.chained_optimizers):
        if isinstance(adam, torch.optim.AdamW):
            for group in adam.param_groups:
                group["fused"] = True
    model[0].config.grad_scale_func = optimizer.scale_loss
    return optimizer


def build_schedule(optimizer: Any, settings: OptimizerSettings, *, num_steps: int) -> OptimizerParamScheduler:
    """Linear warm-up from ``lr_warmup_init``, then the configured decay, counted in optimizer steps.

    The schedule is one step ahead of the optimizer: the first step already runs one ``lr_warmup_iters``-th of the way
    up to ``lr``. The decay styles are Megatron's (optimizer_param_scheduler.py:199); a unit test holds a table of them.
    """
    decay = max(settings.lr_decay_iters or num_steps, settings.lr_warmup_iters + 1)
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_iters,
        lr_decay_steps=decay,
        lr_decay_style=settings.lr_decay_style,
        wsd_decay_steps=settings.lr_wsd_decay_iters,
        lr_wsd_decay_style=settings.lr_wsd_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=decay,
        wd_incr_style="constant",
    )
    schedule.step(increment=1)
    return schedule


def reset_optimizer_states(optimizer: Any) -> None:
    """Reset Adam's means and step counts to those before its first step; master weights and the schedule stay.

    Arguments:
        optimizer: of :func:`build_optimizer`.
    """
    for adam in (part.optimizer for part in optimizer.chained_optimizers):
        for state in adam.state.values():
            for value in (state[name] for name in ("exp_avg", "exp_avg_sq", "step") if name in state):
                value.zero_()
        # Fused implementations count the steps of a whole group.
        for group in (group for group in adam.param_groups if "step" in group):
            group["step"] = 0 * group["step"]
