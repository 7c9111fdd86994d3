"""The linear layers of a rank's chunks, with the names of their Hugging Face modules.

Megatron fuses query, key and value, and gate and up; each of these Hugging Face modules has a separate adapter, as in
peft. Left out: routers, the embedding, the output layer, and layers that gather their output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from slime_core.errors import ConfigError
from slime_core.modeling import MBridgeSpec
from slime_lora.merge import WEIGHT
from slime_lora.options import ALL_LINEAR

__all__ = ["Target", "choose", "find_targets"]

FUSED_GATE_UP = "gate_up_proj"
"""Of Glm4, whose ranks hold a range of gate and the same range of up."""
QUERY_KEY_VALUE, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True)
class Target:
    """A linear layer of Megatron.

    Arguments:
        linear: column-parallel or row-parallel.
        modules: Hugging Face modules whose rows its weight holds, such as ``model.layers.0.self_attn.q_proj``.
        rows: output rows of each module on this rank.
    """

    linear: Any
    modules: tuple[str, ...]
    rows: tuple[int, ...]

    @property
    def is_column_parallel(self) -> bool:
        """Whether tensor-parallel ranks hold parts of the output, rather than of the input."""
        return isinstance(self.linear, ColumnParallelLinear)

    def join(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Arrange the outputs of the modules, each [..., rows], as the linear layer does.

        Megatron orders query, key and value by groups of heads (transformer/attention.py, ``linear_qkv``).
        """
        if len(outputs) < len(QUERY_KEY_VALUE):
            return torch.cat(list(outputs), dim=-1)
        groups = self.linear.config.num_query_groups // self.linear.tp_group.size()
        by_group = [output.unflatten(-1, (groups, -1)) for output in outputs]
        return torch.cat(by_group, dim=-1).flatten(-2)


def find_targets(spec: object, chunks: Sequence[torch.nn.Module]) -> list[Target]:
    """Return the linear layers that can have adapters, in the order of the chunks.

    Raises:
        ConfigError: the model spec does not map single weights.
    """
    if not isinstance(spec, MBridgeSpec):
        raise ConfigError(
            f"plugin lora: model spec {type(spec).__qualname__} does not say which Hugging Face weights a parameter is "
            "made of; accepted: a subclass of slime_core.modeling.MBridgeSpec"
        )
    names = {id(weight.tensor): weight.names for weight in spec.mapped(list(chunks))}
    return [target for chunk in chunks for target in _targets_of(chunk, names)]


def _targets_of(chunk: torch.nn.Module, names: dict[int, tuple[str, ...]]) -> Iterator[Target]:
    head = getattr(chunk, "output_layer", None)
    for linear in chunk.modules():
        if not isinstance(linear, ColumnParallelLinear | RowParallelLinear) or linear is head:
            continue
        modules = tuple(name.removesuffix(WEIGHT) for name in names.get(id(linear.weight), ()))
        rows = _rows(linear, modules)
        if rows:
            yield Target(linear, modules, rows)


def _rows(linear: Any, modules: tuple[str, ...]) -> tuple[int, ...]:
    """Return the output rows of each module on this rank; empty if their arrangement is unknown."""
    size = linear.weight.size(0)
    last = tuple(module.rpartition(".")[2] for module in modules)
    if last == (FUSED_GATE_UP,) and linear.tp_group.size() > 1:
        raise ConfigError(
            f"plugin lora: a rank's rows of {modules[0]} are no range of its rows, so it has no adapter with tensor "
            "parallelism; leave --tensor-model-parallel-size out"
        )
    if len(modules) == 1 and not getattr(linear, "gather_output", False):
        return (size,)
    if last == GATE_UP:
        return size // 2, size // 2
    config = linear.config
    if last == QUERY_KEY_VALUE and config.num_query_groups % linear.tp_group.size() == 0:
        keys = config.kv_channels * config.num_query_groups // linear.tp_group.size()
        queries = config.kv_channels * config.num_attention_heads // linear.tp_group.size()
        return (queries, keys, keys) if queries + 2 * keys == size else ()
    return ()


def choose(names: Sequence[str], everything: set[str]) -> set[str]:
    """Return the modules of ``everything`` that ``--lora-target-modules`` selects.

    Arguments:
        names: last parts of module names, or :data:`~slime_lora.options.ALL_LINEAR`.
        everything: modules of all ranks.

    Raises:
        ConfigError: a name selects no module; lists the names that do.
    """
    chosen: set[str] = set()
    for name in names:
        matches = {module for module in everything if name == ALL_LINEAR or f".{module}".endswith(f".{name}")}
        if not matches:
            last = ", ".join(sorted({module.rpartition(".")[2] for module in everything}))
            raise ConfigError(
                f"--lora-target-modules {name}: the model has no such linear layer; it has {last or 'none'}"
            )
        chosen |= matches
    return chosen
