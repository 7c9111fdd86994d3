"""What samples carry for the model beside tokens, on its way into the model's forward.

    row       of a micro-batch: which columns, and which samples of the shard in which order
    tensors   those of one row, one sample after the other; made when a pass needs them, so that a device never holds
              the images of a whole rollout
    accepted  what the model takes; a shard that carries anything else is refused

Every rank of a tensor-parallel group is handed the same, whole. Of a pipeline's chunks only those are handed them that
embed tokens. Context-parallel ranks hold parts of a row, and nothing says which rows of the inputs belong to these, so
they are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from slime_core.errors import RunError
from slime_core.opaque import Opaque, part

__all__ = ["AcceptedInputs", "RowInputs", "handed"]


@dataclass(frozen=True, slots=True)
class RowInputs:
    """What the samples of a row carry; false where the rollout carries nothing.

    Arguments:
        columns: of the shard.
        members: samples of the shard, in the order in which they stand in the row.
    """

    columns: Mapping[str, Opaque] = field(default_factory=dict)
    members: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.columns)

    def tensors(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        """Name -> [n, ...] in its own dtype: the rows of every sample, one sample after the other."""
        return {name: self._tensor(column).to(device) for name, column in self.columns.items()}

    def _tensor(self, column: Opaque) -> torch.Tensor:
        rows = np.concatenate([part(column, member) for member in self.members])
        held = torch.from_numpy(rows)
        return held if column.dtype == rows.dtype.name else held.view(getattr(torch, column.dtype))


def handed(chunk: Any, inputs: RowInputs, device: torch.device) -> dict[str, torch.Tensor]:
    """Keyword arguments of ``chunk``'s forward: what the row carries, where the chunk embeds tokens.

    Arguments:
        chunk: of a model, as its schedule calls it.
    """
    from megatron.core.utils import get_attr_wrapped_model

    if not inputs or not get_attr_wrapped_model(chunk, "pre_process"):
        return {}
    return inputs.tensors(device)


@dataclass(frozen=True, slots=True)
class AcceptedInputs:
    """What a model can be handed.

    Arguments:
        names: of the keyword arguments that its forward takes.
        builder: the model spec and its plugin, for messages.
        context: ranks that share a row.
    """

    names: Set[str]
    builder: str
    context: int = 1

    def require(self, carried: Set[str]) -> None:
        """Return if the model can be handed what samples carry.

        Arguments:
            carried: the names of it.

        Raises:
            RunError: it cannot.
        """
        foreign = ", ".join(sorted(carried - self.names))
        if foreign:
            takes = f"takes {', '.join(sorted(self.names))}" if self.names else "takes tokens only"
            raise RunError(
                f"the samples carry {foreign} in multimodal_train_inputs, and the model of {self.builder} {takes}; "
                "training would go on without what the engine was shown. Use a model spec whose traits declare them "
                "(ModelSpecTraits.inputs), or leave them out of the samples"
            )
        if carried and self.context > 1:
            raise RunError(
                f"the samples carry {', '.join(sorted(carried))} in multimodal_train_inputs, and context_parallel_size "
                f"= {self.context} gives a rank parts of a row: nothing says which of these belong to its tokens. "
                "Leave --context-parallel-size out"
            )
