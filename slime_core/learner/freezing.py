"""Selects the parameters that train, by regular expressions over their names, for ``rank.py``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from slime_core.errors import ConfigError


def freeze(chunks: Sequence[torch.nn.Module], *, only: Sequence[str] = (), frozen: Sequence[str] = ()) -> None:
    """Switch off the gradient of further parameters. Collective; before DDP wraps the chunks.

    Names are those of a model that is not split: layers and experts are numbered over all pipeline and expert ranks,
    and a tied output matrix on the last pipeline stage has the embedding's name. So an expression selects the same
    weights in every layout.

    Arguments:
        only: train the parameters whose name contains a match of one of these expressions; empty: all.
        frozen: train all other parameters.

    Raises:
        ConfigError: an expression matches no parameter on any rank, or no parameter trains.
    """
    if only or frozen:
        _freeze_by_name(chunks, only, frozen)
    if not all(parameter.requires_grad for chunk in chunks for parameter in chunk.parameters()):
        for chunk in chunks:
            _require_input_gradients(chunk)


def _freeze_by_name(chunks: Sequence[torch.nn.Module], only: Sequence[str], frozen: Sequence[str]) -> None:
    setting = "only_train_params_name_list" if only else "freeze_params_name_list"
    mine = [(name, parameter) for name, parameter in unsharded_names(chunks) if parameter.requires_grad]
    everything = _over_ranks([name for name, _ in mine])
    _refuse_unmatched(only or frozen, everything, setting)
    chosen = {name for name in everything if _finds(only or frozen, name)}
    trained = chosen if only else everything - chosen
    if not trained:
        raise ConfigError(f"{setting} = {list(only or frozen)} leaves none of {len(everything)} parameters to train")
    for name, parameter in mine:
        parameter.requires_grad_(name in trained)


def unsharded_names(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Iterate over the parameters, each with its name in the whole model."""
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
    """Return ``name``, or the child's number in the whole model if it is a layer or an expert."""
    if not name.isdigit():
        return name
    if place[-1:] == ("local_experts",):
        from megatron.core import parallel_state

        return str(int(name) + len(of) * parallel_state.get_expert_model_parallel_rank())
    return str(getattr(child, "layer_number", int(name) + 1) - 1)


def _require_input_gradients(chunk: Any) -> None:
    """Make the embedding's output need a gradient if later weights would otherwise get none.

    Megatron's checkpointed layers have gradients only if their input needs one (tensor_parallel/random.py:496). Ranks
    that share experts exchange gradients in every layer, even if the experts of only one rank train. Later pipeline
    stages receive inputs that need a gradient.
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
    names_of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names_of_ranks, names)
    return set().union(*names_of_ranks)


def _finds(expressions: Sequence[str], name: str) -> bool:
    return any(re.search(expression, name) for expression in expressions)


def _refuse_unmatched(expressions: Sequence[str], names: set[str], setting: str) -> None:
    for expression in expressions:
        if not any(_finds([expression], name) for name in names):
            near = difflib.get_close_matches(expression, sorted(names), n=3, cutoff=0.3) or sorted(names)[:3]
            raise ConfigError(
                f"{setting}: {expression!r} finds none of the model's {len(names)} parameters; near it are "
                f"{', '.join(near)}. Accepted is a regular expression that finds a part of a name."
            )
