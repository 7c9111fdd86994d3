"""Multi-latent attention (DeepSeek-V2, 2405.04434) over packed rows; imports Megatron.

Left out: context parallelism, and tensor parallelism without sequence parallelism. Both are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from slime_core.errors import ConfigError
from slime_core.modeling.layers import by_position

__all__ = ["PackedLatentAttention"]


class PackedLatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron's multi-latent attention layer, which looks the rotary angles of a packed row up in one call.

    With tensor parallelism, Megatron's local layers lose part of a gradient (multi_latent_attention.py:602-622): every
    head reads the positional part of the keys, a rank has some of the heads, and the gradients are not summed over
    ranks. This layer sums them.

    Raises:
        ConfigError: the layout has context parallelism, or tensor parallelism without sequence parallelism.
    """

    def __init__(self, config: Any, *args: object, **options: object) -> None:
        _refuse_layouts(config)
        super().__init__(config, *args, **options)
        self.rotary_pos_emb: _AnglesByPosition = _AnglesByPosition(self.rotary_pos_emb)
        if self.config.tensor_model_parallel_size > 1:
            self.linear_kv_down_proj.register_forward_hook(self._gather_latent)

    def _gather_latent(
        self, _: object, __: object, output: tuple[torch.Tensor, torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return compressed keys and values with positional keys, in full width, for this rank's tokens.

        So they look like the output of a layer without splits: upstream then gathers the positional part over tokens,
        which sums its gradients.
        """
        combined: torch.Tensor = gather_from_tensor_model_parallel_region(output[0])
        return scatter_to_sequence_parallel_region(combined), output[1]

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **options: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run Megatron's forward, with positions for a packed row."""
        self.rotary_pos_emb.positions_T = None
        if packed_seq_params is not None:
            positions_T, packed_seq_params = by_position(packed_seq_params, hidden_states, self.config)
            self.rotary_pos_emb.positions_T = positions_T
        output: tuple[torch.Tensor, torch.Tensor | None] = super().forward(
            hidden_states, attention_mask, packed_seq_params=packed_seq_params, **options
        )
        return output


class _AnglesByPosition(torch.nn.Module):
    """Megatron's table of rotary angles; with ``positions_T`` it returns one entry a token."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table: Any = table
        self.positions_T: torch.Tensor | None = None

    def get_rotary_seq_len(self, *args: object) -> object:
        return self.table.get_rotary_seq_len(*args)

    def forward(self, length: int, **options: object) -> object:
        """Return angles [length or t, 1, 1, size]; with YaRN also their scale."""
        angles = self.table(length, **options)
        if self.positions_T is None:
            return angles
        if isinstance(angles, tuple):
            return angles[0].index_select(0, self.positions_T), angles[1]
        return angles.index_select(0, self.positions_T)


def _refuse_layouts(config: Any) -> None:
    if config.context_parallel_size > 1:
        raise ConfigError(
            f"context parallel size {config.context_parallel_size} with multi-latent attention, for which only "
            "1 is built; use tensor or pipeline parallelism for long sequences"
        )
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        # Upstream sums a gradient twice (distributed/finalize_model_grads.py:355, q_layernorm).
        raise ConfigError(
            f"tensor parallel size {config.tensor_model_parallel_size} with multi-latent attention trains only with "
            "sequence parallelism; add --sequence-parallel"
        )
