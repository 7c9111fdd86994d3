"""Which parameters train: chosen by regular expressions over their names.

A name is the one that the parameter has in a model that is not split: layers and experts are numbered over all
pipeline and expert ranks, and a tied output matrix on the last pipeline stage goes by the embedding's name. So an
expression selects the same weights in every layout.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

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
