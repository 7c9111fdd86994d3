"""What the learner asks of a model spec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slime_core.types import JsonValue

if TYPE_CHECKING:
    import torch

    from slime_core.modeling.layout import ParallelLayout

__all__ = ["ModelSpec"]


class ModelSpec(Protocol):
    """Describes one family of models: builds it in Megatron, and knows its weights by their Hugging Face names.

    ``slime_core.modeling.MBridgeSpec`` is this for every family that mbridge maps.
    """

    def build(
        self,
        config: Mapping[str, JsonValue],
        *,
        dtype: torch.dtype,
        parallel: ParallelLayout,
        overrides: Mapping[str, JsonValue] | None = None,
    ) -> list[torch.nn.Module]:
        """This rank's part of the model, one module a chunk of layers that it holds.

        Arguments:
            config: the object in the checkpoint's ``config.json``, as it stands there; fields may be missing.
            dtype: of the parameters.
            parallel: how the model is cut over ranks; Megatron was initialised with it.
            overrides: fields of Megatron's ``TransformerConfig`` that the run sets.
        """
        ...

    def load_weights(self, chunks: list[torch.nn.Module], folder: Path) -> None:
        """Fill ``chunks`` from the Hugging Face folder; every weight there is used, every parameter here is filled."""
        ...

    def export_weights(self, chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights, whole, under their Hugging Face names, on every rank; the inverse of :meth:`load_weights`.

        Collective: every rank of the learner iterates in step.
        """
        ...
