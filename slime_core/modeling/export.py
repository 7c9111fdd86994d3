"""Gathers a model's weights over tensor, expert and pipeline ranks, under Hugging Face names.

mbridge 0.15.1 does the same (core/bridge.py, ``export_weights``) with three collectives of Python objects for each
parameter and one gather for each expert. Here every rank learns once which tensors the other pipeline ranks have, and
the experts that a rank holds of a layer are gathered together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from slime_core.modeling.memory import GATHERED_BYTES
from slime_core.modeling.patches import accelerator

if TYPE_CHECKING:
    from mbridge.core.bridge import Bridge

__all__ = ["WeightGatherer"]

EXPERT = re.compile(r"(.*\.mlp\.experts\.linear_fc\d\.weight)(\d+)")
"""mbridge's name of an expert's matrix: that of the stack, and the expert's number."""


class View(Protocol):
    """A chunk with mbridge's names; see :class:`slime_core.modeling.spec.NamedForMBridge`."""

    def state_dict(self) -> dict[str, torch.Tensor]: ...

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]: ...


@dataclass(frozen=True, slots=True)
class Share:
    """Description, for all ranks, of a tensor of which one pipeline rank holds a share.

    Arguments:
        stage: the pipeline rank.
        chunk: the rank's chunk that has the tensor.
        name: of the tensor in its chunk.
        whole_name: the name in the whole model, except that an expert's number is that among the experts of its rank.
        shape, dtype: of the share.
        is_split: whether tensor-parallel ranks hold different parts.
        dim: the dimension that is split, if it is known.
    """

    stage: int
    chunk: int
    name: str
    whole_name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_split: bool
    dim: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of the share."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        """Return memory that receives the share."""
        return torch.empty(self.shape, dtype=self.dtype, device=accelerator())


class WeightGatherer:
    """Gathers the weights of one model, as often as needed.

    Arguments:
        bridge: of mbridge, which names, merges and converts the weights.
    """

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._ranks = bridge.mpu
        self._local: list[Share] = []
        self._everywhere: list[Share] = []

    def gather(self, views: Sequence[View]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield Hugging Face names and full weights, in the same order on all ranks. Collective.

        Ranks exchange Python objects only if there are several pipeline ranks, and only until the shapes are known.
        """
        tensors = [dict(_tensors(view)) for view in views]
        local = [share for number, view in enumerate(views) for share in self._shares(number, view, tensors[number])]
        if local != self._local:
            self._everywhere = self._of_all_stages(local)
            self._local = local
        for shares in self._grouped(self._everywhere):
            of_stage = [
                tensors[share.chunk][share.name] if share.stage == self._ranks.pp_rank else None for share in shares
            ]
            if EXPERT.fullmatch(shares[0].whole_name):
                yield from self._experts(shares, of_stage)
            else:
                yield from self._weights(shares[0], of_stage[0])

    def _shares(self, chunk: int, view: View, tensors: dict[str, torch.Tensor]) -> Iterator[Share]:
        whole_names = self._bridge._weight_name_mapping_mcore_local_to_global(view, consider_ep=False)
        for name, tensor in tensors.items():
            yield Share(
                stage=self._ranks.pp_rank,
                chunk=chunk,
                name=name,
                whole_name=whole_names[name],
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                is_split=bool(getattr(tensor, "tensor_model_parallel", False)),
                dim=getattr(tensor, "partition_dim", None),
            )

    def _of_all_stages(self, local: list[Share]) -> list[Share]:
        if self._ranks.pp_size == 1:
            return local
        of_stages: list[Any] = [None] * self._ranks.pp_size
        dist.all_gather_object(of_stages, local, group=self._ranks.pp_group)
        return [share for of_stage in of_stages for share in of_stage]

    def _grouped(self, shares: Sequence[Share]) -> Iterator[list[Share]]:
        """Yield single tensors, and the experts of a layer together as far as they fit :data:`GATHERED_BYTES`."""
        stacks: dict[object, list[Share]] = {}
        for share in shares:
            expert = EXPERT.fullmatch(share.whole_name)
            name = expert[1] if expert else share.whole_name
            stacks.setdefault((share.stage, share.chunk, name, share.shape, share.dtype), []).append(share)
        for stack in stacks.values():
            nbytes = stack[0].nbytes * self._ranks.ep_size * self._ranks.etp_size
            number = max(1, GATHERED_BYTES // max(1, nbytes))
            for start in range(0, len(stack), number):
                yield stack[start : start + number]

    def _weights(self, share: Share, tensor: torch.Tensor | None) -> Iterator[tuple[str, torch.Tensor]]:
        weight = self._from_stage(share, tensor if tensor is not None else share.empty())
        if share.is_split and self._ranks.tp_size > 1:
            parts = _all_gather(weight, self._ranks.tp_group, self._ranks.tp_size)
            weight = self._merged(share, share.whole_name, list(parts))
        yield from self._named(share.whole_name, weight)

    def _experts(
        self, shares: Sequence[Share], tensors: Sequence[torch.Tensor | None]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        ranks = self._ranks
        held = [tensor if tensor is not None else share.empty() for tensor, share in zip(tensors, shares, strict=True)]
        stack = self._from_stage(shares[0], torch.stack(held))
        of_all = _all_gather(_all_gather(stack, ranks.ep_group, ranks.ep_size), ranks.etp_group, ranks.etp_size)
        for rank in range(ranks.ep_size):
            for place, share in enumerate(shares):
                expert = EXPERT.fullmatch(share.whole_name)
                assert expert is not None
                number = int(expert[2])
                if ranks.ep_size > 1:
                    number += rank * (self._bridge.config.num_moe_experts // ranks.ep_size)
                name = f"{expert[1]}{number}"
                parts = list(of_all[:, rank, place])
                yield from self._named(name, parts[0] if len(parts) == 1 else self._merged(share, name, parts))

    def _from_stage(self, share: Share, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor of the stage that has it; on other stages ``tensor`` receives it."""
        tensor = tensor.detach().to(accelerator()).contiguous()
        if self._ranks.pp_size > 1:
            source = dist.get_global_rank(self._ranks.pp_group, share.stage)
            dist.broadcast(tensor, src=source, group=self._ranks.pp_group)
        return tensor

    def _merged(self, share: Share, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        like: Any = torch.empty(0)  # mbridge reads Megatron's attributes from it
        like.tensor_model_parallel, like.partition_dim = share.is_split, share.dim
        merged: torch.Tensor = self._bridge._weight_merge_across_tp(name, parts, like)
        return merged

    def _named(self, name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        names, weights = self._bridge._weight_to_hf_format(name, weight)
        yield from zip(names, weights, strict=True)


def _tensors(view: View) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the chunk's parameters and, after them, the buffers that are weights: the biases of routers."""
    parameters = dict(view.named_parameters())
    yield from parameters.items()
    yield from (
        (name, tensor) for name, tensor in view.state_dict().items() if "expert_bias" in name and name not in parameters
    )


def _all_gather(tensor: torch.Tensor, group: Any, size: int) -> torch.Tensor:
    """Return the tensors of all ranks of ``group``, [ranks, ...]."""
    if size == 1:
        return tensor.unsqueeze(0)
    gathered = tensor.new_empty(size * tensor.shape[0], *tensor.shape[1:])
    dist.all_gather_into_tensor(gathered, tensor, group=group)
    return gathered.view(size, *tensor.shape)
