"""Llama dense models (Llama 2, 2307.09288; SmolLM2, 2502.02737): grouped-query attention, gated SiLU, no biases.

Left out: scaled rotary positions (Llama 3.1 and later, 2407.21783), which :class:`MBridgeSpec` refuses, and biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slime_core.errors import ConfigError
from slime_core.learner.spec import MBridgeSpec, ParallelLayout

__all__ = ["Llama"]


class Llama(MBridgeSpec):
    """Builds Llama dense models and maps their weights both ways."""

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
            ConfigError: also if the attention or the MLP has biases: mbridge maps some of them and loses the others.
        """
        for name, place in (("attention_bias", "attention"), ("mlp_bias", "MLP")):
            if getattr(hf_config, name):
                raise ConfigError(
                    f"the llama model asks for biases in its {place} ({name}); only models without are mapped"
                )
        return super().build(hf_config, dtype=dtype, parallel=parallel, overrides=overrides)
