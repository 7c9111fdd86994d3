"""Qwen3 dense models (Qwen3 Technical Report, 2505.09388): grouped-query attention, normed queries and keys, no biases.

Left out: YaRN positions beyond the trained length and the sliding windows that the config allows; both are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slime_core.errors import ConfigError
from slime_core.learner.spec import MBridgeSpec, ParallelLayout

__all__ = ["Qwen3"]


class Qwen3(MBridgeSpec):
    """Builds Qwen3 dense models and maps their weights both ways."""

    def build(
        self,
        hf_config: Any,
        *,
        dtype: torch.dtype,
        parallel: ParallelLayout,
        overrides: Mapping[str, Any] | None = None,
    ) -> list[torch.nn.Module]:
        """As :meth:`MBridgeSpec.build`.

        Raises:
            ConfigError: also if the attention has biases, which no released Qwen3 has and mbridge does not map.
        """
        if hf_config.attention_bias:
            raise ConfigError(
                "the qwen3 model asks for biases in its attention (attention_bias); only models without are mapped"
            )
        return super().build(hf_config, dtype=dtype, parallel=parallel, overrides=overrides)
