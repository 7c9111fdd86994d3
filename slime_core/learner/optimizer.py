"""Which parameters train, and Megatron's DDP, optimizer and learning-rate schedule around the model chunks.

Parameters that train are chosen by regular expressions over their names. A name is the one that the parameter has in a
model that is not split: layers and experts are numbered over all pipeline and expert ranks, and a tied output matrix on
the last pipeline stage goes by the embedding's name. So an expression selects the same weights in every layout.

Gradients are *summed* over samples and ranks: every divisor is already in the shard's loss weights. Megatron calls that
``calculate_per_token_loss``; its own division by a token count is left out in :func:`sum_gradients`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module

from slime_core.config.schema import OptimizerConfig as OptimizerSettings
from slime_core.errors import ConfigError


def freeze(chunks: Sequence[torch.nn.Module], *, only: Sequence[str] = (), frozen: Sequence[str] = ()) -> None:
    """Switch off the gradient of parameters that do not train. Collective; before DDP wraps the chunks.

    Arguments:
        only: train the parameters whose name contains a match of one of these expressions; empty: all.
        frozen: train all other parameters.

    Raises:
        ConfigError: an expression finds no parameter on any rank, or nothing is left to train.
    """
    if not only and not frozen:
        return
    setting = "only_train_params_name_list" if only else "freeze_params_name_list"
    mine = list(unsharded_names(chunks))
    everything = _over_ranks([name for name, _ in mine])
    _refuse_useless(only or frozen, everything, setting)
    chosen = {name for name in everything if _finds(only or frozen, name)}
    trained = chosen if only else everything - chosen
    if not trained:
        raise ConfigError(f"{setting} = {list(only or frozen)} leaves none of {len(everything)} parameters to train")
    for name, parameter in mine:
        parameter.requires_grad_(name in trained)
    for chunk in chunks:
        _require_input_gradients(chunk)


def unsharded_names(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Each parameter with its name in the whole model."""
    for chunk in chunks:
        tied = getattr(chunk, "share_embeddings_and_output_weights", False)
        for name, parameter in _named(chunk, ()):
            yield ("embedding.word_embeddings.weight" if tied and name == "output_layer.weight" else name), parameter


def _named(module: torch.nn.Module, place: tuple[str, ...]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, parameter in module.named_parameters(recurse=False):
        yield ".".join((*place, name)), parameter
    for name, child in module.named_children():
        yield from _named(child, (*place, _number(name, child, of=module, place=place)))


def _number(name: str, child: Any, *, of: Any, place: tuple[str, ...]) -> str:
    """``name``, or the child's number in the whole model if it is a layer or an expert."""
    if not name.isdigit():
        return name
    if place[-1:] == ("local_experts",):
        from megatron.core import parallel_state

        return str(int(name) + len(of) * parallel_state.get_expert_model_parallel_rank())
    return str(getattr(child, "layer_number", int(name) + 1) - 1)


def _require_input_gradients(chunk: Any) -> None:
    """Make the embedding's output need a gradient where later weights would otherwise get none.

    Megatron's checkpointed layers have gradients only if their input needs one (tensor_parallel/random.py:496). Ranks
    that share experts exchange gradients in every layer, also in one where the experts of a single rank train. Later
    pipeline stages receive inputs that need a gradient.
    """
    embedding, config = getattr(chunk, "embedding", None), chunk.config
    shares_experts = config.expert_model_parallel_size > 1
    recomputes = config.recompute_granularity is not None and any(part.requires_grad for part in chunk.parameters())
    if embedding is not None and (recomputes or shares_experts):
        embedding.register_forward_hook(_need_gradient)


def _need_gradient(embedding: torch.nn.Module, arguments: Any, hidden_T1H: torch.Tensor) -> None:
    if torch.is_grad_enabled() and not hidden_T1H.requires_grad:
        hidden_T1H.requires_grad_()


def _over_ranks(names: list[str]) -> set[str]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return set(names)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, names)
    return {name for of_rank in found for name in of_rank}


def _finds(expressions: Sequence[str], name: str) -> bool:
    return any(re.search(expression, name) for expression in expressions)


def _refuse_useless(expressions: Sequence[str], names: set[str], setting: str) -> None:
    for expression in expressions:
        if not any(re.search(expression, name) for name in names):
            near = difflib.get_close_matches(expression, sorted(names), n=3, cutoff=0.3) or sorted(names)[:3]
            raise ConfigError(
                f"{setting}: {expression!r} finds none of the model's {len(names)} parameters; near it are "
                f"{', '.join(near)}. Accepted is a regular expression that finds a part of a name."
            )


def wrap(chunks: list[torch.nn.Module], *, bf16: bool) -> list[Any]:
    """The chunks under Megatron's DDP, with fp32 gradient reduction and gradients summed over ranks."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        check_for_nan_in_grad=False,
        average_in_collective=False,
    )
    config: Any = chunks[0].config
    config.calculate_per_token_loss = True
    config.finalize_model_grads_func = sum_gradients
    inner = [Float16Module(config, chunk) if bf16 else chunk for chunk in chunks]
    return [
        DistributedDataParallel(config=config, ddp_config=settings, module=module, disable_bucketing=position > 0)
        for position, module in enumerate(inner)
    ]


def sum_gradients(model: list[Any], num_tokens: torch.Tensor | None = None, **options: Any) -> None:
    """Finish the gradients of a step: summed over data-parallel ranks, shared and replicated parameters made to agree.

    Without it every rank would step on its own samples, and nothing would report it. ``num_tokens`` is ignored: see the
    module.
    """
    finalize_model_grads(model, None, **options)


def build_optimizer(
    model: list[Any], settings: OptimizerSettings, *, bf16: bool, overrides: Mapping[str, Any] | None = None
) -> Any:
    """Adam with decoupled weight decay, fp32 master weights, gradient clipping, sharded over data-parallel ranks.

    Arguments:
        overrides: further fields of Megatron's OptimizerConfig.
    """
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
        **(overrides or {}),
    )
    optimizer = get_megatron_optimizer(config, model)
    # A part of which no weight trains on any rank cannot be saved (optimizer/optimizer.py:1401).
    optimizer.chained_optimizers = [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]
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
        optimizer: of Megatron, chained or not.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.is_stub_optimizer:
            continue
        adam = part.optimizer
        for state in adam.state.values():
            for value in (state[name] for name in ("exp_avg", "exp_avg_sq", "step") if name in state):
                value.zero_()
        # Fused implementations count the steps of a whole group.
        for group in (group for group in adam.param_groups if "step" in group):
            group["step"] = 0 * group["step"]
