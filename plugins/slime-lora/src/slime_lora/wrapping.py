"""Adds adapters to a rank's chunks, gathers them over ranks, and merges them into the weights for the engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.experts import SequentialMLP

from slime_core.errors import ConfigError
from slime_core.provisional import NamedTensors, WrappedModel
from slime_core.types import JsonValue
from slime_lora import folder
from slime_lora.adapters import AdaptedForward, Adapter, Adapters
from slime_lora.merge import WEIGHT, merge
from slime_lora.options import LoraOptions
from slime_lora.targets import Target, choose, find_targets

__all__ = ["LoraModel", "Matrices"]

CHILD = "lora"
"""Name of the adapters in a chunk."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """Both matrices of an adapter, over all ranks: A [rank, in], B [out, rank]."""

    A: torch.Tensor
    B: torch.Tensor


@dataclass(frozen=True, slots=True)
class Held:
    """An adapter as ranks that do not hold it need to know it.

    Arguments:
        stage, expert_rank: pipeline rank and expert-parallel rank that hold it.
        shapes: name of a matrix -> shape of the part on one rank.
        split: name of the matrix that is split -> dimension.
        is_expert: whether it belongs to an expert.
    """

    stage: int
    expert_rank: int
    shapes: Mapping[str, tuple[int, ...]]
    split: Mapping[str, int]
    is_expert: bool


class LoraModel:
    """A rank's frozen chunks with adapters. Collective.

    Arguments:
        spec: the model spec that built the chunks.
        chunks: with the start weights, before Megatron's DDP.
        settings: of the run.
        options: rank, scale and targets of the adapters.

    Raises:
        ConfigError: a target matches nothing, the rank is above a dimension, or the folder to load does not fit.
    """

    def __init__(
        self,
        spec: object,
        chunks: Sequence[torch.nn.Module],
        settings: Mapping[str, JsonValue],
        options: LoraOptions,
    ) -> None:
        self._settings, self._options = settings, options
        by_chunk = [(chunk, find_targets(spec, [chunk])) for chunk in chunks]
        here = {module for _, targets in by_chunk for target in targets for module in target.modules}
        chosen = choose(options.target_modules, set().union(*_of_all_ranks(here)))
        self._adapters: list[Adapters] = []
        for chunk, targets in by_chunk:
            chunk.requires_grad_(False)
            self._adapters.append(self._add(chunk, targets, chosen))
        described = {module: _described(adapter) for module, adapter in self._here().items()}
        self._held: dict[str, Held] = {}
        for held in _of_all_ranks(described):
            self._held |= held
        if options.load is not None:
            self._load(options.load)

    def wrapped(self, export_weights: Callable[[], NamedTensors], *, base: Path) -> WrappedModel:
        """Return what leaves the model.

        Arguments:
            export_weights: returns the weights of the frozen model.
            base: Hugging Face folder of the frozen model.
        """
        return WrappedModel(
            published=partial(self._merged, export_weights),
            saved=self._saved,
            write=partial(folder.write, options=self._options, base=str(base)),
            original=self._original,
            stores=lambda name: name.startswith(f"{CHILD}."),
        )

    def gathered(self) -> Iterator[tuple[str, Matrices]]:
        """Yield every module of the whole model that has an adapter, and the adapter, in the same order on all ranks.

        Collective.
        """
        here = self._here()
        with torch.no_grad():
            for module, held in sorted(self._held.items()):
                parts = {name: self._gather(name, held, here.get(module)) for name in ("A", "B")}
                yield module, Matrices(**parts)

    def _add(self, chunk: torch.nn.Module, targets: Sequence[Target], chosen: set[str]) -> Adapters:
        """Add adapters to the chosen modules of a chunk."""
        new: dict[str, Adapter] = {}
        adapted = [target for target in targets if chosen.intersection(target.modules)]
        for target in adapted:
            for module, rows in zip(target.modules, target.rows, strict=True):
                if module in chosen:
                    self._refuse_large_rank(module, target.linear.weight)
                    rank, seed = self._options.rank, int(str(self._settings.get("seed", 0)))
                    new[module] = Adapter(module, target, rows, rank=rank, seed=seed)
        adapters = Adapters(new)
        chunk.add_module(CHILD, adapters)
        for target in adapted:
            target.linear.forward = AdaptedForward(target, adapters, scale=self._options.scale)
        _call_experts_one_by_one(chunk, {id(target.linear) for target in adapted})
        return adapters

    def _refuse_large_rank(self, module: str, weight: torch.Tensor) -> None:
        smallest = min(weight.shape)
        if self._options.rank > smallest:
            raise ConfigError(
                f"--lora-rank {self._options.rank} is above the dimension {smallest} of {module} on a rank; lower it, "
                "or name other --lora-target-modules"
            )

    def _here(self) -> dict[str, Adapter]:
        return {module: adapter for adapters in self._adapters for module, adapter in adapters.of.items()}

    def _load(self, path: Path) -> None:
        """Copy this rank's parts of the adapters in ``path``."""
        stored = folder.read(path, options=self._options, modules=self._held.keys())
        for module, adapter in self._here().items():
            for name, parameter in adapter.named_parameters():
                full = stored[f"{module}.{name}"]
                if name in adapter.split:
                    full = full.chunk(adapter.group.size(), adapter.split[name])[adapter.group.rank()]
                if full.shape != parameter.shape:
                    raise ConfigError(
                        f"--lora-load {path}: {module} has a matrix {name} of another shape than this model; give an "
                        "adapter of the same base model"
                    )
                with torch.no_grad():
                    parameter.copy_(full)

    def _merged(self, export_weights: Callable[[], NamedTensors]) -> NamedTensors:
        """Yield all weights of the model with their adapters added, in their dtype."""
        adapters = dict(self.gathered())
        with torch.no_grad():
            for name, weight in export_weights():
                matrices = adapters.pop(name.removesuffix(WEIGHT), None)
                if matrices is None:
                    yield name, weight
                else:
                    yield name, merge(weight, matrices.A, matrices.B, scale=self._options.scale)
        assert not adapters, "adapters of modules that were not exported"

    def _saved(self) -> NamedTensors:
        """Yield the matrices with peft's names."""
        for module, matrices in self.gathered():
            yield folder.name_of(module, "A"), matrices.A
            yield folder.name_of(module, "B"), matrices.B

    @contextmanager
    def _original(self) -> Iterator[None]:
        with ExitStack() as stack:
            for adapters in self._adapters:
                stack.enter_context(adapters.off())
            yield

    def _gather(self, name: str, held: Held, adapter: Adapter | None) -> torch.Tensor:
        """Return matrix ``name`` of an adapter on every rank; ``adapter`` is None on ranks that do not hold it."""
        some = next(iter(self._here().values()), None)
        like = torch.empty(0) if some is None else some.A
        part = like.new_empty(held.shapes[name]) if adapter is None else getattr(adapter, name).detach().clone()
        _broadcast(part, parallel_state.get_pipeline_model_parallel_group(), held.stage)
        if held.is_expert:
            _broadcast(part, parallel_state.get_expert_model_parallel_group(), held.expert_rank)
        if name not in held.split:
            return part
        group = (
            parallel_state.get_expert_tensor_parallel_group()
            if held.is_expert
            else parallel_state.get_tensor_model_parallel_group()
        )
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, dim=held.split[name])


def _described(adapter: Adapter) -> Held:
    return Held(
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        expert_rank=parallel_state.get_expert_model_parallel_rank() if adapter.is_expert else 0,
        shapes={name: tuple(parameter.shape) for name, parameter in adapter.named_parameters()},
        split=adapter.split,
        is_expert=adapter.is_expert,
    )


def _call_experts_one_by_one(chunk: torch.nn.Module, adapted: set[int]) -> None:
    """Let mixtures with adapters call each expert, whose linear layers then add their adapters.

    The core multiplies the weights of all experts at once, without these calls.
    """
    for experts in chunk.modules():
        if isinstance(experts, SequentialMLP) and any(id(layer) in adapted for layer in experts.modules()):
            forward: Any = partial(SequentialMLP.forward, experts)
            experts.forward = forward


def _broadcast(tensor: torch.Tensor, group: Any, source: int) -> None:
    if group.size() > 1:
        dist.broadcast(tensor, src=dist.get_global_rank(group, source), group=group)


def _of_all_ranks(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
