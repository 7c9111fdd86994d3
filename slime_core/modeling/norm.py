"""The norm of every layer, given through the layer spec."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["RMSNorm"]


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm as a module of Megatron's layer spec; its weight is marked for sequence parallelism.

    Megatron's own wrapper (transformer/torch_norm.py:32) refuses sequence parallelism. All that it takes is the mark,
    by which the gradients of the weight are summed over the tensor-parallel ranks
    (distributed/finalize_model_grads.py:354).

    Arguments:
        config: Megatron's TransformerConfig.
        hidden_size: size of the last dimension.
        eps: added to the mean square.

    Raises:
        ValueError: the config asks for another norm, or for zero-centred weights.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            raise ValueError(
                f"normalization {config.normalization!r} (zero-centred: {config.layernorm_zero_centered_gamma}) was "
                "asked for; only a plain RMSNorm is built here; give another norm through the layer spec"
            )
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
